"""Who reads what in `attention_mosaic`: integers, of shapes and of a block's place in its cache.

Workers are the warpgroups of a cluster, those of block `i` being `i`, `i + SPLITS`, ..; tile `t`,
`KEYS` slots of a cache, always goes to worker `t % workers`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.integers import round_up

SPLITS = 8
"""Blocks of a cluster: the most that every Hopper can place."""
KEYS = 64
"""Rows of a tile."""
QUERIES = 64
"""Query rows of a block, padding included."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """Static numbers of one call; tree: whether rows are a draft tree's nodes; parts: of the
    projection, 0 where it comes summed.
    """

    batch: int
    rows: int
    heads: int
    kv_heads: int
    dim: int
    slots: int
    warpgroups: int
    stages: int
    normed: bool
    eps: float
    causal: bool
    window: int | None
    ring: bool
    tree: bool
    parts: int
    interpret: Any

    @property
    def groups(self) -> int:
        """Query heads of a kv head."""
        return self.heads // self.kv_heads

    @property
    def pitch(self) -> int:
        """Query rows from one head to the next: copies begin at multiples of 128 bytes."""
        return round_up(self.rows, 8)

    @property
    def held(self) -> int:
        """Query heads of one block: as many as fit, shared out evenly."""
        fit = QUERIES // self.pitch
        return max(n for n in range(1, self.groups + 1) if self.groups % n == 0 and n <= fit)

    @property
    def half(self) -> int:
        return self.dim // 2

    @property
    def workers(self) -> int:
        """Warpgroups of a cluster."""
        return self.warpgroups * SPLITS

    @property
    def columns(self) -> int:
        """Of the head, that one worker merges: no fewer than a product's layout takes."""
        return max(8, self.dim // self.workers)


@dataclasses.dataclass(frozen=True)
class Share:
    """What one worker of a cluster reads.

    slot: the block's rows go there; first, limit: slots that may hold visible rows, own ones among
    them; begin: its first tile; steps: how many; owns: whether any of them holds own rows.
    """

    rows: int
    workers: int
    slot: jax.Array
    first: jax.Array
    limit: jax.Array
    begin: jax.Array
    steps: jax.Array
    owns: jax.Array

    def tile(self, step):
        return self.begin + step * self.workers

    def owned(self, step):
        """Whether the tile of this step holds own rows."""
        start = self.tile(step) * KEYS
        return (start < self.slot + self.rows) & (start + KEYS > self.slot)


def share_of(spec: Spec, slot, end, worker) -> Share:
    """What a worker reads; `slot`, `end`: as in `BlockPlace`, of one sequence."""
    # Inside the cache whatever was given: a slice update moves back where its rows do not fit.
    slot, end = jnp.minimum(slot, spec.slots - spec.rows), jnp.minimum(end, spec.slots)
    first, limit = jnp.int32(0), jnp.maximum(end, slot + spec.rows)
    if spec.window is not None and not spec.ring:
        # Positions ascend from slot to slot, by one or more.
        first = jnp.maximum(slot - (spec.window - 1), 0)
    workers, start = jnp.int32(spec.workers), _div(first, KEYS)
    begin = start + jax.lax.rem(worker + workers - jax.lax.rem(start, workers), workers)
    left = jnp.maximum(_div(limit + KEYS - 1, KEYS) - begin, 0)
    # Own rows lie in one tile or two neighbouring ones: no two of one block.
    low, high = _div(slot, KEYS), _div(slot + spec.rows - 1, KEYS)
    owns = (jax.lax.rem(low, workers) == worker) | (jax.lax.rem(high, workers) == worker)
    steps = _div(left + workers - 1, spec.workers)
    return Share(spec.rows, spec.workers, slot, first, limit, begin, steps, owns)


def maker_of(spec: Spec, slot, end, split):
    """The warpgroup of block `split` that makes its query rows: not the one that sums own parts."""
    if not spec.parts or spec.warpgroups == 1:
        return 0
    return jnp.where(share_of(spec, slot, end, split).owns, 1, 0)


def _div(a, b: int):
    return jax.lax.div(a, jnp.int32(b))
