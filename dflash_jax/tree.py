"""Draft trees: beside a block's likeliest chain its likeliest wrong turns, verified in one pass.

A chain ends at its first wrong draft, where the right token was often the drafter's second choice.
So of a round's rows some go to runners-up: nodes are added best-first by the probability of their
path under the drafter's laws (as in DDTree, Ringel & Romano 2026, arXiv:2604.12989), but only the
likeliest path, the *spine*, grows on. The target says what follows each node; the spine is kept as
far as it is right, and then the *leaf* that is.

A leaf's rows stand out of order in the cache, and moving them would alter the order of sums. Here
every row attends to the spine before it, which lies where a chain would, and to itself in a step of
its own. So a row rounds as it does where nothing is accepted (`accept=False`), and in any dtype
trees change no token of what the same program decodes plainly.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax import kernels
from dflash_jax.kernels import Implementation

MOST_NODES = 32
"""Nodes of a tree, and candidates of a slot."""


class DraftTree(struct.PyTreeNode):
    """`n` nodes of `B` sequences. tokens: target ids; depth: of the anchor, which is node 0, 0.
    Both int32 `[B, n]`.

    The spine is first, node d at depth d; then the leaves, one more way on from the spine's node
    before their depth. A node's position is the anchor's + depth.
    """

    tokens: jax.Array
    depth: jax.Array

    @property
    def on_spine(self) -> jax.Array:
        """Which nodes are the spine's, `[B, n]`."""
        return self.depth == jnp.arange(self.depth.shape[1])[None]


def most_nodes(slots: int, candidates: int) -> int:
    """The most nodes that a tree of `slots` slots with `candidates` each may have."""
    return min(MOST_NODES, 1 + slots * candidates)


def grow(
    laws: jax.Array,
    cand: jax.Array,
    anchor: jax.Array,
    nodes: int,
    implementation: Implementation = None,
) -> DraftTree:
    """The tree of the `nodes` likeliest nodes, anchor included.

    Args:
      laws: log-probabilities (<= 0) of each slot's candidates, f32 `[B, nd, k]`; or, where they
        depend on the candidate before, `[B, nd, k, k]`: entry [p, i, j] of candidate j of slot p
        after candidate i of slot p - 1 (of slot 0 after the anchor, in every row i).
      cand: target ids `[B, nd, k]`, at most 32, different ones in each slot; anchor `[B]`.
      nodes: at most `most_nodes(nd, k)`.
      implementation: the kernel grows all in one launch, the same nodes to the bit.

    Ties go to the earlier slot, then to the earlier candidate. Where a law is NaN or positive the
    tree is some tree. Raises ValueError for more nodes or candidates than these,
    NotImplementedError as `kernels.resolve` does.

    >>> laws = jnp.log(jnp.array([[[0.6, 0.4], [0.9, 0.1]]]))
    >>> tree = grow(laws, jnp.array([[[5, 6], [7, 8]]]), jnp.array([4]), 4)
    >>> tree.tokens.tolist(), tree.depth.tolist()
    ([[4, 5, 7, 6]], [[0, 1, 2, 1]])
    """
    laws = laws[:, :, None] if laws.ndim == 3 else laws
    _, slots, _, candidates = laws.shape
    if candidates > MOST_NODES:
        raise ValueError(f"candidates: expected at most {MOST_NODES}, found {candidates}")
    most = most_nodes(slots, candidates)
    if not 1 <= nodes <= most:
        raise ValueError(f"nodes: expected 1..{most}, found {nodes}")
    anchor = anchor.astype(jnp.int32)
    if kernels.resolve(implementation) == "pallas":
        return DraftTree(*kernels.kernel("tree").grow(laws, cand, anchor, nodes))
    return jax.vmap(partial(_grow, nodes=nodes))(laws, cand, anchor)


def _grow(laws: jax.Array, cand: jax.Array, anchor: jax.Array, nodes: int) -> DraftTree:
    _, befores, candidates = laws.shape

    def step(carry, rows):
        """Of one slot: each candidate's path's log-probability, and the spine's candidate."""
        before, total = carry
        totals = total + rows[before if befores > 1 else 0]
        best = jnp.argmax(totals).astype(jnp.int32)
        return (best, totals[best]), (totals, best)

    totals, spine = jax.lax.scan(step, (jnp.int32(0), jnp.float32(0)), laws)[1]
    # 0 and -0 tie, but to top_k.
    totals = jnp.where(totals == 0, 0, totals)
    chosen = jax.lax.top_k(totals.reshape(-1), nodes - 1)[1]
    slot, choice = chosen // candidates, chosen % candidates
    # No node is likelier than the one before it: the spine comes in order, and before its leaves.
    leaf = choice != spine[slot]
    order = jnp.argsort(leaf, stable=True)
    depth = jnp.concatenate([jnp.zeros((1,), jnp.int32), (slot + 1)[order]])
    return DraftTree(jnp.concatenate([anchor[None], cand[slot, choice][order]]), depth)


def walk(
    tree: DraftTree,
    after: jax.Array,
    longest: int,
    cap: jax.Array,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """The path that the target takes: nodes `[B, longest + 1]` from the anchor on, and how many
    drafts of it are right `[B]`; behind those, the path repeats its last node.

    Args: after `[B, n]`: the target's own token after each node. longest: no node is deeper.
    cap `[B]`: rows of a path that may be kept, anchor included. implementation: the kernel is one
    launch.
    """
    if kernels.resolve(implementation) == "pallas":
        return kernels.kernel("tree").walk(tree.tokens, tree.depth, after, longest, cap)
    node = jnp.arange(tree.tokens.shape[1])[None]
    before = jnp.maximum(tree.depth - 1, 0)
    said = jnp.take_along_axis(after, before, axis=1, mode="promise_in_bounds")
    right = (node == 0) | ((tree.tokens == said) & (tree.depth < cap[:, None]))
    # The first wrong node. Where that is a leaf, the spine is before it and nothing is cut off.
    end = jnp.min(jnp.where(right, node.size, node), axis=1, keepdims=True)
    reached = right & (before < end)
    last = jnp.argmax(jnp.where(reached, tree.depth, -1), axis=1)[:, None].astype(jnp.int32)
    accepted = jnp.take_along_axis(tree.depth, last, axis=1)
    row = jnp.arange(longest + 1)[None]
    return jnp.where(row < accepted, row, last), accepted[:, 0]


def kept(rows: jax.Array, path: jax.Array) -> jax.Array:
    """Rows `[B, n, ..]` of a tree's nodes -> those of a path, `[B, longest + 1, ..]`."""
    index = path.reshape(*path.shape, *[1] * (rows.ndim - 2))
    return jnp.take_along_axis(rows, index, axis=1, mode="promise_in_bounds")


def path_tokens(tree: DraftTree, longest: int) -> jax.Array:
    """Tokens on each node's path by depth `[B, n, longest + 1]`; what is behind the node itself is
    of no account.
    """
    row = jnp.arange(longest + 1)[None, None]
    itself = tree.depth[..., None] == row
    spine = tree.tokens[:, None, : longest + 1]
    return jnp.where(itself, tree.tokens[..., None], spine)
