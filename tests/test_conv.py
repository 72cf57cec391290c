"""DFlash2's grouped dynamic causal convolution, against recorded numbers and by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from families import arrays, assert_close, stage_draft

from dflash_jax.conv import DFlash2Conv, d2_conv_finish, d2_conv_prepare

CASES = ["dflash2", "dflash2_k3"]
A, B, C = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
ROWS = jnp.asarray(np.stack([A, B, C]))


def static(*taps: float, hidden: int = 32, groups: int = 2) -> DFlash2Conv:
    """Both halves have the same taps on every channel, and no dynamic part."""
    base = np.broadcast_to(np.asarray(taps, np.float32)[None, :, None], (2, len(taps), hidden))
    return DFlash2Conv(jnp.asarray(base), jnp.zeros((2 * len(taps) * groups, hidden)))


def both_halves(conv, rows):
    prepared, dyn = d2_conv_prepare(conv, rows)
    return prepared, d2_conv_finish(conv, rows, dyn)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("which", ["attention_conv", "mlp_conv"])
def test_recorded_halves_of_every_layer(case, which):
    draft, recorded = stage_draft(case), arrays("stages", case, "conv.npz")
    config = draft.config.dflash2
    for i, layer in enumerate(draft.layers):
        conv, of = getattr(layer, which), f"l{i}_{which}_"
        assert conv.base_kernel.shape[1] == config.conv_kernel_size
        prepared, dyn = d2_conv_prepare(conv, jnp.asarray(recorded[of + "prepare_in"]))
        assert_close(prepared, recorded[of + "prepare_out"])
        assert_close(dyn.reshape(dyn.shape[0], -1), recorded[of + "kernel_projection_out"])
        assert_close(dyn[:, 1], recorded[of + "finish_dynamic"])
        finished = d2_conv_finish(conv, jnp.asarray(recorded[of + "finish_in"]), dyn)
        assert_close(finished, recorded[of + "finish_out"])


def test_tap_0_alone_is_the_identity():
    for half in both_halves(static(1, 0), ROWS):
        np.testing.assert_array_equal(half, ROWS)


def test_tap_1_alone_is_the_row_before_and_zero_before_the_block():
    for half in both_halves(static(0, 1), ROWS):
        np.testing.assert_array_equal(half, [0 * A, A, B])
    for half in both_halves(static(0, 0, 1), ROWS):
        np.testing.assert_array_equal(half, [0 * A, 0 * A, A])


def test_a_second_block_never_sees_the_first_ones_last_row():
    blocks = jnp.stack([ROWS, ROWS[::-1]])
    for half in both_halves(static(0, 1), blocks):
        np.testing.assert_array_equal(half, [[0 * A, A, B], [0 * A, C, B]])


def test_a_batch_equals_its_blocks_alone():
    conv = stage_draft("dflash2_k3").layers[0].mlp_conv
    blocks = np.random.default_rng(1).normal(size=(2, 3, 8, 64)).astype(np.float32)
    together = both_halves(conv, jnp.asarray(blocks))
    for i in range(2):
        for j in range(3):
            alone = both_halves(conv, jnp.asarray(blocks[i, j]))
            for all_of_them, one in zip(together, alone, strict=True):
                assert_close(all_of_them[i, j], one)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("tap", [0, 1])
@pytest.mark.parametrize("group", [0, 1])
def test_a_groups_coefficient_touches_only_its_own_channels(half, tap, group):
    """Groups of 16 channels: the projection's rows run over half, tap, group, slowest first."""
    conv = static(1, 0)
    projection = np.zeros(conv.kernel_projection.shape, np.float32)
    projection[(half * 2 + tap) * 2 + group, 5] = 0.5  # a coefficient: half of channel 5's input
    changed = both_halves(conv.replace(kernel_projection=jnp.asarray(projection)), ROWS)
    source = [ROWS, jnp.concatenate([jnp.zeros((1, 32)), ROWS[:-1]])][tap]
    delta = np.zeros((3, 32), np.float32)
    channels = slice(16 * group, 16 * group + 16)
    # The coefficient is the output row's own, whatever row it multiplies.
    delta[:, channels] = 0.5 * np.asarray(ROWS)[:, 5:6] * np.asarray(source)[:, channels]
    np.testing.assert_allclose(changed[half], ROWS + delta, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(changed[1 - half], ROWS)


def test_finish_uses_the_coefficients_of_prepares_input():
    conv = stage_draft("dflash2").layers[0].attention_conv
    rng = np.random.default_rng(2)
    x, y = jnp.asarray(rng.normal(size=(2, 8, 64)), jnp.float32)
    _, of_x = d2_conv_prepare(conv, x)
    _, of_y = d2_conv_prepare(conv, y)
    assert not np.allclose(d2_conv_finish(conv, y, of_x), d2_conv_finish(conv, y, of_y))


@pytest.mark.parametrize("taps", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_any_kernel_size_and_block_size(taps, rows):
    """Term by term, in f64; a kernel longer than the block too."""
    rng, hidden, groups = np.random.default_rng(taps), 12, 3
    base = rng.normal(size=(2, taps, hidden))
    projection = rng.normal(size=(2 * taps * groups, hidden))
    x, y = rng.normal(size=(2, rows, hidden))
    conv = DFlash2Conv(jnp.asarray(base, jnp.float32), jnp.asarray(projection, jnp.float32))
    prepared, dyn = d2_conv_prepare(conv, jnp.asarray(x, jnp.float32))
    finished = d2_conv_finish(conv, jnp.asarray(y, jnp.float32), dyn)
    coefficients = (x @ projection.T).reshape(rows, 2, taps, groups)
    for half, source, got in ((0, x, prepared), (1, y, finished)):
        expected = np.zeros((rows, hidden))
        for t in range(rows):
            for o in range(min(taps, t + 1)):
                kernel = base[half, o] + np.repeat(coefficients[t, half, o], hidden // groups)
                expected[t] += kernel * source[t - o]
        assert_close(got, expected)


def test_bf16_rows_come_back_in_bf16():
    conv = static(0.5, 0.25)
    prepared, dyn = d2_conv_prepare(
        DFlash2Conv(*(w.astype(jnp.bfloat16) for w in (conv.base_kernel, conv.kernel_projection))),
        ROWS.astype(jnp.bfloat16),
    )
    assert prepared.dtype == jnp.bfloat16
    assert dyn.dtype == jnp.float32
