"""The top-k kernel against `lax.top_k` and `argmax`: interpreted here, compiled on a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import ampere, launches, lowered

from dflash_jax import kernels
from dflash_jax.selector import best_ids, candidate_fault, top_candidates

kernel = kernels.kernel("topk")
F32, BF16 = jnp.float32, jnp.bfloat16
SMALL = kernel.TopkTiling(chunk=4, group=2, groups=2)
"""Cuts even short rows into several chunks, groups and programs."""
SHAPES = [(1, 1), (5, 5), (16, 4), (17, 1), (33, 7), (64, 64), (130, 16)]
"""(vocabulary, k)."""
MIN = float(jnp.finfo(F32).min)
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
PRESETS = {"smollm2": (7, 49152), "qwen3-8b": (15, 151936), "muse-glimmer": (15, 202048)}


@partial(jax.jit, static_argnums=1)
def small_top_k(logits, k):
    return kernel.top_k(logits, k, tiling=SMALL, interpret=True)


@jax.jit
def small_argmax(logits):
    return kernel.argmax(logits, tiling=SMALL, interpret=True)


reference = jax.jit(top_candidates, static_argnums=1)


def rows(kind, vocabulary, seed=0):
    """Six rows of logits."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(6, vocabulary)).astype(np.float32)
    if kind == "tied":
        x = rng.integers(-1, 2, x.shape).astype(np.float32)
    elif kind == "equal":
        x = np.full_like(x, -3.0)
    elif kind == "padded":
        x[:, vocabulary // 2 :] = MIN
    elif kind == "masked":
        x[rng.random(x.shape) < 0.7] = -np.inf
    elif kind == "descending":  # the order of chunks by their best is the order of ids
        x = -np.sort(-x, axis=1)
    elif kind == "ascending":
        x = np.sort(x, axis=1)
    elif kind == "nan":
        x[::2][rng.random((3, vocabulary)) < 0.3] = np.nan
        x[1] = np.nan
        x[3, vocabulary // 2] = -np.float32(np.nan)
    elif kind == "signed zeros":
        x = rng.choice(np.float32([0.0, -0.0, -1.0]), x.shape)
    elif kind == "extreme":
        x = rng.choice(np.float32([np.inf, -np.inf, MIN, -MIN, 1e-45, -1e-45, 0]), x.shape)
    return x


KINDS = ["random", "tied", "equal", "padded", "masked", "descending", "ascending", "nan"]
KINDS += ["signed zeros", "extreme"]


def assert_same(got, expected):
    """Bits of the values (but a NaN's), and ids."""
    values, reference = (np.asarray(x[0], np.float32) for x in (got, expected))
    np.testing.assert_array_equal(values, reference)
    np.testing.assert_array_equal(
        np.signbit(values)[values == 0], np.signbit(reference)[values == 0]
    )
    np.testing.assert_array_equal(got[1], expected[1])
    assert got[0].dtype == expected[0].dtype
    assert got[1].dtype == expected[1].dtype == jnp.int32


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_values_are_the_references(kind, dtype):
    for vocabulary, k in SHAPES:
        logits = jnp.asarray(rows(kind, vocabulary), dtype)
        assert_same(small_top_k(logits, k), reference(logits, k))
        np.testing.assert_array_equal(small_argmax(logits), jnp.argmax(logits, axis=-1))


@pytest.mark.parametrize(("vocabulary", "k"), [(100, 16), (5000, 16), (9000, 3), (4097, 64)])
def test_the_default_tiling_too(vocabulary, k):
    logits = jnp.asarray(rows("random", vocabulary))
    assert_same(kernel.top_k(logits, k, interpret=True), top_candidates(logits, k))


@pytest.mark.parametrize("where", ["one chunk", "one group", "all groups"])
def test_wherever_the_best_lie(where):
    """16 groups of 4 chunks of 4: the eight best side by side, or one in every second group."""
    tiling = kernel.TopkTiling(chunk=4, group=4, groups=1)
    rng = np.random.default_rng(1)
    logits = rng.uniform(-1, 0, (4, 256)).astype(np.float32)
    places = {"one chunk": np.arange(100, 104), "one group": np.arange(96, 104)}
    at = places.get(where, np.arange(3, 256, 32))
    logits[:, at] = rng.integers(1, 4, (4, at.size))  # ties among them
    got = kernel.top_k(jnp.asarray(logits), 8, tiling=tiling, interpret=True)
    assert_same(got, top_candidates(jnp.asarray(logits), 8))
    assert set(at) <= set(np.asarray(got[1][0]).tolist())


def test_ties_across_groups_go_to_the_lower_id():
    logits = np.zeros((1, 64), np.float32)
    logits[0, [60, 33, 2, 17, 35]] = 7
    _, ids = small_top_k(logits, 4)
    assert ids.tolist() == [[2, 17, 33, 35]]


@pytest.mark.parametrize("nan", [np.float32(np.nan), -np.float32(np.nan)], ids=["plus", "minus"])
def test_a_nan_of_either_sign_comes_out_first_and_the_guard_sees_it(nan):
    """x86 arithmetic makes NaNs with the sign bit set."""
    logits = rows("random", 50)
    logits[4, 30] = nan
    for top in (small_top_k, reference):
        unary, ids = top(logits, 4)
        assert int(ids[4, 0]) == 30
        assert int(candidate_fault(unary)) == 4


def test_other_rows_do_not_matter():
    """A row between rows of NaN: a read past its end would bring one up."""
    for vocabulary, k in SHAPES:
        logits = np.full((6, vocabulary), np.nan, np.float32)
        logits[1::2] = rows("random", vocabulary)[1::2]
        assert_same(small_top_k(logits, k), reference(logits, k))


def test_leading_dimensions_and_vmap():
    logits = jnp.asarray(rows("tied", 70)).reshape(3, 2, 70)
    expected = top_candidates(logits, 6)
    assert_same(small_top_k(logits, 6), expected)
    one = jax.vmap(lambda x: small_top_k(x, 6))
    assert_same(one(logits), expected)
    assert_same(jax.vmap(one)(logits), expected)
    assert_same(small_top_k(logits[1, 1], 6), tuple(x[1, 1] for x in expected))


def test_inside_a_while_loop():
    """The path of best tokens through a table, as a decode loop would walk it."""
    table = jnp.asarray(rows("tied", 6 * 7).reshape(42, 6) * 7 + np.arange(6, dtype=np.float32))

    def walk(top):
        def step(carry):
            i, row, seen = carry
            best = top(table[row][None], 2)[1][0, 1]
            return i + 1, (row + best) % 42, seen.at[i].set(best)

        start = jnp.int32(0), jnp.int32(3), jnp.zeros((9,), jnp.int32)
        return jax.lax.while_loop(lambda c: c[0] < 9, step, start)[2]

    ours = jax.jit(lambda: walk(small_top_k))()
    np.testing.assert_array_equal(ours, walk(top_candidates))


@pytest.mark.parametrize(
    ("shape", "k", "dtype", "why"),
    [
        ((2, 200), 65, F32, "k: expected 1 to 64, found 65"),
        ((2, 200), 0, F32, "k: expected 1 to 64, found 0"),
        ((0, 200), 4, F32, "rows of logits: expected 1 to 65535, found 0"),
        ((2, 200), 4, jnp.float16, "logits: expected float32 or bfloat16, found float16"),
    ],
)
def test_what_the_kernel_refuses(monkeypatch, shape, k, dtype, why):
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    with pytest.raises(NotImplementedError, match=why):
        top_candidates(jnp.zeros(shape, dtype), k, "pallas")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("k", [1, 16, 64])
def test_two_launches_on_a_gpu(monkeypatch, preset, k, dtype):
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    logits = jax.ShapeDtypeStruct(PRESETS[preset], dtype)
    assert launches(lowered(lambda x: top_candidates(x, k), logits)) == 2
    assert launches(lowered(lambda x: best_ids(x, "pallas"), logits)) == 2
    assert launches(lowered(best_ids, logits)) == 0  # XLA's was measured faster
    batched = jax.ShapeDtypeStruct((4, *PRESETS[preset]), dtype)
    assert launches(lowered(jax.vmap(lambda x: top_candidates(x, k)), batched)) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_it_is_exact_and_repeats(kind, dtype):
    for vocabulary, k in [*SHAPES, (49152, 16), (151936, 16), (202048, 64)]:
        logits = jnp.asarray(rows(kind, vocabulary), dtype)
        got, again = (top_candidates(logits, k, "pallas") for _ in range(2))
        with jax.default_device(jax.devices("cpu")[0]):
            on_cpu = jnp.asarray(np.asarray(logits))
            expected = top_candidates(on_cpu, k)
        assert_same(got, expected)
        assert_same(again, got)
        # numpy's, for XLA on a CPU takes the smallest numbers for zeros.
        best = np.argmax(np.asarray(logits, np.float32), axis=-1)
        np.testing.assert_array_equal(best_ids(logits, "pallas"), best)


@pytest.mark.gpu
def test_compiled_a_row_reads_nothing_of_its_neighbours():
    for vocabulary in (33, 4097, 49152):
        logits = np.full((3, vocabulary), np.nan, np.float32)
        logits[1] = rows("random", vocabulary)[0]
        values, ids = top_candidates(jnp.asarray(logits), 8, "pallas")
        order = np.argsort(-logits[1], kind="stable")[:8]
        np.testing.assert_array_equal(ids[1], order)
        np.testing.assert_array_equal(values[1], logits[1, order])
        assert ids[0].tolist() == ids[2].tolist() == list(range(8))
