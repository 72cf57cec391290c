"""The dense decoder as a `Target`: taps, tied heads, padding, verify rows against single steps."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from targets import F32, TINY_TARGET, TableTarget, table_target, tiny_target

from dflash_jax.targets import Target, check_taps, dense

IDS = [[3, 1, 4, 1, 5, 9, 2, 6]]


@partial(jax.jit, static_argnames="taps")
def run(target, ids, taps):
    out, _ = target.forward(target.init_state(ids.shape[0], ids.shape[1]), ids, taps)
    return out


def forward(target, ids, taps=()):
    """Hidden rows and taps of one pass."""
    return run(target, jnp.asarray(ids), taps)


def test_targets_satisfy_the_protocol():
    assert isinstance(tiny_target(), Target)
    table: TableTarget = table_target([1, 0])
    assert isinstance(table, Target)


def test_tap_i_is_the_output_of_layer_i():
    """Layer i adds i + 1 to a stream of zeros: taps [0, 2] are 1 and 1 + 2 + 3."""
    hidden, layers = 32, 4
    config = dataclasses.replace(
        TINY_TARGET, num_hidden_layers=layers, layer_window=(None,) * layers, qk_norm=False
    )
    tree = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), dense.abstract(config, F32))
    # A first feature so large that the norm makes it sqrt(hidden) whatever the stream holds: it
    # drives the MLP, which adds to the second one.
    tree.embedding[:, 0] = 1e4
    driven = np.sqrt(hidden)
    for i, layer in enumerate(tree.layers):
        layer.input_norm[:] = layer.post_norm[:] = 1
        layer.gate_up[[0, config.intermediate_size], 0] = 1
        layer.down[1, 0] = (i + 1) / (driven / (1 + np.exp(-driven)) * driven)
    target = jax.tree.map(jnp.asarray, tree)
    taps = forward(target, IDS, (0, 2)).taps
    assert taps.shape == (1, 8, 2 * hidden)
    np.testing.assert_allclose(taps[..., 1], 1, rtol=1e-5)
    np.testing.assert_allclose(taps[..., hidden + 1], 6, rtol=1e-5)
    assert not taps[..., 2:hidden].any()


def test_taps_come_in_the_order_asked_for():
    target = tiny_target()
    one, other = forward(target, IDS, (0, 1)).taps, forward(target, IDS, (1, 0)).taps
    np.testing.assert_array_equal(one, jnp.concatenate([other[..., 32:], other[..., :32]], -1))


def test_a_tap_on_the_last_layer_is_the_normed_output():
    out = forward(tiny_target(), IDS, (0, 2))
    np.testing.assert_array_equal(out.taps[..., 32:], out.hidden)


def test_no_taps_are_no_columns():
    assert forward(tiny_target(), IDS).taps.shape == (1, 8, 0)


@pytest.mark.parametrize(
    ("taps", "found"), [((0, 3), r"\[3\]"), ((-1, 0), r"\[-1\]"), ((1, 2, 1), r"\[1\]")]
)
def test_taps_out_of_range_or_twice_are_refused(taps, found):
    with pytest.raises(ValueError, match=rf"taps: .*0\.\.2 \(3 layers\), found {found}"):
        check_taps(taps, 3)
    with pytest.raises(ValueError, match=r"taps: "):
        forward(tiny_target(), IDS, taps)


def test_a_tied_head_is_the_embedding():
    target = tiny_target()
    assert target.head is None
    hidden = np.random.default_rng(0).normal(size=(5, 32)).astype(np.float32)
    expected = hidden @ np.asarray(target.embedding).T
    np.testing.assert_allclose(target.logits(jnp.asarray(hidden)), expected, rtol=1e-4, atol=1e-4)


def test_an_untied_head_is_its_own():
    target = tiny_target(dataclasses.replace(TINY_TARGET, tied=False))
    np.testing.assert_array_equal(target.lm_head, target.head)
    assert not np.array_equal(target.lm_head, target.embedding)


def test_padding_rows_of_the_tables_are_never_chosen():
    target = tiny_target(dataclasses.replace(TINY_TARGET, vocab_size=60))
    target = target.replace(embedding=target.embedding.at[60:].mul(100))
    logits = target.logits(jnp.asarray(np.random.default_rng(0).normal(size=(50, 32)), F32))
    assert (logits[:, 60:] == np.finfo(np.float32).min).all()
    assert int(logits.argmax(-1).max()) < 60


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_rows_of_any_width_have_the_same_logits(width, window):
    """One-token steps, verify blocks and one pass agree at every position, window or not."""
    target = tiny_target(dataclasses.replace(TINY_TARGET, layer_window=(None, window, window)))
    ids = np.random.default_rng(0).integers(0, 64, (2, 24))
    expected = target.logits(forward(target, ids).hidden)

    @jax.jit
    def step(state, ids):
        out, state = target.forward(state, ids, ())
        return target.logits(out.hidden), target.commit(state, jnp.full((2,), ids.shape[1]))

    state, rows = target.init_state(2, 24), []
    for start in range(0, 24, width):
        logits, state = step(state, jnp.asarray(ids[:, start : start + width]))
        rows.append(logits)
    got = np.concatenate(rows, axis=1)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * float(np.abs(expected).max()))


def test_uncommitted_rows_leave_no_trace():
    target = tiny_target()
    state, ids = target.init_state(1, 16), jnp.asarray(IDS)
    _, state = target.forward(state, ids, ())
    state = target.commit(state, jnp.asarray([3]))
    assert state.len.tolist() == [3]
    out, _ = target.forward(state, jnp.asarray([[7, 7]]), ())
    expected = forward(target, [[3, 1, 4, 7, 7]]).hidden[:, 3:]
    np.testing.assert_allclose(out.hidden, expected, rtol=1e-5, atol=1e-5)


def test_a_row_sees_no_later_row():
    target, changed = tiny_target(), np.array(IDS)
    changed[0, 5] = 33
    one, other = forward(target, IDS).hidden, forward(target, changed).hidden
    np.testing.assert_array_equal(one[:, :5], other[:, :5])
    assert (np.asarray(one)[:, 5:] != np.asarray(other)[:, 5:]).any()
