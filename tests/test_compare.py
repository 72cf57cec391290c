"""Comparing with plain decoding: lossless or where not, and by how much the target was torn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from targets import right_draft, table_target, trained_pair, wrong_draft

from dflash_jax import SamplingParams, compare, generate
from dflash_jax.compare import first_difference, top2_gap

TEXT = list(b"def add(first, second):\n    return first + second\n\n\ndef sub(")
CYCLE = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0]


def test_a_batch_is_refused():
    target = table_target(CYCLE)
    with pytest.raises(ValueError, match="prompt: expected token ids of one, found 2 prompts"):
        compare(target, right_draft(target), [[1], [2]], 5)


@pytest.mark.parametrize("many", [False, True])
def test_sampling_is_refused(many):
    target, sampling = table_target(CYCLE), SamplingParams(temperature=0.7)
    with pytest.raises(ValueError, match=r"sampling: expected greedy .*, found temperature 0\.7"):
        compare(target, right_draft(target), [1], 5, sampling=[sampling] if many else sampling)


def test_a_temperature_too_small_to_sample_is_compared():
    target = table_target(CYCLE)
    tiny = SamplingParams(temperature=1e-9)
    assert compare(target, right_draft(target), [1], 5, sampling=tiny).lossless


def test_the_same_tokens_three_ways():
    target = table_target(CYCLE)
    result = compare(target, right_draft(target), [1], 20)
    assert result.lossless
    assert result.padded_difference is None
    assert result.plain_difference is None
    outs = result.speculative, result.plain, result.padded
    assert len({tuple(out.token_ids) for out in outs}) == 1
    assert [out.rounds for out in outs] == [5, 19, 19]
    assert [out.accepted for out in outs] == [14, 0, 0]
    rates = result.speculative.tokens_per_second, result.plain.tokens_per_second
    assert result.speedup == pytest.approx(rates[0] / rates[1])


def test_options_reach_every_way_that_they_concern():
    target = table_target(CYCLE)
    options = {"stop_token_ids": [6], "block_size": 2, "capacity": 64}
    result = compare(target, wrong_draft(target), [1], 20, **options)
    for out in (result.speculative, result.plain, result.padded):
        assert out.token_ids == [2, 3, 4, 5, 6]
        assert out.finish_reason == "stop"
    assert result.speculative.drafted == result.speculative.rounds


def test_nothing_decoded_has_no_speedup():
    target = table_target(CYCLE)
    assert compare(target, right_draft(target), [1], 1).speedup == 0.0


def test_the_first_difference_is_named_with_the_gap_there():
    target = table_target(CYCLE)
    ours = generate(target, None, [1], 8)
    other = dataclasses.replace(ours, token_ids=[2, 3, 4, 9, 6, 7, 8, 9])
    difference = first_difference(target, [1], ours, other)
    assert (difference.index, difference.ours, difference.theirs) == (3, 5, 9)
    row = np.sort(np.asarray(target.table)[4])  # the token before it is 4
    assert difference.top2_gap == pytest.approx(row[-1] - row[-2], rel=1e-5)
    assert first_difference(target, [1], ours, ours) is None


def test_a_stream_that_ends_early_differs_at_its_end():
    target = table_target(CYCLE)
    ours = generate(target, None, [1], 8)
    short = dataclasses.replace(ours, token_ids=ours.token_ids[:5])
    difference = first_difference(target, [1], ours, short)
    assert (difference.index, difference.ours, difference.theirs) == (5, 7, None)


def test_a_tie_has_no_gap_and_goes_to_the_lower_id():
    target = table_target([1, 0])
    target = target.replace(table=jnp.ones((2, 2)), head=target.head.at[:2].set(1.0))
    assert top2_gap(target, [0, 1]) == 0.0
    assert generate(target, None, [1], 3).token_ids == [0, 0, 0]
    assert generate(target, right_draft(target), [1], 3).token_ids == [0, 0, 0]


def test_bf16_is_lossless_against_the_padded_program():
    """A wide and a one-row matmul may round another way; the padded loop runs the same program."""
    half = [jax.tree.map(lambda x: x.astype(jnp.bfloat16), model) for model in trained_pair()]
    for prompt in (TEXT, TEXT[20:50]):
        result = compare(*half, prompt, 96)
        assert result.lossless
        assert result.speculative.rounds < result.padded.rounds == 95
        assert regret(half[0], prompt, result.speculative.token_ids) <= 2


def regret(target, prompt, tokens):
    """Case 115: the target's best logit less the emitted token's, the largest in bf16 steps.

    Another program, of all rows at once, may prefer another token, but hardly.
    """
    ids = jnp.asarray([[*prompt, *tokens]])
    state = target.init_state(1, ids.shape[1])
    rows = jax.jit(lambda t, s, i: t.logits(t.forward(s, i, ())[0].hidden[0]))(target, state, ids)
    rows = np.asarray(rows, np.float64)[len(prompt) - 1 : -1]
    best, chosen = rows.max(axis=1), rows[np.arange(len(tokens)), tokens]
    return float(((best - chosen) / 2.0 ** (np.floor(np.log2(np.abs(best))) - 7)).max())
