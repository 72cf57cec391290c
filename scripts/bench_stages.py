"""What `bench.py` times: the stages of a round, and the bytes each must read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from bench_shapes import Workload, normal

import dflash_jax.draft as drafter
import dflash_jax.round as rounds
from dflash_jax import ctx_features, forward_round, ingest_ctx
from dflash_jax.attention import summed
from dflash_jax.config import DFlashConfig
from dflash_jax.draft import DFlashDraft, for_rounds
from dflash_jax.propose import Proposal, draft_logits, first_fault, propose
from dflash_jax.round import DecodeState, propose_block
from dflash_jax.targets import dense
from dflash_jax.targets.dense import DecoderConfig


class Stage(NamedTuple):
    """step(carry, i, target, draft, still) -> carry of the same shapes; the first carry.

    `still [B]` is 0, but the compiler can't know: added to a length it keeps work that depends
    on the length inside the loop, as it is when rounds really commit rows.
    """

    step: Callable[..., Any]
    carry: Any


def backbone(work: Workload) -> Stage:
    """`forward_round`; each call's hidden rows are the next one's noise."""

    def step(carry, i, target, draft, still):
        hidden, kv = carry
        pos = kv.len[:, None] + jnp.arange(hidden.shape[1])[None]
        hidden, kv = forward_round(draft, kv, hidden, pos, work.plan.implementation)
        return hidden, kv.replace(len=kv.len + still)

    rows = jnp.tile(work.state.anchor[:, None], (1, work.plan.block_size))
    return Stage(step, (work.target.embed(rows), work.state.draft))


def draft_head(work: Workload) -> Stage:
    """Draft logits and `propose` (DFlash: an argmax); the embedded drafts are the next rows."""
    options = {"implementation": work.plan.implementation}

    def step(carry, i, target, draft, still):
        logits = draft_logits(target, draft, carry["hidden"])
        proposal = propose(draft, logits, carry["hidden"], work.state.anchor, **options)
        return {"hidden": target.embed(proposal.tokens), "fault": proposal.fault}

    shape = (work.batch, work.plan.verify_width - 1, work.target.hidden_size)
    hidden = normal(jax.random.key(1), shape, work.draft.dtype, 1.0)
    return Stage(step, {"hidden": hidden, "fault": jnp.zeros((work.batch,), jnp.int32)})


def draft_round(work: Workload) -> Stage:
    """`propose_block`: embedding, backbone, head and proposal; the drafts make the next anchor."""

    def step(state, i, target, draft, still):
        proposal, kv = propose_block(target, draft, state, work.plan)
        return state.replace(
            target=state.target.replace(len=state.target.len + still),
            draft=kv,
            anchor=proposal.tokens.sum(axis=1, dtype=jnp.int32) % target.vocab_size,
            draft_fault=jnp.maximum(state.draft_fault, proposal.fault),
        )

    return Stage(step, without_target_rows(work.state))


def without_target_rows(state: DecodeState) -> DecodeState:
    """The state without the target's K and V, which drafting does not look at."""
    return state.replace(target=state.target.replace(k=[], v=[]))


def ingest(work: Workload) -> Stage:
    """`ctx_features` and `ingest_ctx` over the taps of a verify; other taps every call."""
    width = work.plan.verify_width

    def step(carry, i, target, draft, still):
        kv, taps, ready = carry
        pos = kv.len[:, None] + jnp.arange(width)[None]
        feats = ctx_features(ready, taps[i % taps.shape[0]])
        return ingest_ctx(ready, kv, feats, pos, still), taps, ready

    shape = (4, work.batch, width, work.draft.config.tap_size)
    taps = normal(jax.random.key(2), shape, work.draft.dtype, 1.0)
    return Stage(step, (work.state.draft, taps, jax.jit(for_rounds)(work.draft)))


def verify(work: Workload) -> Stage:
    """The target over a block, its head, argmax and fault check; the choices are the next rows."""
    width, config = work.plan.verify_width, work.draft.config
    rest = config.target_layer_ids, work.plan.implementation

    def step(carry, i, target, draft, still):
        out, state = target.forward(carry["state"], carry["ids"], *rest)
        logits = target.logits(out.hidden)
        return {
            "state": target.commit(state, still),
            "ids": jnp.argmax(logits, axis=-1).astype(jnp.int32),
            "taps": out.taps,
            "fault": first_fault(logits),
        }

    rows = work.target.embed(jnp.zeros((work.batch, width), jnp.int32))
    carry = {
        "state": work.state.target,
        "ids": jnp.tile(work.state.anchor[:, None], (1, width)),
        "taps": jnp.zeros((work.batch, width, config.tap_size), rows.dtype),
        "fault": jnp.zeros((work.batch,), jnp.int32),
    }
    return Stage(step, carry)


def no_attention(qkv, norms, eps, place, k_cache, v_cache, **options):
    """Stands in for `append_and_attend`: the projected queries as they are, no cache touched.

    The barrier keeps the whole projection, of which only a part is used.
    """
    qkv = summed(qkv, k_cache.dtype)
    queries = qkv.shape[-1] - 2 * k_cache.shape[1] * k_cache.shape[3]
    return jax.lax.optimization_barrier(qkv)[..., :queries], k_cache, v_cache


def no_selection(draft, logits, hidden, anchor, *rest, **options) -> Proposal:
    """Stands in for `propose`: tokens out of one column of logits, all of which are still made."""
    column = jax.lax.optimization_barrier(logits)[..., 0]
    tokens = jnp.abs(column).astype(jnp.int32) % logits.shape[-1]
    return Proposal(tokens, jnp.ones(tokens.shape, jnp.float32), jnp.full_like(anchor, -1))


def by_chance(rate: float) -> Callable[..., Any]:
    """Stands in for `round.decide`, the same work done: each draft is accepted at this rate."""
    decide = rounds.decide

    def stand_in(state, proposal, cand, logits, width, *how):
        decision, history = decide(state, proposal, cand, logits, width, *how)
        key = jax.random.fold_in(jax.random.key(3), state.rounds.max())
        lucky = jax.random.uniform(key, cand[:, 1:].shape) < rate
        lucky &= jnp.arange(1, cand.shape[1])[None] < width[:, None]
        accepted = jnp.cumprod(lucky.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
        return decision._replace(accepted=accepted), history

    return stand_in


class Difference(NamedTuple):
    """What a part adds to a stage: its time less that of the same program with a stand-in."""

    stage: str
    module: ModuleType
    name: str
    stand_in: Callable[..., Any]


PARTS = {f.__name__: f for f in (backbone, draft_head, draft_round, ingest, verify)}
DIFFERENCES = {
    "attention": Difference("backbone", drafter, "append_and_attend", no_attention),
    "selection": Difference("draft_round", rounds, "propose", no_selection),
    "verify_attention": Difference("verify", dense, "append_and_attend", no_attention),
}
WHOLE = ("spec_round", "plain_step", "loop", "cost_loop")
ACCEPTING = ("loop", "cost_loop")
"""Stages that accept drafts."""
OF_TARGET = (*WHOLE, "verify", "verify_attention")
"""Stages that need a target with layers."""
STAGES = (
    "draft_round",
    "spec_round",
    "loop",
    "backbone",
    "attention",
    "selection",
    "plain_step",
    "verify",
    "verify_attention",
    "draft_head",
    "ingest",
    "cost_loop",
)
"""Every stage by name, the most telling first, the longest to prepare last. `spec_round`: draft,
verify, accept, commit, ingest; `loop`: the same as it runs in a generation, accepting drafts, one
launch for many rounds; `cost_loop`: the loop under the window policy `cost`, of widths whose costs
are measured first; `plain_step`: one token without a drafter. Attention includes head norms, rope
and cache append; selection is what follows the draft logits (argmax, Markov chain, or top-k and
walk)."""


@contextmanager
def replaced(difference: Difference) -> Iterator[None]:
    """Trace with a part's stand-in in its place."""
    module, name = difference.module, difference.name
    part = getattr(module, name)
    setattr(module, name, difference.stand_in)
    try:
        yield
    finally:
        setattr(module, name, part)


def stage_and_parts(work: Workload, name: str) -> tuple[Stage, Any]:
    """The stage behind a name, and the context to trace it in."""
    difference = DIFFERENCES.get(name)
    if difference is None:
        return PARTS[name](work), nullcontext()
    return PARTS[difference.stage](work), replaced(difference)


def floor_bytes(work: Workload) -> dict[str, int]:
    """What each stage must read once.

    A round reads the head twice, for it must have drafted before it can verify. Its ingest adds
    only fc: the K/V projections could be shared with the next block, which follows at once.
    """
    target, draft = work.target, work.draft
    head = nbytes(target.lm_head if draft.head is None else draft.head.lm_head)
    selection = selection_bytes(draft)
    context = context_bytes(work, draft.config)
    block = nbytes((draft.layers, draft.norm)) + context
    features = nbytes((draft.fc, draft.hidden_norm))
    share = 2 * draft.config.kv_size / (draft.config.q_size + 2 * draft.config.kv_size)
    projections = int(share * nbytes([x.qkv for x in draft.layers]))
    projections += nbytes([x.k_norm for x in draft.layers])
    target_context = context_bytes(work, target.config)
    step = nbytes((target.layers, target.norm, target.lm_head)) + target_context
    whole = block + head + selection + features + step
    return {
        "backbone": block,
        "attention": context,
        "draft_head": head + selection,
        "selection": selection,
        "draft_round": block + head + selection,
        "ingest": features + projections,
        "verify": step,
        "verify_attention": target_context,
        "spec_round": whole,
        "loop": whole,
        "cost_loop": whole,
        "plain_step": step,
    }


def selection_bytes(draft: DFlashDraft) -> int:
    """What a family multiplies after the logits; of codebooks only rows are read.

    DSpark's output table counts once, though a chain cannot but read it in every slot.
    """
    parts: list[Any] = [draft.confidence]
    if draft.markov is not None:
        parts += [draft.markov.w2, draft.markov.mix]
    if draft.dflash2 is not None:
        parts += [draft.dflash2.hidden_projection]
    return nbytes(parts)


def nbytes(tree: Any) -> int:
    """Bytes of all arrays in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def context_bytes(work: Workload, config: DFlashConfig | DecoderConfig) -> int:
    """K and V of the context rows that each layer sees, over the whole batch."""
    rows = [
        min(context, context if window is None else window - 1)
        for window in config.layer_window
        for context in work.contexts
    ]
    return sum(rows) * 2 * config.kv_size * work.draft.dtype.itemsize
