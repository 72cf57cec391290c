"""What rounds cost here: the calibration that the window policy `cost` goes by.

costs = measure_costs(target, draft, plan, batch=8)     # {context: {width: seconds}}
SpecSession(target, draft, policy=DSparkVtPolicy("cost"), costs=costs)

They are measured before anything is decoded and stay what they are. What a session measured of its
own rounds would depend on the machine's moods, and with it the draws of a request that samples.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dflash_jax import loop
from dflash_jax.draft import DFlashDraft
from dflash_jax.options import ALL_ROUNDS, stop_table
from dflash_jax.round import DecodeState, RoundPlan
from dflash_jax.sampling import Kind, SamplingParams
from dflash_jax.targets import Target
from dflash_jax.window import Meter

ROUNDS, REPEATS = 4, 3
"""Rounds of a long run beyond a short one's, and how many pairs of runs are timed."""
NEEDED = 2 + REPEATS * (2 + ROUNDS)
"""Rows that a sequence gains while a width is timed, the first token's included."""


def measure_costs(
    target: Target,
    draft: DFlashDraft,
    plan: RoundPlan,
    batch: int,
    contexts: Iterable[int] | None = None,
    kinds: Iterable[Kind] = (),
    *,
    decode: Callable[..., DecodeState] = loop.decode,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, dict[int, float]]:
    """Seconds of a round of `batch` sequences, draft and all: {context: {width: seconds}}.

    The compiled loop itself is timed, over made-up prompts of `context` tokens, at each of the
    plan's widths: a round of one width is what it chooses where all others cost the earth. Nothing
    is accepted, so that a round is a row. A long run less a short one leaves the launch out; the
    best of several counts. Of several processes all get what the first one measured.

    contexts: to measure at, cut where the capacity is too small; default an eighth of the capacity
      and all of it. Between them `window.Meter` draws lines.
    kinds: of sampling that the program is made for, see `sampling.make_sampler`.
    decode: the loop to time, of `loop.decode`'s arguments; clock: tells seconds.
    ValueError where the capacity is too small to measure on.
    """
    if plan.capacity < NEEDED:
        raise ValueError(
            f"capacity: expected at least {NEEDED} rows to measure costs on, found {plan.capacity}"
        )
    asked = (plan.capacity // 8, plan.capacity) if contexts is None else contexts
    most, stops = plan.capacity - NEEDED + 1, stop_table([()] * batch)

    def run(state: DecodeState, rounds: int) -> tuple[DecodeState, float]:
        began = clock()
        state = decode(target, draft, state, stops, jnp.int32(rounds), plan)
        jax.block_until_ready(state)
        return state, clock() - began

    def seconds(row: loop.Sequences, width: int) -> float:
        state = loop.side_by_side(row, batch, draft.mesh)[0]
        only = Meter.of({w: 1.0 if w == width else float("inf") for w in plan.widths}, batch)
        state = state.replace(done=jnp.zeros((batch,), bool), meter=only)
        state, _ = run(state, 1)
        times = []
        for _ in range(REPEATS):
            state, short = run(state, 1)
            state, long = run(state, 1 + ROUNDS)
            times.append((short, long))
        short, long = (min(column) for column in zip(*times, strict=True))
        # A clock that stands still, or a busy machine, must not make a round free.
        return max((long - short) / ROUNDS, long / (1 + ROUNDS) / 10, 1e-9)

    costs, kinds = {}, tuple(kinds)
    for context in sorted({max(1, min(context, most)) for context in asked}):
        row = _made_up(target, draft, plan, context, stops[0], kinds)
        costs[context] = {width: seconds(row, width) for width in plan.widths}
    return _agreed(costs)


def _made_up(
    target: Target,
    draft: DFlashDraft,
    plan: RoundPlan,
    context: int,
    stop_ids: jax.Array,
    kinds: tuple[Kind, ...],
) -> loop.Sequences:
    """A sequence behind a prompt of zeros, accepting nothing, without end."""
    params = SamplingParams(temperature=1.0 if plan.sampled else 0.0)
    endless: dict[str, Any] = {"budget": ALL_ROUNDS, "verify_cap": 1}
    zeros = [0] * context
    return loop.read_alone(target, draft, plan, zeros, stop_ids, params, kinds, **endless)


def _agreed(costs: dict[int, dict[int, float]]) -> dict[int, dict[int, float]]:
    """The first process's costs: with costs of its own each would choose widths of its own."""
    if jax.process_count() == 1:
        return costs
    mine = np.array([[*row.values()] for row in costs.values()], np.float32)
    rows = np.asarray(multihost_utils.broadcast_one_to_all(mine)).tolist()
    found = zip(costs.items(), rows, strict=True)
    return {context: dict(zip(row, seconds, strict=True)) for (context, row), seconds in found}
