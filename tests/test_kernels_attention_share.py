"""Who reads what in the Hopper attention kernel: integers, so on any device."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import kernels

share = kernels.kernel("attention_share")
KEYS, SPLITS = share.KEYS, share.SPLITS
EDGES = (0, 1, 7, 52, 53, 63, 64, 65, 120, 500, 512, 1000, 1023, 1024, 1090, 2136, 2188, 2200, 9000)
PLACES = np.asarray([*itertools.product(EDGES, EDGES)], np.int32)
"""Where a block begins and where the rows before it end, inside of the cache or not."""


def spec_of(**more):
    shape = dict(batch=1, rows=12, heads=4, kv_heads=1, dim=64, slots=2200, warpgroups=2, stages=2)
    kind = dict(normed=False, eps=0.0, causal=True, window=None, ring=False)
    rest = dict(tree=False, parts=0)
    return share.Spec(**shape | kind | rest | more, interpret=False)


@pytest.fixture(
    scope="module",
    params=[
        dict(),
        dict(rows=1, warpgroups=1),
        dict(rows=64, parts=4),
        dict(rows=5, window=1, parts=2),
        dict(rows=64, window=700, parts=2),
        dict(rows=5, window=90, parts=2, warpgroups=1),
        dict(window=90, ring=True, parts=2),
        dict(window=6, ring=True, slots=24),
    ],
    ids=lambda kind: "-".join(f"{k}{v}" for k, v in kind.items()) or "plain",
)
def dealt(request):
    """Of every place: slots `[places, slots]`, tiles `[places, workers, steps]` of each worker."""
    spec = spec_of(**request.param)
    workers, splits = jnp.arange(spec.workers), jnp.arange(SPLITS)
    steps = jnp.arange(-(-spec.slots // (KEYS * spec.workers)) + 1)

    def one(slot, end, worker):
        mine = share.share_of(spec, slot, end, worker)
        numbers = dict(slot=mine.slot, first=mine.first, limit=mine.limit, owns=mine.owns)
        return numbers | dict(
            read=steps < mine.steps, tile=mine.tile(steps), owned=mine.owned(steps)
        )

    def every(slot, end):
        maker = jax.vmap(lambda x: jnp.asarray(share.maker_of(spec, slot, end, x)))(splits)
        return jax.vmap(lambda x: one(slot, end, x))(workers) | dict(maker=maker)

    found = jax.tree.map(np.asarray, jax.jit(jax.vmap(every))(*PLACES.T))
    own = np.minimum(PLACES[:, :1], spec.slots - spec.rows)
    return SimpleNamespace(spec=spec, own=own, **found)


def test_every_tile_that_holds_visible_rows_is_read_once_and_no_other(dealt):
    spec, slots = dealt.spec, np.arange(-(-dealt.spec.slots // KEYS) * KEYS)
    present = np.maximum(np.minimum(PLACES[:, 1:], spec.slots), dealt.own + spec.rows)
    visible = slots < present
    if spec.window is not None and not spec.ring:
        visible &= slots > dealt.own - spec.window
    for worker in range(spec.workers):
        first, limit = dealt.first[:, worker, None], dealt.limit[:, worker, None]
        np.testing.assert_array_equal((first <= slots) & (slots < limit), visible)
    read = np.zeros((len(PLACES), len(slots) // KEYS), int)
    place, *_ = np.nonzero(dealt.read)
    np.add.at(read, (place, dealt.tile[dealt.read]), 1)
    np.testing.assert_array_equal(read, visible.reshape(*read.shape, KEYS).any(-1))


def test_a_tile_always_goes_to_the_same_worker_in_the_same_order(dealt):
    """So that a row's sums do not depend on where its block began."""
    workers = np.arange(dealt.spec.workers)[:, None]
    assert (dealt.tile % dealt.spec.workers == workers).all()
    assert (np.diff(dealt.tile) == dealt.spec.workers).all()


def test_own_rows_lie_in_two_blocks_at_most_and_no_two_tiles_of_one(dealt):
    spec, start = dealt.spec, dealt.tile * KEYS
    own = dealt.own[:, None]
    assert (dealt.slot[..., None] == own).all() and (own >= 0).all()
    holds = (start < own + spec.rows) & (own < start + KEYS)
    np.testing.assert_array_equal(dealt.owned, holds)
    np.testing.assert_array_equal(dealt.owns, (holds & dealt.read).any(-1))
    by_block = (holds & dealt.read).reshape(len(PLACES), spec.warpgroups, SPLITS, -1).sum((1, 3))
    assert by_block.max() == 1
    tiles = (dealt.own[:, 0] + spec.rows - 1) // KEYS - dealt.own[:, 0] // KEYS + 1
    np.testing.assert_array_equal(by_block.sum(-1), tiles)
    assert tiles.max() <= 2


def test_who_makes_the_query_rows_does_not_sum_own_parts(dealt):
    if not dealt.spec.parts or dealt.spec.warpgroups == 1:
        assert not dealt.maker.any()
        return
    makers = dealt.maker * SPLITS + np.arange(SPLITS)
    assert not np.take_along_axis(dealt.owns, makers, axis=1).any()
    assert set(np.unique(dealt.maker)) == {0, 1}


@pytest.mark.parametrize("groups", [1, 3, 4, 7, 16])
def test_a_block_holds_as_many_heads_as_fit_and_each_column_is_merged_once(groups):
    for rows, dim, warpgroups in itertools.product(range(1, 65), (64, 128), (1, 2)):
        spec = spec_of(rows=rows, heads=3 * groups, kv_heads=3, dim=dim, warpgroups=warpgroups)
        assert spec.pitch % 8 == 0 and 0 <= spec.pitch - rows < 8
        fit = [
            n for n in range(1, groups + 1) if n * spec.pitch <= share.QUERIES and groups % n == 0
        ]
        assert spec.held == fit[-1]
        assert dim % spec.columns == 0 and spec.columns >= max(8, dim / spec.workers)
