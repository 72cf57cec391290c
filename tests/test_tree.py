"""Draft trees: grown as one grows them by hand, and walked as one walks them."""

import doctest
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trees import KINDS, answers, check_candidates, tree_problem

from dflash_jax import tree
from dflash_jax.tree import MOST_NODES, DraftTree, most_nodes

grow = jax.jit(partial(tree.grow, implementation="xla"), static_argnums=3)
walk = jax.jit(partial(tree.walk, implementation="xla"), static_argnums=2)
SHAPES = [
    *[(7, 1, 8, 16), (15, 16, 16, 32), (5, 6, 6, 24), (2, 32, 32, 32), (15, 4, 4, 5)],
    *[(1, 1, 5, 6), (1, 1, 5, 2), (3, 1, 5, 16), (2, 3, 3, 7), (9, 1, 1, 10), (4, 1, 3, 1)],
]
"""(slots, candidates before, candidates, nodes); the second line's: whole trees, and the least."""


def by_hand(laws, cand, anchor, nodes):
    """One sequence's tree: the (token, depth) of each node, in order."""
    spine, every, before, total = [], [], 0, np.float32(0)
    for slot, rows in enumerate(laws):
        totals = [total + law for law in (rows if laws.ndim == 2 else rows[before])]
        every += [(-float(value), slot, choice) for choice, value in enumerate(totals)]
        total = max(totals)
        before = totals.index(total)
        spine.append((slot, before))
    chosen = [node[1:] for node in sorted(every)[: nodes - 1]]
    order = [node for node in spine if node in chosen] + [n for n in chosen if n not in spine]
    return [(anchor, 0)] + [(cand[slot, choice], slot + 1) for slot, choice in order]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_grows_as_by_hand(shape):
    *law, nodes = shape
    for kind in KINDS:
        laws, cand, anchor = tree_problem(3, *law, kind=kind)
        grown = grow(laws, cand, anchor, nodes)
        assert grown.tokens.shape == grown.depth.shape == (3, nodes)
        assert grown.tokens.dtype == grown.depth.dtype == jnp.int32
        for b in range(3):
            expected = by_hand(*(np.asarray(x[b]) for x in (laws, cand, anchor)), nodes)
            found = zip(grown.tokens[b].tolist(), grown.depth[b].tolist(), strict=True)
            assert list(found) == expected, kind


@pytest.mark.parametrize("kind", KINDS)
def test_the_spine_is_first_and_a_leaf_beside_it_or_one_further(kind):
    grown = grow(*tree_problem(16, 6, 5, 5, kind=kind), 18)
    length = np.asarray(grown.on_spine).sum(axis=1)
    for depth, spine in zip(np.asarray(grown.depth), length, strict=True):
        np.testing.assert_array_equal(depth[:spine], np.arange(spine))
        assert (depth[spine:] >= 1).all() and (depth[spine:] <= spine).all()
    assert len(set(length.tolist())) > 1


def test_a_whole_tree_has_every_candidate_once():
    assert [most_nodes(2, 3), most_nodes(5, 1), most_nodes(9, 9)] == [7, 6, MOST_NODES]
    laws, cand, anchor = tree_problem(1, 2, 3, 3)
    grown = grow(laws, cand, anchor, 7)
    nodes = sorted(zip(grown.depth[0].tolist(), grown.tokens[0].tolist(), strict=True))
    slots = [(slot + 1, token) for slot in range(2) for token in cand[0, slot].tolist()]
    assert nodes == sorted([(0, int(anchor[0])), *slots])


def test_totals_that_rounding_ties_go_to_the_earlier_candidate():
    """Laws that differ, of nodes whose totals do not."""
    step = np.float32(2**-20)
    laws = jnp.asarray(np.float32([[[-64, -65], [-step, 0], [-2, -3]]]))
    cand, anchor = jnp.asarray([[[1, 2], [3, 4], [5, 6]]]), jnp.asarray([0])
    grown = grow(laws, cand, anchor, 7)
    assert grown.tokens.tolist() == [[0, 1, 3, 5, 4, 2, 6]]
    assert grown.depth.tolist() == [[0, 1, 2, 3, 2, 1, 3]]


def test_the_example():
    assert doctest.testmod(tree) == (0, 3)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_laws_that_are_no_laws_still_give_candidates(value):
    check_candidates(grow, value)


@pytest.mark.parametrize(
    ("nodes", "candidates", "message"),
    [(33, 20, "nodes: expected 1..32, found 33"), (10, 4, "1..9, found 10"), (0, 4, "found 0")],
)
def test_more_nodes_than_there_are_is_refused(nodes, candidates, message):
    laws, cand, anchor = tree_problem(1, 2, 1, candidates)
    with pytest.raises(ValueError, match=message):
        tree.grow(laws, cand, anchor, nodes)


def test_more_candidates_than_lanes_are_refused():
    laws, cand, anchor = tree_problem(1, 2, 1, 33)
    with pytest.raises(ValueError, match="candidates: expected at most 32, found 33"):
        tree.grow(laws, cand, anchor, 4)


def walked(tokens, depth, after, cap):
    """The nodes that the target takes of one tree, by hand."""
    path = [0]
    while True:
        here = path[-1]
        leaf = depth[here] != here
        children = np.flatnonzero((depth == here + 1) & (tokens == after[here]))
        if leaf or not children.size or len(path) == cap:
            return path
        path.append(int(children[0]))


@pytest.mark.parametrize("shape", [(4, 1, 4, 17), (3, 6, 6, 12), (15, 1, 4, 32)], ids=str)
def test_the_walk_is_the_path_that_the_target_says(shape):
    *law, nodes = shape
    trees, longest = 128, shape[0]
    grown = grow(*tree_problem(trees, *law), nodes)
    after, cap = answers(grown, longest)
    path, accepted = walk(grown, after, longest, cap)
    assert path.shape == (trees, longest + 1)
    assert path.dtype == accepted.dtype == jnp.int32
    ends = set()
    for b in range(trees):
        expected = walked(*(np.asarray(x[b]) for x in (grown.tokens, grown.depth, after, cap)))
        assert int(accepted[b]) == len(expected) - 1
        padding = [expected[-1]] * (longest + 1 - len(expected))
        assert path[b].tolist() == expected + padding
        ends.add((bool(grown.on_spine[b, expected[-1]]), len(expected) == int(cap[b])))
    assert len(ends) == 4, "ends of the spine and leaves, at the cap and before it"
    assert len(np.unique(np.asarray(accepted))) > 2


def test_a_leaf_behind_a_wrong_turn_is_not_reached():
    """The spine 4, 5, 6, 7 with leaves 8 after 4, and 9 after 6."""
    fields = [[4, 5, 6, 7, 8, 9]], [[0, 1, 2, 3, 1, 3]]
    grown = DraftTree(*(jnp.asarray(x, jnp.int32) for x in fields))

    def path(*after, cap=4):
        after, cap = jnp.asarray([after], jnp.int32), jnp.asarray([cap], jnp.int32)
        nodes, accepted = walk(grown, after, 3, cap)
        return nodes[0, : int(accepted[0]) + 1].tolist()

    assert path(5, 6, 9, 0, 0, 0) == [0, 1, 2, 5]
    assert path(5, 6, 9, 0, 0, 0, cap=3) == [0, 1, 2]
    assert path(5, 0, 9, 0, 0, 0) == [0, 1]
    assert path(8, 6, 7, 0, 6, 0) == [0, 4]
    assert path(9, 6, 7, 0, 0, 0) == path(8, 6, 7, 0, 0, 0, cap=1) == [0]


def test_rows_kept_and_tokens_of_paths():
    laws, cand, anchor = tree_problem(2, 4, 1, 3)
    grown = grow(laws, cand, anchor, 11)
    tokens = tree.path_tokens(grown, 4)
    assert tokens.shape == (2, 11, 5)
    for b in range(2):
        for node, depth in enumerate(grown.depth[b].tolist()):
            expected = [*grown.tokens[b, :depth].tolist(), int(grown.tokens[b, node])]
            assert tokens[b, node, : depth + 1].tolist() == expected
    path = jnp.asarray([[0, 2, 5, 5], [0, 1, 3, 10]], jnp.int32)
    for shape in ((2, 11), (2, 11, 3), (2, 11, 3, 2)):
        rows = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
        for b in range(2):
            np.testing.assert_array_equal(tree.kept(rows, path)[b], rows[b, path[b]])
