"""One round, pure: block, draft, propose, window, verify, accept, commit.

At every round boundary the target and the drafter hold the same rows: prompt + emitted - 1, for
the last emitted token (the anchor) is decided but has no row yet.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax import sharding
from dflash_jax.config import DSparkHarvest
from dflash_jax.draft import DFlashDraft, ctx_features, forward_round, ingest_ctx
from dflash_jax.kernels import Implementation
from dflash_jax.kv import DraftKV, DraftKVDtype, write_at
from dflash_jax.layers import scaled
from dflash_jax.propose import (
    Proposal,
    RowDraws,
    draft_logits,
    finite_rows,
    propose,
    propose_tree,
)
from dflash_jax.sampling import Sampler, first_false, leading_count, shaped_logits
from dflash_jax.targets import Target
from dflash_jax.tree import DraftTree, kept, path_tokens
from dflash_jax.verify import Decision, decide_greedy, decide_sampled, decide_tree
from dflash_jax.window import DSparkVtPolicy, Meter, choose_vt, cost_widths, metered

FIXED = DSparkVtPolicy("fixed")


@dataclasses.dataclass(frozen=True)
class RoundPlan:
    """What is fixed at compile time.

    block_size: rows drafted; 1 means no drafter (plain decoding).
    verify_width: most rows the target verifies, anchor included.
    capacity: rows a sequence may commit.
    harvest: which of the block's rows are drafts. policy: how wide a round verifies.
    widths: verify widths to compile, ascending, the last one `verify_width`; the narrowest that
      holds every sequence's window runs. 1 is a round without a draft, for the policy `cost`.
    tree: whether the `verify_width` rows are the nodes of a draft tree, not a chain of drafts.
    sampled: whether any sequence samples; row_draws: see `propose.propose`.
    logprobs: whether to keep the target's log-probability of every emitted token.
    implementation: of the ops that have kernels, see `kernels.resolve`.
    draft_kv_dtype: what the drafter's cache holds.
    """

    block_size: int
    verify_width: int
    capacity: int
    harvest: DSparkHarvest = DSparkHarvest.DFLASH
    policy: DSparkVtPolicy = FIXED
    widths: tuple[int, ...] = ()
    tree: bool = False
    sampled: bool = False
    row_draws: RowDraws = "argmax"
    logprobs: bool = False
    implementation: Implementation = None
    draft_kv_dtype: DraftKVDtype = "auto"

    @property
    def longest(self) -> int:
        """Most drafts that a round accepts."""
        most = self.verify_width - 1
        return min(most, self.harvest.drafts(self.block_size)) if self.tree else most


class DecodeState(struct.PyTreeNode):
    """Everything a round reads and writes; `B` sequences side by side.

    target: the target's state; draft: the drafter's KV (None when decoding plainly).
    anchor `[B]`: last emitted token, not yet in any cache.
    tokens `[B, capacity + 1 + w]`: emitted tokens, valid below `emitted [B]`.
    budget `[B]`: most tokens to emit; done `[B]`: frozen rows.
    verify_cap `[B]`: verify rows that may be accepted, anchor included (1: accept nothing; as many
      run as ever).
    accepted `[B]`: drafts the last round accepted, -1 before the first.
    rounds, drafted `[B]`: rounds taken, drafts verified.
    gains, windows `[B, capacity + 1]`: tokens gained and rows verified in each round.
    draft_fault, target_fault `[B]`: first row of non-finite logits, -1 while there is none.
    sampler: None where every sequence is plainly greedy.
    history `[B, capacity + 1 + w]`: prompt and output, None unless penalties need it.
    logprobs `[B, capacity + 1 + w]`: of `tokens`, None unless asked for.
    meter: what the policy `cost` goes by, None elsewhere.
    """

    target: Any
    draft: DraftKV | None
    anchor: jax.Array
    tokens: jax.Array
    emitted: jax.Array
    budget: jax.Array
    done: jax.Array
    verify_cap: jax.Array
    accepted: jax.Array
    rounds: jax.Array
    drafted: jax.Array
    gains: jax.Array
    windows: jax.Array
    draft_fault: jax.Array
    target_fault: jax.Array
    sampler: Sampler | None = None
    history: jax.Array | None = None
    logprobs: jax.Array | None = None
    meter: Meter | None = None


def propose_block(
    target: Target, draft: DFlashDraft, state: DecodeState, plan: RoundPlan
) -> tuple[Proposal, DraftKV]:
    """Draft one block and propose its first `verify_width - 1` drafts, or its tree."""
    config = draft.config
    masks = jnp.full((state.anchor.shape[0], plan.block_size - 1), config.mask_token_id, jnp.int32)
    block = jnp.concatenate([state.anchor[:, None], masks], axis=1)
    noise = scaled(target.embed(block), config.input_embedding_scale)
    start = state.target.len
    pos = start[:, None] + jnp.arange(plan.block_size)[None]
    assert state.draft is not None
    hidden, kv = forward_round(draft, state.draft, noise, pos, plan.implementation)
    first, count = plan.harvest.first_row, plan.longest
    rows = hidden[:, first : first + count]
    with jax.named_scope("propose"):
        logits = draft_logits(target, draft, rows, plan.implementation)
        if plan.tree:
            nodes, how = plan.verify_width, plan.implementation
            return propose_tree(draft, logits, rows, state.anchor, nodes, how), kv
        filters = uniforms = None
        if plan.sampled:
            assert state.sampler is not None
            filters = state.sampler.filters
            positions = start[:, None] + 1 + jnp.arange(count)[None]
            uniforms = state.sampler.uniforms("draft", positions)
        proposal = propose(
            draft,
            logits,
            rows,
            state.anchor,
            filters,
            uniforms,
            plan.row_draws,
            plan.implementation,
        )
    return proposal, kv


def window(
    state: DecodeState, proposal: Proposal, plan: RoundPlan, wanted: jax.Array | None = None
) -> jax.Array:
    """Rows each sequence verifies `[B]`: its policy's choice within its room.

    wanted `[B]`: the choice where it was made before the draft.
    """

    def choose(raws: jax.Array | None, accepted: jax.Array) -> jax.Array:
        return choose_vt(plan.policy, raws, accepted, plan.verify_width)

    if wanted is None:
        axes = (None if proposal.raws is None else 0, 0)
        wanted = jax.vmap(choose, in_axes=axes)(proposal.raws, state.accepted)
    return jnp.minimum(wanted, plan.capacity - state.target.len)


def clip_gain(
    state: DecodeState, tokens: jax.Array, accepted: jax.Array, stop_ids: jax.Array, room: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Tokens gained `[B]` after every limit, and whether the row is finished `[B]`.

    A round gains its accepted drafts and one more; the budget, the context's end and the first
    stop token among the emitted ids (itself kept) cut that. A frozen row gains nothing.
    stop_ids: `[B, n]`, or `[n]` where all sequences have the same.
    """
    left = state.budget - state.emitted
    gain = jnp.minimum(accepted + 1, jnp.minimum(left, room))
    unlike = (tokens[..., None] != jnp.atleast_2d(stop_ids)[:, None]).all(-1)
    before_stop = leading_count(unlike)
    stopped = before_stop < gain
    gain = jnp.minimum(gain, before_stop + 1)
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
    """One round of speculative decoding, or one plain step: where `draft` is None, or where the
    policy `cost` finds that drafting does not pay now. The drafter is fed in either case.
    """
    settle = partial(settle_round, target, draft, stop_ids, plan)
    ones = jnp.ones_like(state.anchor)
    if draft is None:
        return settle(1, None, ones, state)
    drafted = partial(_drafted_round, target, draft, plan, settle)
    if plan.policy.kind != "cost":
        return drafted(None, state)
    assert state.meter is not None
    live = ~state.done
    held = state.target.len
    wanted = cost_widths(state.meter, plan.widths, held, live, shared=not plan.sampled)
    drafting = (live & (wanted > 1)).any()
    state = at_most_once(~drafting, partial(settle, 1, None, ones), state)
    return at_most_once(drafting, partial(drafted, wanted), state)


def at_most_once(flag: jax.Array, body: Callable[[Any], Any], carry: Any) -> Any:
    """`body(carry)` where `flag []` is true, else `carry`.

    A loop carries caches in place, where the branches of a `lax.cond` would copy them.
    """

    def turn(once: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        return jnp.zeros_like(flag), body(once[1])

    return jax.lax.while_loop(lambda once: once[0], turn, (flag, carry))[1]


def _drafted_round(target, draft, plan, settle, wanted, state) -> DecodeState:
    """Draft, then verify in the narrowest compiled width that holds every sequence's window."""
    with jax.named_scope("draft"):
        proposal, kv = propose_block(target, draft, state, plan)
    wide = window(state, proposal, plan, wanted)
    state = state.replace(draft=kv)
    widths = [w for w in plan.widths if w > 1] or [plan.verify_width]
    if len(widths) == 1:
        return settle(widths[0], proposal, wide, state)
    widest = jnp.max(jnp.where(state.done, 1, wide))
    choice = jnp.sum(widest > jnp.asarray(widths[:-1]))
    for index, rows in enumerate(widths):
        state = at_most_once(choice == index, partial(settle, rows, proposal, wide), state)
    return state


def settle_round(
    target: Target,
    draft: DFlashDraft | None,
    stop_ids: jax.Array,
    plan: RoundPlan,
    rows: int,
    proposal: Proposal | None,
    wide: jax.Array,
    state: DecodeState,
) -> DecodeState:
    """The round after its draft: verify, accept, commit, and feed the drafter.

    rows: what the target runs of a sequence, anchor included; 1 needs no proposal. wide `[B]`: how
    many of them each sequence looks at.
    """
    start, live = state.target.len, ~state.done
    cand, taps, tree = state.anchor[:, None], (), None
    if proposal is not None:
        proposal, tree = proposal.first(rows - 1), proposal.tree
        cand = jnp.concatenate([cand, proposal.tokens], axis=1)
    if draft is not None:
        taps = draft.config.target_layer_ids
    width = jnp.minimum(wide, state.verify_cap)
    with jax.named_scope("verify"):
        shape = {} if tree is None else {"tree": tree}
        out, target_state = target.forward(state.target, cand, taps, plan.implementation, **shape)
        logits = target.logits(out.hidden)
    with jax.named_scope("accept"):
        how = sharding.of_laws(getattr(target, "mesh", None), plan.implementation)
        path, keep = None, _all
        if tree is None:
            decision, history = decide(state, proposal, cand, logits, width, plan.sampled, how)
        else:
            decision, path, history = follow(state, tree, logits, width, plan, how)
            keep = partial(kept, path=path)
        gain, done = clip_gain(
            state, decision.tokens, decision.accepted, stop_ids, plan.capacity - start
        )
    kv, meter = state.draft, state.meter
    with jax.named_scope("commit"):
        moved = {} if path is None else {"path": path, "implementation": plan.implementation}
        target_state = target.commit(target_state, gain, **moved)
        if draft is not None:
            taps = keep(out.taps)
            pos = start[:, None] + jnp.arange(taps.shape[1])[None]
            feats = ctx_features(draft, taps, plan.implementation)
            assert kv is not None
            kv = ingest_ctx(draft, kv, feats, pos, gain, plan.implementation)
    if meter is not None:
        meter = metered(meter, decision.accepted, width, live)
    # A tree has more nodes than a path.
    on_path = jnp.minimum(width, plan.longest + 1)
    state = _record(state, decision.tokens, logits, keep, gain, on_path, live)
    draft_fault, target_fault = _faults(proposal, keep(finite_rows(logits)), gain, live)
    return state.replace(
        target=target_state,
        draft=kv,
        accepted=jnp.where(live, decision.accepted, state.accepted),
        done=done | (draft_fault >= 0) | (target_fault >= 0),
        draft_fault=jnp.maximum(state.draft_fault, draft_fault),
        target_fault=jnp.maximum(state.target_fault, target_fault),
        history=history,
        meter=meter,
    )


def decide(state, proposal, cand, logits, width, sampled: bool, implementation: Implementation):
    """The family-blind decision: (`verify.Decision`, the history with this round's tokens)."""
    history = state.history
    if state.sampler is not None:
        length = state.target.len + 1
        if history is not None and proposal is not None:
            history = write_at(history, cand[:, 1:], length, axis=1)
        logits = shaped_logits(state.sampler, logits, history, length)
    if sampled:
        assert state.sampler is not None
        sampler, start = state.sampler, state.target.len
        decision = decide_sampled(proposal, cand, logits, width, sampler, start, implementation)
    else:
        decision = decide_greedy(cand, logits, width)
    if history is not None:
        history = write_at(history, decision.tokens, state.target.len + 1, axis=1)
    return decision, history


def follow(
    state: DecodeState,
    tree: DraftTree,
    logits: jax.Array,
    width: jax.Array,
    plan: RoundPlan,
    implementation: Implementation,
) -> tuple[Decision, jax.Array, jax.Array | None]:
    """`decide` for a draft tree: the decision, the path that it keeps, and the history."""
    history, sampler, start = state.history, state.sampler, state.target.len
    if sampler is not None:
        seen = history
        if history is not None:
            # Each node has its own path behind it.
            own = path_tokens(tree, plan.longest)[:, :, 1:]
            seen = jnp.broadcast_to(history[:, None], (*own.shape[:2], history.shape[1]))
            seen = write_at(seen, own, start + 1, axis=2)
        logits = shaped_logits(sampler, logits, seen, start + 1, tree.depth)
    decision, path = decide_tree(
        tree,
        logits,
        width,
        plan.longest,
        sampler if plan.sampled else None,
        start,
        implementation,
    )
    if history is not None:
        history = write_at(history, decision.tokens, start + 1, axis=1)
    return decision, path, history


def _record(state, tokens, logits, keep, gain, width, live) -> DecodeState:
    """The books of a round: emitted tokens, the anchor, gains, windows, log-probabilities."""
    last = jnp.take_along_axis(tokens, jnp.maximum(gain - 1, 0)[:, None], axis=1)[:, 0]
    logprobs = state.logprobs
    if logprobs is not None:
        laws = jax.nn.log_softmax(keep(logits), axis=-1)
        of_tokens = jnp.take_along_axis(laws, tokens[..., None], axis=-1)
        logprobs = write_at(logprobs, of_tokens[..., 0], state.emitted, axis=1)
    return state.replace(
        anchor=jnp.where(gain > 0, last, state.anchor),
        tokens=write_at(state.tokens, tokens, state.emitted, axis=1),
        emitted=state.emitted + gain,
        rounds=state.rounds + live.astype(jnp.int32),
        drafted=state.drafted + jnp.where(live, width - 1, 0),
        gains=write_at(state.gains, gain[:, None], state.rounds, axis=1),
        windows=write_at(state.windows, width[:, None], state.rounds, axis=1),
        logprobs=logprobs,
    )


def _all(rows: jax.Array) -> jax.Array:
    return rows


def _faults(proposal, finite, gain, live) -> tuple[jax.Array, jax.Array]:
    """First faulty draft slot and first faulty verify row that counted, -1 for none."""
    none = jnp.full_like(gain, -1)
    in_target = first_false(finite)
    in_target = jnp.where(live & (in_target < gain), in_target, -1)
    return (none if proposal is None else jnp.where(live, proposal.fault, -1)), in_target
