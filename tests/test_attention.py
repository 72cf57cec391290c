"""Block attention against a plain loop over rows, heads and keys."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels_attention import close, later_rounds, on_a_tree, place_of
from test_kernels_attention import problem as block_problem
from test_kernels_attention import reference as attend

from dflash_jax.attention import (
    ABSENT,
    NARROW,
    append_and_attend,
    attention_mask,
    block_attention,
)
from dflash_jax.kv import QuantizedRows
from dflash_jax.tree import MOST_NODES


def by_hand(q, k, v, q_pos, k_pos, causal, window):
    """Softmax over the visible keys alone, one row and head at a time, in float64."""
    batch, rows, heads, dim = q.shape
    per_kv = heads // k.shape[1]
    out = np.zeros((batch, rows, heads, dim))
    for b in range(batch):
        for i in range(rows):
            sees = [
                s
                for s, j in enumerate(k_pos[b])
                if j != ABSENT
                and not (causal and j > q_pos[b, i])
                and (window is None or abs(q_pos[b, i] - j) < window)
            ]
            for h in range(heads):
                keys = k[b, h // per_kv, sees].astype(np.float64)
                scores = keys @ q[b, i, h].astype(np.float64) / np.sqrt(dim)
                weights = np.exp(scores - scores.max())
                out[b, i, h] = weights / weights.sum() @ v[b, h // per_kv, sees]
    return out.reshape(batch, rows, heads * dim)


def problem(batch=2, rows=3, heads=4, kv_heads=2, keys=9, dim=8):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(batch, rows, heads, dim)).astype(np.float32)
    k, v = rng.normal(size=(2, batch, kv_heads, keys, dim)).astype(np.float32)
    k_pos = np.tile(np.arange(keys, dtype=np.int32), (batch, 1))
    q_pos = k_pos[:, -rows:]
    return q, k, v, q_pos, k_pos


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_a_plain_loop(causal, window, kv_heads):
    q, k, v, q_pos, k_pos = problem(kv_heads=kv_heads)
    args = [jnp.asarray(x) for x in (q, k, v, q_pos, k_pos)]
    got = block_attention(*args, causal=causal, window=window)
    expected = by_hand(q, k, v, q_pos, k_pos, causal, window)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_empty_slots_are_never_read_whatever_they_hold():
    q, k, v, q_pos, k_pos = problem()
    k_pos[0, [1, 4]] = ABSENT
    k_pos[1, 2] = ABSENT
    expected = by_hand(q, k, v, q_pos, k_pos, False, None)
    for hole in (np.nan, np.inf, -np.inf):
        for leaf in (k, v):
            leaf[k_pos[:, None].repeat(2, 1) == ABSENT] = hole
        args = [jnp.asarray(x) for x in (q, k, v, q_pos, k_pos)]
        got = block_attention(*args, causal=False)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_row_that_sees_nothing_is_finite():
    q, k, v, q_pos, k_pos = problem()
    k_pos[0] = ABSENT
    args = [jnp.asarray(x) for x in (q, k, v, q_pos, k_pos)]
    assert np.isfinite(block_attention(*args, causal=False)).all()


def test_order_of_slots_does_not_matter():
    q, k, v, q_pos, k_pos = problem()
    order = np.random.default_rng(1).permutation(k.shape[2])
    straight = [jnp.asarray(x) for x in (q, k, v, q_pos, k_pos)]
    shuffled = [jnp.asarray(x) for x in (q, k[:, :, order], v[:, :, order], q_pos, k_pos[:, order])]
    for causal, window in ((True, None), (False, 3)):
        np.testing.assert_allclose(
            block_attention(*straight, causal=causal, window=window),
            block_attention(*shuffled, causal=causal, window=window),
            rtol=1e-5,
            atol=1e-6,
        )


def mask(q, k, **kind):
    return np.asarray(attention_mask(jnp.asarray(q), jnp.asarray(k), **kind)).astype(int).tolist()


def test_window_counts_keys_both_ways_unless_causal():
    positions = [0, 1, 2, 3]
    assert mask(positions, positions, causal=False, window=2) == [
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [0, 1, 1, 1],
        [0, 0, 1, 1],
    ]
    assert mask(positions, positions, causal=True, window=2) == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]


@pytest.mark.parametrize("causal", [False, True])
def test_leftmost_visible_key_is_window_minus_one_back(causal):
    window, row = 8, 20
    seen = mask([row], list(range(40)), causal=causal, window=window)[0]
    assert seen.index(1) == row - (window - 1)
    assert sum(seen) == (window if causal else 2 * window - 1)


def test_bf16_scores_and_softmax_are_f32():
    q, k, v, q_pos, k_pos = problem(keys=64)
    half = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    got = block_attention(*half, jnp.asarray(q_pos), jnp.asarray(k_pos), causal=False)
    assert got.dtype == jnp.bfloat16
    rounded = [np.asarray(x, np.float32) for x in half]
    expected = by_hand(*rounded, q_pos, k_pos, False, None)
    # Weights and result are rounded to bf16, nothing else.
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=2**-7)


# --- draft trees --------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    ("nodes", "spine", "shape"),
    [
        (1, 1, dict(heads=4, kv_heads=2, dim=32)),
        (16, 16, dict(heads=4, kv_heads=4, dim=32)),
        (16, None, dict(heads=9, kv_heads=3, dim=64, normed=False)),
        (24, None, dict(heads=4, kv_heads=2, dim=32)),
        (32, 4, dict(heads=8, kv_heads=2, dim=128)),
    ],
)
def test_each_node_of_a_tree_is_the_last_row_of_the_chain_of_its_path(nodes, spine, shape, window):
    """Over caches of different lengths, NaN in their empty slots."""
    kind = {"causal": True, "window": window}
    problem = block_problem((21, 3), rows=nodes, slots=64, **shape)
    qkv, norms, eps, place, *caches = args = on_a_tree(problem, seed=nodes, spine=spine)
    tree, slots = attend(*args, **kind)[0], np.arange(64)
    depth = np.asarray(place.q_pos - place.slot[:, None])
    longest = depth.max() + 1
    for node in range(nodes):
        # Rows behind the node repeat it: no earlier row of a chain sees them.
        rows = np.where(np.arange(longest) < depth[:, node, None], np.arange(longest), node)
        q_pos = np.asarray(place.slot)[:, None] + np.arange(longest)
        k_pos = np.where(slots <= q_pos[:, -1:], slots, ABSENT)
        chain = place_of(q_pos, k_pos, place.slot, place.slot, shape["dim"])
        ordered = jnp.take_along_axis(qkv, jnp.asarray(rows)[:, :, None], axis=1)
        attended = attend(ordered, norms, eps, chain, *caches, **kind)[0]
        for b in range(2):
            close(tree[b, node], attended[b, depth[b, node]])


@pytest.mark.parametrize(
    ("dtype", "window"), [(jnp.float32, None), (jnp.bfloat16, None), (jnp.bfloat16, 11)]
)
def test_a_leaf_rounds_as_its_row_in_a_later_round(dtype, window):
    for leaf, later in later_rounds(attend, dtype, window, (9, 29, 32)):
        np.testing.assert_array_equal(leaf, later)


@pytest.mark.parametrize(("rows", "causal"), [(33, True), (8, False)])
def test_trees_are_of_few_nodes_in_causal_blocks(rows, causal):
    qkv, norms, eps, place, *caches = on_a_tree(block_problem((5,), rows=rows, slots=64))
    assert MOST_NODES <= NARROW
    message = f"at most 32 rows of a causal block, found {rows} rows, causal={causal}"
    with pytest.raises(ValueError, match=message):
        append_and_attend(qkv, norms, eps, place, *caches, causal=causal, window=None)


@pytest.mark.parametrize("found", ["a ring", "int8"])
def test_trees_are_in_order_of_position_and_in_floats(found):
    qkv, norms, eps, place, *caches = on_a_tree(block_problem((5,), rows=8, slots=64))
    if found == "int8":
        caches = [QuantizedRows(x.astype(jnp.int8), jnp.ones((*x.shape[:-1], 1))) for x in caches]
    place = place.replace(ring=found == "a ring")
    with pytest.raises(ValueError, match=f"order of position, found {found}"):
        append_and_attend(qkv, norms, eps, place, *caches, causal=True, window=None)
