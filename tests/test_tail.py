"""Bounded draft caches and tails: a ring equals a full cache on every round, and a drafter goes on
elsewhere from its latest rows alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, assert_close, trained
from targets import SLIDING, TINY, sliding_pair, tiny_draft, tiny_target

from dflash_jax import SpecSession, generate, loop
from dflash_jax import kv as cache
from dflash_jax.draft import ctx_features, forward_round, ingest_ctx
from dflash_jax.kv import DraftTail, export_tail, import_tail, readable_rows
from dflash_jax.round import propose_block
from dflash_jax.sampling import SamplingParams

TEXT = list(b"def add(first, second):\n    return first + second\n\n\ndef sub(")
CAPACITY = 256


def pair(name):
    """dflash2: every layer slides (window 32); sliding: one of two does; the others: none."""
    return sliding_pair() if name == "sliding" else trained(name)


_propose_block = jax.jit(propose_block, static_argnames=("plan",))
_forward_round = jax.jit(forward_round)


def opened(name, prompt=TEXT, budget=120, **options):
    options = {"capacity": CAPACITY, "stop_token_ids": (), "check": True} | options
    tail, draft_from = options.pop("tail", None), options.pop("draft_from", 0)
    session = SpecSession(*pair(name), **options)
    session.open([prompt], budget, tail=tail, draft_from=draft_from)
    return session


def drafted(session):
    proposal, _ = _propose_block(session.target, session.draft, session.state, session.plan)
    return proposal


# --- rings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "temperature"), [("dflash2", 1.0), ("sliding", 0.0)])
def test_a_ring_equals_a_full_cache_with_a_mask_on_every_round(name, temperature, monkeypatch):
    """Past several turns of the ring; the full cache keeps all rows and masks by the window."""
    # Of seed 0 one draw falls on two candidates whose order is a matter of rounding.
    params = SamplingParams(temperature=temperature, seed=1)
    ringed = opened(name, sampling=params)

    def unbounded(config, *args, **options):
        windowless = dataclasses.replace(config, layer_window=(None,) * config.num_hidden_layers)
        return allocate(windowless, *args, **options)

    allocate = cache.allocate
    monkeypatch.setattr(cache, "allocate", unbounded)
    full = opened(name, sampling=params, capacity=CAPACITY + 1)  # a program of its own
    assert ringed.state.draft.ring is not None
    assert full.state.draft.ring is None
    rounds = 0
    while not full.done:
        ours, whole = drafted(ringed), drafted(full)
        np.testing.assert_array_equal(ours.tokens, whole.tokens)
        assert_close(ours.q_chosen, whole.q_chosen)
        ringed.burst(1)
        full.burst(1)
        rounds += 1
    slots = ringed.state.draft.ring.pos.shape[1]
    assert int(full.state.draft.len[0]) > 2 * slots
    assert rounds > 30
    assert ringed.results()[0].token_ids == full.results()[0].token_ids


@jax.jit
def taken(target, draft, ids):
    """Context features of a whole text, made at once."""
    state = target.init_state(1, CAPACITY)
    out, _ = target.forward(state, ids, draft.config.target_layer_ids)
    return ctx_features(draft, out.taps)


@jax.jit
def from_all_features(draft, features, length, first, noise, pos):
    """A block over rows first..length - 1 of `features`, all kept: the windows only mask them."""
    config = dataclasses.replace(
        draft.config, layer_window=(None,) * draft.config.num_hidden_layers
    )
    kv = cache.cold(cache.allocate(config, 1, CAPACITY, draft.dtype, CAPACITY), first)
    rows = jnp.roll(features, -first, axis=1)
    places = jnp.arange(CAPACITY)[None] + first
    kv = ingest_ctx(draft, kv, rows, places, jnp.full((1,), length - first))
    return forward_round(draft, kv, noise, pos)[0]


def block_hidden(session, text, first=0):
    """The next block's rows: from the session's cache, and from all of the text's features."""
    target, draft, state = session.target, session.draft, session.state
    length, block = int(state.target.len[0]), session.plan.block_size
    ids = [[int(state.anchor[0])] + [draft.config.mask_token_id] * (block - 1)]
    noise = target.embed(jnp.asarray(ids))
    pos = jnp.arange(length, length + block)[None]
    features = taken(target, draft, jnp.asarray([(text + [0] * CAPACITY)[:CAPACITY]]))
    cached, _ = _forward_round(draft, state.draft, noise, pos)
    return cached, from_all_features(draft, features, length, first, noise, pos)


@pytest.mark.parametrize("name", ["dflash2", "sliding", "dflash"])
def test_cached_blocks_equal_blocks_over_all_features(name):
    """A batch of one text, every few rounds, against the features of its tokens made anew."""
    session = opened(name, budget=100)
    tokens = TEXT + generate(pair(name)[0], None, TEXT, 100, stop_token_ids=()).token_ids
    compared = 0
    while not session.done:
        if session.state.rounds[0] % 8 == 0:
            cached, uncached = block_hidden(session, tokens)
            assert_close(cached, uncached)
            compared += 1
        session.burst(1)
    assert compared >= 3


# --- tails ----------------------------------------------------------------------------------------


def text_so_far(session, prompt=TEXT):
    """Prompt and emitted tokens, the anchor last."""
    return prompt + session.results()[0].token_ids


@pytest.mark.parametrize("name", ["dflash2", "sliding", "dflash", "dspark"])
@pytest.mark.parametrize("rounds", [0, 20])
def test_a_drafter_goes_on_elsewhere_as_if_it_had_stayed(name, rounds):
    """The tail into a new session whose prompt is the text so far: the same drafts from there."""
    session = opened(name)
    session.burst(rounds)
    before = session.results()[0]
    tail = session.export_tail()
    text = text_so_far(session)
    assert tail.len == len(text) - 1
    elsewhere = opened(name, text, 120 - before.emitted + 1, tail=tail)
    # The new session decides the token after the anchor from its prompt: catch up with that one.
    session.burst()
    elsewhere.burst()
    whole, rest = session.results()[0], elsewhere.results()[0]
    assert whole.token_ids == before.token_ids + rest.token_ids[: 120 - before.emitted]
    cold = opened(name, text, 120 - before.emitted + 1)
    cold.burst()
    assert cold.results()[0].token_ids == rest.token_ids
    assert cold.results()[0].acceptance_lengths == rest.acceptance_lengths


@pytest.mark.parametrize("name", ["dflash2", "sliding", "dflash", "dspark"])
def test_an_imported_drafter_drafts_from_the_same_rows(name):
    session = opened(name)
    session.burst(20)
    text = text_so_far(session)
    tail = session.export_tail()
    elsewhere = opened(name, text, 10, tail=tail)
    cached, uncached = block_hidden(elsewhere, text)
    assert_close(cached, uncached)


@pytest.mark.parametrize("name", ["dflash2", "dflash"])
def test_a_tail_cut_up_to_a_block_back(name):
    session = opened(name)
    session.burst(25)
    text = text_so_far(session)
    for back in (0, 3, 8):
        tail = session.export_tail(upto=len(text) - 1 - back)
        assert tail.len == len(text) - 1 - back
        shorter = text[: len(text) - back]
        elsewhere = opened(name, shorter, 10, tail=tail)
        cached, uncached = block_hidden(elsewhere, shorter)
        assert_close(cached, uncached)


def test_a_tail_has_what_may_still_be_read():
    """Window and block where all layers slide, else the whole history."""
    for name, readable in (("dflash2", 40), ("sliding", None), ("dflash", None)):
        session = opened(name)
        session.burst(25)
        config, length = session.draft.config, int(session.state.draft.len[0])
        assert readable_rows(config) == readable
        tail = session.export_tail()
        count = length if readable is None else readable
        assert (tail.base, tail.len, tail.floor) == (length - count, length, 0)
        for leaf in (*tail.k, *tail.v):
            assert leaf.shape == (config.num_key_value_heads, count, config.head_dim)
    short = opened("dflash2", TEXT[:5]).export_tail()
    assert (short.base, short.len) == (0, 5)


def test_tails_of_one_sequence_of_a_batch():
    target, draft = trained("dflash2")
    prompts = [TEXT, TEXT[:20], TEXT[5:40]]
    batch = SpecSession(target, draft, capacity=CAPACITY, stop_token_ids=())
    batch.open(prompts, 40)
    batch.burst(10)
    for b, prompt in enumerate(prompts):
        tail = batch.export_tail(sequence=b)
        text = prompt + batch.results()[b].token_ids
        assert tail.len == len(text) - 1
        cached, uncached = block_hidden(opened("dflash2", text, 10, tail=tail), text)
        assert_close(cached, uncached)


def test_a_tail_exported_again_is_the_same():
    session = opened("dflash2")
    session.burst(25)
    tail = session.export_tail()
    config, draft = session.draft.config, session.draft
    again = export_tail(
        config, import_tail(config, cache.allocate(config, 1, CAPACITY, draft.dtype), tail)
    )
    # What the new cache never had counts as below its floor.
    assert (again.base, again.len, again.floor) == (tail.base, tail.len, tail.base)
    for a, b in zip((*tail.k, *tail.v), (*again.k, *again.v), strict=True):
        np.testing.assert_array_equal(a, b)


# --- cold opens and floors ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dflash2", "sliding", "dflash", "dspark"])
@pytest.mark.parametrize("position", [1, 17, len(TEXT) - 1])
def test_a_drafter_opened_cold_never_sees_what_came_before(name, position):
    session = opened(name, draft_from=position)
    assert int(session.state.draft.floor[0]) == position
    assert int(session.state.draft.len[0]) == len(TEXT)
    tokens = generate(pair(name)[0], None, TEXT, 120, stop_token_ids=()).token_ids
    for _ in range(2):
        cached, uncached = block_hidden(session, TEXT + tokens, first=position)
        assert_close(cached, uncached)
        everything = block_hidden(session, TEXT + tokens)[1]
        distant = name == "dflash2" and int(session.state.draft.len[0]) - position >= 31
        assert np.allclose(cached, everything, atol=1e-4) == distant
        session.burst(12)
    session.burst()
    assert session.results()[0].token_ids == tokens


@pytest.mark.parametrize("name", ["dflash2", "dflash"])
def test_a_cold_drafters_tail_keeps_its_floor(name):
    session = opened(name, draft_from=50)
    session.burst(2)
    tail, text = session.export_tail(), text_so_far(session)
    assert tail.floor == 50
    assert tail.base == 50
    elsewhere = opened(name, text, 10, tail=tail)
    cached, uncached = block_hidden(elsewhere, text, first=50)
    assert_close(cached, uncached)


def test_every_sequence_of_a_batch_may_open_cold():
    target, draft = trained("dflash2")
    prompts = [TEXT, TEXT[:20], TEXT[5:40]]
    session = SpecSession(target, draft, capacity=CAPACITY, stop_token_ids=(), check=True)
    session.open(prompts, 30, draft_from=12)
    session.burst()
    for prompt, out in zip(prompts, session.results(), strict=True):
        assert out.token_ids == generate(target, None, prompt, 30, stop_token_ids=()).token_ids


# --- refusals -------------------------------------------------------------------------------------


def small_tail(config=SLIDING, count=12, base=0, floor=0):
    shape = (config.num_key_value_heads, count, config.head_dim)
    leaves = [np.zeros(shape, np.float32)] * config.num_hidden_layers
    return DraftTail(base, base + count, floor, leaves, leaves)


def imported(tail, config=SLIDING, capacity=64):
    return import_tail(config, cache.allocate(config, 1, capacity, jnp.dtype(jnp.float32)), tail)


ALL_SLIDE = dataclasses.replace(TINY, layer_window=(6, 9))


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (small_tail(dataclasses.replace(TINY, num_hidden_layers=3)),
         "expected 2 layers, found 3 of k and 3 of v"),
        (small_tail(dataclasses.replace(TINY, num_key_value_heads=1)),
         r"expected rows of \(2, 8\) \(kv heads, head_dim\), found \(1, 8\)"),
        (small_tail(dataclasses.replace(TINY, head_dim=16)),
         r"expected rows of \(2, 8\) .*, found \(2, 16\)"),
        (dataclasses.replace(small_tail(), len=13), "expected its last row at 12, found 0 . 12 ro"),
        (dataclasses.replace(small_tail(), base=3), "expected its last row at 11, found 3 . 12 ro"),
        (small_tail(base=4), "expected at least 16 rows, found 12"),
        (small_tail(count=80), r"expected at most 64 rows \(capacity\), found 80"),
        (small_tail(base=60, floor=60), r"expected at most 64 rows \(capacity\), found 72"),
    ],
)  # fmt: skip
def test_tails_that_do_not_fit_are_refused(tail, message):
    with pytest.raises(ValueError, match=f"tail: {message}"):
        imported(tail)


def test_keys_and_values_must_agree():
    tail = small_tail()
    with pytest.raises(ValueError, match="tail: expected 2 layers, found 2 of k and 1 of v"):
        imported(dataclasses.replace(tail, v=tail.v[:1]))
    shorter = [tail.v[0], tail.v[1][:, :-1]]
    with pytest.raises(ValueError, match=r"tail: expected its last row at 11, found 0 \+ 11"):
        imported(dataclasses.replace(tail, v=shorter))


@pytest.mark.parametrize(("count", "fits"), [(8, True), (7, False)])
def test_a_windowed_tail_may_be_as_short_as_the_widest_window(count, fits):
    """Windows 6 and 9: eight rows may still be read."""
    tail = small_tail(ALL_SLIDE, count=count, base=20)
    if fits:
        assert int(imported(tail, ALL_SLIDE).floor[0]) == 20
    else:
        with pytest.raises(ValueError, match="tail: expected at least 8 rows, found 7"):
            imported(tail, ALL_SLIDE)
    # Unless its exporter had no more.
    cold = small_tail(ALL_SLIDE, count=count, base=20, floor=20)
    assert int(imported(cold, ALL_SLIDE).len[0]) == 20 + count


def test_a_session_refuses_a_tail_that_is_not_its_prompts():
    session = opened("dflash2")
    session.burst(5)
    tail, text = session.export_tail(), text_so_far(session)
    with pytest.raises(ValueError, match=rf"tail: expected 1\.\.{len(text) - 2} prompt tokens"):
        opened("dflash2", text[:-1], tail=tail)
    with pytest.raises(
        ValueError, match="tail: expected one sequence and no draft_from, found 1 a"
    ):
        opened("dflash2", text, tail=tail, draft_from=3)
    two = SpecSession(*trained("dflash2"), capacity=CAPACITY)
    with pytest.raises(
        ValueError, match="tail: expected one sequence and no draft_from, found 2 a"
    ):
        two.open([text, text], 5, tail=tail)
    with pytest.raises(ValueError, match="tail: expected 2 layers, found 1"):
        opened("dflash2", text, tail=dataclasses.replace(tail, k=tail.k[:1]))


@pytest.mark.parametrize("position", [-1, len(TEXT), 1000])
def test_a_cold_start_lies_inside_the_prompt(position):
    with pytest.raises(ValueError, match=rf"draft_from: expected 1\.\.{len(TEXT) - 1} prompt tok"):
        opened("dflash", draft_from=position)


def test_plain_sessions_have_no_tails():
    session = SpecSession(trained("dflash")[0], None)
    with pytest.raises(ValueError, match=r"draft_from, tail: expected a drafter, found a plain"):
        session.open([TEXT], 5, draft_from=3)
    session.open([TEXT], 5)
    with pytest.raises(ValueError, match="tail: expected a drafter, found a plain session"):
        session.export_tail()
    with pytest.raises(ValueError, match=r"session: expected open\(\) first"):
        SpecSession(*trained("dflash")).export_tail()


def test_a_tail_is_cut_inside_the_cache_and_where_its_rows_still_are():
    session = opened("dflash2", draft_from=20)
    session.burst(25)
    length = int(session.state.draft.len[0])
    for upto in (19, length + 1):
        with pytest.raises(ValueError, match=rf"upto: expected 20\.\.{length} \(floor\.\.len\)"):
            session.export_tail(upto=upto)
    assert session.export_tail(upto=length - 9).len == length - 9  # window - 1 rows are still there
    with pytest.raises(ValueError, match=rf"upto: expected at least {length - 9}, found"):
        session.export_tail(upto=length - 10)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_caches_hold_the_same_rows_at_every_boundary(family):
    """Debug mode asserts it after every burst, and notices where it does not hold."""
    session = opened(family)
    session.burst(2)
    session.state = session.state.replace(
        draft=session.state.draft.replace(len=session.state.draft.len + 1)
    )
    with pytest.raises(AssertionError, match="draft rows: expected"):
        session.burst(0)


def test_random_models_with_tails():
    """Any geometry: two windows, one of them shorter than the block's reach."""
    target, draft = tiny_target(), tiny_draft(ALL_SLIDE)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    session = SpecSession(target, draft, capacity=128, check=True)
    session.open([prompt], 60)
    session.burst(15)
    text = prompt + session.results()[0].token_ids
    elsewhere = SpecSession(target, draft, capacity=128, check=True)
    elsewhere.open([text], 20, tail=session.export_tail())
    elsewhere.burst()
    assert elsewhere.results()[0].token_ids == generate(target, None, text, 20).token_ids
    cold = generate(target, draft, text, 20, capacity=128)
    assert elsewhere.results()[0].acceptance_lengths == cold.acceptance_lengths


def test_prompt_chunks_and_rounds_fill_a_ring_alike():
    """A text read in chunks wider than the ring, and the same text drafted round by round."""
    target, draft = trained("dflash2")
    session = opened("dflash2", TEXT[:3], budget=150)
    session.burst()
    text = TEXT[:3] + session.results()[0].token_ids
    caches = loop.empty_caches(target, draft, 1, CAPACITY)
    caches = loop.prefill(target, draft, caches, [text[:-1]], [0], CAPACITY)
    ours, chunked = (export_tail(draft.config, kv) for kv in (session.state.draft, caches.draft))
    assert (ours.base, ours.len) == (chunked.base, chunked.len)
    for a, b in zip((*ours.k, *ours.v), (*chunked.k, *chunked.v), strict=True):
        assert_close(a, b)
