"""The kernel that ends a sublayer and begins the next, against the reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import ampere, launches, lowered

from dflash_jax import kernels
from dflash_jax.layers import add_norm, gated, in_parts, linear

kernel = kernels.kernel("add_norm")
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
F32, BF16 = jnp.float32, jnp.bfloat16
EPS = 1e-5


def problem(batch, rows, inputs, outputs, dtype=F32, seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape, scale=1.0):
        return jnp.asarray(scale * rng.normal(size=shape), dtype)

    x, given = draw(batch, rows, outputs), draw(batch, rows, inputs)
    return x, given, draw(outputs, inputs, scale=inputs**-0.5), 1 + draw(outputs, scale=0.1)


def close(got, expected, tolerance):
    got, expected = (np.asarray(a, np.float64) for a in (got, expected))
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 1e-5), (BF16, 1e-2)])
@pytest.mark.parametrize("shape", [(1, 12, 576, 576), (2, 1, 1536, 576), (1, 3, 48, 36)])
def test_equals_the_reference(shape, dtype, tolerance):
    x, rows, weight, norm = problem(*shape, dtype)
    expected = add_norm(x, rows, weight, norm, EPS, implementation="xla")
    got = kernel.add_norm(x, in_parts(rows, weight), norm, EPS, interpret=True)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        close(a, b, tolerance)


@pytest.mark.parametrize(
    ("inputs", "outputs", "parts"),
    [(576, 576, 8), (1536, 576, 8), (2048, 2048, 8), (40, 36, 1), (576, 3072, 4), (8, 4, 1)],
)
def test_parts_add_up_to_the_product(inputs, outputs, parts):
    _, rows, weight, _ = problem(1, 5, inputs, outputs)
    found = in_parts(rows, weight)
    assert found.shape == (parts, 1, 5, outputs)
    close(found.sum(axis=0), linear(rows, weight), 1e-5)


@pytest.mark.parametrize("rows", [1, 12, 16])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 576), (1536, 576), (3072, 1024)])
def test_one_launch_on_a_gpu(monkeypatch, rows, inputs, outputs):
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    args = problem(1, rows, inputs, outputs, BF16)
    assert launches(lowered(partial(add_norm, eps=EPS), *args)) == 1


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(33, 48, 36), (1, 64, 1032)])
def test_many_rows_and_wide_ones_are_left_to_xla(monkeypatch, rows, inputs, outputs):
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    args = problem(1, rows, inputs, outputs, BF16)
    assert launches(lowered(partial(add_norm, eps=EPS), *args)) == 0


@pytest.mark.parametrize(("rows", "parts"), [(12, True), (1, False), (33, False)])
def test_an_mlp_of_few_rows_sums_in_parts_on_a_gpu(monkeypatch, rows, parts):
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(1, rows, 64)), F32)
    weight = jnp.asarray(0.1 * rng.normal(size=(192, 64)), F32)
    expected = gated(x, weight, "xla")
    monkeypatch.setattr(kernels, "device_refusal", lambda hopper=False: None)
    text = jax.jit(gated).lower(x, weight).as_text()
    assert (f"tensor<8x1x{rows}x192xf32>" in text or f"tensor<8x{rows}x192xf32>" in text) == parts
    close(gated(x, weight), expected, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 1e-5), (BF16, 1e-2)])
@pytest.mark.parametrize("shape", [(1, 12, 576, 576), (2, 16, 1536, 576), (1, 16, 3072, 1024)])
def test_compiled_equals_the_reference_and_repeats(shape, dtype, tolerance):
    x, rows, weight, norm = problem(*shape, dtype)
    with jax.default_matmul_precision("highest"):
        run = jax.jit(partial(add_norm, eps=EPS), static_argnames="implementation")
        expected = run(x, rows, weight, norm, implementation="xla")
        got, again = (run(x, rows, weight, norm, implementation="pallas") for _ in range(2))
    for a, b, c in zip(got, expected, again, strict=True):
        close(a, b, tolerance)
        np.testing.assert_array_equal(a, c)
