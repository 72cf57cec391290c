"""Quantised weights: their formats, on disk and in memory, and the product with rows.

A projection `[out, in]` is held as integers and scales, and never as floats:

| format | value | integers | scales |
|---|---|---|---|
| `int8` | `q * s[row]` | int8 `[out, in]` | f32 `[out]` |
| `q8_0` | `q * s[row, block]`, blocks of 32 inputs | int8 `[out, in]` | f16 `[out, in / 32]` |
| `q4_0` | the same, q in -8..7 | uint8, two q a byte (`pack_nibbles`) | f16, the same |

`q8_0` and `q4_0` hold the numbers of the GGUF formats of those names, bit for bit. What a drafter
quantises is its projections: qkv, o, gate/up, down, fc and a head of its own; norms, convolutions,
codebooks, Markov tables and the confidence head stay as they are. Never the target.
"""

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct

from dflash_jax import kernels
from dflash_jax.integers import cdiv, round_up
from dflash_jax.kernels import Implementation

Precision = Literal["int8", "q8_0", "q4_0"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
FLOAT = "float"
"""Asks for plain floats where a checkpoint is quantised."""
SCALE = ".scale"
"""Suffix of the tensor that holds a quantised matrix's scales."""
BLOCK = 32
MOST_ROWS = 64
"""Rows that the kernel takes: all of them are in one tile."""


class QuantizedLinear(struct.PyTreeNode):
    """A matrix `[out, in]` as integers `values` and `scales`, in the shapes of the module's table.

    `values` of q4_0 are `[out, 32 * ceil(in / 64)]`.
    """

    values: Any
    scales: Any
    precision: Precision = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.values.shape
        return rows, columns if self.precision != "q4_0" else BLOCK * self.scales.shape[-1]


class Stored(NamedTuple):
    """Shapes and dtypes of a quantised matrix's two arrays."""

    values: jax.ShapeDtypeStruct
    scales: jax.ShapeDtypeStruct


def stored(shape: tuple[int, int], precision: Precision) -> Stored:
    """What a matrix of `shape` is held as. ValueError for inputs that are no whole blocks."""
    rows, columns = shape
    if precision == "int8":
        return Stored(
            jax.ShapeDtypeStruct(shape, jnp.int8), jax.ShapeDtypeStruct((rows,), jnp.float32)
        )
    if columns % BLOCK:
        raise ValueError(
            f"precision {precision!r}: expected rows in blocks of {BLOCK}, found {columns} inputs"
        )
    scales = jax.ShapeDtypeStruct((rows, columns // BLOCK), jnp.float16)
    if precision == "q8_0":
        return Stored(jax.ShapeDtypeStruct(shape, jnp.int8), scales)
    packed = (rows, round_up(columns, 2 * BLOCK) // 2)
    return Stored(jax.ShapeDtypeStruct(packed, jnp.uint8), scales)


def abstract(rows: int, columns: int, precision: Precision) -> QuantizedLinear:
    """The shapes and dtypes of a quantised `[rows, columns]` matrix."""
    return QuantizedLinear(*stored((rows, columns), precision), precision=precision)


def resolve_precision(precision: str | None) -> str | None:
    """`precision` if there is such a one; ValueError else."""
    if precision not in (None, FLOAT, *PRECISIONS):
        expected = ", ".join([*PRECISIONS, FLOAT])
        raise ValueError(f"precision: expected one of {expected}, found {precision!r}")
    return precision


# --- floats to integers and back, on the host ----------------------------------------------------


def quantize(weight: np.ndarray, precision: Precision) -> QuantizedLinear:
    """`weight [out, in]` in a format, as numpy arrays; ValueError where a scale is too large."""
    weight = np.asarray(weight, np.float32)
    stored(weight.shape, precision)
    if precision == "int8":
        return QuantizedLinear(*quantize_rows(weight), precision)
    blocks = weight.reshape(len(weight), -1, BLOCK)
    make = _quantize_q8_0 if precision == "q8_0" else _quantize_q4_0
    codes, scales = make(blocks)
    with np.errstate(over="ignore"):
        scales = scales.astype(np.float16)
    if not np.isfinite(scales).all():
        raise ValueError(f"precision {precision!r}: expected weights that an f16 scale holds")
    codes = codes.reshape(weight.shape)
    return QuantizedLinear(pack_nibbles(codes) if precision == "q4_0" else codes, scales, precision)


def _inverse(scales: np.ndarray) -> np.ndarray:
    """1 / scale, 0 where that is no f32 (an f16 scale is 0 long before)."""
    ordinary = np.abs(scales) >= np.finfo(np.float32).tiny
    return np.divide(1, scales, out=np.zeros_like(scales), where=ordinary)[..., None]


def _quantize_q8_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest magnitude of a block becomes 127; halves round away from zero."""
    scales = np.abs(blocks).max(axis=-1) / np.float32(127)
    x = blocks * _inverse(scales)
    whole = np.floor(np.abs(x))
    away = whole + (np.abs(x) - whole >= 0.5)
    return (np.sign(x) * away).astype(np.int8), scales


def _quantize_q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first number of the largest magnitude, whatever its sign, becomes code 0, that is -8."""
    largest = np.abs(blocks).argmax(axis=-1)[..., None]
    scales = np.take_along_axis(blocks, largest, axis=-1)[..., 0] / np.float32(-8)
    codes = np.trunc(blocks * _inverse(scales) + np.float32(8.5))
    return np.minimum(codes, 15).astype(np.uint8), scales


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """GGUF's q4_0 codes 0..15 `[out, in]` (8 is zero), two a byte: block 2i low, block 2i + 1 high.

    Each half byte is code - 8 in two's complement, so that `byte << 4` and `byte & 0xf0` are, as
    int8, 16 times the two weights; and 32 neighbouring bytes hold 32 neighbouring inputs of one
    scale. (In a GGUF file a block keeps to itself.) The partner of an odd last block is zeros.
    """
    rows, columns = codes.shape
    padded = np.zeros((rows, cdiv(columns, 2 * BLOCK), 2, BLOCK), np.uint8)
    padded.reshape(rows, -1)[:, :columns] = codes ^ 8
    return (padded[:, :, 0] | padded[:, :, 1] << 4).reshape(rows, -1)


def unpack_nibbles(weight: QuantizedLinear) -> np.ndarray:
    """The inverse of `pack_nibbles`: GGUF's codes 0..15, uint8 `[out, in]`."""
    return (integers(weight) + np.int8(8)).astype(np.uint8)


def to_blocks(weight: QuantizedLinear) -> np.ndarray:
    """The bytes of a q8_0 or q4_0 matrix in a GGUF file: uint8 `[out, bytes of a row]`.

    A block is its f16 scale and 32 int8, or 16 bytes whose low halves are the first 16 codes.
    """
    rows, blocks = weight.scales.shape
    if weight.precision == "q8_0":
        codes = weight.values.view(np.uint8).reshape(rows, blocks, BLOCK)
    else:
        halves = unpack_nibbles(weight).reshape(rows, blocks, 2, BLOCK // 2)
        codes = halves[:, :, 0] | halves[:, :, 1] << 4
    scales = np.ascontiguousarray(weight.scales).view(np.uint8).reshape(rows, blocks, 2)
    return np.concatenate([scales, codes], axis=-1).reshape(rows, -1)


def from_blocks(stored: np.ndarray, precision: Precision) -> QuantizedLinear:
    """The inverse of `to_blocks`."""
    size = 2 + (BLOCK if precision == "q8_0" else BLOCK // 2)
    blocks = stored.reshape(len(stored), -1, size)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    codes = np.ascontiguousarray(blocks[..., 2:])
    if precision == "q8_0":
        return QuantizedLinear(codes.view(np.int8).reshape(len(stored), -1), scales, precision)
    codes = np.concatenate([codes & 15, codes >> 4], axis=-1).reshape(len(stored), -1)
    return QuantizedLinear(pack_nibbles(codes), scales, precision)


def integers(weight: QuantizedLinear) -> Any:
    """The factors of the scales, int8 `[out, in]`: numpy from numpy, traced from traced."""
    if weight.precision != "q4_0":
        return weight.values
    xp = np if isinstance(weight.values, np.ndarray) else jnp
    rows, columns = weight.shape
    pairs = weight.values.reshape(rows, -1, BLOCK)
    halves = xp.stack([pairs << np.uint8(4), pairs], axis=2).reshape(rows, -1)[:, :columns]
    return halves.astype(np.int8) >> np.int8(4)


def dequantize(weight: QuantizedLinear) -> Any:
    """The matrix in f32, `[out, in]`: numpy from numpy, traced from traced."""
    values, scales = integers(weight).astype(np.float32), weight.scales.astype(np.float32)
    if weight.precision == "int8":
        return values * scales[:, None]
    blocks = values.reshape(*scales.shape, BLOCK) * scales[..., None]
    return blocks.reshape(values.shape)


def check(weight: QuantizedLinear, name: str) -> QuantizedLinear:
    """`weight` as read from `name` if it can be one; a one-line ValueError else.

    A scale is finite and, but in q4_0 whose scales have signs, not negative.
    """
    shape = stored(weight.shape, weight.precision)
    for part, found, expected in (
        ("", weight.values, shape.values),
        (SCALE, weight.scales, shape.scales),
    ):
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise ValueError(
                f"{name}{part}: expected {list(expected.shape)} of {expected.dtype} "
                f"({weight.precision}), found {list(found.shape)} of {found.dtype}"
            )
    if not np.isfinite(weight.scales).all():
        raise ValueError(f"{name}{SCALE}: expected finite numbers, found others")
    if weight.precision != "q4_0" and (weight.scales < 0).any():
        raise ValueError(f"{name}{SCALE}: expected no negative number, found {weight.scales.min()}")
    return weight


def quantize_rows(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int8 by row: `weight [out, in]` -> (int8 `[out, in]`, f32 scale `[out]`)."""
    w = np.asarray(weight, np.float32)
    scale = np.abs(w).max(axis=1) / 127.0
    scale = np.where(scale > 0, scale, 1.0).astype(np.float32)
    return np.clip(np.rint(w / scale[:, None]), -127, 127).astype(np.int8), scale


def dequantize_rows(quantized: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The inverse of `quantize_rows`, rounded to bf16: `[out, in]`, the same bits on every load."""
    values = quantized.astype(np.float32) * scale.astype(np.float32)[:, None]
    return values.astype(ml_dtypes.bfloat16)


# --- the product ---------------------------------------------------------------------------------


def project(
    x: jax.Array,
    weight: QuantizedLinear,
    dtype: jnp.dtype | None = None,
    *,
    first: int = 0,
    implementation: Implementation = None,
) -> jax.Array:
    """`x [..., in] @ weight[first:].T`, summed in f32, in `dtype` (default x's): `[..., out]`.

    int8 multiplies the sums by the scales. The reference makes block formats x's dtype first; the
    kernel multiplies the sum of each block, so in bf16 it rounds less.

    implementation: the kernel takes up to 64 rows; more (a prompt chunk) always run in the
    reference, whatever is asked for. Raises NotImplementedError as `kernels.resolve` does.
    """
    dtype = dtype or x.dtype
    few = math.prod(x.shape[:-1]) <= MOST_ROWS
    if kernels.resolve(implementation, _refusal(x)) == "pallas" and few:
        return kernels.kernel("matmul").project(x, weight, dtype, first=first)
    if first:
        weight = weight.replace(values=weight.values[first:], scales=weight.scales[first:])
    # Tied to x, the weights cannot be made floats once and for all, ahead of the loop over rounds.
    values, x = jax.lax.optimization_barrier((weight.values, x))
    weight = weight.replace(values=values)
    matrix = integers(weight) if weight.precision == "int8" else dequantize(weight)
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    sums = jax.lax.dot_general(
        x, matrix.astype(x.dtype), contract, preferred_element_type=jnp.float32
    )
    if weight.precision == "int8":
        sums = sums * weight.scales.reshape(*(1,) * (sums.ndim - 1), -1)
    return sums.astype(dtype)


def _refusal(x: jax.Array) -> str | None:
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"rows: expected float32 or bfloat16, found {x.dtype}"
    return None
