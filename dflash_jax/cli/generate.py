"""`dflash-jax generate`: answer a prompt, drafting ahead of the target."""

import argparse
import json
import sys
import time
from typing import Any

import jax
from jax.sharding import Mesh

from dflash_jax import __version__
from dflash_jax.cli import prompts
from dflash_jax.cli.cache import add_compile_cache
from dflash_jax.cli.decoding import add_decoding, add_template, cut, is_token_id, session_options
from dflash_jax.cli.devices import add_devices, first_process_prints, join_devices
from dflash_jax.cli.models import add_models, load_models
from dflash_jax.cli.shell import Status
from dflash_jax.compare import Comparison, compare, plain_options
from dflash_jax.draft import DFlashDraft
from dflash_jax.plan import MemoryPlan, amount
from dflash_jax.progress import Progress
from dflash_jax.quant import FLOAT
from dflash_jax.results import Generation
from dflash_jax.session import SpecSession
from dflash_jax.targets import HostedTarget
from dflash_jax.targets.loading import LoadedTarget
from dflash_jax.text import StreamDecoder

MEMORY = ("weights", "caches", "working", "total")


def add(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    gen = commands.add_parser("generate", help="answer a prompt, drafting ahead of the target")
    gen.set_defaults(run=run)
    gen.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="text, or - to read it from standard input",
    )
    gen.add_argument(
        "--prompts",
        metavar="FILE",
        help="answer many instead: a JSON object a line, with prompt, messages or prompt_ids, and "
        "max_new_tokens or sampling options of its own; prints a JSON object a line as they finish",
    )
    gen.add_argument(
        "--batch", type=int, metavar="N", help=f"prompts decoded at a time ({prompts.SLOTS})"
    )
    add_models(gen)
    add_devices(gen)
    gen.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    gen.add_argument("--ids", action="store_true", help="PROMPT is token ids, not text")
    add_template(gen)
    gen.add_argument("--compare", action="store_true", help="decode plainly too, and compare")
    gen.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print text as it comes (default: on a terminal)",
    )
    gen.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_decoding(gen)
    gen.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="say on stderr what is awaited (default: on a terminal)",
    )
    add_compile_cache(gen)


def run(args: argparse.Namespace) -> int:
    """`dflash-jax generate`."""
    prompts.check_arguments(args)
    mesh = join_devices(args)
    with first_process_prints(args):
        return _generate(args, mesh)


def _generate(args: argparse.Namespace, mesh: Mesh | None) -> int:
    shown = sys.stderr.isatty() and not args.json if args.progress is None else args.progress
    status = Status(enabled=shown)
    status.show(f"loading {args.target}")
    loaded, draft = load_models(args, mesh, args.progress if shown else False)
    if args.compare and draft is None:
        raise ValueError("--compare: expected a drafter to compare with, found --draft none")
    options = session_options(args, loaded, draft)
    if args.compare and not options["sampling"].greedy:
        raise ValueError("--compare: expected greedy decoding, found --temperature above 0")
    if args.prompts is not None:
        status.clear()
        return prompts.run(args, loaded, draft, options)
    prompt = _prompt_ids(args, loaded)
    status.show("compiling")
    began = time.perf_counter()
    for drafter, accepted in _programs(draft, options, args.compare):
        session = SpecSession(loaded.target, drafter, **accepted)
        session.warm_up([prompt], args.max_new_tokens)
        if drafter is not None and session.costs is not None:
            options["costs"] = session.costs
    compile_seconds = time.perf_counter() - began
    status.clear()

    stream = sys.stdout.isatty() if args.stream is None else args.stream
    stream = stream and not args.json
    request = loaded, draft, prompt, args.max_new_tokens, options
    comparison, memory = None, _memory(*request)
    if stream or not args.compare:
        result = _decode(*request, stream=stream, show=args.progress if shown else False)
    if args.compare:
        assert draft is not None
        comparison = compare(loaded.target, draft, prompt, args.max_new_tokens, **options)
        result = comparison.speculative
    if args.json:
        print(json.dumps(_report(args, loaded, draft, result, comparison, memory, compile_seconds)))
        return 0
    if not stream:
        print(_text(loaded, result.token_ids))
    print(_figures(result, comparison, memory))
    return 0


def _programs(
    draft: DFlashDraft | None, options: dict[str, Any], compared: bool
) -> list[tuple[DFlashDraft | None, dict[str, Any]]]:
    """The drafter and the session options of every loop that will run."""
    programs = [(draft, options)]
    return [*programs, (None, plain_options(options))] if compared else programs


def _prompt_ids(args: argparse.Namespace, loaded: LoadedTarget) -> list[int]:
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    template = prompts.template_args(args, loaded)
    if args.ids:
        return [_token_id(word) for word in text.replace(",", " ").split()]
    if loaded.text is None:
        raise ValueError(f"{args.target}: expected a tokenizer beside it (or --ids), found none")
    if args.no_chat:
        return loaded.text.encode(text)
    return loaded.text.encode_chat([{"role": "user", "content": text}], **template)


def _token_id(word: str) -> int:
    if not is_token_id(word):
        raise ValueError(f"PROMPT: expected token ids (--ids), found {cut(word)}")
    return int(word)


def _memory(loaded, draft, prompt, max_new_tokens, options) -> MemoryPlan | None:
    """What the generation takes on the device."""
    session = SpecSession(loaded.target, draft, **options)
    most = options["capacity"] or loaded.target.max_positions
    context = min(len(prompt) + max_new_tokens - 1, most)
    if isinstance(loaded.target, HostedTarget):  # its memory is not JAX's to count
        return None
    return session.memory(context, prompt=len(prompt))


def _decode(
    loaded: LoadedTarget,
    draft: DFlashDraft | None,
    prompt: list[int],
    max_new_tokens: int,
    options: dict[str, Any],
    *,
    stream: bool,
    show: bool | None,
) -> Generation:
    """Generate, with a bar while the prompt is read; print the text as it comes where asked to."""
    session = SpecSession(loaded.target, draft, **options)
    with Progress("reading the prompt", len(prompt), unit="tokens", show=show) as bar:
        session.open([prompt], max_new_tokens, tick=bar.add)
    if stream:
        decoder = StreamDecoder(loaded.text) if loaded.text is not None else None
        for tokens in session.stream():
            piece = decoder.push(tokens[0]) if decoder else " ".join(map(str, tokens[0])) + " "
            print(piece, end="", flush=True)
        print(decoder.flush() if decoder else "")
    session.burst()
    return session.results()[0]


def _text(loaded: LoadedTarget, ids: list[int]) -> str:
    return " ".join(map(str, ids)) if loaded.text is None else loaded.text.decode(ids)


def _figures(result: Generation, comparison: Comparison | None, memory: MemoryPlan | None) -> str:
    parts = [
        f"acceptance length {result.mean_acceptance_length:.2f}",
        f"{result.emitted} tokens in {result.rounds} rounds",
        f"{result.tokens_per_second:.1f} tok/s",
    ]
    if comparison is not None:
        parts += [
            f"plain {comparison.plain.tokens_per_second:.1f} tok/s",
            f"speedup {comparison.speedup:.2f}x",
            f"lossless {'yes' if comparison.lossless else 'NO'}",
        ]
        parts += [
            f"{name} differs at token {d.index} (top-2 logit gap {d.top2_gap:.3g})"
            for name, d in (
                ("padded plain run", comparison.padded_difference),
                ("one-row plain run", comparison.plain_difference),
            )
            if d is not None
        ]
    parts.append(f"first token {result.prefill_seconds:.2f} s")
    if memory is not None:
        each = "" if memory.devices == (1, 1) else " a device"
        parts.append(f"memory {amount(memory.total)}{each}")
    return "[" + ", ".join(parts) + "]"


def _report(
    args: argparse.Namespace,
    loaded: LoadedTarget,
    draft: DFlashDraft | None,
    result: Generation,
    comparison: Comparison | None,
    memory: MemoryPlan | None,
    compile_seconds: float,
) -> dict[str, Any]:
    device = jax.devices()[0]
    report: dict[str, Any] = {
        "text": None if loaded.text is None else loaded.text.decode(result.token_ids),
        "token_ids": result.token_ids,
        "prompt_tokens": result.prompt_tokens,
        "emitted": result.emitted,
        "finish_reason": result.finish_reason,
        "rounds": result.rounds,
        "drafted": result.drafted,
        "accepted": result.accepted,
        "acceptance_lengths": result.acceptance_lengths,
        "mean_acceptance_length": result.mean_acceptance_length,
        "prefill_seconds": result.prefill_seconds,
        "seconds": result.seconds,
        "compile_seconds": compile_seconds,
        "tokens_per_second": result.tokens_per_second,
        "first_token_seconds": result.prefill_seconds,
        "memory": memory and {name: getattr(memory, name) for name in MEMORY},
        "plain": None,
        "lossless": None,
        "speedup": None,
        "family": None if draft is None else draft.config.family,
        "draft_precision": None if draft is None else draft.config.precision or FLOAT,
        "draft_head_rows": draft.head.d2t.shape[0] if draft and draft.head else None,
        "draft_kv_dtype": None if draft is None else args.draft_kv_dtype or "auto",
        "target": loaded.name,
        "template_args": prompts.template_args(args, loaded),
        "dtype": str(loaded.target.embedding.dtype),
        "device": f"{device.platform}: {device.device_kind}",
        "devices": 1 if loaded.target.mesh is None else loaded.target.mesh.size,
        "versions": {"dflash-jax": __version__, "jax": jax.__version__},
    }
    if comparison is not None:
        report["lossless"] = comparison.lossless
        report["speedup"] = comparison.speedup
        report["plain"] = {
            "token_ids": comparison.plain.token_ids,
            "seconds": comparison.plain.seconds,
            "tokens_per_second": comparison.plain.tokens_per_second,
        }
        for name in ("padded_difference", "plain_difference"):
            difference = getattr(comparison, name)
            report[name] = None if difference is None else vars(difference)
    return report
