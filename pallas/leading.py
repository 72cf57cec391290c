"""Which entries lead a row, for top-k and top-p: eight launches of many programs a row.

The last value that stays is found digit by digit, in the integers that order as floats do. Every
launch sums a chunk of the row a program: for each value that the next digit may take, the weight of
the entries from there upwards. Before that it adds up what the launch before has left, and so knows
that one's digit; every program does so for itself, which costs less than a launch. With the last
digit known, one launch sums what lies above and what is tied, and one writes the mask.

A digit of d bits costs 2^d comparisons an entry, and a launch takes longer than a thousand entries'
64 comparisons each: hence wide digits, where `sampling.leading`, in one reduction over the whole
row, has narrow ones.

Sums of weights are f32 in an order of their own, so a row whose sum comes within a rounding of the
limit may be cut one entry sooner or later than by the reference. Sums that are exact, counts among
them, cut at the same entry, ties included.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

DIGITS = (6, 6, 5, 5, 5, 5)
"""Bits of the digits, from the highest: 32 together."""
CHUNKS = 64
"""Most programs of a row: each reads the sums of all."""
TILE = 128
"""Entries that are compared at a time."""
SIGN = np.uint32(1 << 31)


def leading(
    x: jax.Array, weight: jax.Array, limit: jax.Array, *, warps: int = 4, interpret: bool = False
) -> jax.Array:
    """`sampling.leading` of a row: mask `[V]` of the entries that, in descending order of `x [V]`
    (ties: lower index first), have less than `limit []` of the non-negative `weight [V]` before
    them. All f32.
    """
    chunk = max(TILE, pl.next_power_of_2(pl.cdiv(x.shape[0], CHUNKS)))
    chunks = pl.cdiv(x.shape[0], chunk)

    def launch(kernel, name: str, outputs, *args):
        return pl.pallas_call(
            kernel,
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs],
            grid=(chunks,),
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
            interpret=interpret,
            name=name,
        )(x, weight, limit.astype(jnp.float32).reshape(1), *args)

    found, shift, known = (), 32, None
    for bits in DIGITS:
        shift -= bits
        kernel = functools.partial(_digit_kernel, chunk=chunk, known=known, shift=shift)
        sums, low = ((chunks, 1 << bits), jnp.float32), ((1,), jnp.uint32)
        found, known = launch(kernel, "leading_digit", (sums, low), *found), shift
    ends = functools.partial(_ends_kernel, chunk=chunk)
    outputs = (((chunks, 2), jnp.float32), ((1,), jnp.uint32))
    found = launch(ends, "leading_ends", outputs, *found)
    mask = functools.partial(_mask_kernel, chunk=chunk)
    return launch(mask, "leading_mask", [(x.shape, jnp.int8)], *found)[0] != 0


def _digit_kernel(x, weight, limit, *rest, chunk: int, known: int | None, shift: int):
    """Sums a chunk of the digit at `shift`; `known`: where the digit before it stands."""
    *found, sums, lows = rest
    part = pl.program_id(0)
    low = _low(limit, found, known)
    plgpu.store(lows.at[jnp.arange(1)], low[None])
    starts = low | (jnp.arange(sums.shape[1], dtype=jnp.uint32) << np.uint32(shift))

    def add(i, total):
        key, weights = _entries(x, weight, part * chunk + i * TILE + jnp.arange(TILE))
        return total + jnp.where(key[:, None] >= starts[None, :], weights[:, None], 0.0)

    total = jnp.zeros((TILE, sums.shape[1]), jnp.float32)
    total = jax.lax.fori_loop(0, chunk // TILE, add, total)
    plgpu.store(sums.at[part, jnp.arange(sums.shape[1])], jnp.sum(total, axis=0))


def _ends_kernel(x, weight, limit, *rest, chunk: int):
    """A chunk's weight above the last value that stays, and its weight at that value."""
    *found, ends, lasts = rest
    part = pl.program_id(0)
    last = _low(limit, found, 0)
    plgpu.store(lasts.at[jnp.arange(1)], last[None])
    key, weights = _entries(x, weight, part * chunk + jnp.arange(chunk))
    ends[part, 0] = jnp.sum(jnp.where(key > last, weights, 0.0))
    ends[part, 1] = jnp.sum(jnp.where(key == last, weights, 0.0))


def _mask_kernel(x, weight, limit, ends, last, kept, *, chunk: int):
    """What stays: all above, and of the tied entries those with less than `limit` before them."""
    part = pl.program_id(0)
    chunks = jnp.arange(pl.next_power_of_2(ends.shape[0]))
    above = plgpu.load(ends.at[chunks, 0], mask=chunks < ends.shape[0], other=0.0)
    tied = plgpu.load(ends.at[chunks, 1], mask=chunks < part, other=0.0)
    ids = part * chunk + jnp.arange(chunk)
    key, weights = _entries(x, weight, ids)
    own = jnp.where(key == last[0], weights, 0.0)
    before = jnp.sum(above) + (jnp.sum(tied) + jax.lax.cumsum(own) - own)
    stays = (key > last[0]) | ((key == last[0]) & (before < limit[0]))
    plgpu.store(kept.at[ids], stays.astype(jnp.int8), mask=ids < kept.shape[0])


def _low(limit, found, known: int | None):
    """The digits found so far: those before, and the greatest whose entries weigh `limit`."""
    if known is None:
        return jnp.uint32(0)
    sums, low = found
    chunks, digits = jnp.arange(pl.next_power_of_2(sums.shape[0])), jnp.arange(sums.shape[1])
    live = jnp.broadcast_to((chunks < sums.shape[0])[:, None], (chunks.size, digits.size))
    total = jnp.sum(plgpu.load(sums.at[chunks[:, None], digits[None, :]], mask=live, other=0.0), 0)
    digit = jnp.sum(((total >= limit[0]) & (digits > 0)).astype(jnp.int32))
    return low[0] | (digit.astype(jnp.uint32) << np.uint32(known))


def _entries(x, weight, ids):
    """Keys that order as the entries do, and weights: 0 past the last entry."""
    live = ids < x.shape[0]
    values = plgpu.load(x.at[ids], mask=live, other=0.0)
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    key = jnp.where(bits >= SIGN, ~bits, bits | SIGN)
    return key, plgpu.load(weight.at[ids], mask=live, other=0.0)
