"""What a drafter's precision and a trimmed head cost in acceptance, and save in time and memory.

    python scripts/compare_precision.py                                   # the shipped drafters
    python scripts/compare_precision.py --draft dspark --variants float float/8192 int8/8192
    python scripts/compare_precision.py --variants float/8192 --ranks corpus.npz

A variant is PRECISION or PRECISION/ROWS: of the drafter's projections, and how many tokens it may
draft, through a head of its own in the same precision ("all": the whole vocabulary). Every variant
decodes the same prompts greedily, one by one, and its tokens are compared with plain decoding's:
in f32 they are the same, whatever is drafted.

Prints a table (acceptance: tokens a round, pooled, the target's own included) and last one JSON
line. Rows of one family share prompts, budget and window, so they compare with each other.
--batched decodes all prompts side by side: the same acceptance sooner, but no times.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, get_args

import jax

from dflash_jax import generate, load_draft
from dflash_jax.checkpoint import shipped_drafts
from dflash_jax.cli import Parser, run_command
from dflash_jax.draft import DFlashDraft
from dflash_jax.kv import DraftKVDtype
from dflash_jax.quant import FLOAT, PRECISIONS
from dflash_jax.ranks import corpus_ranks
from dflash_jax.records import HELDOUT, prompt_ids, read_records
from dflash_jax.targets import takes_trees
from dflash_jax.targets.loading import LoadedTarget, load_target
from dflash_jax.window import DSparkVtPolicy, measured_window

VARIANTS = (FLOAT, *PRECISIONS, "float/16384", "float/8192", "int8/8192", "int8/all")


def parser() -> Parser:
    """The command line's options."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--target", default="smollm2", metavar="smollm2|DIR|FILE.gguf")
    add("--draft", nargs="+", default=shipped_drafts(), metavar="NAME|DIR|FILE.gguf")
    add("--variants", nargs="+", default=VARIANTS, metavar="PRECISION[/ROWS]")
    add("--ranks", metavar="FILE", help="ids, .npy or text; or a corpus, .npz or .jsonl")
    add("--prompts", type=Path, default=HELDOUT, metavar="FILE.jsonl")
    add("--count", type=int, default=8, help="prompts, spread over the file (default: 8)")
    add("--max-new-tokens", type=int, default=64)
    add("--dtype", choices=["float32", "bfloat16"], help="default: f32 on a CPU, bf16 off it")
    add("--draft-kv-dtype", choices=get_args(DraftKVDtype), default="auto", help="of the cache")
    add("--implementation", choices=["auto", "xla", "pallas"], default="auto")
    add(
        "--measured-window",
        action="store_true",
        help="verify as the command does on this device (default: every draft of a full block)",
    )
    add("--batched", action="store_true", help="all prompts side by side, without times")
    add("--json", type=Path, metavar="FILE", help="write the JSON line here too")
    return parser


def split_variant(variant: str, vocab_size: int) -> tuple[str, int | None]:
    """Precision and head rows of a variant's name."""
    precision, slash, rows = variant.partition("/")
    if precision not in (FLOAT, *PRECISIONS) or (slash and rows != "all" and not rows.isdigit()):
        raise ValueError(f"--variants: expected PRECISION or PRECISION/ROWS, found {variant!r}")
    return precision, None if not slash else vocab_size if rows == "all" else int(rows)


def bytes_a_round(draft: DFlashDraft, loaded: LoadedTarget) -> int:
    """Bytes of weights that drafting one block reads: layers and head."""
    head = loaded.target.lm_head if draft.head is None else draft.head.lm_head
    return sum(leaf.nbytes for leaf in jax.tree.leaves((draft.layers, draft.norm, head)))


def decode(loaded: LoadedTarget, draft: DFlashDraft | None, prompts, args) -> dict[str, Any]:
    """Greedy tokens of every prompt, rounds, and milliseconds a round without compilation (None
    where prompts are side by side).
    """
    options: dict[str, Any] = {"implementation": _implementation(args)}
    if draft is not None:
        options |= {"policy": DSparkVtPolicy("fixed"), "draft_kv_dtype": args.draft_kv_dtype}
        if args.measured_window:
            family, platform = draft.config.family, jax.default_backend()
            options |= measured_window(family, platform, takes_trees(loaded.target))
    room = max(map(len, prompts)) + args.max_new_tokens
    options["capacity"] = max(256, 1 << (room - 1).bit_length())
    budget = args.max_new_tokens
    if args.batched:
        runs = generate(loaded.target, draft, prompts, budget, **options)
    else:
        generate(loaded.target, draft, prompts[0], 4, **options)
        runs = [generate(loaded.target, draft, p, budget, **options) for p in prompts]
    rounds = sum(run.rounds for run in runs)
    return {
        "tokens": [run.token_ids for run in runs],
        "rounds": rounds,
        "acceptance": sum(sum(run.acceptance_lengths) for run in runs) / rounds,
        "round_ms": None if args.batched else 1e3 * sum(run.seconds for run in runs) / rounds,
    }


def _implementation(args: argparse.Namespace) -> Any:
    return None if args.implementation == "auto" else args.implementation


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Decode with every drafter in every variant, printing a row each; the report."""
    loaded = load_target(args.target, args.dtype)
    size = loaded.target.vocab_size
    variants = {name: split_variant(name, size) for name in args.variants}
    ranks = args.ranks
    if ranks and Path(ranks).suffix in (".npz", ".jsonl"):
        ranks = corpus_ranks(ranks, loaded.text, size)
    records = list(read_records(args.prompts))
    if not 1 <= args.count <= len(records):
        raise ValueError(f"--count: expected 1..{len(records)}, found {args.count}")
    # Spread over the file, whose kinds of prompt lie side by side.
    chosen = [records[i * len(records) // args.count] for i in range(args.count)]
    prompts = [prompt_ids(record, loaded.text) for record in chosen]
    plain = decode(loaded, None, prompts, args)
    device = jax.devices()[0]
    report: dict[str, Any] = {
        "device": f"{device.platform}: {device.device_kind}",
        "jax": jax.__version__,
        "target": loaded.name,
        "dtype": loaded.target.embedding.dtype.name,
        "prompts": args.count,
        "max_new_tokens": args.max_new_tokens,
        "measured_window": args.measured_window,
        "batched": args.batched,
        "draft_kv_dtype": args.draft_kv_dtype,
        "implementation": args.implementation,
        "ranks": args.ranks or "by id",
        "plain_step_ms": plain["round_ms"],
        "rows": [],
    }
    print(", ".join(f"{k} {v}" for k, v in report.items() if k not in ("rows", "plain_step_ms")))
    print(f"plain: {_cell(plain['round_ms'])} ms a token\n")
    print("| drafter | variant | MB a round | tokens a round | ms a round | tokens/s | same text |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in args.draft:
        for variant, (precision, rows) in variants.items():
            began = time.monotonic()
            draft = load_draft(
                name,
                loaded.target,
                args.dtype,
                precision=precision,
                head_rows=rows,
                ranks=None if rows in (None, size) else ranks,
            )
            row = decode(loaded, draft, prompts, args)
            tokens = row.pop("tokens")
            row["same"] = sum(a == b for a, b in zip(tokens, plain["tokens"], strict=True))
            row |= {"drafter": name, "variant": variant}
            row["megabytes"] = bytes_a_round(draft, loaded) / 1e6
            rate = None if args.batched else 1e3 * row["acceptance"] / row["round_ms"]
            row["tokens_per_second"] = rate
            row["wall_seconds"] = time.monotonic() - began
            report["rows"].append(row)
            print(
                f"| {name} | {variant} | {row['megabytes']:.1f} | {row['acceptance']:.3f} | "
                f"{_cell(row['round_ms'])} | {_cell(rate)} | "
                f"{row['same']} of {len(prompts)} |",
                flush=True,
            )
    return report


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""

    def command() -> int:
        args = parser().parse_args(argv)
        line = json.dumps(measure(args))
        print(line)
        if args.json is not None:
            args.json.write_text(line + "\n", encoding="utf-8")
        return 0

    return run_command("compare_precision.py", command)


if __name__ == "__main__":
    sys.exit(main())
