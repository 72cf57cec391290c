"""DFlash2's grouped dynamic causal convolution, in one launch a half.

`prepare` fuses the norm before it, the projection and the half-0 convolution. Each program owns a
few groups of channels of one half: it streams its own rows of the projection once, and the block's
rows beside them (128 KB at hidden 4096, from the L2 cache); half-0 programs then convolve the
channels whose coefficients they hold. The norm's weight goes onto the rows before the product, its
scale, one number a row, onto the result, so that one pass over the rows gives both the statistics
and the product. Apart from XLA's norm, GEMM (in two launches where it splits the sum) and
convolution, nothing but the coefficients passes through memory.

`finish` convolves and adds the residual: the same one pass over memory as XLA's own fusion of it.

Measured on an H200 (jax 0.11.2, bf16, 16 rows, hidden 4096, groups of 64, 5 taps, ten layers in one
program): norm, prepare and finish take 11.3 us in XLA, 26.8 us here with the best tiling (128
columns, 2 warps). XLA's split GEMM fills the card where one program a group does not, so the
reference is what runs unless these are asked for by name.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

MMA = 16
"""Least side of a matrix product's tile."""


@dataclasses.dataclass(frozen=True)
class ConvTiling:
    """columns: hidden columns a step of `prepare` reads; programs: about how many programs share
    its groups; channels: of one program of `finish`.
    """

    columns: int = 128
    programs: int = 128
    channels: int = 64
    warps: int = 2
    stages: int = 4


DEFAULT = ConvTiling()


def prepare(
    base_kernel: jax.Array,
    kernel_projection: jax.Array,
    x: jax.Array,
    norm: jax.Array | None,
    eps: float,
    *,
    tiling: ConvTiling = DEFAULT,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`conv.d2_conv_prepare` on rows `[..., b, H]`: the convolved rows and the coefficients
    `[..., b, 2, k, groups]` in f32.
    """
    _, taps, hidden = base_kernel.shape
    groups = kernel_projection.shape[0] // (2 * taps)
    *lead, rows, _ = x.shape
    flat = x.reshape(-1, rows, hidden)
    share = pl.next_power_of_2(pl.cdiv(2 * groups, tiling.programs))
    coefficients = jax.ShapeDtypeStruct((flat.shape[0], rows, 2 * taps * groups), jnp.float32)
    operands = (base_kernel, kernel_projection, flat, *(() if norm is None else (norm,)))
    out, dyn = pl.pallas_call(
        functools.partial(
            _prepare_kernel, groups=groups, share=share, eps=eps, columns=tiling.columns
        ),
        out_shape=(jax.ShapeDtypeStruct(flat.shape, x.dtype), coefficients),
        grid=(pl.cdiv(groups, share), 2, flat.shape[0]),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name="conv_prepare",
    )(*operands)
    return out.reshape(x.shape), dyn.reshape(*lead, rows, 2, taps, groups)


def finish(
    base_kernel: jax.Array,
    y: jax.Array,
    dyn: jax.Array,
    residual: jax.Array | None,
    *,
    tiling: ConvTiling = DEFAULT,
    interpret: bool = False,
) -> jax.Array:
    """`conv.d2_conv_finish` on rows `[..., b, H]`, the residual added."""
    rows, hidden = y.shape[-2:]
    flat = y.reshape(-1, rows, hidden)
    coefficients = dyn.reshape(flat.shape[0], rows, -1)
    extra = () if residual is None else (residual.reshape(flat.shape),)
    out = pl.pallas_call(
        functools.partial(_finish_kernel, groups=dyn.shape[-1], width=tiling.channels),
        out_shape=jax.ShapeDtypeStruct(flat.shape, y.dtype),
        grid=(pl.cdiv(hidden, tiling.channels), flat.shape[0]),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=1),
        interpret=interpret,
        name="conv_finish",
    )(base_kernel, flat, coefficients, *extra)
    return out.reshape(y.shape)


def _prepare_kernel(base, projection, x, *rest, groups: int, share: int, eps: float, columns: int):
    weight, (out, dyn) = rest[:-2], rest[-2:]
    part, half, block = (pl.program_id(axis) for axis in range(3))
    (_, taps, hidden), rows = base.shape, x.shape[1]
    t = jnp.arange(max(pl.next_power_of_2(rows), MMA))
    # The projection's rows that are this program's: of `half`, every tap of `share` groups.
    n = jnp.arange(max(pl.next_power_of_2(taps) * share, MMA))
    tap, group = n // share, part * share + n % share
    owned = (tap < taps) & (group < groups)
    mine = jnp.where(owned, (half * taps + tap) * groups + group, 2 * taps * groups)

    def step(i, carry):
        total, squares = carry
        c = i * columns + jnp.arange(columns)
        live = (t < rows)[:, None] & (c < hidden)[None, :]
        a = plgpu.load(x.at[block, t[:, None], c[None, :]], mask=live, other=0)
        live = owned[:, None] & (c < hidden)[None, :]
        p = plgpu.load(projection.at[mine[:, None], c[None, :]], mask=live, other=0)
        if weight:
            a32 = a.astype(jnp.float32)
            squares += a32 * a32
            w = plgpu.load(weight[0].at[c], mask=c < hidden, other=0).astype(jnp.float32)
            a = (a32 * w[None, :]).astype(a.dtype)
        return total + _rows_by_rows(a, p), squares

    nothing = tuple(jnp.zeros((t.size, wide), jnp.float32) for wide in (n.size, columns))
    total, squares = jax.lax.fori_loop(0, pl.cdiv(hidden, columns), step, nothing)
    scale = jax.lax.rsqrt(jnp.sum(squares, axis=1) / hidden + eps)
    if weight:
        total = total * scale[:, None]
    live = (t < rows)[:, None] & owned[None, :]
    plgpu.store(dyn.at[block, t[:, None], mine[None, :]], total, mask=live)

    @pl.when(half == 0)
    def _():
        by_tap = total.reshape(t.size, n.size // share, share)
        places = jnp.arange(n.size // share)[None, :, None]
        held = [jnp.sum(jnp.where(places == o, by_tap, 0.0), axis=1) for o in range(taps)]
        size = hidden // groups
        width = min(pl.next_power_of_2(size), 128)
        own = part * share + jnp.arange(share)
        before = [jnp.maximum(t - o, 0) for o in range(taps)]
        pick = [jnp.where(t[None, :] == s[:, None], scale[None, :], 0.0) for s in before]
        scales = [jnp.sum(p, axis=1)[:, None, None] for p in pick]

        def convolve(i, _):
            place = i * width + jnp.arange(width)
            c = own[:, None] * size + place[None, :]
            inside = (own < groups)[:, None] & (place < size)[None, :]
            if size % width or groups % share:  # a group's tail is the next one's head
                c = jnp.where(inside, c, hidden)
            w = None
            if weight:
                w = plgpu.load(weight[0].at[c], mask=inside, other=0).astype(jnp.float32)
            result = jnp.zeros((t.size, share, width), jnp.float32)
            for o in range(taps):
                live = ((t >= o) & (t < rows))[:, None, None] & inside[None]
                h = plgpu.load(x.at[block, before[o][:, None, None], c[None]], mask=live, other=0)
                h = h.astype(jnp.float32)
                if w is not None:
                    h = (h * scales[o]).astype(x.dtype).astype(jnp.float32)
                    h = (h * w[None]).astype(x.dtype).astype(jnp.float32)
                fixed = plgpu.load(base.at[0, o, c], mask=inside, other=0).astype(jnp.float32)
                result = result + (fixed[None] + held[o][:, :, None]) * h
            live = (t < rows)[:, None, None] & inside[None]
            plgpu.store(out.at[block, t[:, None, None], c[None]], result.astype(x.dtype), mask=live)
            return 0

        jax.lax.fori_loop(0, pl.cdiv(size, width), convolve, 0)


def _rows_by_rows(a, b):
    """`a [m, n] @ b[k, n].T`, summed in f32, f32 factors kept whole."""
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _finish_kernel(base, y, dyn, *rest, groups: int, width: int):
    residual, out = rest[:-1], rest[-1]
    part, block = pl.program_id(0), pl.program_id(1)
    (_, taps, hidden), rows = base.shape, y.shape[1]
    t = jnp.arange(pl.next_power_of_2(rows))
    c = part * width + jnp.arange(width)
    group = c // (hidden // groups)
    live = (t < rows)[:, None] & (c < hidden)[None, :]
    result = jnp.zeros(live.shape, jnp.float32)
    for o in range(taps):
        there = live & (t >= o)[:, None]
        before = jnp.maximum(t - o, 0)
        rows_before = plgpu.load(y.at[block, before[:, None], c[None, :]], mask=there, other=0)
        own = plgpu.load(
            dyn.at[block, t[:, None], ((taps + o) * groups + group)[None, :]], mask=live, other=0
        )
        fixed = plgpu.load(base.at[1, o, c], mask=c < hidden, other=0).astype(jnp.float32)
        result = result + (fixed[None, :] + own) * rows_before.astype(jnp.float32)
    result = result.astype(y.dtype)
    place = out.at[block, t[:, None], c[None, :]]
    if residual:
        at = residual[0].at[block, t[:, None], c[None, :]]
        added = plgpu.load(at, mask=live, other=0).astype(jnp.float32)
        result = (added + result.astype(jnp.float32)).astype(y.dtype)
    plgpu.store(place, result, mask=live)
