"""Laws of the compiled programs: one loop, no callback, no copied cache, no recompilation."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from targets import SLIDING, TINY, TINY_TARGET, tiny_draft, tiny_target

from dflash_jax import DSparkVtPolicy, SpecSession, generate, loop
from dflash_jax.attention import ABSENT

COMPILED = "/jax/core/compile/backend_compile_duration"
_compilations: list[str] = []


def _count(event: str, duration: float, **_) -> None:
    if event == COMPILED:
        _compilations.append(event)


jax.monitoring.register_event_duration_secs_listener(_count)


@contextlib.contextmanager
def compilations(expected: int):
    """Assert how many programs, helpers included, are compiled inside."""
    before = len(_compilations)
    yield
    assert len(_compilations) - before == expected


def opened(batch=1, capacity=512, budget=100, draft_config=SLIDING, **options):
    """A session with prompts read, and the arguments of the compiled loop."""
    session = SpecSession(tiny_target(), tiny_draft(draft_config), capacity=capacity, **options)
    session.open([[1 + b, 2, 3] for b in range(batch)], budget)
    return session


def arguments(session, rounds):
    limit = jnp.int32(rounds)
    return session.target, session.draft, session.state, session._stops, limit, session.plan


def equations(jaxpr):
    """All equations, those of inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def primitives(session):
    jaxpr = jax.make_jaxpr(loop.decode, static_argnums=5)(*arguments(session, 5)).jaxpr
    return [equation.primitive.name for equation in equations(jaxpr)]


# --- the program -------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_a_generation_is_one_while_loop_without_callbacks(batch):
    names = primitives(opened(batch))
    assert names.count("while") == 1
    assert "dynamic_update_slice" in names or "scatter" in names  # the walk reached the inside
    assert "dot_general" in names
    assert not [n for n in names if "callback" in n or "infeed" in n or "outfeed" in n]


COSTS = {1: 1.0, 2: 1.2, 4: 1.5}


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (1, {}),
        (3, {}),
        (2, {"policy": DSparkVtPolicy("cost"), "costs": COSTS}),
        (3, {"draft_kv_dtype": "int8"}),
    ],
    ids=["1", "3", "cost", "int8"],
)
def test_no_cache_is_copied_inside_the_loop(batch, options):
    session = opened(batch, **options)
    target, kv = session.state.target, session.state.draft
    caches = jax.tree.leaves((target.k, target.v, kv.k, kv.v))
    text = loop.decode.lower(*arguments(session, 5)).compile().as_text()
    # Rows that a product leaves may be as many numbers as a small cache.
    lines = [line for line in text.splitlines() if "(_summed_products)/transpose" not in line]
    copied = re.findall(r"= \w+\[([\d,]*)\]\S* copy(?:-start)?\(", "\n".join(lines))
    sizes = {np.prod([int(n) for n in shape.split(",") if n]) for shape in copied}
    assert copied  # the pattern finds the small ones
    assert not sizes & {leaf.size for leaf in caches}


def test_caches_are_donated():
    session = opened()
    before = session.state
    session.burst(1)
    caches = (before.target.k, before.target.v, before.draft.k, before.draft.v)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(caches))
    aliased = loop.decode.lower(*arguments(session, 5)).compile().memory_analysis()
    assert aliased.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(session.state))


def test_prefill_donates_too():
    target, draft = tiny_target(), tiny_draft(SLIDING)
    caches = loop.empty_caches(target, draft, 1, 64)
    after = loop.prefill(target, draft, caches, [[1, 2, 3]], [0], 64)
    assert caches.target.k[0].is_deleted()
    assert caches.draft.k[0].is_deleted()
    assert after.target.len.tolist() == after.draft.len.tolist() == [3]


def test_nothing_recompiles_after_warm_up():
    """Five prompt lengths of one bucket, three budgets, two stop sets, bursts of any size."""
    target, draft = tiny_target(), tiny_draft(SLIDING)
    generate(target, draft, [1] * 9, 200)
    accepted = set()
    with compilations(0):
        for length in (1, 2, 7, 11, 16):
            for budget in (5, 60, 200):
                for stops in ((7,), (5, 11, 60)):
                    prompt = [(3 * length + i) % 64 for i in range(length)]
                    out = generate(target, draft, prompt, budget, stop_token_ids=stops)
                    accepted |= set(out.acceptance_lengths)
        session = SpecSession(target, draft, stop_token_ids=())
        session.open([[5, 6, 7]], 100)
        for rounds in (1, 2, 17, None):
            session.burst(rounds)
        session = SpecSession(target, draft, accept=False)
        session.open([[5, 6, 7]], 100)
        session.burst()
    assert len(accepted) > 1


def test_streaming_and_resuming_compile_once():
    target, draft = tiny_target(), tiny_draft(SLIDING)

    def talk(prompt, suffix):
        session = SpecSession(target, draft, stop_token_ids=())
        session.open([prompt], 20)
        list(session.stream())
        session.resume([suffix], 15)
        list(session.stream(3))

    talk([1, 2, 3], [4, 5])
    with compilations(0):
        talk([7, 8, 9, 10], [1, 2, 3, 4, 5, 6])


# --- memory ------------------------------------------------------------------------------------


def prefill_arguments(capacity, batch=1, width=256):
    target, draft = tiny_target(), tiny_draft(SLIDING)
    caches = jax.eval_shape(lambda: loop.empty_caches(target, draft, batch, capacity))
    ids = jnp.zeros((batch, width), jnp.int32)
    return target, draft, caches, ids, jnp.full((batch,), width, jnp.int32)


def peak(lowered):
    analysis = lowered.compile().memory_analysis()
    whole = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    return whole + analysis.temp_size_in_bytes - analysis.alias_size_in_bytes


def test_peak_memory_of_rounds_is_linear_in_the_context():
    def measure(capacity):
        return peak(loop.decode.lower(*arguments(opened(capacity=capacity), 5)))

    at_1k, at_2k, at_4k = (measure(n) for n in (1024, 2048, 4096))
    assert at_1k < at_2k
    assert at_4k - at_2k == pytest.approx(2 * (at_2k - at_1k), rel=0.05)


def test_a_prompt_needs_its_caches_and_the_memory_of_one_chunk():
    """What a chunk needs beside the caches is the same at 32k rows as at 4k: no taps, scores or
    logits of a whole prompt are ever held.
    """

    def temporary(capacity):
        lowered = loop.prefill_chunk.lower(*prefill_arguments(capacity))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(32768) == pytest.approx(temporary(4096), rel=0.02)


def test_prefill_makes_no_logits():
    """A vocabulary of 77 is no other dimension here: only the embedding has it."""
    config = dataclasses.replace(TINY_TARGET, vocab_size=77, embedding_rows=77)
    target = tiny_target(config)
    args = (target, *prefill_arguments(512)[1:])
    jaxpr = jax.make_jaxpr(loop.prefill_chunk)(*args).jaxpr
    made = [v.aval.shape for e in equations(jaxpr) for v in e.outvars if hasattr(v.aval, "shape")]
    assert len(made) > 100
    assert not [shape for shape in made if 77 in shape]


# --- rows of a batch ---------------------------------------------------------------------------


def snapshot(state, b):
    """All that counts of one sequence: its books, its valid cache rows, its output so far."""
    length, kv = int(state.target.len[b]), state.draft
    parts = {
        "target": [np.asarray(leaf)[b, :, :length] for leaf in state.target.k + state.target.v],
        "draft": [],
        "books": [
            int(x[b])
            for x in (state.anchor, state.emitted, state.done, state.rounds, state.drafted)
        ],
        "tokens": np.asarray(state.tokens)[b, : int(state.emitted[b])],
        "gains": np.asarray(state.gains)[b, : int(state.rounds[b])],
        "lengths": [length, int(kv.len[b])],
    }
    for i in range(len(kv.k)):
        pos = np.asarray(kv.slots_of(i).pos)[b]
        window = SLIDING.layer_window[i] or length + 1
        for leaf in (kv.k[i], kv.v[i]):
            held = {p: np.asarray(leaf)[b, :, s] for s, p in enumerate(pos) if p != ABSENT}
            parts["draft"].append([held[p] for p in range(max(0, length + 1 - window), length)])
    return parts


def test_a_finished_row_is_frozen_to_the_bit():
    session = SpecSession(tiny_target(), tiny_draft(SLIDING), capacity=128)
    session.open([[1, 2, 3], [4] * 9, [7, 8]], [4, 60, 30])
    session.burst(4)
    first = snapshot(session.state, 0)
    assert session.state.done.tolist() == [True, False, False]
    session.burst(30)
    third = snapshot(session.state, 2)
    assert session.state.done.tolist() == [True, False, True]
    session.burst()
    assert session.state.done.all()
    for b, before in ((0, first), (2, third)):
        jax.tree.map(np.testing.assert_array_equal, before, snapshot(session.state, b))


def test_a_sequence_stops_at_its_own_budget():
    prompts, budgets = [[1, 2, 3], [4] * 9, [7, 8]], [4, 60, 30]
    together = generate(tiny_target(), tiny_draft(SLIDING), prompts, budgets)
    assert [out.emitted for out in together] == budgets


def test_the_loop_ends_with_the_last_sequence():
    session = SpecSession(tiny_target(), tiny_draft(SLIDING), capacity=128)
    session.open([[1, 2, 3], [4] * 9, [7, 8]], [4, 60, 30])
    session.burst()
    rounds = np.asarray(session.state.rounds)
    before = jax.tree.map(np.asarray, session.state)
    session.burst()  # nothing is left to do
    jax.tree.map(np.testing.assert_array_equal, before, session.state)
    assert rounds.max() == rounds[1]


# --- steps and streams -------------------------------------------------------------------------


def test_step_by_step_equals_the_whole_loop():
    whole, steps = opened(batch=3), opened(batch=3)
    whole.burst()
    taken = 0
    while not steps.done:
        steps.burst(1)
        taken += 1
    assert taken == max(out.rounds for out in whole.results())
    for b in range(3):
        a, c = whole.results()[b], steps.results()[b]
        assert (a.token_ids, a.acceptance_lengths) == (c.token_ids, c.acceptance_lengths)
        jax.tree.map(
            np.testing.assert_array_equal, snapshot(whole.state, b), snapshot(steps.state, b)
        )


def test_a_limit_on_rounds_is_a_limit():
    session = opened()
    session.burst(7)
    assert session.results()[0].rounds == 7
    session.burst(0)
    assert session.results()[0].rounds == 7


@pytest.mark.gpu
def test_the_loop_runs_without_transfers():
    session = opened(batch=3)
    args = arguments(session, 50)
    jax.block_until_ready(args[:5])
    with jax.transfer_guard("disallow"):
        state = loop.decode(*args)
        jax.block_until_ready(state)
    assert int(state.emitted.min()) > 1


# --- unread rows -------------------------------------------------------------------------------


def poisoned(state):
    """NaN in every row of both caches that holds no committed token."""
    slots = np.arange(state.target.k[0].shape[2])
    beyond = (slots >= np.asarray(state.target.len)[:, None])[:, None, :, None]
    kv = state.draft

    def fill(leaves):
        absent = [np.asarray(kv.slots_of(i).pos == ABSENT) for i in range(len(leaves))]
        pairs = zip(leaves, absent, strict=True)
        return [jnp.where(a[:, None, :, None], jnp.nan, leaf) for leaf, a in pairs]

    target = state.target.replace(
        k=[jnp.where(beyond, jnp.nan, leaf) for leaf in state.target.k],
        v=[jnp.where(beyond, jnp.nan, leaf) for leaf in state.target.v],
    )
    return state.replace(target=target, draft=kv.replace(k=fill(kv.k), v=fill(kv.v)))


def test_unwritten_rows_are_never_read():
    """50 rounds with NaN in every unused slot before each: a NaN logit anywhere is an error."""
    clean, dirty = opened(batch=2, budget=400), opened(batch=2, budget=400)
    clean.burst(50)
    for _ in range(50):
        dirty.state = poisoned(dirty.state)
        dirty.burst(1)
    for a, b in zip(clean.results(), dirty.results(), strict=True):
        assert a.rounds == b.rounds == 50
        assert a.token_ids == b.token_ids


def test_prompts_are_read_over_unwritten_rows():
    target, draft, prompt = tiny_target(), tiny_draft(SLIDING), [[9, 8, 7, 6, 5], [3] * 40]
    caches = loop.empty_caches(target, draft, 2, 64)
    dirt = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x.copy(), caches
    )
    clean = loop.prefill(target, draft, caches, prompt, [0, 0], 64)
    dirty = loop.prefill(target, draft, dirt, prompt, [0, 0], 64)
    np.testing.assert_array_equal(clean.last, dirty.last)
    assert np.isfinite(clean.last).all()


def test_nothing_is_written_past_the_capacity():
    """Both caches have slack behind the capacity: padding and rejected drafts may land there,
    committed rows never do, and the last tokens equal those of a roomier run.
    """
    target, draft, prompt = tiny_target(), tiny_draft(SLIDING), [1, 2, 3]
    roomy = generate(target, draft, prompt, 100, capacity=128).token_ids
    session = SpecSession(target, draft, capacity=20)
    session.open([prompt], 100)
    while not session.done:
        session.state = poisoned(session.state)
        session.burst(1)
        assert int(session.state.target.len[0]) <= 20
        assert int(session.state.draft.len[0]) <= 20
        assert max(np.asarray(session.state.draft.full.pos)[0]) < 20
    out = session.results()[0]
    # Row 20 of the context would be the anchor's: it is decided, but has no row.
    assert out.finish_reason == "capacity"
    assert out.emitted == 20 - len(prompt) + 1
    assert out.token_ids == roomy[: out.emitted]


# --- a long run --------------------------------------------------------------------------------


@pytest.mark.runs_long
def test_twenty_thousand_rounds():
    """No counter outgrows its table, nothing turns NaN (a fault would raise), memory stays flat."""
    target = tiny_target(
        dataclasses.replace(
            TINY_TARGET,
            num_attention_heads=1,
            num_key_value_heads=1,
            num_hidden_layers=2,
            layer_window=(None, None),
            max_position_embeddings=32768,
        )
    )
    sliding = dataclasses.replace(TINY, layer_window=(6, 6), num_target_layers=2)
    session = SpecSession(target, tiny_draft(sliding), stop_token_ids=(), capacity=28_000)
    session.open([[1, 2, 3]], 30_000)
    assert session.state.draft.ring is not None
    session.burst(10)
    held = sum(x.nbytes for x in jax.live_arrays())
    rounds = 10
    while rounds < 20_000:
        session.burst(4998)
        rounds += 4998
        assert sum(x.nbytes for x in jax.live_arrays()) <= held
    out = session.results()[0]
    assert out.rounds == rounds == 20_002
    assert out.finish_reason == "open"
    assert out.emitted == 1 + sum(out.acceptance_lengths) > 20_000
    assert session.state.target.len.tolist() == session.state.draft.len.tolist()
