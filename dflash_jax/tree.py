"""Draft trees: of one block's laws the continuations likeliest together, verified in one pass.

A chain ends at its first wrong draft. A tree holds the runners-up too, for the same rows of a
verify: best-first, the node of highest probability under the drafter's laws is added until `nodes`
are there (DDTree, Ringel & Romano 2026, arXiv:2604.12989). Every node sees its ancestors alone, the
target says what follows each, and the path on which each node is what follows its parent is kept.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax import kernels
from dflash_jax.kernels import Implementation

MOST_NODES = 32
"""Nodes of a tree: as many as an int32 has bits."""


class DraftTree(struct.PyTreeNode):
    """`n` nodes of `B` sequences, each behind its parent; node 0 is the anchor. All int32 `[B, n]`.

    tokens: target ids. parent: node before it, 0 of the anchor. depth: of the anchor 0; the
    position of node i is the anchor's + depth. ancestors: bit j of node i is set where j is i
    itself or before it on its path.
    """

    tokens: jax.Array
    parent: jax.Array
    depth: jax.Array
    ancestors: jax.Array


def most_nodes(slots: int, candidates: int) -> int:
    """The most nodes that a tree of `slots` slots with `candidates` each may have."""
    total = level = 1
    for _ in range(slots):
        level *= candidates
        total += level
        if total >= MOST_NODES:
            return MOST_NODES
    return total


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

    Ties go to the node that was there first. Of laws that are not finite the tree is some tree.
    Raises ValueError for more nodes or candidates than these, NotImplementedError as
    `kernels.resolve` does.

    >>> laws = jnp.log(jnp.array([[[0.6, 0.4], [0.9, 0.1]]]))
    >>> grow(laws, jnp.array([[[5, 6], [7, 8]]]), jnp.array([4]), 4).tokens
    Array([[4, 5, 7, 6]], dtype=int32)
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


class _Growing(struct.PyTreeNode):
    """A tree under way. choice: each node's place among its slot's candidates; total: its
    log-probability; taken: its children, a bit a candidate; coming, offer: the next one, and what
    that one would have in all, -inf where there is none.
    """

    tree: DraftTree
    choice: jax.Array
    total: jax.Array
    taken: jax.Array
    coming: jax.Array
    offer: jax.Array


def _grow(laws: jax.Array, cand: jax.Array, anchor: jax.Array, nodes: int) -> DraftTree:
    slots, befores, candidates = laws.shape
    ids, bits = jnp.arange(nodes), jnp.arange(candidates)

    def next_child(depth, choice, total, taken):
        row = laws[jnp.minimum(depth, slots - 1), choice if befores > 1 else 0]
        free = ((taken >> bits) & 1 == 0) & (depth < slots)
        row = jnp.where(free, row, -jnp.inf)
        child = jnp.argmax(row).astype(jnp.int32)
        return child, total + row[child]

    def add(growing, i):
        tree, new, best = growing.tree, ids == i, jnp.argmax(growing.offer).astype(jnp.int32)
        old, child, total = ids == best, growing.coming[best], growing.offer[best]
        # Where no node has another child, what is added is wrong, but in its place.
        slot = jnp.minimum(tree.depth[best], slots - 1)
        taken = growing.taken[best] | (1 << child)
        after = next_child(slot, growing.choice[best], growing.total[best], taken)
        first = next_child(slot + 1, child, total, 0)

        def put(values, of_new, of_old=None):
            values = values if of_old is None else jnp.where(old, of_old, values)
            return jnp.where(new, of_new, values)

        tree = DraftTree(
            tokens=put(tree.tokens, cand[slot, child]),
            parent=put(tree.parent, best),
            depth=put(tree.depth, slot + 1),
            ancestors=put(tree.ancestors, tree.ancestors[best] | (1 << i)),
        )
        growing = _Growing(
            tree,
            choice=put(growing.choice, child),
            total=put(growing.total, total),
            taken=put(growing.taken, 0, taken),
            coming=put(growing.coming, first[0], after[0]),
            offer=put(growing.offer, first[1], after[1]),
        )
        return growing, None

    zeros, none = jnp.zeros((nodes,), jnp.int32), jnp.full((nodes,), -jnp.inf)
    child, offer = next_child(0, 0, jnp.float32(0), 0)
    root = DraftTree(zeros.at[0].set(anchor), zeros, zeros, zeros.at[0].set(1))
    zeros_f32 = jnp.zeros((nodes,), jnp.float32)
    start = _Growing(root, zeros, zeros_f32, zeros, zeros + child, none.at[0].set(offer))
    return jax.lax.scan(add, start, jnp.arange(1, nodes, dtype=jnp.int32))[0].tree


def walk(
    tree: DraftTree,
    after: jax.Array,
    longest: int,
    cap: jax.Array,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """The path that the target takes: nodes `[B, longest + 1]` from the anchor on, and how many
    drafts of it are right `[B]`; behind those, the path repeats its last node.

    Args: after `[B, n]`: the target's own token after each node. longest: the deepest node's depth
    at most. cap `[B]`: rows of a path that may be kept, anchor included. implementation: the kernel
    is one launch.
    """
    if kernels.resolve(implementation) == "pallas":
        fields = (tree.tokens, tree.parent, tree.depth, tree.ancestors)
        return kernels.kernel("tree").walk(fields, after, longest, cap)
    node = jnp.arange(tree.tokens.shape[1])[None]
    expected = jnp.take_along_axis(after, tree.parent, axis=1)
    right = (node == 0) | ((tree.tokens == expected) & (tree.depth < cap[:, None]))
    wrong = jnp.sum(jnp.where(right, 0, 1 << node), axis=1, dtype=jnp.int32)
    reached = (tree.ancestors & wrong[:, None]) == 0
    last = jnp.argmax(jnp.where(reached, tree.depth, -1), axis=1)[:, None]
    accepted = jnp.take_along_axis(tree.depth, last, axis=1)
    on_path = (jnp.take_along_axis(tree.ancestors, last, axis=1) >> node) & 1
    depth = jnp.minimum(jnp.arange(longest + 1)[None], accepted)
    here = (on_path == 1)[:, None] & (tree.depth[:, None] == depth[..., None])
    path = jnp.max(jnp.where(here, node[:, None], 0), axis=-1)
    return path.astype(jnp.int32), accepted[:, 0]


def kept(rows: jax.Array, path: jax.Array) -> jax.Array:
    """Rows `[B, n, ..]` of a tree's nodes -> those of a path, `[B, longest + 1, ..]`."""
    index = path.reshape(*path.shape, *[1] * (rows.ndim - 2))
    return jnp.take_along_axis(rows, index, axis=1, mode="promise_in_bounds")


def path_tokens(tree: DraftTree, longest: int) -> jax.Array:
    """Tokens on each node's path by depth `[B, n, longest + 1]`; 0 behind the node itself."""
    nodes = tree.tokens.shape[1]
    on_path = (tree.ancestors[:, :, None] >> jnp.arange(nodes)[None, None]) & 1 == 1
    depth = jnp.arange(longest + 1)[None, :, None] == tree.depth[:, None]
    here = on_path[:, :, None] & depth[:, None]
    return jnp.sum(jnp.where(here, tree.tokens[:, None, None], 0), axis=-1)
