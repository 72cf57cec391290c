"""Which drafts are accepted: the longest prefix that the target itself would have said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import dspark_accept_prefix
from dflash_jax.config import DSparkHarvest


def accepted(cand, vam, vt):
    return int(dspark_accept_prefix(jnp.asarray(cand), jnp.asarray(vam), vt))


@pytest.mark.parametrize(
    ("vam", "vt", "m"),
    [
        ([6, 7, 8, 9], 4, 3),  # all
        ([6, 7, 0, 9], 4, 2),
        ([0, 7, 8, 9], 4, 0),  # a miss in front hides later hits
        ([6, 0, 8, 9], 4, 1),
        ([6, 7, 8, 9], 3, 2),  # rows from vt on are not looked at
        ([6, 7, 8, 9], 2, 1),
        ([6, 7, 8, 9], 1, 0),
    ],
)
def test_accepts_the_agreeing_prefix(vam, vt, m):
    assert accepted([5, 6, 7, 8], vam, vt) == m


def test_batches_have_a_width_a_row():
    cand = jnp.tile(jnp.asarray([5, 6, 7, 8]), (3, 1))
    vam = jnp.tile(jnp.asarray([6, 7, 8, 9]), (3, 1))
    got = dspark_accept_prefix(cand, vam, jnp.asarray([1, 2, 4]))
    assert got.tolist() == [0, 1, 3]


def test_equals_a_plain_loop_on_random_rounds():
    rng = np.random.default_rng(0)
    cand, vam = rng.integers(0, 2, (2, 500, 8))
    vt = rng.integers(1, 9, 500)
    expected = []
    for row in range(500):
        m = 0
        while m < vt[row] - 1 and cand[row, m + 1] == vam[row, m]:
            m += 1
        expected.append(m)
    got = jax.jit(dspark_accept_prefix)(jnp.asarray(cand), jnp.asarray(vam), jnp.asarray(vt))
    assert got.tolist() == expected
    assert max(expected) >= 4


@pytest.mark.parametrize(
    ("harvest", "vt", "m"), [(DSparkHarvest.DSPARK, 8, 7), (DSparkHarvest.DFLASH, 7, 0)]
)
def test_harvest_alignment(harvest, vt, m):
    """A drafter whose row r says anchor + r + 1 is right when shifted, wrong when mask-filled."""
    anchor, block = 1000, 8
    rows = [anchor + r + 1 for r in range(block)]
    vam = list(range(1001, 1009))
    drafts = rows[harvest.first_row :]
    assert len(drafts) == harvest.drafts(block)
    cand = [anchor, *drafts][:8]
    assert accepted(cand, vam[: len(cand)], vt) == m
