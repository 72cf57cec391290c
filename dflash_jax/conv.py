"""DFlash2's grouped dynamic causal convolution over the rows of one block.

A depthwise convolution, causal inside the block and stateless between rounds, wraps each sublayer:
`d2_conv_prepare` convolves the sublayer's input, `d2_conv_finish` its output. Both halves'
position-dependent coefficients come from one projection of the pre-convolution input.
Source: z-lab/dflash `GroupedDynamicCausalConv`.
"""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax import kernels
from dflash_jax.kernels import Implementation
from dflash_jax.layers import linear, rms_norm

MOST_ROWS = 64
"""Rows of a block that the kernel takes: all of them are in one tile."""


class DFlash2Conv(struct.PyTreeNode):
    """base_kernel `[2, k, H]` (half, tap, channel); kernel_projection `[2 * k * groups, H]`.

    Tap 0 is this row, tap o the row o before; half 0 prepares, half 1 finishes. A group of
    H / groups neighbouring channels shares its dynamic coefficients.
    """

    base_kernel: jax.Array
    kernel_projection: jax.Array


def d2_conv_prepare(
    conv: DFlash2Conv,
    x: jax.Array,
    *,
    norm: jax.Array | None = None,
    eps: float = 0.0,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Convolve sublayer input rows `x [..., b, H]` with half 0.

    norm `[H]`, eps: where x still lacks the RMSNorm before the sublayer, its weight and epsilon.
    implementation: XLA unless the kernel is asked for, which was measured slower (see
    `dflash_jax.pallas.conv`).

    Returns the convolved rows in x's dtype and the coefficients `[..., b, 2, k, groups]` (f32) that
    `d2_conv_finish` needs. Raises NotImplementedError as `kernels.resolve` does.
    """
    if kernels.resolve(implementation, _refusal(x), best="xla") == "pallas":
        weights = (conv.base_kernel, conv.kernel_projection)
        return kernels.kernel("conv").prepare(*weights, x, norm, eps)
    if norm is not None:
        x = rms_norm(x, norm, eps)
    _, taps, _ = conv.base_kernel.shape
    dyn = linear(x, conv.kernel_projection, dtype=jnp.float32)
    dyn = dyn.reshape(*x.shape[:-1], 2, taps, -1)
    return _convolve(conv, x, dyn, half=0), dyn


def d2_conv_finish(
    conv: DFlash2Conv,
    y: jax.Array,
    dyn: jax.Array,
    *,
    residual: jax.Array | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Convolve sublayer output rows `y [..., b, H]` with half 1 of the matching prepare's `dyn`.

    residual `[..., b, H]`: added to the result. implementation: as in `d2_conv_prepare`.

    Returns rows like y. Raises NotImplementedError as `kernels.resolve` does.
    """
    if kernels.resolve(implementation, _refusal(y), best="xla") == "pallas":
        return kernels.kernel("conv").finish(conv.base_kernel, y, dyn, residual)
    out = _convolve(conv, y, dyn, half=1)
    return out if residual is None else residual + out


def _refusal(x: jax.Array) -> str | None:
    if x.shape[-2] > MOST_ROWS:
        return f"block: expected at most {MOST_ROWS} rows, found {x.shape[-2]}"
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"rows: expected float32 or bfloat16, found {x.dtype}"
    return None


def _convolve(conv: DFlash2Conv, x: jax.Array, dyn: jax.Array, half: int) -> jax.Array:
    """out[t] = sum_o (base[half, o] + dyn[t, half, o] per group) * x[t - o], zeros before row 0."""
    _, taps, hidden = conv.base_kernel.shape
    rows, groups = x.shape[-2], dyn.shape[-1]
    base = conv.base_kernel[half].astype(jnp.float32)
    fixed = (*(1,) * (x.ndim - 1), groups, hidden // groups)
    x32 = x.astype(jnp.float32)
    out = jnp.zeros_like(x32)
    for tap in range(taps):
        before = [(0, 0)] * (x.ndim - 2) + [(tap, 0), (0, 0)]
        shifted = jnp.pad(x32, before)[..., :rows, :]
        by_group = shifted.reshape(*x.shape[:-1], groups, hidden // groups)
        kernel = base[tap].reshape(fixed) + dyn[..., half, tap, :, None]
        out = out + (kernel * by_group).reshape(x.shape)
    return out.astype(x.dtype)
