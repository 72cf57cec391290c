"""The drafter: weights, context features and the non-causal block forward.

Source of the formulas: z-lab/dflash `dflash/model.py`. Public functions take the pytree first and
accept one sequence (`[rows, H]`) or a batch (`[B, rows, H]`) alike.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dflash_jax import kernels, sharding
from dflash_jax import kv as cache
from dflash_jax.attention import (
    BlockPlace,
    append_and_attend,
    block_attention,
    project_qkv,
    split_heads,
)
from dflash_jax.config import DFlashConfig
from dflash_jax.conv import DFlash2Conv, d2_conv_finish, d2_conv_prepare
from dflash_jax.kernels import Implementation
from dflash_jax.kv import ABSENT, DraftKV
from dflash_jax.layers import (
    SUM_TILE,
    add_norm,
    apply_rope,
    linear,
    rms_norm,
    rope_tables,
    row_linear,
    swiglu,
)
from dflash_jax.markov import ConfidenceHead, MarkovHead
from dflash_jax.quant import QuantizedLinear
from dflash_jax.selector import DFlash2Head
from dflash_jax.sharding import ALONE, Sums

Matrix = jax.Array | QuantizedLinear


class DFlashLayer(struct.PyTreeNode):
    """One drafter layer; fused rows keep the order q, k, v and gate, up.

    input_norm, post_norm `[H]`; qkv `[(heads + 2 * kv_heads) * D, H]`; q_norm, k_norm `[D]`;
    o `[H, heads * D]`; gate_up `[2 * F, H]`; down `[H, F]`. The convolutions are DFlash2's, None
    in the other families.
    """

    input_norm: jax.Array
    qkv: Matrix
    q_norm: jax.Array
    k_norm: jax.Array
    o: Matrix
    post_norm: jax.Array
    gate_up: Matrix
    down: Matrix
    attention_conv: DFlash2Conv | None = None
    mlp_conv: DFlash2Conv | None = None


class DraftHead(struct.PyTreeNode):
    """A drafter's own head, as a rule over a smaller vocabulary (see `head.trim_head`).

    lm_head `[V_draft, H]`; d2t `[V_draft]` int32 offsets: target id = draft id + d2t[draft id].
    """

    lm_head: Matrix
    d2t: jax.Array

    def target_ids(self, ids: jax.Array) -> jax.Array:
        """Target ids of draft ids."""
        return ids + self.d2t[ids]


class DFlashDraft(struct.PyTreeNode):
    """A drafter: config (static), layers, fc `[H, taps * H]`, hidden_norm `[H]`, norm `[H]`.

    Where `config.precision` names a format, the layers' projections, fc and a head's rows are
    `QuantizedLinear`s. `head` is None where the target's lm_head makes the draft logits, which is
    the usual case.
    `markov` and `confidence` are DSpark's, `dflash2` is DFlash2's selector; None elsewhere.
    `mesh`: what it is split over, see `sharding`; None on one device.
    `context_kv`: set by `for_rounds` alone.
    """

    layers: list[DFlashLayer]
    fc: Matrix
    hidden_norm: jax.Array
    norm: jax.Array
    head: DraftHead | None
    markov: MarkovHead | None
    confidence: ConfidenceHead | None
    dflash2: DFlash2Head | None
    config: DFlashConfig = struct.field(pytree_node=False)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    context_kv: Matrix | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """Compute dtype of activations and cache."""
        return self.norm.dtype


def for_rounds(draft: DFlashDraft) -> DFlashDraft:
    """The drafter with what every round would make of its weights anew: all layers' k and v rows in
    one matrix `context_kv` and, for a GPU, `fc` in whole tiles of columns.

    For programs that run many rounds. On a mesh, the drafter as it is.
    """
    if draft.mesh is not None:
        return draft
    fc = draft.fc
    if isinstance(fc, jax.Array) and kernels.device_refusal() is None:
        fc = jnp.pad(fc, ((0, 0), (0, -fc.shape[1] % SUM_TILE)))
    return draft.replace(fc=fc, context_kv=_context_rows(draft))


def _context_rows(draft: DFlashDraft) -> Matrix:
    """The k and v rows of every layer's `qkv`, `[layers * 2 * kv_heads * D, H]`."""

    def stack(*leaves: jax.Array) -> jax.Array:
        return jnp.concatenate([leaf[draft.config.q_size :] for leaf in leaves])

    return jax.tree.map(stack, *(layer.qkv for layer in draft.layers))


def ctx_features(
    draft: DFlashDraft, taps: jax.Array, implementation: Implementation = None
) -> jax.Array:
    """`hidden_norm(fc(taps))`: target taps `[..., rows, taps * H]` -> features `[..., rows, H]`.

    implementation: of a quantised drafter's products, here and below.

    Raises ValueError for taps of another width (a drafter of another target).
    """
    expected = draft.config.tap_size
    if taps.shape[-1] != expected:
        raise ValueError(
            f"taps: expected width {expected} ({len(draft.config.target_layer_ids)} taps of "
            f"hidden size {draft.config.hidden_size}), found {taps.shape[-1]}"
        )
    run = partial(_ctx_features, implementation=implementation)
    with jax.named_scope("ctx_features"):
        if draft.mesh is None:
            return run(draft, taps)
        lead = [sharding.DATA, *[None] * (taps.ndim - 2)] if taps.ndim > 2 else [None]
        summed = sharding.sums(draft).fc
        return sharding.per_shard(
            partial(run, axis=summed),
            draft,
            taps,
            in_specs=(P(*lead, summed),),
            out_specs=P(*lead),
            checked=kernels.resolve(implementation) == "xla",
        )


def _ctx_features(draft, taps, implementation: Implementation, axis: str | None = None):
    rows = taps.astype(draft.dtype)
    padding = draft.fc.shape[1] - rows.shape[-1]
    if padding:  # see `for_rounds`
        rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, padding)])
    features = row_linear(rows, draft.fc, axis, implementation=implementation)
    return rms_norm(features, draft.hidden_norm, draft.config.rms_norm_eps)


def forward(
    draft: DFlashDraft, target_hidden: jax.Array, noise_emb: jax.Array, pos: jax.Array
) -> jax.Array:
    """`forward_block` over the features of raw taps `target_hidden [..., ctx, taps * H]`."""
    return forward_block(draft, ctx_features(draft, target_hidden, "xla"), noise_emb, pos)


def forward_block(
    draft: DFlashDraft, ctx_f: jax.Array, noise_emb: jax.Array, pos: jax.Array
) -> jax.Array:
    """One block over uncached context features.

    Args:
      ctx_f: `[..., ctx, H]`, from `ctx_features`.
      noise_emb: `[..., b, H]`, target embedding rows of `[anchor, MASK x (b - 1)]`.
      pos: `[..., ctx + b]` int, absolute positions: context rows, then block rows.

    Returns the final normed hidden rows `[..., b, H]`; the target's lm_head turns them into logits.
    """
    if noise_emb.ndim == 2:
        return forward_block(draft, ctx_f[None], noise_emb[None], pos[None])[0]
    if draft.mesh is None:
        return _forward_block(draft, ctx_f, noise_emb, pos)
    run = partial(_forward_block, sums=sharding.sums(draft))
    by_row = {"in_specs": (sharding.ROWS,) * 3, "out_specs": sharding.ROWS}
    return sharding.per_shard(run, draft, ctx_f, noise_emb, pos, **by_row)


def _forward_block(draft, ctx_f, noise_emb, pos, sums: Sums = ALONE) -> jax.Array:
    config, ctx = draft.config, ctx_f.shape[1]
    cos, sin = rope_tables(config.rope, config.head_dim, pos)
    block_rope = cos[:, ctx:], sin[:, ctx:]
    x = noise_emb.astype(draft.dtype)
    for i, layer in enumerate(draft.layers):
        ctx_k, ctx_v = context_kv(config, layer, ctx_f, cos[:, :ctx], sin[:, :ctx])

        def attend(h, layer=layer, ctx_k=ctx_k, ctx_v=ctx_v, i=i):
            q, k, v = block_qkv(config, layer, h, *block_rope)
            k = jnp.concatenate([ctx_k, k], axis=1).swapaxes(1, 2)
            v = jnp.concatenate([ctx_v, v], axis=1).swapaxes(1, 2)
            return block_attention(
                q,
                k,
                v,
                pos[:, ctx:],
                pos,
                causal=config.layer_causal[i],
                window=config.layer_window[i],
            )

        x = layer_forward(config, layer, x, attend, sums=sums)
    return rms_norm(x, draft.norm, config.rms_norm_eps)


def ingest_ctx(
    draft: DFlashDraft,
    kv: DraftKV,
    feats: jax.Array,
    pos_new: jax.Array,
    count: jax.Array | None = None,
    implementation: Implementation = None,
) -> DraftKV:
    """Append context features to the draft KV.

    Args:
      feats: `[..., t, H]` new rows in committed order.
      pos_new: `[..., t]` their absolute positions.
      count: `[B]` how many of the t rows count, per sequence (default: all); the rest are written
        beyond the new length, where nothing reads them.

    Returns the cache with `len + count` rows. Raises ValueError when that passes its capacity.
    """
    if feats.ndim == 2:
        feats, pos_new = feats[None], pos_new[None]
    if count is None:
        cache.check_room(kv, feats.shape[1])
        count = jnp.full_like(kv.len, feats.shape[1])
    run = partial(_ingest, implementation=implementation)
    if draft.mesh is None:
        return run(draft, kv, feats, pos_new, count)
    caches = sharding.cache_specs(kv, draft.config, draft.mesh)
    return sharding.per_shard(
        run,
        draft,
        kv,
        feats,
        pos_new,
        count,
        in_specs=(caches, *(sharding.ROWS,) * 3),
        out_specs=caches,
        checked=kernels.resolve(implementation) == "xla",
    )


def _ingest(draft, kv, feats, pos_new, count, implementation: Implementation) -> DraftKV:
    rows, config = feats.shape[1], draft.config
    held = jnp.where(jnp.arange(rows)[None] < count[:, None], pos_new, ABSENT)
    full_slot = cache.reserve(kv.full, rows)
    full = kv.full.replace(pos=cache.mark(kv.full, full_slot, held), next=full_slot + count)
    ring, ring_slot, order = kv.ring, None, None
    if ring is not None and rows > kv.slack:
        ring, order = cache.keep_last(ring, held, kv.ring_rows)
    elif ring is not None:
        ring_slot = cache.reserve(ring, rows)
        ring = ring.replace(pos=cache.mark(ring, ring_slot, held), next=ring_slot + count)
    cos, sin = rope_tables(config.rope, config.head_dim, pos_new)
    new_k, new_v = list(kv.k), list(kv.v)
    rows_of = _context_kv(draft, feats, cos, sin, implementation)
    for i, (k, v) in enumerate(rows_of):
        with jax.named_scope(f"ingest_{i}"):
            if order is not None and kv.ring_layers[i]:
                new_k[i] = cache.gather_rows(kv.k[i], k, order)
                new_v[i] = cache.gather_rows(kv.v[i], v, order)
            else:
                slot = full_slot if ring_slot is None or not kv.ring_layers[i] else ring_slot
                new_k[i] = cache.write_rows(kv.k[i], k, slot)
                new_v[i] = cache.write_rows(kv.v[i], v, slot)
    return kv.replace(k=new_k, v=new_v, len=kv.len + count, full=full, ring=ring)


def forward_round(
    draft: DFlashDraft,
    kv: DraftKV,
    noise_emb: jax.Array,
    pos_block: jax.Array,
    implementation: Implementation = None,
) -> tuple[jax.Array, DraftKV]:
    """One block over the cached context; equals `forward_block` over the same rows.

    The block's own K/V land transiently behind the context rows; the returned cache has the same
    `len` and no trace of them. Shapes as in `forward_block`, with `pos_block [..., b]`. Raises
    ValueError for more rows than `kv.slack`, NotImplementedError as `kernels.resolve` does.
    """
    if noise_emb.ndim == 2:
        hidden, kv = forward_round(draft, kv, noise_emb[None], pos_block[None], implementation)
        return hidden[0], kv
    if noise_emb.shape[1] > kv.slack:
        raise ValueError(
            f"block: expected at most {kv.slack} rows (slack), found {noise_emb.shape[1]}"
        )
    run = partial(_forward_round, implementation=implementation)
    if draft.mesh is None:
        return run(draft, kv, noise_emb, pos_block)
    caches = sharding.cache_specs(kv, draft.config, draft.mesh)
    return sharding.per_shard(
        partial(run, sums=sharding.sums(draft)),
        draft,
        kv,
        noise_emb,
        pos_block,
        in_specs=(caches, sharding.ROWS, sharding.ROWS),
        out_specs=(sharding.ROWS, caches),
        checked=kernels.resolve(implementation) == "xla",
    )


def _forward_round(
    draft, kv, noise_emb, pos_block, implementation: Implementation, sums: Sums = ALONE
) -> tuple[jax.Array, DraftKV]:
    config, rows = draft.config, noise_emb.shape[1]
    books = [kv.full] if kv.ring is None else [kv.full, kv.ring]
    slots = [cache.reserve(book, rows) for book in books]
    nothing = jnp.full_like(pos_block, ABSENT)
    after = [
        book.replace(pos=cache.mark(book, slot, nothing))
        for book, slot in zip(books, slots, strict=True)
    ]
    cos, sin = rope_tables(config.rope, config.head_dim, pos_block)
    places = [
        BlockPlace(
            cos=cos,
            sin=sin,
            q_pos=pos_block,
            k_pos=cache.mark(book, slot, pos_block),
            slot=slot,
            end=cache.context_end(book, slot),
            ring=book.ring,
        )
        for book, slot in zip(books, slots, strict=True)
    ]
    new_k, new_v = list(kv.k), list(kv.v)
    x = noise_emb.astype(draft.dtype)
    for i, layer in enumerate(draft.layers):

        def attend(h, layer=layer, i=i):
            qkv = project_qkv(h, layer.qkv, kv.k[i], implementation)
            attended, new_k[i], new_v[i] = append_and_attend(
                qkv,
                (layer.q_norm, layer.k_norm),
                config.rms_norm_eps,
                places[int(kv.ring_layers[i])],
                kv.k[i],
                kv.v[i],
                causal=config.layer_causal[i],
                window=config.layer_window[i],
                implementation=implementation,
            )
            return attended

        with jax.named_scope(f"draft_layer_{i}"):
            x = layer_forward(config, layer, x, attend, implementation, sums)
    hidden = rms_norm(x, draft.norm, config.rms_norm_eps)
    full, ring = after[0], after[1] if kv.ring is not None else None
    return hidden, kv.replace(k=new_k, v=new_v, full=full, ring=ring)


def layer_forward(
    config: DFlashConfig,
    layer: DFlashLayer,
    x: jax.Array,
    attend: Callable[[jax.Array], jax.Array],
    implementation: Implementation = "xla",
    sums: Sums = ALONE,
) -> jax.Array:
    """One layer on block rows `x [B, b, H]`.

    `attend` takes normed rows, which it projects, to attended heads `[B, b, heads * D]` and brings
    the context (cached or not). The kernels have no gradients: who wants them says so. sums: within
    a shard.
    """
    eps = config.rms_norm_eps
    choice: dict[str, Any] = {"implementation": implementation}
    attention, mlp = layer.attention_conv, layer.mlp_conv
    if attention is None or mlp is None:
        h = rms_norm(x, layer.input_norm, eps)
        x, h = add_norm(x, attend(h), layer.o, layer.post_norm, eps, sums.attention, **choice)
        return x + swiglu(h, layer.gate_up, layer.down, axis=sums.mlp, **choice)
    # DFlash2: each sublayer stands between two convolutions.
    h, dyn = d2_conv_prepare(attention, x, norm=layer.input_norm, eps=eps, **choice)
    out = row_linear(attend(h), layer.o, sums.attention, **choice)
    x = d2_conv_finish(attention, out, dyn, residual=x, **choice)
    h, dyn = d2_conv_prepare(mlp, x, norm=layer.post_norm, eps=eps, **choice)
    out = swiglu(h, layer.gate_up, layer.down, axis=sums.mlp, **choice)
    return d2_conv_finish(mlp, out, dyn, residual=x, **choice)


def block_qkv(
    config: DFlashConfig, layer: DFlashLayer, h: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q `[B, b, heads, D]`, k and v `[B, b, kv_heads, D]` of normed rows `h [B, b, H]`."""
    qkv = linear(h, layer.qkv, implementation="xla")
    norms = (layer.q_norm, layer.k_norm)
    return split_heads(qkv, norms, config.rms_norm_eps, cos, sin, config.num_key_value_heads)


def context_kv(
    config: DFlashConfig,
    layer: DFlashLayer,
    feats: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    implementation: Implementation = "xla",
) -> tuple[jax.Array, jax.Array]:
    """k (normed, roped) and v (raw) `[B, t, kv_heads, D]` of context features `[B, t, H]`.

    Features enter every layer as they are: no input norm.
    """
    projected = linear(feats, layer.qkv, first=config.q_size, implementation=implementation)
    k, v = jnp.split(projected.reshape(*projected.shape[:-1], -1, config.head_dim), 2, axis=-2)
    return apply_rope(rms_norm(k, layer.k_norm, config.rms_norm_eps), cos, sin), v


def _context_kv(
    draft: DFlashDraft,
    feats: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    implementation: Implementation,
) -> list[tuple[jax.Array, jax.Array]]:
    """`context_kv` of all layers, in one product: features are the same in each."""
    config, layers = draft.config, len(draft.layers)
    stacked = _context_rows(draft) if draft.context_kv is None else draft.context_kv
    projected = linear(feats, stacked, implementation=implementation)
    heads = (*feats.shape[:-1], layers, 2, config.num_key_value_heads, config.head_dim)
    rows = projected.reshape(heads)
    norms = jnp.stack([layer.k_norm for layer in draft.layers])[None, None, :, None]
    k = rms_norm(rows[..., 0, :, :], norms, config.rms_norm_eps)
    return [(apply_rope(k[:, :, i], cos, sin), rows[:, :, i, 1]) for i in range(layers)]
