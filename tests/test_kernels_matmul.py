"""The quantised projection kernel against the reference: interpreted here, compiled on a GPU."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import ampere, launches, lowered

from dflash_jax import kernels, quant
from dflash_jax.layers import linear
from dflash_jax.quant import PRECISIONS

kernel = kernels.kernel("matmul")
F32, BF16 = jnp.float32, jnp.bfloat16
SMALL = kernel.MatmulTiling(columns=16, depth=64, programs=64, warps=1, stages=1)
"""Cuts even a small matrix into several programs, shares and steps."""
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
QWEN3_8B = {
    "qkv": (6144, 4096, 0),
    "kv": (6144, 4096, 4096),
    "o": (4096, 4096, 0),
    "gate_up": (24576, 4096, 0),
    "down": (4096, 12288, 0),
    "fc": (4096, 20480, 0),
    "lm_head": (151936, 4096, 0),
}
"""(outputs, inputs, first) of the drafter's projections."""
A100_SHARED = 163 << 10


def problem(precision, rows, outputs, inputs, dtype=F32, seed=0):
    rng = np.random.default_rng(seed)
    weight = quant.quantize(rng.normal(size=(outputs, inputs)), precision)
    x = jnp.asarray(rng.normal(size=(rows, inputs)), dtype)
    return x, jax.tree.map(jnp.asarray, weight)


def exact(x, weight, first=0):
    matrix = np.asarray(quant.dequantize(weight), np.float64)[first:]
    return np.asarray(x, np.float64) @ matrix.T


def assert_close(got, expected, tolerance=1e-5):
    assert got.shape == expected.shape
    error = np.abs(np.asarray(got, np.float64) - expected).max()
    assert error <= tolerance * np.abs(expected).max()


SHAPES = [(16, 32, 128, 0), (5, 39, 160, 7)]
"""(rows, outputs, inputs, first): whole tiles; tails of rows, outputs and inputs."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sums_are_the_references(precision, shape):
    rows, outputs, inputs, first = shape
    x, weight = problem(precision, rows, outputs, inputs)
    got = kernel.project(x, weight, F32, first=first, tiling=SMALL, interpret=True)
    assert_close(got, exact(x, weight, first))
    assert_close(quant.project(x, weight, first=first), exact(x, weight, first))


@pytest.mark.parametrize("precision", ["int8", "q4_0"])
def test_shares_of_a_sum_may_end_before_their_last_step(precision):
    """22 steps in 4 shares of 6: the last has 4, and 2 past the end."""
    tiling = dataclasses.replace(SMALL, columns=32)
    x, weight = problem(precision, 3, 32, 22 * 64)
    got = kernel.project(x, weight, F32, tiling=tiling, interpret=True)
    assert_close(got, exact(x, weight))


@pytest.mark.parametrize("precision", ["int8", "q4_0"])
def test_bf16_rows_keep_every_integer(precision):
    """No rounding but the rows' own and the result's."""
    x, weight = problem(precision, 4, 16, 128, BF16)
    got = kernel.project(x, weight, F32, tiling=SMALL, interpret=True)
    assert_close(got, exact(x, weight), 1e-5)
    half = kernel.project(x, weight, BF16, tiling=SMALL, interpret=True)
    np.testing.assert_array_equal(half, got.astype(BF16))


def test_nothing_is_read_past_an_output_or_an_input():
    x, weight = problem("q8_0", 4, 24, 160)
    scales = jnp.pad(weight.scales, ((0, 8), (0, 0)), constant_values=jnp.nan)
    values = jnp.pad(weight.values, ((0, 8), (0, 0)), constant_values=99)
    poisoned = weight.replace(values=values, scales=scales)
    got = kernel.project(x, poisoned, F32, tiling=SMALL, interpret=True)
    assert_close(got[:, :24], exact(x, weight))


def test_leading_axes_and_vmap():
    x, weight = problem("int8", 6, 16, 64)
    run = partial(kernel.project, weight=weight, dtype=F32, tiling=SMALL, interpret=True)
    expected = exact(x, weight).reshape(2, 3, 16)
    assert_close(run(x.reshape(2, 3, 64)), expected)
    assert_close(jax.vmap(run)(x.reshape(2, 3, 64)), expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_launch_a_projection_on_a_gpu(monkeypatch, precision):
    """Of up to 64 rows; more, and any asked for by name, are XLA's."""
    monkeypatch.setattr(kernels, "device_refusal", ampere)

    def text(rows, implementation=None):
        def all_of_them(xs, weights):
            return [
                linear(x, w, first=first, implementation=implementation)
                for x, w, (_, _, first) in zip(xs, weights, QWEN3_8B.values(), strict=True)
            ]

        xs = [jax.ShapeDtypeStruct((1, rows, n), BF16) for _, n, _ in QWEN3_8B.values()]
        weights = [quant.abstract(out, n, precision) for out, n, _ in QWEN3_8B.values()]
        return lowered(all_of_them, xs, weights)

    assert launches(text(16)) == len(QWEN3_8B)
    assert launches(text(65)) == launches(text(16, "xla")) == 0


@pytest.mark.parametrize("rows", [16, 64])
def test_the_default_tiles_fit_an_a100(rows):
    tiling = kernel.DEFAULT
    step = tiling.depth * (tiling.columns + rows * BF16.dtype.itemsize)
    assert tiling.stages * step <= A100_SHARED


def test_rows_of_another_type_are_refused(monkeypatch):
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    x, weight = problem("int8", 2, 4, 32)
    with pytest.raises(NotImplementedError, match="rows: expected float32 or bfloat16, found fl"):
        quant.project(x.astype(jnp.float16), weight, implementation="pallas")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_compiled_it_is_the_reference_and_repeats(precision, dtype):
    for rows, outputs, inputs, first in [*SHAPES, (16, 6144, 4096, 4096), (64, 4096, 4096, 0)]:
        x, weight = problem(precision, rows, outputs, inputs, dtype)
        run = partial(quant.project, x, weight, F32, first=first, implementation="pallas")
        got = run()
        assert_close(got, exact(x, weight, first), 2e-5)
        np.testing.assert_array_equal(got, run())
