"""A draft cache of int8: nearly the drafts of floats, and not one token changed."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, assert_close, trained
from targets import F32, ORACLES, SLIDING, TINY, tiny_draft, tiny_target

from dflash_jax import (
    Request,
    Slots,
    SpecSession,
    attention,
    generate,
    kernels,
    loop,
    serve,
    sharding,
)
from dflash_jax import kv as cache
from dflash_jax.attention import BlockPlace, append_and_attend, block_attention, split_heads
from dflash_jax.cli import main
from dflash_jax.draft import ctx_features, forward_round, ingest_ctx
from dflash_jax.kv import ABSENT, QuantizedRows, export_tail, import_tail, quantize_rows, read_rows
from dflash_jax.layers import rope_tables
from dflash_jax.window import DSparkVtPolicy

INT8 = jnp.dtype(jnp.int8)
PROMPTS = json.loads((ORACLES / "tiny" / "expected.json").read_text())["prompts"][::2]
CAPACITY = 256


# --- rows -----------------------------------------------------------------------------------------


def test_a_row_is_within_half_a_step_of_its_own_scale():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3, 5, 2, 16)) * np.exp(4 * rng.normal(size=(3, 5, 2, 1)))
    held = quantize_rows(jnp.asarray(rows, F32))
    assert (held.values.dtype, held.scales.dtype) == (INT8, F32)
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    np.testing.assert_allclose(held.scales, largest / 127, rtol=1e-6)
    assert (np.abs(held.values).max(axis=-1) == 127).all()
    off = np.abs(np.asarray(read_rows(held, F32)) - rows)
    assert (off <= 0.5001 * largest / 127).all()


def test_bf16_rows_are_the_int8_of_their_floats():
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.bfloat16)
    one, other = (quantize_rows(x) for x in (rows, rows.astype(F32)))
    np.testing.assert_array_equal(one.values, other.values)
    np.testing.assert_array_equal(one.scales, other.scales)
    assert read_rows(quantize_rows(rows), jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("small", [0.0, 1e-45, 1e-38, 1e-30])
def test_rows_of_next_to_nothing_stay_finite(small):
    with jax.debug_nans(True):  # on the way, too: what integer a NaN becomes is nobody's promise
        rows = read_rows(quantize_rows(jnp.asarray([[small, 0.0, -small]], F32)), F32)
    np.testing.assert_allclose(rows, [[small, 0, -small]], rtol=1e-2, atol=1e-37)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_does_not_become_one_that_is(bad):
    """Non-finite drafts must stay an error, never a wrong id."""
    rows = read_rows(quantize_rows(jnp.asarray([[1.0, bad, 2.0, 0.0], [1.0, 2.0, 3.0, 4.0]])), F32)
    assert not np.isfinite(rows[0]).any()
    assert np.isfinite(rows[1]).all()


# --- what is drafted ------------------------------------------------------------------------------


@jax.jit
def features_of(target, draft, ids):
    state = target.init_state(*ids.shape)
    return ctx_features(draft, target.forward(state, ids, draft.config.target_layer_ids)[0].taps)


@functools.cache
def blocks(family):
    """Of every recorded prompt with its answer: features, their number, block rows, positions."""
    target, draft = trained(family)
    texts = [p["prompt_ids"] + p["greedy_target_ids"] for p in PROMPTS]
    count = np.array([len(text) - 1 for text in texts], np.int32)
    ids = np.array([(text + [0] * CAPACITY)[:CAPACITY] for text in texts], np.int32)
    features = features_of(target, draft, jnp.asarray(ids))
    size = draft.config.block_size
    block = np.full((len(texts), size), draft.config.mask_token_id)
    block[:, 0] = [text[-1] for text in texts]
    pos = count[:, None] + np.arange(size, dtype=np.int32)
    return features, jnp.asarray(count), target.embed(jnp.asarray(block)), jnp.asarray(pos)


def hidden(family, dtype):
    """The blocks' rows over a cache of this dtype, `[prompts, b, H]`; compiled anew each time."""
    draft = trained(family)[1]

    @jax.jit
    def run(features, count, noise, pos):
        kv = cache.allocate(draft.config, len(PROMPTS), CAPACITY, dtype, CAPACITY)
        places = jnp.broadcast_to(jnp.arange(CAPACITY), features.shape[:2])
        return forward_round(draft, ingest_ctx(draft, kv, features, places, count), noise, pos)[0]

    return np.asarray(run(*blocks(family)), np.float64)


@functools.cache
def over_floats(family):
    return hidden(family, F32)


def worst_cosine(a, b):
    return ((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)).min()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_blocks_rows_point_where_those_over_floats_do(family):
    assert worst_cosine(over_floats(family), hidden(family, INT8)) > 0.9999


def rotated(rows):
    """As some spread a row's large numbers before they quantise, but the queries are not."""
    turn = np.ones((1, 1))
    while len(turn) < rows.shape[-1]:
        turn = np.block([[turn, turn], [turn, -turn]]) / np.sqrt(2)
    return quantize_rows(rows @ jnp.asarray(turn, rows.dtype))


def with_the_first_rows_scale(rows):
    held = quantize_rows(rows)
    return held.replace(scales=jnp.broadcast_to(held.scales[:, :1], held.scales.shape))


@pytest.mark.parametrize("fault", [rotated, with_the_first_rows_scale])
def test_other_rows_or_other_scales_would_be_seen(fault, monkeypatch):
    monkeypatch.setattr(cache, "quantize_rows", fault)
    assert worst_cosine(over_floats("dflash"), hidden("dflash", INT8)) < 0.5


OPTIONS = {
    "policy": DSparkVtPolicy("fixed"),
    "capacity": CAPACITY,
    "draft_kv_dtype": "int8",
}


@functools.cache
def beside_others(family):
    """The recorded prompts in a batch; DFlash2's in slots of two, which the later ones inherit."""
    prompts, budgets = ([p[key] for p in PROMPTS] for key in ("prompt_ids", "max_new_tokens"))
    if family != "dflash2":
        return generate(*trained(family), prompts, budgets, stop_token_ids=(), **OPTIONS)
    requests = [
        Request(ids, budget, stop_token_ids=())
        for ids, budget in zip(prompts, budgets, strict=True)
    ]
    return [result for _, result in sorted(serve(*trained(family), requests, slots=2, **OPTIONS))]


@pytest.mark.parametrize("family", FAMILIES)
def test_acceptance_stays_and_no_token_changes(family):
    """Lengths against those that the reference recorded, over floats."""
    for result, prompt in zip(beside_others(family), PROMPTS, strict=True):
        assert result.token_ids == prompt["greedy_target_ids"]
    lengths = [n for result in beside_others(family) for n in result.acceptance_lengths]
    recorded = [n for p in PROMPTS for n in p[family]["acceptance_lengths"]]
    assert np.mean(lengths) > 0.95 * np.mean(recorded)


def outcome(result):
    return result.token_ids, result.acceptance_lengths


def opened(text=PROMPTS[0]["prompt_ids"], budget=PROMPTS[0]["max_new_tokens"], **options):
    """DFlash2's, whose layers all slide: the caches are rings, and turn."""
    session = SpecSession(*trained("dflash2"), **OPTIONS, stop_token_ids=(), check=True)
    session.open([text], budget, **options)
    assert session.state.draft.ring is not None
    return session


def test_a_prompt_gets_alone_what_it_gets_beside_others():
    """And takes the memory that is planned, to the byte."""
    session = opened()
    told, kv = session.memory(CAPACITY), session.state.draft
    assert told.draft_full + told.draft_ring == sum(x.nbytes for x in jax.tree.leaves(kv))
    assert told.caches == sum(x.nbytes for x in jax.tree.leaves(session.state))
    session.burst()
    assert outcome(session.results()[0]) == outcome(beside_others("dflash2")[0])
    session.open([PROMPTS[3]["prompt_ids"]], PROMPTS[3]["max_new_tokens"])
    session.burst()
    assert outcome(session.results()[0]) == outcome(beside_others("dflash2")[3])
    slots = Slots(*trained("dflash2"), 2, **OPTIONS)
    slots.join(Request(PROMPTS[3]["prompt_ids"]))
    assert isinstance(slots._state[0].draft.k[0], QuantizedRows)


def test_over_two_devices():
    """Integers and scales are split by heads, and the block's rows are the same."""
    target, draft = tiny_target(), tiny_draft(SLIDING)
    features = np.random.default_rng(0).normal(size=(1, 16, 32)).astype(np.float32)
    noise, pos = features[:, :4], 16 + jnp.arange(4)[None]

    @jax.jit
    def run(target, draft):
        kv = loop.empty_caches(target, draft, 1, 64, "int8").draft
        kv = ingest_ctx(draft, kv, features, jnp.arange(16)[None], jnp.asarray([14]))
        return forward_round(draft, kv, noise, pos)

    expected, alone = run(target, draft)
    got, kv = run(*sharding.shard_pair(target, draft, sharding.make_mesh(2)))
    assert worst_cosine(np.asarray(got), np.asarray(expected)) > 0.9999
    shards = [leaf.addressable_shards for leaf in jax.tree.leaves((kv.k, kv.v))]
    assert len(shards) == 8
    assert {shard.data.shape[1] for part in shards for shard in part} == {1}
    for layer in range(2):
        assert_near(held_rows(kv, layer)[1], held_rows(alone, layer)[1])


# --- rings and tails ------------------------------------------------------------------------------


append = jax.jit(ingest_ctx)


def ingested(kv, draft, features, *pieces):
    """`features [1, n, H]` appended in pieces of (rows, how many of them count)."""
    for rows, count in pieces:
        pos = kv.len[:, None] + jnp.arange(rows)[None]
        kv = append(draft, kv, features[:, np.asarray(pos)[0] % 60], pos, jnp.asarray([count]))
    return kv


def held_rows(kv, layer):
    """A layer's rows by position, and those positions."""
    pos = np.asarray(kv.slots_of(layer).pos)[0]
    slots = np.flatnonzero(pos != ABSENT)
    slots = slots[np.argsort(pos[slots])]
    leaves = jax.tree.map(lambda x: np.asarray(x)[0][:, slots], (kv.k[layer], kv.v[layer]))
    return pos[slots], leaves


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def assert_near(a, b):
    """The same rows, made by two programs whose floats may differ in the last bit."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if x.dtype == INT8:
            off = np.abs(np.asarray(x, int) - np.asarray(y, int))
            assert off.max() <= 1 and off.mean() < 0.01
        else:
            np.testing.assert_allclose(x, y, rtol=1e-5)


@pytest.fixture(scope="module")
def rows():
    """60 features, and int8 and float caches of them, all at once, of layers without a ring."""
    features = np.random.default_rng(0).normal(size=(1, 60, 32)).astype(np.float32)
    caches = [cache.allocate(TINY, 1, 64, dtype) for dtype in (INT8, F32)]
    return features, *(ingested(kv, tiny_draft(TINY), features, (60, 60)) for kv in caches)


def test_a_ring_holds_the_same_rows_however_they_came(rows):
    """By small appends past its end, and through compactions."""
    features, whole, _ = rows
    kv = cache.allocate(SLIDING, 1, 64, INT8, overhang=16)
    pieces = [(4, 4), (16, 16), (4, 3), (4, 4), (4, 2), (4, 4), (4, 4), (4, 1), (4, 4), (16, 11)]
    kv = ingested(kv, tiny_draft(SLIDING), features, *pieces, *[(4, 3)] * 2, (4, 1))
    assert kv.len.tolist() == [60]
    pos, ours = held_rows(kv, 0)
    assert pos[-1] == 59 and len(pos) < 30
    assert_near(ours, jax.tree.map(lambda x: x[:, pos], held_rows(whole, 0)[1]))
    assert_near(held_rows(kv, 1)[1], held_rows(whole, 1)[1])


def test_a_tail_goes_between_caches_of_floats_and_int8(rows):
    """To int8: the bits that it had, or would have made itself. To floats: what they stand for."""
    _, int8, floats = rows
    for source, check in ((int8, assert_same), (floats, assert_near)):
        empty = cache.allocate(TINY, 1, 64, INT8)
        into = import_tail(TINY, empty, export_tail(TINY, source))
        assert into.len.tolist() == [60]
        check((into.k, into.v), (int8.k, int8.v))
    back = import_tail(TINY, cache.allocate(TINY, 1, 64, F32), export_tail(TINY, int8))
    for got, held in zip((*back.k, *back.v), (*int8.k, *int8.v), strict=True):
        np.testing.assert_array_equal(got, np.asarray(held.values, np.float32) * held.scales)


def test_a_tails_scales_are_looked_at(rows):
    tail = export_tail(TINY, rows[1])
    short = tail.v[1].replace(scales=tail.v[1].scales[:, 1:])
    tail = dataclasses.replace(tail, v=[tail.v[0], short])
    with pytest.raises(ValueError, match=r"tail: expected scales \(2, 60, 1\), found \(2, 59, 1\)"):
        import_tail(TINY, cache.allocate(TINY, 1, 64, INT8), tail)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda x: x.values, "int8"),
        (lambda x: x.replace(values=x.values.astype(F32)), "float32 values with float32 scales"),
        (lambda x: x.replace(scales=None), "int8 values with NoneType scales"),
        (lambda x: "rows", "str"),
    ],
    ids=["no scales", "floats with scales", "scales of nothing", "no array"],
)
@pytest.mark.parametrize("dtype", [INT8, F32])
def test_a_tail_of_another_kind_is_refused(rows, wrong, found, dtype):
    tail = export_tail(TINY, rows[1])
    tail = dataclasses.replace(tail, k=[wrong(tail.k[0]), *tail.k[1:]])
    message = "tail: expected floats, or int8 values with float32 scales, found "
    with pytest.raises(ValueError, match=message + found):
        import_tail(TINY, cache.allocate(TINY, 1, 64, dtype), tail)


@pytest.mark.slow
def test_a_session_goes_on_from_a_tail():
    session = opened()
    session.burst(12)
    tail, tokens = session.export_tail(), session.results()[0].token_ids
    assert isinstance(tail.k[0], QuantizedRows)
    there = opened(PROMPTS[0]["prompt_ids"] + tokens, 10, tail=tail)
    window = there.draft.config.layer_window[0]
    again = there.export_tail(upto=tail.len)
    for ours, theirs in zip((*again.k, *again.v), (*tail.k, *tail.v), strict=True):
        assert_same(*(jax.tree.map(lambda x: x[:, -window:], side) for side in (ours, theirs)))


# --- attention and its kernels --------------------------------------------------------------------


DIM = 32
"""Heads that the kernels would take."""


def problem(rows, slots):
    """A block behind ten rows of int8 context: the arguments of `append_and_attend`."""
    rng = np.random.default_rng(0)
    q_pos = jnp.asarray(10 + np.arange(rows))[None]
    cos, sin = rope_tables(TINY.rope, DIM, q_pos)
    k_pos = np.full((1, slots), ABSENT)
    k_pos[0, : 10 + rows] = np.arange(10 + rows)
    at = jnp.asarray([10])
    place = BlockPlace(cos, sin, q_pos, jnp.asarray(k_pos), at, at)
    qkv = jnp.asarray(rng.normal(size=(1, rows, 8 * DIM)), F32)
    k, v = map(quantize_rows, jnp.asarray(rng.normal(size=(2, 1, 2, slots, DIM)), F32))
    norms = jnp.ones((DIM,), F32), jnp.ones((DIM,), F32)
    return qkv, norms, 1e-6, place, k, v


@pytest.mark.parametrize(("rows", "slots"), [(4, 64), (40, 512)])
def test_a_block_reads_its_own_rows_as_they_are_held(rows, slots, monkeypatch):
    """In one piece, and (a wide block) by tiles of keys."""
    monkeypatch.setattr(attention, "SCORE_BYTES", 1)
    qkv, norms, eps, place, *caches = problem(rows, slots)
    kind = {"causal": True, "window": None}
    attend = jax.jit(append_and_attend, static_argnums=2, static_argnames=("causal", "window"))
    attended, *after = attend(qkv, norms, eps, place, *caches, **kind)
    assert (attention.key_tile(1, rows, 4, slots) is None) == (rows == 4)
    q, k, _ = split_heads(qkv, norms, eps, place.cos, place.sin, 2)
    held = after[0].values[:, :, 10 : 10 + rows], after[0].scales[:, :, 10 : 10 + rows]
    assert_near(held, quantize_rows(k.swapaxes(1, 2)))
    floats = [read_rows(leaf, F32) for leaf in after]
    assert_close(attended, block_attention(q, *floats, place.q_pos, place.k_pos, **kind))


def on_hopper(hopper=False):
    return None


def test_left_to_choose_the_reference_reads_int8(monkeypatch):
    args, kind = problem(4, 64), {"causal": False, "window": None}
    expected = append_and_attend(*args, **kind)
    monkeypatch.setattr(kernels, "device_refusal", on_hopper)
    monkeypatch.setattr(kernels, "kernel", lambda op: pytest.fail(op))
    assert_same(append_and_attend(*args, **kind), expected)


@pytest.mark.parametrize("name", ["pallas", "mosaic"])
def test_kernels_asked_for_by_name_are_refused(name, monkeypatch):
    """Where they could run; and before a prompt is read."""
    monkeypatch.setattr(kernels, "device_refusal", on_hopper)
    monkeypatch.setattr(kernels, "check", lambda implementation: None)
    line = f"implementation '{name}': draft KV: expected floats, found int8"
    with pytest.raises(NotImplementedError, match=line):
        append_and_attend(*problem(4, 64), causal=False, window=None, implementation=name)
    with pytest.raises(NotImplementedError, match=line):
        SpecSession(tiny_target(), tiny_draft(), implementation=name, draft_kv_dtype="int8")


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["int4", "float", None, 8, np.array(["int8", "auto"])])
def test_there_are_two_dtypes(asked):
    for draft in (tiny_draft(), None):
        with pytest.raises(ValueError, match="draft_kv_dtype: expected 'auto' or 'int8', found"):
            SpecSession(tiny_target(), draft, draft_kv_dtype=asked)


TARGET = ("--target", str(ORACLES / "tiny" / "target"))
DRAFT = ("--draft", str(ORACLES / "tiny" / "dflash"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "1", "--ids", *DRAFT, "--draft-kv-dtype", "int4"), "invalid choice: 'int4'"),
        (("plan", *DRAFT, "--draft-kv-dtype", ""), "invalid choice: ''"),
        (("plan", "--draft", "none", "--draft-kv-dtype", "int8"),
         "--draft-kv-dtype: expected a drafter to apply it to, found --draft none"),
        (("generate", "1 2", "--ids", "--draft", "none", "--draft-kv-dtype", "auto"),
         "--draft-kv-dtype: expected a drafter to apply it to, found --draft none"),
    ],
)  # fmt: skip
def test_what_the_command_refuses(arguments, message, capsys):
    assert main([*arguments, *TARGET]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_plan_command_takes_it(capsys):
    full = []
    for options in ((), ("--draft-kv-dtype", "auto"), ("--draft-kv-dtype", "int8")):
        assert main(["plan", "--context", "256", "--json", *TARGET, *DRAFT, *options]) == 0
        full.append(json.loads(capsys.readouterr().out)["draft_full"])
    assert full[0] == full[1] > 3 * full[2]
