"""Requests that join and leave the rows of one loop: each gets what it gets alone."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import (
    TINY,
    TINY_TARGET,
    chain,
    right_draft,
    table_target,
    tiny_draft,
    tiny_target,
)
from test_loop import compilations

from dflash_jax import Request, SamplingParams, Slots, generate, loop, serve, stream
from dflash_jax.sampling import Kind
from dflash_jax.window import DSparkVtPolicy

TEXT = list(b"def add(first, second):\n    return first + second\n\n\ndef sub(")
FOLLOWS = [(5 * token + 3) % 16 for token in range(16)]
KINDS = {"capacity": 64, "kinds": ("sampled", "top_k", "top_p", "min_p")}


def table(**options):
    target = table_target(FOLLOWS, **options)
    return target, right_draft(target)


@functools.cache
def one_layer_pair():
    """A random target and drafter: what is tested with them is no matter of depth."""
    target = dataclasses.replace(TINY_TARGET, num_hidden_layers=1, layer_window=(None,))
    draft = dataclasses.replace(
        TINY,
        num_hidden_layers=1,
        layer_causal=(False,),
        layer_window=(None,),
        target_layer_ids=(0,),
        num_target_layers=1,
    )
    return tiny_target(target), tiny_draft(draft)


def alone(target, draft, request, **options):
    [(_, result)] = serve(target, draft, [request], slots=1, **options)
    return result


def outcome(result):
    figures = result.acceptance_lengths, result.verify_widths, result.finish_reason
    return result.token_ids, *figures, result.prompt_tokens


def served(target, draft, requests, slots, **options):
    results = list(serve(target, draft, requests, slots, **options))
    assert sorted(number for number, _ in results) == list(range(len(requests)))
    return [outcome(result) for _, result in sorted(results)]


# --- the same tokens as alone ------------------------------------------------------------------

GREEDY = [
    Request(TEXT[:5], 30, stop_token_ids=[ord("(")]),
    Request(TEXT[3:14], 1),
    Request(TEXT[:16], 12),
    Request(TEXT[7:16], 50),
    Request(TEXT[2:15], 7),
    Request(TEXT[1:2], 25),
]
"""Prompts of one bucket: fewer programs to compile."""


@pytest.fixture(scope="module")
def plainly():
    """What the target itself says to each request, decoded plainly and alone."""
    target, _ = trained("dflash")
    return [
        generate(target, None, r.ids, r.max_new_tokens, stop_token_ids=r.stop_token_ids)
        for r in GREEDY
    ]


@pytest.mark.parametrize(
    "family", ["dflash2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("dspark", None))]
)
def test_requests_get_the_tokens_that_they_get_alone(family, plainly):
    """In three slots, in any order, drafted by every family or by none."""
    target, draft = trained(family) if family else (trained("dflash")[0], None)
    expected = [(out.token_ids, out.finish_reason) for out in plainly]
    assert {reason for _, reason in expected} == {"length", "stop"}
    for order in (range(6), [3, 5, 0, 1, 4, 2]):
        results = served(target, draft, [GREEDY[i] for i in order], 3, capacity=128)
        assert [(r[0], r[3]) for r in results] == [expected[i] for i in order]


def any_request(penalties):
    """Greedy or sampled, with penalties or without."""
    strength = st.sampled_from([0.0, 0.7] if penalties else [0.0])
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.5, 1.0]),
        top_k=st.sampled_from([0, 8]),
        top_p=st.sampled_from([1.0, 0.9]),
        min_p=st.sampled_from([0.0, 0.1]),
        presence_penalty=strength,
        seed=st.integers(0, 3),
        sequence=st.integers(0, 3),
    )
    return st.builds(
        lambda start, size, budget, sampling: Request(
            [token % 64 for token in TEXT[start : start + size]], budget, sampling
        ),
        st.integers(0, 20),
        st.integers(1, 16),
        st.integers(1, 20),
        params,
    )


def agree_with_solo_runs(pair, requests, **options):
    options = KINDS | options
    together = served(*pair, requests, 3, **options)
    assert together == [outcome(alone(*pair, r, **options)) for r in requests]


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(st.lists(any_request(penalties=False), min_size=2, max_size=7))
def test_sampled_and_greedy_requests_get_what_they_get_alone(requests):
    agree_with_solo_runs(one_layer_pair(), requests)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_so_do_those_of_every_family_and_with_penalties(family):
    @settings(max_examples=10, deadline=None, derandomize=True, database=None)
    @given(st.lists(any_request(penalties=True), min_size=2, max_size=7))
    def check(requests):
        agree_with_solo_runs(trained(family), requests, kinds=get_args(Kind))

    check()


# --- joining and leaving -----------------------------------------------------------------------


def row(rows, slot):
    """Everything of one sequence, caches and books, to the bit."""
    return [np.asarray(leaf)[slot] for leaf in jax.tree.leaves(rows._state)]


def assert_same(before, after):
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def tiny():
    return one_layer_pair()


COPIES = r"= \w+\[([\d,]+)\]\S* copy(?:-start)?\("


def test_joining_touches_no_other_row_and_copies_no_cache(tiny):
    rows = Slots(*tiny, 2, capacity=64)
    assert rows.join(Request([1, 2, 3], 40)) == 0
    rows.burst(2)
    before = rows._state
    assert rows.join(Request([4] * 20, 40)) == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    rows.leave(1)
    held = row(rows, 0)
    assert rows.join(Request([5] * 7, 40)) == 1
    assert_same(held, row(rows, 0))
    one = jax.tree.map(lambda leaf: leaf[:1], rows._state)
    text = loop.join.lower(rows._state, one, jnp.int32(1)).compile().as_text()
    copied = {int(np.prod([int(n) for n in m.split(",")])) for m in re.findall(COPIES, text)}
    assert not copied & {leaf.size for leaf in rows._state[0].target.k}


def test_a_finished_row_is_frozen_until_another_request_takes_it(tiny):
    rows = Slots(*tiny, 2, capacity=64)
    rows.join(Request([1, 2, 3], 3), 0)
    rows.join(Request([4] * 9, 40), 1)
    while not any(piece.result for piece in rows.news()):
        rows.burst(1)
    assert rows.free == [0]
    state = rows._state[0]
    length, emitted = int(state.target.len[0]), int(state.emitted[0])
    frozen = [np.asarray(k)[0, :, :length] for k in state.target.k]
    rows.burst(3)
    state = rows._state[0]
    assert (int(state.target.len[0]), int(state.emitted[0])) == (length, emitted)
    assert_same(frozen, [np.asarray(k)[0, :, :length] for k in state.target.k])
    assert rows.join(Request([5], 9), 2) == 0


def test_leaving_frees_a_slot_and_changes_nothing_for_the_others(tiny):
    rows = Slots(*tiny, 2, capacity=64)
    rows.join(Request([1, 2, 3], 40), 0)
    rows.join(Request([4, 5], 12), 1)
    rows.burst(1)
    rows.leave(0)
    assert rows.free == [0]
    rows.join(Request([9, 9, 9, 9], 20), 2)
    results = {}
    while len(rows.free) < 2:
        rows.burst()
        results |= {p.request: p.result for p in rows.news() if p.result}
    for number, request in ((1, Request([4, 5], 12)), (2, Request([9, 9, 9, 9], 20))):
        plain = generate(tiny[0], None, request.ids, request.max_new_tokens)
        assert results[number].token_ids == plain.token_ids
    with pytest.raises(ValueError, match="slot: expected one with a request, found 0 free"):
        rows.leave(0)


def test_nothing_recompiles_as_requests_come_and_go(tiny):
    options = {"capacity": 64}
    list(serve(*tiny, [Request([1] * 9, 20), Request([2], 9), Request([3], 5)], 2, **options))
    with compilations(0):
        requests = [Request([n] * n, 30 - n, stop_token_ids=[n]) for n in range(1, 14)]
        list(serve(*tiny, requests, 2, **options))
        list(stream(*tiny, iter(requests), 2, rounds=3, **options))


# --- streams -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2, None])
def test_pieces_joined_are_the_whole(rounds, tiny):
    requests = [Request([token], 1 + 3 * token, stop_token_ids=[7]) for token in range(9)]
    pieces = list(stream(*tiny, requests, 2, rounds=rounds, capacity=64))
    for number, request in enumerate(requests):
        mine = [piece for piece in pieces if piece.request == number]
        joined = [token for piece in mine for token in piece.token_ids]
        whole = generate(tiny[0], None, request.ids, request.max_new_tokens, stop_token_ids=[7])
        assert joined == whole.token_ids == mine[-1].result.token_ids
        assert [piece.result is None for piece in mine] == [True] * (len(mine) - 1) + [False]


def test_an_iterator_is_asked_for_a_request_when_a_slot_is_free(tiny):
    asked = []

    def requests():
        for number in range(5):
            asked.append(number)
            yield Request([number], [40, 8, 8, 8, 8][number], stop_token_ids=())

    results = serve(*tiny, requests(), 2, capacity=64)
    assert next(results)[0] == 1
    assert asked == [0, 1]
    assert [number for number, _ in results] == [2, 3, 4, 0]


def test_stop_tokens_may_differ_from_prompt_to_prompt():
    target, _ = table()
    said = chain(target, 1, 9)
    prompts, stops = [[1], [1], [1]], [[said[4]], [said[7]], []]
    outs = generate(target, None, prompts, 9, stop_token_ids=stops)
    assert [out.emitted for out in outs] == [5, 8, 9]
    with pytest.raises(ValueError, match=r"stop_token_ids: expected 2 lists .* found 3"):
        generate(target, None, prompts[:2], 9, stop_token_ids=stops)


# --- the cost policy in a batch ----------------------------------------------------------------


@pytest.mark.slow
def test_what_a_sampled_row_draws_does_not_depend_on_its_neighbours():
    """Each goes by its own acceptance: some draft while others don't."""
    target, draft = table()
    options = {
        "capacity": 256,
        "kinds": ["sampled"],
        "policy": DSparkVtPolicy("cost"),
        "costs": {1: 1.0, 4: 1.9},
    }
    requests = [
        Request([n], 60, SamplingParams(temperature=t, seed=n))
        for n, t in enumerate([0.5, 8.0, 0.7, 5.0, 3.0])
    ]
    expected = [outcome(alone(target, draft, r, **options)) for r in requests]
    assert served(target, draft, requests, 3, **options) == expected
    widths = [set(result[2]) for result in expected]
    assert 1 not in widths[0]
    assert 1 in widths[1]


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([]), r"request 1: prompt: expected 1\.\.64 tokens \(capacity\), found 0"),
        (Request([1] * 65), r"request 1: prompt: expected 1\.\.64 tokens .*, found 65"),
        (Request([16]), r"request 1: prompt: expected ids in 0\.\.15, found 16"),
        (Request([1], -1), "request 1: max_new_tokens: expected a positive integer, found -1"),
        (
            Request([1], sampling=SamplingParams(temperature=1.0)),
            "request 1: sampling: expected slots of these kinds, found none: sampled",
        ),
        (
            Request([1], sampling=SamplingParams(logit_bias={1: 2.0})),
            "request 1: sampling: expected slots of these kinds, found none: biased",
        ),
        (
            Request([1], stop_token_ids=range(9)),
            r"request 1: stop_token_ids: expected at most 8 \(stops\), found 9",
        ),
    ],
)
def test_a_request_that_cannot_be_honoured_is_named_before_anything_runs(request_, message):
    options = {"capacity": 64, "kinds": (), "stops": 8}
    target, draft = table()
    with pytest.raises(ValueError, match=message):
        next(serve(target, draft, Listed([Request([1]), request_]), 2, **options))


class Listed(Sequence):
    """A list whose requests' budgets nobody adds up."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def test_what_else_is_refused(tiny):
    target, draft = table()
    for requests, options, message in (
        ([], {}, "requests: expected at least one, found none"),
        (iter([Request([1])]), {}, "capacity: expected rows a sequence for an iterator"),
        (iter([]), {"capacity": 64, "kinds": ["top"]}, "kinds: expected some of sampled, top_k"),
        ([Request([1])], {"slots": 0}, r"slots: expected 1\.\.65536, found 0"),
    ):
        with pytest.raises(ValueError, match=message):
            next(serve(target, draft, requests, **options))
    with pytest.raises(ValueError, match="sampling: expected SamplingParams, found "):
        Request([1], sampling=0.5)
    rows = Slots(*tiny, 2, capacity=64)
    with pytest.raises(ValueError, match=r"slots: expected join\(\) first"):
        rows.burst()
    rows.join(Request([1]))
    rows.join(Request([1]))
    with pytest.raises(ValueError, match="slots: expected a free one, found all 2 taken"):
        rows.join(Request([2]))
