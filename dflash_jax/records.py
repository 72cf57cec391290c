"""Prompts and answers in JSON lines: what records may say, and their token ids."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.keys import LARGEST, decode_json, printable

HELDOUT = Path(__file__).parent / "assets" / "prompts" / "heldout.jsonl"
"""48 prompts of nine kinds that nothing here was trained on."""


class Record(dict[str, Any]):
    """A JSON object of a file; `where`: that file and the line, for error texts."""

    where: str = "data"


def read_records(path: str | Path) -> Iterator[Record]:
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
            record = Record(decode_json(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        record.where = f"{path}:{number}"
        yield record


@contextlib.contextmanager
def naming(record: Mapping[str, Any]) -> Iterator[None]:
    """A ValueError raised inside names the record's file and line."""
    try:
        yield
    except ValueError as error:
        where = record.where if isinstance(record, Record) else Record.where
        raise ValueError(f"{where}: {error}") from None


def prompt_ids(record: Mapping[str, Any], codec: Any, **template_kwargs: Any) -> list[int]:
    """Token ids of a record's prompt: `prompt_ids`, `messages` or `prompt` (a user's message).

    template_kwargs: for the chat template, see `text.TextCodec.render_chat`. ValueError naming the
    record and what in it is no prompt.
    """
    with naming(record):
        if "prompt_ids" in record:
            return _ids(record, "prompt_ids")
        if not {"messages", "prompt"} & record.keys():
            found = printable(sorted(record))
            raise ValueError(f"expected prompt_ids, messages or prompt, found {found}")
        if codec is None:
            raise ValueError("expected prompt_ids (this target has no tokenizer), found text")
        if "messages" in record:
            turns = _turns(record)
            turns = turns[:-1] if turns[-1]["role"] == "assistant" else turns
        else:
            turns = [{"role": "user", "content": _text(record, "prompt")}]
        return codec.encode_chat(turns, **template_kwargs)


def answer_ids(record: Mapping[str, Any], codec: Any, end: Sequence[int]) -> list[int]:
    """Token ids of a record's answer, `end` behind a text; [] where it has none.

    ValueError naming the record and what in it is no answer.
    """
    with naming(record):
        if "answer_ids" in record:
            return _ids(record, "answer_ids")
        text = None if record.get("answer") is None else _text(record, "answer")
        if text is None and "messages" in record:
            last = _turns(record)[-1]
            text = _text(last, "content") if last["role"] == "assistant" else None
        if text is None:
            return []
        if codec is None:
            raise ValueError("expected answer_ids (this target has no tokenizer), found text")
        return [*codec.encode_plain(text), *end]


def kind_of(record: Mapping[str, Any], default: str = "any") -> str:
    """The `kind` that reports are grouped by, `default` where a record has none."""
    with naming(record):
        return _text(record, "kind") if "kind" in record else default


def _ids(record: Mapping[str, Any], name: str) -> list[int]:
    ids = record[name]
    numbers = isinstance(ids, list) and all(type(i) is int and 0 <= i <= LARGEST for i in ids)
    if not numbers:
        raise ValueError(f"{name}: expected a list of token ids, found {ids!r:.60}")
    return ids


def _text(record: Mapping[str, Any], name: str) -> str:
    if not isinstance(record.get(name), str):
        raise ValueError(f"{name}: expected text, found {record.get(name)!r:.60}")
    return record[name]


def _turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The `messages`. A turn without a text would leave a hole in the prompt that nobody sees."""
    turns = record["messages"]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, dict) for t in turns):
        raise ValueError(f"messages: expected turns with a role, found {turns!r:.60}")
    for turn in turns:
        if not isinstance(turn.get("role"), str):
            raise ValueError(f"messages: expected turns with a role, found {turn!r:.60}")
        content = turn.get("content")
        # Beside a text: parts (of templates that take them), or nothing where there is more.
        more = turn.keys() - {"role", "content"}
        if not isinstance(content, str | list) and not (content is None and more):
            raise ValueError(f"messages: expected turns with a content, found {turn!r:.60}")
    return turns
