"""The target's word on a round: from its logits an accepted prefix and the token after it."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax import tree as trees
from dflash_jax.kernels import Implementation
from dflash_jax.propose import Proposal
from dflash_jax.sampling import (
    Sampler,
    accept_len,
    draw,
    filtered_probs,
    residual,
    residual_sparse,
)
from dflash_jax.tree import DraftTree
from dflash_jax.window import dspark_accept_prefix


class Decision(NamedTuple):
    """tokens `[B, w]`: accepted drafts, then the target's own token; accepted `[B]`: m, so that
    tokens 0..m are this round's gain before any limit.
    """

    tokens: jax.Array
    accepted: jax.Array


def decide_greedy(cand: jax.Array, logits: jax.Array, width: jax.Array) -> Decision:
    """Accept drafts while they are the target's argmax (ties to the lower id)."""
    vam = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return Decision(vam, dspark_accept_prefix(cand, vam, width))


def decide_tree(
    tree: DraftTree,
    logits: jax.Array,
    width: jax.Array,
    longest: int,
    sampler: Sampler | None = None,
    start: jax.Array | None = None,
    implementation: Implementation = None,
) -> tuple[Decision, jax.Array]:
    """Follow the target's own tokens through the tree: the decision, and the nodes of the path that
    it keeps `[B, longest + 1]`, see `tree.walk`.

    What the target says after a node is its argmax; with a sampler its draw, at each position by
    the uniform that plain decoding draws with there. So tokens follow the target's law whatever was
    drafted, and are those of plain decoding with the same seed.

    Args: logits `[B, n, V]`, penalised and biased; width `[B]`: most rows of the path to keep,
    anchor included; start `[B]`: position of the anchor. implementation: of the filters, see
    `sampling.leading`, and of the walk.
    """
    if sampler is None:
        after = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        assert start is not None
        law_of = partial(filtered_probs, implementation=implementation)
        probs = jax.vmap(jax.vmap(law_of, in_axes=(0, None)))(logits, sampler.filters)
        uniforms = sampler.uniforms("bonus", start[:, None] + 1 + tree.depth)
        after = jax.vmap(jax.vmap(draw))(probs, uniforms)
    path, accepted = trees.walk(tree, after, longest, width, implementation)
    return Decision(trees.kept(after, path), accepted), path


def decide_sampled(
    proposal: Proposal | None,
    cand: jax.Array,
    logits: jax.Array,
    width: jax.Array,
    sampler: Sampler,
    start: jax.Array,
    implementation: Implementation = None,
) -> Decision:
    """Rejection sampling: the committed tokens follow the target's filtered law exactly.

    Args: logits `[B, w, V]`, penalised and biased; start `[B]`: position of the anchor. Draft j is
    accepted while u * q < p; the first rejection draws from norm(max(0, p - q)), a full window
    draws the bonus token from p. implementation: of the filters, see `sampling.leading`.
    """
    law_of = partial(filtered_probs, implementation=implementation)
    probs = jax.vmap(jax.vmap(law_of, in_axes=(0, None)))(logits, sampler.filters)
    positions = start[:, None] + 1 + jnp.arange(cand.shape[1])[None]
    u_residual = sampler.uniforms("residual", positions)
    u_bonus = sampler.uniforms("bonus", positions)
    accepted = jnp.zeros_like(start)
    if proposal is not None:
        u_accept = sampler.uniforms("accept", positions[:, :-1])
        p = jnp.take_along_axis(probs[:, :-1], cand[:, 1:, None], axis=-1)[..., 0]
        accepted = jnp.minimum(
            accept_len(p, proposal.q_chosen, u_accept), jnp.maximum(width, 1) - 1
        )

    def pick(rows: jax.Array) -> jax.Array:
        return jax.vmap(lambda r, m: r[m])(rows, accepted)

    law, u = pick(probs), pick(u_bonus)
    if proposal is not None:
        full = accepted >= width - 1
        # On a full window there is no rejected draft; its slot index is clipped and unused.
        slot = jnp.minimum(accepted, cand.shape[1] - 2)
        rejected = _residual(law, proposal, slot)
        law = jnp.where(full[:, None], law, rejected)
        u = jnp.where(full, u, pick(u_residual))
    last = jax.vmap(draw)(law, u)
    drafts = jnp.concatenate([cand[:, 1:], cand[:, :1]], axis=1)
    own = jnp.arange(cand.shape[1])[None] == accepted[:, None]
    return Decision(jnp.where(own, last[:, None], drafts), accepted)


def _residual(law: jax.Array, proposal: Proposal, slot: jax.Array) -> jax.Array:
    """What is left of the target's law `[B, V]` after slot `slot [B]` was rejected."""

    def at(rows: jax.Array) -> jax.Array:
        return jax.vmap(lambda r, j: r[j])(rows, slot)

    if proposal.q_dense is not None:
        return jax.vmap(residual)(law, at(proposal.q_dense))
    if proposal.cand is not None and proposal.q_rows is not None:
        return jax.vmap(residual_sparse)(law, at(proposal.cand), at(proposal.q_rows))
    one = jnp.ones((slot.shape[0], 1), law.dtype)
    return jax.vmap(residual_sparse)(law, at(proposal.tokens)[:, None], one)
