"""Train a drafter for a target on the target's own text. One command, from nothing:

    python scripts/train_drafter.py --target smollm2 --out runs/smollm2 --steps 16000

The target samples conversations (templated prompts, prompts it invents itself, plain text), the
drafter learns from the target's hidden rows while they are computed, and is then measured on the
held-out prompts. `--data FILE.jsonl` trains on given prompts and answers instead: records with
`prompt_ids` and `answer_ids`, `messages`, or `prompt` and `answer`.

A run stops cleanly at `--time-budget` seconds or `--stop-at` steps; the same command with
`--resume` goes on where it stopped, and the result is that of a run that was never stopped.
"""

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path

import jax

from dflash_jax import corpus as data
from dflash_jax import trainer
from dflash_jax.checkpoint import load_draft
from dflash_jax.cli import Parser, run_command
from dflash_jax.config_json import ARCHITECTURES, as_saved
from dflash_jax.losses import Recipe
from dflash_jax.quant import FLOAT
from dflash_jax.records import HELDOUT, kind_of, prompt_ids, read_records
from dflash_jax.shapes import init_draft
from dflash_jax.targets.loading import load_target
from dflash_jax.tensor_files import compute_dtype
from dflash_jax.training import (
    Schedule,
    adopt_backbone,
    data_mesh,
    drafter_config,
    family_config,
    restore_state,
    start_training,
    widen_mlp,
)

BEGAN = time.monotonic()
LEAST = {
    "rows": 1,
    "sample_batch": 1,
    "length": 2,
    "steps": 1,
    "stop_at": 1,
    "batch": 1,
    "anchors": 1,
    "rank": 1,
    "top_k": 1,
    "layers": 1,
    "intermediate_size": 1,
    "block_size": 2,
    "mask_id": 0,
    "seed": 0,
    "devices": 1,
    "max_new_tokens": 1,
    "eval_every": 1,
}
"""The least that each option may be, where it is given."""
MASK_TOKEN = "<empty_output>"  # reserved in SmolLM2's vocabulary, in none of its texts
TAPS = (2, 9, 16, 23, 28)


def parser() -> Parser:
    """The command line."""
    p = Parser(description=__doc__.splitlines()[0])
    add = p.add_argument
    add("--target", default="smollm2", help="smollm2, a directory or a .gguf file")
    add("--out", type=Path, required=True, help="directory of the drafter")
    add("--state", type=Path, help="file to resume from (default OUT.state/state.npz)")
    add("--resume", action="store_true", help="go on from --state")
    add("--init", type=Path, help="start from this drafter's weights and shape")
    add("--data", type=Path, help="train on these records instead of sampled text")
    add("--corpus", type=Path, nargs="+", help="sampled text: read where there, else written")
    add("--rows", type=int, default=32768, help="conversations to sample")
    mix = data.Mix()
    add("--greedy", type=float, default=mix.greedy, help="share of sampled answers that are greedy")
    add("--warm", type=float, default=mix.warm, help="share that are so after a few drawn tokens")
    add("--sample-batch", type=int, default=2048, help="conversations sampled at a time")
    add("--sample-seconds", type=float, default=float("inf"), help="stop sampling after this")
    add("--length", type=int, default=512, help="tokens a conversation")
    add("--steps", type=int, default=16000, help="length of the learning-rate schedule")
    add("--stop-at", type=int, help="stop after this step")
    add("--time-budget", type=float, default=float("inf"), help="stop training at this second")
    add("--batch", type=int, default=32, help="conversations a step, all devices together")
    add("--anchors", type=int, default=64, help="blocks a conversation")
    add("--family", choices=tuple(ARCHITECTURES), default="dflash")
    add("--rank", type=int, default=32, help="of DSpark's Markov head or DFlash2's codebooks")
    add("--top-k", type=int, default=16, help="DFlash2's candidates a slot")
    add("--layers", type=int, help="of the drafter (default: 3)")
    add("--intermediate-size", type=int, help="of its MLPs (default: 1024, or that of --init)")
    add("--block-size", type=int, help="rows a block (default: 8, or that of --init)")
    add("--taps", type=int, nargs="+", help=f"tapped target layers (default: {TAPS})")
    add("--mask-id", type=int, help=f"mask token (default: that of {MASK_TOKEN})")
    add("--weighting", choices=("decay", "reach"), default="decay", help="what a slot weighs")
    add("--gamma", type=float, default=4.0, help="slot k weighs exp(-(k-1)/gamma)")
    add("--ce", type=float, default=0.5, help="weight of the cross-entropy")
    add("--kl", type=float, default=0.5, help="weight of KL to the target's distribution")
    add("--l1", type=float, default=0.0, help="weight of the L1 distance to it")
    add("--lr", type=float, default=1e-3)
    add("--optimizer", choices=("adamw", "muon"), default="adamw")
    add("--seed", type=int, default=0)
    add("--devices", type=int, help="local devices to share out the work to (default: all)")
    add("--heldout", type=Path, default=HELDOUT, help="prompts to report acceptance on")
    add("--max-new-tokens", type=int, default=256, help="for the report")
    add("--eval-every", type=int, default=250)
    add("--storage", choices=("int8", "bf16"), default="int8")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command; 2 and one line on a user's error."""

    def command() -> int:
        args = parser().parse_args(argv)
        check_arguments(args)
        run(args)
        return 0

    return run_command("train_drafter", command)


def check_arguments(args: argparse.Namespace) -> None:
    """ValueError for what can't work, before anything is loaded or sampled."""
    for name, least in LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"{_flag(name)}: expected at least {least}, found {value}")
    if not args.gamma > 0:
        raise ValueError(f"--gamma: expected more than 0 (inf: all alike), found {args.gamma}")
    if not 0 < args.lr < math.inf:
        raise ValueError(f"--lr: expected a finite number above 0, found {args.lr}")
    losses = ("ce", "kl", "l1")
    for name in losses:
        value = getattr(args, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{_flag(name)}: expected a finite number from 0, found {value}")
    if not any(getattr(args, name) for name in losses):
        raise ValueError("--ce: expected more than 0 where --kl and --l1 are 0, found 0.0")
    for name, rest in (("greedy", 0.0), ("warm", args.greedy)):
        share = getattr(args, name)
        if not (share >= 0 and share + rest <= 1 + 1e-9):
            found = f"{share:g}" + (f" beside {rest:g}" if rest else "")
            raise ValueError(f"{_flag(name)}: expected a share, of 1 in all, found {found}")
    for name in ("time_budget", "sample_seconds"):
        if math.isnan(getattr(args, name)):
            raise ValueError(f"{_flag(name)}: expected seconds, found nan")
    if args.seed >= 2**32:
        raise ValueError(f"--seed: expected an integer below 2**32, found {args.seed}")
    for name in ("layers", "taps", "mask_id"):
        if args.init and getattr(args, name) is not None:
            raise ValueError(
                f"{_flag(name)}: expected without --init, whose own it stays, found both"
            )
    if args.data and not args.data.is_file():
        raise FileNotFoundError(f"--data: expected a file, found none at {args.data}")
    if not args.out.name:
        raise ValueError(f"--out: expected the name of a directory, found {str(args.out)!r}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(args: argparse.Namespace) -> None:
    """Load, sample or read, train, measure, write the model card."""
    say = lambda line: print(f"[{time.monotonic() - BEGAN:5.0f} s] {line}", flush=True)  # noqa: E731
    loaded = load_target(args.target)
    target, codec = loaded.target, loaded.text
    say(f"target {loaded.name} on {jax.devices()[0].device_kind}")
    sampling = data.SampleOptions(args.length, tuple(sorted({args.length // 2, args.length})))
    records = list(read_records(args.heldout))
    kinds = [kind_of(record) for record in records]
    prompts = [prompt_ids(record, codec) for record in records]
    check_heldout(prompts, args, target)
    corpus = make_corpus(args, target, codec, sampling, say)
    heldout = trainer.heldout_batch(target, codec, prompts, sampling) if codec else None
    state_file = args.state or args.out.with_name(args.out.name + ".state") / "state.npz"
    recipe = Recipe(
        anchors=args.anchors,
        weighting=args.weighting,
        gamma=args.gamma,
        ce=args.ce,
        kl=args.kl,
        l1=args.l1,
        optimizer=args.optimizer,
    )
    schedule = Schedule(args.steps, args.lr)
    state = start_training(first_draft(args, target, codec), recipe)
    if args.resume:
        if not state_file.is_file():
            raise FileNotFoundError(f"--resume: expected {state_file}, found nothing")
        state = restore_state(state, state_file)
    options = trainer.RunOptions(
        out=args.out,
        state=state_file,
        batch=args.batch,
        seed=args.seed,
        stop_at=args.stop_at,
        deadline=BEGAN + args.time_budget,
        eval_every=args.eval_every,
        mesh=data_mesh(args.devices),
        storage="int8" if args.storage == "int8" else None,
    )
    say(f"{len(corpus)} rows, {corpus.answer_tokens / 1e6:.2f}M answer tokens; step {state.step}")
    state = trainer.train(target, state, corpus, heldout, recipe, schedule, options, say)
    draft = load_draft(args.out, target)
    reports, lossless = trainer.measure(target, draft, prompts, kinds, args.max_new_tokens)
    facts = {
        "target": loaded.name,
        "steps": f"{int(state.step)} of {args.steps}, {args.batch} sequences x {args.anchors} "
        f"blocks of {draft.config.block_size} each, learning rate {args.lr} ({args.optimizer}), "
        f"seed {args.seed}",
        "loss": f"{args.ce} cross-entropy + {args.kl} KL + {args.l1} L1 to the target, "
        + (
            f"slot k weighs exp(-(k-1)/{args.gamma:g})"
            if args.weighting == "decay"
            else "a slot weighs as often as decoding reaches it"
        ),
        "started from": str(args.init or "random weights"),
        "data (of this run)": f"{len(corpus)} sequences of {args.length} tokens, "
        f"{corpus.answer_tokens} answer tokens, "
        + (f"from {args.data.name}" if args.data else "sampled from the target itself"),
        "mask token id": draft.config.mask_token_id,
    }
    trainer.write_report(args.out, loaded.name, facts, reports, lossless, args.max_new_tokens)
    for r in reports:
        say(f"{r.kind:10s} {r.acceptance:.3f} tokens/round over {r.tokens} tokens")
    say(f"lossless: {lossless}")


def check_heldout(prompts: list[list[int]], args: argparse.Namespace, target) -> None:
    """ValueError for prompts that could not be reported on once the training is over."""
    if not prompts:
        raise ValueError(f"--heldout: expected prompts, found none in {args.heldout}")
    for number, prompt in enumerate(prompts, 1):
        if not 1 <= len(prompt) <= target.max_positions:
            raise ValueError(
                f"--heldout: expected 1..{target.max_positions} tokens a prompt, "
                f"found {len(prompt)} in record {number}"
            )
    check_ids("--heldout", max(map(max, prompts)), target)


def check_ids(name: str, largest: int, target) -> None:
    """ValueError for an id that the target does not have."""
    if largest >= target.vocab_size:
        raise ValueError(f"{name}: expected ids in 0..{target.vocab_size - 1}, found {largest}")


def make_corpus(args, target, codec, sampling, say) -> data.Corpus:
    """Read records, or read the corpus files that exist and sample the others."""
    if args.data:
        end = data.chat_format(codec).to_user[:1] if codec and codec.template else ()
        corpus = data.corpus_from_records(read_records(args.data), codec, args.length, end)
        check_ids("--data", int(corpus.ids.max()), target)
        return corpus
    if codec is None:
        raise ValueError("--data: needed for a target without a tokenizer, found none")
    parts = []
    for number, file in enumerate(
        args.corpus or [args.out.with_name(args.out.name + ".corpus.npz")]
    ):
        if not file.is_file():
            fresh = data.generate_corpus(
                target,
                codec,
                args.rows,
                args.seed + 1000 * number,
                batch=args.sample_batch,
                options=sampling,
                mix=data.Mix(greedy=args.greedy, warm=args.warm),
                seconds=args.sample_seconds,
                mesh=data_mesh(args.devices),
                report=say,
            )
            fresh.save(file)
        parts.append(data.Corpus.load(file))
        check_ids(f"--corpus {file}", int(parts[-1].ids.max()), target)
    return data.Corpus.join(parts)


def first_draft(args, target, codec):
    """A fresh drafter in the asked shape, or the one to start from."""
    if args.init:
        draft = load_draft(args.init, target, precision=FLOAT)
        block = args.block_size or draft.config.block_size
        draft = draft.replace(config=as_saved(dataclasses.replace(draft.config, block_size=block)))
        if args.intermediate_size:
            as_saved(dataclasses.replace(draft.config, intermediate_size=args.intermediate_size))
            draft = widen_mlp(draft, args.intermediate_size, jax.random.key(args.seed))
        if draft.config.family == args.family:
            return draft
        config = as_saved(family_config(draft.config, args.family, args.rank, args.top_k))
        fresh = init_draft(config, jax.random.key(args.seed), compute_dtype())
        return adopt_backbone(fresh, draft)
    mask = args.mask_id
    if mask is None:
        mask = codec.token_to_id(MASK_TOKEN) if codec else None
    if mask is None:
        raise ValueError(f"--mask-id: needed where the target has no {MASK_TOKEN}, found none")
    config = drafter_config(
        target,
        mask_token_id=mask,
        taps=tuple(args.taps or TAPS),
        layers=args.layers or 3,
        intermediate_size=args.intermediate_size or 1024,
        block_size=args.block_size or 8,
    )
    config = as_saved(family_config(config, args.family, args.rank, args.top_k))
    target.check_drafter(config)
    draft = init_draft(config, jax.random.key(args.seed), compute_dtype())
    # The head is the target's: rows that enter it start out scaled as the target scales its own.
    return draft.replace(norm=target.norm)


if __name__ == "__main__":
    sys.exit(main())
