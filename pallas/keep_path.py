"""The rows of a tree's path moved together, in the caches of all layers: in place, in one launch.

A program moves one head's rows of one cache. It reads them all before it writes one: a path's rows
lie among those it writes. Nothing but a barrier keeps a thread from writing what another has yet to
read.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

THREAD_BYTES = 16
"""That a thread moves at a time."""
MOST_WARPS = 8


def keep_path(
    leaves: Sequence[jax.Array], slot: jax.Array, path: jax.Array, *, interpret: bool = False
) -> list[jax.Array]:
    """`kv.keep_path`: one launch for all leaves of a shape and dtype."""
    kept = list(leaves)
    kinds = [(leaf.shape, leaf.dtype) for leaf in leaves]
    for kind in dict.fromkeys(kinds):
        of_kind = [i for i, other in enumerate(kinds) if other == kind]
        moved = _keep([leaves[i] for i in of_kind], slot, path, interpret)
        for i, leaf in zip(of_kind, moved, strict=True):
            kept[i] = leaf
    return kept


def _keep(leaves: list[jax.Array], slot, path, interpret: bool) -> list[jax.Array]:
    batch, heads, _, dim = leaves[0].shape
    tile = pl.next_power_of_2(path.shape[1]) * pl.next_power_of_2(dim) * leaves[0].dtype.itemsize
    warps = min(max(tile // (32 * THREAD_BYTES), 1), MOST_WARPS)
    return pl.pallas_call(
        functools.partial(_keep_kernel, interpret=interpret),
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves],
        grid=(heads, batch, len(leaves)),
        input_output_aliases={2 + i: i for i in range(len(leaves))},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="keep_path",
    )(slot, path, *leaves)


def _keep_kernel(slot, path, *leaves, interpret: bool):
    leaves = leaves[len(leaves) // 2 :]  # those given out, which hold what those given in did
    head, b, leaf = (pl.program_id(axis) for axis in range(3))
    rows, dim = path.shape[1], leaves[0].shape[3]
    row = jnp.arange(pl.next_power_of_2(rows))
    column = jnp.arange(pl.next_power_of_2(dim))[None, :]
    source = plgpu.load(path.at[b, row], mask=row < rows, other=0)
    moved = ((row < rows) & (source != row))[:, None] & (column < dim)
    source, target = ((slot[b] + x)[:, None] for x in (source, row))

    def move(one):
        values = plgpu.load(one.at[b, head, source, column], mask=moved)
        if not interpret:  # where programs have one thread
            plgpu.debug_barrier()
        plgpu.store(one.at[b, head, target, column], values, mask=moved)

    _choose(leaf, leaves, move)


def _choose(index, refs, use):
    """`use` of the ref at `index`: by halves, for a branch a ref would take longer than the use."""
    if len(refs) == 1:
        return use(refs[0])
    half = len(refs) // 2
    jax.lax.cond(
        index < half,
        lambda: _choose(index, refs[:half], use),
        lambda: _choose(index - half, refs[half:], use),
    )
