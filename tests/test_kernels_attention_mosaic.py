"""The Hopper attention kernel against the reference: interpreted here, compiled on a GPU."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import ampere, lowered
from targets import TINY, tiny_draft, tiny_target
from test_kernels import Device
from test_kernels_attention import (
    BF16,
    EPS,
    F32,
    PRESETS,
    aligned_case,
    check,
    close,
    later_rounds,
    on_a_tree,
    problem,
    reference,
    same,
    turned_ring,
)

from dflash_jax import forward_round, generate, kernels, quant
from dflash_jax import kv as cache
from dflash_jax.attention import append_and_attend, faster_on_hopper, project_qkv

old = jax.__version_info__ < (0, 11)
needs_interface = pytest.mark.skipif(old, reason="jax 0.10 has not all of Mosaic GPU's interface")
# Interpreted, 0.11 takes no step where barriers of several blocks meet.
needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="interpreted from jax 0.12 on"
)


@pytest.fixture
def kernel():
    return kernels.kernel("attention_mosaic")


@pytest.fixture
def run(kernel):
    """Interpreted; one warpgroup a block, for as many threads as the suite's device has. So a call
    ends before the next begins: two at a time would wait for each other's threads.
    """
    tiling = kernel.Tiling(warpgroups=1, stages=2)

    def ended(*args, **kind):
        done = kernel.append_and_attend(*args, interpret=True, tiling=tiling, **kind)
        return jax.block_until_ready(done)

    return ended


def narrow(*lens, rows=16, heads=4, kv_heads=1, dim=64, slots=160, **more):
    shape = dict(rows=rows, heads=heads, kv_heads=kv_heads, dim=dim, slots=slots)
    return problem(lens, dtype=BF16, **shape, **more)


def parts_of(qkv, count=4):
    """f32 parts that add up to the rows, to f32 rounding: rounded once, the rows themselves."""
    rng, parts = np.random.default_rng(count), np.zeros((count, *qkv.shape), np.float32)
    parts[:-1] = rng.normal(size=parts[:-1].shape)
    parts[-1] = np.asarray(qkv, np.float32) - parts.sum(axis=0)
    return jnp.asarray(parts)


def taking_parts(run, count=4):
    return lambda qkv, *rest, **kind: run(parts_of(qkv, count), *rest, **kind)


# --- the switch ---------------------------------------------------------------------------------


def test_on_cpu_it_is_refused_and_never_chosen():
    args = narrow(40)
    with pytest.raises(NotImplementedError, match=r"'mosaic': device: .* found cpu"):
        append_and_attend(*args, causal=True, window=None, implementation="mosaic")
    with pytest.raises(NotImplementedError, match=r"'mosaic': device"):
        generate(tiny_target(), tiny_draft(), [1, 2, 3], 4, implementation="mosaic")
    assert kernels.mosaic_kernel(None, "attention", best=True) is None
    assert kernels.mosaic_kernel("pallas", "attention", best=True) is None


def test_ops_without_such_a_kernel_choose_by_themselves(monkeypatch):
    assert kernels.resolve("mosaic") == "xla"
    monkeypatch.setattr(kernels, "device_refusal", ampere)
    assert kernels.resolve("mosaic") == "pallas"
    assert kernels.resolve("mosaic", best="xla") == kernels.resolve("mosaic", "odd") == "xla"


@pytest.mark.parametrize("capability", ["8.0", "10.0", "9.1"])
def test_only_hopper_runs_it(monkeypatch, capability):
    monkeypatch.setattr(jax, "devices", lambda *_: [Device(capability)])
    with pytest.raises(
        NotImplementedError, match=rf"'mosaic': compute capability: expected 9.0, .* {capability}"
    ):
        kernels.mosaic_kernel("mosaic", "attention")


def test_an_older_jax_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: [Device("9.0")])
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(NotImplementedError, match=r"'mosaic': jax: expected 0.11 or newer"):
        kernels.mosaic_kernel("mosaic", "attention")


@pytest.fixture
def on_hopper(monkeypatch, kernel):
    """What the kernel is asked for; it does nothing."""
    calls = []

    def ask(qkv, norms, eps, place, k, v, **kind):
        calls.append(kind)
        return qkv[..., : 4 * k.shape[3]], k, v

    monkeypatch.setattr(jax, "devices", lambda *_: [Device("9.0")])
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    monkeypatch.setattr(kernel, "append_and_attend", ask)
    return calls


@pytest.mark.parametrize(
    ("shape", "refusal"),
    [
        (dict(dtype=F32), "dtype: expected bfloat16 rows and caches, found float32 and float32"),
        (dict(dtype=BF16, dim=32), r"head_dim: expected one of \(64, 128\), found 32"),
        (dict(dtype=BF16, slots=157), "cache slots: expected a multiple of 8, found 157"),
    ],
)
def test_what_it_cannot_take_is_refused_by_name(on_hopper, shape, refusal):
    args = problem((40,), **{**dict(dim=64, slots=160), **shape})
    with pytest.raises(NotImplementedError, match=f"'mosaic': {refusal}"):
        append_and_attend(*args, causal=True, window=None, implementation="mosaic")
    assert not on_hopper


def test_it_is_asked_with_the_same_arguments(on_hopper):
    append_and_attend(*narrow(40), causal=True, window=7, implementation="mosaic")
    assert on_hopper == [{"causal": True, "window": 7}]


@pytest.mark.parametrize(
    ("lens", "shape", "chosen"),
    [
        ((40,), dict(), True),
        ((40,) * 5, dict(kv_heads=3, heads=9), True),
        ((40,) * 6, dict(kv_heads=3, heads=9), False),
        ((40,), dict(dim=128), False),
        ((40,), dict(dim=128, slots=8192), False),
        ((40,), dict(dim=128, slots=8200), True),
        ((40,), dict(rows=33), False),
        ((40,), dict(slots=157), False),
    ],
    ids=["narrow", "five", "six", "wide", "not long", "long", "a chunk", "odd"],
)
def test_left_to_choose_it_runs_where_it_is_faster(on_hopper, lens, shape, chosen):
    qkv, norms, eps, place, k, v = narrow(*lens, **shape)

    def attend(qkv, place, k, v, implementation):
        kind = dict(causal=True, window=None, implementation=implementation)
        return append_and_attend(qkv, norms, eps, place, k, v, **kind)

    for implementation in ("xla", None):
        assert not on_hopper
        jax.eval_shape(partial(attend, implementation=implementation), qkv, place, k, v)
    assert len(on_hopper) == chosen


def test_within_a_shard_it_is_not_chosen():
    shards = jax.sharding.AbstractMesh((2,), ("model",))
    assert faster_on_hopper(3, 64, 1024)
    with jax.sharding.use_abstract_mesh(shards):
        assert not faster_on_hopper(3, 64, 1024)


@pytest.mark.parametrize(
    ("rows", "more", "in_parts"),
    [
        (12, dict(), True),
        (2, dict(batch=5), True),
        (12, dict(implementation="mosaic"), True),
        (1, dict(), False),
        (33, dict(implementation="mosaic"), False),
        (12, dict(batch=6), False),
        (12, dict(hidden=1032), False),
        (12, dict(dim=128, implementation="mosaic"), False),
        (12, dict(slots=157), False),
        (12, dict(dtype=F32), False),
        (12, dict(implementation="pallas"), False),
        (12, dict(implementation="xla"), False),
    ],
    ids=lambda x: "-".join(f"{v}" for v in x.values()) if isinstance(x, dict) else None,
)
def test_a_projection_stays_in_parts_where_the_kernel_sums_them(on_hopper, rows, more, in_parts):
    case = dict(batch=1, hidden=64, dim=64, slots=160, dtype=BF16, implementation=None) | more
    x = jnp.zeros((case["batch"], rows, case["hidden"]), case["dtype"])
    cached = jnp.zeros((case["batch"], 3, case["slots"], case["dim"]), case["dtype"])
    weight = jnp.zeros((15 * case["dim"], case["hidden"]), case["dtype"])
    run = partial(project_qkv, implementation=case["implementation"])
    found = jax.eval_shape(run, x, weight, cached)
    whole = (*x.shape[:2], len(weight))
    assert found.shape == ((4, *whole) if in_parts else whole)
    assert found.dtype == (F32 if in_parts else x.dtype)


def test_projections_into_an_int8_cache_of_integers_and_of_a_shard_are_summed(on_hopper):
    x, cached = jnp.zeros((1, 12, 64), BF16), jnp.zeros((1, 3, 160, 64), BF16)
    weight = jnp.ones((960, 64), BF16)
    integers = quant.quantize(np.asarray(weight), "int8")
    assert jax.eval_shape(project_qkv, x, integers, cached).shape == (1, 12, 960)
    assert jax.eval_shape(project_qkv, x, weight, cache.quantize_rows(cached)).shape == (1, 12, 960)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("model",))):
        assert jax.eval_shape(project_qkv, x, weight, cached).shape == (1, 12, 960)


def test_parts_it_cannot_take_are_refused_by_name(kernel):
    cached = jnp.zeros((1, 1, 160, 64), BF16)
    assert kernel.refusal(jnp.zeros((4, 1, 2, 192)), cached) is None
    assert "expected two or more, found 1" in kernel.refusal(jnp.zeros((4, 1, 1, 192)), cached)
    wrong = kernel.refusal(jnp.zeros((4, 1, 2, 192), BF16), cached)
    assert wrong == "dtype: expected float32 parts and bfloat16 caches, found bfloat16 and bfloat16"


def test_elsewhere_parts_are_summed_and_rounded_once():
    args = narrow(40, rows=3)
    expected = reference(*args, causal=True, window=None)
    got = reference(parts_of(args[0]), *args[1:], causal=True, window=None)
    jax.tree.map(same, got, expected)
    assert [x.dtype for x in got] == [BF16] * 3


# --- the reference, interpreted -----------------------------------------------------------------


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_reference_at_every_length(run, causal, window):
    for length in (0, 1, 15, 16, 48, 63, 64, 100, 144):
        check(narrow(length), run=run, causal=causal, window=window)


@needs_interpreter
@pytest.mark.slow
def test_more_tiles_than_a_worker_holds(run):
    args = narrow(1500, slots=1600)
    check(args, run=run, causal=False, window=None)
    check(args, run=run, causal=True, window=700)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        dict(heads=8, kv_heads=2, dim=128),
        dict(heads=8, dim=128),
        dict(rows=12, heads=9, kv_heads=3, normed=False),
        dict(rows=5, heads=2, floor=1000),
        dict(rows=40, heads=2, kv_heads=2),
    ],
    ids=["four queries a key", "eight", "three", "few rows", "many rows"],
)
def test_shapes_of_blocks_and_heads(run, shape):
    check(narrow(50, slots=136, **shape), run=run, causal=True, window=20)


@needs_interpreter
@pytest.mark.slow
def test_sequences_of_different_lengths(run):
    check(narrow(70, 130, 0, rows=1), run=run, causal=True, window=None)


@needs_interpreter
@pytest.mark.slow
def test_rings_before_and_after_they_turn(run):
    for held in (0, 8, 14, 18, 34):
        args = turned_ring(held, dtype=BF16, dim=64)
        check(args, run=run, causal=False, window=6)


@needs_interpreter
@pytest.mark.slow
def test_rows_outside_the_window_are_not_read(run):
    """From the middle of a tile on that is not the last."""
    args, window = list(narrow(250, slots=272)), 100
    clean = run(*args, causal=False, window=window)
    behind = (jnp.arange(272) < 250 - (window - 1))[None, None, :, None]
    args[4:] = [jnp.where(behind, jnp.nan, leaf) for leaf in args[4:]]
    dirty = run(*args, causal=False, window=window)
    same(clean[0], dirty[0])
    close(dirty[0], clean[0])


@needs_interpreter
@pytest.mark.slow
def test_a_causal_row_does_not_depend_on_where_its_block_began(run):
    """Row 70 as any row of a block over the same cache, to the bit."""
    cached = run(*aligned_case(60, 80, 16, BF16, 96, None, dim=64)[0], causal=True, window=None)
    rows = []
    for start in (63, 67, 70):
        args, kind = aligned_case(
            start, 80, 8, BF16, 96, None, 64, fill=lambda *_, **__: (0, *cached[1:])
        )
        rows.append(np.asarray(run(*args, **kind)[0][0, 70 - start], np.float64))
    same(rows[1], rows[0])
    same(rows[2], rows[0])


@needs_interpreter
@pytest.mark.slow
def test_rows_that_would_not_fit_stay_inside_the_cache(run):
    args = list(narrow(140))
    args[3] = args[3].replace(slot=jnp.asarray([150], jnp.int32))
    got = run(*args, causal=True, window=None)
    same(got[2], reference(*args, causal=True, window=None)[2])


@needs_interpreter
@pytest.mark.slow
def test_in_a_while_loop(run):
    """Three blocks, one after the other, as decoding appends them."""
    qkv, norms, eps, place, k, v = narrow(40, rows=8)

    def loop(attend):
        def step(i, carry):
            k, v, outs = carry
            slot, at = place.slot + 8 * i, jnp.arange(k.shape[2])
            pos = jnp.where(at < slot[0] + 8, at, -1)[None]
            here = place.replace(slot=slot, end=slot, k_pos=pos, q_pos=place.q_pos + 8 * i)
            out, k, v = attend(qkv, norms, eps, here, k, v, causal=True, window=None)
            return k, v, outs.at[i].set(out)

        outs = jnp.zeros((3, *qkv.shape[:2], 4 * 64), BF16)
        return jax.jit(partial(jax.lax.fori_loop, 0, 3, step))((k, v, outs))

    got, expected = loop(run), loop(partial(append_and_attend, implementation="xla"))
    close(got[2], expected[2], 1e-2)
    for leaf, wanted in zip(got[:2], expected[:2], strict=True):
        assert (np.isnan(leaf) == np.isnan(wanted)).all()


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(("length", "window"), [(1500, None), (66, 9)])
def test_no_two_threads_race(kernel, length, window):
    """Checked by the interpreter. (A block across two tiles is written by both tiles' owners, with
    the same bytes, which it would take for a race.)
    """
    run = partial(
        kernel.append_and_attend,
        interpret=kernel.interpreted(detect_races=True),
        tiling=kernel.Tiling(warpgroups=1, stages=2),
    )
    check(narrow(length, slots=length // 64 * 64 + 128), run=run, causal=False, window=window)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "shape"),
    [
        (4, dict(rows=12, heads=9, kv_heads=3, normed=False)),
        (8, dict(rows=5, heads=2)),
        (2, dict(rows=2, heads=8, dim=128)),
    ],
    ids=["twelve rows", "five", "two"],
)
def test_parts_are_summed_to_the_bits_of_the_rows(run, count, shape):
    """Across a tile's end, so that two blocks sum the own rows."""
    args, kind = narrow(62, slots=136, **shape), dict(causal=True, window=20)
    got = check(args, run=taking_parts(run, count), **kind)
    jax.tree.map(same, got, run(*args, **kind))


@needs_interpreter
@pytest.mark.slow
def test_parts_of_sequences_of_different_lengths_and_two_warpgroups(kernel):
    run = partial(kernel.append_and_attend, interpret=True)
    check(narrow(70, 130, rows=3), run=taking_parts(run), causal=False, window=None)


@needs_interpreter
@pytest.mark.slow
def test_no_two_threads_race_over_parts(kernel):
    run = partial(kernel.append_and_attend, interpret=kernel.interpreted(detect_races=True))
    check(narrow(66, rows=5, slots=192), run=taking_parts(run), causal=False, window=None)


# --- draft trees --------------------------------------------------------------------------------

# Own rows in one tile, across two and from the first slot on.
TREES = [
    ((40,), dict(rows=16, heads=9, kv_heads=3, normed=False), None),
    ((60,), dict(rows=24, heads=9, kv_heads=3, normed=False), 9),
    ((50, 0), dict(rows=32, heads=9, kv_heads=3, normed=False), None),
    ((120,), dict(rows=16, heads=32, kv_heads=8, dim=128), 3),
    ((0, 100), dict(rows=24, heads=8, kv_heads=2, dim=128), None),
    ((62,), dict(rows=32, heads=8, kv_heads=2, dim=128, floor=1000), 70),
]
trees = pytest.mark.parametrize(("lens", "shape", "window"), TREES)


@needs_interpreter
@pytest.mark.slow
@trees
def test_a_node_of_a_tree_sees_the_spine_before_it_and_itself(run, lens, shape, window):
    check(on_a_tree(narrow(*lens, **shape)), run=run, causal=True, window=window)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("spine", [1, 16], ids=["leaves", "chain"])
def test_a_tree_without_leaves_and_one_of_nothing_else(run, spine):
    check(on_a_tree(narrow(60, heads=3), spine=spine), run=run, causal=True, window=None)


@needs_interpreter
@pytest.mark.slow
def test_parts_of_the_nodes_of_a_tree(run):
    args, kind = on_a_tree(narrow(60, rows=16, heads=3)), dict(causal=True, window=20)
    got = check(args, run=taking_parts(run), **kind)
    jax.tree.map(same, got, run(*args, **kind))


@needs_interpreter
@pytest.mark.slow
def test_no_two_threads_race_over_a_tree(kernel):
    run = partial(kernel.append_and_attend, interpret=kernel.interpreted(detect_races=True))
    for take in (run, taking_parts(run)):
        args = on_a_tree(narrow(66, rows=5, slots=192))
        check(args, run=take, causal=True, window=None)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 11])
def test_a_leaf_rounds_as_its_row_in_a_later_round(run, window):
    """Bit for bit, across tiles."""
    pairs = list(later_rounds(run, BF16, window, (24, 51), dim=64))
    assert len(pairs) == 2 * 14
    for leaf, later in pairs:
        same(leaf, later)


# --- for a GPU ----------------------------------------------------------------------------------


@needs_interface
@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 24, 32])
@pytest.mark.parametrize("preset", PRESETS)
def test_lowers_for_cuda_with_a_tree(kernel, preset, rows):
    args = on_a_tree(problem((200,), **PRESETS[preset], rows=rows, dtype=BF16, slots=272))
    for window, count in ((None, 4), (100, 0)):
        kind = dict(causal=True, window=window)
        text = lowered(
            lambda q, n, p, k, v, kind=kind: kernel.append_and_attend(q, n, EPS, p, k, v, **kind),
            parts_of(args[0], count) if count else args[0],
            *(args[i] for i in (1, 3, 4, 5)),
        )
        assert text.count("custom_call @mosaic_gpu") == 1


@needs_interface
@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 12, 16])
@pytest.mark.parametrize("preset", PRESETS)
def test_lowers_for_cuda(kernel, preset, rows):
    for slots, window, causal in ((272, None, True), (4120, 2048, False)):
        args = problem((200,), **PRESETS[preset], rows=rows, dtype=BF16, slots=slots)
        kind = dict(causal=causal, window=window)
        text = lowered(
            lambda q, n, p, k, v, kind=kind: kernel.append_and_attend(q, n, EPS, p, k, v, **kind),
            *(args[i] for i in (0, 1, 3, 4, 5)),
        )
        assert text.count("custom_call @mosaic_gpu") == 1
        assert text.count("output_operand_alias<") == 2


@needs_interface
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "count"), [(2, 2), (5, 4), (12, 8), (32, 8)])
def test_lowers_for_cuda_with_parts(kernel, rows, count):
    args = narrow(200, rows=rows, heads=9, kv_heads=3, slots=272)
    text = lowered(
        lambda q, n, p, k, v: kernel.append_and_attend(q, n, EPS, p, k, v, causal=True, window=9),
        parts_of(args[0], count),
        *(args[i] for i in (1, 3, 4, 5)),
    )
    assert text.count("custom_call @mosaic_gpu") == 1


@needs_interface
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_a_drafters_round_lowers_with_it(monkeypatch):
    """A ring and a full cache of the size that a session makes."""
    monkeypatch.setattr(kernels, "device_refusal", lambda hopper=False: None)
    config = dataclasses.replace(TINY, head_dim=64, block_size=16, layer_window=(40, None))
    draft = jax.tree.map(lambda x: x.astype(BF16), tiny_draft(config))
    kv = cache.allocate(config, 1, 4096, BF16)
    noise, pos = jnp.zeros((1, 16, 32), BF16), jnp.arange(16)[None]
    text = lowered(partial(forward_round, implementation="mosaic"), draft, kv, noise, pos)
    assert text.count("custom_call @mosaic_gpu") == 2
    assert "tensor<4x1x16x512xf32>" in text, "the projections' parts"


@pytest.fixture
def hopper(kernel):
    """The kernel, where it can run."""
    try:
        return kernels.mosaic_kernel("mosaic", "attention").append_and_attend
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("rows", "slots"), [(16, 2112), (1, 2112), (5, 272)])
def test_compiled_equals_the_reference(hopper, preset, rows, slots):
    for lens in ((0,), (1,), (slots - 17,), (63, 64, 130)):
        args = problem(lens, **PRESETS[preset], rows=rows, slots=slots, dtype=BF16)
        for causal, window in ((True, None), (False, None), (False, 100)):
            first = check(args, run=hopper, causal=causal, window=window)
            jax.tree.map(same, first, hopper(*args, causal=causal, window=window))


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("rows", [16, 24, 32])
def test_compiled_trees_equal_the_reference(hopper, preset, rows):
    for lens in ((0,), (50,), (1000,), (63, 64, 130)):
        args = problem(lens, **PRESETS[preset], rows=rows, slots=1096, dtype=BF16)
        args = on_a_tree(args, seed=rows)
        for window in (None, 9, 100):
            kind = dict(causal=True, window=window)
            first = check(args, run=hopper, **kind)
            jax.tree.map(same, first, hopper(*args, **kind))
            if PRESETS[preset]["dim"] == 64:
                jax.tree.map(same, first, taking_parts(hopper)(*args, **kind))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dim", [64, 128])
def test_compiled_a_leaf_rounds_as_its_row_in_a_later_round(hopper, dim, window):
    def run(qkv, *rest, **kind):
        return (hopper if qkv.shape[1] <= 64 else reference)(qkv, *rest, **kind)

    where = dict(first=1000, slots=2112, dim=dim)
    for leaf, later in later_rounds(run, BF16, window, (1009, 1021, 1040), **where):
        same(leaf, later)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("rows", [12, 5])
def test_compiled_parts_are_summed_to_the_bits_of_the_rows(hopper, rows, count):
    for lens in ((0,), (62,), (1000,), (63, 64, 130)):
        args = problem(lens, rows=rows, heads=9, kv_heads=3, dim=64, slots=1024, dtype=BF16)
        for causal in (False, True):
            kind = dict(causal=causal, window=None)
            got = check(args, run=taking_parts(hopper, count), **kind)
            jax.tree.map(same, got, hopper(*args, **kind))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "dim"), [(16, 128), (12, 64), (1, 64)])
def test_compiled_a_causal_row_does_not_depend_on_where_its_block_began(hopper, rows, dim):
    whole, kind = aligned_case(1000, 1064, 64, BF16, 2112, None, dim=dim)
    out, k, v = hopper(*whole, **kind)
    for start in sorted({1030 - rows // 2, 1030 - rows + 1, 1030}):
        args, _ = aligned_case(
            start, 1064, rows, BF16, 2112, None, dim, fill=lambda *_, **__: (0, k, v)
        )
        same(hopper(*args, **kind)[0][0, 1030 - start], out[0, 30])
