"""The drafter's KV cache: context rows only, appended in committed order.

Full layers keep every row. Sliding layers read their last `window - 1` rows and keep `window + b`
(so that a tail may be cut up to a block back); theirs is a ring with room for two appends more,
which remembers the position in each slot. A slot whose position is ABSENT may hold anything.

Rows are floats or, in an int8 cache, `QuantizedRows`, made as rows are written (k after its norm
and rope). Every reader sees what was written.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer
from jax.sharding import Mesh

from dflash_jax import kernels, sharding
from dflash_jax.config import DFlashConfig
from dflash_jax.integers import round_up
from dflash_jax.kernels import Implementation

ABSENT = -1
"""Position of a cache slot that holds nothing: attention never reads it, NaN included."""
SLOT_STEP = 8
"""A cache has a multiple of so many slots: the rows that bulk copies on a Hopper GPU go by."""
DraftKVDtype = Literal["auto", "int8"]
"""What a draft KV holds: floats of the drafter's own dtype, or int8 and scales."""
INT8_MOST = 127
"""The int8 that a row's largest magnitude becomes."""


class QuantizedRows(struct.PyTreeNode):
    """Rows as int8 `values [..., D]` and f32 `scales [..., 1]`, one a row and head: `q * s`.

    Symmetric: a scale is the row's largest magnitude / 127. That of a row that is not finite is not
    either, nor then is any number of the row.
    """

    values: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the rows."""
        return self.values.shape


Rows = jax.Array | QuantizedRows
Held = TypeVar("Held", bound=Rows)
"""The kind of cache, which a write keeps."""


def quantize_rows(rows: jax.Array) -> QuantizedRows:
    """Floats `[..., D]` as int8, halves to even; the same bits in whatever program."""
    x = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    # Finite, so that 0 stays 0. Products alone: a compiler may make one of a quotient, or not.
    inverse = jnp.minimum(INT8_MOST / largest, jnp.finfo(jnp.float32).max)
    values = jnp.clip(jnp.rint(x * inverse), -INT8_MOST, INT8_MOST).astype(jnp.int8)
    return QuantizedRows(values, largest * (1 / INT8_MOST))


def held_dtype(asked: DraftKVDtype, own: jnp.dtype) -> jnp.dtype:
    """What `allocate` is told for a drafter of dtype `own`."""
    return own if asked == "auto" else jnp.dtype(asked)


def read_rows(rows: Rows, dtype: jnp.dtype) -> jax.Array:
    """The rows as floats."""
    if isinstance(rows, QuantizedRows):
        rows = rows.values.astype(jnp.float32) * rows.scales
    return rows.astype(dtype)


def rows_as(leaf: Rows, rows: Rows) -> Rows:
    """The rows in the form in which `leaf` holds its own; int8 as they are where it holds int8."""
    if not isinstance(leaf, QuantizedRows):
        return read_rows(rows, leaf.dtype)
    return rows if isinstance(rows, QuantizedRows) else quantize_rows(rows)


class Slots(struct.PyTreeNode):
    """Which absolute position each slot of a kind of layer holds.

    pos: `[B, slots]`, ABSENT where nothing is. next: `[B]`, the slot the next row goes to.
    """

    pos: jax.Array
    next: jax.Array
    ring: bool = struct.field(pytree_node=False, default=False)


class DraftKV(struct.PyTreeNode):
    """Per-layer K (normed, roped) and V (raw) of the context rows.

    k, v: rows a layer, `[B, kv_heads, slots, D]`. len: `[B]`, rows committed so far.
    floor: `[B]`, first context row that exists. full, ring: the slot books of the two kinds of
    layer; `ring` is None where no layer is bounded by its window. ring_rows: the latest rows a ring
    always holds. slack: the most rows of one append or block.
    """

    k: list[Rows]
    v: list[Rows]
    len: jax.Array
    floor: jax.Array
    full: Slots
    ring: Slots | None
    ring_layers: tuple[bool, ...] = struct.field(pytree_node=False)
    ring_rows: int = struct.field(pytree_node=False)
    capacity: int = struct.field(pytree_node=False)
    slack: int = struct.field(pytree_node=False)

    def slots_of(self, layer: int) -> Slots:
        """The slot book that layer `layer` follows."""
        return self.ring if self.ring is not None and self.ring_layers[layer] else self.full


def allocate(
    config: DFlashConfig,
    batch: int,
    capacity: int,
    dtype: jnp.dtype,
    overhang: int = 0,
    mesh: Mesh | None = None,
) -> DraftKV:
    """An empty cache for `capacity` context rows a sequence; of dtype int8, of `QuantizedRows`.

    One block or per-round append may bring block_size + 1 rows (`slack`). `overhang`, where
    larger, leaves that many slots past capacity for the padding rows of a prompt's last chunk.
    `mesh`: the drafter's, to split the cache over.
    """
    sharding.check_batch(mesh, batch)
    slack = config.block_size + 1
    full_slots = round_up(capacity + max(slack, overhang), SLOT_STEP)
    windows = [w for w in config.layer_window if w is not None]
    ring_rows = max(windows, default=0) + config.block_size
    ring_slots = round_up(ring_rows + 2 * slack, SLOT_STEP) if windows else full_slots
    bounded = ring_slots < full_slots
    ring_layers = tuple(bounded and w is not None for w in config.layer_window)
    heads, dim = config.num_key_value_heads, config.head_dim

    def rows(slots: int) -> Rows:
        values = jnp.zeros((batch, heads, slots, dim), dtype)
        if dtype != jnp.int8:
            return values
        return QuantizedRows(values, jnp.zeros((batch, heads, slots, 1), jnp.float32))

    def leaves() -> list[Rows]:
        return [rows(ring_slots if ring else full_slots) for ring in ring_layers]

    def book(slots: int, ring: bool) -> Slots:
        absent = jnp.full((batch, slots), ABSENT, jnp.int32)
        return Slots(pos=absent, next=jnp.zeros((batch,), jnp.int32), ring=ring)

    kv = DraftKV(
        k=leaves(),
        v=leaves(),
        len=jnp.zeros((batch,), jnp.int32),
        floor=jnp.zeros((batch,), jnp.int32),
        full=book(full_slots, ring=False),
        ring=book(ring_slots, ring=True) if bounded else None,
        ring_layers=ring_layers,
        ring_rows=ring_rows,
        capacity=capacity,
        slack=slack,
    )
    return sharding.constrain(kv, mesh, sharding.cache_specs(kv, config, mesh))


def check_room(kv: DraftKV, rows: int) -> None:
    """Refuse an append past capacity (ValueError) wherever the length is a concrete number.

    `dynamic_update_slice` would shift such a write silently. Inside a compiled loop the loop's
    own bound keeps the law.
    """
    if isinstance(kv.len, Tracer):
        return
    longest = int((kv.len - kv.floor).max())
    if longest + rows > kv.capacity:
        raise ValueError(
            f"draft KV: expected at most {kv.capacity} rows, found {longest} + {rows} new ones"
        )


def reserve(slots: Slots, rows: int) -> jax.Array:
    """First slot `[B]` of the next `rows` contiguous ones; a ring starts over when they don't fit.

    Starting over overwrites only rows older than `ring_rows`: twice `slack` is to spare.
    """
    if not slots.ring:
        return slots.next
    return jnp.where(slots.next + rows > slots.pos.shape[1], 0, slots.next)


def mark(slots: Slots, slot: jax.Array, pos: jax.Array) -> jax.Array:
    """`slots.pos` with positions `pos [B, rows]` written from `slot [B]` on.

    Written as a choice for every slot: such choices become one GPU kernel with each other and with
    what reads them, where updates in place are one each, and a copy where the old book lives on.
    """
    row = jnp.arange(slots.pos.shape[1])[None] - slot[:, None]
    last = pos.shape[1] - 1
    written = jnp.take_along_axis(pos, jnp.clip(row, 0, last), axis=1, mode="promise_in_bounds")
    return jnp.where((row >= 0) & (row <= last), written, slots.pos)


def context_end(slots: Slots, slot: jax.Array) -> jax.Array:
    """First slot `[B]` past all context rows, for a block that goes to `slot [B]`.

    A ring that has turned is used to its end.
    """
    if not slots.ring:
        return slot
    used = jnp.where(slots.pos != ABSENT, jnp.arange(1, slots.pos.shape[1] + 1), 0)
    return jnp.max(used, axis=1).astype(jnp.int32)


def write_rows(leaf: Held, rows: Rows, slot: jax.Array) -> Held:
    """`leaf [B, kv, slots, D]` with `rows [B, rows, kv, D]` written from `slot [B]` on."""

    def write(held: jax.Array, new: jax.Array) -> jax.Array:
        return write_at(held, new.swapaxes(1, 2), slot, axis=2)

    return jax.tree.map(write, leaf, rows_as(leaf, rows))


def write_at(buffer: jax.Array, values: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    """`buffer [B, ...]` with `values [B, ...]` written from `start [B]` on along `axis`, in place.

    One sequence is a `dynamic_update_slice`. Several at different offsets are its vmap (a scatter):
    measured, XLA updates that in place inside a loop too, where a chain of one slice update a
    sequence made it copy whole caches.
    """

    def write(b: jax.Array, v: jax.Array, s: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(b, v, s, axis - 1)

    if buffer.shape[0] == 1:
        return jax.lax.dynamic_update_slice_in_dim(buffer, values, start[0], axis)
    return jax.vmap(write)(buffer, values, start)


def keep_path(
    leaves: Sequence[jax.Array],
    slot: jax.Array,
    path: jax.Array,
    implementation: Implementation = None,
) -> list[jax.Array]:
    """Caches `[B, kv, slots, D]` with row `slot + path[:, i]` moved to `slot + i`, all in place.

    path `[B, n]`: of the rows written last from `slot [B]` on, those to keep, ascending but for
    repetitions. The kernel moves those of all layers in one launch. Raises NotImplementedError as
    `kernels.resolve` does.
    """
    if kernels.resolve(implementation) == "pallas":
        return kernels.kernel("keep_path").keep_path(leaves, slot, path)

    def move(leaf: jax.Array) -> jax.Array:
        index = (slot[:, None] + path)[:, None, :, None]
        return write_at(leaf, jnp.take_along_axis(leaf, index, axis=2), slot, axis=2)

    return [move(leaf) for leaf in leaves]


def keep_last(slots: Slots, new_pos: jax.Array, rows: int) -> tuple[Slots, jax.Array]:
    """Compaction for appends wider than a ring's slack (a prompt chunk).

    Of old and new rows together the last `rows` by position move to the front, in order. Returns
    the new book and, for its first `rows` slots, the index `[B, rows]` into [old slots ; new rows].
    """
    everything = jnp.concatenate([slots.pos, new_pos], axis=1)
    order = jnp.argsort(everything, axis=1)[:, -rows:]
    kept = jnp.take_along_axis(everything, order, axis=1)
    pos = jnp.full_like(slots.pos, ABSENT).at[:, :rows].set(kept)
    return slots.replace(pos=pos, next=jnp.full_like(slots.next, rows)), order


def gather_rows(leaf: Held, rows: Rows, order: jax.Array) -> Held:
    """The leaf of `keep_last`: rows `order` of [leaf ; rows] at the front of the leaf."""

    def gather(held: jax.Array, new: jax.Array) -> jax.Array:
        everything = jnp.concatenate([held, new.swapaxes(1, 2)], axis=2)
        kept = jnp.take_along_axis(everything, order[:, None, :, None], axis=2)
        return jax.lax.dynamic_update_slice(held, kept, (0, 0, 0, 0))

    return jax.tree.map(gather, leaf, rows_as(leaf, rows))


def cold(kv: DraftKV, position: int) -> DraftKV:
    """An empty cache that starts at an absolute position: no row below it exists."""
    # Two buffers: the cache is donated, and one may not be given away twice.
    at, floor = (jnp.full_like(kv.len, position) for _ in range(2))
    return kv.replace(len=at, floor=floor)


@dataclasses.dataclass(frozen=True)
class DraftTail:
    """The latest context rows of one sequence, enough to go on drafting elsewhere.

    base: absolute position of the first row; len: rows committed where it was cut (positions end
    at len - 1); floor: the exporter's floor. k, v: rows a layer, `[kv_heads, rows, D]` on the host,
    `QuantizedRows` of an int8 cache.
    """

    base: int
    len: int
    floor: int
    k: list[Any]
    v: list[Any]


def readable_rows(config: DFlashConfig) -> int | None:
    """Rows a drafter may still read: window + block where all layers slide, else None (all)."""
    windows = [w for w in config.layer_window if w is not None]
    return max(windows) + config.block_size if len(windows) == config.num_hidden_layers else None


def export_tail(
    config: DFlashConfig, kv: DraftKV, upto: int | None = None, sequence: int = 0
) -> DraftTail:
    """Cut the last min(readable, upto - floor) rows before position `upto` (default: the length).

    ValueError where `upto` lies outside the cache, or so far back that a window's rows are gone.
    """
    length, floor = int(kv.len[sequence]), int(kv.floor[sequence])
    upto = length if upto is None else upto
    whole = isinstance(upto, int | np.integer) and not isinstance(upto, bool)
    if not whole or not floor <= upto <= length:
        raise ValueError(f"upto: expected {floor}..{length} (floor..len), found {upto}")
    readable = readable_rows(config)
    count = upto - floor if readable is None else min(readable, upto - floor)
    if readable is not None and kv.ring is not None:
        # A ring holds `ring_rows` before its end; what lies further back may be overwritten.
        count = min(count, max(0, kv.ring_rows - (length - upto)))
        if count < min(max(w for w in config.layer_window if w is not None) - 1, upto - floor):
            earliest = length - config.block_size - 1
            raise ValueError(f"upto: expected at least {earliest}, found {upto}")
    wanted = np.arange(upto - count, upto)

    def rows(leaf: Rows, layer: int) -> Any:
        pos = np.asarray(kv.slots_of(layer).pos[sequence])
        order = np.argsort(pos, kind="stable")
        slots = order[np.searchsorted(pos[order], wanted)]
        return jax.tree.map(lambda x: np.asarray(x[sequence])[:, slots], leaf)

    k = [rows(leaf, i) for i, leaf in enumerate(kv.k)]
    v = [rows(leaf, i) for i, leaf in enumerate(kv.v)]
    return DraftTail(upto - count, upto, floor, k, v)


def _check_kind(leaf: Any) -> None:
    """ValueError unless a tail's leaf holds floats, or int8 with f32 scales."""
    if isinstance(leaf, QuantizedRows):
        kinds = [getattr(x, "dtype", type(x).__name__) for x in (leaf.values, leaf.scales)]
        right = kinds == [jnp.int8, jnp.float32]
        found = f"{kinds[0]} values with {kinds[1]} scales"
    else:
        found = str(getattr(leaf, "dtype", type(leaf).__name__))
        right = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    if not right:
        raise ValueError(
            f"tail: expected floats, or int8 values with float32 scales, found {found}"
        )


def import_tail(config: DFlashConfig, kv: DraftKV, tail: DraftTail) -> DraftKV:
    """`kv` (empty, one sequence) with a tail's rows; its floor is the tail's first row.

    Floats go to an int8 cache as the rows that it would have made itself, int8 to a cache of
    floats as the floats that they stand for.
    ValueError naming what does not fit: kind of rows, layers, row shape, length against capacity, a
    tail that does not end at its own length, or one shorter than what the drafter may read.
    """
    shape = (config.num_key_value_heads, config.head_dim)
    if len(tail.k) != len(kv.k) or len(tail.v) != len(kv.v):
        raise ValueError(
            f"tail: expected {len(kv.k)} layers, found {len(tail.k)} of k and {len(tail.v)} of v"
        )
    for leaf in (*tail.k, *tail.v):
        _check_kind(leaf)
        if (leaf.shape[0], leaf.shape[2]) != shape:
            found = (leaf.shape[0], leaf.shape[2])
            raise ValueError(f"tail: expected rows of {shape} (kv heads, head_dim), found {found}")
        if tail.base + leaf.shape[1] != tail.len:
            raise ValueError(
                f"tail: expected its last row at {tail.len - 1}, found {tail.base} + "
                f"{leaf.shape[1]} rows"
            )
        scales = (*leaf.shape[:2], 1)
        if isinstance(leaf, QuantizedRows) and leaf.scales.shape != scales:
            raise ValueError(f"tail: expected scales {scales}, found {leaf.scales.shape}")
    count, readable = tail.len - tail.base, readable_rows(config)
    needed = tail.len - tail.floor
    if readable is not None:
        needed = min(readable - config.block_size - 1, needed)
    if count < needed:
        raise ValueError(f"tail: expected at least {needed} rows, found {count}")
    if count > kv.capacity or tail.len > kv.capacity:
        raise ValueError(f"tail: expected at most {kv.capacity} rows (capacity), found {tail.len}")
    pos = jnp.arange(tail.base, tail.len, dtype=jnp.int32)[None]
    kv = cold(kv, tail.base)
    zero = jnp.zeros_like(kv.len)

    def fill(book: Slots | None) -> Slots | None:
        if book is None:
            return None
        kept = pos[:, -min(count, kv.ring_rows) :] if book.ring and count else pos
        return book.replace(
            pos=mark(book, zero, kept), next=jnp.full_like(book.next, kept.shape[1])
        )

    def put(leaf: Held, rows: Any, ring: bool) -> Held:
        first = max(0, count - kv.ring_rows) if ring else 0
        kept = jax.tree.map(lambda x: jnp.asarray(x[:, first:])[None].swapaxes(1, 2), rows)
        return write_rows(leaf, kept, zero)

    return kv.replace(
        k=[put(a, b, r) for a, b, r in zip(kv.k, tail.k, kv.ring_layers, strict=True)],
        v=[put(a, b, r) for a, b, r in zip(kv.v, tail.v, kv.ring_layers, strict=True)],
        len=jnp.full_like(kv.len, tail.len),
        full=fill(kv.full),
        ring=fill(kv.ring),
    )
