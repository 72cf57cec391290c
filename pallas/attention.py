"""Fused block attention: head norm, rope, cache append and attention over [context ; block].

Two launches a layer, one where the cache is small. In the first, a program (sequence, kv head,
split) attends its share of the context; the split numbered 0 also owns the block's own rows: it
alone writes them to the cache and reads them from registers, so that no program reads what another
writes. The second merges the splits' partial sums, which are f32, so exactly. A last-comer that
merges inside the first launch would leave the partial sums of a kv head to one multiprocessor,
which takes longer than a launch.

The context present is shared out, not the capacity: splits beyond it return at once and the merge
does not look at them.

A causal block is a target's, and a target must round a row in the same way wherever its block
began: else a near-tie falls as drafts were accepted. There the steps stand at fixed slots, own rows
take their slots' places among them, and a split takes a fixed number of steps (four times as many
beyond 32 splits of them), so that the same numbers are added in the same order.

A node of a draft tree sees in the steps what stands before it: the context and the spine, in the
slots of a chain. Itself, which may lie elsewhere, it has seen before split 0's first step; so what
is added in which order is the same for a leaf as for the row that a later round has in its place.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dflash_jax.attention import BlockPlace, HeadNorms, attention_mask
from dflash_jax.kv import ABSENT

MAX_ROWS = 128
"""Most query rows per kv head (rows of the block x query heads of one kv head)."""

MOST_ALIGNED = 32
"""Most splits of a causal block's context."""

ALL = 1 << 30
"""Steps of a split that takes whatever there is."""

_LEAST = float(jnp.finfo(jnp.float32).min)
_MIN_DOT = 16


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the context is cut.

    keys: rows of one step. alone: most steps that one split takes alone, without a merge; steps:
    fewest for each of several; aligned: what each takes where blocks are causal (ALL: one takes
    them). programs: how many to aim for in all, no more than run at a time; splits: most for one kv
    head. num_warps, num_stages: Triton's.
    """

    keys: int = 64
    alone: int = 5
    steps: int = 2
    aligned: int = 2
    programs: int = 128
    splits: int = 32
    num_warps: int = 4
    num_stages: int = 3


def tiling_for(dim: int, query_rows: int, itemsize: int, causal: bool, kv_heads: int = 1) -> Tiling:
    """The tiling of head dim `dim`, `query_rows` a kv head and `itemsize` bytes an element.

    A split alone takes the smallest caches (256 rows and a block), or 1024 rows of narrow heads:
    about what a merge costs. kv_heads: of all sequences. The more there are, the fewer splits of
    each fill the card, and the more a causal block's splits take: partial sums of 128 keys are as
    many bytes as the keys.
    """
    warps = 4 if query_rows <= 64 and itemsize < 4 else 8
    crowd = 2 ** max(0, kv_heads.bit_length() - 4)
    if itemsize == 4:
        tiling = Tiling(keys=32, alone=10, steps=4, aligned=4, num_warps=warps, num_stages=2)
    elif dim <= 64:
        tiling = Tiling(keys=128, alone=9, aligned=3, num_warps=warps)
    else:
        # A third stage pays over many steps, except where it takes the room of a second program on
        # a multiprocessor.
        two_stages = causal if crowd == 1 else query_rows >= 64
        tiling = Tiling(num_warps=warps, num_stages=2 if two_stages else 3)
    # 128 keys for the 8 kv heads of one sequence, 1024 for those of eight.
    several = max(tiling.aligned, 128 * crowd // tiling.keys)
    return dataclasses.replace(tiling, aligned=ALL if kv_heads >= tiling.programs else several)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Static numbers of one call."""

    rows: int
    heads: int
    kv_heads: int
    dim: int
    slots: int
    splits: int
    tiling: Tiling
    normed: bool
    eps: float
    causal: bool
    window: int | None
    ring: bool
    tree: bool
    dtype: jnp.dtype

    @property
    def aligned(self) -> bool:
        """Whether a row's sums may not depend on where its block began."""
        return self.causal and not self.ring

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Of one projected row."""
        return (self.heads + 2 * self.kv_heads) * self.dim

    @property
    def scale(self) -> float:
        """Of scores, for powers of two, which are what the hardware has."""
        return self.dim**-0.5 * math.log2(math.e)

    @property
    def padded(self) -> int:
        """Query rows of one kv head, groups x rows, padded."""
        return _pad(self.groups * self.rows)


def _pad(rows: int) -> int:
    return max(_MIN_DOT, pl.next_power_of_2(rows))


@partial(jax.jit, static_argnames=("eps", "causal", "window", "tiling", "interpret"))
def append_and_attend(
    qkv: jax.Array,
    norms: HeadNorms,
    eps: float,
    place: BlockPlace,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    causal: bool,
    window: int | None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernel of `dflash_jax.attention.append_and_attend`, same arguments and results.

    The caches are updated in place where the caller gives them up. Head dim: a power of two of 32
    or more; rows x query heads of a kv head: at most `MAX_ROWS`. The result depends neither on the
    cache's capacity nor on what lies in empty slots. A tree's block is causal, its cache no ring.
    """
    batch, rows, width = qkv.shape
    _, kv_heads, slots, dim = k_cache.shape
    heads = width // dim - 2 * kv_heads
    padded = _pad(heads // kv_heads * rows)
    tiling = tiling or tiling_for(dim, padded, qkv.dtype.itemsize, causal, batch * kv_heads)
    spec = _Spec(
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        slots=slots,
        splits=_splits(tiling, batch * kv_heads, slots, causal and not place.ring),
        tiling=tiling,
        normed=norms is not None,
        eps=eps,
        causal=causal,
        window=window,
        ring=place.ring,
        tree=place.tree,
        dtype=qkv.dtype,
    )
    sums, k_cache, v_cache = _attend(spec, qkv, norms, place, k_cache, v_cache, interpret)
    if spec.splits > 1:
        sums = _merge(spec, place, sums, interpret)
    return sums[0].reshape(batch, rows, heads * dim), k_cache, v_cache


def _splits(tiling: Tiling, heads: int, slots: int, aligned: bool = False) -> int:
    """Most splits that `slots` rows can need, where `heads` kv heads of all sequences share.

    Where fewer rows are present, `_shares` counts in the same way: capacity decides nothing.
    """
    steps = pl.cdiv(slots, tiling.keys)
    if aligned:
        return min(MOST_ALIGNED, pl.cdiv(steps, tiling.aligned))
    most = max(1, min(tiling.splits, tiling.programs // heads))
    return 1 if steps <= tiling.alone else min(most, pl.cdiv(steps, tiling.steps))


def _attend(spec, qkv, norms, place, k_cache, v_cache, interpret):
    """First launch: (the attended rows, or the splits' partial sums), both caches."""
    batch = qkv.shape[0]
    cache = pl.BlockSpec((None, None, spec.slots, spec.dim), lambda b, h, s: (b, h, 0, 0))
    if spec.splits == 1:
        sums = [jax.ShapeDtypeStruct((batch, spec.rows * spec.heads * spec.dim), spec.dtype)]
        sum_specs = [_row_spec(sums[0])]
    else:
        lead = (batch, spec.kv_heads, spec.splits, spec.padded)
        sums = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*lead, spec.dim), lead)]
        sums.append(sums[1])
        sum_specs = [_split_spec(shape) for shape in sums]
    flat = [x.reshape(batch, -1) for x in (qkv, place.cos, place.sin)]
    inputs = [*flat, place.q_pos, place.k_pos, place.slot, place.end, *(norms or ())]
    specs = [_row_spec(x) if x.ndim == 2 else pl.BlockSpec() for x in inputs]
    shapes = [*sums, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_cache, v_cache))]
    *sums, k_cache, v_cache = pl.pallas_call(
        partial(_attend_kernel, spec),
        grid=(batch, spec.kv_heads, spec.splits),
        in_specs=[*specs, cache, cache],
        out_specs=[*sum_specs, cache, cache],
        out_shape=shapes,
        input_output_aliases={len(inputs): len(sums), len(inputs) + 1: len(sums) + 1},
        compiler_params=plgpu.CompilerParams(
            num_warps=spec.tiling.num_warps, num_stages=spec.tiling.num_stages
        ),
        interpret=interpret,
        name="block_attention",
    )(*inputs, k_cache, v_cache)
    return sums, k_cache, v_cache


def _merge(spec, place, sums, interpret):
    """Second launch: the attended rows, of the splits' partial sums."""
    batch, splits = sums[0].shape[0], pl.next_power_of_2(spec.splits)
    # Some 64 f32 registers a thread for the sums of all splits.
    tile = min(spec.padded, max(1, 8192 // (splits * spec.dim)))
    out = jax.ShapeDtypeStruct((batch, spec.rows * spec.heads * spec.dim), spec.dtype)
    return pl.pallas_call(
        partial(_merge_kernel, spec, tile),
        grid=(batch, spec.kv_heads, pl.cdiv(spec.groups * spec.rows, tile)),
        in_specs=[*(_head_spec(x) for x in sums), pl.BlockSpec(), pl.BlockSpec()],
        out_specs=[_row_spec(out)],
        out_shape=[out],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="merge_splits",
    )(*sums, place.slot, place.end)


def _row_spec(array):
    """One sequence's row of `[B, n]`."""
    return pl.BlockSpec((None, array.shape[1]), lambda b, h, s: (b, 0))


def _split_spec(array):
    """One program's part of `[B, kv_heads, splits, ...]`."""
    rest = array.shape[3:]
    return pl.BlockSpec((None, None, None, *rest), lambda b, h, s: (b, h, s, *(0 for _ in rest)))


def _head_spec(array):
    """One kv head's part of `[B, kv_heads, ...]`."""
    rest = array.shape[2:]
    return pl.BlockSpec((None, None, *rest), lambda b, h, s: (b, h, *(0 for _ in rest)))


def _bounds(spec: _Spec, slot, end):
    """The slot the rows go to and the end of the context, inside the cache whatever was given.

    A slice update moves back like this where its rows do not fit.
    """
    return jnp.minimum(slot, spec.slots - spec.rows), jnp.minimum(end, spec.slots)


def _shares(spec: _Spec, slot, end):
    """What there is to read: (first slot, steps, steps a split takes, splits with work).

    At least one split has work: the owner of the block's rows.
    """
    first = jnp.int32(0)
    if spec.aligned:
        steps, share = _cdiv(slot + spec.rows, spec.tiling.keys), jnp.int32(spec.tiling.aligned)
        most, level = pl.cdiv(spec.slots, spec.tiling.keys), spec.tiling.aligned
        while level * MOST_ALIGNED < most:
            share = jnp.where(steps > level * MOST_ALIGNED, level * 4, share)
            level *= 4
        return first, steps, share, _cdiv(steps, share)
    if spec.window is not None and not spec.ring:
        # Positions ascend from slot to slot, by one or more.
        first = jnp.maximum(slot - (spec.window - 1), 0)
    steps = _cdiv(jnp.maximum(end - first, 0), spec.tiling.keys)
    splits = jnp.clip(_cdiv(steps, spec.tiling.steps), 1, spec.splits)
    splits = jnp.where(steps <= spec.tiling.alone, 1, splits)
    share = jnp.maximum(_cdiv(steps, splits), 1)
    return first, steps, share, jnp.maximum(_cdiv(steps, share), 1)


def _cdiv(a, b):
    return jax.lax.div(a + b - 1, jnp.int32(b))


def _query_rows(spec: _Spec, kv_head, start, count: int):
    """Of query rows `start ..` of a kv head: row in the block, query head, whether it exists."""
    index = start + jnp.arange(count)
    row, group = jax.lax.rem(index, jnp.int32(spec.rows)), jax.lax.div(index, jnp.int32(spec.rows))
    return row, kv_head * spec.groups + group, index < spec.groups * spec.rows


def _attend_kernel(spec: _Spec, *refs):
    qkv, cos, sin, q_pos_ref, k_pos_ref, slot_ref, end_ref, *refs = refs
    norms, refs = (refs[:2], refs[2:]) if spec.normed else ((None, None), refs)
    k_old, v_old, *outs, k_new, v_new = refs
    batch, kv_head, split = (pl.program_id(axis) for axis in range(3))
    slot, end = _bounds(spec, slot_ref[batch], end_ref[batch])
    first, steps, share, splits = _shares(spec, slot, end)
    # Ahead of all that waits for `slot` and `end`; the few rows are cheap where they go unused.
    row, head, live = _query_rows(spec, kv_head, 0, spec.padded)
    q = _rotated(spec, qkv, row, head, live, norms[0], (cos, sin))
    q_pos = plgpu.load(q_pos_ref.at[row], mask=live, other=0)
    own_rows = jnp.arange(_pad(spec.rows))
    own_k, own_v = _block_rows(
        spec, qkv, kv_head, norms[1], (cos, sin), own_rows, own_rows < spec.rows
    )

    @pl.when(split < splits)
    def _():
        def own(state):
            _append(spec, k_new, v_new, slot, own_k, own_v)
            if spec.aligned:
                return state
            own_pos = plgpu.load(q_pos_ref.at[own_rows], mask=own_rows < spec.rows, other=ABSENT)
            return _accumulate(spec, q, q_pos, own_k, own_v, own_pos, state)

        def body(step, state):
            rows = _context_rows(spec, k_old, v_old, k_pos_ref, first, end, slot, step)
            return _accumulate(spec, q, q_pos, *rows, state)

        def body_with_own(left_and_state):
            left, state = left_and_state
            step = stop - left
            rows = _rows_with_own(spec, k_old, v_old, k_pos_ref, slot, step, own_k, own_v)
            return left - 1, _accumulate(spec, q, q_pos, *rows, state)

        def itself(_):
            k, v = _block_rows(spec, qkv, kv_head, norms[1], (cos, sin), row, live)
            return _itself(spec, q, k, v)

        state = (
            jnp.full((spec.padded,), _LEAST, jnp.float32),
            jnp.zeros((spec.padded,), jnp.float32),
            jnp.zeros((spec.padded, spec.dim), jnp.float32),
        )
        if spec.tree:
            state = jax.lax.cond(split == 0, itself, lambda state: state, state)
        begin, stop = split * share, jnp.minimum((split + 1) * share, steps)
        if spec.aligned and spec.window is not None:
            unseen = jnp.maximum(slot - (spec.window - 1), 0)
            begin = jnp.maximum(begin, jax.lax.div(unseen, jnp.int32(spec.tiling.keys)))
        if spec.aligned:
            # Steps before the block's first slot, then the few among whose slots its rows lie:
            # counted down, or Triton would pipeline their many loads past all shared memory.
            bare = jnp.clip(jax.lax.div(slot, jnp.int32(spec.tiling.keys)), begin, stop)
            state = jax.lax.fori_loop(begin, bare, body, state)
            _, state = jax.lax.while_loop(
                lambda left_and_state: left_and_state[0] > 0, body_with_own, (stop - bare, state)
            )
        else:
            state = jax.lax.fori_loop(begin, stop, body, state)
        top, total, acc = jax.lax.cond(split == 0, own, lambda state: state, state)
        if spec.splits == 1:
            _store_rows(spec, outs[0], acc / total[:, None], row, head, live)
        else:
            plgpu.store(outs[0].at[...], acc, mask=_across(live, spec.dim))
            plgpu.store(outs[1].at[...], top, mask=live)
            plgpu.store(outs[2].at[...], total, mask=live)


def _merge_kernel(spec: _Spec, tile: int, acc_ref, top_ref, total_ref, slot_ref, end_ref, out):
    batch, kv_head, start = pl.program_id(0), pl.program_id(1), pl.program_id(2) * tile
    *_, used = _shares(spec, *_bounds(spec, slot_ref[batch], end_ref[batch]))
    row, head, live = _query_rows(spec, kv_head, start, tile)
    split, at = jnp.arange(pl.next_power_of_2(spec.splits)), start + jnp.arange(tile)
    mask = (split < used)[:, None] & live[None, :]
    shape = (*mask.shape, spec.dim)
    index = tuple(
        jnp.broadcast_to(x, shape)
        for x in (split[:, None, None], at[None, :, None], jnp.arange(spec.dim)[None, None, :])
    )
    flat = jnp.broadcast_to(split[:, None], mask.shape), jnp.broadcast_to(at[None], mask.shape)
    top = plgpu.load(top_ref.at[flat], mask=mask, other=_LEAST)
    total = plgpu.load(total_ref.at[flat], mask=mask, other=0.0)
    acc = plgpu.load(acc_ref.at[index], mask=jnp.broadcast_to(mask[:, :, None], shape), other=0.0)
    weight = jnp.exp2(top - jnp.max(top, axis=0)[None, :])
    total = jnp.sum(weight * total, axis=0)
    acc = jnp.sum(weight[:, :, None] * acc, axis=0)
    _store_rows(spec, out, acc / total[:, None], row, head, live)


def _rotated(spec: _Spec, qkv, row, head, live, norm, tables):
    """Both halves `[n, D / 2]` of heads `head [n]` of rows `row [n]`, normed and roped."""
    half = spec.dim // 2
    at, mask = jnp.arange(half)[None, :], _across(live, half)
    index = (row * spec.width + head * spec.dim)[:, None] + at
    a = plgpu.load(qkv.at[index], mask=mask, other=0).astype(jnp.float32)
    b = plgpu.load(qkv.at[index + half], mask=mask, other=0).astype(jnp.float32)
    if norm is not None:
        mean = (jnp.sum(a * a, axis=1) + jnp.sum(b * b, axis=1)) / spec.dim
        scale = jax.lax.rsqrt(mean + spec.eps)[:, None]
        # Rounded where the reference rounds.
        a = ((a * scale).astype(spec.dtype) * norm[pl.ds(0, half)][None]).astype(jnp.float32)
        b = ((b * scale).astype(spec.dtype) * norm[pl.ds(half, half)][None]).astype(jnp.float32)
    at = row[:, None] * half + at
    cos, sin = (plgpu.load(table.at[at], mask=mask, other=0.0) for table in tables)
    return (a * cos - b * sin).astype(spec.dtype), (b * cos + a * sin).astype(spec.dtype)


def _block_rows(spec: _Spec, qkv, kv_head, norm, tables, rows, live):
    """k (halves) and v of the block's own rows `rows [n]`, where `live`."""
    head = jnp.full_like(rows, spec.heads + kv_head)
    k = _rotated(spec, qkv, rows, head, live, norm, tables)
    index = (rows * spec.width + (head + spec.kv_heads) * spec.dim)[:, None]
    mask = _across(live, spec.dim)
    v = plgpu.load(qkv.at[index + jnp.arange(spec.dim)[None, :]], mask=mask, other=0)
    return k, v


def _append(spec: _Spec, k_ref, v_ref, slot, k, v):
    half, padded = spec.dim // 2, v.shape[0]
    live, at = jnp.arange(padded) < spec.rows, pl.ds(slot, padded)
    for part, x in enumerate(k):
        to = k_ref.at[at, pl.ds(part * half, half)]
        plgpu.store(to, x.astype(k_ref.dtype), mask=_across(live, half))
    to = v_ref.at[at, pl.ds(0, spec.dim)]
    plgpu.store(to, v.astype(v_ref.dtype), mask=_across(live, spec.dim))


def _context_rows(spec: _Spec, k_ref, v_ref, k_pos_ref, first, end, slot, step):
    """k (halves), v and positions of the cached rows of one step."""
    half = spec.dim // 2
    start = first + step * spec.tiling.keys
    at, index = pl.ds(start, spec.tiling.keys), start + jnp.arange(spec.tiling.keys)
    held = (index < end) & ((index < slot) | (index >= slot + spec.rows))
    k_pos = plgpu.load(k_pos_ref.at[at], mask=held, other=ABSENT)
    k = tuple(
        plgpu.load(
            k_ref.at[at, pl.ds(part * half, half)], mask=_across(held, half), other=0
        ).astype(spec.dtype)
        for part in range(2)
    )
    if spec.ring:
        # 0 * NaN is NaN: of an empty slot, not even a zero weight may meet the value.
        held = held & (k_pos != ABSENT)
    v = plgpu.load(v_ref.at[at, pl.ds(0, spec.dim)], mask=_across(held, spec.dim), other=0)
    return k, v.astype(spec.dtype), k_pos


def _rows_with_own(spec: _Spec, k_ref, v_ref, k_pos_ref, slot, step, own_k, own_v):
    """k (halves), v and positions of one step's slots, own rows where they are about to lie."""
    half, start = spec.dim // 2, step * spec.tiling.keys
    at, index = pl.ds(start, spec.tiling.keys), start + jnp.arange(spec.tiling.keys)
    held, own = index < slot, (index >= slot) & (index < slot + spec.rows)
    k_pos = plgpu.load(k_pos_ref.at[at], mask=held | own, other=ABSENT)
    # A product with ones and zeros moves own rows to their slots, without rounding.
    here = (index - slot)[:, None] == jnp.arange(own_v.shape[0])[None, :]
    here = (here & own[:, None]).astype(spec.dtype)

    def rows(ref, offset, mine):
        width = mine.shape[1]
        cached = plgpu.load(
            ref.at[at, pl.ds(offset, width)], mask=_across(held, width), other=0
        ).astype(spec.dtype)
        return jnp.where(_across(own, width), _dot(here, mine, 0).astype(spec.dtype), cached)

    k = rows(k_ref, 0, own_k[0]), rows(k_ref, half, own_k[1])
    return k, rows(v_ref, 0, own_v), k_pos


def _itself(spec: _Spec, q, k, v):
    """The state of online softmax of query rows that have each seen one key `k [n]` (halves)."""
    f32 = jnp.float32
    halves = zip(q, k, strict=True)
    score = sum(jnp.sum(a.astype(f32) * b.astype(f32), axis=1) for a, b in halves)
    return score * spec.scale, jnp.ones(v.shape[:1], f32), v.astype(f32)


def _accumulate(spec: _Spec, q, q_pos, k, v, k_pos, state):
    """Online softmax: running maximum, sum of weights and weighted values, one step further."""
    top, total, acc = state
    mask = attention_mask(q_pos, k_pos, causal=spec.causal, window=spec.window)
    if spec.tree:
        mask = mask & (q_pos[:, None] != k_pos[None, :])
    scores = sum(_dot(a, b, 1) for a, b in zip(q, k, strict=True)) * spec.scale
    scores = jnp.where(mask, scores, _LEAST)
    higher = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.where(mask, jnp.exp2(scores - higher[:, None]), 0.0)
    fade = jnp.exp2(top - higher)
    total = total * fade + jnp.sum(weights, axis=1)
    acc = acc * fade[:, None] + _dot(weights.astype(v.dtype), v, 0)
    return higher, total, acc


def _dot(a, b, axis: int):
    """`a [m, c]` times b, contracted over b's `axis`, in f32; f32 operands are not rounded."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _store_rows(spec: _Spec, out, values, row, head, live):
    """`values [n, D]` to their rows and heads of the flat output."""
    # A row that does not exist must not point at one that does: interpreted, its masked store
    # would put back what was there before.
    index = jnp.where(live, (row * spec.heads + head) * spec.dim, out.shape[0])
    index = index[:, None] + jnp.arange(spec.dim)[None, :]
    plgpu.store(out.at[index], values.astype(out.dtype), mask=_across(live, spec.dim))


def _across(mask, width: int):
    """A mask of rows `[n]` -> `[n, width]`."""
    return jnp.broadcast_to(mask[:, None], (mask.shape[0], width))
