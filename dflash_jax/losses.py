"""Losses of drafted blocks: through the frozen head, some rows of logits at a time.

What a family adds to the loss is here too: DSpark's teacher-forced Markov bias and confidence,
DFlash2's candidate selection.
"""

import dataclasses
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.draft import DFlashDraft
from dflash_jax.markov import ConfidenceHead, MarkovHead, confidence_raws, teacher_logits
from dflash_jax.propose import draft_logits
from dflash_jax.selector import DFlash2Head, hidden_projection, top_candidates
from dflash_jax.targets import Target


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a training run does at every step.

    anchors: blocks a sequence. weighting: what a slot's loss weighs (`slot_weights`); gamma: slots
    over which `decay` falls to 1/e. ce, kl, l1: weights of the cross-entropy on the text's tokens,
    of KL(target || drafter) and of the L1 distance between the two laws. selector: of DFlash2's
    cross-entropy over its candidates. confidence: of DSpark's binary cross-entropy against the
    laws' overlap. weight_decay, clip (of the gradient's global norm), optimizer: see
    `training.make_optimizer`. ema: decay of the averaged weights, which are what is evaluated and
    shipped. head_rows: rows of logits held at a time.
    """

    anchors: int = 64
    weighting: Literal["decay", "reach"] = "decay"
    gamma: float = 4.0
    ce: float = 0.5
    kl: float = 0.5
    l1: float = 0.0
    selector: float = 1.0
    confidence: float = 1.0
    weight_decay: float = 0.01
    clip: float = 1.0
    ema: float = 0.998
    optimizer: Literal["adamw", "muon"] = "adamw"
    head_rows: int = 2048


class Heads(NamedTuple):
    """The trainable parts that turn hidden rows into a proposal (None where a family has none)."""

    markov: MarkovHead | None
    confidence: ConfidenceHead | None
    dflash2: DFlash2Head | None


class Blocks(NamedTuple):
    """N blocks to score: rows, teacher `[N, nd, H]`, the drafter's and the target's hidden rows for
    the same tokens; previous, labels `[N, nd]` ids; labelled `[N, nd]`: which slots have a label.
    """

    rows: jax.Array
    teacher: jax.Array
    previous: jax.Array
    labels: jax.Array
    labelled: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def head_loss(
    recipe: Recipe, target: Target, draft: DFlashDraft, heads: Heads, blocks: Blocks
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weighted loss of blocks through the frozen head: (sum, sum of the weights, which choices
    `[N, nd]` are right).

    Differentiable in `heads` and `blocks.rows`. The logits of some `recipe.head_rows` rows exist at
    a time; their gradient is taken on the spot, in the forward pass, so that backward needs neither
    the logits nor their recomputation.
    """
    return _head_pass(recipe, target, draft, heads, blocks, grad=False)[0]


def _head_pass(recipe, target, draft, heads, blocks, *, grad):
    count, drafts = blocks.labels.shape
    size = min(max(1, recipe.head_rows // drafts), count)
    padding = -count % size

    def chunks(x):
        x = jnp.pad(x, ((0, padding), *[(0, 0)] * (x.ndim - 1)))
        return x.reshape(-1, size, *x.shape[1:])

    def score(heads, rows, chunk):
        return score_blocks(recipe, target, draft, heads, chunk._replace(rows=rows))

    def step(total: Any, chunk: Blocks) -> tuple[Any, Any]:
        if not grad:
            loss, (weight, correct) = score(heads, chunk.rows, chunk)
            return (total[0] + loss, total[1] + weight, total[2]), (correct, None)
        slopes = jax.value_and_grad(score, argnums=(0, 1), has_aux=True)
        (loss, (weight, correct)), (of_heads, of_rows) = slopes(heads, chunk.rows, chunk)
        of_heads = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total[2], of_heads)
        return (total[0] + loss, total[1] + weight, of_heads), (correct, of_rows)

    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), heads)
    with jax.named_scope("head_loss"):
        (loss, weight, of_heads), (correct, slope) = jax.lax.scan(
            step, (jnp.float32(0), jnp.float32(0), zero), jax.tree.map(chunks, blocks)
        )
    slope = None if slope is None else slope.reshape(-1, *slope.shape[2:])[:count]
    return (loss, weight, correct.reshape(-1, drafts)[:count]), (of_heads, slope)


def slot_weights(recipe: Recipe, log_q: jax.Array, labelled: jax.Array) -> jax.Array:
    """What each slot's loss weighs `[N, nd]`, given the drafter's log-probability of its label.

    Args: log_q, labelled `[N, nd]`; slots without a label weigh nothing, and with `reach` neither
    do those behind them. ValueError for an unknown weighting.

    decay: exp(-(k - 1) / gamma) for slot k. reach: the probability that the slots before it are
    all accepted (taken to be the drafter's own of their labels), over the round's expected length.
    Rounds start more often where they are short, and a slot behind a rejected one counts for
    nothing: this is how often decoding looks at it.
    """
    if recipe.weighting == "decay":
        weights = jnp.exp(-jnp.arange(log_q.shape[-1], dtype=jnp.float32) / recipe.gamma)
    elif recipe.weighting == "reach":
        log_q = jax.lax.stop_gradient(jnp.where(labelled, log_q, -jnp.inf))
        accepted = jnp.exp(jnp.cumsum(log_q, axis=-1))
        before = jnp.concatenate([jnp.ones_like(accepted[..., :1]), accepted[..., :-1]], axis=-1)
        weights = before / (1.0 + accepted.sum(axis=-1, keepdims=True))
    else:
        raise ValueError(f"weighting: expected 'decay' or 'reach', found {recipe.weighting!r}")
    return jnp.where(labelled, weights, 0.0)


def score_blocks(
    recipe: Recipe, target: Target, draft: DFlashDraft, heads: Heads, blocks: Blocks
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The loss of whole blocks, all logits at once: (weighted sum, (sum of the weights, right
    choices `[n, nd]`)).

    Right means what inference would choose after the same tokens: the argmax, or the selector's
    best candidate (the teacher's token is put among the candidates for the loss only).
    """
    logits = draft_logits(target, draft, blocks.rows)
    if heads.markov is not None:
        corrected = jax.vmap(teacher_logits, in_axes=(None, 0, 0, 0))
        logits = corrected(heads.markov, logits, blocks.rows, blocks.previous)
    log_q = jax.nn.log_softmax(logits)
    of_label = jnp.take_along_axis(log_q, blocks.labels[..., None], axis=-1)[..., 0]
    weights = slot_weights(recipe, of_label, blocks.labelled)
    loss = recipe.ce * -of_label
    log_p = _teacher_log_probs(target, draft, blocks.teacher)
    if recipe.kl:
        loss += recipe.kl * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    distance = None
    if recipe.l1 or heads.confidence is not None:
        distance = jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1)
        loss += recipe.l1 * distance
    choice = jnp.argmax(logits, axis=-1)
    if heads.confidence is not None:
        assert distance is not None
        raws = jax.vmap(confidence_raws, in_axes=(None, None, 0, 0))
        # The head reads the rows as they are: it may not bend them to be easier to judge.
        fixed = jax.lax.stop_gradient((heads.markov, blocks.rows))
        raw = raws(heads.confidence, *fixed, blocks.previous)
        overlap = jax.lax.stop_gradient(1.0 - 0.5 * distance)
        wrong = jax.nn.softplus(raw) - overlap * raw
        loss += recipe.confidence * wrong
    if heads.dflash2 is not None:
        selector_loss, choice = _score_candidates(heads.dflash2, logits, blocks)
        loss += recipe.selector * selector_loss
    return jnp.sum(loss * weights), (jnp.sum(weights), choice == blocks.labels)


def _teacher_log_probs(target, draft, teacher):
    """The target's law `[..., V]` over the draft vocabulary, in logs."""
    wanted = jax.lax.stop_gradient(target.logits(teacher))
    if draft.head is not None:
        wanted = wanted[..., jnp.arange(draft.head.d2t.shape[0]) + draft.head.d2t]
    return jax.nn.log_softmax(wanted)


def _score_candidates(
    head: DFlash2Head, logits: jax.Array, blocks: Blocks
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy over the candidates after the teacher's predecessor, and the serving choice."""
    _, cand = top_candidates(jax.lax.stop_gradient(logits), head.top_k, "xla")
    labels = blocks.labels[..., None]
    missing = (cand != labels).all(axis=-1)
    offered = cand.at[..., -1].set(jnp.where(missing, labels[..., 0], cand[..., -1]))
    unary = jnp.take_along_axis(logits, offered, axis=-1)
    weights = head.predecessor[blocks.previous].astype(jnp.float32)
    weights = weights * hidden_projection(head, blocks.rows)
    pairs = jnp.sum(weights[..., None, :] * head.successor[offered].astype(jnp.float32), axis=-1)
    scores = unary + pairs
    gold = jnp.argmax(offered == labels, axis=-1)[..., None]
    loss = -jnp.take_along_axis(jax.nn.log_softmax(scores), gold, axis=-1)[..., 0]
    place = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    inserted = missing[..., None] & (place == head.top_k - 1)
    best = jnp.argmax(jnp.where(inserted, -jnp.inf, scores), axis=-1)[..., None]
    return loss, jnp.take_along_axis(offered, best, axis=-1)[..., 0]


def _head_loss_forward(recipe, target, draft, heads, blocks):
    out, slopes = _head_pass(recipe, target, draft, heads, blocks, grad=True)
    kinds = jax.tree.map(lambda x: jnp.zeros((), x.dtype), heads)
    return out, (slopes, kinds)


def _head_loss_backward(recipe, saved, cotangent):
    (of_heads, of_rows), kinds = saved
    scale = cotangent[0]
    of_heads = jax.tree.map(lambda g, kind: (scale * g).astype(kind.dtype), of_heads, kinds)
    of_rows = (scale * of_rows.astype(jnp.float32)).astype(of_rows.dtype)
    none: Any = None
    return None, None, of_heads, Blocks(of_rows, none, none, none, none)


head_loss.defvjp(_head_loss_forward, _head_loss_backward)
