"""Many blocks of a row drafted at once: where they start, what they see, their hidden rows.

A block sees the context rows strictly before its anchor and its own rows, never another block,
exactly as at inference.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.attention import attention_mask
from dflash_jax.draft import DFlashDraft, block_qkv, context_kv, layer_forward
from dflash_jax.kv import ABSENT
from dflash_jax.layers import rms_norm, rope_tables


class Batch(struct.PyTreeNode):
    """Token rows `[B, T]`.

    segment: 0 where padding, else the number of the document a token belongs to; several
    documents may stand one after the other in a row. answer: tokens the target itself produced,
    the only ones that are drafted and labelled.
    """

    ids: jax.Array
    segment: jax.Array
    answer: jax.Array


def segment_positions(segment: jax.Array) -> jax.Array:
    """Position `[B, T]` of each token within its own document."""
    index = jnp.arange(segment.shape[1])[None]
    first = jnp.pad(segment[:, 1:] != segment[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


def legal_anchors(batch: Batch) -> jax.Array:
    """`[B, T]`: tokens a block may start from, as at inference.

    The first token of an answer comes from the prompt's own forward, so every anchor is an answer
    token, and the token after it (the first label) is one of the same document.
    """
    answer = batch.answer & (batch.segment > 0) & (segment_positions(batch.segment) > 0)
    follows = (batch.segment[:, 1:] == batch.segment[:, :-1]) & answer[:, 1:]
    return answer & jnp.pad(follows, ((0, 0), (0, 1)))


def draw_anchors(key: jax.Array, batch: Batch, count: int) -> tuple[jax.Array, jax.Array]:
    """`count` distinct random anchors a row: index `[B, count]`, and which of them are real.

    Rows with fewer legal anchors than `count` bring dummies, whose blocks weigh nothing.
    """
    legal = legal_anchors(batch)
    count = min(count, legal.shape[1])
    score = jnp.where(legal, jax.random.uniform(key, legal.shape), -1.0)
    best, index = jax.lax.top_k(score, count)
    return index, best >= 0


def block_positions(
    segment: jax.Array, anchors: jax.Array, block_size: int
) -> tuple[jax.Array, jax.Array]:
    """Absolute positions of every block's rows `[B, A, b]` and of the keys it has `[B, A, T + b]`.

    Keys are the row's T context tokens, then the block's own rows. Context at or after the anchor
    or of another document is ABSENT, so that `attention_mask` is the one rule for both worlds.
    """
    pos = segment_positions(segment)
    own = jnp.take_along_axis(segment, anchors, axis=1)[..., None]
    start = jnp.take_along_axis(pos, anchors, axis=1)[..., None]
    before = jnp.arange(segment.shape[1])[None, None] < anchors[..., None]
    context = jnp.where(before & (segment[:, None] == own), pos[:, None], ABSENT)
    rows = start + jnp.arange(block_size)[None, None]
    return rows, jnp.concatenate([context, rows], axis=-1)


def block_hidden(
    draft: DFlashDraft,
    feats: jax.Array,
    noise: jax.Array,
    segment: jax.Array,
    anchors: jax.Array,
) -> jax.Array:
    """The drafter's final hidden rows `[B, A, b, H]` of all blocks at once.

    Args:
      feats: context features `[B, T, H]`.
      noise: `[B, A, b, H]`, embedding rows of `[anchor, MASK x (b - 1)]`.
      segment, anchors: `[B, T]`, `[B, A]`.
    """
    config = draft.config
    q_pos, k_pos = block_positions(segment, anchors, noise.shape[2])
    tables = partial(rope_tables, config.rope, config.head_dim)

    def mask(index: int) -> jax.Array:
        causal, window = config.layer_causal[index], config.layer_window[index]
        return attention_mask(q_pos, k_pos, causal=causal, window=window)

    return run_blocks(draft, feats, noise, q_pos, segment_positions(segment), tables, mask)


def run_blocks(
    draft: DFlashDraft,
    feats: jax.Array,
    noise: jax.Array,
    q_pos: jax.Array,
    ctx_pos: jax.Array,
    tables: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    mask: Callable[[int], jax.Array],
) -> jax.Array:
    """`block_hidden` where rope and masks are given: the final hidden rows `[B, A, b, H]`.

    Args:
      feats, noise: as there. q_pos `[B, A, b]`, ctx_pos `[B, T]`: positions of block and context.
      tables: cos and sin `[..., D / 2]` at positions `[...]`. mask: of a layer, by its index: which
        keys (T context rows, then the block's own) each row sees, `[B, A, b, T + b]`.
    """
    config = draft.config
    batch, count, block, hidden = noise.shape
    ctx_rope, row_rope = tables(ctx_pos), tables(q_pos.reshape(batch, count * block))

    def run_layer(index, layer, x, feats):
        seen = jnp.broadcast_to(mask(index), (*q_pos.shape, ctx_pos.shape[1] + block))
        context = context_kv(config, layer, feats, *ctx_rope)

        def attend(h):
            return _attend(*context, seen, *block_qkv(config, layer, h, *row_rope))

        return layer_forward(config, layer, x, attend)

    x = noise.reshape(batch, count * block, hidden).astype(draft.dtype)
    for i, layer in enumerate(draft.layers):
        with jax.named_scope(f"draft_layer_{i}"):
            # The scores of one layer are as large as all its other activations: make them again.
            x = jax.checkpoint(partial(run_layer, i))(layer, x, feats)
    return rms_norm(x, draft.norm, config.rms_norm_eps).reshape(noise.shape)


def _attend(ctx_k, ctx_v, mask, q, k, v):
    """Grouped-query attention of blocks over [context ; own rows], softmax in f32.

    ctx_k, ctx_v `[B, T, kv, D]`; mask `[B, A, b, T + b]`; q `[B, A * b, heads, D]`; k, v
    `[B, A * b, kv, D]` -> `[B, A * b, heads * D]`.
    """
    (batch, rows, heads, dim), kv_heads = q.shape, k.shape[2]
    count, block = mask.shape[1:3]
    context = ctx_k.shape[1]
    q = q.reshape(batch, count, block, kv_heads, heads // kv_heads, dim)
    k, v = (x.reshape(batch, count, block, kv_heads, dim) for x in (k, v))
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = [product("nabkgd,ntkd->nkgabt", q, ctx_k), product("nabkgd,nackd->nkgabc", q, k)]
    scores = jnp.concatenate(scores, axis=-1) * dim**-0.5
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = product("nkgabt,ntkd->nabkgd", weights[..., :context], ctx_v)
    out = out + product("nkgabc,nackd->nabkgd", weights[..., context:], v)
    return out.astype(q.dtype).reshape(batch, rows, heads * dim)
