"""A few rows times a quantised matrix, streamed at its own bytes.

One program owns `columns` outputs, or a share of their sums, and walks the inputs `depth` at a
time: integers come from memory as they are stored, become the rows' dtype in registers (exactly,
for bf16 holds every integer up to 256) and enter the tensor cores; scales multiply f32 sums. An
int8 row's scale multiplies its whole sum, a block's scale the sum of its 32 products, which takes
16 multiplications for 32 weights where scaling the weights would take 32, and rounds nothing.

A matrix of few outputs would leave multiprocessors idle: its sums are split among several programs,
whose f32 parts the caller adds up (elementwise, so that XLA folds it into what comes next).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dflash_jax.quant import BLOCK, QuantizedLinear

MMA = 16
"""Least side of a matrix product's tile."""


@dataclasses.dataclass(frozen=True)
class MatmulTiling:
    """columns: outputs of a program; depth: inputs of a step, of block formats a multiple of 64.
    Both powers of two. programs: at most this many share the work where sums are split. A step of
    the rows and the weights lies `stages` times in shared memory: by default 60 KB at 16 rows.
    """

    columns: int = 64
    depth: int = 128
    programs: int = 384
    warps: int = 4
    stages: int = 5


DEFAULT = MatmulTiling()


def project(
    x: jax.Array,
    weight: QuantizedLinear,
    dtype: jnp.dtype,
    *,
    first: int = 0,
    tiling: MatmulTiling = DEFAULT,
    interpret: bool = False,
) -> jax.Array:
    """`quant.project`: rows `x [..., in]` of f32 or bf16 -> `[..., out - first]` in `dtype`."""
    *lead, inputs = x.shape
    flat = x.reshape(math.prod(lead), inputs)
    outputs = weight.shape[0] - first
    columns = pl.cdiv(outputs, tiling.columns)
    steps = pl.cdiv(inputs, tiling.depth)
    # Of a share's steps the first few only fill the pipeline.
    shares = max(1, min(tiling.programs // columns, steps // 4))
    share = pl.cdiv(steps, 1 << (shares.bit_length() - 1))
    shares = pl.cdiv(steps, share)
    whole = shares * share * tiling.depth == inputs
    kernel = _rows_kernel if weight.precision == "int8" else _blocks_kernel
    out = pl.pallas_call(
        functools.partial(kernel, first=first, steps=share, whole=whole, tiling=tiling),
        out_shape=jax.ShapeDtypeStruct(
            (shares, flat.shape[0], outputs), dtype if shares == 1 else jnp.float32
        ),
        grid=(columns, shares),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name=f"project_{weight.precision}",
    )(flat, weight.values, weight.scales)
    total = out[0]
    for part in range(1, shares):
        total = total + out[part]
    return total.astype(dtype).reshape(*lead, outputs)


def _rows_kernel(x, values, scales, out, *, first, steps, whole, tiling: MatmulTiling):
    """int8: one scale an output."""
    t, n, rows, live, start = _place(x, out, steps, tiling)

    def step(i, total):
        k = start + i * tiling.depth + jnp.arange(tiling.depth)[None, :]
        inside = None if whole else k < x.shape[1]
        a = _load(x, (t, k), rows, inside)
        w = _load(values, (first + n, k), live, inside)
        return total + _rows_by_rows(a, w.astype(a.dtype))

    total = jnp.zeros((t.size, n.size), jnp.float32)
    total = jax.lax.fori_loop(0, steps, step, total)
    scale = _load(scales, (first + n,), live)
    _store(out, total * scale.reshape(1, -1), t, n)


def _blocks_kernel(x, values, scales, out, *, first, steps, whole, tiling: MatmulTiling):
    """q8_0 and q4_0: one scale for 32 inputs of an output. Blocks come in pairs, as q4_0's do."""
    t, n, rows, live, start = _place(x, out, steps, tiling)
    lanes, blocks = jnp.arange(BLOCK)[None, :], scales.shape[1]

    def load(byte, inside):
        """The 32 bytes of every output that begin at `byte`."""
        return _load(values, (first + n, byte + lanes), live, inside)

    def add(total, block, w, inside):
        """The products of one block's integers `[n, 32]` with the rows, times its scales."""
        a = _load(x, (t, block * BLOCK + lanes), rows, inside)
        scale = _load(scales, (first + n, block), live, inside).astype(jnp.float32)
        return total + _rows_by_rows(a, w.astype(a.dtype)) * scale.reshape(1, -1)

    def step(i, total):
        for pair in range(tiling.depth // (2 * BLOCK)):
            block = (start + i * tiling.depth) // BLOCK + 2 * pair
            there = [
                None if whole else jnp.reshape(block + half < blocks, (1, 1)) for half in (0, 1)
            ]
            if values.dtype == jnp.uint8:
                # 16 times the integers, see `quant.pack_nibbles`.
                both = load(block // 2 * BLOCK, there[0])
                halves = [half.astype(jnp.int8) for half in (both << 4, both & 0xF0)]
            else:
                halves = [load((block + half) * BLOCK, there[half]) for half in (0, 1)]
            for half in (0, 1):
                total = add(total, block + half, halves[half], there[half])
        return total

    total = jnp.zeros((t.size, n.size), jnp.float32)
    total = jax.lax.fori_loop(0, steps, step, total)
    _store(out, total / 16 if values.dtype == jnp.uint8 else total, t, n)


def _place(x, out, steps: int, tiling: MatmulTiling):
    """Rows and outputs (as columns), which of them exist (None: all), and the first input."""
    t = jnp.arange(max(pl.next_power_of_2(x.shape[0]), MMA))[:, None]
    n = pl.program_id(0) * tiling.columns + jnp.arange(tiling.columns)[:, None]
    rows = t < x.shape[0] if t.size > x.shape[0] else None
    live = n < out.shape[2] if out.shape[2] % tiling.columns else None
    return t, n, rows, live, pl.program_id(1) * steps * tiling.depth


def _load(ref, index, *masks):
    """`ref` at indices that broadcast, zeros where a mask (None: everything) says so."""
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    mask = None
    for part in masks:
        if part is not None:
            part = jnp.broadcast_to(part, shape)
            mask = part if mask is None else mask & part
    if mask is None:
        return plgpu.load(ref.at[index])
    return plgpu.load(ref.at[index], mask=mask, other=0)


def _store(out, total, t, n):
    n = n.reshape(1, -1)
    place = out.at[pl.program_id(1), t, n]
    plgpu.store(place, total.astype(out.dtype), mask=(t < out.shape[1]) & (n < out.shape[2]))


def _rows_by_rows(a, b):
    """`a [m, k] @ b[n, k].T`, summed in f32, f32 factors kept whole."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
