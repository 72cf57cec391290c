"""A draft tree grown in one launch, and walked in another: one warp a sequence, a lane a node.

Growing, what a step waits for is what counts, for each node depends on the one before. So floats
compare as int32 keys that order as they do: over all lanes of a warp, the greatest of 32 integers,
or the one that a mask leaves, is a single instruction. A step is two of those to find the node with
the best child to come, one to read that node's state, two rows of the laws, two more for the best
of each.
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
) -> tuple[jax.Array, ...]:
    """`tree.grow` of f32 laws `[B, nd, P, k]`, P 1 or k: (tokens, parent, depth, ancestors), each
    int32 `[B, nodes]`. At most 32 nodes and candidates.

    The reference's nodes to the bit where laws are finite.
    """
    batch = laws.shape[0]
    kernel = pl.pallas_call(
        _grow_kernel,
        out_shape=[jax.ShapeDtypeStruct((batch, nodes), jnp.int32)] * 4,
        grid=(batch,),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="tree_grow",
    )
    return tuple(kernel(laws, cand, anchor))


def walk(
    tree: tuple[jax.Array, ...],
    after: jax.Array,
    longest: int,
    cap: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`tree.walk` of (tokens, parent, depth, ancestors) `[B, n]`: path `[B, longest + 1]` and
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
    )(*tree, after, cap)
    return path, accepted[:, 0]


def _grow_kernel(laws, cand, anchor, tokens, parents, depths, paths):
    b, lanes = pl.program_id(0), jnp.arange(LANES)
    _, slots, befores, candidates = laws.shape
    nodes = tokens.shape[1]

    def next_child(depth, choice, total, taken):
        """Of a node, the best candidate not yet taken, and the key of its total with it."""
        inside = (lanes < candidates) & (depth < slots)
        row = plgpu.load(
            laws.at[b, depth, choice if befores > 1 else 0, lanes], mask=inside, other=0
        )
        keys = jnp.where(inside & ((taken >> lanes) & 1 == 0), _key(row), ABSENT)
        best = jnp.max(keys)
        offer = jnp.where(best == ABSENT, ABSENT, _key(total + _value(best)))
        return _first(keys == best, lanes), offer

    def step(i, carry):
        offer, coming, depth, choice, total, taken, parent, path = carry
        most = jnp.max(offer)
        best = _first(offer == most, lanes)
        old, new = lanes == best, lanes == i

        def pick(values):
            return jnp.sum(jnp.where(old, values, 0))

        slot, child = pick(depth), pick(coming)
        now_taken = pick(taken) | (1 << child)
        after = next_child(slot, pick(choice), _value(pick(total)), now_taken)
        first = next_child(slot + 1, child, _value(most), 0)

        def put(values, of_new, of_old=None):
            values = values if of_old is None else jnp.where(old, of_old, values)
            return jnp.where(new, of_new, values)

        return (
            put(offer, first[1], after[1]),
            put(coming, first[0], after[0]),
            put(depth, slot + 1),
            put(choice, child),
            put(total, most),
            put(taken, 0, now_taken),
            put(parent, best),
            put(path, pick(path) | (1 << i)),
        )

    zeros, root = jnp.zeros((LANES,), jnp.int32), lanes == 0
    child, offer = next_child(0, 0, _nearer(laws, b), 0)
    start = (jnp.where(root, offer, ABSENT), zeros + child, *[zeros] * 5, root.astype(jnp.int32))
    carry = jax.lax.fori_loop(1, nodes, step, start)
    _, _, depth, choice, _, _, parent, path = carry
    drafted = plgpu.load(cand.at[b, jnp.maximum(depth - 1, 0), choice], mask=lanes < nodes, other=0)
    token = jnp.where(root, anchor[b], drafted)
    for ref, values in ((tokens, token), (parents, parent), (depths, depth), (paths, path)):
        plgpu.store(ref.at[b, lanes], values, mask=lanes < nodes)


def _walk_kernel(tokens, parents, depths, paths, after, cap, path, accepted):
    b, lanes = pl.program_id(0), jnp.arange(LANES)
    nodes, rows = tokens.shape[1], path.shape[1]
    real = lanes < nodes

    def load(ref, index):
        return plgpu.load(ref.at[b, index], mask=real, other=0)

    token, parent, depth, lineage = (load(ref, lanes) for ref in (tokens, parents, depths, paths))
    right = (lanes == 0) | ((token == load(after, parent)) & (depth < cap[b]))
    wrong = jnp.sum(jnp.where(right, 0, 1 << lanes))
    # The deepest node, of several the first. A lane without a node ranks below the anchor.
    rank = jnp.max(jnp.where(lineage & wrong == 0, depth * LANES - lanes, -LANES))
    deepest = (rank + LANES - 1) // LANES
    last = deepest * LANES - rank
    on_path = (jnp.sum(jnp.where(lanes == last, lineage, 0)) >> lanes) & 1 == 1
    on_path &= depth < rows
    accepted[b, 0] = deepest
    # Interpreted, a store puts back what was there where its mask is off: so let that be nowhere.
    plgpu.store(path.at[b, jnp.where(on_path, depth, rows)], lanes, mask=on_path)
    behind = (lanes > deepest) & (lanes < rows)
    plgpu.store(path.at[b, lanes], jnp.full_like(lanes, last), mask=behind)


def _nearer(laws, b):
    """0, once all laws of a sequence are in the cache next to its warp; NaN where one read is.

    A step would wait several times as long for a row that is not. Each sector is read once, all at
    a time, and what is read must matter for the reads to stay.
    """
    _, slots, befores, candidates = laws.shape
    row = jnp.arange(pl.next_power_of_2(slots * befores))[:, None]
    column = jnp.arange(0, pl.next_power_of_2(candidates), SECTOR)[None, :]
    inside = (row < slots * befores) & (column < candidates)
    at = laws.at[b, row // befores, row % befores, column]
    read = plgpu.load(at, mask=inside, other=0)
    return jnp.where(jnp.max(jnp.where(read != read, 1, 0)) > 0, jnp.nan, jnp.float32(0))


def _first(mask, lanes):
    """The lowest lane where the mask is set; some lane where it nowhere is."""
    return jnp.min(jnp.where(mask, lanes, LANES - 1))


def _key(x):
    """int32 that orders as the floats do, 0 and -0 the same."""
    return jnp.where(x == 0, 0, _flip(jax.lax.bitcast_convert_type(x, jnp.int32)))


def _value(key):
    """The float of a key."""
    return jax.lax.bitcast_convert_type(_flip(key), jnp.float32)


def _flip(bits):
    """Float bits to keys and back: negative floats order backwards as integers."""
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
