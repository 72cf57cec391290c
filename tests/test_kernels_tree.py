"""The kernels that grow and walk draft trees against the reference: interpreted here, compiled on a
GPU.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import ampere, launches, lowered
from trees import answers, tree_problem

from dflash_jax import kernels, tree
from dflash_jax.verify import decide_tree

kernel = kernels.kernel("tree")
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
SHAPES = [(7, 1, 8, 16), (3, 1, 5, 31), (5, 6, 6, 24), (2, 32, 32, 32), (1, 1, 5, 6), (9, 1, 1, 10)]
"""(slots, candidates before, candidates, nodes)."""
PRESETS = {"p1": (11, 1, 8, 24), "p16": (15, 16, 16, 32), "widest": (31, 32, 32, 32)}


@partial(jax.jit, static_argnames=("nodes", "implementation"))
def grow(laws, cand, anchor, nodes, implementation="xla"):
    return tree.grow(laws, cand, anchor, nodes, implementation)


@partial(jax.jit, static_argnames="nodes")
def interpreted(laws, cand, anchor, nodes):
    laws = laws if laws.ndim == 4 else laws[:, :, None]
    return tree.DraftTree(*kernel.grow(laws, cand, anchor, nodes, interpret=True))


@partial(jax.jit, static_argnames=("longest", "implementation"))
def walk(grown, after, longest, cap, implementation="xla"):
    return tree.walk(grown, after, longest, cap, implementation)


@partial(jax.jit, static_argnames="longest")
def interpreted_walk(grown, after, longest, cap):
    return kernel.walk(jax.tree.leaves(grown), after, longest, cap, interpret=True)


def problems(batch, *law):
    """Random laws; tied ones; and zeros of both signs, which tie too."""
    yield tree_problem(batch, *law)
    yield tree_problem(batch, *law, tied=True)
    laws, *rest = tree_problem(batch, *law, tied=True, seed=1)
    signs = np.random.default_rng(2).choice(np.float32([0.0, -0.0]), laws.shape)
    yield jnp.where(laws == -1, laws, jnp.asarray(signs)), *rest


def assert_same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nodes_are_the_references(shape):
    *law, nodes = shape
    for problem in problems(2, *law):
        assert_same(interpreted(*problem, nodes), grow(*problem, nodes))


def test_totals_that_rounding_ties():
    """Laws that differ, of nodes whose totals do not: the better law is the next child all the
    same, and of equal totals the node that was there first goes first.
    """
    step = np.float32(2**-20)
    rows = np.float32([[0, -64, -128], [-2 * step, -step, -3 * step], [-step, 0, -step]])
    laws, (_, cand, anchor) = jnp.asarray(rows)[None], tree_problem(1, 3, 1, 3)
    laws = laws.at[0, 0].add(-64)
    assert_same(interpreted(laws, cand, anchor, 24), grow(laws, cand, anchor, 24))


@pytest.mark.parametrize("value", [np.nan, -np.nan, -np.inf, np.inf])
def test_laws_that_are_not_finite_still_give_candidates(value):
    laws, cand, anchor = tree_problem(3, 3, 5, 5)
    laws = laws.at[0, 1, 2].set(value).at[1, 0].set(value).at[2].set(value)
    grown = interpreted(laws, cand, anchor, 31)
    np.testing.assert_array_equal(grown.tokens[:, 0], anchor)
    assert np.isin(grown.tokens[:, 1:].reshape(3, -1), cand).all()
    assert ((grown.depth[:, 1:] >= 1) & (grown.depth[:, 1:] <= 3)).all()
    assert ((grown.parent >= 0) & (grown.parent < 31)).all()


def test_a_sequence_reads_nothing_of_its_neighbours():
    laws, cand, anchor = tree_problem(3, 3, 5, 5)
    alone = jax.tree.map(lambda x: x[1:2], (laws, cand, anchor))
    between = interpreted(laws.at[::2].set(jnp.nan), cand, anchor, 31)
    assert_same(jax.tree.map(lambda x: x[1:2], between), grow(*alone, 31))


def test_inside_a_loop():
    """Trees whose anchors are the last nodes of those before."""
    laws, cand, anchor = tree_problem(2, 3, 1, 4)

    def last(form):
        def step(anchor, _):
            grown = form(laws, cand, anchor, 9)
            return grown.tokens[:, -1] + grown.tokens[:, 0], grown

        return jax.lax.scan(step, anchor, length=3)

    assert_same(jax.jit(partial(last, interpreted))(), jax.jit(partial(last, grow))())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paths_are_the_references(shape):
    *law, nodes = shape
    longest = min(law[0], nodes - 1)
    grown = grow(*tree_problem(48, *law), nodes)
    after, cap = answers(grown, longest)
    path, accepted = walk(grown, after, longest, cap)
    assert_same(interpreted_walk(grown, after, longest, cap), (path, accepted))
    assert len(np.unique(np.asarray(accepted))) > 1


def test_a_walk_of_twins_or_of_nodes_too_deep():
    """The first of several deepest nodes; and never a node behind the path's last row."""
    fields = ([4, 5, 5, 6, 6], [0, 0, 0, 1, 2], [0, 1, 1, 2, 2], [1, 3, 5, 11, 21])
    grown = tree.DraftTree(*(jnp.asarray([x], jnp.int32) for x in fields))
    after, cap = jnp.asarray([[5, 6, 6, 0, 0]], jnp.int32), jnp.asarray([3], jnp.int32)
    assert_same(interpreted_walk(grown, after, 2, cap), walk(grown, after, 2, cap))
    assert interpreted_walk(grown, after, 3, cap)[0].tolist() == [[0, 1, 3, 3]]
    assert interpreted_walk(grown, after, 1, cap)[0].tolist() == [[0, 1]]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("preset", PRESETS)
def test_one_launch_on_a_gpu(monkeypatch, preset, batch):
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    *law, nodes = PRESETS[preset]
    program = lowered(lambda *args: tree.grow(*args, nodes), *tree_problem(batch, *law))
    assert launches(program) == 1
    ids = jax.ShapeDtypeStruct((batch, nodes), jnp.int32)
    args = tree.DraftTree(*[ids] * 4), ids, jax.ShapeDtypeStruct((batch,), jnp.int32)
    program = lowered(lambda grown, after, cap: tree.walk(grown, after, law[0], cap), *args)
    assert launches(program) == 1


@pytest.mark.parametrize(("implementation", "count"), [(None, 1), ("xla", 0)])
def test_a_decision_walks_as_it_is_told(monkeypatch, implementation, count):
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    grown = grow(*tree_problem(2, 3, 1, 4), 8)
    logits, width = jnp.zeros((2, 8, 5)), jnp.full((2,), 4, jnp.int32)
    decide = partial(decide_tree, longest=3, implementation=implementation)
    assert launches(lowered(decide, grown, logits, width)) == count


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, *PRESETS.values()], ids=str)
def test_compiled_they_grow_and_walk_the_same_nodes(shape):
    *law, nodes = shape
    for problem in problems(5, *law):
        got, again = (grow(*problem, nodes, "pallas") for _ in range(2))
        assert_same(got, grow(*problem, nodes))
        assert_same(again, got)
        longest = min(law[0], nodes - 1)
        after, cap = answers(got, longest)
        expected = walk(got, after, longest, cap)
        assert_same(walk(got, after, longest, cap, "pallas"), expected)
