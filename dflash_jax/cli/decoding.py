"""The options of a decoding: what a round drafts and verifies, sampling, stops, room."""

import argparse
import re
from typing import Any, get_args

import jax

from dflash_jax.checkpoint import shipped_drafts
from dflash_jax.config import resolve_harvest
from dflash_jax.draft import DFlashDraft
from dflash_jax.kv import DraftKVDtype
from dflash_jax.sampling import SamplingParams
from dflash_jax.targets import takes_trees
from dflash_jax.targets.loading import LoadedTarget
from dflash_jax.window import (
    DSparkVtPolicy,
    PolicyKind,
    default_widths,
    measured_window,
    resolve_policy,
)

SAMPLING = {
    "top_k": (int, "keep the k likeliest tokens (0: off)"),
    "top_p": (float, "keep the likeliest tokens up to this probability (1: off)"),
    "min_p": (float, "drop tokens below this share of the likeliest one's probability (0: off)"),
    "repeat_penalty": (float, "divide the logits of tokens seen before (1: off)"),
    "frequency_penalty": (float, "subtract this per occurrence (0: off)"),
    "presence_penalty": (float, "subtract this from tokens seen before (0: off)"),
    "seed": (int, "of the random numbers (0)"),
}
TOKEN_ID = re.compile("-?[0-9]{1,18}")


def add_decoding(parser: Any, several: bool = False) -> None:
    """Add the options of rounds, sampling, stops and room.

    several: block sizes, verify widths and policies are lists, every combination of which runs.
    """
    _add_round(parser, {"nargs": "+"} if several else {})
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default)")
    for name, (kind, what) in SAMPLING.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, metavar="X", help=what)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TOKEN",
        help="one more stop token, as text or id; may be repeated",
    )
    add_draft_kv(parser)
    parser.add_argument("--capacity", type=int, metavar="ROWS", help="context rows to allocate")
    parser.add_argument("--chunk", type=int, metavar="ROWS", help="rows of a prompt read at once")


def add_draft_kv(parser: Any) -> None:
    """Add --draft-kv-dtype."""
    parser.add_argument(
        "--draft-kv-dtype",
        choices=get_args(DraftKVDtype),
        help="of the drafter's cache: int8 is a quarter of f32, half of bf16 (default: auto, the "
        "drafter's own floats)",
    )


def draft_kv_options(args: argparse.Namespace, draft: DFlashDraft | None) -> dict[str, Any]:
    """The `SpecSession` option of --draft-kv-dtype, where it is given."""
    if args.draft_kv_dtype is None:
        return {}
    if draft is None:
        raise ValueError("--draft-kv-dtype: expected a drafter to apply it to, found --draft none")
    return {"draft_kv_dtype": args.draft_kv_dtype}


def _add_round(parser: Any, many: dict[str, Any]) -> None:
    parser.add_argument("--block-size", type=int, metavar="B", help="rows drafted a round", **many)
    parser.add_argument(
        "--verify-width",
        type=int,
        metavar="W",
        help="rows verified a round, anchor included",
        **many,
    )
    parser.add_argument(
        "--tree",
        action=argparse.BooleanOptionalAction,
        help="verify a block's likeliest chain and leaves off it, as a draft tree of "
        "--verify-width nodes (default: with the shipped drafters, where no other option of a "
        "round is given)",
    )
    parser.add_argument(
        "--window-policy",
        choices=get_args(PolicyKind),
        help="how wide each round verifies (default: the family's own; where no option of a round "
        "is given, the shipped drafters use what was measured fastest on this kind of device)",
        **many,
    )
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        metavar="W",
        help="verify widths to compile for the policy to choose from (default: the widest; several "
        "on a CPU, where every row costs, and for the policy cost, which measures their costs)",
    )
    parser.add_argument("--tau", type=float, help="threshold of the confidence policies (0.5)")
    parser.add_argument("--harvest", metavar="dflash|dspark", help="which draft rows are proposals")


def add_template(parser: Any) -> None:
    """Add what the chat template is told."""
    parser.add_argument("--no-chat", action="store_true", help="do not apply the chat template")
    parser.add_argument(
        "--template-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the chat template (enable_thinking=false); may be repeated",
    )


def is_token_id(text: str) -> bool:
    """Whether a text is written as a token id is."""
    return TOKEN_ID.fullmatch(text) is not None


def cut(text: str, most: int = 60) -> str:
    """A text in quotes, cut where it would fill the screen."""
    return repr(text if len(text) <= most else text[:most] + "...")


def session_options(
    args: argparse.Namespace, loaded: LoadedTarget, draft: DFlashDraft | None
) -> dict[str, Any]:
    """The arguments' `SpecSession` options."""
    options = {
        "stop_token_ids": _stops(args, loaded),
        "capacity": args.capacity,
        "chunk": args.chunk,
        "sampling": _sampling(args),
        **draft_kv_options(args, draft),
    }
    if args.tau is not None and args.window_policy not in ("confidence", "confidence-slot"):
        raise ValueError(
            f"--tau: expected --window-policy confidence or confidence-slot, "
            f"found {args.window_policy or 'none'}"
        )
    drafting = {
        "block_size": args.block_size,
        "verify_width": args.verify_width,
        "harvest": args.harvest,
        "window_policy": args.window_policy,
        "widths": args.widths,
    }
    if draft is not None:
        resolve_harvest(draft.config, args.harvest)
        if all(value is None for value in drafting.values()) and _is_shipped(args.draft):
            trees = takes_trees(loaded.target) if args.tree is None else args.tree
            return options | measured_window(draft.config.family, jax.default_backend(), trees)
        drafting["tree"] = bool(args.tree)
        kind = drafting.pop("window_policy") or ("fixed" if args.tree else None)
        tau = {} if args.tau is None else {"tau": args.tau}
        policy = resolve_policy(
            DSparkVtPolicy(kind, **tau) if kind else None,
            is_dspark=draft.config.family == "dspark",
            has_confidence=draft.confidence is not None,
        )
        if args.widths is None and not args.tree:
            block, harvest = args.block_size or draft.config.block_size, drafting["harvest"]
            whole = resolve_harvest(draft.config, harvest).drafts(block) + 1
            rows_cost = jax.default_backend() == "cpu"
            drafting["widths"] = default_widths(policy, args.verify_width or whole, rows_cost)
        return options | drafting | {"policy": policy}
    drafting["tree"] = args.tree or None
    given = [name for name, value in drafting.items() if value is not None]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise ValueError(f"{flag}: expected a drafter to apply it to, found --draft none")
    return options


def _stops(args: argparse.Namespace, loaded: LoadedTarget) -> list[int]:
    stops, size = [*loaded.target.stop_token_ids], loaded.target.vocab_size
    for token in args.stop:
        known = loaded.text.token_to_id(token) if loaded.text is not None else None
        if known is None:
            known = int(token) if is_token_id(token) else -1
        if not 0 <= known < size:
            raise ValueError(
                "--stop: expected a token of the vocabulary or an id in "
                f"0..{size - 1}, found {cut(token)}"
            )
        stops.append(known)
    return stops


def _sampling(args: argparse.Namespace) -> SamplingParams:
    given = {name: getattr(args, name) for name in ("temperature", *SAMPLING)}
    params = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    if params.greedy:
        # A greedy token is the argmax: these would be accepted and then do nothing.
        idle = [n for n in ("top_k", "top_p", "min_p", "seed") if given[n] is not None]
        if idle:
            flag = "--" + idle[0].replace("_", "-")
            raise ValueError(f"{flag}: expected --temperature above 0, found greedy decoding")
    return params


def _is_shipped(name: str | None) -> bool:
    return name is None or name in shipped_drafts()
