"""What ends a sublayer and begins the next: parts of a product summed, residual added, RMSNorm.

One program a row. XLA takes two launches where both the sum and its norm are wanted, because a
fusion that reduces over a row gives back only one of them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def add_norm(
    x: jax.Array,
    parts: jax.Array,
    norm: jax.Array,
    eps: float,
    *,
    warps: int = 8,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`x [..., H]` plus the (rounded) sum of f32 `parts [S, ..., H]`, and the RMSNorm of that."""
    flat, hidden = x.reshape(-1, x.shape[-1]), x.shape[-1]
    rows = flat.shape[0]
    summed, normed = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        out_shape=[jax.ShapeDtypeStruct(flat.shape, x.dtype)] * 2,
        grid=(rows,),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(flat, parts.reshape(parts.shape[0], rows, hidden), norm)
    return summed.reshape(x.shape), normed.reshape(x.shape)


def _kernel(x, parts, norm, summed, normed, *, eps: float):
    row, hidden = pl.program_id(0), x.shape[1]
    columns = jnp.arange(pl.next_power_of_2(hidden))
    live = columns < hidden
    total = jnp.zeros(columns.shape, jnp.float32)
    for part in range(parts.shape[0]):
        total += plgpu.load(parts.at[part, row, columns], mask=live, other=0.0)
    whole = plgpu.load(x.at[row, columns], mask=live, other=0.0) + total.astype(x.dtype)
    plgpu.store(summed.at[row, columns], whole, mask=live)
    wide = whole.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.sum(wide * wide) * (1 / hidden) + eps)
    weight = plgpu.load(norm.at[columns], mask=live, other=0.0)
    plgpu.store(normed.at[row, columns], (wide * scale).astype(x.dtype) * weight, mask=live)
