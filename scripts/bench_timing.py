"""How `bench.py` times: stages compiled into loops, checked, then timed; the bandwidth likewise."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from bench_shapes import Workload, no_stops
from bench_stages import (
    ACCEPTING,
    DIFFERENCES,
    OF_TARGET,
    WHOLE,
    Difference,
    backbone,
    by_chance,
    draft_head,
    floor_bytes,
    nbytes,
    replaced,
    stage_and_parts,
)

import dflash_jax.round as rounds
from dflash_jax import forward_round, kernels, loop, measure_costs
from dflash_jax.propose import draft_logits, propose
from dflash_jax.round import RoundPlan
from dflash_jax.sharding import named_leaves
from dflash_jax.window import DSparkVtPolicy, Meter, default_widths

BANDWIDTH_BYTES = {"cpu": 1 << 29}
"""Size of the array that bandwidth is measured on, by platform: well past every cache."""
BANDWIDTH_BYTES_DEFAULT = 1 << 32
BANDWIDTH_TURNS, BANDWIDTH_TURNS_DEFAULT = {"cpu": 2}, 32
"""How often it is read: on a GPU some 30 ms, for launching takes a tenth of one, give or take."""
BEYOND_CACHE = {"gpu": 120 << 20}
"""Weights that a stage should stream before it reads one again, by platform: twice the largest L2
cache. A stage of fewer bytes runs over several copies of its weights in turn."""
MOST_COPIES = 8
NOISE_ATTEMPTS = 10
CHECKED_LAYERS = 4
"""Of the target, whose layers are alike."""

Run = Callable[[Any, int], Any]
"""run(carry, n): n times the compiled loop, from a carry that it consumes."""


class Program(NamedTuple):
    """A compiled stage: its first carry, the turns of one `run(carry, 1)`, seconds to compile."""

    run: Run
    carry: Any
    turns: int
    seconds: float


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


def compile_stage(work: Workload, name: str, iterations: int) -> Program:
    """The program of a stage."""
    if name in WHOLE:
        return _compile_whole(work, name, iterations)
    stage, parts = stage_and_parts(work, name)
    copies = weight_copies(work, name)
    target = work.target if name in OF_TARGET else work.target.replace(layers=[])
    weights = [(target, work.draft)]
    weights += [copied(weights[0]) for _ in range(copies - 1)]

    def turn(carry, i, weights, still):
        for target, draft in weights:
            carry = stage.step(carry, i, target, draft, still)
        return carry

    with parts:
        still = jnp.zeros((work.batch,), jnp.int32)
        run, seconds = repeated(turn, stage.carry, iterations, weights, still)
    return Program(run, stage.carry, iterations * copies, seconds)


def _compile_whole(work: Workload, name: str, iterations: int) -> Program:
    """`loop.decode` itself, which compiles at its first call: one of no rounds."""
    draft, state, plan = work.draft, work.state, work.plan
    run, stops = loop.decode, jnp.tile(no_stops(), (work.batch, 1))
    if name == "plain_step":
        draft, state = None, work.state.replace(draft=None)
        plan = RoundPlan(
            block_size=1,
            verify_width=1,
            capacity=plan.capacity,
            implementation=plan.implementation,
        )
    if name in ACCEPTING:
        state = state.replace(verify_cap=jnp.full_like(state.verify_cap, plan.verify_width))
        run = _accepting(work)
    began = time.perf_counter()
    if name == "cost_loop":
        policy = DSparkVtPolicy("cost")
        widths = default_widths(policy, plan.verify_width)
        plan = dataclasses.replace(plan, policy=policy, widths=widths)
        costs = measure_costs(work.target, draft, plan, work.batch, [work.context], decode=run)
        state = state.replace(meter=Meter.of(costs, work.batch))

    def decode(state: Any, n: int) -> Any:
        return run(work.target, draft, state, stops, jnp.int32(n * iterations), plan)

    start = copied(state)
    jax.block_until_ready(decode(start, 0))
    return Program(decode, state, iterations, time.perf_counter() - began)


def _accepting(work: Workload) -> Any:
    """`loop.decode`, or one of its own that accepts by chance where the workload says so."""
    if work.acceptance is None:
        return loop.decode
    chance = Difference("", rounds, "decide", by_chance(work.acceptance))

    @partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
    def decode(target, draft, state, stop_ids, max_rounds, plan):
        with replaced(chance):
            return loop.decode.__wrapped__(target, draft, state, stop_ids, max_rounds, plan)

    return decode


def weight_copies(work: Workload, name: str) -> int:
    """Copies of the weights that a stage takes turns with, so that no cache holds them all."""
    wanted = BEYOND_CACHE.get(jax.default_backend(), 0)
    size = floor_bytes(work)[_base(name)]
    return max(1, min(MOST_COPIES, math.ceil(wanted / size)))


def _base(name: str) -> str:
    return DIFFERENCES[name].stage if name in DIFFERENCES else name


def copied(tree: Any) -> Any:
    """A copy that may be donated, ready on the device."""
    return jax.block_until_ready(jax.tree.map(jnp.copy, tree))


def timed(run: Run, carry: Any, n: int) -> tuple[float, Any]:
    """Seconds of run(carry, n) on a copy of the carry, and its result."""
    start = copied(carry)
    began = time.perf_counter()
    result = jax.block_until_ready(run(start, n))
    return time.perf_counter() - began, result


def turn_seconds(program: Program) -> float:
    """Seconds a turn: the difference of a long run and a short one, so without the launch."""
    run, carry, turns, _ = program
    return (timed(run, carry, 2)[0] - timed(run, carry, 1)[0]) / turns


def sound_times(program: Program, repeats: int) -> list[float]:
    """Seconds a turn, `repeats` times; ValueError where noise drowns them."""
    for _ in range(NOISE_ATTEMPTS):
        times = [turn_seconds(program) for _ in range(repeats)]
        if statistics.median(times) > 0:
            return times
    turns = program.turns
    raise ValueError(f"--iterations: expected enough to time, found {turns} (noise is longer)")


def measure(
    work: Workload,
    name: str,
    iterations: int,
    repeats: int,
    read_rate: float,
    whole: Program | None = None,
) -> tuple[dict[str, Any], Program]:
    """Compile, check and time one stage: its figures (a table row, a part of the JSON line) and
    its program.

    whole: of a difference, the program of the stage that it is a part of; the two are timed in
    turn.
    """
    program = compile_stage(work, name, iterations)
    _check_result(name, timed(program.run, program.carry, 1)[1], iterations)
    more: dict[str, Any] = {}
    if name in ACCEPTING:
        times, more = _loop_times(program, repeats)
    elif whole is not None:
        pairs = [(turn_seconds(whole), turn_seconds(program)) for _ in range(repeats)]
        times = [a - b for a, b in pairs]
        more["without_ms"] = 1e3 * statistics.median(b for _, b in pairs)
    else:
        times = sound_times(program, repeats)
    if name == "plain_step":
        more["tokens_per_second"] = work.batch / statistics.median(times)
    size, copies = floor_bytes(work), program.turns // iterations
    row = figures([1e3 * s for s in times], size[name], read_rate) | {
        "compile_seconds": program.seconds,
        "copies": copies,
        "working_set_bytes": copies * size[_base(name)],
        **more,
    }
    return row, program


def figures(times: list[float], floor_size: int, read_rate: float) -> dict[str, Any]:
    """Milliseconds beside the floor. What a floor of nothing, or a difference that noise made
    negative, leaves without meaning is None.
    """
    middle, floor = statistics.median(times), 1e3 * floor_size / read_rate
    sound = middle > 0
    return {
        "time_ms": middle,
        "times_ms": times,
        "spread_percent": 100 * (max(times) - min(times)) / middle if sound else None,
        "floor_ms": floor,
        "floor_bytes": floor_size,
        "ratio": middle / floor if sound and floor else None,
        "mbu_percent": 100 * floor / middle if sound and floor else None,
    }


def _loop_times(program: Program, repeats: int) -> tuple[list[float], dict[str, Any]]:
    """Seconds a round of one call of the loop, launch and all, and the tokens it yields."""
    run, state, *_ = program
    seconds, times = [], []
    for _ in range(repeats):
        taken, result = timed(run, state, 1)
        taken_rounds, tokens = result.rounds - state.rounds, result.emitted - state.emitted
        widths = _widths_taken(result)
        costs = None if result.meter is None else result.meter.seconds[0, 0].tolist()
        del result
        seconds.append(taken)
        times.append(taken / int(taken_rounds.max()))
    return times, {
        "tokens_per_second": int(tokens.sum()) / statistics.median(seconds),
        "tokens_per_round": int(tokens.sum()) / int(taken_rounds.sum()),
        "rounds_by_width": widths,
        "costs_seconds": costs,
    }


def _widths_taken(state: Any) -> dict[str, int]:
    """How many rounds verified so many rows, over all sequences."""
    windows, taken = np.asarray(state.windows), np.asarray(state.rounds)
    widths = np.concatenate([row[:n] for row, n in zip(windows, taken, strict=True)])
    return {str(width): int((widths == width).sum()) for width in np.unique(widths)}


def _check_result(name: str, result: Any, iterations: int) -> None:
    """ValueError where a stage's result cannot be that of the work that it is timed for."""
    check_finite(name, result)
    # The loop may end early, for it accepts drafts; its rounds are counted.
    if name in WHOLE and name not in ACCEPTING and not bool((result.rounds == iterations).all()):
        found = result.rounds.tolist()
        raise ValueError(f"{name}: expected {iterations} rounds, found {found}")


def check_finite(name: str, carry: Any) -> None:
    """ValueError where a stage left a value that is not finite, or reported such logits."""
    for path, leaf in named_leaves(carry):
        bad = (leaf >= 0) if path.endswith("fault") else ~jnp.isfinite(leaf)
        if bool(bad.any()):
            raise ValueError(f"{name}: expected finite results, found others in {path}")


def check(work: Workload) -> dict[str, float]:
    """Compare what will be timed with the XLA reference in f32, un-jitted where that is quick.

    Returns relative errors ||out - reference|| / ||reference|| of the drafter's rows ("draft") and
    of those of the target's first layers ("verify", where it has any). Proposals from equal logits
    must be equal. Raises ValueError where something differs.
    """
    errors = {"draft": _check_draft(work)}
    if work.target.layers:
        errors["verify"] = _check_verify(work)
    if _quick_and_exact(work) or kernels.resolve(work.plan.implementation) != "xla":
        check_proposal(work)
    return errors


def _quick_and_exact(work: Workload) -> bool:
    """Whether the reference may run un-jitted, and must then agree to the last digits."""
    return jax.default_backend() == "cpu" and work.draft.dtype == jnp.float32


def _check_draft(work: Workload) -> float:
    noise, kv = backbone(work).carry
    pos = kv.len[:, None] + jnp.arange(noise.shape[1])[None]
    return _agreement("draft round", _draft_rows, (work.draft, kv, noise, pos), work)


@partial(jax.jit, static_argnames="implementation")
def _draft_rows(draft, kv, noise, pos, implementation):
    return forward_round(draft, kv, noise, pos, implementation)[0]


def _check_verify(work: Workload) -> float:
    layers = work.target.layers[:CHECKED_LAYERS]
    windows = work.target.config.layer_window[: len(layers)]
    config = dataclasses.replace(
        work.target.config, num_hidden_layers=len(layers), layer_window=windows
    )
    target = work.target.replace(layers=layers, config=config)
    state = work.state.target
    state = state.replace(k=state.k[: len(layers)], v=state.v[: len(layers)])
    ids = jnp.tile(work.state.anchor[:, None], (1, work.plan.verify_width))
    return _agreement("verify", _verify_rows, (target, state, ids), work)


@partial(jax.jit, static_argnames="implementation")
def _verify_rows(target, state, ids, implementation):
    return target.forward(state, ids, (), implementation)[0].hidden


def _agreement(name: str, compiled: Any, args: tuple, work: Workload) -> float:
    """The relative error of a jitted function, as it will be timed."""
    exact = _quick_and_exact(work)
    reference = compiled.__wrapped__ if exact else compiled
    out = _f32(compiled(*args, implementation=work.plan.implementation))
    with jax.default_matmul_precision("highest"):
        expected = reference(*_f32(args), implementation="xla")

    def distance(rows: jax.Array) -> float:
        return float(jnp.linalg.norm(rows - expected) / jnp.linalg.norm(expected))

    error, limit = distance(out), 1e-5
    if not exact:
        # bf16 rounds at 4e-3, some ten times a layer; DFlash2's convolutions of random weights
        # carry that on, to 4e-2 at hidden 2048. The reference in the same dtype says how far.
        limit = max(3e-2, 1.5 * distance(_f32(compiled(*args, implementation="xla"))))
    if not error <= limit:
        raise ValueError(f"{name}: expected a relative error up to {limit:.3g}, found {error:.3g}")
    return error


def _f32(tree: Any) -> Any:
    def cast(leaf: jax.Array) -> jax.Array:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(jnp.float32) if floating else leaf

    return jax.tree.map(cast, tree)


def check_proposal(work: Workload) -> None:
    """ValueError where the drafts from the same logits are not those of the reference."""
    hidden = draft_head(work).carry["hidden"]
    logits = jax.jit(draft_logits)(work.target, work.draft, hidden)
    run = jax.jit(propose, static_argnames="implementation")
    args = work.draft, logits, hidden, work.state.anchor
    ours = run(*args, implementation=work.plan.implementation).tokens
    reference = propose if _quick_and_exact(work) else run
    expected = reference(*args, implementation="xla").tokens
    if not bool((ours == expected).all()):
        raise ValueError(f"proposal: expected {expected.tolist()}, found {ours.tolist()}")


def bandwidth(repeats: int) -> dict[str, float]:
    """Bytes a second of reading one big array (the best of two ways), and of updating it in place.

    Reading: one maximum over it, and one product with a vector, which is what a CPU does best.
    """
    platform, columns = jax.default_backend(), 1 << 16
    size = BANDWIDTH_BYTES.get(platform, BANDWIDTH_BYTES_DEFAULT)
    iterations = BANDWIDTH_TURNS.get(platform, BANDWIDTH_TURNS_DEFAULT)
    big = jnp.outer(
        jnp.linspace(0.5, 1.5, max(size // 4 // columns, 1)), jnp.linspace(-1, 1, columns)
    )

    def rate(step: Callable[..., Any], carry: jax.Array, *constants: jax.Array) -> float:
        run, seconds = repeated(step, carry, iterations, *constants)
        run(copied(carry), 1)
        times = sound_times(Program(run, carry, iterations, seconds), repeats)
        return nbytes(big) / statistics.median(times)

    maximum = rate(lambda s, i, big: 1e-9 * jnp.max(big + s), jnp.float32(0), big)
    product = rate(lambda v, i, big: v + 1e-9 * jnp.max(big @ v), jnp.ones((columns,)), big)
    return {"read": max(maximum, product), "copy": 2 * rate(lambda x, i: x + 1, big)}
