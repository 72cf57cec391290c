"""What rounds cost here: the calibration that the window policy `cost` goes by.

costs = measure_costs(target, draft, plan, batch=8, context=512)     # {width: seconds}
SpecSession(target, draft, policy=DSparkVtPolicy("cost"), costs=costs)
"""

import time
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp

from dflash_jax import loop
from dflash_jax.draft import DFlashDraft
from dflash_jax.options import ALL_ROUNDS, stop_table
from dflash_jax.round import DecodeState, RoundPlan
from dflash_jax.sampling import Kind, SamplingParams
from dflash_jax.targets import Target
from dflash_jax.window import Meter

ROUNDS, REPEATS = 4, 3
"""Rounds of a long run beyond a short one's, and how many pairs of runs are timed."""


def table(costs: Mapping[int, float], batch: int) -> jax.Array:
    """`Meter.seconds [batch, widths]` of {width: seconds}."""
    row = [float(costs[width]) for width in sorted(costs)]
    return jnp.tile(jnp.asarray(row, jnp.float32), (batch, 1))


def measure_costs(
    target: Target,
    draft: DFlashDraft,
    plan: RoundPlan,
    batch: int,
    context: int,
    kinds: Iterable[Kind] = (),
    decode: Callable[..., DecodeState] = loop.decode,
) -> dict[int, float]:
    """Seconds of a round of `batch` sequences at each of the plan's widths, draft and all.

    The compiled loop itself is timed, over made-up prompts of `context` tokens (fewer where the
    capacity is too small): a round of one width is what it chooses where all others cost the earth.
    Nothing is accepted, so that a round is a row. A long run less a short one leaves the launch
    out; the best of several counts.

    kinds: of sampling that the program is made for, see `sampling.make_sampler`. decode: the loop
    to time, of `loop.decode`'s arguments.
    ValueError where the capacity is too small to measure on.
    """
    stops = stop_table([()] * batch)
    kinds, needed = tuple(kinds), 2 + REPEATS * (2 + ROUNDS)
    if plan.capacity < needed:
        raise ValueError(
            f"capacity: expected at least {needed} rows to measure costs on, found {plan.capacity}"
        )
    context = min(context, plan.capacity - needed + 1)

    def run(state: DecodeState, rounds: int) -> tuple[DecodeState, float]:
        began = time.perf_counter()
        state = decode(target, draft, state, stops, jnp.int32(rounds), plan)
        jax.block_until_ready(state)
        return state, time.perf_counter() - began

    costs = {}
    for index, width in enumerate(plan.widths):
        state = _made_up(target, draft, plan, batch, context, kinds)
        only = jnp.full((batch, len(plan.widths)), jnp.inf).at[:, index].set(1)
        state, _ = run(state.replace(meter=Meter.of(only)), 1)
        times = []
        for _ in range(REPEATS):
            state, short = run(state, 1)
            state, long = run(state, 1 + ROUNDS)
            times.append((short, long))
        del state
        short, long = (min(column) for column in zip(*times, strict=True))
        # A clock that stands still, or a busy machine, must not make a round free.
        costs[width] = max((long - short) / ROUNDS, long / (1 + ROUNDS) / 10, 1e-9)
    return costs


def _made_up(
    target: Target,
    draft: DFlashDraft,
    plan: RoundPlan,
    batch: int,
    context: int,
    kinds: Iterable[Kind],
) -> DecodeState:
    """`batch` sequences behind a prompt of zeros, accepting nothing, without end."""
    caches = loop.empty_caches(target, draft, 1, plan.capacity)
    ids = [0] * context
    caches = loop.prefill(target, draft, caches, [ids], [0], plan.capacity, plan.implementation)
    params = SamplingParams(temperature=1.0 if plan.sampled else 0.0)
    sampler, history = loop.sampling_state(target, plan, [params], [ids], kinds)
    stops = stop_table([()])
    row = loop.start(
        target,
        *caches,
        jnp.full((1,), ALL_ROUNDS, jnp.int32),
        jnp.ones((1,), jnp.int32),
        stops,
        sampler,
        history,
        plan,
        Meter.of(jnp.ones((1, len(plan.widths)))),
    )
    state, _ = loop.side_by_side((row, stops), batch)
    return state.replace(done=jnp.zeros((batch,), bool))
