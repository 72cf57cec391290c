"""The fused attention kernel against the reference: interpreted here, compiled on a GPU."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import ampere, launches, lowered
from jax.experimental import pallas as pl
from targets import TINY, TINY_TARGET, tiny_draft, tiny_target

from dflash_jax import forward_round, generate, ingest_ctx, kernels
from dflash_jax import kv as cache
from dflash_jax.attention import BlockPlace, append_and_attend
from dflash_jax.kv import ABSENT
from dflash_jax.layers import rope_frequencies

# jax 0.11 and newer still ship the Triton backend, with a warning.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

kernel = kernels.kernel("attention")
F32, BF16 = jnp.float32, jnp.bfloat16
TOLERANCE = {F32: 1e-5, BF16: 1e-2}
KEYS = 16
CUT = kernel.Tiling(keys=KEYS, alone=1, steps=1, aligned=1, splits=4, programs=64, num_stages=1)
"""Cuts even the short contexts of these tests into several splits."""
WHOLE = dataclasses.replace(CUT, alone=1000, aligned=1000)
EPS = 1e-6


def draw(rng, dtype, *shape, held=True):
    """Normal numbers, NaN where not `held`."""
    return jnp.asarray(np.where(held, rng.normal(size=shape), np.nan), dtype)


def problem(
    lens=(40,),
    rows=4,
    heads=4,
    kv_heads=2,
    dim=32,
    slots=96,
    dtype=F32,
    normed=True,
    floor=0,
    seed=0,
):
    """A block behind `lens` cached rows, at positions from `floor` on; NaN in every other slot.

    Returns the arguments of `append_and_attend`.
    """
    rng, batch, at = np.random.default_rng(seed), len(lens), np.arange(slots)
    slot = np.asarray(lens, np.int32)
    pos = np.where(at < slot[:, None] + rows, at + floor, ABSENT).astype(np.int32)
    q_pos = (slot[:, None] + floor + np.arange(rows)).astype(np.int32)
    held = (at < slot[:, None])[:, None, :, None]
    k, v = (draw(rng, dtype, batch, kv_heads, slots, dim, held=held) for _ in range(2))
    place = place_of(q_pos, pos, slot, slot, dim)
    qkv = draw(rng, dtype, batch, rows, (heads + 2 * kv_heads) * dim)
    norms = (draw(rng, dtype, dim), draw(rng, dtype, dim)) if normed else None
    return qkv, norms, EPS, place, k, v


def place_of(q_pos, k_pos, slot, end, dim, ring=False):
    inv_freq, _ = rope_frequencies(TINY.rope, dim)
    angles = q_pos[..., None] * inv_freq[None, None]
    numbers = (jnp.asarray(x, jnp.int32) for x in (q_pos, k_pos, slot, end))
    return BlockPlace(jnp.cos(angles), jnp.sin(angles), *numbers, ring)


def on_a_tree(args, seed=0, spine=None):
    """A block of `problem`, its rows the nodes of a tree of so long a spine (None: one drawn for
    each sequence) and else of leaves.
    """
    place, rng = args[3], np.random.default_rng(seed)
    batch, rows = place.q_pos.shape
    spines = np.full(batch, spine) if spine else rng.integers(2, rows, batch)
    leaves = rng.integers(1, np.maximum(spines, 2)[:, None], (batch, rows))
    depth = np.where(np.arange(rows) < spines[:, None], np.arange(rows), leaves)
    first_leaf = np.asarray(place.slot) + spines
    k_pos = np.where(np.arange(place.k_pos.shape[1]) < first_leaf[:, None], place.k_pos, ABSENT)
    q_pos = np.asarray(place.q_pos)[:, :1] + depth
    place = place_of(q_pos, k_pos, place.slot, place.end, 2 * place.cos.shape[-1])
    return *args[:3], place.replace(tree=True), *args[4:]


def turned_ring(turns_at, rows=4, dim=32, dtype=F32, heads=4, kv_heads=2):
    """A ring of the cache module, some appends after it started over; NaN in its empty slots."""
    config = dataclasses.replace(
        TINY, layer_window=(6, 6), head_dim=dim, num_key_value_heads=kv_heads
    )
    kv = cache.allocate(config, 1, 64, dtype)
    book, at = kv.ring, 0
    assert book.pos.shape[1] == 24, "6 + 4 + 2 * 5, in eights"
    rng = np.random.default_rng(turns_at)
    while at < turns_at:
        slot = cache.reserve(book, 3)
        pos = jnp.asarray([[at, at + 1, ABSENT]], jnp.int32)
        book = book.replace(pos=cache.mark(book, slot, pos), next=slot + 2)
        at += 2
    slot = cache.reserve(book, rows)
    q_pos = at + np.arange(rows)[None]
    marked = cache.mark(book, slot, jnp.asarray(q_pos, jnp.int32))
    end = cache.context_end(book, slot)
    own = np.arange(marked.shape[1]) - int(slot[0])
    held = (np.asarray(marked) != ABSENT) & ~((own >= 0) & (own < rows))
    held = held[:, None, :, None]
    k, v = (draw(rng, dtype, 1, kv_heads, marked.shape[1], dim, held=held) for _ in range(2))
    qkv = draw(rng, dtype, 1, rows, (heads + 2 * kv_heads) * dim)
    norms = draw(rng, dtype, dim), draw(rng, dtype, dim)
    return qkv, norms, EPS, place_of(q_pos, marked, slot, end, dim, ring=True), k, v


def close(got, expected, tolerance=1e-5):
    """Finite and equal to `tolerance` of the largest value."""
    got, expected = (np.asarray(x, np.float64) for x in (got, expected))
    assert got.shape == expected.shape and np.isfinite(got).all()
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


def same(got, expected):
    """Equal bits, NaN included."""
    np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(expected, np.float64))


reference = jax.jit(
    partial(append_and_attend, implementation="xla"), static_argnames=("eps", "causal", "window")
)


def check(args, tiling=CUT, tolerance=None, run=None, **kind):
    """Kernel equals reference: attended rows, appended rows; no other row of a cache moved."""
    tolerance = tolerance or TOLERANCE[args[0].dtype.type]
    expected = reference(*args, **kind)
    run = run or partial(kernel.append_and_attend, tiling=tiling, interpret=True)
    got = run(*args, **kind)
    assert [x.dtype for x in got] == [x.dtype for x in expected]
    close(got[0], expected[0], tolerance)
    batch, slots, rows = len(args[0]), args[4].shape[2], args[0].shape[1]
    own = np.arange(slots) - np.asarray(args[3].slot)[:, None]
    own = ((own >= 0) & (own < rows)).nonzero()
    assert own[0].size == batch * rows
    for old, leaf, wanted in zip(args[4:], got[1:], expected[1:], strict=True):
        old, leaf, wanted = (np.array(x, np.float64).swapaxes(1, 2) for x in (old, leaf, wanted))
        close(leaf[own], wanted[own], tolerance)
        leaf[own] = old[own]
        np.testing.assert_array_equal(leaf, old)
    same(got[2], expected[2])
    return got


# --- the reference, everywhere ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causal", "window", "tiling"),
    [
        (False, None, CUT),
        (True, None, CUT),
        (False, 21, CUT),
        (True, 21, CUT),
        (False, 2, CUT),
        (False, None, WHOLE),
        (True, 21, WHOLE),
    ],
)
def test_equals_the_reference_at_every_length(causal, window, tiling):
    for length in (0, 1, KEYS - 1, KEYS, KEYS + 1, 80, 92):
        check(problem((length,)), tiling, causal=causal, window=window)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, 9)])
def test_sequences_of_different_lengths(causal, window):
    for lens in ((0, 33, 92), (92, 1, 16)):
        check(problem(lens), causal=causal, window=window)


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "normed"),
    [
        (1, 4, 1, 32, True),
        (3, 9, 3, 64, False),
        (16, 4, 4, 32, False),
        (16, 8, 2, 64, True),
        (5, 2, 2, 128, True),
    ],
)
def test_shapes_of_blocks_and_heads(rows, heads, kv_heads, dim, normed):
    shape = dict(rows=rows, heads=heads, kv_heads=kv_heads, dim=dim, normed=normed)
    check(problem((40,), **shape), causal=True, window=None)


@pytest.mark.parametrize(("causal", "tiling"), [(False, CUT), (True, WHOLE)])
def test_bf16(causal, tiling):
    for length in (0, 40):
        check(problem((length,), dtype=BF16, dim=64), tiling, causal=causal, window=30)


def test_positions_start_at_a_floor():
    for length in (0, 5, 50):
        check(problem((length,), floor=1000), causal=False, window=20)
        check(problem((length,), floor=1000), causal=False, window=None)


@pytest.mark.parametrize(("causal", "tiling"), [(False, CUT), (True, CUT), (False, WHOLE)])
def test_rings_before_and_after_they_turn(causal, tiling):
    seen = set()
    for rows_held in (0, 2, 8, 14, 16, 18, 20, 34):
        args = turned_ring(rows_held)
        seen.add(int(args[3].slot[0]) < rows_held)
        check(args, tiling, causal=causal, window=6)
    assert seen == {False, True}


def test_rows_outside_the_window_are_skipped_not_masked():
    """Rows behind every window hold NaN here, which a masked read would let through."""
    window, args = 10, problem((80,))
    args = list(args)
    behind = (jnp.arange(96) < 80 - (window - 1))[None, None, :, None]
    clean = kernel.append_and_attend(*args, causal=False, window=window, tiling=CUT, interpret=True)
    args[4:] = [jnp.where(behind, jnp.nan, leaf) for leaf in args[4:]]
    dirty = kernel.append_and_attend(*args, causal=False, window=window, tiling=CUT, interpret=True)
    assert np.isfinite(np.asarray(dirty[0])).all()
    np.testing.assert_array_equal(dirty[0], clean[0])


@pytest.mark.parametrize("length", [0, 3, 16, 30, 90])
def test_capacity_and_what_lies_past_the_rows_change_no_bit(length):
    outs = []
    for slots, fill in ((96, np.nan), (160, np.inf), (400, -1.0)):
        args = list(problem((length,)))
        room = ((0, 0), (0, 0), (0, slots - 96), (0, 0))
        empty = (jnp.arange(slots) >= length)[None, None, :, None]
        args[4:] = [jnp.where(empty, fill, jnp.pad(leaf, room)) for leaf in args[4:]]
        pos = jnp.pad(args[3].k_pos, room[2:0:-1], constant_values=ABSENT)
        args[3] = args[3].replace(k_pos=pos)
        run = partial(kernel.append_and_attend, tiling=CUT, interpret=True)
        outs.append(np.asarray(run(*args, causal=False, window=None)[0]))
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


def test_a_large_cache_cuts_small_contexts_like_a_small_one():
    for tiling in (CUT, kernel.Tiling(), kernel.tiling_for(64, 64, 2, False)):
        alone, few = tiling.alone * tiling.keys, (tiling.alone + 1) * tiling.keys
        assert kernel._splits(tiling, 8, alone) == 1
        assert kernel._splits(tiling, 8, few) == -(-(tiling.alone + 1) // tiling.steps)
        assert kernel._splits(tiling, 8, 1 << 20) <= max(1, tiling.programs // 8)


def aligned_case(start, total, rows, dtype, slots, window, dim=32, fill=reference):
    """Rows `start .. start + rows` of one sequence of `total` rows, as a block over the rest, which
    `fill` has put into the caches.
    """
    rng = np.random.default_rng(5)
    heads, kv_heads = 4, 2
    everything = draw(rng, dtype, 1, total, (heads + 2 * kv_heads) * dim)
    norms = draw(rng, dtype, dim), draw(rng, dtype, dim)
    empty = jnp.full((1, kv_heads, slots, dim), jnp.nan, dtype)
    kind = {"causal": True, "window": window}

    def block(first, count, k, v):
        q_pos = first + np.arange(count)[None]
        k_pos = np.where(np.arange(slots) < first + count, np.arange(slots), ABSENT)[None]
        at = np.array([first])
        place = place_of(q_pos, k_pos, at, at, dim)
        return everything[:, first : first + count], norms, EPS, place, k, v

    k, v = fill(*block(0, start, empty, empty), **kind)[1:]
    return block(start, rows, k, v), kind


@pytest.mark.parametrize(("dtype", "window"), [(F32, 11), (BF16, None)])
def test_a_causal_row_rounds_the_same_wherever_its_block_began(dtype, window):
    """Bit for bit: row 40 as any row of its block, or alone; across steps and splits."""
    rows, run = {}, partial(kernel.append_and_attend, tiling=CUT, interpret=True)
    for start in (33, 37, 40):
        args, kind = aligned_case(start, 48, 8, dtype, 64, window, fill=run)
        check(args, run=run, **kind)
        rows[start] = np.asarray(run(*args, **kind)[0][0, 40 - start], np.float64)
    for row in rows.values():
        np.testing.assert_array_equal(row, rows[40])


@pytest.mark.parametrize(("start", "slots"), [(50, 64), (50, 4096), (600, 4096)])
def test_long_contexts_take_more_steps_a_split(start, slots):
    """Past 32 splits of one step, four steps each: still the reference, at any capacity."""
    args, kind = aligned_case(start, start + 10, 3, F32, slots, None)
    tiling = dataclasses.replace(CUT, keys=16)
    check(args, run=partial(kernel.append_and_attend, tiling=tiling, interpret=True), **kind)


@pytest.mark.parametrize(
    ("dim", "kv_heads", "splits"),
    # One sequence, eight and 32 of Qwen3-8B's shape; 32 of SmolLM2's.
    [(128, 8, 32), (128, 64, 4), (128, 256, 1), (64, 96, 4)],
)
def test_many_sequences_share_the_card_with_fewer_splits(dim, kv_heads, splits):
    tiling = kernel.tiling_for(dim, 32, 2, True, kv_heads)
    assert kernel._splits(tiling, kv_heads, 4096, aligned=True) == splits


def test_one_split_rounds_a_causal_row_the_same_wherever_its_block_began():
    tiling = dataclasses.replace(CUT, aligned=kernel.ALL)
    rows, run = [], partial(kernel.append_and_attend, tiling=tiling, interpret=True)
    for start in (33, 37, 40):
        args, kind = aligned_case(start, 48, 8, BF16, 64, None, fill=run)
        check(args, run=run, **kind)
        rows.append(np.asarray(run(*args, **kind)[0][0, 40 - start], np.float64))
    np.testing.assert_array_equal(rows[0], rows[2])
    np.testing.assert_array_equal(rows[1], rows[2])


def test_rows_that_would_not_fit_stay_inside_the_cache():
    """Like a slice update: the block moves back, nothing is written past the end."""
    args = list(problem((92,)))
    args[3] = args[3].replace(slot=jnp.asarray([94], jnp.int32))
    got = kernel.append_and_attend(*args, causal=True, window=None, tiling=CUT, interpret=True)
    expected = append_and_attend(*args, causal=True, window=None, implementation="xla")
    np.testing.assert_array_equal(got[2], expected[2])


# --- draft trees --------------------------------------------------------------------------------

SMOL = dict(heads=9, kv_heads=3, dim=64, normed=False)
QWEN = dict(heads=8, kv_heads=2, dim=128)
# Own rows in one step, across several and from the first slot on; spines of all lengths.
TREES = [
    ((40,), dict(SMOL, rows=16), None, None),
    ((30, 0), dict(SMOL, rows=24), None, 9),
    ((50,), dict(SMOL, rows=32), 5, 40),
    ((40, 33), dict(QWEN, rows=16), 16, None),
    ((9,), dict(QWEN, rows=24, floor=1000), 2, 3),
    ((0, 60), dict(QWEN, rows=32), None, None),
    ((31, 16), dict(heads=4, kv_heads=4, rows=16), 12, 1),
    ((0, 47), dict(heads=4, kv_heads=4, rows=1), 1, None),
    ((48,), dict(QWEN, rows=1), 1, 20),
]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("lens", "shape", "spine", "window"), TREES)
def test_nodes_of_a_tree_see_what_is_before_them_and_themselves(lens, shape, spine, window, dtype):
    args = on_a_tree(problem(lens, **shape, dtype=dtype), spine=spine)
    for tiling in (CUT, WHOLE):
        check(args, tiling, causal=True, window=window)


def later_rounds(run, dtype, window, starts, first=8, slots=96, dim=32):
    """Pairs of attended rows: each leaf's of the trees at `starts`, and that of the same position
    in a round which has it in its spine, and begins there, before, or where the tree does.

    run: `append_and_attend`. Rows from `first` on are written by it, as many at a time as a tree
    has nodes: rows of f32 blocks of another size may differ in rounding.
    """
    spine, leaves = np.arange(8), np.array([1, 7, 2, 4, 7])
    depth, at = np.concatenate([spine, leaves])[None], np.arange(slots)
    total, rows, written = first + 4 * depth.size, depth.size, run
    for begin in range(first, total, rows):
        case, kind = aligned_case(begin, total, rows, dtype, slots, window, dim, fill=written)
        written = partial(lambda caches, *_, **__: caches, run(*case, **kind))
    whole, _ = aligned_case(first, total, total - first, dtype, slots, window, dim, fill=written)
    text, (k, v) = whole[0][0], whole[4:]
    other = draw(np.random.default_rng(6), dtype, *text.shape)

    def attended(start, text):
        from_text, from_other = text[start - first + spine], other[start - first + leaves]
        k_pos = np.where(at < start + spine.size, at, ABSENT)[None]
        slot = np.array([start])
        place = place_of(start + depth, k_pos, slot, slot, dim).replace(tree=True)
        caches = (jnp.where((at < start)[:, None], cache, jnp.nan) for cache in (k, v))
        block = jnp.concatenate([from_text, from_other])[None]
        return run(block, *whole[1:3], place, *caches, **kind)[0][0]

    for start in starts:
        nodes = attended(start, text)
        for node, pos in zip(nodes[spine.size :], start + leaves, strict=True):
            taken = text.at[pos - first].set(other[pos - first])
            for begin in sorted({start, pos - 1, pos}):
                yield node, attended(begin, taken)[pos - begin]


@pytest.mark.parametrize(
    ("dtype", "window", "tiling"),
    [(F32, None, CUT), (BF16, None, CUT), (F32, 11, WHOLE), (BF16, 11, CUT), (BF16, 1, CUT)],
)
def test_a_leaf_rounds_as_its_row_in_a_later_round(dtype, window, tiling):
    """Bit for bit, across steps and splits."""
    run = partial(kernel.append_and_attend, tiling=tiling, interpret=True)
    pairs = list(later_rounds(run, dtype, window, (9, 24, 29, 32, 47)))
    assert len(pairs) == 5 * 14
    for leaf, later in pairs:
        same(leaf, later)


# --- inside other programs ----------------------------------------------------------------------


def test_vmapped():
    problems = [problem((n, 7), seed=n) for n in (3, 50)]
    arrays = [(p[0], p[1], *p[3:]) for p in problems]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *arrays)

    def run(qkv, norms, place, k, v):
        return kernel.append_and_attend(
            qkv, norms, EPS, place, k, v, causal=False, window=30, tiling=CUT, interpret=True
        )

    got = jax.vmap(run)(*stacked)
    for i, args in enumerate(arrays):
        for x, y in zip(got, run(*args), strict=True):
            np.testing.assert_array_equal(x[i], y)


def test_in_a_loop_that_carries_the_caches():
    args = problem((5, 30))
    qkvs = draw(np.random.default_rng(9), F32, 3, *args[0].shape)

    def loop(attend):
        def step(carry):
            i, k, v, outs = carry
            place = args[3]
            moved = place.slot + 4 * i
            at = jnp.arange(96)[None]
            k_pos = jnp.where(at < moved[:, None] + 4, at, ABSENT)
            q_pos = place.q_pos + 4 * i
            place = place_of(q_pos.astype(F32), k_pos, moved, moved, 32)
            out, k, v = attend(qkvs[i], args[1], EPS, place, k, v, causal=True, window=None)
            return i + 1, k, v, outs.at[i].set(out)

        outs = jnp.zeros((3, *args[0].shape[:2], 4 * 32))
        carry = (jnp.int32(0), *args[4:], outs)
        return jax.jit(lambda c: jax.lax.while_loop(lambda c: c[0] < 3, step, c))(carry)

    got = loop(partial(kernel.append_and_attend, tiling=CUT, interpret=True))
    expected = loop(partial(append_and_attend, implementation="xla"))
    close(got[3], expected[3])
    for leaf, wanted in zip(got[1:3], expected[1:3], strict=True):
        assert (np.isnan(leaf) == np.isnan(wanted)).all()
        close(np.nan_to_num(leaf), np.nan_to_num(wanted))


@pytest.fixture
def interpreted(monkeypatch):
    """As on a GPU, with every kernel interpreted; the shapes of blocks that attention took."""
    calls, run, call = [], kernel.append_and_attend, pl.pallas_call

    def counted(*args, **kind):
        calls.append(args[0].shape)
        return run(*args, **kind, tiling=CUT)

    def interpreting(*args, **options):
        return call(*args, **{**options, "interpret": True})

    monkeypatch.setattr(kernels, "device_refusal", ampere)
    monkeypatch.setattr(kernel, "append_and_attend", counted)
    monkeypatch.setattr(pl, "pallas_call", interpreting)
    yield calls
    # What was compiled here must not serve where nothing is interpreted.
    jax.clear_caches()


DRAFT = dataclasses.replace(TINY, head_dim=32, layer_window=(6, None))
TARGET = dataclasses.replace(TINY_TARGET, head_dim=32, layer_window=(None, 9, None))


def test_the_drafters_round_runs_it(interpreted):
    draft = tiny_draft(DRAFT)
    kv, rng, append = (
        cache.allocate(DRAFT, 2, 48, F32),
        np.random.default_rng(0),
        jax.jit(ingest_ctx),
    )
    for at in range(0, 33, 3):
        pos = np.tile(np.arange(at, at + 3, dtype=np.int32), (2, 1))
        kv = append(draft, kv, draw(rng, F32, 2, 3, 32), jnp.asarray(pos))
    noise, pos = draw(rng, F32, 2, 4, 32), jnp.tile(jnp.arange(33, 37), (2, 1))
    run = jax.jit(forward_round, static_argnums=4)
    (got, kept), (expected, wanted) = (
        run(draft, kv, noise, pos, implementation) for implementation in ("pallas", "xla")
    )
    assert len(interpreted) == 2
    close(got, expected)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-5), kept, wanted)


def test_generation_says_the_same_tokens(interpreted):
    target, draft = tiny_target(TARGET), tiny_draft(DRAFT)
    prompts = [[5, 9, 2, 40, 7, 7, 31], [3] * 12]
    got, expected = (
        generate(target, draft, prompts, 24, implementation=name) for name in ("pallas", "xla")
    )
    assert [g.token_ids for g in got] == [e.token_ids for e in expected]
    assert [g.acceptance_lengths for g in got] == [e.acceptance_lengths for e in expected]
    widths = {shape[1] for shape in interpreted}
    assert widths == {4, 16}, "the block, its verify and a short prompt chunk"


def test_logits_are_the_same_by_one_row_a_verify_and_a_chunk_that_no_kernel_takes(interpreted):
    target, rows = tiny_target(TARGET), kernel.MAX_ROWS // 2 + 1
    text = np.random.default_rng(0).integers(0, 64, (1, rows)).astype(np.int32)

    @jax.jit
    def read(state, ids):
        out, after = target.forward(state, ids, (), "pallas")
        return target.logits(out.hidden)[0], after

    whole, full = read(target.init_state(1, rows), text)
    assert not interpreted
    bound = 1e-5 * float(jnp.abs(whole).max())
    for start in (0, 5, 6, 7, 8, 9, KEYS - 2, KEYS - 1, KEYS, rows - 4):
        for width in (1, 4):
            at = full.replace(len=jnp.asarray([start]))
            logits, _ = read(at, text[:, start : start + width])
            np.testing.assert_allclose(
                logits, whole[start : start + width], rtol=0, atol=bound, err_msg=f"{start} {width}"
            )
    assert {shape[1] for shape in interpreted} == {1, 4}


def test_wide_chunks_stay_with_the_reference(interpreted):
    args = problem((0,), rows=kernel.MAX_ROWS // 2 + 1)
    got = append_and_attend(*args, causal=True, window=None, implementation="pallas")
    expected = append_and_attend(*args, causal=True, window=None, implementation="xla")
    np.testing.assert_array_equal(got[0], expected[0])
    assert not interpreted


def test_what_it_cannot_take_is_refused_by_name(interpreted):
    args = problem(dim=24)
    with pytest.raises(NotImplementedError, match=r"head_dim: expected a power of two .* 24"):
        append_and_attend(*args, causal=True, window=None, implementation="pallas")
    append_and_attend(*args, causal=True, window=None)
    assert not interpreted


def test_on_cpu_it_is_refused_and_never_chosen():
    args = problem()
    with pytest.raises(NotImplementedError, match=r"'pallas': device: .* found cpu"):
        append_and_attend(*args, causal=True, window=None, implementation="pallas")
    chosen = append_and_attend(*args, causal=True, window=None)
    named = append_and_attend(*args, causal=True, window=None, implementation="xla")
    jax.tree.map(np.testing.assert_array_equal, chosen, named)
    target, draft = tiny_target(), tiny_draft()
    with pytest.raises(NotImplementedError, match=r"'pallas': device"):
        generate(target, draft, [1, 2, 3], 4, implementation="pallas")


# --- for a GPU ----------------------------------------------------------------------------------

PRESETS = {
    "qwen3-8b": dict(heads=32, kv_heads=8, dim=128),
    "smollm2": dict(heads=9, kv_heads=3, dim=64, normed=False),
    "eight queries a key": dict(heads=64, kv_heads=8, dim=128),
}


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("preset", PRESETS)
def test_lowers_for_cuda(preset, rows, dtype):
    for slots, window, causal in ((273, None, True), (4113, None, True), (4113, 2048, False)):
        shape = dict(PRESETS[preset], rows=rows, dtype=dtype, slots=slots)
        args = dict(zip("qnepkv", problem(**shape), strict=True))
        text = lowered(
            lambda q, n, p, k, v, kind=(causal, window): kernel.append_and_attend(
                q, n, EPS, p, k, v, causal=kind[0], window=kind[1]
            ),
            *(args[name] for name in "qnpkv"),
        )
        small = slots == 273 and preset == "smollm2" and dtype == BF16
        assert launches(text) == (1 if small else 2)
        assert text.count("output_operand_aliases") >= 1


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("rows", [16, 24, 32])
@pytest.mark.parametrize("preset", ["qwen3-8b", "smollm2"])
def test_lowers_for_cuda_with_a_tree(preset, rows, dtype):
    args = on_a_tree(problem((200,), **PRESETS[preset], rows=rows, dtype=dtype, slots=2113))
    for window in (None, 100):
        text = lowered(
            lambda q, n, p, k, v, window=window: kernel.append_and_attend(
                q, n, EPS, p, k, v, causal=True, window=window
            ),
            *(args[i] for i in (0, 1, 3, 4, 5)),
        )
        assert launches(text) == 2


@pytest.fixture
def exact():
    """f32 products on a GPU are rounded to TF32 unless asked not to be."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("rows", "slots"), [(16, 2113), (1, 2113), (5, 273)])
def test_compiled_equals_the_reference(exact, preset, dtype, rows, slots):
    shape = dict(PRESETS[preset], rows=rows, dtype=dtype, slots=slots)
    for lens in ((0,), (1,), (slots - 17,), (63, 64, 130)):
        args = problem(lens, **shape)
        for causal, window in ((True, None), (False, None), (False, 100)):
            run = kernel.append_and_attend
            first = check(args, run=run, causal=causal, window=window)
            second = run(*args, causal=causal, window=window)
            jax.tree.map(same, first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("preset", ["qwen3-8b", "smollm2"])
@pytest.mark.parametrize("rows", [16, 24, 32])
def test_compiled_trees_equal_the_reference(exact, preset, dtype, rows):
    for lens in ((0,), (50,), (1000,), (63, 64, 130)):
        args = problem(lens, **PRESETS[preset], rows=rows, dtype=dtype, slots=1093)
        args, run = on_a_tree(args, seed=rows), kernel.append_and_attend
        for window in (None, 9, 100):
            first = check(args, run=run, causal=True, window=window)
            jax.tree.map(same, first, run(*args, causal=True, window=window))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("dim", [64, 128])
def test_compiled_a_leaf_rounds_as_its_row_in_a_later_round(dim, dtype, window):
    def run(qkv, *rest, **kind):
        few = qkv.shape[1] <= kernel.MAX_ROWS // 2
        return (kernel.append_and_attend if few else reference)(qkv, *rest, **kind)

    where = dict(first=1000, slots=2113, dim=dim)
    for leaf, later in later_rounds(run, dtype, window, (1009, 1021, 1040), **where):
        same(leaf, later)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_compiled_rings(exact, dtype):
    for held in (0, 8, 16, 34):
        args = turned_ring(held, dtype=dtype)
        check(args, run=kernel.append_and_attend, causal=False, window=6)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("rows", "dim"), [(16, 128), (12, 64), (1, 64)])
def test_compiled_a_causal_row_rounds_the_same_wherever_its_block_began(rows, dim, dtype, window):
    """As any row of its block; in bf16 in a block of any size, so alone too. (f32 products of other
    sizes are summed in other orders: some 1e-7, at which no near-tie falls.)
    """
    whole, kind = aligned_case(1000, 1064, 64, dtype, 2113, window, dim=dim)
    out, k, v = kernel.append_and_attend(*whole, **kind)
    expected = out[0, 30] if dtype == BF16 else None
    for start in sorted({1030 - rows // 2, 1030 - rows + 1, 1030}):
        args, _ = aligned_case(
            start, 1064, rows, dtype, 2113, window, dim, lambda *_, **__: (0, k, v)
        )
        row = kernel.append_and_attend(*args, **kind)[0][0, 1030 - start]
        expected = row if expected is None else expected
        same(row, expected)
