"""The drafter's KV cache: context rows only, appended in committed order.

Full layers keep every row. Sliding layers need their last `window - 1` rows, so theirs is a ring
of `window - 1 + 2 * slack` slots that remembers the position in each slot; `slack` is the most
rows one append or block may bring. A slot whose position is ABSENT may hold anything.
"""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.attention import ABSENT
from dflash_jax.config import DFlashConfig


@struct.dataclass
class Slots:
    """Which absolute position each slot of a kind of layer holds.

    pos: `[B, slots]`, ABSENT where nothing is. next: `[B]`, the slot the next row goes to.
    """

    pos: jax.Array
    next: jax.Array
    ring: bool = struct.field(pytree_node=False, default=False)


@struct.dataclass
class DraftKV:
    """Per-layer K (normed, roped) and V (raw) of the context rows.

    k, v: one leaf a layer, `[B, kv_heads, slots, D]`. len: `[B]`, rows committed so far.
    floor: `[B]`, first context row that exists. full, ring: the slot books of the two kinds of
    layer; `ring` is None where no layer is bounded by its window.
    """

    k: list[jax.Array]
    v: list[jax.Array]
    len: jax.Array
    floor: jax.Array
    full: Slots
    ring: Slots | None
    ring_layers: tuple[bool, ...] = struct.field(pytree_node=False)
    capacity: int = struct.field(pytree_node=False)
    slack: int = struct.field(pytree_node=False)

    def slots_of(self, layer: int) -> Slots:
        """The slot book that layer `layer` follows."""
        return self.ring if self.ring is not None and self.ring_layers[layer] else self.full


def allocate(
    config: DFlashConfig, batch: int, capacity: int, dtype: jnp.dtype, overhang: int = 0
) -> DraftKV:
    """An empty cache for `capacity` context rows a sequence.

    One block or per-round append may bring block_size + 1 rows (`slack`). `overhang`, where
    larger, leaves that many slots past capacity for the padding rows of a prompt's last chunk.
    """
    slack = config.block_size + 1
    full_slots = capacity + max(slack, overhang)
    windows = [w for w in config.layer_window if w is not None]
    ring_slots = max(windows) - 1 + 2 * slack if windows else full_slots
    bounded = ring_slots < full_slots
    ring_layers = tuple(bounded and w is not None for w in config.layer_window)
    heads, dim = config.num_key_value_heads, config.head_dim

    def leaves() -> list[jax.Array]:
        sizes = [ring_slots if ring else full_slots for ring in ring_layers]
        return [jnp.zeros((batch, heads, size, dim), dtype) for size in sizes]

    def book(slots: int, ring: bool) -> Slots:
        absent = jnp.full((batch, slots), ABSENT, jnp.int32)
        return Slots(pos=absent, next=jnp.zeros((batch,), jnp.int32), ring=ring)

    return DraftKV(
        k=leaves(),
        v=leaves(),
        len=jnp.zeros((batch,), jnp.int32),
        floor=jnp.zeros((batch,), jnp.int32),
        full=book(full_slots, ring=False),
        ring=book(ring_slots, ring=True) if bounded else None,
        ring_layers=ring_layers,
        capacity=capacity,
        slack=slack,
    )


def check_room(kv: DraftKV, rows: int) -> None:
    """Refuse an append past capacity (ValueError) wherever the length is a concrete number.

    `dynamic_update_slice` would shift such a write silently. Inside a compiled loop the loop's
    own bound keeps the law.
    """
    if isinstance(kv.len, jax.core.Tracer):
        return
    longest = int((kv.len - kv.floor).max())
    if longest + rows > kv.capacity:
        raise ValueError(
            f"draft KV: expected at most {kv.capacity} rows, found {longest} + {rows} new ones"
        )


def reserve(slots: Slots, rows: int) -> jax.Array:
    """First slot `[B]` of the next `rows` contiguous ones; a ring starts over when they don't fit.

    Starting over overwrites only rows older than the window: a ring has twice `slack` to spare.
    """
    if not slots.ring:
        return slots.next
    return jnp.where(slots.next + rows > slots.pos.shape[1], 0, slots.next)


def mark(slots: Slots, slot: jax.Array, pos: jax.Array) -> jax.Array:
    """`slots.pos` with positions `pos [B, rows]` written from `slot [B]` on."""
    return write_at(slots.pos, pos, slot, axis=1)


def write_rows(leaf: jax.Array, rows: jax.Array, slot: jax.Array) -> jax.Array:
    """`leaf [B, kv, slots, D]` with `rows [B, rows, kv, D]` written from `slot [B]` on."""
    return write_at(leaf, rows.astype(leaf.dtype).swapaxes(1, 2), slot, axis=2)


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


def gather_rows(leaf: jax.Array, rows: jax.Array, order: jax.Array) -> jax.Array:
    """The leaf of `keep_last`: rows `order` of [leaf ; rows] at the front of the leaf."""
    everything = jnp.concatenate([leaf, rows.astype(leaf.dtype).swapaxes(1, 2)], axis=2)
    kept = jnp.take_along_axis(everything, order[:, None, :, None], axis=2)
    return jax.lax.dynamic_update_slice(leaf, kept, (0, 0, 0, 0))
