"""The kernel that moves a path's rows together against the reference: interpreted here, compiled on
a GPU.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import ampere, launches, lowered

from dflash_jax import kernels
from dflash_jax.kv import keep_path

kernel = kernels.kernel("keep_path")
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
F32, BF16, INT8 = jnp.float32, jnp.bfloat16, jnp.int8
PATHS = {
    "as it lies": [0, 1, 2, 3, 4],
    "anchor alone": [0, 0, 0, 0, 0],
    "one on": [0, 2, 3, 4, 5],
    "gaps": [0, 3, 4, 9, 20],
    "short": [0, 7, 7, 7, 7],
    "late": [0, 1, 2, 3, 31],
}
KINDS = {
    "one": [((1, 24, 8), F32)],
    "five": [((2, 24, 8), BF16)] * 5,
    "several kinds": [((2, 24, 8), BF16), ((1, 40, 12), F32), ((2, 24, 8), INT8)] * 2
    + [((2, 24, 1), F32), ((2, 24, 8), BF16)],
}
"""(kv heads, slots beyond a tree's, D) and dtype of each cache."""
PRESETS = {
    "smollm2": ([((3, 640, 64), BF16)] * 60, 12, 1),
    "qwen3-8b": ([((8, 4096, 128), BF16)] * 72, 16, 1),
    "widest": ([((2, 64, 256), F32)] * 3, 32, 1),
    "two kinds": ([((3, 640, 64), BF16), ((3, 512, 64), BF16)] * 5, 12, 2),
}
"""Caches, rows of a path, launches."""


@jax.jit
def interpreted(leaves, slot, path):
    return kernel.keep_path(leaves, slot, path, interpret=True)


@partial(jax.jit, static_argnums=3)
def kept(leaves, slot, path, implementation="xla"):
    return keep_path(leaves, slot, path, implementation)


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def kept_in_place(leaves, slot, path, implementation="xla"):
    return keep_path(leaves, slot, path, implementation)


def caches(kinds, batch, seed=0):
    """Caches in which every number is another."""
    rng = np.random.default_rng(seed)

    def cache(shape, dtype):
        shape = (batch, *shape)
        values = rng.integers(-128, 128, shape) if dtype == INT8 else rng.normal(size=shape)
        return jnp.asarray(values, dtype)

    return [cache(*kind) for kind in kinds]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def paths_of(names):
    return jnp.asarray([PATHS[name] for name in names], jnp.int32)


@pytest.mark.parametrize("kinds", KINDS)
def test_rows_are_the_references(kinds):
    leaves = caches([((kv, slots + 32, dim), d) for (kv, slots, dim), d in KINDS[kinds]], 2)
    names = list(PATHS)
    for pair in zip(names, names[1:] + names[:1], strict=True):
        args = jnp.asarray([3, 24], jnp.int32), paths_of(pair)
        assert_same(interpreted(leaves, *args), kept(leaves, *args))


def test_rows_outside_the_tree_and_behind_the_path_stay():
    (leaf,) = caches([((2, 40, 4), F32)], 1)
    found = interpreted([leaf], jnp.asarray([5], jnp.int32), paths_of(["gaps"]))[0]
    np.testing.assert_array_equal(found[:, :, 5:10], leaf[:, :, jnp.array([5, 8, 9, 14, 25])])
    np.testing.assert_array_equal(found[:, :, :5], leaf[:, :, :5])
    np.testing.assert_array_equal(found[:, :, 10:], leaf[:, :, 10:])


def test_inside_a_loop():
    """Paths that are kept one behind the other."""
    leaves, slot = caches([((2, 60, 4), F32)] * 3, 1), jnp.asarray([2], jnp.int32)
    paths = paths_of(["one on", "gaps", "late"])

    def rounds(form):
        def step(carry, path):
            leaves, slot = carry
            return (form(leaves, slot, path[None]), slot + 3), None

        return jax.lax.scan(step, (leaves, slot), paths)[0][0]

    assert_same(jax.jit(partial(rounds, interpreted))(), jax.jit(partial(rounds, kept))())


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("preset", PRESETS)
def test_one_launch_a_kind_of_cache_on_a_gpu(monkeypatch, preset, batch):
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    kinds, rows, expected = PRESETS[preset]
    leaves = [jax.ShapeDtypeStruct((batch, *shape), dtype) for shape, dtype in kinds]
    slot, path = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((batch,), (batch, rows)))
    assert launches(lowered(keep_path, leaves, slot, path)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("preset", PRESETS)
def test_compiled_it_moves_the_same_rows(preset, batch):
    """Many times, in place: a row that is written before it is read shows up in some."""
    kinds, rows, _ = PRESETS[preset]
    rng = np.random.default_rng(1)
    leaves = caches(kinds, batch)
    for _ in range(20):
        chosen = [np.sort(rng.permutation(31)[: rows - 1]) + 1 for _ in range(batch)]
        path = jnp.asarray([[0, *nodes] for nodes in chosen], jnp.int32)
        slot = jnp.asarray(rng.integers(0, 32, batch), jnp.int32)
        expected = kept(leaves, slot, path)
        leaves = kept_in_place(leaves, slot, path, "pallas")
        assert_same(leaves, expected)
