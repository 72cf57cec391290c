"""The drafter's forward: cached equals uncached, masks and windows bite where they must."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import ampere
from targets import F32, SLIDING, TINY, random_tree, tiny_draft

from dflash_jax import ctx_features, forward, forward_block, forward_round, ingest_ctx, kernels
from dflash_jax import kv as cache
from dflash_jax.attention import ABSENT
from dflash_jax.draft import context_kv, for_rounds
from dflash_jax.layers import rope_tables
from dflash_jax.shapes import abstract, init_draft

BLOCK = TINY.block_size
CONFIGS = {
    "full": TINY,
    "sliding_and_full": SLIDING,
    "causal_default": dataclasses.replace(SLIDING, layer_causal=(True, False)),
    "window_below_block": dataclasses.replace(TINY, layer_window=(2, 3)),
    "all_causal": dataclasses.replace(TINY, layer_causal=(True, True)),
}
block_forward, round_forward, append = map(jax.jit, (forward_block, forward_round, ingest_ctx))


def rows(count, width=TINY.hidden_size, seed=0):
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def close(got, expected):
    """Equal to 1e-5 of the largest value."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def poison(kv):
    """The cache with NaN in every slot that holds no context row."""

    def fill(leaf, pos):
        return jnp.where((pos == ABSENT)[:, None, :, None], jnp.nan, leaf)

    books = [kv.slots_of(i).pos for i in range(len(kv.k))]
    return kv.replace(
        k=[fill(leaf, pos) for leaf, pos in zip(kv.k, books, strict=True)],
        v=[fill(leaf, pos) for leaf, pos in zip(kv.v, books, strict=True)],
    )


# --- features ----------------------------------------------------------------------------------


def test_features_are_one_row_per_token_and_independent():
    draft, taps = tiny_draft(), rows(6, TINY.tap_size)
    features = np.asarray(ctx_features(draft, jnp.asarray(taps)))
    assert features.shape == (6, 32)
    one_by_one = [ctx_features(draft, jnp.asarray(taps[i : i + 1]))[0] for i in range(6)]
    close(np.stack(one_by_one), features)
    changed = taps.copy()
    changed[3] += 1
    other = np.asarray(ctx_features(draft, jnp.asarray(changed)))
    assert ((other != features).any(axis=1) == (np.arange(6) == 3)).all()


def test_features_are_the_norm_of_fc():
    draft, taps = tiny_draft(), rows(4, TINY.tap_size)
    wide = taps.astype(np.float64) @ np.asarray(draft.fc, np.float64).T
    wide /= np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    close(ctx_features(draft, jnp.asarray(taps)), wide * np.asarray(draft.hidden_norm))


def test_taps_of_another_target_are_refused_with_the_sizes():
    config = dataclasses.replace(TINY, target_layer_ids=(0, 1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"taps: expected width 160 \(5 taps .* 32\), found 240"):
        ctx_features(tiny_draft(config), jnp.zeros((3, 240)))


def test_forward_is_forward_block_of_the_features():
    draft, taps, noise = tiny_draft(), rows(6, TINY.tap_size), rows(BLOCK, seed=1)
    pos = jnp.arange(6 + BLOCK)
    taps, noise = jnp.asarray(taps), jnp.asarray(noise)
    expected = forward_block(draft, ctx_features(draft, taps, "xla"), noise, pos)
    np.testing.assert_array_equal(forward(draft, taps, noise, pos), expected)


# --- cached rounds -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_rounds_equal_the_uncached_forward_and_leave_no_trace(name):
    """30 rounds of random gains: same outputs as without a cache, unread slots full of NaN, and
    afterwards only context rows are held, equal to those made anew from the features.
    """
    config, draft, rng = CONFIGS[name], tiny_draft(CONFIGS[name]), np.random.default_rng(1)
    features, end = rows(130), 16
    kv = cache.allocate(config, 1, 130, F32, overhang=16)
    kv = append(draft, kv, features[:16], np.arange(16))
    for r in range(30):
        noise = rows(BLOCK, seed=100 + r)
        pos_block = np.arange(end, end + BLOCK)
        cached, kv = round_forward(draft, poison(kv), noise, pos_block)
        assert int(kv.len[0]) == end
        # Rows that are not there yet are ABSENT here, so that one program serves all rounds.
        pos = np.where(np.arange(130) < end, np.arange(130), ABSENT)
        pos = np.concatenate([pos, pos_block])
        close(cached, block_forward(draft, features, noise, pos))
        gain = rng.integers(1, BLOCK + 1)
        pos_new = np.arange(end, end + BLOCK)
        new = np.where(np.arange(BLOCK)[:, None] < gain, features[pos_new], np.nan)
        kv = append(draft, kv, new, pos_new, jnp.asarray([gain]))
        end += gain
    cached, kv = round_forward(draft, kv, noise, np.arange(end, end + BLOCK))
    close(cached, block_forward(draft, features[:end], noise, np.arange(end + BLOCK)))
    held_rows_are_those_of_the_features(draft, kv, features[:end])
    if name == "window_below_block":  # all layers slide: far fewer slots than rows went through
        assert kv.k[0].shape[2] < end / 2


def held_rows_are_those_of_the_features(draft, kv, features):
    config, total = draft.config, len(features)
    cos, sin = rope_tables(config.rope, config.head_dim, jnp.arange(total))
    for i, layer in enumerate(draft.layers):
        held = np.asarray(kv.slots_of(i).pos)[0]
        slots = np.flatnonzero(held != ABSENT)
        window = config.layer_window[i]
        if window is None or not kv.ring_layers[i]:
            assert sorted(held[slots]) == list(range(total))
        else:
            assert set(range(total - window + 1, total)) <= set(held[slots]) <= set(range(total))
        fresh = jax.jit(context_kv, static_argnums=0)(config, layer, features, cos, sin)
        for leaf, expected in zip((kv.k[i], kv.v[i]), fresh, strict=True):
            close(np.asarray(leaf)[0][:, slots].swapaxes(0, 1), np.asarray(expected)[held[slots]])


@pytest.mark.parametrize("precision", [None, "int8"])
def test_weights_laid_out_for_many_rounds_feed_the_drafter_alike(monkeypatch, precision):
    """As on a GPU: `fc` of 64 columns in a tile of 128, all layers' k and v rows in one matrix."""
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    config = dataclasses.replace(TINY, precision=precision)
    draft = random_tree(abstract(config, F32), 1, scale=30.0 if precision else 0.3)
    ready = for_rounds(draft)
    assert ready.fc.shape == (32, TINY.tap_size if precision else 128)
    assert ready.context_kv.shape == (2 * 2 * config.kv_size, 32)
    feed = jax.jit(partial(ingest_ctx, implementation="xla"))
    taps, pos = jnp.asarray(rows(5, TINY.tap_size)), jnp.arange(5)
    features = [ctx_features(d, taps, "xla") for d in (draft, ready)]
    close(*features)
    fed = [feed(d, cache.allocate(config, 1, 8, F32), features[0], pos) for d in (draft, ready)]
    jax.tree.map(np.testing.assert_array_equal, *fed)


@pytest.mark.parametrize("name", ["full", "sliding_and_full"])
def test_a_batch_equals_its_sequences_alone(name):
    """Three lengths side by side, each round another gain for each sequence."""
    config, draft = CONFIGS[name], tiny_draft(CONFIGS[name])
    gains = np.array([[9, 16, 1], [1, 4, 2], [4, 1, 3], [2, 2, 2], [3, 4, 1], [4, 4, 4]])
    features = np.stack([rows(60, seed=s) for s in range(3)])

    def play(which):
        kv = cache.allocate(config, len(which), 60, F32, overhang=16)
        end, outputs = np.zeros(len(which), int), []
        for r, gain in enumerate(gains[:, which]):
            width = 16 if r == 0 else BLOCK
            pos = end[:, None] + np.arange(width)
            new = features[np.array(which)[:, None], pos]
            kv = append(draft, kv, new, pos, gain)
            end = end + gain
            noise = np.stack([rows(BLOCK, seed=10 * r + s) for s in which])
            out, kv = round_forward(draft, kv, noise, end[:, None] + np.arange(BLOCK))
            outputs.append(np.asarray(out))
        return np.stack(outputs, axis=1)

    together = play([0, 1, 2])
    for s in range(3):
        close(together[s], play([s])[0])


@pytest.mark.parametrize("splits", [[40], [16, 24], [3, 5, 17, 15], [1] * 40])
def test_a_prompt_may_come_in_any_chunks(splits):
    draft, features = tiny_draft(SLIDING), jnp.asarray(rows(40))
    noise, pos_block = rows(BLOCK, seed=1), np.arange(40, 40 + BLOCK)
    kv, end = cache.allocate(SLIDING, 1, 64, F32), 0
    for count in splits:
        pos_new = jnp.arange(end, end + count)
        kv = append(draft, kv, features[end : end + count], pos_new)
        end += count
    got, _ = round_forward(draft, kv, noise, pos_block)
    close(got, block_forward(draft, features, noise, jnp.arange(40 + BLOCK)))


def test_compiled_and_eager_agree():
    draft, features, noise = tiny_draft(SLIDING), jnp.asarray(rows(20)), jnp.asarray(rows(BLOCK))
    pos = jnp.arange(20 + BLOCK)
    close(block_forward(draft, features, noise, pos), forward_block(draft, features, noise, pos))
    kv = cache.allocate(SLIDING, 1, 40, F32)
    kv = append(draft, kv, features, pos[:20])
    eager, compiled = (f(draft, kv, noise, pos[20:])[0] for f in (forward_round, round_forward))
    close(eager, compiled)


def test_one_sequence_needs_no_batch_axis():
    draft, features, noise = tiny_draft(), jnp.asarray(rows(7)), jnp.asarray(rows(BLOCK, seed=1))
    pos = jnp.arange(7 + BLOCK)
    batched = forward_block(draft, features[None], noise[None], pos[None])
    np.testing.assert_array_equal(forward_block(draft, features, noise, pos), batched[0])
    kv = cache.allocate(TINY, 1, 16, F32)
    one = ingest_ctx(draft, kv, features, pos[:7])
    many = ingest_ctx(draft, kv, features[None], pos[None, :7])
    jax.tree.map(np.testing.assert_array_equal, one, many)
    got, _ = forward_round(draft, one, noise, pos[7:])
    expected, _ = forward_round(draft, many, noise[None], pos[None, 7:])
    np.testing.assert_array_equal(got, expected[0])


def test_a_shorter_block_is_another_block():
    """Fewer rows at run time: equal to the uncached forward of that many rows."""
    draft, features, noise = tiny_draft(), jnp.asarray(rows(7)), jnp.asarray(rows(2, seed=1))
    pos = jnp.arange(7 + 2)
    kv = append(draft, cache.allocate(TINY, 1, 16, F32), features, pos[:7])
    got, _ = round_forward(draft, kv, noise, pos[7:])
    close(got, block_forward(draft, features, noise, pos))


def test_a_block_wider_than_the_slack_is_refused():
    draft, kv = tiny_draft(), cache.allocate(TINY, 1, 16, F32)
    with pytest.raises(ValueError, match=r"block: expected at most 5 rows \(slack\), found 6"):
        forward_round(draft, kv, jnp.zeros((6, 32)), jnp.arange(6))


def test_bf16_runs_in_bf16_and_stays_near_f32():
    wide = tiny_draft(SLIDING)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    features, noise, pos = rows(20), rows(BLOCK, seed=1), jnp.arange(20 + BLOCK)
    expected = np.asarray(block_forward(wide, features, noise, pos))
    features = jnp.asarray(features, jnp.bfloat16)
    kv = cache.allocate(SLIDING, 1, 40, half.dtype)
    kv = append(half, kv, features, pos[:20])
    cached, kv = round_forward(half, kv, noise, pos[20:])
    uncached = block_forward(half, features, noise, pos)
    assert cached.dtype == uncached.dtype == kv.k[0].dtype == jnp.bfloat16
    for got in (cached, uncached):
        error = np.abs(np.asarray(got, np.float32) - expected)
        assert error.max() < 0.05 * np.abs(expected).max()


# --- masks, windows, positions -----------------------------------------------------------------


def one_layer(**changes):
    base = dataclasses.replace(
        TINY, num_hidden_layers=1, layer_causal=(False,), layer_window=(None,)
    )
    return tiny_draft(dataclasses.replace(base, **changes))


def changed_block_rows(draft, *, ctx=20, alter_ctx=None, alter_block=None):
    """Which block rows of the output change when one context or block row does."""
    features, noise, pos = rows(ctx), rows(BLOCK, seed=1), jnp.arange(ctx + BLOCK)
    before = np.asarray(block_forward(draft, features, noise, pos))
    if alter_ctx is not None:
        features[alter_ctx] += 1
    if alter_block is not None:
        noise[alter_block] += 1
    after = np.asarray(block_forward(draft, features, noise, pos))
    return np.flatnonzero((before != after).any(axis=1)).tolist()


@pytest.mark.parametrize("window", [None, 8], ids=["full", "sliding"])
def test_a_bidirectional_block_sees_its_later_rows(window):
    draft = one_layer(layer_window=(window,))
    assert changed_block_rows(draft, alter_block=3) == [0, 1, 2, 3]


@pytest.mark.parametrize("window", [None, 8], ids=["full", "sliding"])
def test_a_causal_block_does_not(window):
    draft = one_layer(layer_window=(window,), layer_causal=(True,))
    assert changed_block_rows(draft, alter_block=3) == [3]
    assert changed_block_rows(draft, alter_block=0) == [0, 1, 2, 3]


def test_a_window_below_the_block_cuts_both_ways():
    draft = one_layer(layer_window=(2,))
    assert changed_block_rows(draft, alter_block=1) == [0, 1, 2]
    assert changed_block_rows(draft, alter_block=3) == [2, 3]


@pytest.mark.parametrize("causal", [False, True])
def test_the_window_ends_at_the_row_window_minus_one_back(causal):
    """Window 8, block row 0 at position 20: context rows 0..12 are out of sight, 13 is not."""
    draft = one_layer(layer_window=(8,), layer_causal=(causal,))
    for row in range(13):
        assert changed_block_rows(draft, alter_ctx=row) == []
    assert changed_block_rows(draft, alter_ctx=13) == [0]
    assert changed_block_rows(draft, alter_ctx=14) == [0, 1]


def test_full_layers_see_the_whole_context():
    assert changed_block_rows(one_layer(), alter_ctx=0) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["full", "window_below_block", "sliding_and_full"])
def test_only_position_differences_count(name):
    """Far beyond any training length: everything shifted by 5000 gives the same block."""
    config, draft = CONFIGS[name], tiny_draft(CONFIGS[name])
    features, noise = rows(30), rows(BLOCK, seed=1)

    def play(shift):
        kv = cache.allocate(config, 1, 64, F32)
        kv = kv.replace(len=kv.len + shift, floor=kv.floor + shift)
        for start in range(0, 30, 5):
            kv = append(draft, kv, features[start : start + 5], np.arange(5) + start + shift)
        return round_forward(draft, kv, noise, np.arange(30, 30 + BLOCK) + shift)[0]

    np.testing.assert_allclose(play(5000), play(0), atol=1e-4 * float(np.abs(play(0)).max()))


# --- weights -----------------------------------------------------------------------------------


def test_every_weight_is_used():
    draft, taps, noise = tiny_draft(SLIDING), rows(6, TINY.tap_size), rows(BLOCK, seed=1)
    run = jax.jit(partial(forward, noise_emb=noise, pos=jnp.arange(6 + BLOCK)))
    before = run(draft, taps)
    leaves, tree = jax.tree.flatten(draft)
    assert len(leaves) == 3 + 8 * 2
    for i, leaf in enumerate(leaves):
        changed = jax.tree.unflatten(tree, [*leaves[:i], jnp.zeros_like(leaf), *leaves[i + 1 :]])
        assert not np.allclose(before, run(changed, taps), atol=1e-4)


def test_fresh_drafters_have_the_abstract_shapes():
    draft = init_draft(TINY, jax.random.key(0), jnp.dtype(jnp.bfloat16))
    shapes = abstract(TINY, jnp.dtype(jnp.bfloat16))
    assert jax.tree.structure(draft) == jax.tree.structure(shapes)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(draft)] == [
        (s.shape, s.dtype) for s in jax.tree.leaves(shapes)
    ]
    assert float(jnp.std(draft.fc.astype(jnp.float32))) == pytest.approx(0.02, rel=0.1)
    assert (draft.norm == 1).all()


def test_random_models_for_tests_are_reproducible():
    first, second = (random_tree(abstract(TINY, F32), 5) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
