"""Records of prompts and answers."""

import json

import pytest

from dflash_jax.records import prompt_ids, read_records


def test_a_records_text_may_hold_any_character(tmp_path):
    """Line separators of Unicode are no ends of lines here."""
    text = "one\u2028two\x85three\x0cfour"
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n", newline="")
    assert list(read_records(file)) == [{"prompt": text}]
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"records\.jsonl: expected UTF-8 text, found "):
        list(read_records(file))


@pytest.mark.parametrize("messages", [5, [], [5], [{"content": "x"}]])
def test_messages_are_turns(messages):
    with pytest.raises(ValueError, match="messages: expected turns with a role, found"):
        prompt_ids({"messages": messages}, codec=object())
