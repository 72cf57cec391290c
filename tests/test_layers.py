"""RMSNorm, SwiGLU and rotary embedding against their formulas in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import RopeConfig
from dflash_jax.config_json import parse_rope
from dflash_jax.layers import apply_rope, linear, rms_norm, rope_frequencies, rope_tables, swiglu

DIM = 16
YARN = RopeConfig(10000.0, "yarn", factor=4.0, original_max_position_embeddings=2048)


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_linear_is_x_times_the_transposed_weight():
    x, weight = array(2, 3, 5), array(7, 5, seed=1)
    np.testing.assert_allclose(linear(jnp.asarray(x), jnp.asarray(weight)), x @ weight.T, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 8, 9])
def test_linear_of_few_rows(rows):
    """On a CPU from two to eight are a sum of products: the same numbers, dtype and gradients."""
    x, weight = array(rows, 1, 300), array(70, 300, seed=1)
    for f in (linear, jax.jit(linear, static_argnames=("first", "dtype"))):
        found = f(jnp.asarray(x), jnp.asarray(weight), dtype=jnp.bfloat16, first=3)
        assert (found.dtype, found.shape) == (jnp.bfloat16, (rows, 1, 67))
        np.testing.assert_allclose(found.astype(jnp.float32), x @ weight[3:].T, rtol=2e-2, atol=0.1)
        found = f(jnp.asarray(x), jnp.asarray(weight))
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, x @ weight.T, rtol=1e-5, atol=1e-5)

    def loss(weight):
        return jnp.sum(linear(jnp.asarray(x), weight) ** 2)

    expected = 2 * (x @ weight.T)[:, 0].T @ x[:, 0]
    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(weight)), expected, rtol=1e-4, atol=1e-3)


def test_few_rows_make_no_copy_of_the_weight_for_each():
    """Of a head of 152k tokens they would be 20 GB: not uncompiled, nor for a gradient."""
    x, weight = (jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in (8, 512))
    (call,) = jax.make_jaxpr(linear)(x, weight).eqns
    (loop,) = call.params["call_jaxpr"].eqns
    assert loop.primitive.name in ("jit", "pjit")

    def gradient(x, weight):
        return jax.grad(lambda *xs: jnp.sum(linear(*xs) ** 2), argnums=(0, 1))(x, weight)

    for f in (linear, gradient):
        memory = jax.jit(f).lower(x, weight).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 512 * 64 * 4


def test_linear_of_no_inputs_and_of_rows_not_known_yet():
    assert linear(jnp.ones((2, 0)), jnp.ones((3, 0))).tolist() == [[0.0] * 3] * 2
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 5), jnp.float32)
    weight = jnp.asarray(array(7, 5))
    program = jax.export.export(jax.jit(lambda x: linear(x, weight)))(x)
    given = array(3, 5, seed=1)
    np.testing.assert_allclose(program.call(given), given @ weight.T, rtol=1e-5)


def test_linear_accumulates_bf16_products_in_f32():
    # 256 + 1 + ... + 1: a bf16 accumulator would stay at 256.
    x = jnp.ones((1, 257), jnp.bfloat16)
    weight = jnp.ones((1, 257), jnp.bfloat16).at[0, 0].set(256)
    assert float(linear(x, weight, dtype=jnp.dtype(jnp.float32))[0, 0]) == 512.0


def test_rms_norm_has_plain_weights_and_no_mean():
    x, weight = array(3, 8), array(8, seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-6), expected, 1e-5)
    assert not rms_norm(jnp.asarray(x), jnp.zeros(8), 1e-6).any()


def test_rms_norm_takes_its_statistics_in_f32():
    # In bf16 the squares' mean would be off by up to a percent; the result is off by a rounding.
    x = jnp.asarray(array(4, 512), jnp.bfloat16)
    got = np.asarray(rms_norm(x, jnp.ones(512, jnp.bfloat16), 1e-6), np.float64)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=2**-8)


def test_rms_norm_of_large_half_precision_rows_is_finite():
    x = jnp.full((1, 64), 6e4, jnp.float16)  # squares overflow f16
    np.testing.assert_allclose(rms_norm(x, jnp.ones(64, jnp.float16), 1e-6), 1, rtol=1e-3)


def test_swiglu_reads_gate_rows_then_up_rows():
    x, gate, up, down = (
        array(3, 6),
        array(10, 6, seed=1),
        array(10, 6, seed=2),
        array(6, 10, seed=3),
    )
    g = (x @ gate.T).astype(np.float64)
    expected = (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T
    fused = jnp.concatenate([jnp.asarray(gate), jnp.asarray(up)])
    got = swiglu(jnp.asarray(x), fused, jnp.asarray(down))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


# --- rope --------------------------------------------------------------------------------------


def test_default_frequencies_are_powers_of_theta():
    inv_freq, scaling = rope_frequencies(RopeConfig(10000.0), DIM)
    np.testing.assert_allclose(inv_freq, 10000.0 ** (-np.arange(0, DIM, 2) / DIM), rtol=1e-6)
    assert scaling == 1.0
    assert inv_freq.dtype == np.float32


def test_the_drafters_theta_counts_not_the_targets():
    drafter, target = (rope_frequencies(RopeConfig(t), DIM)[0] for t in (1e4, 1e6))
    assert f"{drafter[1]:.5f}" == f"{1e4 ** (-2 / DIM):.5f}" == "0.31623"
    assert f"{target[1]:.5f}" == f"{1e6 ** (-2 / DIM):.5f}" == "0.17783"


@pytest.mark.parametrize("position", [0, 5000])
def test_null_scaling_gives_plain_rope(position):
    rope = parse_rope({"rope_theta": 10000.0, "rope_scaling": None})
    cos, sin = rope_tables(rope, DIM, jnp.asarray([position]))
    angles = position * 10000.0 ** (-np.arange(0, DIM, 2) / DIM)
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=5e-4)  # f32 angles near 5000
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=5e-4)


def test_half_split_and_interleaved_pairs():
    q = jnp.asarray([1.0, 0, 0, 0]).reshape(1, 1, 4)  # rows, heads, D
    cos, sin = rope_tables(RopeConfig(10000.0), 4, jnp.asarray([1]))
    c, s = math.cos(1), math.sin(1)
    np.testing.assert_allclose(apply_rope(q, cos, sin).ravel(), [c, 0, s, 0], atol=1e-6)
    interleaved = apply_rope(q, cos, sin, neox=False).ravel()
    np.testing.assert_allclose(interleaved, [c, s, 0, 0], atol=1e-6)


@pytest.mark.parametrize("neox", [True, False])
def test_rotation_keeps_norms_and_scores_depend_on_distance_alone(neox):
    q, k = (jnp.asarray(array(1, 1, DIM, seed=s)) for s in (1, 2))

    def score(q_pos, k_pos):
        rotated = [
            apply_rope(x, *rope_tables(RopeConfig(100.0), DIM, jnp.asarray([p])), neox=neox)
            for x, p in ((q, q_pos), (k, k_pos))
        ]
        np.testing.assert_allclose(jnp.linalg.norm(rotated[0]), jnp.linalg.norm(q), rtol=1e-6)
        return float((rotated[0] * rotated[1]).sum())

    assert score(3, 1) == pytest.approx(score(103, 101), abs=1e-4)
    assert abs(score(3, 1) - score(3, 2)) > 1e-3


def test_rope_runs_in_f32_and_returns_the_input_type():
    x = jnp.asarray(array(3, 2, DIM), jnp.bfloat16)
    cos, sin = rope_tables(RopeConfig(10000.0), DIM, jnp.arange(3))
    got = apply_rope(x, cos, sin)
    assert got.dtype == jnp.bfloat16
    wide = apply_rope(x.astype(jnp.float32), cos, sin)
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))


def yarn_by_hand(rope: RopeConfig, dim: int) -> np.ndarray:
    """The formula of Peng et al. (2023) for frequencies, in float64."""
    assert rope.factor and rope.original_max_position_embeddings

    def corr(rotations):
        length = rope.original_max_position_embeddings
        return dim * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(rope.theta))

    low, high = corr(rope.beta_fast), corr(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    j = np.arange(dim // 2)
    interpolated = np.clip((j - low) / (high - low), 0, 1)
    base = rope.theta ** (-2 * j / dim)
    return base / rope.factor * interpolated + base * (1 - interpolated)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"truncate": False},
        {"beta_fast": 64.0, "beta_slow": 2.0},
        {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},  # equal ends are widened
        {"theta": 1e6, "factor": 32.0, "original_max_position_embeddings": 8192},
    ],
)
def test_yarn_frequencies(changes):
    fields = {
        "theta": 10000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
    }
    rope = RopeConfig(**(fields | changes))
    np.testing.assert_allclose(rope_frequencies(rope, DIM)[0], yarn_by_hand(rope, DIM), rtol=1e-6)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain, _ = rope_frequencies(RopeConfig(10000.0), 64)
    yarn, _ = rope_frequencies(YARN, 64)
    assert yarn[0] == plain[0]
    np.testing.assert_allclose(yarn[-1], plain[-1] / 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.1 * math.log(4.0) + 1),
        ({"factor": 1.0}, 1.0),
        ({"factor": 0.5}, 1.0),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 2.0}, 0.1 * math.log(4.0) + 1),
        (
            {"mscale": 2.0, "mscale_all_dim": 0.5},
            (0.2 * math.log(4.0) + 1) / (0.05 * math.log(4.0) + 1),
        ),
    ],
)
def test_yarn_scales_cos_and_sin(changes, expected):
    fields = {"factor": 4.0, "original_max_position_embeddings": 2048}
    rope = RopeConfig(10000.0, "yarn", **(fields | changes))
    assert rope_frequencies(rope, DIM)[1] == pytest.approx(expected, rel=1e-12)
    cos, sin = rope_tables(rope, DIM, jnp.asarray([0, 3]))
    np.testing.assert_allclose(cos[0], expected, rtol=1e-6)
    np.testing.assert_allclose(cos**2 + sin**2, expected**2, rtol=1e-5)


def test_llama3_frequencies():
    rope = RopeConfig(
        500000.0,
        "llama3",
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    got, scaling = rope_frequencies(rope, 128)
    expected = []
    for freq in 500000.0 ** (-np.arange(0, 128, 2) / 128):
        wavelength = 2 * math.pi / freq
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        mixed = (1 - smooth) * freq / 8 + smooth * freq
        slow, fast = wavelength > 8192 / 1.0, wavelength < 8192 / 4.0
        expected.append(freq / 8 if slow else freq if fast else mixed)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert scaling == 1.0


def test_angles_are_f32_products():
    """Exact f64 angles would move a drafter's output near position 20000."""
    inv_freq, _ = rope_frequencies(RopeConfig(10000.0), DIM)
    cos, _ = rope_tables(RopeConfig(10000.0), DIM, jnp.asarray([19999]))
    angles = (np.float32(19999) * inv_freq).astype(np.float64)
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=1e-6)


def test_tables_broadcast_over_leading_axes():
    positions = jnp.asarray([[0, 5], [7, 2]])
    cos, sin = jax.jit(lambda p: rope_tables(YARN, DIM, p))(positions)
    assert cos.shape == sin.shape == (2, 2, DIM // 2)
    single, _ = rope_tables(YARN, DIM, positions[1])
    np.testing.assert_allclose(cos[1], single, rtol=1e-6)
