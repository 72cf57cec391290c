"""Fused block attention for Hopper, through Mosaic GPU: what `attention` does, in one launch.

A cluster of eight blocks takes one kv head of one sequence. Block `i` takes the key tiles `i`,
`i + 8`, .. of those present, each copied asynchronously into shared memory ahead of its turn, and
keeps their partial sums in f32. Then the blocks of the cluster exchange partial sums, and each
merges a share of the head's columns: what costs a second launch elsewhere is a barrier here.

Tiles stand at fixed slots and always go to the same block in the same order, and the block's own
rows are read from their slots like any others: a row's sums do not depend on where its block began,
which a target's rows must not, see `attention`. So own rows are written first. Whoever owns a tile
that holds some of them writes them all, before it asks for that tile: the copies agree to the bit,
and no block waits for another.

Query rows stand head by head, each head's rows padded to a multiple of eight: 64 of them, which is
what a warpgroup's product takes, hold 16 rows of four heads.

A projection that comes in parts is summed here, by every block that needs it: that takes the place
of a launch, and what is read more comes from the L2.

Nodes of a draft tree see no tile's key of their own position. The last worker, which has the fewest
tiles, begins with them: having seen itself alone, a row's maximum is its score, its values are its
own.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dflash_jax.attention import BlockPlace, HeadNorms
from dflash_jax.kv import ABSENT, SLOT_STEP

from .attention_share import KEYS, QUERIES, SPLITS, Share, Spec, maker_of, share_of
from .mosaic import ACROSS, DOWN, fence, full, interpreted, load, plgpu, product, spread, store

MAX_ROWS = QUERIES
"""Most rows of a block of the sequence."""
HEAD_DIMS = (64, 128)

_LEAST = float(jnp.finfo(jnp.float32).min)
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """warpgroups: of a block, each with tiles of its own; stages: tiles of each in flight or in
    use, 32 KB of shared memory at head dim 128.
    """

    warpgroups: int = 2
    stages: int = 2


def refusal(qkv: jax.Array, cache: jax.Array) -> str | None:
    """Why the kernel cannot take a block of `MAX_ROWS` or fewer rows; None where it can.

    Shapes and dtypes alone are looked at, as in `append_and_attend`.
    """
    slots, dim = cache.shape[2:]
    in_parts = qkv.ndim == 4
    if qkv.dtype != (jnp.float32 if in_parts else jnp.bfloat16) or cache.dtype != jnp.bfloat16:
        wanted = "float32 parts and bfloat16 caches" if in_parts else "bfloat16 rows and caches"
        return f"dtype: expected {wanted}, found {qkv.dtype} and {cache.dtype}"
    if in_parts and qkv.shape[2] < 2:
        return f"rows in parts: expected two or more, found {qkv.shape[2]}"
    if dim not in HEAD_DIMS:
        return f"head_dim: expected one of {HEAD_DIMS}, found {dim}"
    if slots % SLOT_STEP:
        return f"cache slots: expected a multiple of {SLOT_STEP}, found {slots}"
    return None


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
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernel of `dflash_jax.attention.append_and_attend`, same arguments and results.

    For what it takes see `refusal`. The caches are updated in place where the caller gives them up.
    The result depends neither on the cache's capacity nor on what lies in empty slots. interpret:
    whether it is interpreted (from jax 0.12 on), or `interpreted(..)`.
    """
    *parts, batch, rows, width = qkv.shape
    _, kv_heads, slots, dim = k_cache.shape
    tiling = tiling or Tiling()
    spec = Spec(
        batch=batch,
        rows=rows,
        heads=width // dim - 2 * kv_heads,
        kv_heads=kv_heads,
        dim=dim,
        slots=slots,
        warpgroups=tiling.warpgroups,
        stages=tiling.stages,
        normed=norms is not None,
        eps=eps,
        causal=causal,
        window=window,
        ring=place.ring,
        tree=place.tree,
        parts=parts[0] if parts else 0,
        interpret=interpreted() if interpret is True else interpret,
    )
    # The same for all layers that share a book: made once for all of them.
    tables = [_by_query(spec, x) for x in (place.cos, place.sin, place.q_pos)]
    inputs = [*tables, place.k_pos.reshape(-1), place.slot, place.end, *(norms or ())]
    k_ref, v_ref = jax.new_ref(k_cache), jax.new_ref(v_cache)
    out, *_ = _launch(spec)(qkv, *inputs, k_ref, v_ref)
    return out, jax.freeze(k_ref), jax.freeze(v_ref)


def _by_query(spec: Spec, table: jax.Array) -> jax.Array:
    """`[B, rows, ..]` -> `[B, QUERIES, ..]`: a row's numbers for each query row of a block."""
    rest = [(0, 0)] * (table.ndim - 2)
    padded = jnp.pad(table, ((0, 0), (0, spec.pitch - spec.rows), *rest))
    tiled = jnp.concatenate([padded] * spec.held, axis=1)
    return jnp.pad(tiled, ((0, 0), (0, QUERIES - tiled.shape[1]), *rest))


def _launch(spec: Spec):
    """The kernel's call: (qkv, tables, norms, caches as references) -> out and partial sums."""
    lead = (spec.batch, spec.kv_heads, spec.groups // spec.held)
    one = (spec.workers, QUERIES)
    # By who merges them, so that its share is one run of memory.
    values = (spec.dim // spec.columns, *one, spec.columns)
    shapes = [
        jax.ShapeDtypeStruct((spec.batch, spec.rows, spec.heads * spec.dim), jnp.bfloat16),
        *(jax.ShapeDtypeStruct((*lead, *sums), jnp.float32) for sums in (values, one, one)),
    ]
    return plgpu.kernel(
        partial(_kernel, spec),
        out_type=shapes,
        scratch_types=_scratch(spec),
        grid=lead,
        grid_names=("batch", "kv_head", "part"),
        cluster=(SPLITS,),
        cluster_names=("split",),
        num_threads=spec.warpgroups,
        thread_name="warpgroup",
        kernel_name="block_attention_mosaic",
        # Layouts are said, not searched for: jax 0.12 takes minutes over some head shapes.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=spec.interpret or None,
    )


def _scratch(spec: Spec):
    """Shared memory and barriers of a block, see `_Scratch`."""
    # A tile row of one half of the head: rotary halves are stored apart.
    halves = (plgpu.TilingTransform((8, spec.half)), plgpu.SwizzleTransform(spec.dim))
    each = spec.warpgroups * spec.stages
    tiles = plgpu.SMEM((each, KEYS, spec.dim), jnp.bfloat16, transforms=halves)
    rows = plgpu.SMEM((QUERIES, spec.dim), jnp.bfloat16)
    scratch: dict[str, Any] = dict(
        raw=rows,
        own_k=rows,
        own_v=plgpu.SMEM((spec.rows, spec.dim), jnp.bfloat16),
        q=plgpu.SMEM((QUERIES, spec.dim), jnp.bfloat16, transforms=halves),
        k=tiles,
        v=tiles,
        places=plgpu.SMEM((each, KEYS), jnp.int32),
        merged=plgpu.SMEM((spec.warpgroups, QUERIES, spec.columns), jnp.bfloat16),
        raw_here=plgpu.Barrier(num_arrivals=spec.held),
        own_here=plgpu.Barrier(num_arrivals=2),
        q_here=plgpu.Barrier(),
        tile_here=plgpu.Barrier(num_arrivals=3, num_barriers=each),
        summed=plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=spec.warpgroups),
    )
    if spec.tree:
        here = plgpu.Barrier(num_arrivals=2 * spec.held)
        scratch |= dict(itself_k=rows, itself_v=rows, itself_here=here)
    if spec.interpret:
        shape = (spec.warpgroups, QUERIES, KEYS)
        whole = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        scratch["weights"] = plgpu.SMEM(shape, jnp.bfloat16, transforms=whole)
    return scratch


def _kernel(spec: Spec, qkv, cos, sin, q_pos, k_pos, slot, end, *refs, **scratch):
    """One warpgroup. Barriers are not inserted by themselves: `commit_smem` is one."""
    norms, refs = (refs[:2], refs[2:]) if spec.normed else ((None, None), refs)
    k_cache, v_cache, out, *sums = refs
    batch, kv_head, part, split, warpgroup = (
        jax.lax.axis_index(x) for x in ("batch", "kv_head", "part", "split", "warpgroup")
    )
    worker = warpgroup * SPLITS + split
    at = _Scratch(**scratch)
    qkv = qkv.at[:, batch] if spec.parts else qkv.at[batch]
    cos, sin, q_pos, out = (x.at[batch] for x in (cos, sin, q_pos, out))
    caches = [x.at[batch, kv_head] for x in (k_cache, v_cache)]
    sums = [x.at[batch, kv_head, part] for x in sums]
    head = kv_head * spec.groups + part * spec.held
    # Projected heads, and wherever each goes.
    queries = [(head + i, run) for i, run in enumerate(_runs(spec, at.raw))]
    key, value = (spec.heads + i * spec.kv_heads + kv_head for i in range(2))
    appended = [(key, at.own_k.at[pl.ds(0, spec.rows)]), (value, at.own_v)]
    itself = []
    if spec.tree:
        itself = [(key, *_runs(spec, at.itself_k)), (value, *_runs(spec, at.itself_v))]
    last = worker == spec.workers - 1

    @pl.when(warpgroup == 0)
    def _():
        _ask(spec, qkv, queries, at.raw_here)

    share = share_of(spec, slot[batch], end[batch], worker)
    maker = maker_of(spec, slot[batch], end[batch], split)
    fetch = partial(_fetch, spec, at, share, caches, k_pos, batch)
    fetch_first = partial(_fetch_first, spec, share, warpgroup, fetch)

    @pl.when(share.owns)
    def _():
        _ask(spec, qkv, appended, at.own_here)

    if spec.tree:
        pl.when(last)(partial(_ask, spec, qkv, itself, at.itself_here))

    fetch_first(owned=False)

    @pl.when(share.owns)
    def _():
        tables = [load(x, plgpu.Layout.WGMMA) for x in (cos, sin)]
        _take(spec, qkv, appended, at.own_here)
        _store_halves(spec, at.own_k, _rotated(spec, at.own_k, norms[1], tables))
        for (_, ref), cache in zip(appended, caches, strict=True):
            plgpu.copy_smem_to_gmem(ref, cache.at[pl.ds(share.slot, spec.rows)])

    @pl.when(warpgroup == maker)
    def _():
        tables = [load(x, plgpu.Layout.WGMMA) for x in (cos, sin)]
        _take(spec, qkv, queries, at.raw_here)
        _store_halves(spec, at.q, _rotated(spec, at.raw, norms[0], tables))
        plgpu.barrier_arrive(at.q_here)

    @pl.when(share.owns)
    def _():
        plgpu.wait_smem_to_gmem(0)
        fetch_first(owned=True)

    def seen_itself():
        tables = [load(x, plgpu.Layout.WGMMA) for x in (cos, sin)]
        _take(spec, qkv, itself, at.itself_here)
        return _seen_itself(spec, at, _rotated(spec, at.itself_k, norms[1], tables))

    plgpu.barrier_wait(at.q_here)
    state = _seen_nothing(spec)
    if spec.tree:
        state = jax.lax.cond(last, seen_itself, lambda: state)
    mine = _attend(spec, at, share, warpgroup, load(q_pos, DOWN), fetch, state)
    _exchange(spec, at, sums, out, mine, head, worker, warpgroup)


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """References to a block's shared memory.

    raw, own_k, own_v: projected rows; itself_k, itself_v: of a tree, those of each query row; q:
    query rows as a factor. Of each warpgroup, k, v, places: tiles; merged: its share of the result;
    weights: of the values, interpreted alone. The barriers: what has come.
    """

    raw: Any
    own_k: Any
    own_v: Any
    q: Any
    k: Any
    v: Any
    places: Any
    merged: Any
    raw_here: Any
    own_here: Any
    q_here: Any
    tile_here: Any
    summed: Any
    itself_k: Any = None
    itself_v: Any = None
    itself_here: Any = None
    weights: Any = None


def _fetch(spec: Spec, at: _Scratch, share: Share, caches, k_pos, batch, step, stage):
    """Ask for the tile of a step: its keys, its values, their positions."""
    tile = share.tile(step)
    rows, here = pl.ds(tile * KEYS, KEYS), at.tile_here.at[stage]
    for cache, tiles in zip(caches, (at.k, at.v), strict=True):
        plgpu.copy_gmem_to_smem(cache.at[rows], tiles.at[stage], here)
    places = pl.ds(batch * spec.slots + tile * KEYS, KEYS)
    plgpu.copy_gmem_to_smem(k_pos.at[places], at.places.at[stage], here)


def _fetch_first(spec: Spec, share: Share, warpgroup, fetch, *, owned: bool):
    """Ask for the tiles of as many steps as there are stages: those that hold own rows, or those
    that hold none.
    """

    @pl.loop(0, jnp.minimum(spec.stages, share.steps))
    def _(step):
        stage = warpgroup * spec.stages + step
        pl.when(share.owned(step) == owned)(partial(fetch, step, stage))


def _runs(spec: Spec, ref):
    """The block's rows of each head in `ref [QUERIES, D]`."""
    return [ref.at[pl.ds(i * spec.pitch, spec.rows)] for i in range(spec.held)]


def _ask(spec: Spec, qkv, heads, here):
    """Ask for copies of projected heads, each to its places in shared memory; not for parts."""
    if not spec.parts:
        for head, *refs in heads:
            for ref in refs:
                plgpu.copy_gmem_to_smem(qkv.at[:, pl.ds(head * spec.dim, spec.dim)], ref, here)


def _take(spec: Spec, qkv, heads, here):
    """Wait for what `_ask` asked for; of parts, put the sums there."""
    if not spec.parts:
        plgpu.barrier_wait(here)
        return
    # Threads share out even numbers of rows: of an odd one, the last but one is summed twice.
    runs = [(0, spec.rows // 2 * 2)] + [(spec.rows - 2, 2)] * (spec.rows % 2)
    places = [(head, refs, *run) for head, *refs in heads for run in runs]
    # All loads come before the first store, which they would not pass.
    sums = [_sum(spec, qkv, head, row, count) for head, _, row, count in places]
    for (_, refs, row, count), x in zip(places, sums, strict=True):
        for ref in refs:
            store(ref.at[pl.ds(row, count)], x)
    plgpu.commit_smem()


def _sum(spec: Spec, qkv, head, row: int, count: int):
    """`[count, D]` of a head: its f32 parts, added in order and rounded once."""
    vector = math.gcd(4, count * spec.dim // 128)
    layout = plgpu.Layout.WG_STRIDED((count, spec.dim), vec_size=vector)
    place = pl.ds(row, count), pl.ds(head * spec.dim, spec.dim)
    total = load(qkv.at[0, *place], layout)
    for i in range(1, spec.parts):
        total += load(qkv.at[i, *place], layout)
    return total.astype(jnp.bfloat16)


def _rotated(spec: Spec, raw, norm, tables):
    """Projected heads `raw [QUERIES, D]`, normed and roped: both halves `[QUERIES, D / 2]`."""
    a, b = (x.astype(jnp.float32) for x in _halves(spec, raw))
    cos, sin = tables
    if norm is not None:
        mean = (jnp.sum(a * a, axis=1) + jnp.sum(b * b, axis=1)) * (1 / spec.dim)
        scale = spread(jax.lax.rsqrt(mean + spec.eps), a.shape, 0)
        weights = [spread(load(norm.at[at], ACROSS), a.shape, 1) for at in _columns(spec)]
        # Rounded where the reference rounds.
        a, b = (
            ((x * scale).astype(jnp.bfloat16) * w).astype(jnp.float32)
            for x, w in zip((a, b), weights, strict=True)
        )
    return [x.astype(jnp.bfloat16) for x in (a * cos - b * sin, b * cos + a * sin)]


def _columns(spec: Spec):
    return [pl.ds(i * spec.half, spec.half) for i in range(2)]


def _halves(spec: Spec, ref):
    return [load(ref.at[:, at], plgpu.Layout.WGMMA) for at in _columns(spec)]


def _store_halves(spec: Spec, ref, halves):
    """Into `ref [QUERIES, D]`, for copies and products."""
    for at, x in zip(_columns(spec), halves, strict=True):
        store(ref.at[:, at], x)
    plgpu.commit_smem()


def _seen_nothing(spec: Spec):
    """Sums before the first key, see `_attend`."""
    return (
        full((QUERIES, spec.dim), 0.0, plgpu.Layout.WGMMA),
        full((QUERIES,), _LEAST, DOWN),
        full((QUERIES,), 0.0, DOWN),
    )


def _seen_itself(spec: Spec, at: _Scratch, k):
    """Sums of query rows that have seen their own keys alone, `k` in halves: see `_attend`."""
    products = [
        a.astype(jnp.float32) * b.astype(jnp.float32)
        for a, b in zip(_halves(spec, at.q), k, strict=True)
    ]
    scores = sum(jnp.sum(x, axis=1) for x in products) * (spec.dim**-0.5 * _LOG2_E)
    v = load(at.itself_v, plgpu.Layout.WGMMA).astype(jnp.float32)
    return v, scores, full((QUERIES,), 1.0, DOWN)


def _attend(spec: Spec, at: _Scratch, share: Share, warpgroup, q_pos, fetch, state):
    """A worker's sums, `state` and its tiles: weighted values `[QUERIES, D]`, maximum and total
    `[QUERIES]`.
    """

    def step(i, state):
        stage = warpgroup * spec.stages + jax.lax.rem(i, jnp.int32(spec.stages))
        plgpu.barrier_wait(at.tile_here.at[stage])
        start = share.tile(i) * KEYS

        def places(layout):
            slots = start + plgpu.layout_cast(jnp.arange(KEYS, dtype=jnp.int32), layout)
            here = (slots >= share.first) & (slots < share.limit)
            return jnp.where(here, load(at.places.at[stage], layout), ABSENT)

        @pl.when(spec.ring | (start < share.first) | (start + KEYS > share.limit))
        def _():
            # 0 * NaN is NaN: of an empty slot, not even a zero weight may meet the value.
            held = spread(places(DOWN), (KEYS, spec.dim), 0) != ABSENT
            v = plgpu.load(at.v.at[stage], layout=plgpu.Layout.WGMMA)
            at.v.at[stage][...] = jnp.where(held, v, jnp.zeros_like(v))
            plgpu.commit_smem()

        state = _accumulate(spec, at, warpgroup, q_pos, places(ACROSS), stage, state)

        @pl.when(i + spec.stages < share.steps)
        def _():
            plgpu.commit_smem()  # All four warps have read the stage.
            fetch(i + spec.stages, stage)

        return state

    return jax.lax.fori_loop(0, share.steps, step, state)


def _accumulate(spec: Spec, at: _Scratch, warpgroup, q_pos, k_pos, stage, state):
    """Online softmax: weighted values, running maximum and sum of weights, one tile further."""
    acc, top, total = state
    shape = (QUERIES, KEYS)
    scores = product(at.q, at.k.at[stage].transpose((1, 0)), shape)
    # Powers of two are what the hardware has: the factor of e goes into the scale.
    scores = scores * (spec.dim**-0.5 * _LOG2_E)
    seen = spread(k_pos, shape, 1)
    mask = seen != ABSENT
    if spec.causal or spec.window is not None:
        distance = spread(q_pos, shape, 0) - seen
    if spec.causal:
        mask = mask & (distance >= int(spec.tree))
    if spec.window is not None:
        mask = mask & (distance < spec.window) & (distance > -spec.window)
    scores = jnp.where(mask, scores, _LEAST)
    higher = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.where(mask, jnp.exp2(scores - spread(higher, shape, 0)), 0.0)
    fade = jnp.exp2(top - higher)
    total = total * fade + jnp.sum(weights, axis=1)
    weights = weights.astype(jnp.bfloat16)
    if spec.interpret:
        # Interpreted, both factors have to lie in shared memory.
        at.weights.at[warpgroup][...] = weights
        weights = at.weights.at[warpgroup]
    values = product(weights, at.v.at[stage], acc.shape)
    return acc * spread(fade, acc.shape, 0) + values, higher, total


def _exchange(spec: Spec, at: _Scratch, sums, out, mine, head, worker, warpgroup):
    """Give each worker its columns of this one's sums, and store this one's of all."""
    values, *rest = mine
    for i, column in enumerate(range(0, spec.dim, spec.columns)):
        store(sums[0].at[i, worker], values[:, column : column + spec.columns])
    for x, ref in zip(rest, sums[1:], strict=True):
        store(ref.at[worker], x)
    fence()
    plgpu.commit_smem()
    plgpu.barrier_arrive(at.summed)
    # All wait: a block must not end while another may still arrive in its memory.
    plgpu.barrier_wait(at.summed)
    fence()

    @pl.when(worker * spec.columns < spec.dim)
    def _():
        merged = at.merged.at[warpgroup]
        store(merged, _merge(spec, sums, worker).astype(jnp.bfloat16))
        plgpu.commit_smem()
        for i in range(spec.held):
            column = (head + i) * spec.dim + worker * spec.columns
            plgpu.copy_smem_to_gmem(
                merged.at[pl.ds(i * spec.pitch, spec.rows)],
                out.at[:, pl.ds(column, spec.columns)],
            )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _merge(spec: Spec, sums, worker):
    """Attended rows `[QUERIES, columns]`: this worker's columns, of all workers' sums."""
    acc, top, total = sums
    shape = (QUERIES, spec.columns)
    tops = [load(top.at[i], DOWN) for i in range(spec.workers)]
    totals = [load(total.at[i], DOWN) for i in range(spec.workers)]
    parts = [load(acc.at[worker, i], plgpu.Layout.WGMMA) for i in range(spec.workers)]
    highest = tops[0]
    for x in tops[1:]:
        highest = jnp.maximum(highest, x)
    weights = [jnp.exp2(x - highest) for x in tops]
    whole = sum(w * x for w, x in zip(weights, totals, strict=True))
    summed = sum(spread(w, shape, 0) * x for w, x in zip(weights, parts, strict=True))
    return summed / spread(whole, shape, 0)
