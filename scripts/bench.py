"""Time speculative decoding stage by stage, against the floor that memory bandwidth sets.

    python scripts/bench.py                                    # SmolLM2's shape, random weights
    python scripts/bench.py --preset qwen3-8b --torch          # beside a strong PyTorch rival
    python scripts/bench.py --target smollm2 --draft dflash    # real checkpoints, random prompts

A round over few sequences moves far more bytes than it computes, so a stage is judged by
time / floor. The floor is the bytes it must read once (weights, K/V of the context) over the read
bandwidth measured in the same run. Activations, writes and rows of the embedding count nothing.
Weights that fit in a cache can beat such a floor.

A stage runs many times inside one compiled program, each iteration fed by the one before, and its
time is a difference of two runs, so that launching the program is not in it. `spec_round` and
`plain_step` are `loop.decode`, the very program that `generate` runs; the others call the functions
that it is made of. Compilation comes first and is reported apart; results are checked before
anything is timed.

Prints a table, last one JSON line (milliseconds, bytes, bytes a second). Exit status 2 with one
line on stderr for bad arguments.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from bench_stages import (
    PARTS,
    PRESETS,
    STAGES,
    WHOLE,
    Workload,
    backbone,
    floor_bytes,
    loaded_workload,
    no_stops,
    random_workload,
    without_target_rows,
)

from dflash_jax import forward_round, load_draft, loop
from dflash_jax.checkpoint import compute_dtype, draft_directory, named_leaves
from dflash_jax.config import DFlashConfig
from dflash_jax.round import RoundPlan, propose_block
from dflash_jax.targets.dense import DecoderConfig
from dflash_jax.targets.loading import load_target

EXPECTED = (ValueError, OSError, NotImplementedError, ModuleNotFoundError)
BANDWIDTH_BYTES = {"cpu": 1 << 29}
"""Size of the array that bandwidth is measured on, by platform: well past every cache."""
BANDWIDTH_BYTES_DEFAULT = 1 << 32
NOISE_ATTEMPTS = 10
TORCH_ROUND = Path(__file__).with_name("torch_round.py")

COLUMNS = {
    "time_ms": ("time ms", 3),
    "spread_percent": ("spread %", 1),
    "floor_ms": ("floor ms", 3),
    "ratio": ("ratio", 2),
    "mbu_percent": ("MBU %", 1),
    "compile_seconds": ("compile s", 1),
}
"""The table: what a column shows, its title, its decimals."""

Run = Callable[[Any, int], Any]
"""run(carry, n): n times `iterations` iterations from a carry that it consumes."""


def repeated(
    step: Callable[..., Any], carry: Any, iterations: int, *constants: Any
) -> tuple[Run, float]:
    """A compiled loop of `iterations` times step(carry, i, *constants) -> carry, and the seconds
    that compiling took.

    The trip count is a constant: no iteration then waits for the host to look at a condition.
    """

    def program(carry, *constants):
        return jax.lax.fori_loop(0, iterations, lambda i, c: step(c, i, *constants), carry)

    began = time.perf_counter()
    compiled = jax.jit(program, donate_argnums=0).lower(carry, *constants).compile()
    seconds = time.perf_counter() - began

    def run(carry: Any, n: int) -> Any:
        for _ in range(n):
            carry = compiled(carry, *constants)
        return carry

    return run, seconds


def compile_stage(work: Workload, name: str, iterations: int) -> tuple[Run, Any, float]:
    """The program of a stage, its first carry, and the seconds that compiling took."""
    if name in PARTS:
        stage, still = PARTS[name](work), jnp.zeros((work.batch,), jnp.int32)
        run, seconds = repeated(stage.step, stage.carry, iterations, work.target, work.draft, still)
        return run, stage.carry, seconds
    draft, state, plan = work.draft, work.state, work.plan
    if name == "plain_step":
        draft, state = None, work.state.replace(draft=None)
        plan = RoundPlan(block_size=1, verify_width=1, capacity=plan.capacity)
    stops = no_stops()
    began = time.perf_counter()
    compiled = loop.decode.lower(work.target, draft, state, stops, jnp.int32(1), plan).compile()
    seconds = time.perf_counter() - began

    def decode(state: Any, n: int) -> Any:
        return compiled(work.target, draft, state, stops, jnp.int32(n * iterations))

    return decode, state, seconds


def copied(tree: Any) -> Any:
    """A copy that may be donated, ready on the device."""
    return jax.block_until_ready(jax.tree.map(jnp.copy, tree))


def iteration_seconds(run: Run, carry: Any, iterations: int, repeats: int) -> list[float]:
    """Seconds an iteration, `repeats` times, each the difference of a long run and a short one.

    Raises ValueError where noise drowns the difference.
    """

    def seconds(n: int) -> float:
        start = copied(carry)
        began = time.perf_counter()
        jax.block_until_ready(run(start, n))
        return time.perf_counter() - began

    for _ in range(NOISE_ATTEMPTS):
        times = [(seconds(2) - seconds(1)) / iterations for _ in range(repeats)]
        if statistics.median(times) > 0:
            return times
    raise ValueError(f"--iterations: expected enough to time, found {iterations} (noise is longer)")


def check_finite(name: str, carry: Any) -> None:
    """ValueError where a stage left a value that is not finite, or reported such logits."""
    for path, leaf in named_leaves(carry):
        bad = (leaf >= 0) if path.endswith("fault") else ~jnp.isfinite(leaf)
        if bool(bad.any()):
            raise ValueError(f"{name}: expected finite results, found others in {path}")


def check_draft(work: Workload) -> float:
    """Compare the compiled draft round with itself un-jitted in f32; returns the relative error.

    The error is that of the hidden rows, ||out - reference|| / ||reference||; on a CPU in f32 the
    drafts must be equal too. ValueError where they differ.
    """

    def f32(tree: Any) -> Any:
        def cast(leaf: jax.Array) -> jax.Array:
            floating = jnp.issubdtype(leaf.dtype, jnp.floating)
            return leaf.astype(jnp.float32) if floating else leaf

        return jax.tree.map(cast, tree)

    noise, kv = backbone(work).carry
    pos = kv.len[:, None] + jnp.arange(noise.shape[1])
    out = f32(jax.jit(forward_round)(work.draft, kv, noise, pos)[0])
    with jax.default_matmul_precision("highest"):
        expected = forward_round(f32(work.draft), f32(kv), f32(noise), pos)[0]
    error = float(jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected))
    exact = jax.default_backend() == "cpu" and work.draft.dtype == jnp.float32
    limit = 1e-5 if exact else 5e-2  # bf16 rounds at 4e-3, some ten times a layer
    if not error <= limit:
        raise ValueError(f"draft round: expected a relative error up to {limit}, found {error}")
    if exact:
        propose = partial(propose_block, plan=work.plan)
        args = work.target, work.draft, without_target_rows(work.state)
        if not bool((jax.jit(propose)(*args)[0].tokens == propose(*args)[0].tokens).all()):
            raise ValueError("draft round: drafts differ from those of the un-jitted round")
    return error


def bandwidth(repeats: int) -> dict[str, float]:
    """Bytes a second of reading one big array (the best of two ways), and of updating it in place.

    Reading: one maximum over it, and one product with a vector, which is what a CPU does best.
    """
    size = BANDWIDTH_BYTES.get(jax.default_backend(), BANDWIDTH_BYTES_DEFAULT)
    columns, iterations = 1 << 16, 2
    big = jnp.outer(
        jnp.linspace(0.5, 1.5, max(size // 4 // columns, 1)), jnp.linspace(-1, 1, columns)
    )

    def rate(step: Callable[..., Any], carry: jax.Array, *constants: jax.Array) -> float:
        run, _ = repeated(step, carry, iterations, *constants)
        run(copied(carry), 1)
        return big.nbytes / statistics.median(iteration_seconds(run, carry, iterations, repeats))

    maximum = rate(lambda s, i, big: 1e-9 * jnp.max(big + s), jnp.float32(0), big)
    product = rate(lambda v, i, big: v + 1e-9 * jnp.max(big @ v), jnp.ones((columns,)), big)
    return {"read": max(maximum, product), "copy": 2 * rate(lambda x, i: x + 1, big)}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line like all others."""

    def error(self, message: str) -> Any:
        raise ValueError(message)


def parser() -> Parser:
    """The command line's options."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", metavar="|".join(PRESETS), help="a shape (default: smollm2)")
    parser.add_argument("--target", metavar="smollm2|DIR|FILE.gguf", help="a real target")
    parser.add_argument("--draft", metavar="NAME|DIR", help="its drafter")
    parser.add_argument("--context", type=int, help="rows held before timing (default: 2048)")
    parser.add_argument("--capacity", type=int, help="rows allocated (default: twice the context)")
    parser.add_argument("--block-size", type=int, help="rows drafted a round")
    parser.add_argument("--batch", type=int, default=1, help="sequences side by side (default: 1)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="default: f32 on a CPU, bf16 off it"
    )
    parser.add_argument("--stages", default=",".join(STAGES), help="default: %(default)s")
    parser.add_argument(
        "--iterations", type=int, help="a timing's iterations (default: 50, CPU: 5)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timings; the median counts")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the JSON line here too")
    parser.add_argument("--torch", action="store_true", help="run scripts/torch_round.py beside it")
    return parser


def build(args: argparse.Namespace, iterations: int) -> Workload:
    """The workload that the arguments describe; ValueError where they can't work."""
    preset = PRESETS.get(args.preset or "smollm2")
    if preset is None:
        raise ValueError(f"--preset: expected one of {', '.join(PRESETS)}, found {args.preset!r}")
    context = preset.context if args.context is None else args.context
    capacity = 2 * context if args.capacity is None else args.capacity
    counts = {"iterations": iterations, "repeats": args.repeats, "batch": args.batch}
    for name, value in (counts | {"context": context}).items():
        if value < 1:
            raise ValueError(f"--{name}: expected at least 1, found {value}")
    # The longest run commits one row a round, and the last one must leave a sequence unfinished.
    needed = context + 2 * iterations + 1
    if capacity < needed:
        raise ValueError(
            f"--capacity: expected at least {needed} (context {context}, twice {iterations} "
            f"iterations and 1), found {capacity}"
        )
    common = {"batch": args.batch, "context": context, "capacity": capacity}
    if args.target is None and args.draft is None:
        dtype = compute_dtype(args.dtype)
        return random_workload(preset.target, preset.draft(args.block_size), dtype=dtype, **common)
    if args.preset is not None or args.target is None or args.draft is None:
        raise ValueError("--target: expected with --draft and without --preset, found otherwise")
    target = load_target(args.target, args.dtype).target
    draft = load_draft(draft_directory(args.draft), target, args.dtype)
    return loaded_workload(target, draft, block_size=args.block_size, **common)


def measure(
    work: Workload, name: str, iterations: int, repeats: int, read_rate: float
) -> dict[str, Any]:
    """Compile, check and time one stage; the figures that its table row and the JSON line hold."""
    run, carry, compile_seconds = compile_stage(work, name, iterations)
    result = run(copied(carry), 1)
    check_finite(name, result)
    if name in WHOLE and not bool((result.rounds == iterations).all()):
        raise ValueError(f"{name}: expected {iterations} rounds, found {result.rounds.tolist()}")
    del result
    times = [1e3 * s for s in iteration_seconds(run, carry, iterations, repeats)]
    floor_size = floor_bytes(work)[name]
    middle, floor = statistics.median(times), 1e3 * floor_size / read_rate
    return {
        "time_ms": middle,
        "times_ms": times,
        "spread_percent": 100 * (max(times) - min(times)) / middle,
        "floor_ms": floor,
        "floor_bytes": floor_size,
        "ratio": middle / floor,
        "mbu_percent": 100 * floor / middle,
        "compile_seconds": compile_seconds,
    }


def run_rival(work: Workload) -> dict[str, Any]:
    """The report of `torch_round.py` on the drafter's shape, run in a process of its own."""
    config = work.draft.config
    sizes = {
        "hidden-size": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv-heads": config.num_key_value_heads,
        "head-dim": config.head_dim,
        "intermediate-size": config.intermediate_size,
        "layers": config.num_hidden_layers,
        "vocab-size": work.target.lm_head.shape[0],
        "block-size": work.plan.block_size,
        "context": work.context,
        "capacity": work.plan.capacity,
        "batch": work.batch,
    }
    flags = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    command = [sys.executable, str(TORCH_ROUND), *flags, "--dtype", work.draft.dtype.name]
    done = subprocess.run([*command, "--proposal", "argmax"], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ValueError(f"--torch: {TORCH_ROUND.name} failed: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything the arguments ask for, printing the table as it fills; returns the report."""
    cpu = jax.default_backend() == "cpu"
    iterations = args.iterations if args.iterations is not None else (5 if cpu else 50)
    chosen = args.stages.split(",")
    unknown = sorted(set(chosen) - set(STAGES))
    if unknown:
        raise ValueError(f"--stages: expected some of {', '.join(STAGES)}, found {unknown}")
    if args.torch and (jax.default_backend() != "gpu" or not importlib.util.find_spec("torch")):
        raise ValueError("--torch: expected torch and a CUDA GPU, found none")
    work = build(args, iterations)
    report = describe(args, work) | {"iterations": iterations, "repeats": args.repeats}
    shapes = report["shapes"]
    print(f"{report['name']} on {report['device']}, {report['dtype']}, jax {jax.__version__}")
    print("  " + ", ".join(f"{k} {v}" for k, v in shapes.items() if not isinstance(v, dict)))
    report["check_relative_error"] = check_draft(work)
    print(f"  draft round against itself un-jitted in f32: {report['check_relative_error']:.1e}")
    rates = bandwidth(args.repeats)
    report["bandwidth"] = {f"{k}_bytes_per_second": v for k, v in rates.items()}
    print(f"  read {rates['read'] / 1e9:.1f} GB/s, copy {rates['copy'] / 1e9:.1f} GB/s")
    print(f"{'stage':<12}" + "".join(f"{title:>11}" for title, _ in COLUMNS.values()))
    report["stages"] = {}
    for name in chosen:
        row = measure(work, name, iterations, args.repeats, rates["read"])
        report["stages"][name] = row
        cells = (f"{row[key]:>11.{digits}f}" for key, (_, digits) in COLUMNS.items())
        print(f"{name:<12}" + "".join(cells), flush=True)
    compare(report, run_rival(work) if args.torch else None)
    return report


def describe(args: argparse.Namespace, work: Workload) -> dict[str, Any]:
    """What was measured on what: device, versions, dtype and shapes."""
    device = jax.devices()[0]

    def geometry(config: DFlashConfig | DecoderConfig) -> dict[str, int]:
        return {
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.intermediate_size,
        }

    return {
        "name": f"{args.target} with {args.draft}" if args.target else args.preset or "smollm2",
        "device": f"{os.cpu_count()} CPU cores" if device.platform == "cpu" else device.device_kind,
        "platform": device.platform,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
        },
        "dtype": work.draft.dtype.name,
        "shapes": {
            "batch": work.batch,
            "context": work.context,
            "capacity": work.plan.capacity,
            "block_size": work.plan.block_size,
            "verify_width": work.plan.verify_width,
            "vocabulary": work.target.lm_head.shape[0],
            "target": geometry(work.target.config),
            "draft": geometry(work.draft.config),
        },
    }


def compare(report: dict[str, Any], rival: dict[str, Any] | None) -> None:
    """Add to the report (and print) what follows from stages together and from the rival."""
    stages = report["stages"]
    times = {name: row["time_ms"] for name, row in stages.items()}
    report["round_in_plain_steps"], report["torch"] = None, rival
    if set(WHOLE) <= set(times):
        steps = times["spec_round"] / times["plain_step"]
        report["round_in_plain_steps"] = steps
        print(f"a round costs {steps:.2f} plain steps: acceptance lengths above that pay")
    if rival is not None:
        for label, milliseconds in rival["milliseconds"].items():
            print(f"torch {rival['torch']}, one CUDA graph, {label}: {milliseconds:.3f} ms")
        best = min(rival["milliseconds"].values())
        rival["draft_round_over_torch"] = None
        if "draft_round" in times:
            rival["draft_round_over_torch"] = times["draft_round"] / best
            print(f"draft_round / torch: {rival['draft_round_over_torch']:.2f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        args = parser().parse_args(argv)
        line = json.dumps(bench(args))
        print(line)
        if args.json is not None:
            args.json.write_text(line + "\n", encoding="utf-8")
    except EXPECTED as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
