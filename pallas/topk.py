"""Exact top-k over the vocabulary, in two launches.

The k best entries of a row lie in the k chunks whose own best entries are best: before the best
one of any other chunk come k entries. The same holds of groups of chunks. So the first launch
reads the logits once and keeps one maximum a chunk and one a group; the second, one warp a row,
takes the k best groups, of their chunks the k best, of their entries the k best. It reads a few
kilobytes, and each of its 3 k dependent steps is a pair of warp-wide reductions over few registers.

Order: descending in the total order of IEEE floats (+0 before -0), ties to the lower id; a NaN of
either sign counts as the greatest. Entries compare as int32 keys that order as the floats do.

The head is not fused in: it reads `[V, H]` weights, 1.24 GB for V 151936 and H 4096 in bf16, and
its logits are 9 MB for 15 rows, which mostly stay in the L2 cache. Never writing them would save
under 1.5% of the bytes, and the second launch would have to compute its k chunks again. A GEMM of
our own that streams 2% slower than XLA's loses all of that.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

ABSENT = np.int32(np.iinfo(np.int32).min)
"""Below the key of every float."""
NAN_KEY = np.int32(0x7FC00000)
LAST_ID = np.int32(np.iinfo(np.int32).max)


@dataclasses.dataclass(frozen=True)
class TopkTiling:
    """chunk: entries of a chunk; group: chunks of a group; groups: how many of them one program of
    the first launch reduces. Powers of two.
    """

    chunk: int = 32
    group: int = 32
    groups: int = 4
    scan_warps: int = 4
    pick_warps: int = 1


DEFAULT = TopkTiling()


def top_k(
    logits: jax.Array, k: int, *, tiling: TopkTiling = DEFAULT, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The k best of each row `[..., V]` (f32 or bf16): values and int32 ids, `[..., k]`.

    Equals `selector.top_candidates`, ids and values; k of 1 to V, time grows with k.
    """
    return _top_k(logits, k, tiling, interpret, signed_zeros=True)


def argmax(
    logits: jax.Array, *, tiling: TopkTiling = DEFAULT, interpret: bool = False
) -> jax.Array:
    """`jnp.argmax` of each row `[..., V]`, int32: the first NaN where there is one, else the lowest
    id of the greatest value (to which 0 and -0 are equal).
    """
    return _top_k(logits, 1, tiling, interpret, signed_zeros=False)[1][..., 0]


def _top_k(logits, k: int, tiling: TopkTiling, interpret: bool, signed_zeros: bool):
    *lead, vocabulary = logits.shape
    rows = math.prod(lead)
    flat = logits.reshape(rows, vocabulary)
    chunk_best, group_best = _maxima(flat, tiling, interpret, signed_zeros)
    width = pl.next_power_of_2(k)
    values, ids = pl.pallas_call(
        functools.partial(_pick_kernel, k=k, tiling=tiling, signed_zeros=signed_zeros),
        out_shape=(
            jax.ShapeDtypeStruct((rows, width), logits.dtype),
            jax.ShapeDtypeStruct((rows, width), jnp.int32),
        ),
        grid=(rows,),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.pick_warps, num_stages=1),
        interpret=interpret,
        name="top_k_pick",
    )(flat, chunk_best, group_best)
    return values[:, :k].reshape(*lead, k), ids[:, :k].reshape(*lead, k)


def _maxima(flat, tiling: TopkTiling, interpret: bool, signed_zeros: bool):
    """Keys of the greatest entry of each chunk and of each group; ABSENT past the last entry."""
    rows, vocabulary = flat.shape
    programs = pl.cdiv(vocabulary, tiling.chunk * tiling.group * tiling.groups)
    groups = programs * tiling.groups
    return pl.pallas_call(
        functools.partial(_maxima_kernel, tiling=tiling, signed_zeros=signed_zeros),
        out_shape=(
            jax.ShapeDtypeStruct((rows, groups * tiling.group), jnp.int32),
            jax.ShapeDtypeStruct((rows, groups), jnp.int32),
        ),
        grid=(programs, rows),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.scan_warps, num_stages=1),
        interpret=interpret,
        name="top_k_maxima",
    )(flat)


def _maxima_kernel(logits, chunk_best, group_best, *, tiling: TopkTiling, signed_zeros: bool):
    part, row = pl.program_id(0), pl.program_id(1)
    vocabulary, count = logits.shape[1], tiling.group * tiling.groups
    chunks = part * count + jnp.arange(count)
    ids = chunks[:, None] * tiling.chunk + jnp.arange(tiling.chunk)[None, :]
    best = jnp.max(_load_keys(logits, row, ids, ids < vocabulary, signed_zeros), axis=1)
    plgpu.store(chunk_best.at[row, chunks], best)
    groups = part * tiling.groups + jnp.arange(tiling.groups)
    best = jnp.max(best.reshape(tiling.groups, tiling.group), axis=1)
    plgpu.store(group_best.at[row, groups], best)


def _pick_kernel(
    logits, chunk_best, group_best, values, out_ids, *, k: int, tiling: TopkTiling, signed_zeros
):
    row, width = pl.program_id(0), values.shape[1]
    vocabulary = logits.shape[1]
    chunk_count = pl.cdiv(vocabulary, tiling.chunk)
    group_count = pl.cdiv(chunk_count, tiling.group)
    slots = jnp.arange(width)

    def members(chosen, taken: int, size: int):
        """Ids `[width * size]` of what the chosen ones hold, and whether a chosen one holds it."""
        ids = chosen[:, None] * size + jnp.arange(size)[None, :]
        live = jnp.broadcast_to((slots < taken)[:, None], ids.shape)
        return ids.reshape(-1), live.reshape(-1)

    # Never take more than there are: an ABSENT key has no id of its own.
    groups = jnp.arange(pl.next_power_of_2(group_count))
    keys = plgpu.load(group_best.at[row, groups], mask=groups < group_count, other=ABSENT)
    taken = min(k, group_count)
    chosen = _greatest(keys, groups, taken, width)[1]

    chunks, live = members(chosen, taken, tiling.group)
    keys = plgpu.load(chunk_best.at[row, chunks], mask=live, other=ABSENT)
    taken = min(k, chunk_count)
    chosen = _greatest(keys, chunks, taken, width)[1]

    ids, live = members(chosen, taken, tiling.chunk)
    keys = _load_keys(logits, row, ids, live & (ids < vocabulary), signed_zeros)
    keys, ids = _greatest(keys, ids, k, width)
    plgpu.store(values.at[row, slots], _value(keys).astype(values.dtype))
    plgpu.store(out_ids.at[row, slots], ids)


def _greatest(keys, ids, count: int, width: int):
    """The `count` greatest of distinct (key, id) pairs `[n]`, in order: `[width]` keys and ids."""
    slots = jnp.arange(width)

    def step(t, carry):
        keys, best, best_ids = carry
        key = jnp.max(keys)
        first = jnp.min(jnp.where(keys == key, ids, LAST_ID))
        here = slots == t
        rest = jnp.where(ids == first, ABSENT, keys)
        return rest, jnp.where(here, key, best), jnp.where(here, first, best_ids)

    none = jnp.zeros((width,), jnp.int32)
    return jax.lax.fori_loop(0, count, step, (keys, none, none))[1:]


def _load_keys(logits, row, ids, live, signed_zeros: bool):
    """int32 keys of a row's entries, ABSENT where not `live`."""
    x = plgpu.load(logits.at[row, ids], mask=live, other=0).astype(jnp.float32)
    keys = _flip(jax.lax.bitcast_convert_type(x, jnp.int32))
    if not signed_zeros:
        keys = jnp.where(x == 0, 0, keys)
    keys = jnp.where(x != x, NAN_KEY, keys)
    return jnp.where(live, keys, ABSENT)


def _value(keys):
    """The float of a key."""
    return jax.lax.bitcast_convert_type(_flip(keys), jnp.float32)


def _flip(bits):
    """Float bits to keys and back: negative floats order backwards as integers."""
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
