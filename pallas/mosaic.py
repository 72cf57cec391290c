"""What kernels of Mosaic GPU have in common: layouts, loads and stores, products, a fence.

jax 0.10 has not all of the interface; `dflash_jax.kernels` says where such kernels run.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

plgpu: Any = mosaic_gpu  # another interface in every version of jax

DOWN = plgpu.Layout.WGMMA.reduce(1)
"""Of one number a row of a product; `ACROSS`: one a column."""
ACROSS = plgpu.Layout.WGMMA.reduce(0)


def interpreted(**options: Any) -> Any:
    """How a kernel is interpreted: `options` of `plgpu.InterpretGPUParams`."""
    # Of the inlined parts there is only a fence.
    return plgpu.InterpretGPUParams(inline_mgpu="ignore", **options)


def load(ref, layout):
    """Also where no load was made for the layout."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref, x):
    """Without minding bank conflicts, which a few rows' copies may have."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def spread(x, shape, axis: int):
    """A number a row (`axis` 0) or column (1), over the whole matrix."""
    return jax.lax.broadcast_in_dim(x, shape, (axis,))


def full(shape, value: float, layout):
    """f32 `shape` of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def product(a, b, shape):
    """a times b in f32 `shape`, awaited."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def fence():
    """What a thread wrote before is there for whoever it meets at a barrier of the cluster."""

    def written(_):
        none = ir.Type.parse("!llvm.void")
        llvm.inline_asm(none, [], "fence.acq_rel.gpu;", "", has_side_effects=True)

    inlined: Any = plgpu.inline_mgpu()(written)
    inlined()
