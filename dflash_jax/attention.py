"""Attention of a block of rows over the cache and the block itself.

One function serves the drafter (non-causal, windowed) and the target's verify (causal). Keys
carry their absolute positions, so a full cache and a ring are masked by the same rule.
"""

from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax import kernels
from dflash_jax.integers import cdiv
from dflash_jax.kernels import Implementation
from dflash_jax.kv import ABSENT, Held, QuantizedRows, Rows, read_rows, write_rows
from dflash_jax.layers import apply_rope, in_parts, linear, rms_norm, summed_in_parts
from dflash_jax.quant import QuantizedLinear
from dflash_jax.tree import MOST_NODES

HeadNorms = tuple[jax.Array, jax.Array] | None
"""RMSNorm weights `[D]` of the query and of the key heads; None where the model has none."""
NARROW = 32
"""Rows from which a block is a prompt chunk, whose attention runs tile by tile of keys."""
CLUSTERS = 16
"""Clusters of eight blocks that an H200 runs at a time."""
LONG = 8192
"""Slots of a cache from which on it is a long one."""
PARTS = 4
"""Most parts of a projection that Hopper's kernel sums: as many as XLA made of it by itself. Each
block reads those of its heads; eight took as long."""
SCORE_BYTES = 1 << 28
"""Most bytes of scores that a tile makes: what bounds a prompt chunk's memory at any context."""
TILES = (2048, 1024, 512, 256)
"""Keys in a tile; the widest whose scores stay within SCORE_BYTES, else the narrowest."""


class BlockPlace(struct.PyTreeNode):
    """Where a block of rows stands: the same for every layer that shares a slot book.

    cos, sin: rope tables of its rows, `[B, rows, D / 2]` f32.
    q_pos `[B, rows]`: absolute positions of its rows.
    k_pos `[B, slots]`: positions of the cached rows, the block's own already among them; ABSENT
      for an empty slot.
    slot `[B]`: first of the contiguous slots that its rows go to.
    end `[B]`: no slot from here on holds context.
    ring: False where slots lie in ascending order of position, so that a window is a run of slots.
    tree: True where rows are the nodes of a draft tree. Each sees the rows at positions before its
      own, and itself, wherever that lies, in a step of its own: so its sums are the same wherever
      the block began. Leaves are ABSENT in k_pos.
    """

    cos: jax.Array
    sin: jax.Array
    q_pos: jax.Array
    k_pos: jax.Array
    slot: jax.Array
    end: jax.Array
    ring: bool = struct.field(pytree_node=False, default=False)
    tree: bool = struct.field(pytree_node=False, default=False)


def project_qkv(
    x: jax.Array,
    weight: jax.Array | QuantizedLinear,
    k_cache: Rows,
    implementation: Implementation = None,
) -> jax.Array:
    """`linear(x, weight)` of rows `x [B, rows, H]`, as `append_and_attend` takes it.

    Few rows of a small model whose attention is Hopper's own stay in parts, which that kernel sums
    without a launch for it. One row is faster in one sum, heads of 128 were not measured.
    """
    several = x.shape[1] > 1 and k_cache.shape[3] < 128
    hopper = several and _hopper(x, k_cache, implementation) is not None
    if hopper and summed_in_parts(weight, x, implementation):
        return in_parts(x, weight, PARTS)
    return linear(x, weight, implementation=implementation)


def summed(qkv: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What `project_qkv` gives, as rows `[B, rows, ..]` of `dtype`."""
    return qkv.sum(axis=0).astype(dtype) if qkv.ndim == 4 else qkv


def append_and_attend(
    qkv: jax.Array,
    norms: HeadNorms,
    eps: float,
    place: BlockPlace,
    k_cache: Held,
    v_cache: Held,
    *,
    causal: bool,
    window: int | None,
    implementation: Implementation = None,
) -> tuple[jax.Array, Held, Held]:
    """Norm and rotate a block's heads, append its k and v, attend over context and block.

    Args:
      qkv: `[B, rows, (heads + 2 * kv_heads) * D]`, as projected; heads in the order q, k, v. Or
        f32 `[parts, B, ..]`, which add up to that, see `project_qkv`.
      norms, eps: RMSNorm of the q and k heads, None for none.
      place: where the block stands.
      k_cache, v_cache: `[B, kv_heads, slots, D]`; k normed and roped, v raw. Of int8 ones the
        block's own rows, too, are read as they were written.
      causal, window: see `attention_mask`.
      implementation: the kernels update the caches in place and take blocks of few rows; a wide
        block (a prompt chunk) always runs in the reference, whatever is asked for. "mosaic": on a
        Hopper GPU, in bf16, with heads of 64 or 128 and caches of a multiple of 8 slots; left to
        choose, where it was measured faster, see `faster_on_hopper`. int8 caches are the
        reference's alone.

    Returns attended rows `[B, rows, heads * D]` in the model's dtype, and both caches with the
    block's rows written. What empty slots hold, NaN included, changes nothing. Raises
    NotImplementedError as `kernels.resolve` and `kernels.mosaic_kernel` do, where "mosaic" cannot
    take the arrays, and for kernels asked to read int8; ValueError for a tree of more than
    `MOST_NODES` rows, not causal, in a ring or over int8.
    """
    rows = qkv.shape[-2]
    if place.tree:
        _check_tree(rows, causal, place.ring, k_cache)
    if isinstance(k_cache, QuantizedRows):
        implementation = for_int8(implementation)
    else:
        hopper = _hopper(qkv, k_cache, implementation)
        if hopper is not None:
            return hopper.append_and_attend(
                qkv, norms, eps, place, k_cache, v_cache, causal=causal, window=window
            )
        qkv = summed(qkv, k_cache.dtype)
    (batch, rows, width), (_, kv_heads, slots, dim) = qkv.shape, k_cache.shape
    heads = width // dim - 2 * kv_heads
    # Of a causal block with narrow heads (SmolLM2's verify, 12 rows) XLA's took 6 us a layer less,
    # of eight sequences at once 5 us more.
    few = causal and dim < 128 and rows > 1 and batch < 8
    best = "xla" if few else "pallas"
    if kernels.resolve(implementation, _refusal(dim, qkv.dtype), best) == "pallas":
        kernel = kernels.kernel("attention")
        if rows * (heads // kv_heads) <= kernel.MAX_ROWS:
            return kernel.append_and_attend(
                qkv, norms, eps, place, k_cache, v_cache, causal=causal, window=window
            )
    q, new_k, new_v = split_heads(qkv, norms, eps, place.cos, place.sin, kv_heads)
    k_cache = write_rows(k_cache, new_k, place.slot)
    v_cache = write_rows(v_cache, new_v, place.slot)
    masks = {"causal": causal, "window": window}
    tile = key_tile(batch, rows, heads, slots)
    if tile is None:
        k, v = (read_rows(cache, q.dtype) for cache in (k_cache, v_cache))
        itself = (new_k, new_v) if place.tree else None
        attended = block_attention(q, k, v, place.q_pos, place.k_pos, itself=itself, **masks)
    else:
        attended = tiled_attention(q, k_cache, v_cache, place, tile, **masks)
    return attended, k_cache, v_cache


def _check_tree(rows: int, causal: bool, ring: bool, cache: Rows | QuantizedRows) -> None:
    if rows > MOST_NODES or not causal:
        found = f"{rows} rows, causal={causal}"
        raise ValueError(
            f"tree: expected at most {MOST_NODES} rows of a causal block, found {found}"
        )
    if ring or isinstance(cache, QuantizedRows):
        found = "a ring" if ring else "int8"
        raise ValueError(f"tree: expected a cache of floats in order of position, found {found}")


def _hopper(block: jax.Array, k_cache: Rows, implementation: Implementation) -> ModuleType | None:
    """Hopper's kernel where it takes `block [.., B, rows, ..]`, by name or as the faster one."""
    if isinstance(k_cache, QuantizedRows):
        return None
    (batch, rows), (_, kv_heads, slots, dim) = block.shape[-3:-1], k_cache.shape
    faster = rows <= NARROW and faster_on_hopper(batch * kv_heads, dim, slots)
    kernel = kernels.mosaic_kernel(implementation, "attention", best=faster)
    if kernel is None or rows > kernel.MAX_ROWS:
        return None
    refusal = kernel.refusal(block, k_cache)
    if refusal is not None and implementation is not None:
        raise NotImplementedError(f"implementation 'mosaic': {refusal}")
    return kernel if refusal is None else None


def for_int8(implementation: Implementation) -> Implementation:
    """The implementation for int8 caches; NotImplementedError where a kernel is asked for."""
    if implementation in (None, "xla"):
        return "xla"
    raise NotImplementedError(
        f"implementation {implementation!r}: draft KV: expected floats, found int8"
    )


def faster_on_hopper(heads: int, dim: int, slots: int) -> bool:
    """Whether a Hopper GPU attends faster with the kernel of its own.

    heads: kv heads of all sequences, each of which is a cluster of blocks there. Inside a shard of
    a mesh the answer is no: it has not been measured there.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        return False
    return heads <= CLUSTERS and (dim < 128 or slots > LONG)


def key_tile(batch: int, rows: int, heads: int, slots: int) -> int | None:
    """Keys that a block of `rows` rows takes at a time; None: all `slots` at once.

    A round's few rows see all keys at once. A prompt chunk would make scores for every slot of the
    cache, written or not; it goes through the written ones in tiles instead.
    """
    size = batch * rows * heads * 4
    tile = next((t for t in TILES if t * size <= SCORE_BYTES), TILES[-1])
    return tile if rows > NARROW and tile < slots else None


def _refusal(dim: int, dtype: jnp.dtype) -> str | None:
    if dim < 32 or dim & (dim - 1):
        return f"head_dim: expected a power of two of 32 or more, found {dim}"
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"dtype: expected bfloat16, float16 or float32, found {dtype}"
    return None


def split_heads(
    qkv: jax.Array,
    norms: HeadNorms,
    eps: float,
    cos: jax.Array,
    sin: jax.Array,
    kv_heads: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q `[B, rows, heads, D]`, k and v `[B, rows, kv_heads, D]` of projected rows.

    q and k are normed (where the model norms them) and roped, v is raw. Shapes otherwise as in
    `append_and_attend`.
    """
    dim = 2 * cos.shape[-1]
    split = qkv.reshape(*qkv.shape[:-1], -1, dim)
    heads = split.shape[-2] - 2 * kv_heads
    q, k, v = jnp.split(split, [heads, heads + kv_heads], axis=-2)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def attention_mask(
    q_pos: jax.Array, k_pos: jax.Array, *, causal: bool, window: int | None
) -> jax.Array:
    """Which keys each query row sees: `[..., rows, keys]` bool.

    `q_pos [..., rows]` and `k_pos [..., keys]` are absolute positions, ABSENT for an empty slot.
    `window` counts keys: row i sees key j iff i - j < window and, when not causal, j - i < window.
    """
    distance = q_pos[..., :, None] - k_pos[..., None, :]
    mask = (k_pos != ABSENT)[..., None, :]
    if causal:
        mask = mask & (distance >= 0)
    if window is not None:
        mask = mask & (distance < window) & (distance > -window)
    return mask


def block_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_pos: jax.Array,
    k_pos: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    itself: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Grouped-query attention, softmax in f32, scale head_dim ** -0.5.

    Args:
      q: `[B, rows, heads, D]`; query head i reads kv head i // (heads / kv_heads).
      k, v: `[B, kv_heads, keys, D]`.
      q_pos, k_pos: absolute positions `[B, rows]`, `[B, keys]`; ABSENT marks empty key slots,
        whose contents may be anything.
      causal, window: see `attention_mask`.
      itself: k and v `[B, rows, kv_heads, D]` of the rows, which then see no key of their own
        position, but in a term of its own each its own.

    Returns `[B, rows, heads * D]` in q's dtype. A row that sees no key gets the mean of nothing
    in particular, but finite.
    """
    mask = attention_mask(q_pos, k_pos, causal=causal, window=window)
    if itself is not None:
        mask = mask & (q_pos[..., :, None] != k_pos[..., None, :])
        return _with_itself(q, _scores(q, k, mask), v, k_pos, *itself)
    scores = _scores(q, k, mask)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return _rows_of(_weighted(weights, v, k_pos), q)


def _with_itself(q, scores, v, k_pos, own_k, own_v) -> jax.Array:
    """`block_attention` of rows that see themselves beside the keys with these scores."""
    dim = q.shape[-1]
    grouped = _grouped(q, own_k.shape[2])
    own_k, own_v = (x.transpose(0, 2, 1, 3)[:, :, None].astype(jnp.float32) for x in (own_k, own_v))
    own = jnp.sum(grouped.astype(jnp.float32) * own_k, axis=-1, keepdims=True) * dim**-0.5
    most = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), own)
    weights, weight = jnp.exp(scores - most), jnp.exp(own - most)
    total = jnp.sum(weights, axis=-1, keepdims=True) + weight
    weights, weight = ((x / total).astype(q.dtype) for x in (weights, weight))
    out = _weighted(weights, v, k_pos) + weight.astype(jnp.float32) * own_v
    return _rows_of(out, q)


def tiled_attention(
    q: jax.Array,
    k: Rows,
    v: Rows,
    place: BlockPlace,
    tile: int,
    *,
    causal: bool,
    window: int | None,
) -> jax.Array:
    """`block_attention` with `tile` keys at a time, over those tiles alone that hold a visible row.

    The running maximum and sum of the softmax (Milakov & Gimelshein 2018) are f32, so that the
    result is that of one tile up to rounding. The block's rows are in the cache already.
    """
    slots, rows = k.shape[2], q.shape[1]
    first, last = jnp.int32(0), jnp.int32(cdiv(slots, tile))
    if not place.ring:
        # Slots lie in order of position: what no row sees is a run at either end.
        last = jnp.minimum(last, (jnp.max(place.slot) + rows - 1) // tile + 1)
        if window is not None:
            first = jnp.maximum(jnp.min(place.q_pos) - window + 1, 0) // tile

    def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        most, total, out = carry
        # The last tile is moved back to end with the cache; keys of the one before count once.
        start = jnp.minimum(i * tile, slots - tile)
        cut = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=tile, axis=2)
        k_tile, v_tile = (read_rows(jax.tree.map(cut, x), q.dtype) for x in (k, v))
        k_pos = jax.lax.dynamic_slice_in_dim(place.k_pos, start, tile, 1)
        k_pos = jnp.where(start + jnp.arange(tile) >= i * tile, k_pos, ABSENT)
        mask = attention_mask(place.q_pos, k_pos, causal=causal, window=window)
        scores = _scores(q, k_tile, mask)
        above = jnp.maximum(most, jnp.max(scores, axis=-1, keepdims=True))
        # A row that has seen no key yet weighs all alike; the first one it sees makes that 0.
        weights, faded = jnp.exp(scores - above), jnp.exp(most - above)
        total = total * faded + jnp.sum(weights, axis=-1, keepdims=True)
        return above, total, out * faded + _weighted(weights.astype(q.dtype), v_tile, k_pos)

    kv_heads = k.shape[1]
    shape = (q.shape[0], kv_heads, q.shape[2] // kv_heads, rows)
    # Zeros that depend on q: constants would be made for all layers at once, and held till used.
    nothing = 0 * q.astype(jnp.float32).swapaxes(1, 2).reshape(*shape, -1)
    most = nothing[..., :1] + jnp.finfo(jnp.float32).min
    empty = most, nothing[..., :1], nothing
    _, total, out = jax.lax.fori_loop(first, last, step, empty)
    return _rows_of(out / total, q)


def _scores(q: jax.Array, k: jax.Array, mask: jax.Array) -> jax.Array:
    """Scaled scores `[B, kv_heads, groups, rows, keys]` in f32; finfo.min where masked.

    The query heads of one kv head stand together as rows, so that this product and `_weighted`'s
    are plain batched matmuls over the cache as it lies.
    """
    grouped = _grouped(q, k.shape[1])
    *split, dim = grouped.shape
    flat = grouped.reshape(*split[:2], -1, dim)
    scores = jnp.einsum("bkmd,bksd->bkms", flat, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(*split, -1) * dim**-0.5
    return jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)


def _grouped(q: jax.Array, kv_heads: int) -> jax.Array:
    """Rows `[B, rows, heads, D]` by kv head, `[B, kv_heads, groups, rows, D]`."""
    batch, rows, _, dim = q.shape
    return q.reshape(batch, rows, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)


def _weighted(weights: jax.Array, v: jax.Array, k_pos: jax.Array) -> jax.Array:
    """Sums of v rows `[B, kv_heads, groups, rows, D]` in f32, by weights as `_scores` lays them."""
    # 0 * NaN is NaN: an empty slot must be cleared, a zero weight is not enough.
    v = jnp.where((k_pos != ABSENT)[:, None, :, None], v, jnp.zeros_like(v))
    batch, kv_heads, groups, rows, keys = weights.shape
    flat = weights.reshape(batch, kv_heads, groups * rows, keys)
    out = jnp.einsum("bkms,bksd->bkmd", flat, v, preferred_element_type=jnp.float32)
    return out.reshape(batch, kv_heads, groups, rows, -1)


def _rows_of(attended: jax.Array, q: jax.Array) -> jax.Array:
    """`_weighted`'s layout back as rows `[B, rows, heads * D]` in q's dtype."""
    batch, rows, heads, dim = q.shape
    return attended.astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(batch, rows, heads * dim)
