"""A draft tree grown in one launch, and walked in another: one warp a sequence.

Growing is two loops, first along the spine, slot by slot, then over the nodes by rank, and what a
turn waits for is what counts, for each needs the one before. So floats compare as int32 keys that
order as they do: over the lanes of a warp, the greatest of 32 integers, or the first that equals
it, is a single instruction. A turn is these two, along the spine also a row of the laws.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

LANES = 32
"""Of a warp: at least as many as nodes, and as candidates of a slot."""
ABSENT = np.int32(np.iinfo(np.int32).min)
"""Below the key of every number."""
SECTOR = 8
"""Floats that a cache brings at a time."""


def grow(
    laws: jax.Array, cand: jax.Array, anchor: jax.Array, nodes: int, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """`tree.grow` of f32 laws `[B, nd, P, k]`, P 1 or k: (tokens, depth), each int32 `[B, nodes]`.
    At most 32 nodes and candidates.

    The reference's nodes to the bit where no law is NaN or positive.
    """
    batch = laws.shape[0]
    kernel = pl.pallas_call(
        _grow_kernel,
        out_shape=[jax.ShapeDtypeStruct((batch, nodes), jnp.int32)] * 2,
        grid=(batch,),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="tree_grow",
    )
    return tuple(kernel(laws, cand, anchor))


def walk(
    tokens: jax.Array,
    depth: jax.Array,
    after: jax.Array,
    longest: int,
    cap: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`tree.walk` of tokens and depth `[B, n]`: path `[B, longest + 1]`, of at most 32 rows, and
    drafts accepted `[B]`.
    """
    batch = after.shape[0]
    path, accepted = pl.pallas_call(
        _walk_kernel,
        out_shape=[jax.ShapeDtypeStruct((batch, n), jnp.int32) for n in (longest + 1, 1)],
        grid=(batch,),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="tree_walk",
    )(tokens, depth, after, cap)
    return path, accepted[:, 0]


def _grow_kernel(laws, cand, anchor, tokens, depths):
    b, lanes = pl.program_id(0), jnp.arange(LANES)
    _, slots, befores, candidates = laws.shape
    nodes = tokens.shape[1]
    # A node comes after the spine's of all slots before, so those further on have none.
    slots = min(slots, nodes)
    entry = jnp.arange(pl.next_power_of_2(max(slots * candidates, LANES)))
    real, slot, choice = entry < slots * candidates, entry // candidates, entry % candidates
    token = plgpu.load(cand.at[b, slot, choice], mask=real, other=0)

    def total_keys(total, slot, before, choice, real):
        """Keys of a path's totals, with a candidate more."""
        at = laws.at[b, slot, before if befores > 1 else 0, choice]
        return jnp.where(real, _key(total + plgpu.load(at, mask=real, other=0)), ABSENT)

    def extend(here, carry):
        before, total, before_slot, total_before = carry
        before_slot = jnp.where(slot == here, before, before_slot)
        total_before = jnp.where(slot == here, total, total_before)
        keys = total_keys(total, here, before, lanes, lanes < candidates)
        most = jnp.max(keys)
        return _first(keys == most, lanes), _value(most), before_slot, total_before

    def choose(rank, carry):
        """The node of that rank, and its place: of the spine's, the depth; of a leaf, until all of
        the spine is known, `nodes` + its place among leaves.
        """
        keys, place, spine = carry
        best = _first(keys == jnp.max(keys), entry)
        leaf = best < spine * candidates
        node = jnp.where(leaf, nodes + rank - spine, spine + 1)
        chosen = entry == best
        keys, place = jnp.where(chosen, ABSENT, keys), jnp.where(chosen, node, place)
        return keys, place, jnp.where(leaf, spine, spine + 1)

    zeros = jnp.zeros_like(entry)
    start = jnp.int32(0), _nearer(laws, b, slots), zeros, zeros.astype(jnp.float32)
    *_, before, total = jax.lax.fori_loop(0, slots, extend, start)
    keys = total_keys(total, slot, before, choice, real)
    carry = jax.lax.fori_loop(1, nodes, choose, (keys, jnp.full_like(entry, nodes), jnp.int32(0)))
    _, place, spine = carry
    place = jnp.where(place > nodes, place - nodes + spine, place)
    tokens[b, 0], depths[b, 0] = anchor[b], jnp.int32(0)
    for ref, values in ((tokens, token), (depths, slot + 1)):
        plgpu.store(ref.at[b, place], values, mask=place < nodes)


def _walk_kernel(tokens, depths, after, cap, path, accepted):
    b, lanes = pl.program_id(0), jnp.arange(LANES)
    nodes, rows = tokens.shape[1], path.shape[1]

    def load(ref, index):
        return plgpu.load(ref.at[b, index], mask=lanes < nodes, other=0)

    token, depth = load(tokens, lanes), load(depths, lanes)
    before = jnp.clip(depth - 1, 0, nodes - 1)
    right = (lanes == 0) | ((token == load(after, before)) & (depth < cap[b]))
    # The first wrong node. Where that is a leaf, the spine is before it and nothing is cut off.
    end = jnp.min(jnp.where(right, LANES, lanes))
    # The deepest node, of several the first. A lane without a node ranks below the anchor.
    rank = jnp.max(jnp.where(right & (depth <= end), depth * LANES - lanes, -LANES))
    deepest = (rank + LANES - 1) // LANES
    last = deepest * LANES - rank
    accepted[b, 0] = deepest
    plgpu.store(path.at[b, lanes], jnp.where(lanes < deepest, lanes, last), mask=lanes < rows)


def _nearer(laws, b, slots):
    """0, once the laws of a sequence's first slots are in the cache next to its warp; NaN where one
    read is.

    A turn would wait several times as long for a row that is not. Each sector is read once, all at
    a time, and what is read must matter for the reads to stay.
    """
    _, _, befores, candidates = laws.shape
    count = slots * befores * candidates
    at = SECTOR * jnp.arange(pl.next_power_of_2(max(pl.cdiv(count, SECTOR), LANES)))
    row = at // candidates
    at = laws.at[b, row // befores, row % befores, at % candidates]
    read = plgpu.load(at, mask=row < slots * befores, other=0)
    return jnp.where(jnp.max(jnp.where(read != read, 1, 0)) > 0, jnp.nan, jnp.float32(0))


def _first(mask, index):
    """The lowest index where the mask is set, as it somewhere is."""
    return jnp.min(jnp.where(mask, index, index.size))


def _key(x):
    """int32 that orders as floats do. None is -0: no sum is that starts from 0."""
    return _flip(jax.lax.bitcast_convert_type(x, jnp.int32))


def _value(key):
    """The float of a key."""
    return jax.lax.bitcast_convert_type(_flip(key), jnp.float32)


def _flip(bits):
    """Float bits to keys and back: negative floats order backwards as integers."""
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
