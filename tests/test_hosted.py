"""A target that runs outside JAX: rounds driven from the host are the compiled loop's rounds.

The target here is the tiny dense decoder behind NumPy arrays: no optional package is needed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import tiny_trained_target, trained

from dflash_jax import HostedTarget, SamplingParams, SpecSession, Target, compare, generate, serve
from dflash_jax.batch import Request
from dflash_jax.cli import main
from dflash_jax.targets import HostedOutput
from dflash_jax.window import DSparkVtPolicy

TEXTS = [list(b"def add(first, second):\n    return first"), list(b"import os, s")]


@dataclasses.dataclass
class HostState:
    """len `[B]` and the dense decoder's own state, which also knows it."""

    len: np.ndarray
    state: object


class HostedDense:
    """A `HostedTarget` over a dense one: what it hands out went through the host's memory."""

    def __init__(self, target):
        self._target = self.tables = target
        self.hidden_size, self.vocab_size = target.hidden_size, target.vocab_size
        self.stop_token_ids, self.max_positions = target.stop_token_ids, target.max_positions
        self.check_drafter = target.check_drafter
        self.rows_run = []

    def init_state(self, batch, slots):
        return HostState(np.zeros(batch, np.int32), self._target.init_state(batch, slots))

    def forward(self, state, ids, count, taps, last_only=False):
        assert not isinstance(ids, jax.core.Tracer)
        self.rows_run.append(count.tolist())
        run, after = _forward(self._target, state.state, ids, taps)
        logits = np.array(self._target.logits(run.hidden))
        real = np.arange(ids.shape[1]) < count[:, None]
        if last_only:
            last = np.maximum(count - 1, 0)[:, None, None]
            logits = np.take_along_axis(logits, last, axis=1)
        else:
            logits = np.where(real[..., None], logits, 0)
        tapped = np.where(real[..., None], np.array(run.taps), 0)
        out = HostedOutput(jnp.asarray(logits), jnp.asarray(tapped))
        return out, HostState(state.len, after)

    def commit(self, state, count):
        after = self._target.commit(state.state, jnp.asarray(count, jnp.int32))
        return HostState(state.len + count.astype(np.int32), after)


_forward = jax.jit(
    lambda target, state, ids, taps: target.forward(state, ids, taps), static_argnums=3
)


@functools.cache
def hosted_target():
    return HostedDense(tiny_trained_target())


def same(family, prompts, counts, **options):
    """Results of the compiled loop and of the host's, equal in all but time; the latter."""
    target, draft = trained(family) if family else (tiny_trained_target(), None)
    left, right = (
        generate(side, draft, prompts, counts, check=True, **options)
        for side in (target, hosted_target())
    )
    timeless = {"prefill_seconds": 0.0, "seconds": 0.0}
    for ours, theirs in zip(left, right, strict=True):
        assert dataclasses.replace(ours, **timeless) == dataclasses.replace(theirs, **timeless)
    return right


def test_the_two_protocols_are_told_apart():
    assert isinstance(hosted_target(), HostedTarget)
    assert not isinstance(hosted_target(), Target)
    assert not isinstance(tiny_trained_target(), HostedTarget)


@pytest.mark.parametrize("family", ["dspark", "dflash2"])
def test_rounds_are_the_compiled_loops(family):
    sampled = [SamplingParams(temperature=0.9, repeat_penalty=1.2, seed=5), SamplingParams()]
    outs = same(family, TEXTS, [30, 12], sampling=sampled, logprobs=True)
    assert all(out.mean_acceptance_length > 1.2 for out in outs)


def test_plain_steps_are_the_compiled_loops():
    same(None, TEXTS, [9, 5])


def test_only_what_is_live_runs_and_only_as_wide_as_needed():
    target, draft = hosted_target(), trained("dspark")[1]
    session = SpecSession(target, draft, widths=[2, 4], policy=DSparkVtPolicy("ladder"))
    session.open(TEXTS, [40, 2])
    target.rows_run.clear()
    session.burst()
    short, long = session.results()[1], session.results()[0]
    assert [rows[1] > 0 for rows in target.rows_run] == [
        i < short.rounds for i in range(long.rounds)
    ]
    rows = [rows[0] for rows in target.rows_run]
    assert all(w <= r and r in (2, 4, 8) for w, r in zip(long.verify_widths, rows, strict=True))
    assert len(set(rows)) > 1


def test_a_session_streams_goes_on_and_moves():
    target, draft = hosted_target(), trained("dflash")[1]
    session = SpecSession(target, draft, check=True)
    session.open(TEXTS[:1], 10)
    streamed = [token for tokens in session.stream() for token in tokens[0]]
    first = session.results()[0].token_ids
    assert streamed == first == generate(trained("dflash")[0], None, TEXTS[0], 10).token_ids
    tail = session.export_tail()
    session.resume([list(b"\ndef")], 8)
    session.burst()
    whole = [*TEXTS[0], *first, *b"\ndef"]
    cold = generate(target, draft, whole, 8)
    assert session.results()[0].token_ids == cold.token_ids
    moved = SpecSession(target, draft, capacity=256)
    moved.open([whole], 8, tail=tail)
    moved.burst()
    assert moved.results()[0].token_ids == cold.token_ids


def test_the_contexts_end_is_not_passed():
    target = HostedDense(tiny_trained_target())
    target.max_positions = len(TEXTS[1]) + 9
    out = generate(target, trained("dflash")[1], TEXTS[1], 50)
    expected = generate(tiny_trained_target(), None, TEXTS[1], 10).token_ids
    assert (out.token_ids, out.finish_reason) == (expected, "capacity")
    held = len(TEXTS[1])
    for gain, rows in zip(out.acceptance_lengths, target.rows_run[-out.rounds :], strict=True):
        assert held + rows[0] <= target.max_positions
        held += gain


def test_it_compares_with_plain_decoding():
    out = compare(hosted_target(), trained("dflash")[1], TEXTS[1], 12)
    assert out.lossless
    assert out.plain_difference is None


def test_what_needs_a_compiled_target_is_refused():
    target, draft = hosted_target(), trained("dspark")[1]
    reason = "expected a target that JAX compiles, found a HostedDense"
    with pytest.raises(NotImplementedError, match=f"policy cost: {reason}"):
        SpecSession(target, draft, policy=DSparkVtPolicy("cost"))
    with pytest.raises(NotImplementedError, match=f"batches that requests join: {reason}"):
        next(serve(target, draft, [Request(TEXTS[0], 4)]))
    with pytest.raises(NotImplementedError, match=f"memory plan: {reason}"):
        SpecSession(target, draft).memory(64)


def test_a_plan_of_it_is_refused_in_one_line(capsys):
    assert main(["plan", "--target", "torch:somewhere", "--draft", "none"]) == 2
    assert "memory plan: expected a target that JAX compiles" in capsys.readouterr().err
