"""Time speculative decoding stage by stage, against the floor that memory bandwidth sets.

    python scripts/bench.py                                     # SmolLM2's shape, random weights
    python scripts/bench.py --preset qwen3-8b --torch           # beside a strong PyTorch rival
    python scripts/bench.py --preset smollm2 --family dflash dspark dflash2
    python scripts/bench.py --preset qwen3-8b --context 512 2048 8192 32768 --stages draft_round
    python scripts/bench.py --preset qwen3-8b --capacities 4096 32768 --implementation xla pallas
    python scripts/bench.py --target smollm2 --draft dflash     # real checkpoints, real prompts
    python scripts/bench.py --batch 1 8 32 --acceptance 0.7 --stages loop,plain_step,cost_loop

A round over few sequences moves far more bytes than it computes, so a stage is judged by
time / floor. The floor is the bytes it must read once (weights, K/V of the context) over the read
bandwidth measured in the same run. Activations, writes and rows of the embedding count nothing.
Weights that fit in a cache can beat such a floor, so on a GPU a small stage takes turns with
several copies of its weights.

A stage runs many times inside one compiled program, each iteration fed by the one before, and its
time is a difference of two runs, so that launching the program is not in it. `spec_round`, `loop`
and `plain_step` are `loop.decode`, the very program that `generate` runs; the others call the
functions that it is made of. `attention`, `selection` and `verify_attention` are what those parts
add to a stage: its time less that of the same program with a trivial stand-in of the same shapes.
Compilation comes first and is reported apart; results are checked against the XLA reference before
anything is timed.

Several values of --family, --batch, --context, --capacity or --implementation make several cases;
every stage runs over all of them before the next, less telling one, so that --seconds cuts off the
least.

Prints a table, what follows from it, and last one JSON line (milliseconds, bytes, bytes a second).
Exit status 2 with one line on stderr for bad arguments and for want of memory.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench_report
import jax
import jaxlib
from bench_shapes import (
    FAMILIES,
    PRESETS,
    Workload,
    loaded_workload,
    random_draft,
    random_target,
    random_workload,
    spread,
)
from bench_stages import DIFFERENCES, OF_TARGET, STAGES
from bench_timing import Program, bandwidth, check, measure

from dflash_jax import kernels, load_draft
from dflash_jax.checkpoint import draft_directory
from dflash_jax.cli import Parser, run_command
from dflash_jax.config import DFlashConfig
from dflash_jax.records import HELDOUT, prompt_ids, read_records
from dflash_jax.targets.dense import DecoderConfig
from dflash_jax.targets.loading import LoadedTarget, load_target
from dflash_jax.tensor_files import compute_dtype

TORCH_ROUND = Path(__file__).with_name("torch_round.py")


@dataclasses.dataclass(frozen=True)
class Case:
    """A workload, its part of the report, which fills as stages are measured, and the programs
    that differences are taken from.
    """

    work: Workload
    report: dict[str, Any]
    programs: dict[str, Program] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Clock:
    """When a run began, and after how many seconds it shall start nothing more (None: never)."""

    began: float
    limit: float | None

    @property
    def left(self) -> float | None:
        """Seconds left, None for no limit."""
        return None if self.limit is None else self.limit - (time.monotonic() - self.began)

    @property
    def over(self) -> bool:
        """Whether nothing more shall start."""
        return self.left is not None and self.left <= 0


def parser() -> Parser:
    """The command line's options."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--preset", metavar="|".join(PRESETS), help="a shape (default: smollm2)")
    add("--family", nargs="+", metavar="|".join(FAMILIES), help="default: the preset's first")
    add("--target", metavar="smollm2|DIR|FILE.gguf", help="a real target")
    add("--draft", nargs="+", metavar="NAME|DIR", help="its drafters")
    add("--context", type=int, nargs="+", help="rows held before timing (default: the preset's)")
    add("--capacity", "--capacities", type=int, nargs="+", help="default: twice the context")
    add(
        "--implementation",
        nargs="+",
        default=["auto"],
        choices=["auto", *kernels.NAMES],
        help="of the ops that have kernels (default: auto, the best that runs here)",
    )
    add("--block-size", type=int, help="rows drafted a round")
    add("--window", type=int, help="keys that every drafter layer sees (default: the preset's)")
    add(
        "--batch",
        type=int,
        nargs="+",
        default=[1],
        help="sequences side by side, each with a context of its own (default: 1)",
    )
    add(
        "--acceptance",
        type=float,
        help="accept drafts by chance at this rate: random weights accept next to nothing",
    )
    add("--dtype", choices=["float32", "bfloat16"], help="default: f32 on a CPU, bf16 off it")
    add("--stages", help=f"default: all that the preset has, of {','.join(STAGES)}")
    add("--iterations", type=int, help="a timing's iterations (default: 50, CPU: 5)")
    add("--repeats", type=int, default=5, help="timings; the median counts (default: 5)")
    add("--seconds", type=float, help="start no stage later than this, and say which are left out")
    add("--json", metavar="FILE", type=Path, help="write the JSON line here too")
    add("--plot", metavar="FILE", type=Path, help="draw bandwidth per stage (needs matplotlib)")
    add("--torch", action="store_true", help="run scripts/torch_round.py beside it")
    return parser


def check_arguments(args: argparse.Namespace, iterations: int) -> None:
    """ValueError for what can't work, before anything is loaded or made."""
    if (args.preset or "smollm2") not in PRESETS:
        raise ValueError(f"--preset: expected one of {', '.join(PRESETS)}, found {args.preset!r}")
    counts = {"iterations": [iterations], "repeats": [args.repeats], "batch": args.batch}
    for name, values in (counts | {"context": args.context or [1]}).items():
        if min(values) < 1:
            raise ValueError(f"--{name}: expected at least 1, found {min(values)}")
    if args.acceptance is not None and not 0 <= args.acceptance <= 1:
        raise ValueError(f"--acceptance: expected 0 to 1, found {args.acceptance}")
    if args.seconds is not None and not args.seconds > 0:
        raise ValueError(f"--seconds: expected more than 0, found {args.seconds}")
    if (args.target is None) != (args.draft is None) or (args.target and args.preset):
        raise ValueError("--target: expected with --draft and without --preset, found otherwise")
    for option in ("family", "window") if args.target else ():
        if getattr(args, option) is not None:
            raise ValueError(f"--{option}: expected with a preset, found with --draft")
    for implementation in args.implementation:
        kernels.check(_implementation(implementation))
    on_gpu = jax.default_backend() == "gpu"
    if args.torch and not (on_gpu and importlib.util.find_spec("torch")):
        raise ValueError("--torch: expected torch and a CUDA GPU, found none")
    if args.plot is not None:
        bench_report.require_matplotlib()


def _implementation(name: str) -> Any:
    return None if name == "auto" else name


def choose_stages(args: argparse.Namespace) -> list[str]:
    """The stages to run, the most telling first, with those that differences are taken from."""
    has_target = bool(args.target or PRESETS[args.preset or "smollm2"].target.num_hidden_layers)
    offered = [name for name in STAGES if has_target or name not in OF_TARGET]
    chosen = set(args.stages.split(",")) if args.stages else set(offered)
    unknown = sorted(chosen - set(offered))
    if unknown:
        raise ValueError(f"--stages: expected some of {', '.join(offered)}, found {unknown}")
    chosen |= {DIFFERENCES[name].stage for name in chosen & set(DIFFERENCES)}
    return [name for name in STAGES if name in chosen]


def make_cases(args: argparse.Namespace, iterations: int) -> Iterator[Case]:
    """Every combination that the arguments ask for; ValueError where one can't work."""
    preset = PRESETS[args.preset or "smollm2"]
    sizes = [
        (batch, context, capacity)
        for batch in args.batch
        for context in args.context or [preset.context]
        for capacity in args.capacity
        or [max(2 * context, _rows_needed(context, iterations, batch))]
    ]
    for batch, context, capacity in sizes:
        # The longest run commits one row a round; the last must leave a sequence unfinished.
        needed = _rows_needed(context, iterations, batch)
        if capacity < needed:
            raise ValueError(
                f"--capacity: expected at least {needed} (context {context}, twice {iterations} "
                f"iterations and 1), found {capacity}"
            )
    for make in _loaded(args, iterations) if args.target else _random(args, preset):
        for batch, context, capacity in sizes:
            work = dataclasses.replace(make(batch, context, capacity), acceptance=args.acceptance)
            for implementation in args.implementation:
                case = work.using(_implementation(implementation))
                yield Case(case, describe_case(case, implementation))


def _rows_needed(context: int, iterations: int, batch: int = 1) -> int:
    return max(spread(context, batch)) + 2 * iterations + 1


def _random(args, preset):
    dtype = compute_dtype(args.dtype)
    families = args.family or preset.families[:1]
    configs = [preset.draft(family, args.block_size, args.window) for family in families]
    target = random_target(preset.target, dtype)
    for config in configs:
        draft = random_draft(config, dtype)
        yield lambda batch, context, capacity, draft=draft: random_workload(
            target,
            draft,
            batch=batch,
            context=context,
            capacity=capacity,
            contexts=spread(context, batch),
        )


def _loaded(args, iterations):
    directories = [draft_directory(name) for name in args.draft]
    loaded = load_target(args.target, args.dtype)

    def fitting(batch, context, capacity):
        """The given capacity; the default one is cut to the model's context."""
        most = max(loaded.target.max_positions, _rows_needed(context, iterations, batch))
        return capacity if args.capacity else min(capacity, most)

    for directory in directories:
        draft = load_draft(directory, loaded.target, args.dtype)
        yield lambda batch, context, capacity, draft=draft: loaded_workload(
            loaded.target,
            draft,
            context_ids(loaded, spread(context, batch)),
            capacity=fitting(batch, context, capacity),
            block_size=args.block_size,
        )


def context_ids(loaded: LoadedTarget, contexts: Sequence[int]) -> list[list[int]]:
    """For each sequence so many tokens that end in a question: held-out prompts, one after
    another. Random ids where the target has no tokenizer.
    """
    if loaded.text is None:
        size = len(contexts), max(contexts)
        ids = jax.random.randint(jax.random.key(0), size, 0, loaded.target.vocab_size)
        return [row[-n:] for row, n in zip(ids.tolist(), contexts, strict=True)]
    prompts = [prompt_ids(record, loaded.text) for record in read_records(HELDOUT)]
    rows: list[list[int]] = [[] for _ in contexts]
    for b, context in enumerate(contexts):
        for number in itertools.count(b, -1):
            if len(rows[b]) >= context:
                break
            rows[b] = prompts[number % len(prompts)] + rows[b]
    return [row[-n:] for row, n in zip(rows, contexts, strict=True)]


def run_rival(work: Workload, timeout: float | None = None) -> dict[str, Any]:
    """The report of `torch_round.py` on the drafter's shape, run in a process of its own; past
    `timeout` seconds, what it has until then, which says `cut_short`.

    Its round is that of a DFlash drafter; for DFlash2 it ends in the 16 best of each row.
    """
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
    command += ["--proposal", "topk16" if config.family == "dflash2" else "argmax"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired as late:
        lines = (late.stdout or b"").decode().splitlines()
        reports = [line for line in lines if line.startswith("{")]
        if not reports:
            raise ValueError(f"--torch: {TORCH_ROUND.name} ran past --seconds") from None
        return json.loads(reports[-1]) | {"cut_short": True}
    if done.returncode:
        last = (done.stderr.decode().strip() or "no message").splitlines()[-1]
        raise ValueError(f"--torch: {TORCH_ROUND.name} failed: {last}")
    return json.loads(done.stdout.decode().splitlines()[-1])


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything the arguments ask for, printing the table as it fills; returns the report."""
    clock = Clock(time.monotonic(), args.seconds)
    cpu = jax.default_backend() == "cpu"
    iterations = args.iterations if args.iterations is not None else (5 if cpu else 50)
    check_arguments(args, iterations)
    stages = choose_stages(args)
    cases = list(make_cases(args, iterations))
    report = describe(args) | {"iterations": iterations, "repeats": args.repeats}
    report["dtype"] = cases[0].work.draft.dtype.name
    print(f"{report['name']} on {report['device']}, {report['dtype']}, jax {jax.__version__}")
    rates = bandwidth(args.repeats)
    report["bandwidth"] = {f"{k}_bytes_per_second": v for k, v in rates.items()}
    report["cases"] = [case.report for case in cases]
    report["torch"] = None
    print(f"  read {rates['read'] / 1e9:.1f} GB/s, copy {rates['copy'] / 1e9:.1f} GB/s")
    print(bench_report.table_header(), flush=True)
    before_rival = stages.index("draft_round") + 1 if "draft_round" in stages else 0
    for name in stages[:before_rival]:
        measure_all(name, cases, report, clock)
    if args.torch:
        report["torch"] = try_rival(cases[0].work, clock)
    for name in stages[before_rival:]:
        measure_all(name, cases, report, clock)
    report["seconds"] = time.monotonic() - clock.began
    bench_report.conclude(report)
    for line in bench_report.conclusions(report):
        print(line)
    return report


def try_rival(work: Workload, clock: Clock) -> dict[str, Any]:
    """The rival's report; {"error": why} where it failed or there was no time, for the run's other
    figures stand without it.
    """
    if clock.over:
        return {"error": "--torch: no seconds left"}
    try:
        return run_rival(work, clock.left)
    except ValueError as error:
        return {"error": str(error)}


def measure_all(name: str, cases: Sequence[Case], report: dict[str, Any], clock: Clock) -> None:
    """Measure a stage of every case."""
    for case in cases:
        measure_case(case, name, report, clock)


def measure_case(case: Case, name: str, report: dict[str, Any], clock: Clock) -> None:
    """Check a case once, then measure a stage of it and print its row, if there is time left."""
    into, stages = case.report, case.report["stages"]
    whole = DIFFERENCES[name].stage if name in DIFFERENCES else None
    if clock.over or (whole is not None and whole not in stages):
        into["skipped"].append(name)
        return
    if into["check_relative_error"] is None:
        into["check_relative_error"] = check(case.work)
    counts = report["iterations"], report["repeats"]
    read_rate = report["bandwidth"]["read_bytes_per_second"]
    program = case.programs.get(whole)
    stages[name], program = measure(case.work, name, *counts, read_rate, program)
    if any(name == difference.stage for difference in DIFFERENCES.values()):
        case.programs[name] = program
    print(bench_report.table_row(into, name), flush=True)


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """What was measured on what: device and versions."""
    device = jax.devices()[0]
    return {
        "name": args.target or args.preset or "smollm2",
        "device": f"{os.cpu_count()} CPU cores" if device.platform == "cpu" else device.device_kind,
        "platform": device.platform,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
        },
    }


def describe_case(work: Workload, implementation: str) -> dict[str, Any]:
    """What sets a case apart, its shapes, and room for its figures."""

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
        "family": work.draft.config.family,
        "implementation": implementation,
        "batch": work.batch,
        "acceptance": work.acceptance,
        "contexts": list(work.contexts),
        "resolved": kernels.resolve(work.plan.implementation),
        "context": work.context,
        "capacity": work.plan.capacity,
        "shapes": {
            "batch": work.batch,
            "block_size": work.plan.block_size,
            "verify_width": work.plan.verify_width,
            "window": max((w for w in work.draft.config.layer_window if w), default=None),
            "vocabulary": work.target.lm_head.shape[0],
            "target": geometry(work.target.config),
            "draft": geometry(work.draft.config),
        },
        "check_relative_error": None,
        "stages": {},
        "skipped": [],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""

    def command() -> int:
        args = parser().parse_args(argv)
        report = bench(args)
        line = json.dumps(report)
        print(line)
        if args.json is not None:
            args.json.write_text(line + "\n", encoding="utf-8")
        if args.plot is not None:
            bench_report.plot(report, args.plot)
        return 0

    return run_command("bench.py", command)


if __name__ == "__main__":
    sys.exit(main())
