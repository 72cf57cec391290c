"""The selector's walk, greedy or sampled: the whole path of a sequence in one launch.

One program walks the slots in order. All it needs of a slot is known before the slot's
predecessor is: its candidates' successor rows, and the predecessor rows of all candidates of the
slot before. Both are read one slot ahead, so that a step waits for registers, not for memory, and
the chosen predecessor's row is picked out by a masked sum (exact: all other terms are zero).

Scores multiply, then sum over the rank, in f32, as `selector` does. The order of that sum is the
compiler's, here and there, so scores may differ in the last bits, and with them a choice between
candidates whose scores, or a draw whose uniform and cdf, are that close. Sums of exactly
representable numbers, and so ties among them, are the same everywhere.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dflash_jax.sampling import GREEDY_TEMPERATURE

Mode = Literal["path", "law", "draw"]


def greedy(pred, succ, unary, cand, hproj, anchor, *, warps=None, interpret=False) -> jax.Array:
    """`selector.dflash2_walk_greedy` in one launch: the path `[nd]`."""
    walk = (pred, succ, unary, cand, hproj, anchor)
    return _walk("path", walk, (), warps, interpret)[0]


def greedy_q(
    pred, succ, unary, cand, hproj, anchor, *, warps=None, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """`selector.dflash2_walk_greedy_q` in one launch: (path, q) `[nd]`."""
    walk = (pred, succ, unary, cand, hproj, anchor)
    path, _, q, _ = _walk("law", walk, (), warps, interpret)
    return path, q


def sampled(
    pred, succ, unary, cand, hproj, anchor, temperature, uniforms, *, warps=None, interpret=False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`selector.sampled_walk` in one launch: (path, chosen, q_chosen `[nd]`, q_rows `[nd, k]`)."""
    walk = (pred, succ, unary, cand, hproj, anchor)
    temperature = jnp.asarray(temperature, jnp.float32).reshape(1)
    return _walk("draw", walk, (temperature, jnp.asarray(uniforms)), warps, interpret)


def _walk(mode: Mode, walk, draws, warps: int | None, interpret: bool):
    *arrays, anchor = (jnp.asarray(x) for x in walk)
    pred, _, _, cand, _ = arrays
    (nd, k), rank = cand.shape, pred.shape[1]
    tile = pl.next_power_of_2(k) * pl.next_power_of_2(rank)
    warps = warps or min(max(tile // 512, 1), 16)
    ids, law = (jax.ShapeDtypeStruct((nd,), d) for d in (jnp.int32, jnp.float32))
    outputs = (ids, ids, law, jax.ShapeDtypeStruct((nd, k), jnp.float32))
    anchor = anchor.astype(jnp.int32).reshape(1)
    return pl.pallas_call(
        functools.partial(_walk_kernel, mode=mode),
        out_shape=outputs[:2] if mode == "path" else outputs,
        grid=(1,),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=f"selector_walk_{mode}",
    )(*arrays, anchor, *draws)


def _walk_kernel(pred, succ, unary, cand, hproj, anchor, *rest, mode: Mode):
    count = 2 if mode == "draw" else 0
    draws, (path, chosen, *law) = rest[:count], rest[count:]
    (nd, k), rank = cand.shape, pred.shape[1]
    lanes, ranks = jnp.arange(pl.next_power_of_2(k)), jnp.arange(pl.next_power_of_2(rank))
    slots = jnp.arange(pl.next_power_of_2(nd))
    real = lanes < k

    def ids(p):
        return plgpu.load(cand.at[p, lanes], mask=real & (p < nd), other=0)

    def rows(book, of):
        inside = real[:, None] & (ranks < rank)[None, :]
        return plgpu.load(book.at[of[:, None], ranks[None, :]], mask=inside, other=0)

    def slot(p, previous, these):
        """What slot p needs but the choice before it; past the last slot, anything."""
        alone = plgpu.load(unary.at[p, lanes], mask=real & (p < nd), other=0)
        hidden = plgpu.load(hproj.at[p, ranks], mask=(ranks < rank) & (p < nd), other=0)
        return rows(pred, previous), rows(succ, these), alone, hidden

    def step(p, carry):
        choice, choices, these, ahead, (befores, afters, alone, hidden) = carry
        coming = slot(p + 1, these, ahead)
        later = ids(p + 2)
        before = jnp.where((lanes == choice)[:, None], befores.astype(jnp.float32), 0.0)
        weights = jnp.sum(before, axis=0) * hidden.astype(jnp.float32)
        pairs = jnp.sum(weights[None, :] * afters.astype(jnp.float32), axis=1)
        scores = jnp.where(real, alone.astype(jnp.float32) + pairs, -jnp.inf)
        if mode == "draw":
            choice, row = _draw(scores, draws[0][0], draws[1][p], lanes)
        else:
            choice = jax.lax.argmax(scores, 0, jnp.int32)
            row = None if mode == "path" else _softmax(scores)
        if row is not None:
            q_chosen, q_rows = law
            q_chosen[p] = jnp.sum(jnp.where(lanes == choice, row, 0.0))
            plgpu.store(q_rows.at[p, lanes], row, mask=real)
        return choice, jnp.where(slots == p, choice, choices), ahead, later, coming

    first = ids(0)
    start = slot(0, jnp.full_like(first, anchor[0]), first)
    carry = (jnp.int32(0), jnp.zeros_like(slots), first, ids(1), start)
    choices = jax.lax.fori_loop(0, nd, step, carry)[1]
    plgpu.store(chosen.at[slots], choices, mask=slots < nd)
    taken = plgpu.load(cand.at[slots, choices], mask=slots < nd, other=0)
    plgpu.store(path.at[slots], taken, mask=slots < nd)


def _softmax(x):
    weights = jnp.exp(x - jnp.max(x))
    return weights / jnp.sum(weights)


def _draw(scores, temperature, u, lanes):
    """`selector._draw`, on lanes of which some may be -inf for good."""
    greedy = temperature <= GREEDY_TEMPERATURE
    best = jax.lax.argmax(scores, 0, jnp.int32)
    row = _softmax(scores / jnp.where(greedy, 1.0, temperature))
    row = jnp.where(greedy, (lanes == best).astype(jnp.float32), row)
    above = (u < jax.lax.cumsum(row)) & (row > 0)
    first = jnp.min(jnp.where(above, lanes, lanes.size))
    drawn = jnp.where(first < lanes.size, first, jax.lax.argmax(row, 0, jnp.int32))
    return jnp.where(greedy, best, drawn), row
