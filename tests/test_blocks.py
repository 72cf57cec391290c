"""Blocks of a row at once: where they start and what they see is what each has at inference."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import forward_block, ingest_ctx, load_draft
from dflash_jax import kv as cache
from dflash_jax.attention import ABSENT, attention_mask
from dflash_jax.blocks import (
    Batch,
    block_hidden,
    block_positions,
    draw_anchors,
    legal_anchors,
    segment_positions,
)

STAGES = Path(__file__).parent / "oracles" / "stages"
TINY = Path(__file__).parent / "oracles" / "tiny"


@pytest.fixture(scope="module")
def draft():
    return load_draft(TINY / "dflash")


def relative(ours, theirs):
    return float(jnp.abs(ours - theirs).max() / jnp.abs(theirs).max())


CASES = ["dflash_plain", "dflash_mixed_window", "dflash_sliding_causal_default"]
CASES += ["dflash_window_lt_block", "dflash_causal_true"]


@pytest.mark.parametrize("case", CASES)
def test_training_mask_is_the_inference_mask(case):
    """Element by element, for every layer, over an inference cache that was really filled."""
    draft = load_draft(STAGES / case / "checkpoint")
    config, width = draft.config, 48
    segment = jnp.ones((1, width), jnp.int32)
    for anchor in (1, 7, 33, width - 2):
        rows, keys = block_positions(segment, jnp.array([[anchor]]), config.block_size)
        kv = cache.allocate(config, 1, width, jnp.float32)
        feats = jnp.zeros((anchor, config.hidden_size))
        kv = ingest_ctx(draft, kv, feats, jnp.arange(anchor))
        for layer in range(config.num_hidden_layers):
            rule = {
                "causal": config.layer_causal[layer],
                "window": config.layer_window[layer],
            }
            ours = jnp.broadcast_to(
                attention_mask(rows, keys, **rule), (1, 1, config.block_size, keys.shape[-1])
            )
            # Inference: the cache's slots hold positions in any order; the block's own come last.
            book = kv.slots_of(layer)
            k_pos = jnp.concatenate([book.pos[0], anchor + jnp.arange(config.block_size)])
            theirs = attention_mask(anchor + jnp.arange(config.block_size), k_pos, **rule)
            theirs = np.broadcast_to(theirs, (config.block_size, k_pos.shape[0]))
            seen = {(r, int(k_pos[s])) for r, s in np.argwhere(theirs)}
            trained = {(r, int(keys[0, 0, s])) for r, s in np.argwhere(ours[0, 0])}
            assert seen == trained
            assert (keys[0, 0, :width] == ABSENT).sum() == width - anchor
            np.testing.assert_array_equal(rows[0, 0], anchor + np.arange(config.block_size))


@pytest.mark.parametrize("case", CASES)
def test_every_block_equals_inference(case):
    """All blocks of a row at once give what `forward_block` gives for each anchor alone."""
    draft = load_draft(STAGES / case / "checkpoint")
    config, width = draft.config, 40
    keys = jax.random.split(jax.random.key(3), 2)
    feats = jax.random.normal(keys[0], (1, width, config.hidden_size))
    anchors = jnp.array([[1, 9, 10, 39]])
    noise = jax.random.normal(keys[1], (1, 4, config.block_size, config.hidden_size))
    segment = jnp.ones((1, width), jnp.int32)
    together = block_hidden(draft, feats, noise, segment, anchors)
    for i, anchor in enumerate(anchors[0].tolist()):
        pos = jnp.arange(anchor + config.block_size)
        alone = forward_block(draft, feats[0, :anchor], noise[0, i], pos)
        assert relative(together[0, i], alone) < 1e-5


def test_blocks_do_not_see_each_other_nor_the_future(draft):
    width, config = 32, draft.config
    keys = jax.random.split(jax.random.key(4), 3)
    feats = jax.random.normal(keys[0], (1, width, config.hidden_size))
    noise = jax.random.normal(keys[1], (1, 3, config.block_size, config.hidden_size))
    anchors, segment = jnp.array([[5, 6, 20]]), jnp.ones((1, width), jnp.int32)
    base = block_hidden(draft, feats, noise, segment, anchors)
    other = block_hidden(draft, feats, noise.at[:, 1:].add(1.0), segment, anchors)
    np.testing.assert_array_equal(base[:, 0], other[:, 0])
    later = block_hidden(draft, feats.at[:, 6:].add(1.0), noise, segment, anchors)
    np.testing.assert_array_equal(base[:, :2], later[:, :2])
    assert relative(later[:, 2], base[:, 2]) > 1e-3


def test_positions_start_anew_in_every_document():
    segment = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0]])
    np.testing.assert_array_equal(segment_positions(segment)[0], [0, 1, 2, 0, 1, 0, 0, 1])


def test_anchors_are_answer_tokens_followed_by_an_answer_token():
    segment = jnp.array([[1, 1, 1, 1, 2, 2, 2, 2, 0]])
    answer = jnp.array([[0, 0, 1, 1, 0, 1, 1, 1, 1]], bool)
    batch = Batch(jnp.zeros((1, 9), jnp.int32), segment, answer)
    legal = legal_anchors(batch)
    assert np.nonzero(np.asarray(legal[0]))[0].tolist() == [2, 5, 6]
    anchors, real = draw_anchors(jax.random.key(0), batch, 5)
    assert sorted(np.asarray(anchors[0])[np.asarray(real[0])].tolist()) == [2, 5, 6]
    one = jnp.ones((1, 31), jnp.int32)
    drawn = draw_anchors(jax.random.key(1), Batch(one, one, one.at[:, 0].set(0) > 0), 10)
    assert len(set(drawn[0][0].tolist())) == 10
    assert drawn[1].all()
