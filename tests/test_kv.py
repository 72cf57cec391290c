"""The drafter's cache: sizes, appends at each sequence's own length, rings, capacity."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from targets import F32, SLIDING, TINY, tiny_draft

from dflash_jax import ctx_features, ingest_ctx
from dflash_jax import kv as cache
from dflash_jax.attention import ABSENT
from dflash_jax.kv import Slots, keep_last, reserve, write_at

append = jax.jit(ingest_ctx)


def test_a_full_layer_keeps_capacity_rows_and_slack():
    """In eights, as every cache."""
    kv = cache.allocate(TINY, 3, 100, F32)
    assert [leaf.shape for leaf in kv.k + kv.v] == [(3, 2, 112, 8)] * 4, "100 + 5"
    assert kv.ring is None
    assert kv.len.tolist() == kv.floor.tolist() == [0, 0, 0]
    assert (np.asarray(kv.full.pos) == ABSENT).all()


def test_a_ring_holds_window_block_and_two_appends_whatever_the_overhang():
    kv = cache.allocate(SLIDING, 1, 100, F32, overhang=16)
    assert [leaf.shape[2] for leaf in kv.k] == [24, 120], "6 + 4 + 2 * 5 and 100 + 16"


def test_a_window_near_the_capacity_needs_no_ring():
    kv = cache.allocate(SLIDING, 1, 8, F32)
    assert kv.ring is None
    assert [leaf.shape[2] for leaf in kv.k] == [16, 16], "8 + 5"


@pytest.mark.parametrize("capacity", [4096, 131072])
def test_sliding_layers_do_not_grow_with_the_context(capacity):
    window, block = 2048, 16
    config = dataclasses.replace(TINY, block_size=block, layer_window=(window, window))
    kv = jax.eval_shape(lambda: cache.allocate(config, 1, capacity, F32))
    for leaf in kv.k + kv.v:
        assert leaf.shape[2] < 2 * (window + block)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("axis", [1, 2])
def test_write_at_writes_each_row_at_its_own_place(batch, axis):
    rng = np.random.default_rng(0)
    buffer = rng.normal(size=(batch, 9, 10)).astype(np.float32)
    shape = [batch, 9, 10]
    shape[axis] = 3
    values = rng.normal(size=shape).astype(np.float32)
    start = np.array([2, 5, 0])[:batch]
    expected = buffer.copy()
    for b, s in enumerate(start):
        if axis == 1:
            expected[b, s : s + 3] = values[b]
        else:
            expected[b, :, s : s + 3] = values[b]
    args = [jnp.asarray(x) for x in (buffer, values, start)]
    np.testing.assert_array_equal(write_at(*args, axis=axis), expected)


def test_a_ring_starts_over_where_rows_do_not_fit():
    pos = jnp.full((4, 10), ABSENT)
    following = jnp.asarray([0, 6, 7, 10])
    assert reserve(Slots(pos, following, ring=True), 4).tolist() == [0, 6, 0, 0]
    assert reserve(Slots(pos, following, ring=False), 4).tolist() == [0, 6, 7, 10]


def test_keep_last_moves_the_newest_rows_to_the_front_in_order():
    old = jnp.asarray([[8, 9, 4, 5, 6, 7, ABSENT]])
    new = jnp.asarray([[10, 11, ABSENT, ABSENT]])  # two rows of padding
    slots, order = keep_last(Slots(old, jnp.asarray([2]), ring=True), new, 5)
    assert slots.pos.tolist() == [[7, 8, 9, 10, 11, ABSENT, ABSENT]]
    assert slots.next.tolist() == [5]
    everything = jnp.concatenate([old, new], axis=1)[0]
    assert everything[order[0]].tolist() == [7, 8, 9, 10, 11]


def ingest(draft, kv, rows, count=None):
    """`rows` features, distinct for each position, appended behind every sequence's length."""
    pos = np.asarray(kv.len)[:, None] + np.arange(rows)
    rng = np.random.default_rng(0)
    table = rng.normal(size=(kv.capacity + 64, draft.config.tap_size)).astype(np.float32)
    features = ctx_features(draft, jnp.asarray(table[pos]))
    return ingest_ctx(draft, kv, features, jnp.asarray(pos, jnp.int32), count)


def test_a_write_past_capacity_is_refused_before_it_happens():
    draft = tiny_draft()
    kv = ingest(draft, cache.allocate(TINY, 2, 10, F32), 8)
    before = jax.tree.map(np.asarray, kv)
    with pytest.raises(ValueError, match=r"draft KV: expected at most 10 rows, found 8 \+ 3"):
        ingest(draft, kv, 3)
    jax.tree.map(np.testing.assert_array_equal, kv, before)
    assert ingest(draft, kv, 2).len.tolist() == [10, 10]


def test_a_cache_opened_cold_far_out_has_its_whole_capacity():
    """`floor` is the first row that exists: a drafter may start at any position."""
    draft = tiny_draft()
    kv = cache.allocate(TINY, 1, 10, F32)
    kv = kv.replace(len=kv.len + 5000, floor=kv.floor + 5000)
    features = jnp.ones((10, draft.config.hidden_size))
    kv = ingest_ctx(draft, kv, features, 5000 + jnp.arange(10))
    assert kv.len.tolist() == [5010]
    with pytest.raises(ValueError, match=r"draft KV: .* found 10 \+ 1"):
        ingest_ctx(draft, kv, features[:1], 5010 + jnp.arange(1))


@pytest.mark.parametrize("config", [TINY, SLIDING], ids=["full", "ring"])
@pytest.mark.parametrize("seed", range(3))
def test_appends_of_any_counts_keep_every_row_a_layer_can_see(config, seed):
    """Three sequences, each with its own counts; the result equals one append of all rows."""
    draft, rng, batch = tiny_draft(config), np.random.default_rng(seed), 3
    kv = cache.allocate(config, batch, 120, F32, overhang=16)
    table = rng.normal(size=(200, draft.config.hidden_size)).astype(np.float32)
    lengths = np.zeros(batch, int)
    for rows in (16, 4, 4, 4, 16, 4, 4, 4, 4, 4, 4, 4, 4, 16, 4):
        count = rng.integers(0, rows + 1, batch)
        pos = (lengths[:, None] + np.arange(rows)).astype(np.int32)
        kv = append(draft, kv, table[pos], pos, count.astype(np.int32))
        lengths += count
    assert kv.len.tolist() == lengths.tolist()
    one = cache.allocate(dataclasses.replace(config, layer_window=(None, None)), 1, 200, F32)
    one = append(draft, one, table, np.arange(200))
    for b in range(batch):
        every = np.arange(lengths[b])
        for i, window in enumerate(config.layer_window):
            held = np.asarray(kv.slots_of(i).pos)[b]
            slots = np.flatnonzero(held != ABSENT)
            assert len(set(held[slots])) == len(slots)
            visible = every if window is None else every[-(window - 1) :]
            assert set(visible) <= set(held[slots]) <= set(every)
            for leaf, whole in ((kv.k[i], one.k[i]), (kv.v[i], one.v[i])):
                got, expected = np.asarray(leaf)[b][:, slots], np.asarray(whole)[0][:, held[slots]]
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_padding_rows_count_for_nothing():
    """A chunk whose tail is padding equals one without it, garbage in the padding or not."""
    draft = tiny_draft(SLIDING)
    empty = cache.allocate(SLIDING, 1, 60, F32, overhang=16)
    features = np.random.default_rng(0).normal(size=(1, 16, 32)).astype(np.float32)
    pos = jnp.arange(16)[None]
    exact = append(draft, empty, features[:, :7], pos[:, :7])
    features[:, 7:] = np.nan
    padded = append(draft, empty, features, pos, jnp.asarray([7]))
    assert padded.len.tolist() == exact.len.tolist() == [7]
    for i in range(2):
        for kv in (exact, padded):
            held = np.asarray(kv.slots_of(i).pos)[0]
            order = np.argsort(held[held != ABSENT])
            rows = np.asarray(kv.k[i])[0][:, held != ABSENT][:, order]
            last = 7 if i else 5
            if kv is exact:
                expected = rows[:, -last:]
            else:
                np.testing.assert_allclose(rows[:, -last:], expected, rtol=1e-5, atol=1e-6)
