"""A target that runs outside JAX: rounds driven from the host are the compiled loop's rounds.

The targets here are those of other tests behind NumPy arrays: no optional package is needed.
"""

import dataclasses

import numpy as np
import pytest
from families import trained
from targets import HostedDense, chain, mistaken_draft, table_target

from dflash_jax import (
    HostedTarget,
    Request,
    SamplingParams,
    SpecSession,
    Target,
    compare,
    generate,
    make_mesh,
    serve,
)
from dflash_jax.cli import main
from dflash_jax.compare import top2_gap
from dflash_jax.kv import QuantizedRows
from dflash_jax.window import DSparkVtPolicy

TEXTS = [list(b"def add(first, second):\n    return first"), list(b"import os, s")]


TARGET = table_target([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0])
DRAFT = mistaken_draft(TARGET, [2, 5, 6])
"""Wrong after three tokens: rounds of several lengths."""
PROMPTS = [[7, 3, 3, 0, 1], [9]]


def same(target, draft, prompts, counts, **options):
    """Results of the compiled loop and of the host's, equal in all but time; the latter.

    Log-probabilities to f32 rounding: the one makes logits of a prompt's last row, the other of
    all its rows, and a product of other rows may sum in another order.
    """
    left, right = (
        generate(side, draft, prompts, counts, check=True, **options)
        for side in (target, HostedDense(target))
    )
    timeless = {"prefill_seconds": 0.0, "seconds": 0.0, "logprobs": None}
    for ours, theirs in zip(left, right, strict=True):
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None:
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-5, atol=1e-6)
        assert dataclasses.replace(ours, **timeless) == dataclasses.replace(theirs, **timeless)
    return right


def test_the_two_protocols_are_told_apart():
    assert isinstance(HostedDense(TARGET), HostedTarget)
    assert not isinstance(HostedDense(TARGET), Target)
    assert not isinstance(TARGET, HostedTarget)


def test_rounds_are_the_compiled_loops():
    """Real taps, a confidence policy, sampling beside greedy, penalties, log-probabilities."""
    sampled = [SamplingParams(temperature=0.9, repeat_penalty=1.1, seed=5), SamplingParams()]
    outs = same(*trained("dspark"), TEXTS, [24, 12], sampling=sampled, logprobs=True)
    assert all(out.accepted > 0 for out in outs)


def test_table_rounds_and_plain_steps_too():
    outs = same(TARGET, DRAFT, PROMPTS, [9, 30])
    assert {1, 3, 4} <= {gain for out in outs for gain in out.acceptance_lengths}
    same(TARGET, None, PROMPTS, [9, 5])


def test_a_draft_kv_of_int8():
    session = SpecSession(HostedDense(TARGET), DRAFT, draft_kv_dtype="int8")
    session.open([[7]], 9)
    assert isinstance(session.state.draft.k[0], QuantizedRows)
    session.burst()
    [result] = session.results()
    assert result.token_ids == chain(TARGET, 7, 9)
    assert result.accepted > 0


def test_only_what_is_live_runs_and_only_as_wide_as_needed():
    target = HostedDense(TARGET)
    session = SpecSession(target, DRAFT, widths=[3], policy=DSparkVtPolicy("ladder"))
    session.warm_up(PROMPTS, [40, 2])
    session.open(PROMPTS, [40, 2])
    target.rows_run.clear()
    session.burst()
    long, short = session.results()
    assert [rows[1] > 0 for rows in target.rows_run] == [
        i < short.rounds for i in range(long.rounds)
    ]
    run = [rows[0] for rows in target.rows_run]
    assert all(w <= r for w, r in zip(long.verify_widths, run, strict=True))
    assert set(run) == {3, 4}


def test_a_session_streams_goes_on_and_moves():
    target = HostedDense(TARGET)
    session = SpecSession(target, DRAFT, check=True)
    session.open(PROMPTS[:1], 10)
    streamed = [token for tokens in session.stream() for token in tokens[0]]
    first = session.results()[0].token_ids
    assert streamed == first == chain(TARGET, PROMPTS[0][-1], 10)
    tail = session.export_tail()
    session.resume([[5, 2]], 8)
    session.burst()
    assert session.results()[0].token_ids == chain(TARGET, 2, 8)
    moved = SpecSession(target, DRAFT)
    moved.open([[*PROMPTS[0], *first, 5, 2]], 8, tail=tail)
    moved.burst()
    assert moved.results()[0].token_ids == chain(TARGET, 2, 8)
    assert moved.results()[0].acceptance_lengths == session.results()[0].acceptance_lengths


def test_the_contexts_end_is_not_passed():
    target = HostedDense(TARGET)
    held = len(PROMPTS[0])
    target.max_positions = held + 9
    out = generate(target, DRAFT, PROMPTS[0], 50)
    assert (out.token_ids, out.finish_reason) == (chain(TARGET, 1, 10), "capacity")
    for gain, rows in zip(out.acceptance_lengths, target.rows_run[-out.rounds :], strict=True):
        assert held + rows[0] <= target.max_positions
        held += gain


def test_it_compares_with_plain_decoding():
    out = compare(HostedDense(TARGET), DRAFT, PROMPTS[0], 12)
    assert out.lossless
    assert out.plain_difference is None
    assert top2_gap(HostedDense(TARGET), PROMPTS[0]) == top2_gap(TARGET, PROMPTS[0])


def test_what_needs_a_compiled_target_is_refused():
    target, reason = HostedDense(TARGET), "expected a target that JAX compiles, found a HostedDense"
    with pytest.raises(NotImplementedError, match=f"policy cost: {reason}"):
        SpecSession(target, DRAFT, policy=DSparkVtPolicy("cost"))
    with pytest.raises(NotImplementedError, match=f"mesh: {reason}"):
        SpecSession(target, DRAFT, mesh=make_mesh(2))
    with pytest.raises(NotImplementedError, match=f"batches that requests join: {reason}"):
        next(serve(target, DRAFT, [Request(PROMPTS[0], 4)]))
    with pytest.raises(NotImplementedError, match=f"memory plan: {reason}"):
        SpecSession(target, DRAFT).memory(64)


def test_a_plan_of_it_is_refused_in_one_line(capsys):
    assert main(["plan", "--target", "torch:somewhere", "--draft", "none"]) == 2
    assert "memory plan: expected a target that JAX compiles" in capsys.readouterr().err
