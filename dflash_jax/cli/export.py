"""`dflash-jax export`: write a drafter anew: as bf16 for others, quantised, with a smaller head."""

import argparse
from pathlib import Path
from typing import Any

from dflash_jax.checkpoint import load_draft, save_draft
from dflash_jax.quant import FLOAT, PRECISIONS
from dflash_jax.ranks import corpus_ranks
from dflash_jax.targets.loading import load_target


def add(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    export = commands.add_parser(
        "export", help="write a drafter: as bf16 tensors that others read, quantised, or trimmed"
    )
    export.set_defaults(run=run)
    add = export.add_argument
    add("--draft", required=True, metavar="NAME|DIR|FILE.gguf", help="the drafter to write")
    add("--out", required=True, metavar="DIR|FILE.gguf", help="what to write")
    add("--format", choices=("safetensors", "gguf"), help="default: by the name of --out")
    add(
        "--precision",
        choices=(FLOAT, *PRECISIONS),
        default=FLOAT,
        help="of the projections (default: float, which is bf16)",
    )
    add(
        "--head-rows",
        type=int,
        metavar="N",
        help="draft only N tokens, through a head of the drafter's own",
    )
    add("--ranks", metavar="FILE", help="token ids, frequent first: .npy, or one a line")
    add("--corpus", metavar="FILE", help="count them here instead: .npz or .jsonl")
    add("--target", default="smollm2", metavar="smollm2|DIR|FILE.gguf", help="whose head it is")


def run(args: argparse.Namespace) -> int:
    """`dflash-jax export`."""
    if not args.out:
        raise ValueError("--out: expected a directory or a .gguf file, found ''")
    if args.ranks and args.corpus:
        raise ValueError("--ranks: expected without --corpus, found both")
    kind = "gguf" if Path(args.out).suffix == ".gguf" else "safetensors"
    if (args.format or kind) != kind:
        raise ValueError(f"--format {args.format}: expected --out to name one, found {args.out!r}")
    trimmed = args.head_rows is not None or args.ranks or args.corpus
    loaded = load_target(args.target, "bfloat16") if trimmed else None
    target, ranks = loaded and loaded.target, args.ranks
    if args.corpus and loaded is not None:
        ranks = corpus_ranks(args.corpus, loaded.text, loaded.target.vocab_size).tolist()
    draft = load_draft(
        args.draft,
        target,
        "bfloat16",
        precision=args.precision,
        head_rows=args.head_rows,
        ranks=ranks,
    )
    save_draft(draft, args.out)
    precision = "bf16" if args.precision == FLOAT else args.precision
    head = "" if draft.head is None else f", a head of {draft.head.d2t.shape[0]} rows"
    print(f"{args.out}: {draft.config.family} drafter, {precision}{head}, Hugging Face names")
    return 0
