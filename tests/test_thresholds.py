"""A position's logits are the same by a step of one row, a verify of several and a prompt's chunk.

Every length and width at which the target's code takes another way is moved to where a short text
crosses it, so that positions on both sides of each are looked at in all three ways. (What a GPU's
kernels decide by width: `test_kernels_attention.py`. A target of PyTorch: `test_targets_torch.py`.)
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from targets import TINY_TARGET, tiny_target

from dflash_jax import attention
from dflash_jax.config import RopeConfig
from dflash_jax.integers import round_up
from dflash_jax.targets import dense

LENGTH, VERIFY, WINDOWS, ORIGINAL = 38, 5, (None, 3, 13), 20
"""Tokens; rows of a verify; a window narrower than it, one wider; where the stretched ropes were
made for."""
TILE, WIDE = 8, 6
"""Keys of a tile; rows from which a block is a prompt's chunk."""
ROPES = {
    "yarn": RopeConfig(1e4, "yarn", 4.0, ORIGINAL),
    "llama3": RopeConfig(1e4, "llama3", 4.0, ORIGINAL, low_freq_factor=1.0, high_freq_factor=4.0),
}
TEXT = np.random.default_rng(0).integers(0, 64, LENGTH)


@pytest.fixture
def near(monkeypatch):
    """Thresholds that a text of LENGTH tokens crosses; the widths that were tiled."""
    tiled, honest = [], attention.tiled_attention

    def counted(q, *args, **kind):
        tiled.append(q.shape[1])
        return honest(q, *args, **kind)

    monkeypatch.setattr(attention, "tiled_attention", counted)
    monkeypatch.setattr(attention, "NARROW", WIDE)
    monkeypatch.setattr(attention, "TILES", (2 * TILE, TILE))
    monkeypatch.setattr(attention, "SCORE_BYTES", 4 * 4 * 2 * TILE * 20)  # 20 rows, 4 heads
    monkeypatch.setattr(dense, "SUM_TILE", TILE)
    return tiled


def reader(target):
    """`(state, start, rows)` -> logits of those rows of TEXT `[rows, V]`, and the state."""

    @jax.jit
    def read(state, ids):
        out, state = target.forward(state, ids)
        return target.logits(out.hidden)[0], state

    def at(state, start, rows):
        ids = jnp.asarray(TEXT[None, start : start + rows])
        logits, after = read(state.replace(len=jnp.asarray([start])), ids)
        return np.asarray(logits), after

    return at


@pytest.mark.parametrize("rope", ROPES)
def test_logits_at_every_position_by_one_row_by_a_verify_and_by_chunks(near, rope):
    target = tiny_target(dataclasses.replace(TINY_TARGET, layer_window=WINDOWS, rope=ROPES[rope]))
    read = reader(target)
    whole, full = read(target.init_state(1, LENGTH), 0, LENGTH)
    assert full.k[0].shape[2] == round_up(LENGTH, TILE) == 2.5 * 2 * TILE
    close = {"rtol": 0, "atol": 1e-5 * float(np.abs(whole).max())}
    for start in range(LENGTH - VERIFY):
        # The cache of the whole text, of which `start` rows count: what lies behind is not read.
        verified, _ = read(full, start, VERIFY)
        np.testing.assert_allclose(verified, whole[start : start + VERIFY], **close)
        alone, _ = read(full, start, 1)
        np.testing.assert_allclose(alone, whole[start : start + 1], **close)
    for width in (WIDE + 1, 22):  # tiles of both sizes
        state = target.init_state(1, LENGTH)
        for start in range(0, LENGTH - width, width):
            logits, state = read(state, start, width)
            np.testing.assert_allclose(logits, whole[start : start + width], **close)
    assert set(near) == {WIDE + 1, 22, LENGTH}


def test_a_cache_of_one_tile_and_of_more_hold_the_same(near):
    target = tiny_target(dataclasses.replace(TINY_TARGET, layer_window=WINDOWS))
    read, rows, both = reader(target), WIDE + 1, []
    for slots in (2 * TILE, 2 * TILE + 1):
        chunk, state = read(target.init_state(1, slots), 0, rows)
        verified, _ = read(state, rows, VERIFY)
        alone, _ = read(state, rows, 1)
        np.testing.assert_allclose(alone, verified[:1], rtol=1e-5, atol=1e-5)
        both.append(np.concatenate([chunk, verified]))
        assert bool(near) == (slots > 2 * TILE)  # only the second is more than a tile
    np.testing.assert_allclose(*both, rtol=0, atol=1e-5 * float(np.abs(both[0]).max()))
