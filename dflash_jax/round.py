"""One round, pure: block, draft, propose, verify, accept, commit.

At every round boundary the target and the drafter hold the same rows: prompt + emitted - 1, for
the last emitted token (the anchor) is decided but has no row yet.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.config import DSparkHarvest
from dflash_jax.draft import DFlashDraft, ctx_features, forward_round, ingest_ctx
from dflash_jax.kv import DraftKV, write_at
from dflash_jax.layers import linear
from dflash_jax.targets import Target
from dflash_jax.window import dspark_accept_prefix


@dataclasses.dataclass(frozen=True)
class RoundPlan:
    """What is fixed at compile time.

    block_size: rows drafted; 1 means no drafter (plain decoding).
    verify_width: rows the target verifies, anchor included.
    capacity: rows a sequence may commit.
    """

    block_size: int
    verify_width: int
    capacity: int
    harvest: DSparkHarvest = DSparkHarvest.DFLASH


@struct.dataclass
class DecodeState:
    """Everything a round reads and writes; `B` sequences side by side.

    target: the target's state; draft: the drafter's KV (None when decoding plainly).
    anchor `[B]`: last emitted token, not yet in any cache.
    tokens `[B, capacity + w]`: emitted tokens, valid below `emitted [B]`.
    budget `[B]`: most tokens to emit; done `[B]`: frozen rows.
    verify_cap `[B]`: verify rows that may be accepted, anchor included (1: accept nothing).
    rounds, drafted `[B]`: rounds taken, drafts verified.
    gains `[B, capacity + 1]`: tokens gained in each round, valid below `rounds`.
    draft_fault, target_fault `[B]`: first row of non-finite logits, -1 while there is none.
    """

    target: Any
    draft: DraftKV | None
    anchor: jax.Array
    tokens: jax.Array
    emitted: jax.Array
    budget: jax.Array
    done: jax.Array
    verify_cap: jax.Array
    rounds: jax.Array
    drafted: jax.Array
    gains: jax.Array
    draft_fault: jax.Array
    target_fault: jax.Array


def draft_logits(target: Target, draft: DFlashDraft, hidden: jax.Array) -> jax.Array:
    """Draft rows `[..., H]` -> f32 logits `[..., V]`, by the target's head or the drafter's own.

    The output multiplier comes first, the soft cap second; both touch draft logits only.
    """
    if draft.head is None:
        logits = target.logits(hidden)
    else:
        logits = linear(hidden, draft.head.lm_head, dtype=jnp.float32)
    if draft.config.output_multiplier != 1.0:
        logits = logits * draft.config.output_multiplier
    cap = draft.config.final_logit_softcapping
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def propose_rows(draft: DFlashDraft, logits: jax.Array) -> jax.Array:
    """DFlash rows: the argmax of each row `[..., V]`, ties to the lower id, as a target id."""
    ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return ids if draft.head is None else ids + draft.head.d2t[ids]


def first_fault(logits: jax.Array) -> jax.Array:
    """`[B, rows, V]` -> `[B]`: the first row whose best logit is not finite, -1 if all are.

    argmax picks a NaN where there is one, so the best logit alone tells.
    """
    bad = ~jnp.isfinite(jnp.max(logits, axis=-1))
    return jnp.where(bad.any(axis=-1), jnp.argmax(bad, axis=-1), -1).astype(jnp.int32)


def propose_block(
    target: Target, draft: DFlashDraft, state: DecodeState, plan: RoundPlan
) -> tuple[jax.Array, jax.Array, DraftKV]:
    """Draft one block: (drafts `[B, verify_width - 1]`, first faulty slot `[B]`, draft KV)."""
    config = draft.config
    masks = jnp.full((state.anchor.shape[0], plan.block_size - 1), config.mask_token_id, jnp.int32)
    block = jnp.concatenate([state.anchor[:, None], masks], axis=1)
    noise = target.embed(block) * config.input_embedding_scale
    pos = state.draft.len[:, None] + jnp.arange(plan.block_size)
    hidden, kv = forward_round(draft, state.draft, noise, pos)
    first = plan.harvest.first_row
    with jax.named_scope("draft_head"):
        logits = draft_logits(target, draft, hidden[:, first : first + plan.verify_width - 1])
        return propose_rows(draft, logits), first_fault(logits), kv


def clip_gain(
    state: DecodeState, vam: jax.Array, accepted: jax.Array, stop_ids: jax.Array, room: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Tokens gained `[B]` after every limit, and whether the row is finished `[B]`.

    A round gains its accepted drafts and one more; the budget, the context's end and the first
    stop token among the emitted ids (itself kept) cut that. A frozen row gains nothing.
    """
    left = state.budget - state.emitted
    gain = jnp.minimum(accepted + 1, jnp.minimum(left, room))
    rows = jnp.arange(vam.shape[1])
    stops = (vam[..., None] == stop_ids).any(-1) & (rows < gain[:, None])
    stopped = stops.any(axis=1)
    gain = jnp.where(stopped, jnp.argmax(stops, axis=1) + 1, gain)
    gain = jnp.where(state.done, 0, gain)
    done = state.done | stopped | (gain == left) | (gain == room)
    return gain.astype(jnp.int32), done


def spec_round(
    target: Target,
    draft: DFlashDraft | None,
    state: DecodeState,
    stop_ids: jax.Array,
    plan: RoundPlan,
) -> DecodeState:
    """One round of greedy speculative decoding (or one plain step where `draft` is None)."""
    cand, kv, fault = state.anchor[:, None], None, jnp.full_like(state.anchor, -1)
    taps: tuple[int, ...] = ()
    if draft is not None:
        with jax.named_scope("draft"):
            drafts, fault, kv = propose_block(target, draft, state, plan)
        cand = jnp.concatenate([cand, drafts], axis=1)
        taps = draft.config.target_layer_ids
    room = plan.capacity - state.target.len
    width = jnp.minimum(jnp.minimum(state.verify_cap, plan.verify_width), room)
    with jax.named_scope("verify"):
        out, target_state = target.forward(state.target, cand, taps)
        logits = target.logits(out.hidden)
        vam = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    with jax.named_scope("accept"):
        accepted = dspark_accept_prefix(cand, vam, width)
        gain, done = clip_gain(state, vam, accepted, stop_ids, room)
        target_fault = first_fault(logits)
        live = ~state.done
        fault = jnp.where(live, fault, -1)
        target_fault = jnp.where(live & (target_fault < gain), target_fault, -1)
    with jax.named_scope("commit"):
        pos = state.target.len[:, None] + jnp.arange(cand.shape[1])
        target_state = target.commit(target_state, gain)
        if draft is not None:
            kv = ingest_ctx(draft, kv, ctx_features(draft, out.taps), pos, gain)
    last = jnp.take_along_axis(vam, jnp.maximum(gain - 1, 0)[:, None], axis=1)[:, 0]
    return state.replace(
        target=target_state,
        draft=kv,
        anchor=jnp.where(gain > 0, last, state.anchor),
        tokens=write_at(state.tokens, vam, state.emitted, axis=1),
        emitted=state.emitted + gain,
        done=done | (fault >= 0) | (target_fault >= 0),
        rounds=state.rounds + live,
        drafted=state.drafted + jnp.where(live, width - 1, 0),
        gains=write_at(state.gains, gain[:, None], state.rounds, axis=1),
        draft_fault=jnp.maximum(state.draft_fault, fault),
        target_fault=jnp.maximum(state.target_fault, target_fault),
    )
