"""Attention of a block of query rows over a cache that already holds the block's own rows.

One function serves the drafter (non-causal, windowed) and the target's verify (causal). Keys
carry their absolute positions, so a full cache and a ring are masked by the same rule.
"""

import jax
import jax.numpy as jnp

ABSENT = -1
"""Position of a cache slot that holds nothing: attention never reads it, NaN included."""


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
) -> jax.Array:
    """Grouped-query attention, softmax in f32, scale head_dim ** -0.5.

    Args:
      q: `[B, rows, heads, D]`; query head i reads kv head i // (heads / kv_heads).
      k, v: `[B, kv_heads, keys, D]`.
      q_pos, k_pos: absolute positions `[B, rows]`, `[B, keys]`; ABSENT marks empty key slots,
        whose contents may be anything.
      causal, window: see `attention_mask`.

    Returns `[B, rows, heads * D]` in q's dtype. A row that sees no key gets the mean of nothing
    in particular, but finite.
    """
    batch, rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    mask = attention_mask(q_pos, k_pos, causal=causal, window=window)[:, None, None]
    # 0 * NaN is NaN: an empty slot must be cleared, a zero weight is not enough.
    v = jnp.where((k_pos != ABSENT)[:, None, :, None], v, jnp.zeros_like(v))
    # The query heads of one kv head stand together as rows, so that both products are plain
    # batched matmuls over the cache as it lies.
    grouped = q.reshape(batch, rows, kv_heads, groups, dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, groups * rows, dim)
    scores = jnp.einsum("bkmd,bksd->bkms", grouped, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, groups, rows, -1) * dim**-0.5
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    weights = weights.reshape(batch, kv_heads, groups * rows, -1)
    out = jnp.einsum("bkms,bksd->bkmd", weights, v, preferred_element_type=jnp.float32)
    out = out.astype(q.dtype).reshape(batch, kv_heads, groups, rows, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, rows, heads * dim)
