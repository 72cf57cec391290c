"""The options that name a target and a drafter, and what they load."""

import argparse
from typing import Any

from jax.sharding import Mesh

from dflash_jax.checkpoint import draft_directory, load_draft, shipped_drafts, survey_draft
from dflash_jax.draft import DFlashDraft
from dflash_jax.head import draft_ids
from dflash_jax.quant import FLOAT, PRECISIONS
from dflash_jax.targets.dense import DenseTarget
from dflash_jax.targets.loading import DEFAULT_TARGET, LoadedTarget, abstract_target, load_target

DEFAULT_DRAFT = "dspark"
"""The shipped drafter with the longest acceptance: verified as draft trees, the fastest."""


def add_models(parser: Any) -> None:
    """Add --target, --draft, --dtype and what a drafter is loaded as."""
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="smollm2|DIR|FILE.gguf|ORG/NAME",
        help=f"the model that decides every token (default: {DEFAULT_TARGET}); torch:DIR or "
        "torch:ORG/NAME runs it by PyTorch's transformers",
    )
    parser.add_argument(
        "--draft",
        metavar="NAME|DIR|FILE.gguf|none",
        help=f"the drafter: a shipped one ({', '.join(shipped_drafts())}), a directory or file, or "
        f"none to decode plainly (default for {DEFAULT_TARGET}: {DEFAULT_DRAFT})",
    )
    parser.add_argument(
        "--draft-precision",
        choices=(FLOAT, *PRECISIONS),
        help="of the drafter's projections (default: what its config says, else floats)",
    )
    parser.add_argument(
        "--draft-head-rows",
        metavar="N|all",
        help="draft only N tokens, through a head of the drafter's own (all: the whole vocabulary, "
        "in the drafter's precision)",
    )
    parser.add_argument(
        "--ranks",
        metavar="FILE",
        help="which tokens those are: ids, frequent first, .npy or one a line (default: by id)",
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="default: f32 on a CPU, bf16 elsewhere"
    )


def draft_name(args: argparse.Namespace) -> str | None:
    """The drafter asked for, or None to decode plainly."""
    if args.draft is None and args.target != DEFAULT_TARGET:
        raise ValueError(f"--draft: expected a drafter for {args.target}, found none given")
    name = DEFAULT_DRAFT if args.draft is None else args.draft
    if name != "none":
        return name
    for option in ("draft_precision", "draft_head_rows", "ranks"):
        if getattr(args, option) is not None:
            flag = "--" + option.replace("_", "-")
            raise ValueError(f"{flag}: expected a drafter to apply it to, found --draft none")
    return None


def head_rows(args: argparse.Namespace, target: Any) -> int | None:
    """--draft-head-rows as a number of the target's tokens."""
    rows = args.draft_head_rows
    if rows is None or rows == "all":
        return None if rows is None else target.vocab_size
    if not rows.isdecimal() or len(rows) > 9:
        raise ValueError(f"--draft-head-rows: expected a number or all, found {rows!r}")
    return int(rows)


def load_models(
    args: argparse.Namespace, mesh: Mesh | None = None, progress: bool | None = None
) -> tuple[LoadedTarget, DFlashDraft | None]:
    """The target with its tokenizer, and the drafter, over a mesh where one is given.

    progress: see `progress.Progress`.
    """
    loaded = load_target(args.target, args.dtype, mesh=mesh, progress=progress)
    name = draft_name(args)
    if name is None:
        return loaded, None
    draft = load_draft(
        draft_directory(name),
        loaded.target,
        args.dtype,
        precision=args.draft_precision,
        head_rows=head_rows(args, loaded.target),
        ranks=args.ranks,
        progress=progress,
    )
    return loaded, draft


def abstract_models(args: argparse.Namespace) -> tuple[DenseTarget, DFlashDraft | None]:
    """Shapes and dtypes of both: no weights are read."""
    target, name = abstract_target(args.target, args.dtype), draft_name(args)
    if name is None:
        return target, None
    rows = head_rows(args, target)
    if rows is not None or args.ranks is not None:
        rows = len(draft_ids(target, rows, args.ranks))
    found = survey_draft(name, target, args.draft_precision)
    return target, found.abstract(args.dtype, rows)
