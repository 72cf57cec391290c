"""Long contexts: prompt chunks through tiles of keys, windows crossed, rings turned, YaRN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from targets import (
    F32,
    TINY,
    TINY_TARGET,
    mistaken_draft,
    table_target,
    tiny_draft,
    tiny_target,
)

from dflash_jax import (
    SpecSession,
    attention,
    forward_block,
    forward_round,
    generate,
    ingest_ctx,
    loop,
)
from dflash_jax import kv as cache
from dflash_jax.attention import ABSENT, BlockPlace, block_attention, key_tile, tiled_attention
from dflash_jax.config import RopeConfig
from dflash_jax.session import default_capacity

YARN = RopeConfig(10000.0, "yarn", factor=8.0, original_max_position_embeddings=64)
BLOCK = TINY.block_size
in_tiles = jax.jit(tiled_attention, static_argnums=4, static_argnames=("causal", "window"))


def close(got, expected):
    """Equal to 1e-5 of the largest value; a NaN is a failure."""
    worst = np.abs(np.asarray(got) - np.asarray(expected)).max()
    assert worst <= 1e-5 * np.abs(np.asarray(expected)).max()


# --- attention in tiles ------------------------------------------------------------------------


def problem(slots, rows, held, ring=False):
    """Queries of `rows` rows behind `held [B]` rows of context; NaN in every unwritten slot."""
    rng, batch = np.random.default_rng(0), len(held)
    q = rng.normal(size=(batch, rows, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, batch, 2, slots, 8)).astype(np.float32)
    pos = np.arange(slots)
    k_pos = np.where(pos < np.array(held)[:, None] + rows, pos, ABSENT)
    for b in range(batch):
        if ring:
            order = rng.permutation(slots)
            k[b], v[b], k_pos[b] = k[b][:, order], v[b][:, order], k_pos[b][order]
        for leaf in (k, v):
            leaf[b][:, k_pos[b] == ABSENT] = np.nan
    q_pos = np.array(held)[:, None] + np.arange(rows)
    rope = jnp.zeros((batch, rows, 4))
    slot = jnp.asarray(held, jnp.int32)
    place = BlockPlace(rope, rope, jnp.asarray(q_pos), jnp.asarray(k_pos), slot, slot, ring)
    return jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), place


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 20), (False, 20)])
@pytest.mark.parametrize("held", [[0], [15], [16], [40], [3, 44]], ids=str)
def test_tiles_equal_the_whole(held, causal, window, ring):
    """Tiles of 16 over 61 slots: the last one overlaps the one before."""
    q, k, v, place = problem(61, 12, held, ring)
    masks = {"causal": causal, "window": window}
    got = in_tiles(q, k, v, place, 16, **masks)
    close(got, block_attention(q, k, v, place.q_pos, place.k_pos, **masks))


@pytest.mark.parametrize(("held", "window", "tiles"), [(0, None, 1), (40, None, 4), (40, 8, 2)])
def test_only_tiles_with_a_visible_row_are_read(held, window, tiles):
    """Poison in all others, though their rows are marked as there."""
    q, k, v, place = problem(96, 12, [held])
    first = (held + 11) // 16 + 1 - tiles
    read = np.isin(np.arange(96) // 16, first + np.arange(tiles))
    k, v = (jnp.where(read[:, None], leaf, jnp.inf) for leaf in (k, v))
    got = in_tiles(q, k, v, place, 16, causal=True, window=window)
    assert np.isfinite(np.asarray(got)).all()


def test_scores_of_a_chunk_are_bounded():
    """Whatever the context; a round's few rows and a small cache are not cut up."""
    for batch, rows, heads in ((1, 256, 32), (1, 1024, 32), (8, 256, 9)):
        tile = key_tile(batch, rows, heads, 32784)
        assert tile * batch * rows * heads * 4 <= attention.SCORE_BYTES
        assert key_tile(batch, rows, heads, tile) is None
    assert key_tile(64, 17, 32, 32784) is None
    assert key_tile(64, 256, 32, 32784) == attention.TILES[-1]


# --- prompts in chunks -------------------------------------------------------------------------


WINDOWED = dataclasses.replace(TINY_TARGET, layer_window=(None, 24, 300), rope=YARN)


def read(target, draft, prompt, capacity, chunk):
    caches = loop.empty_caches(target, draft, 1, capacity)
    return loop.prefill(target, draft, caches, [prompt], [0], capacity, chunk=chunk)


def test_a_long_prompt_in_chunks_and_tiles_leaves_the_caches_of_one_forward(monkeypatch):
    """Windows of 24 and 300 crossed, positions past YaRN's original 64, tiles of 256 keys."""
    target, draft = tiny_target(WINDOWED), tiny_draft()
    prompt = np.random.default_rng(0).integers(0, 64, 700).tolist()
    whole = read(target, draft, prompt, 720, 720)
    monkeypatch.setattr(attention, "SCORE_BYTES", 0)
    got = read(target, draft, prompt, 800, 256)
    close(got.last, whole.last)
    for ours, theirs in zip(
        got.target.k + got.target.v + got.draft.k + got.draft.v,
        whole.target.k + whole.target.v + whole.draft.k + whole.draft.v,
        strict=True,
    ):
        close(ours[:, :, :700], theirs[:, :, :700])


@pytest.mark.parametrize(
    ("left", "room", "widest", "width"),
    [
        (1, 1000, 256, 16),
        (17, 1000, 256, 64),
        (300, 1000, 256, 256),
        (300, 100, 256, 64),  # the context's end
        (300, 16, 256, 16),
        (5000, 5000, 1024, 1024),
        (600, 5000, 1024, 1024),  # half full and more
        (300, 5000, 1024, 256),
        (600, 1000, 1024, 256),
        (100, 1000, 20, 20),
    ],
)
def test_the_width_of_the_next_chunk(left, room, widest, width):
    assert loop.chunk_width(left, room, widest) == width


def test_long_prompts_take_wide_chunks():
    assert loop.widest_chunk(1, 4095) == 256
    assert loop.widest_chunk(1, 4096) == loop.widest_chunk(2, 32768) == 1024
    assert loop.widest_chunk(3, 32768) == 256


def test_a_session_takes_its_chunk_and_tells_of_each():
    one_layer = dataclasses.replace(TINY_TARGET, num_hidden_layers=1, layer_window=(None,))
    target, taken = tiny_target(one_layer), []
    session = SpecSession(target, None, chunk=32)
    session.open([list(range(60)) + [5] * 10], 4, tick=taken.append)
    assert taken == [32, 32, 6]
    with pytest.raises(ValueError, match=r"chunk: expected 16\.\.\d+, found 8"):
        SpecSession(target, None, chunk=8)


def test_drafting_goes_on_past_the_step_of_capacities():
    """Case 111: half as long again as 4096 rows, the text stays and so does the acceptance."""
    cycle = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0]
    target = table_target(cycle, max_positions=8192)
    draft = mistaken_draft(target, [3, 8])
    short, long = (generate(target, draft, [1], n) for n in (60, 6144))
    assert long.token_ids == [(2 + i) % 11 for i in range(6144)]
    ratio = long.mean_acceptance_length / short.mean_acceptance_length
    assert 0.9 < ratio < 1.1
    assert 1.5 < long.mean_acceptance_length < 3.5


@pytest.mark.parametrize(
    ("rows", "capacity"),
    [(1, 256), (257, 512), (4096, 4096), (4097, 8192), (32832, 36864), (39999, 40000)],
)
def test_the_default_capacity(rows, capacity):
    assert default_capacity(rows, 40000) == capacity


# --- the drafter's ring ------------------------------------------------------------------------


LONG = dataclasses.replace(TINY, layer_window=(24, None), rope=YARN)


@pytest.mark.parametrize(
    ("causal", "start"),
    [
        ((False, False), 5000),
        pytest.param((True, False), 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_ring_that_turns_equals_the_uncached_forward(causal, start):
    """400 rows behind `start`, in prompt chunks and rounds, through a window of 24: at every edge
    the block sees what `forward_block` over the whole context sees, NaN wherever nothing is held.
    """
    config = dataclasses.replace(LONG, layer_causal=causal)
    draft, rng = tiny_draft(config), np.random.default_rng(2)
    features = rng.normal(size=(400, 32)).astype(np.float32)
    kv = cache.cold(cache.allocate(config, 1, 400, F32, overhang=64), start)
    assert kv.k[0].shape[2] < 50
    append, forward = jax.jit(ingest_ctx), jax.jit(forward_round)
    end, pos = 0, start + np.arange(400)
    for width in (16, 5, 5, 64, 5, 16, 5, 5, 5, 5, 5, 5, 5, 64, 5, 64):
        for _ in range(2):
            count = min(width, 400 - end) if width > 5 else int(rng.integers(1, 6))
            new = np.full((width, 32), np.nan, np.float32)
            new[:count] = features[end : end + count]
            where = jnp.asarray(start + end + np.arange(width))
            kv = append(draft, kv, new, where, jnp.asarray([count]))
            end += count
        noise = rng.normal(size=(BLOCK, 32)).astype(np.float32)
        block = start + end + np.arange(BLOCK)
        got, kv = forward(draft, kv, noise, jnp.asarray(block))
        # Rows that are not there yet are ABSENT, so that one program serves all contexts.
        seen = np.concatenate([np.where(np.arange(400) < end, pos, ABSENT), block])
        close(got, jax.jit(forward_block)(draft, features, noise, jnp.asarray(seen)))


def rows_lost(slots, kept, slack, seed):
    """Whether a ring of `slots` slots, filled as rounds fill it, ever loses one of its last `kept`.
    Each round lays a block of `slack` rows over free slots, then appends some of `slack`.
    """
    rng, held = np.random.default_rng(seed), np.full(slots, ABSENT)
    following, length = 0, 0
    for _ in range(400):
        for count in (0, int(rng.integers(1, slack + 1))):
            at = following if following + slack <= slots else 0
            held[at : at + slack] = ABSENT
            held[at : at + count] = length + np.arange(count)
            if count:
                following, length = at + count, length + count
            if not set(range(max(0, length - kept), length)) <= set(held):
                return True
    return False


@pytest.mark.parametrize(("window", "block"), [(24, 4), (40, 16)])
def test_the_ring_is_as_small_as_contiguous_appends_allow(window, block):
    """Window and block are always held, in slots for two appends more; two fewer lose a row. (Up to
    a multiple of eight.)
    """
    config = dataclasses.replace(TINY, block_size=block, layer_window=(window, window))
    kv = jax.eval_shape(lambda: cache.allocate(config, 1, 4096, F32))
    slots, kept = kv.k[0].shape[2], window + block
    enough = kept + 2 * (block + 1)
    assert (kv.ring_rows, kv.slack) == (kept, block + 1)
    assert slots == -(-enough // cache.SLOT_STEP) * cache.SLOT_STEP
    assert not any(rows_lost(enough, kept, kv.slack, seed) for seed in range(5))
    assert any(rows_lost(enough - 2, kept, kv.slack, seed) for seed in range(5))
