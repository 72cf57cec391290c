"""Stored formats of weights. Today: int8 rows, the format of the drafters we ship.

A matrix `[out, in]` is stored as int8 `q` of the same shape beside an f32 `[out]` tensor named
`<name>.scale`; its value is `bf16(q * scale)`, the same bits on every load and every machine.
"""

import ml_dtypes
import numpy as np

SCALE = ".scale"
"""Suffix of the tensor that holds a quantised matrix's row scales."""


def quantize_rows(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int8 by row: `weight [out, in]` -> (int8 `[out, in]`, f32 scale `[out]`)."""
    w = np.asarray(weight, np.float32)
    scale = np.abs(w).max(axis=1) / 127.0
    scale = np.where(scale > 0, scale, 1.0).astype(np.float32)
    return np.clip(np.rint(w / scale[:, None]), -127, 127).astype(np.int8), scale


def dequantize_rows(quantized: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The inverse of `quantize_rows`, rounded to bf16: `[out, in]`."""
    values = quantized.astype(np.float32) * scale.astype(np.float32)[:, None]
    return values.astype(ml_dtypes.bfloat16)
