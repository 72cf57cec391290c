"""The options that name a target and a drafter, and what they load."""

import argparse
from typing import Any

from dflash_jax.checkpoint import draft_directory, load_draft, shipped_drafts, survey_draft
from dflash_jax.draft import DFlashDraft
from dflash_jax.targets.dense import DenseTarget
from dflash_jax.targets.loading import DEFAULT_TARGET, LoadedTarget, abstract_target, load_target

DEFAULT_DRAFT = "dspark"
"""The shipped drafter with the longest acceptance."""


def add_models(parser: Any) -> None:
    """Add --target, --draft and --dtype."""
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="smollm2|DIR|FILE.gguf|ORG/NAME",
        help=f"the model that decides every token (default: {DEFAULT_TARGET})",
    )
    parser.add_argument(
        "--draft",
        metavar="NAME|DIR|none",
        help=f"the drafter: a shipped one ({', '.join(shipped_drafts())}), a directory, or none to "
        f"decode plainly (default for {DEFAULT_TARGET}: {DEFAULT_DRAFT})",
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="default: f32 on a CPU, bf16 elsewhere"
    )


def draft_name(args: argparse.Namespace) -> str | None:
    """The drafter asked for, or None to decode plainly."""
    if args.draft is None and args.target != DEFAULT_TARGET:
        raise ValueError(f"--draft: expected a drafter for {args.target}, found none given")
    name = DEFAULT_DRAFT if args.draft is None else args.draft
    return None if name == "none" else name


def load_models(args: argparse.Namespace) -> tuple[LoadedTarget, DFlashDraft | None]:
    """The target with its tokenizer, and the drafter."""
    loaded, name = load_target(args.target, args.dtype), draft_name(args)
    if name is None:
        return loaded, None
    return loaded, load_draft(draft_directory(name), loaded.target, args.dtype)


def abstract_models(args: argparse.Namespace) -> tuple[DenseTarget, DFlashDraft | None]:
    """Shapes and dtypes of both: no weights are read."""
    target, name = abstract_target(args.target, args.dtype), draft_name(args)
    return target, None if name is None else survey_draft(name, target).abstract(args.dtype)
