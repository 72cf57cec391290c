"""Draft trees: grown like a heap grows them, walked like one walks them by hand."""

import doctest
import heapq
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trees import answers, tree_problem

from dflash_jax import tree
from dflash_jax.tree import MOST_NODES, DraftTree, most_nodes

grow = jax.jit(partial(tree.grow, implementation="xla"), static_argnums=3)
walk = jax.jit(partial(tree.walk, implementation="xla"), static_argnums=2)
SHAPES = [(7, 1, 8, 16), (3, 1, 5, 31), (5, 6, 6, 24), (2, 32, 32, 32), (1, 1, 5, 6), (9, 1, 1, 10)]
"""(slots, candidates before, candidates, nodes)."""


def heap_tree(laws, cand, anchor, nodes):
    """One sequence's tree: (token, parent, depth) of each node, in the order they are added."""
    grown, heap = [(anchor, 0, 0, 0, np.float32(0))], []

    def offer(node, rank):
        """Puts a node's `rank`-th best child on the heap: ties to the node that came first."""
        _, _, depth, choice, total = grown[node]
        if depth < len(laws) and rank < laws.shape[-1]:
            row = laws[depth] if laws.ndim == 2 else laws[depth, choice]
            child = int(np.argsort(-row, kind="stable")[rank])
            heapq.heappush(heap, (-(total + row[child]), node, rank, child))

    offer(0, 0)
    while len(grown) < nodes:
        negative, parent, rank, child = heapq.heappop(heap)
        depth = grown[parent][2]
        grown.append((cand[depth, child], parent, depth + 1, child, -negative))
        offer(parent, rank + 1)
        offer(len(grown) - 1, 0)
    return [node[:3] for node in grown]


def lineage(parents, node):
    """Nodes from the anchor to `node`."""
    path = [node]
    while path[-1]:
        path.append(int(parents[path[-1]]))
    return path[::-1]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_grows_as_a_heap_does(shape, tied):
    *law, nodes = shape
    laws, cand, anchor = tree_problem(2, *law, tied=tied)
    grown = grow(laws, cand, anchor, nodes)
    for b in range(2):
        expected = heap_tree(*(np.asarray(x[b]) for x in (laws, cand, anchor)), nodes)
        for found, values in zip(
            (grown.tokens, grown.parent, grown.depth), zip(*expected, strict=True), strict=True
        ):
            np.testing.assert_array_equal(found[b], values)
        for node in range(nodes):
            bits = sum(1 << j for j in lineage(grown.parent[b], node))
            assert int(grown.ancestors[b, node]) % 2**32 == bits
    assert all(x.dtype == jnp.int32 and x.shape == (2, nodes) for x in jax.tree.leaves(grown))


def test_a_whole_tree_holds_every_path_once():
    assert [most_nodes(2, 3), most_nodes(5, 1), most_nodes(9, 9)] == [13, 6, MOST_NODES]
    laws, cand, anchor = tree_problem(1, 2, 3, 3)
    grown = grow(laws, cand, anchor, 13)
    tokens = np.asarray(grown.tokens[0])
    paths = {tuple(tokens[lineage(grown.parent[0], i)].tolist()) for i in range(13)}
    a, (one, two) = int(anchor[0]), cand[0].tolist()
    ends = {(a, x, y) for x in one for y in two}
    assert paths == {(a,)} | {(a, x) for x in one} | ends


def test_the_example():
    assert doctest.testmod(tree) == (0, 2)


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_laws_that_are_not_finite_still_give_candidates(value):
    laws, cand, anchor = tree_problem(3, 3, 5, 5)
    laws = laws.at[0, 1, 2].set(value).at[1, 0].set(value).at[2].set(value)
    assert_inside(grow(laws, cand, anchor, 31), cand, anchor)


def assert_inside(grown, cand, anchor):
    """Every node is a candidate of some slot, behind a node before it."""
    np.testing.assert_array_equal(grown.tokens[:, 0], anchor)
    assert np.isin(grown.tokens[:, 1:].reshape(len(cand), -1), cand).all()
    assert ((grown.depth[:, 1:] >= 1) & (grown.depth <= cand.shape[1])[:, 1:]).all()
    assert ((grown.parent >= 0) & (grown.parent[:, 1:].max() < grown.parent.shape[1])).all()


@pytest.mark.parametrize(
    ("nodes", "candidates", "message"),
    [(33, 4, "nodes: expected 1..21, found 33"), (22, 4, "nodes: .* found 22"), (0, 4, "found 0")],
)
def test_more_nodes_than_there_are_is_refused(nodes, candidates, message):
    laws, cand, anchor = tree_problem(1, 2, 1, candidates)
    with pytest.raises(ValueError, match=message):
        tree.grow(laws, cand, anchor, nodes)


def test_more_candidates_than_bits_are_refused():
    laws, cand, anchor = tree_problem(1, 2, 1, 33)
    with pytest.raises(ValueError, match="candidates: expected at most 32, found 33"):
        tree.grow(laws, cand, anchor, 4)


def walked(tokens, parent, depth, after, cap):
    """The nodes that the target takes of one tree, by hand."""
    path = [0]
    while True:
        here = path[-1]
        follows = (parent == here) & (tokens == after[here]) & (np.arange(len(tokens)) > 0)
        if not follows.any() or depth[here] + 1 >= cap:
            return path
        path.append(int(follows.argmax()))


@pytest.mark.parametrize("shape", [(4, 1, 3, 25), (3, 2, 2, 15), (15, 1, 4, 32)], ids=str)
def test_the_walk_is_the_path_that_the_target_says(shape):
    *law, nodes = shape
    trees, longest = 64, shape[0]
    laws, cand, anchor = tree_problem(trees, *law)
    grown = grow(laws, cand, anchor, nodes)
    after, cap = answers(grown, longest)
    path, accepted = walk(grown, after, longest, cap)
    assert path.shape == (trees, longest + 1)
    assert path.dtype == accepted.dtype == jnp.int32
    fields = (grown.tokens, grown.parent, grown.depth)
    for b in range(trees):
        expected = walked(*(np.asarray(x[b]) for x in (*fields, after, cap)))
        assert int(accepted[b]) == len(expected) - 1
        padding = [expected[-1]] * (longest + 1 - len(expected))
        assert path[b].tolist() == expected + padding
    assert len(np.unique(np.asarray(accepted))) > 2


def test_rows_kept_and_tokens_of_paths():
    laws, cand, anchor = tree_problem(2, 4, 1, 3)
    grown: DraftTree = grow(laws, cand, anchor, 20)
    tokens = tree.path_tokens(grown, 4)
    for b in range(2):
        for node in range(20):
            path = lineage(grown.parent[b], node)
            expected = np.zeros(5, np.int32)
            expected[: len(path)] = np.asarray(grown.tokens[b])[path]
            np.testing.assert_array_equal(tokens[b, node], expected)
    path = jnp.asarray([[0, 2, 5, 5], [0, 1, 3, 19]], jnp.int32)
    for shape in ((2, 20), (2, 20, 3), (2, 20, 3, 2)):
        rows = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
        for b in range(2):
            np.testing.assert_array_equal(tree.kept(rows, path)[b], rows[b, path[b]])
