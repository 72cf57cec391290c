"""`dflash-jax generate --prompts FILE`: many prompts side by side, JSON lines in and out."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_jax.batch import Request, serve
from dflash_jax.draft import DFlashDraft
from dflash_jax.keys import printable
from dflash_jax.options import budget_of, token_ids_of
from dflash_jax.records import naming, prompt_ids, read_records
from dflash_jax.results import Generation
from dflash_jax.sampling import RANGES, SamplingParams
from dflash_jax.targets.loading import LoadedTarget

PROMPT_KEYS = ("prompt", "messages", "prompt_ids")
SLOTS = 8
ALONE = ("compare", "stream", "ids", "json", "chunk")
"""Options of one prompt, which have no meaning for a file."""


def check_arguments(args: argparse.Namespace) -> None:
    """ValueError unless there is either one prompt or a file of them, with what suits it."""
    if args.prompts is None:
        if args.prompt is None:
            raise ValueError("PROMPT: expected a prompt or --prompts FILE, found neither")
        for name in ("batch", "data"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name}: expected with --prompts FILE, found one prompt")
        return
    if args.prompt is not None:
        raise ValueError("--prompts: expected no PROMPT beside it, found one")
    for name in ALONE:
        if getattr(args, name):
            raise ValueError(f"--{name}: expected one prompt, found --prompts")


def template_args(args: argparse.Namespace, loaded: LoadedTarget) -> dict[str, Any]:
    """The --template-arg options: JSON values where they are JSON, else text.

    ValueError for one that this target's chat template does not read, which would do nothing.
    """
    given = {}
    for option in args.template_arg:
        name, equals, value = option.partition("=")
        if not (name and equals):
            raise ValueError(f"--template-arg: expected NAME=VALUE, found {option!r}")
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
    if given and (args.no_chat or args.ids or loaded.text is None):
        raise ValueError("--template-arg: expected a chat template to pass it to, found none")
    known = loaded.text.template_arguments - {"messages"} if given and loaded.text else set()
    unread = sorted(given.keys() - known)
    if unread:
        names = ", ".join(sorted(known)) or "none"
        raise ValueError(
            f"--template-arg: expected what the chat template reads ({names}), found {unread[0]}"
        )
    return given


def run(
    args: argparse.Namespace,
    loaded: LoadedTarget,
    draft: DFlashDraft | None,
    options: dict[str, Any],
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> int:
    """Answer every prompt of the file; a line each, as they finish."""
    stops, sampling = options.pop("stop_token_ids"), options.pop("sampling")
    del options["chunk"]
    if options["capacity"] is None:
        del options["capacity"]
    requests = [
        request_of(record, loaded, args, stops, sampling) for record in read_records(args.prompts)
    ]
    if not requests:
        raise ValueError(f"{args.prompts}: expected prompts, found none")
    slots = SLOTS if args.batch is None else args.batch
    for number, result in serve(loaded.target, draft, requests, slots, **options):
        say(json.dumps(line_of(number, result, loaded)))
    return 0


def request_of(
    record: Mapping[str, Any],
    loaded: LoadedTarget,
    args: argparse.Namespace,
    stops: list[int],
    sampling: SamplingParams,
) -> Request:
    """A line's request: `prompt`, `messages` or `prompt_ids`; what else it says goes before the
    command's own options. ValueError, naming file and line, for a key that means nothing here.
    """
    template = template_args(args, loaded)
    fields = {key: value for key, value in record.items() if key in RANGES}
    with naming(record):
        check_keys(record, (*PROMPT_KEYS, "kind", "max_new_tokens", *RANGES))
        budget = budget_of(record.get("max_new_tokens", args.max_new_tokens))
        sampling = dataclasses.replace(sampling, **fields)
    return Request(ids_of(record, loaded, args, template), budget, sampling, stops)


def check_keys(record: Mapping[str, Any], known: Sequence[str]) -> None:
    """ValueError for a key that means nothing here."""
    extra = sorted(record.keys() - {*known})
    if extra:
        raise ValueError(f"expected keys of {', '.join(known)}, found {printable(extra)}")


def ids_of(
    record: Mapping[str, Any],
    loaded: LoadedTarget,
    args: argparse.Namespace,
    template: dict[str, Any],
) -> list[int]:
    """Token ids of a line's prompt; ValueError naming file and line where they are no prompt.

    template: of `template_args`; --no-chat leaves it out where the line has a `prompt`.
    """
    with naming(record):
        check_prompt(record, args)
    text, codec = record.get("prompt"), loaded.text
    if args.no_chat and isinstance(text, str) and codec is not None:
        with naming(record):
            ids = codec.encode(text)
    else:
        ids = prompt_ids(record, codec, **template)
    with naming(record):
        ids = token_ids_of("prompt", ids, loaded.target.vocab_size)
        if not ids:
            raise ValueError("prompt: expected at least one token, found none")
    return ids


def check_prompt(record: Mapping[str, Any], args: argparse.Namespace) -> None:
    """ValueError for several prompts in one record, and for messages without a template."""
    found = [key for key in PROMPT_KEYS if key in record]
    if len(found) > 1:
        raise ValueError(f"expected one of {', '.join(PROMPT_KEYS)}, found {', '.join(found)}")
    if args.no_chat and found == ["messages"]:
        raise ValueError("expected prompt or prompt_ids (--no-chat), found messages")


def line_of(number: int, result: Generation, loaded: LoadedTarget) -> dict[str, Any]:
    """What is printed of one answer; `request` counts the file's prompts from 0."""
    return {
        "request": number,
        "text": None if loaded.text is None else loaded.text.decode(result.token_ids),
        "token_ids": result.token_ids,
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "rounds": result.rounds,
        "drafted": result.drafted,
        "accepted": result.accepted,
        "mean_acceptance_length": result.mean_acceptance_length,
        "prefill_seconds": result.prefill_seconds,
        "seconds": result.seconds,
    }
