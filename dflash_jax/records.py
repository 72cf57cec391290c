"""Prompts and answers in JSON lines: what records may say, and their token ids."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HELDOUT = Path(__file__).parent / "assets" / "prompts" / "heldout.jsonl"
"""48 prompts of nine kinds that nothing here was trained on."""


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """JSON objects of a `.jsonl` file; errors name the file and the line."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"data: expected {path}, found nothing")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, found {error.reason}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: expected an object, found {record!r:.40}")
        yield record


def prompt_ids(record: dict[str, Any], codec: Any, **template_kwargs: Any) -> list[int]:
    """Token ids of a record's prompt: `prompt_ids`, `messages` or `prompt` (a user's message).

    template_kwargs: for the chat template, see `text.TextCodec.render_chat`.
    """
    if "prompt_ids" in record:
        return _ids(record, "prompt_ids")
    if not {"messages", "prompt"} & record.keys():
        raise ValueError(f"data: expected prompt_ids, messages or prompt, found {sorted(record)}")
    if codec is None:
        raise ValueError("data: expected prompt_ids (this target has no tokenizer), found text")
    if "messages" in record:
        turns = _turns(record)
        turns = turns[:-1] if turns[-1]["role"] == "assistant" else turns
    else:
        turns = [{"role": "user", "content": _text(record, "prompt")}]
    return codec.encode_chat(turns, **template_kwargs)


def answer_ids(record: dict[str, Any], codec: Any, end: Sequence[int]) -> list[int]:
    """Token ids of a record's answer, `end` behind a text; [] where it has none."""
    if "answer_ids" in record:
        return _ids(record, "answer_ids")
    text = None if record.get("answer") is None else _text(record, "answer")
    if text is None and "messages" in record:
        last = _turns(record)[-1]
        text = _text(last, "content") if last["role"] == "assistant" else None
    if text is None:
        return []
    if codec is None:
        raise ValueError("data: expected answer_ids (this target has no tokenizer), found text")
    return [*codec.tokenizer.encode(text, add_special_tokens=False).ids, *end]


def _ids(record: dict[str, Any], name: str) -> list[int]:
    ids = record[name]
    numbers = isinstance(ids, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in ids)
    if not numbers:
        raise ValueError(f"data: {name}: expected a list of token ids, found {ids!r:.60}")
    return ids


def _text(record: dict[str, Any], name: str) -> str:
    if not isinstance(record.get(name), str):
        raise ValueError(f"data: {name}: expected text, found {record.get(name)!r:.60}")
    return record[name]


def _turns(record: dict[str, Any]) -> list[dict[str, Any]]:
    turns = record["messages"]
    valid = isinstance(turns, list) and all(isinstance(t, dict) and "role" in t for t in turns)
    if not valid or not turns:
        raise ValueError(f"data: messages: expected turns with a role, found {turns!r:.60}")
    return turns
