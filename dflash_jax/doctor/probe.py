"""What a drafter would accept on given texts, under any setting: one compiled program for all.

A setting is a config, a harvest and perhaps other weights. Everything in which two settings of one
checkpoint can differ is an argument of the program, so that a hundred of them compile once.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dflash_jax import selector
from dflash_jax.blocks import block_positions, run_blocks
from dflash_jax.config import DFlashConfig, DSparkHarvest, RopeConfig
from dflash_jax.draft import DFlashDraft, ctx_features
from dflash_jax.kv import ABSENT
from dflash_jax.layers import along_last, linear, rope_frequencies, scaled
from dflash_jax.markov import confidence_raws, teacher_logits
from dflash_jax.targets import dense

WORST = -6.0
"""Least log-probability counted: one hopeless token shall not outweigh all others."""
CANDIDATES = 16
"""A DFlash2 setting may offer up to so many candidates (or the stated number, where larger)."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to run a checkpoint.

    config: its fields rule, but for geometry, which the weights fix; a tap may be -1 (the
    embedding). raw_last: the tap on the target's last layer is taken before the final norm.
    edit: of the weights, None to leave them.
    """

    config: DFlashConfig
    harvest: DSparkHarvest
    raw_last: bool = False
    edit: Callable[[DFlashDraft], DFlashDraft] | None = None


class Sight(struct.PyTreeNode):
    """Texts as the target sees them, `B` of `T` tokens.

    ids `[B, T]`; best `[B, T]`: the target's choice after each token; layers `[B, T, N + 2, H]`:
    the embedding, every layer's output, and the last one's after the final norm.
    anchors `[B, A]`: tokens to draft from; what follows them is the target's greedy text.
    """

    ids: jax.Array
    best: jax.Array
    layers: jax.Array
    anchors: jax.Array

    def rows(self, index: slice) -> "Sight":
        """Some of the texts."""
        return jax.tree.map(lambda x: x[index], self)


AnyArray = jax.Array | np.ndarray


class Knobs(struct.PyTreeNode):
    """A setting as arrays, for L layers and k taps.

    places `[k]`: of the taps, in `Sight.layers`. causal, window `[L]`. cap: infinite where off.
    """

    places: AnyArray
    mask_id: AnyArray
    noise_scale: AnyArray
    inv_freq: AnyArray
    rope_scale: AnyArray
    causal: AnyArray
    window: AnyArray
    eps: AnyArray
    block: AnyArray
    first: AnyArray
    multiplier: AnyArray
    cap: AnyArray
    top_k: AnyArray


class Scores(struct.PyTreeNode):
    """Teacher-forced drafting, slot by slot `[n, S]`, one row an anchor.

    known: the slot is drafted, and the text there is what the target writes greedily. correct: the
    draft is the text's token. logp: the drafter's log-probability of it, no less than WORST (among
    the selector's candidates, for DFlash2). raws: of DSpark's confidence head, before the sigmoid.
    finite: no logit was NaN or infinite. texts: how many the anchors lie in, equally many in each.
    """

    known: np.ndarray
    correct: np.ndarray
    logp: np.ndarray
    raws: np.ndarray | None
    finite: bool
    texts: int

    @property
    def first(self) -> float:
        """Position-1 acceptance."""
        return float(self.correct[:, 0].mean())

    @property
    def lengths(self) -> np.ndarray:
        """Drafts accepted at each anchor `[n]`."""
        return np.cumprod(self.correct, axis=1).sum(1)

    @property
    def tokens(self) -> float:
        """Tokens a round, the target's own one included."""
        return 1.0 + float(self.lengths.mean())


def look(target: dense.DenseTarget, ids: np.ndarray, anchors: np.ndarray) -> Sight:
    """One forward of the target over texts `ids [B, T]`, every layer's output kept."""
    # Behind an added layer that does nothing, the last real one's output is a tap like any other.
    # (Its zeros are arguments: folded into the program, they came out as NaN on CPUs.)
    config, last = target.config, target.layers[-1]
    idle = last.replace(o=jnp.zeros_like(last.o), down=jnp.zeros_like(last.down))
    deeper = target.replace(
        layers=[*target.layers, idle],
        config=dataclasses.replace(
            config,
            num_hidden_layers=config.num_hidden_layers + 1,
            layer_window=(*config.layer_window, None),
        ),
    )
    return _look(deeper, jnp.asarray(ids, jnp.int32), jnp.asarray(anchors, jnp.int32))


@jax.jit
def _look(deeper, ids, anchors):
    every = tuple(range(len(deeper.layers)))
    out, _ = deeper.forward(deeper.init_state(*ids.shape), ids, every)
    outputs = out.taps.reshape(*ids.shape, len(every), -1)
    layers = jnp.concatenate([deeper.embed(ids)[..., None, :], outputs], axis=-2)
    best = jax.lax.map(lambda row: jnp.argmax(deeper.logits(row), axis=-1), out.hidden)
    return Sight(ids, best.astype(jnp.int32), layers, anchors)


def tap_place(tap: int, layers: int, raw_last: bool) -> int:
    """Where a tap lies in `Sight.layers`: id L is the output of layer L, the last one's normed."""
    return layers + 1 if tap == layers - 1 and not raw_last else tap + 1


def knobs(setting: Setting, target_layers: int) -> Knobs:
    """A setting's numbers."""
    config = setting.config
    inv_freq, scale = rope_frequencies(config.rope, config.head_dim)
    places = [tap_place(t, target_layers, setting.raw_last) for t in config.target_layer_ids]
    cap, two = config.final_logit_softcapping, config.dflash2
    f32, i32 = partial(np.asarray, dtype=np.float32), partial(np.asarray, dtype=np.int32)
    return Knobs(
        places=i32(places),
        mask_id=i32(config.mask_token_id),
        noise_scale=f32(config.input_embedding_scale),
        inv_freq=f32(inv_freq),
        rope_scale=f32(scale),
        causal=np.asarray(config.layer_causal),
        window=i32([1 << 30 if w is None else w for w in config.layer_window]),
        eps=f32(config.rms_norm_eps),
        block=i32(config.block_size),
        first=i32(setting.harvest.first_row),
        multiplier=f32(config.output_multiplier),
        cap=f32(math.inf if cap is None else cap),
        top_k=i32(1 if two is None else two.selector_top_k),
    )


def bare(draft: DFlashDraft) -> DFlashDraft:
    """The drafter without the statements that a setting makes, so that all share one program."""
    config, head = draft.config, draft.dflash2
    if head is not None:
        most = min(max(head.top_k, CANDIDATES), head.successor.shape[0])
        head = head.replace(top_k=most)
    silent = dataclasses.replace(
        config,
        family="dflash",
        rms_norm_eps=0.0,
        rope=RopeConfig(1.0),
        block_size=0,
        mask_token_id=0,
        target_layer_ids=tuple(range(len(config.target_layer_ids))),
        layer_causal=(),
        layer_window=(),
        num_target_layers=None,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
        dspark=None,
        dflash2=None,
    )
    return draft.replace(config=silent, dflash2=head)


class Probe:
    """Scores settings of one drafter; every call with the same `slots` and `rows` is one program.

    slots: drafts scored at an anchor. rows: of the block; a setting's block may be shorter.
    """

    def __init__(self, target: dense.DenseTarget, draft: DFlashDraft, slots: int, rows: int):
        self._target, self._draft = target, draft
        self._slots, self._rows = slots, rows

    def score(self, sight: Sight, setting: Setting) -> Scores:
        """Draft at every anchor of `sight` under `setting`."""
        draft = self._draft if setting.edit is None else setting.edit(self._draft)
        numbers = knobs(setting, len(self._target.layers))
        out = _score(self._target, bare(draft), sight, numbers, self._slots, self._rows)
        known, correct, logp, raws, finite = jax.tree.map(np.asarray, out)
        logp = np.where(np.isfinite(logp), np.maximum(logp, WORST), WORST)
        return Scores(
            known=known,
            correct=correct & known,
            logp=np.where(known, logp, 0.0),
            raws=raws,
            finite=bool(finite),
            texts=sight.ids.shape[0],
        )


@partial(jax.jit, static_argnames=("slots", "rows"))
def _score(target, draft, sight, knobs, slots, rows):
    draft = draft.replace(config=dataclasses.replace(draft.config, rms_norm_eps=knobs.eps))
    batch, width = sight.ids.shape
    segment = jnp.ones(sight.ids.shape, jnp.int32)
    q_pos, k_pos = block_positions(segment, sight.anchors, rows)

    def mask(index):
        distance = q_pos[..., :, None] - k_pos[..., None, :]
        column = along_last(jnp.arange(width + rows), distance.ndim)
        seen = (k_pos != ABSENT)[..., None, :] & (column < width + knobs.block)
        seen = seen & ((distance >= 0) | ~knobs.causal[index])
        return seen & (jnp.abs(distance) < knobs.window[index])

    def tables(pos):
        angles = pos[..., None].astype(jnp.float32) * along_last(knobs.inv_freq, pos.ndim + 1)
        return jnp.cos(angles) * knobs.rope_scale, jnp.sin(angles) * knobs.rope_scale

    taps = jnp.take(sight.layers, knobs.places, axis=2)
    feats = ctx_features(draft, taps.reshape(batch, width, -1))
    first = jnp.take_along_axis(sight.ids, sight.anchors, axis=1)[..., None]
    masks = jnp.broadcast_to(knobs.mask_id, (*first.shape[:2], rows - 1))
    noise = target.embed(jnp.concatenate([first, masks], axis=-1).reshape(batch, -1))
    noise = scaled(noise, knobs.noise_scale).reshape(*first.shape[:2], rows, -1)
    ctx_pos = jnp.broadcast_to(jnp.arange(width), sight.ids.shape)
    hidden = run_blocks(draft, feats, noise, q_pos, ctx_pos, tables, mask)

    slot = jnp.arange(slots)
    place = jnp.minimum(knobs.first + slot, rows - 1)
    hidden = jnp.take(hidden, place, axis=2)
    at = sight.anchors[..., None] + along_last(slot, sight.anchors.ndim + 1)
    inside, at = at + 1 < width, jnp.minimum(at, width - 2)

    def pick(table, index):
        return jnp.take_along_axis(table, index.reshape(batch, -1), 1).reshape(index.shape)

    labels, previous = pick(sight.ids, at + 1), pick(sight.ids, at)
    greedy = jnp.cumprod(labels == pick(sight.best, at), axis=-1) > 0
    known = greedy & inside & along_last(knobs.first + slot < knobs.block, inside.ndim)
    # The whole vocabulary's logits exist for one text at a time.
    head = partial(_score_rows, target, draft, knobs)
    correct, logp, finite = jax.lax.map(lambda xs: head(*xs), (hidden, previous, labels))
    raws = None
    if draft.confidence is not None:
        raws = jax.vmap(jax.vmap(partial(confidence_raws, draft.confidence, draft.markov)))
        raws = raws(hidden, previous).reshape(-1, slots)
    flat = [x.reshape(-1, slots) for x in (known, correct, logp)]
    return *flat, raws, jnp.all(finite | ~known.reshape(finite.shape))


def _score_rows(target, draft, knobs, hidden, previous, labels):
    """One text's slots: whether each draft `[A, S]` is right, the log-probability of its label,
    and whether the row's numbers are finite.
    """
    if draft.head is None:
        logits = target.logits(hidden)
        true_ids = jnp.arange(logits.shape[-1])
    else:
        logits = linear(hidden, draft.head.lm_head, dtype=jnp.float32)
        true_ids = jnp.arange(logits.shape[-1]) + draft.head.d2t
    never = jnp.finfo(jnp.float32).min
    shaped = logits * knobs.multiplier
    capped = knobs.cap * jnp.tanh(shaped / knobs.cap)
    shaped = jnp.where(jnp.isfinite(knobs.cap), capped, shaped)
    logits = jnp.where(logits == never, never, shaped)
    if draft.markov is not None:
        logits = jax.vmap(partial(teacher_logits, draft.markov))(logits, hidden, previous)
    finite = jnp.isfinite(jnp.max(logits, axis=-1))
    if draft.dflash2 is not None:
        logits, cand = _candidate_scores(draft.dflash2, knobs, logits, hidden, previous)
        ids = true_ids[cand]
    else:
        ids = jnp.broadcast_to(true_ids, logits.shape)
    choice = jnp.argmax(logits, axis=-1)[..., None]
    token = jnp.take_along_axis(ids, choice, axis=-1)[..., 0]
    of_label = jnp.max(jnp.where(ids == labels[..., None], logits, -jnp.inf), axis=-1)
    return token == labels, of_label - jax.nn.logsumexp(logits, axis=-1), finite


def _candidate_scores(head, knobs, logits, hidden, previous):
    """DFlash2's scores `[A, S, K]` of its candidates after the given tokens, and the candidates."""
    unary, cand = selector.top_candidates(logits, head.top_k, "xla")
    weights = head.predecessor[previous].astype(jnp.float32)
    weights = weights * selector.hidden_projection(head, hidden)
    pairs = jnp.sum(weights[..., None, :] * head.successor[cand].astype(jnp.float32), axis=-1)
    offered = jnp.arange(head.top_k) < knobs.top_k
    return jnp.where(offered, unary + pairs, jnp.finfo(jnp.float32).min), cand
