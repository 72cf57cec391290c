"""The kernels that grow and walk draft trees against the reference: interpreted here, compiled on a
GPU.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import ampere, launches, lowered
from trees import KINDS, answers, check_candidates, tree_problem

from dflash_jax import kernels, tree
from dflash_jax.verify import decide_tree

kernel = kernels.kernel("tree")
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
SHAPES = [
    *[(7, 1, 8, 16), (15, 16, 16, 32), (5, 6, 6, 24), (2, 32, 32, 32)],
    *[(4, 1, 32, 32), (8, 1, 7, 9), (15, 4, 4, 5), (15, 1, 2, 31)],
    *[(1, 1, 5, 6), (1, 1, 32, 2), (9, 1, 1, 10), (12, 3, 3, 1)],
]
"""(slots, candidates before, candidates, nodes)."""
PRESETS = {"p1": (11, 1, 8, 16), "p16": (15, 16, 16, 16), "widest": (31, 32, 32, 32)}


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
    return kernel.walk(grown.tokens, grown.depth, after, longest, cap, interpret=True)


def assert_same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nodes_are_the_references(shape):
    *law, nodes = shape
    for kind in KINDS:
        problem = tree_problem(3, *law, kind=kind)
        assert_same(interpreted(*problem, nodes), grow(*problem, nodes))


def test_totals_that_rounding_ties():
    """Laws that differ, of nodes whose totals do not, in every order of the candidates."""
    step = np.float32(2**-20)
    rows = np.float32([[-64, -65, -128], [-2 * step, -step, 0], [-step, 0, -step]])
    orders = np.asarray(list(itertools.permutations(range(3))))
    laws = jnp.asarray(rows[:, orders].swapaxes(0, 1))
    _, cand, anchor = tree_problem(len(orders), 3, 1, 3)
    for nodes in (3, 4, 6, 10):
        assert_same(interpreted(laws, cand, anchor, nodes), grow(laws, cand, anchor, nodes))


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_laws_that_are_no_laws_still_give_candidates(value):
    check_candidates(interpreted, value)


def test_a_sequence_reads_nothing_of_its_neighbours():
    laws, cand, anchor = tree_problem(3, 3, 5, 5)
    alone = jax.tree.map(lambda x: x[1:2], (laws, cand, anchor))
    between = interpreted(laws.at[::2].set(jnp.nan), cand, anchor, 14)
    assert_same(jax.tree.map(lambda x: x[1:2], between), grow(*alone, 14))


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
    accepted = []
    for most in (cap, jnp.full_like(cap, 1), jnp.full_like(cap, longest + 1)):
        expected = walk(grown, after, longest, most)
        assert_same(interpreted_walk(grown, after, longest, most), expected)
        accepted += expected[1].tolist()
    assert len(set(accepted)) > min(longest, 2)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("preset", PRESETS)
def test_one_launch_on_a_gpu(monkeypatch, preset, batch):
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    *law, nodes = PRESETS[preset]
    program = lowered(lambda *args: tree.grow(*args, nodes), *tree_problem(batch, *law))
    assert launches(program) == 1
    ids = jax.ShapeDtypeStruct((batch, nodes), jnp.int32)
    args = tree.DraftTree(ids, ids), ids, jax.ShapeDtypeStruct((batch,), jnp.int32)
    longest = min(law[0], nodes - 1)
    program = lowered(lambda grown, after, cap: tree.walk(grown, after, longest, cap), *args)
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
    for kind in KINDS:
        problem = tree_problem(5, *law, kind=kind)
        got, again = (grow(*problem, nodes, "pallas") for _ in range(2))
        assert_same(got, grow(*problem, nodes))
        assert_same(again, got)
        longest = min(law[0], nodes - 1)
        after, cap = answers(got, longest)
        expected = walk(got, after, longest, cap)
        assert_same(walk(got, after, longest, cap, "pallas"), expected)
