"""The filters' kernel against `sampling.leading`: interpreted here, compiled on a GPU."""

import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import ampere, launches, lowered

from dflash_jax import kernels, sampling
from dflash_jax.sampling import Filters, filtered_probs

kernel = kernels.kernel("leading")
F32 = jnp.float32
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
VOCABULARIES = [130, 9000]
"""Two programs, the second of which is nearly empty, and many of several tiles."""
KINDS = ["random", "tied", "equal", "masked", "signed zeros", "close", "descending"]


@jax.jit
def ours(x, weight, limits):
    run = partial(kernel.leading, interpret=True)
    return jax.vmap(jax.vmap(run, in_axes=(None, None, 0)))(x, weight, limits)


@jax.jit
def reference(x, weight, limits):
    return jax.vmap(jax.vmap(sampling.leading, in_axes=(None, None, 0)))(x, weight, limits)


def rows(kind, vocabulary, seed=0):
    """Two rows of values."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, vocabulary)).astype(np.float32)
    if kind == "tied":
        x = rng.integers(-2, 3, x.shape).astype(np.float32)
    elif kind == "equal":
        x = np.full_like(x, -3.0)
    elif kind == "masked":
        x[rng.random(x.shape) < 0.7] = -np.inf
    elif kind == "signed zeros":
        x = rng.choice(np.float32([0.0, -0.0, -1.0, 1.0]), x.shape)
    elif kind == "close":  # told apart by the last bits alone
        bits = np.float32(1).view(np.int32) + rng.integers(0, 9, x.shape, np.int32)
        x = bits.view(np.float32)
    elif kind == "descending":
        x = -np.sort(-x, axis=1)
    return x


def weights(kind, shape, seed=0):
    """Ones, or weights a third of which are 0; every sum of them is exact in f32."""
    if kind == "counts":
        return np.ones(shape, np.float32)
    return (np.random.default_rng(seed).integers(-32, 64, shape).clip(0) / 64).astype(np.float32)


def limits_of(weight):
    """What keeps one entry, few, half of the weight, all but one, all, and more than there are."""
    total = weight.sum(axis=1)
    parts = [0 * total + 1e-6, 0 * total + 1, 0 * total + 2.5, total / 2, total - 0.5, total]
    return np.stack([*parts, total + 1], axis=1).astype(np.float32)


def by_sorting(x, weight, limit):
    """The contract in NumPy: a stable descending sort, f64 sums."""
    order = np.argsort(-x, kind="stable")
    before = np.cumsum(weight[order].astype(np.float64)) - weight[order]
    kept = np.zeros(x.shape, bool)
    kept[order] = before < limit
    return kept


@pytest.mark.parametrize("weighed", ["counts", "weights"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_entries_stay_ties_included(kind, weighed):
    for vocabulary in VOCABULARIES:
        x = rows(kind, vocabulary)
        weight = weights(weighed, x.shape)
        limits = limits_of(weight)
        got = np.asarray(ours(x, weight, limits))
        np.testing.assert_array_equal(got, reference(x, weight, limits))
        for b, j in np.ndindex(limits.shape):
            np.testing.assert_array_equal(got[b, j], by_sorting(x[b], weight[b], limits[b, j]))


def test_ties_at_the_cut_go_to_the_lower_id_across_programs():
    x = np.zeros((2, 130), np.float32)
    x[:, [7, 100, 127, 128, 129]] = 5
    limits = np.tile(np.float32([1, 2, 3, 4, 5, 6, 7]), (2, 1))
    kept = np.asarray(ours(x, np.ones_like(x), limits))[0]
    order = [7, 100, 127, 128, 129, 0, 1]
    assert [np.flatnonzero(k).tolist() for k in kept] == [sorted(order[:n]) for n in range(1, 8)]


def test_other_rows_do_not_matter():
    """A row before one of NaN: a read past its end would bring one up."""
    x = rows("random", 130)
    x[1] = np.nan
    weight = np.where(np.isnan(x), np.float32(np.nan), np.float32(1))
    got = ours(x, weight, np.full((2, 7), 9, np.float32))
    np.testing.assert_array_equal(got[0, 0], by_sorting(x[0], np.ones(130), 9))


def test_the_filters_ask_it(monkeypatch):
    """The law of a row by the kernel is the reference's."""
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    interpreted = types.SimpleNamespace(leading=partial(kernel.leading, interpret=True))
    monkeypatch.setattr(kernels, "kernel", {"leading": interpreted}.__getitem__)
    filters = Filters(jnp.float32(0.8), top_k=jnp.int32(40), top_p=jnp.float32(0.9))
    logits = jnp.asarray(rows("random", 130)[0])
    laws = [filtered_probs(logits, filters, choice) for choice in ("pallas", "xla")]
    assert 20 < int((laws[0] > 0).sum()) < 40
    np.testing.assert_allclose(*laws, rtol=1e-6)


def test_eight_launches_on_a_gpu_whatever_the_rows(monkeypatch):
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    filters = Filters(*(jax.ShapeDtypeStruct((2,), d) for d in (F32, jnp.int32, F32, F32)))
    logits = jax.ShapeDtypeStruct((2, 13, 151936), F32)

    def law(implementation):
        one = partial(filtered_probs, implementation=implementation)
        return jax.vmap(jax.vmap(one, in_axes=(0, None)))

    for implementation in ("pallas", None):
        assert launches(lowered(law(implementation), logits, filters)) == 2 * 8


@pytest.mark.gpu
@pytest.mark.parametrize("weighed", ["counts", "weights"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_it_is_exact_and_repeats(kind, weighed):
    compiled = jax.jit(partial(sampling.leading, implementation="pallas"))
    for vocabulary in [1, *VOCABULARIES, 49152, 151936]:
        x = rows(kind, vocabulary)[0]
        weight = weights(weighed, x.shape)
        for limit in limits_of(weight[None])[0]:
            got, again = (compiled(x, weight, limit) for _ in range(2))
            np.testing.assert_array_equal(got, by_sorting(x, weight, limit))
            np.testing.assert_array_equal(again, got)
