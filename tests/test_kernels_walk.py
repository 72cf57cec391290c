"""The walk kernel beyond `test_selector`'s own cases: shapes, dtypes, loops, and on a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import ampere, launches, lowered

from dflash_jax import kernels
from dflash_jax.selector import (
    dflash2_walk_greedy,
    dflash2_walk_greedy_q,
    dflash2_walk_sampled,
    lattice_walk_greedy,
    lattice_walk_sampled,
    pair_scores,
    sampled_walk,
    top_candidates,
)

kernel = kernels.kernel("walk")
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
F32, BF16 = jnp.float32, jnp.bfloat16
SHAPES = [(1, 1, 1), (3, 5, 6), (7, 8, 32), (4, 3, 256), (31, 64, 5)]
"""(slots, candidates, rank)."""
PRESETS = {
    "smollm2": (7, 16, 32, 49152),
    "qwen3-8b": (15, 16, 256, 151936),
    "muse-glimmer": (15, 16, 256, 202048),
    "widest": (31, 64, 256, 151936),
}
FORMS = {"greedy": 0, "greedy_q": 0, "sampled": 2}
SHARED = (None, None, 0, 0, 0, 0)
GAP = 1e-5
"""Least distance between scores, or of a uniform from a cdf, that all orders of a sum agree on."""


def walks(count, slots, k, rank, dtype=F32, *, tied=False, vocabulary=70, seed=0):
    """Arguments of a batch of greedy walks that share codebooks, and uniforms."""
    rng = np.random.default_rng(seed)

    def numbers(*shape):
        if tied:
            return rng.integers(-2, 3, shape).astype(np.float32) / 2
        return rng.normal(size=shape).astype(np.float32)

    unary, cand = top_candidates(jnp.asarray(numbers(count, slots, vocabulary)), k)
    scale = 1 if tied else rank**-0.25
    books = [jnp.asarray(scale * numbers(vocabulary, rank), dtype) for _ in range(2)]
    hproj = jnp.asarray(numbers(count, slots, rank))
    anchors = jnp.asarray(rng.integers(0, vocabulary, count), jnp.int32)
    uniforms = jnp.asarray(rng.uniform(size=(count, slots)), F32)
    return (*books, unary, cand, hproj, anchors), uniforms


def over(form, draws=0, **options):
    axes = (*SHARED, *[None, 0][:draws])
    return jax.jit(jax.vmap(partial(form, **options), in_axes=axes))


def settled(walk, chosen, temperature=None, uniforms=None):
    """Which walks decide every step by more than `GAP`."""
    scores = np.asarray(jax.vmap(pair_scores, in_axes=SHARED)(*walk), np.float64)
    before = np.concatenate([np.zeros_like(chosen[:, :1]), chosen[:, :-1]], axis=1)
    scores = np.take_along_axis(scores, before[:, :, None, None], axis=2)[:, :, 0]
    if temperature is None:
        best = np.sort(scores, axis=-1)
        return (best[..., -1:] - best[..., -2:-1] > GAP).all((1, 2))
    law = np.exp((scores - scores.max(-1, keepdims=True)) / temperature)
    cdf = np.cumsum(law / law.sum(-1, keepdims=True), axis=-1)
    return (np.abs(cdf - np.asarray(uniforms)[..., None]) > GAP).all((1, 2))


def chosen_of(path, cand):
    """Each path's candidate indices; candidates of one slot are distinct."""
    return (np.asarray(cand) == np.asarray(path)[..., None]).argmax(-1)


scan_greedy = over(dflash2_walk_greedy_q, implementation="xla")
scan_sampled = over(sampled_walk, 2, implementation="xla")


def assert_walks_agree(count, shape, dtype, run):
    """Greedy and sampled walks of `run` against the scan's, wherever the scan is settled."""
    greedy, greedy_q, sampled = (over(run(n), d) for n, d in FORMS.items())
    for tied in (False, True):
        walk, uniforms = walks(count, *shape, dtype, tied=tied)
        path, q = scan_greedy(*walk)
        sure = np.broadcast_to(tied or settled(walk, chosen_of(path, walk[3])), (count,))
        assert np.mean(sure) > 0.9
        got_path, got_q = greedy_q(*walk)
        np.testing.assert_array_equal(got_path[sure], path[sure])
        np.testing.assert_array_equal(greedy(*walk)[sure], path[sure])
        np.testing.assert_allclose(got_q[sure], q[sure], rtol=1e-5, atol=1e-6)
        for temperature in (1e-6, 0.7, 3.0):
            draws = (jnp.float32(temperature), uniforms)
            expected, got = scan_sampled(*walk, *draws), sampled(*walk, *draws)
            if temperature > 1e-5:
                sure = settled(walk, np.asarray(expected.chosen), *draws)
                assert np.mean(sure) > 0.9
            for ours, reference in zip(got[:2], expected[:2], strict=True):
                np.testing.assert_array_equal(ours[sure], reference[sure])
            for ours, reference in zip(got[2:], expected[2:], strict=True):
                np.testing.assert_allclose(ours[sure], reference[sure], rtol=1e-5, atol=1e-6)
            at_choice = np.take_along_axis(np.asarray(got[3]), np.asarray(got[1])[..., None], -1)
            np.testing.assert_array_equal(got[2], at_choice[..., 0])  # bit for bit


def interpreted(name):
    return partial(getattr(kernel, name), interpret=True)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape(shape, dtype):
    assert_walks_agree(20, shape, dtype, interpreted)


def test_rows_of_no_candidate_are_never_read():
    """NaN in every codebook row but the candidates' and the anchor's."""
    (pred, succ, unary, cand, hproj, anchor), uniforms = walks(1, 5, 3, 6)
    unread = np.ones(len(pred), bool)
    unread[np.asarray(cand).ravel()] = unread[int(anchor[0])] = False
    pred, succ = (jnp.where(unread[:, None], jnp.nan, x) for x in (pred, succ))
    one = (pred, succ, unary[0], cand[0], hproj[0], anchor[0])
    np.testing.assert_array_equal(interpreted("greedy")(*one), dflash2_walk_greedy(*one))
    drawn = interpreted("sampled")(*one, 1.0, uniforms[0])
    np.testing.assert_array_equal(drawn[0], dflash2_walk_sampled(*one, 1.0, uniforms[0])[0])
    assert np.isfinite(drawn[3]).all()


def test_a_faulty_slot_still_gives_candidates():
    """Its path is refused by the guard; it must stay inside the vocabulary all the same."""
    walk, uniforms = walks(3, 4, 3, 6)
    unary = walk[2].at[0, 1, 0].set(jnp.nan).at[1, 2].set(-jnp.inf).at[2].set(jnp.nan)
    walk = (*walk[:2], unary, *walk[3:])
    for path in (
        over(interpreted("greedy"))(*walk),
        over(interpreted("sampled"), 2)(*walk, jnp.float32(1), uniforms)[0],
    ):
        assert ((np.asarray(path) >= 0) & (np.asarray(path) < 70)).all()


def test_inside_a_while_loop():
    """Rounds of walks, each from the token where the one before ended."""
    walk, _ = walks(4, 3, 5, 6, vocabulary=20)

    def rounds(form):
        def step(carry):
            i, anchor, seen = carry
            path = jax.vmap(form, in_axes=SHARED)(*walk[:5], anchor)
            return i + 1, path[:, -1], seen.at[i].set(path)

        start = jnp.int32(0), walk[5], jnp.zeros((5, 4, 3), jnp.int32)
        return jax.lax.while_loop(lambda c: c[0] < 5, step, start)[2]

    ours = jax.jit(partial(rounds, interpreted("greedy")))()
    np.testing.assert_array_equal(ours, rounds(dflash2_walk_greedy))


def test_what_the_kernel_refuses(monkeypatch):
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    (pred, succ, *rest), _ = walks(1, 2, 65, 256)
    one = [x[0] for x in rest]
    with pytest.raises(
        NotImplementedError, match=r"k \* rank: expected at most 16384, found 65 \* 256"
    ):
        dflash2_walk_greedy(pred, succ, *one, "pallas")
    pred, succ = pred[:, :2].astype(jnp.float16), succ[:, :2].astype(jnp.float16)
    with pytest.raises(NotImplementedError, match="codebooks: expected float32 or bfloat16"):
        lattice_walk_greedy(pred, succ, *one, "pallas")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_one_launch_on_a_gpu(monkeypatch, preset, dtype):
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    slots, k, rank, vocabulary = PRESETS[preset]

    def array(*shape, dtype=F32):
        return jax.ShapeDtypeStruct(shape, dtype)

    book, batch = array(vocabulary, rank, dtype=dtype), 2
    walk = (book, book, array(batch, slots, k), array(batch, slots, k, dtype=jnp.int32))
    walk = (*walk, array(batch, slots, rank), array(batch, dtype=jnp.int32))
    for form in (dflash2_walk_greedy, dflash2_walk_greedy_q, lattice_walk_greedy):
        assert launches(lowered(jax.vmap(form, in_axes=SHARED), *walk)) == 1
    for form in (dflash2_walk_sampled, lattice_walk_sampled):
        drawn = jax.vmap(form, in_axes=(*SHARED, None, 0))
        assert launches(lowered(drawn, *walk, array(), array(batch, slots))) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", [*SHAPES, (15, 16, 256), (31, 64, 256)], ids=str)
def test_compiled_it_walks_the_reference_paths(shape, dtype):
    assert_walks_agree(50, shape, dtype, partial(getattr, kernel))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_compiled_it_repeats_bit_for_bit(dtype):
    walk, uniforms = walks(20, 15, 16, 256, dtype)
    for form, draws in (("greedy_q", ()), ("sampled", (jnp.float32(0.8), uniforms))):
        run = over(getattr(kernel, form), len(draws))
        for one, other in zip(run(*walk, *draws), run(*walk, *draws), strict=True):
            np.testing.assert_array_equal(one, other)
