"""Proposals: a drafter's hidden rows -> draft tokens and the law they were drawn from.

One dispatcher for the three families. Batches are explicit here; the heads themselves are written
for one sequence and vmapped.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax.core import Tracer

from dflash_jax import markov, selector, sharding, tree
from dflash_jax.draft import DFlashDraft
from dflash_jax.kernels import Implementation
from dflash_jax.layers import linear
from dflash_jax.sampling import Filters, draw, filtered_probs, first_false
from dflash_jax.targets import Target
from dflash_jax.tree import DraftTree

CANDIDATES, PAIRED_CANDIDATES = 8, 16
"""Candidates of a slot that a draft tree chooses among: of rows drafted independently more change
nothing; a Markov head brings up some that its rows alone put further down."""

RowDraws = Literal["argmax", "sample"]


class Proposal(struct.PyTreeNode):
    """What one round drafts, `nd` slots for each of `B` sequences.

    tokens `[B, nd]`: target ids. q_chosen `[B, nd]`: each draft's probability under the law it was
    drawn from. The law itself: q_dense `[B, nd, V]`, or q_rows `[B, nd, k]` on candidates
    cand `[B, nd, k]`, or neither, which means one-hot. raws `[B, nd]`: DSpark's confidences before
    the sigmoid, None without a head. fault `[B]`: first slot of non-finite draft logits, else -1.
    tree: where a draft tree is verified; tokens are then its nodes behind the anchor.
    """

    tokens: jax.Array
    q_chosen: jax.Array
    fault: jax.Array
    q_dense: jax.Array | None = None
    cand: jax.Array | None = None
    q_rows: jax.Array | None = None
    raws: jax.Array | None = None
    tree: DraftTree | None = None

    def first(self, slots: int) -> "Proposal":
        """The first `slots` drafts. Laws stay whole: they are looked up by slot."""
        return self.replace(tokens=self.tokens[:, :slots], q_chosen=self.q_chosen[:, :slots])


def draft_logits(
    target: Target, draft: DFlashDraft, hidden: jax.Array, implementation: Implementation = None
) -> jax.Array:
    """Draft rows `[..., H]` -> f32 logits `[..., V]`, by the target's head or the drafter's own.

    implementation: of a quantised head, see `quant.project`.
    The output multiplier comes first, the soft cap second; both touch draft logits only. Entries
    that may never be chosen (finfo.min) stay that.
    """
    if draft.head is None:
        logits = target.logits(hidden)
    else:
        logits = _own_logits(draft, draft.head.lm_head, hidden, implementation)
    multiplier, cap = draft.config.output_multiplier, draft.config.final_logit_softcapping
    if multiplier == 1.0 and cap is None:
        return logits
    shaped = logits * multiplier
    shaped = shaped if cap is None else cap * jnp.tanh(shaped / cap)
    never = jnp.finfo(logits.dtype).min
    return jnp.where(logits == never, never, shaped)


def _own_logits(draft, head, hidden: jax.Array, implementation: Implementation) -> jax.Array:
    def run(head: Any, hidden: jax.Array) -> jax.Array:
        return linear(hidden, head, jnp.float32, implementation=implementation)

    return sharding.by_vocabulary(run, draft.mesh, head, hidden)


def first_fault(logits: jax.Array) -> jax.Array:
    """`[B, rows, V]` -> `[B]`: the first row whose best logit is not finite, -1 if all are."""
    return first_false(finite_rows(logits))


def finite_rows(logits: jax.Array) -> jax.Array:
    """Whether the best logit of each row `[B, rows, V]` is finite: `[B, rows]`.

    argmax picks a NaN where there is one, so the best logit alone tells. Whoever has these rows'
    argmax too has computed it once.
    """
    ids = jnp.argmax(logits, axis=-1, keepdims=True)
    best = jnp.take_along_axis(logits, ids, axis=-1, mode="promise_in_bounds")[..., 0]
    return jnp.isfinite(best)


def propose(
    draft: DFlashDraft,
    logits: jax.Array,
    hidden: jax.Array,
    anchor: jax.Array,
    filters: Filters | None = None,
    uniforms: jax.Array | None = None,
    row_draws: RowDraws = "argmax",
    implementation: Implementation = None,
) -> Proposal:
    """Draft tokens from harvested rows.

    Args:
      logits `[B, nd, V]` from `draft_logits`; hidden `[B, nd, H]`; anchor `[B]`.
      filters, uniforms `[B, nd]`: None for greedy; else every draw is an inverse CDF of its law.
      row_draws: how plain DFlash rows are drawn when sampling. `argmax` (one-hot law) is the
        default, since independent draws make incoherent blocks; `sample` draws each row.
      implementation: of top-k, walk, argmax and filters; DSpark's chain itself has no kernel.

    Non-finite logits are no error here: `Proposal.fault` names their slot. Raises
    NotImplementedError as `kernels.resolve` does.
    """
    if draft.dflash2 is not None:
        return _propose_path(draft, logits, hidden, anchor, filters, uniforms, implementation)
    if draft.markov is not None:
        proposal = _propose_chain(draft, logits, hidden, anchor, filters, uniforms, implementation)
    else:
        proposal = _propose_rows(draft, logits, filters, uniforms, row_draws, implementation)
    confidence = draft.confidence
    if confidence is None:
        return proposal
    previous = jnp.concatenate([anchor[:, None], proposal.tokens[:, :-1]], axis=1)
    raws = jax.vmap(lambda h, p: markov.confidence_raws(confidence, draft.markov, h, p))
    return proposal.replace(raws=raws(hidden, previous))


def propose_tree(
    draft: DFlashDraft,
    logits: jax.Array,
    hidden: jax.Array,
    anchor: jax.Array,
    nodes: int,
    implementation: Implementation = None,
) -> Proposal:
    """The draft tree of `nodes` nodes, anchor included, which greedy and sampled rounds share.

    Laws are softmaxes over each slot's candidates: of DFlash rows by themselves, of DSpark and
    DFlash2 after each candidate of the slot before. Args otherwise and errors as in `propose`.
    """
    count = tree_candidates(draft)
    unary, ids = selector.top_candidates(logits, count, implementation, draft.mesh)
    cand = _target_ids(draft, ids)
    fault = first_false(jnp.isfinite(unary[..., 0]))
    if draft.dflash2 is not None:
        fault = selector.candidate_fault(unary)
        head, over = draft.dflash2, (None, None, 0, 0, 0, 0)
        hproj = selector.hidden_projection(head, hidden)
        rows = (head.predecessor, head.successor, unary, cand, hproj, anchor)
        scores = jax.vmap(selector.pair_scores, in_axes=over)(*rows)
    elif draft.markov is not None:
        pairs = jax.vmap(partial(markov.pair_scores, draft.markov))
        scores = pairs(unary, ids, cand, hidden, anchor)
    else:
        scores = unary
    how = sharding.of_laws(draft.mesh, implementation)
    grown = tree.grow(jax.nn.log_softmax(scores, axis=-1), cand, anchor, nodes, how)
    tokens = grown.tokens[:, 1:]
    return Proposal(tokens, jnp.ones(tokens.shape, jnp.float32), fault, tree=grown)


def tree_candidates(draft: DFlashDraft) -> int:
    """Candidates of each slot that this drafter's trees choose among."""
    if draft.dflash2 is not None:
        return draft.dflash2.top_k
    rows = draft.config.vocab_size if draft.head is None else draft.head.d2t.shape[0]
    most = CANDIDATES if draft.markov is None else PAIRED_CANDIDATES
    return most if rows is None else min(rows, most)


def propose_rows(
    draft: DFlashDraft, logits: jax.Array, implementation: Implementation = None
) -> jax.Array:
    """DFlash rows, greedily: each row's argmax `[..., V]`, ties to the lower id, as a target id."""
    return _target_ids(draft, selector.best_ids(logits, implementation, draft.mesh))


def dflash2_propose_greedy(
    draft: DFlashDraft,
    logits: jax.Array,
    hidden: jax.Array,
    anchor: jax.Array,
    implementation: Implementation = None,
) -> jax.Array:
    """DFlash2's greedy proposal for one sequence: top-k, projection, walk.

    Args: logits `[nd, V]` (after multiplier and cap), hidden `[nd, H]`, the mask-fill rows
      1..b-1; anchor: the token before them. Returns the drafted ids `[nd]`.

    Raises ValueError naming the slot where logits are not finite (outside a compiled program),
    NotImplementedError as `kernels.resolve` does.
    """
    _require_selector(draft)
    anchor = jnp.asarray(anchor, jnp.int32)[None]
    proposal = propose(draft, logits[None], hidden[None], anchor, implementation=implementation)
    _refuse_fault(proposal)
    return proposal.tokens[0]


def dflash2_propose_sampled(
    draft: DFlashDraft,
    logits: jax.Array,
    hidden: jax.Array,
    anchor: jax.Array,
    temperature: jax.Array,
    uniforms: jax.Array,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sampled twin of `dflash2_propose_greedy`: path and q_chosen `[nd]`, q_rows `[nd, k]`.

    temperature `[]`; uniforms `[nd]` in [0, 1), one a slot. Raises as its twin does.
    """
    _require_selector(draft)
    off = Filters.off(1).replace(temperature=jnp.asarray(temperature, jnp.float32)[None])
    anchor = jnp.asarray(anchor, jnp.int32)[None]
    rows = (logits[None], hidden[None], anchor)
    proposal = propose(draft, *rows, off, uniforms[None], implementation=implementation)
    _refuse_fault(proposal)
    assert proposal.q_rows is not None
    return proposal.tokens[0], proposal.q_chosen[0], proposal.q_rows[0]


def _require_selector(draft: DFlashDraft) -> None:
    if draft.dflash2 is None:
        raise ValueError(f"draft: expected a DFlash2 drafter, found {draft.config.family}")


def _refuse_fault(proposal: Proposal) -> None:
    fault = proposal.fault[0]
    if not isinstance(fault, Tracer) and int(fault) >= 0:
        raise ValueError(f"non-finite draft logits: sequence 0, draft slot {int(fault) + 1}")


def _propose_rows(draft, logits, filters, uniforms, row_draws, implementation) -> Proposal:
    """DFlash: independent rows."""
    fault = first_fault(logits)
    if filters is None or row_draws == "argmax":
        tokens = propose_rows(draft, logits, implementation)
        return Proposal(tokens, jnp.ones(tokens.shape, jnp.float32), fault)
    how = sharding.of_laws(draft.mesh, implementation)
    law_of = partial(filtered_probs, implementation=how)
    dense = jax.vmap(jax.vmap(law_of, in_axes=(0, None)))(logits, filters)
    ids = jax.vmap(jax.vmap(draw))(dense, uniforms)
    q_chosen = jnp.take_along_axis(dense, ids[..., None], axis=-1)[..., 0]
    return _with_law(draft, Proposal(_target_ids(draft, ids), q_chosen, fault), dense)


def _with_law(draft, proposal: Proposal, dense: jax.Array) -> Proposal:
    """The proposal with its law `[B, nd, V_draft]`; a reduced vocabulary's is sparse over V."""
    if draft.head is None:
        return proposal.replace(q_dense=dense)
    every = _target_ids(draft, jnp.arange(dense.shape[-1]))
    return proposal.replace(cand=jnp.broadcast_to(every, dense.shape), q_rows=dense)


def _propose_chain(draft, logits, hidden, anchor, filters, uniforms, implementation) -> Proposal:
    """DSpark: each slot's logits corrected by the token before it."""
    fault = first_fault(logits)
    names = {"target_ids": partial(_target_ids, draft)}
    if filters is None:
        walk = partial(markov.dspark_chain_greedy, **names)
        walk = jax.vmap(walk, in_axes=(None, 0, 0, 0))
        chain = walk(draft.markov, logits, hidden, anchor)
        return Proposal(chain.tokens, chain.q_chosen, fault)
    how = sharding.of_laws(draft.mesh, implementation)
    walk = partial(markov.dspark_chain_sampled, **names, implementation=how)
    walk = jax.vmap(walk, in_axes=(None, 0, 0, 0, 0, 0))
    chain = walk(draft.markov, logits, hidden, anchor, filters, uniforms)
    assert chain.q_rows is not None
    return _with_law(draft, Proposal(chain.tokens, chain.q_chosen, fault), chain.q_rows)


def _propose_path(draft, logits, hidden, anchor, filters, uniforms, implementation) -> Proposal:
    """DFlash2: top-k candidates, then a path through the selector's lattice."""
    head = draft.dflash2
    unary, cand = selector.top_candidates(logits, head.top_k, implementation, draft.mesh)
    hproj = selector.hidden_projection(head, hidden)
    fault = selector.candidate_fault(unary)
    cand = _target_ids(draft, cand)
    codebooks = (head.predecessor, head.successor)
    if filters is None:
        walk = partial(selector.lattice_walk_greedy, implementation=implementation)
        walk = jax.vmap(walk, in_axes=(None, None, 0, 0, 0, 0))
        walk = sharding.by_sequence(walk, draft.mesh, shared=2, rows=4)
        path = walk(*codebooks, unary, cand, hproj, anchor)
        return Proposal(path, jnp.ones(path.shape, jnp.float32), fault)
    walk = partial(selector.lattice_walk_sampled, implementation=implementation)
    walk = jax.vmap(walk, in_axes=(None, None, 0, 0, 0, 0, 0, 0))
    walk = sharding.by_sequence(walk, draft.mesh, shared=2, rows=6)
    drawn = walk(*codebooks, unary, cand, hproj, anchor, filters.temperature, uniforms)
    return Proposal(drawn.path, drawn.q_chosen, fault, cand=cand, q_rows=drawn.q_rows)


def _target_ids(draft: DFlashDraft, ids: jax.Array) -> jax.Array:
    return ids if draft.head is None else draft.head.target_ids(ids)
