"""The convolution kernels against the reference: interpreted here, compiled on a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import ampere, launches, lowered
from families import arrays, assert_close, stage_draft

from dflash_jax import kernels
from dflash_jax.conv import DFlash2Conv, d2_conv_finish, d2_conv_prepare

kernel = kernels.kernel("conv")
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
F32, BF16 = jnp.float32, jnp.bfloat16
TOLERANCE = {F32: 1e-5, BF16: 1e-2}
EPS = 1e-6
SMALL = kernel.ConvTiling(columns=16, programs=4, channels=16, stages=1)
"""Cuts even small blocks into several steps and programs."""
SHAPES = [
    ((2, 8), 64, 8, 2),
    ((5,), 36, 12, 3),
    ((2, 3, 4), 40, 1, 4),
    ((1,), 24, 24, 1),
    ((17,), 60, 4, 5),
    ((3,), 320, 160, 9),
]
"""(leading dimensions and rows, hidden, group size, taps)."""
PRESETS = {
    "smollm2": (8, 576, 64, 2),
    "qwen3-8b": (16, 4096, 64, 5),
    "qwen3-8b, narrow groups": (16, 4096, 8, 2),
    "muse-glimmer": (16, 6656, 32, 4),
}
"""(rows, hidden, group size, taps)."""


def problem(shape, dtype, seed=0):
    """(conv, x, y, norm weight); x is far from normed."""
    lead, hidden, size, taps = shape
    rng = np.random.default_rng(seed)

    def array(*shape, scale=1.0):
        return jnp.asarray(scale * rng.normal(size=shape), dtype)

    base = array(2, taps, hidden)
    conv = DFlash2Conv(base, array(2 * taps * hidden // size, hidden, scale=hidden**-0.5))
    return conv, array(*lead, hidden, scale=3), array(*lead, hidden), 1 + 0.2 * array(hidden)


def on_kernel(normed, conv, x, y, weight, **options):
    """(prepared, coefficients, finished with the residual, finished without)."""
    weights = (conv.base_kernel, conv.kernel_projection)
    norm = weight if normed else None
    prepared, dyn = kernel.prepare(*weights, x, norm, EPS, **options)
    finish = partial(kernel.finish, conv.base_kernel, y, dyn, **options)
    return prepared, dyn, finish(residual=x), finish(residual=None)


def on_reference(normed, conv, x, y, weight):
    norm, xla = weight if normed else None, {"implementation": "xla"}
    prepared, dyn = d2_conv_prepare(conv, x, norm=norm, eps=EPS, **xla)
    finish = partial(d2_conv_finish, conv, y, dyn, **xla)
    return prepared, dyn, finish(residual=x), finish(residual=None)


interpreted = jax.jit(partial(on_kernel, tiling=SMALL, interpret=True), static_argnums=0)
compiled = jax.jit(on_kernel, static_argnums=0)
reference = jax.jit(on_reference, static_argnums=0)


def assert_agree(got, expected, dtype):
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["rows", "norm and rows"])
def test_any_shape(shape, dtype, normed):
    case = problem(shape, dtype)
    assert_agree(interpreted(normed, *case), reference(normed, *case), dtype)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_the_default_tiling_too(shape):
    case = problem(shape, F32)
    assert_agree(on_kernel(True, *case, interpret=True), reference(True, *case), F32)


@pytest.mark.parametrize("case", ["dflash2", "dflash2_k3"])
def test_recorded_halves(case):
    draft, recorded = stage_draft(case), arrays("stages", case, "conv.npz")
    for which in ("attention_conv", "mlp_conv"):
        conv, of = getattr(draft.layers[0], which), f"l0_{which}_"
        x, y = (jnp.asarray(recorded[of + half + "_in"]) for half in ("prepare", "finish"))
        prepared, dyn, _, finished = interpreted(False, conv, x, y, jnp.zeros(x.shape[-1:]))
        assert_close(prepared, recorded[of + "prepare_out"])
        assert_close(dyn.reshape(dyn.shape[0], -1), recorded[of + "kernel_projection_out"])
        assert_close(finished, recorded[of + "finish_out"])


def test_blocks_do_not_see_each_other():
    """A block between blocks of NaN, and rows after which everything is NaN."""
    conv, x, y, weight = problem(((3, 5), 36, 12, 3), F32)
    expected = reference(True, conv, x, y, weight)
    poisoned = (z.at[0].set(jnp.nan).at[2].set(jnp.nan) for z in (x, y))
    for ours, theirs in zip(interpreted(True, conv, *poisoned, weight), expected, strict=True):
        assert_close(ours[1], theirs[1])
    poisoned = (z.at[:, 3:].set(jnp.nan) for z in (x, y))
    for ours, theirs in zip(interpreted(True, conv, *poisoned, weight), expected, strict=True):
        assert_close(ours[:, :3], theirs[:, :3])


def test_vmapped_and_inside_a_while_loop():
    """Layers of one convolution, block after block."""
    conv, x, _, weight = problem(((4, 5), 36, 12, 3), F32)

    def stack(layer):
        def step(carry):
            i, x = carry
            return i + 1, layer(False, conv, x, jnp.tanh(x), weight)[2]

        return jax.lax.while_loop(lambda c: c[0] < 3, step, (jnp.int32(0), x))[1]

    assert_close(jax.jit(lambda: stack(interpreted))(), stack(reference))
    blocks = jax.vmap(lambda x: interpreted(True, conv, x, x, weight))
    for ours, theirs in zip(blocks(x), reference(True, conv, x, x, weight), strict=True):
        assert_close(ours, theirs)


def test_what_the_kernel_refuses(monkeypatch):
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    conv, x, _, _ = problem(((65,), 8, 4, 2), F32)
    with pytest.raises(NotImplementedError, match="block: expected at most 64 rows, found 65"):
        d2_conv_prepare(conv, x, implementation="pallas")
    with pytest.raises(NotImplementedError, match="rows: expected float32 or bfloat16, found"):
        d2_conv_prepare(conv, x[:3].astype(jnp.float16), implementation="pallas")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("normed", [False, True], ids=["rows", "norm and rows"])
def test_one_launch_a_half_on_a_gpu(monkeypatch, preset, dtype, normed):
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    rows, *rest = PRESETS[preset]
    case = jax.eval_shape(lambda: problem(((1, rows), *rest), dtype))

    def layer(conv, x, y, weight, implementation="pallas"):
        norm, choice = weight if normed else None, {"implementation": implementation}
        prepared, dyn = d2_conv_prepare(conv, x, norm=norm, eps=EPS, **choice)
        return d2_conv_finish(conv, y + prepared, dyn, residual=x, **choice)

    assert launches(lowered(layer, *case)) == 2
    assert launches(lowered(jax.vmap(layer, in_axes=(None, 0, 0, None)), *case)) == 2
    # XLA's was measured faster.
    assert launches(lowered(partial(layer, implementation=None), *case)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("normed", [False, True], ids=["rows", "norm and rows"])
def test_compiled_it_agrees_and_repeats(dtype, normed):
    whole = [((2, rows), *rest) for rows, *rest in PRESETS.values()]
    with jax.default_matmul_precision("highest"):
        for shape in [*SHAPES, *whole]:
            case = problem(shape, dtype)
            got, again = compiled(normed, *case), compiled(normed, *case)
            assert_agree(got, reference(normed, *case), dtype)
            for one, other in zip(got, again, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
def test_compiled_blocks_do_not_see_each_other():
    for rows, *rest in PRESETS.values():
        conv, x, y, weight = problem(((3, rows), *rest), BF16)
        expected = compiled(True, conv, x, y, weight)
        poisoned = (z.at[0].set(jnp.nan).at[2].set(jnp.nan) for z in (x, y))
        for ours, theirs in zip(compiled(True, conv, *poisoned, weight), expected, strict=True):
            np.testing.assert_array_equal(ours[1], theirs[1])
