"""The stored int8 format: the same values on every load, and close to the original."""

import ml_dtypes
import numpy as np

from dflash_jax import quant


def weights(seed=0):
    return np.random.default_rng(seed).normal(size=(6, 40)).astype(np.float32)


def test_value_is_bf16_of_quantised_times_scale():
    q, scale = quant.quantize_rows(weights())
    assert (q.dtype, q.shape, scale.dtype, scale.shape) == (np.int8, (6, 40), np.float32, (6,))
    expected = np.zeros((6, 40), ml_dtypes.bfloat16)
    for i in range(6):
        for j in range(40):
            expected[i, j] = np.float32(q[i, j]) * scale[i]
    got = quant.dequantize_rows(q, scale)
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got, expected)


def test_error_is_half_a_step_of_the_row_and_a_rounding():
    w = weights()
    q, scale = quant.quantize_rows(w)
    error = np.abs(quant.dequantize_rows(q, scale).astype(np.float32) - w)
    assert (error <= 0.5 * scale[:, None] + 2**-8 * np.abs(w).max(1, keepdims=True)).all()
    np.testing.assert_allclose(scale, np.abs(w).max(1) / 127, rtol=1e-6)


def test_rows_do_not_share_a_scale():
    w = weights()
    w[2] *= 1000
    q, _ = quant.quantize_rows(w)
    np.testing.assert_array_equal(
        np.delete(q, 2, 0), np.delete(quant.quantize_rows(weights())[0], 2, 0)
    )
    assert (np.abs(q).max(axis=1) == 127).all()


def test_zero_rows_stay_zero():
    q, scale = quant.quantize_rows(np.zeros((2, 4), np.float32))
    np.testing.assert_array_equal(scale, 1)
    assert not quant.dequantize_rows(q, scale).astype(np.float32).any()


def test_the_code_is_symmetric():
    w = weights()
    q, scale = quant.quantize_rows(w)
    negative, same_scale = quant.quantize_rows(-w)
    np.testing.assert_array_equal(-q, negative)
    np.testing.assert_array_equal(scale, same_scale)
    assert q.min() >= -127
