"""The small layers that drafters and targets share: RMSNorm, rotary embedding, SwiGLU, linear."""

import math
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import kernels, quant
from dflash_jax.config import RopeConfig
from dflash_jax.kernels import Implementation
from dflash_jax.quant import QuantizedLinear

CPU_ROWS = 8
"""Most f32 rows whose product with a weight a CPU takes as a sum of products."""
SUM_TILE = 128
"""Sums of products of few rows (over a cache's slots, over fc's columns) are of a multiple of this
many: on a GPU, XLA cuts them into up to 16 parts of a multiple of 8, and pads both factors every
time where they do not come out even."""


def linear(
    x: jax.Array,
    weight: jax.Array | QuantizedLinear,
    dtype: jnp.dtype | None = None,
    *,
    first: int = 0,
    implementation: Implementation = None,
) -> jax.Array:
    """`x [..., in] @ weight[out, in].T`: weights keep the checkpoints' own orientation.

    Products accumulate in f32 on every backend; the result has `dtype`, by default x's. first: the
    row of `weight` to begin with. implementation: of a quantised weight's product, see
    `quant.project`; of any other, None takes CPU_ROWS or fewer f32 rows on a CPU by a loop of our
    own, "xla" XLA's product. A caller under `vmap`, whose rows are not all, asks for that.
    """
    if isinstance(weight, QuantizedLinear):
        return quant.project(x, weight, dtype, first=first, implementation=implementation)
    weight = weight[first:] if first else weight
    if implementation is None and _few_on_cpu(x, weight):
        return _summed_products(x, weight).astype(dtype or x.dtype)
    return _product(x, weight, dtype or x.dtype)


def _product(x: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, preferred_element_type=dtype)


def _few_on_cpu(x: jax.Array, weight: jax.Array) -> bool:
    known = all(isinstance(n, int) for n in x.shape)  # an exported program's may be symbols
    few = known and 1 < math.prod(x.shape[:-1]) <= CPU_ROWS
    return few and x.dtype == weight.dtype == jnp.float32 and kernels.on_cpu()


@jax.custom_jvp
@jax.jit
def _summed_products(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`linear` of few rows on a CPU, as one loop over the weight (a loop only where compiled).

    XLA's own product first packs all of the weight, whatever the rows: up to eight rows of SmolLM2
    took 30 % longer.
    """
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out = jnp.sum(weight[:, None] * flat[None], axis=-1)
    return out.T.reshape(*x.shape[:-1], weight.shape[0])


@_summed_products.defjvp
def _products_tangents(primals, tangents):
    """By XLA's products: the transpose of such a loop would be none, but all products at once."""
    (x, weight), (dx, d_weight) = primals, tangents
    tangent = _product(dx, weight, x.dtype) + _product(x, d_weight, x.dtype)
    return _summed_products(x, weight), tangent


def row_linear(
    x: jax.Array,
    weight: jax.Array | QuantizedLinear,
    axis: str | None = None,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """`linear` that ends a split layer: shards along mesh axis `axis`, each with its slice of the
    inputs, add up in f32. None: nothing is split.
    """
    if axis is None:
        return linear(x, weight, implementation=implementation)
    part = linear(x, weight, jnp.float32, implementation=implementation)
    return jax.lax.psum(part, axis).astype(x.dtype)


def scaled(x: jax.Array, factor: float | jax.Array) -> jax.Array:
    """`x * factor` in x's dtype, rounded once: the factor itself is not, as in the reference.

    (A Python number beside a bf16 array is rounded to bf16 first.)
    """
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


FEW_ROWS, NARROW = 32, 1024
"""Rows of all sequences, and their width, up to which products are summed in parts by what comes
next: what counts there is the number of launches. At 4096 the bytes count, and XLA's own way with
them was faster.
"""
MOST_PARTS, OUTPUTS = 8, 16384
"""A product of few rows is summed in parts where its outputs alone leave a GPU idle: `OUTPUTS` over
the number of outputs, a power of two, at most `MOST_PARTS`.
"""


def add_norm(
    x: jax.Array,
    rows: jax.Array,
    weight: jax.Array | QuantizedLinear,
    norm: jax.Array,
    eps: float,
    axis: str | None = None,
    *,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """What ends a sublayer and begins the next: `x + row_linear(rows, weight)`, and its `rms_norm`.

    implementation: the kernel takes FEW_ROWS of NARROW models; the rest is XLA's whatever is asked
    for, and so are quantised weights and shards. Raises NotImplementedError as `kernels.resolve`.
    """
    if summed_in_parts(weight, x, implementation) and axis is None:
        parts = in_parts(rows, weight)
        return kernels.kernel("add_norm").add_norm(x, parts, norm, eps)
    x = x + row_linear(rows, weight, axis, implementation=implementation)
    return x, rms_norm(x, norm, eps)


def summed_in_parts(
    weight: jax.Array | QuantizedLinear, x: jax.Array, implementation: Implementation
) -> TypeGuard[jax.Array]:
    """Whether rows `x [..., H]` are few, of a small model, on a GPU, the matrix one of floats."""
    chosen = kernels.resolve(implementation)  # first: what is asked for by name may not run here
    few = math.prod(x.shape[:-1]) <= FEW_ROWS and x.shape[-1] <= NARROW
    return chosen == "pallas" and few and not isinstance(weight, QuantizedLinear)


def in_parts(rows: jax.Array, weight: jax.Array, most: int = MOST_PARTS) -> jax.Array:
    """`linear(rows, weight)` as f32 sums over shares of the inputs, `[parts, ..., out]`."""
    outputs, inputs = weight.shape
    parts = 1  # of a multiple of 8 inputs each
    while 2 * parts <= min(most, OUTPUTS // outputs) and inputs % (16 * parts) == 0:
        parts *= 2
    a = rows.reshape(*rows.shape[:-1], parts, -1)
    b = weight.reshape(outputs, parts, -1)
    dims = (((a.ndim - 1,), (2,)), ((a.ndim - 2,), (1,)))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def along_last(vector: jax.Array | np.ndarray, ndim: int) -> jax.Array | np.ndarray:
    """`vector [n]` as `[1, ..., 1, n]`: how it meets an array of `ndim` axes, said out loud."""
    return vector.reshape((1,) * (ndim - 1) + (-1,))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) * weight` over the last axis, statistics in f32, plain weights (not 1 + w).

    weight: `[n]`, or of x's axes where it differs along others than the last.
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    scaled = (x32 * scale).astype(x.dtype)
    return scaled * (along_last(weight, x.ndim) if weight.ndim == 1 else weight)


def swiglu(
    x: jax.Array,
    gate_up: jax.Array | QuantizedLinear,
    down: jax.Array | QuantizedLinear,
    implementation: Implementation = None,
    axis: str | None = None,
) -> jax.Array:
    """`down(silu(gate x) * (up x))`; `gate_up [2F, H]` holds the gate rows, then the up rows.

    axis: see `row_linear`.
    """
    rows = gated(x, gate_up, implementation)
    return row_linear(rows, down, axis, implementation=implementation)


def gated(
    x: jax.Array, gate_up: jax.Array | QuantizedLinear, implementation: Implementation = None
) -> jax.Array:
    """`silu(gate x) * (up x)`; `gate_up [2F, H]` holds the gate rows, then the up rows.

    A GPU sums few rows in parts, which then costs no launch of its own (one row alone is faster in
    one sum). implementation: as in `add_norm`.
    """
    several = math.prod(x.shape[:-1]) > 1
    if several and summed_in_parts(gate_up, x, implementation):
        rows = in_parts(x, gate_up).sum(axis=0).astype(x.dtype)
    else:
        rows = linear(x, gate_up, implementation=implementation)
    gate, up = jnp.split(rows, 2, axis=-1)
    return jax.nn.silu(gate) * up


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies `[head_dim / 2]` (f32) and the factor on cos and sin.

    `default`, `yarn` (Peng et al. 2023, in the parametrisation of transformers) and `llama3`.
    Powers are taken in f64 and rounded to f32 once; all that follows is f32, as it was where the
    published drafters were trained: one f32 step in a frequency moves an output by 3e-4 near
    position 20000.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    periods = (rope.theta**exponents).astype(np.float32)
    if rope.rope_type == "yarn":
        return _yarn(rope, periods, head_dim)
    inv_freq = np.float32(1) / periods
    return (_llama3(rope, inv_freq) if rope.rope_type == "llama3" else inv_freq), 1.0


def _yarn(rope: RopeConfig, periods: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    factor, original = rope.factor, rope.original_max_position_embeddings
    assert factor is not None and original is not None

    def dimension(rotations: float) -> float:
        """The (fractional) pair that turns `rotations` times over the original context."""
        turns = math.log(original / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    one = np.float32(1)
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    base_share = one - np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)
    stretched = one / (np.float32(factor) * periods)
    mixed = stretched * (one - base_share) + one / periods * base_share

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.attention_factor is not None:
        return mixed, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mixed, mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mixed, mscale(1.0)


def _llama3(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    factor, original = rope.factor, rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    assert factor and original and low and high
    turns = original * inv_freq / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
    return inv_freq / np.float32(factor) * (1 - smooth) + inv_freq * smooth


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """cos and sin `[..., head_dim / 2]` (f32) at absolute `positions [...]`.

    The angle is the f32 product position * inv_freq: exact f64 angles would move a drafter's
    output by 2e-3 near position 20000, away from what it was trained with.
    """
    inv_freq, scaling = rope_frequencies(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32) * along_last(inv_freq, positions.ndim + 1)
    return jnp.cos(angles) * scaling, jnp.sin(angles) * scaling


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array, *, neox: bool = True) -> jax.Array:
    """Rotate heads `x [..., rows, heads, D]` by `cos, sin [..., rows, D / 2]`, in f32.

    `neox` pairs dimension i with i + D/2 (half-split, every drafter here); otherwise
    neighbours 2i and 2i + 1 form the pairs (interleaved).
    """
    cos, sin = cos[..., None, :], sin[..., None, :]
    x32 = x.astype(jnp.float32)
    if neox:
        a, b = jnp.split(x32, 2, axis=-1)
        out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = x32[..., 0::2], x32[..., 1::2]
        out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    return out.astype(x.dtype)
