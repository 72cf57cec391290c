"""Draft trees in decoding: the target's own tokens, whatever is asked of a generation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, trained
from targets import SLIDING, TINY, TINY_TARGET, right_draft, table_target, tiny_draft, tiny_target
from test_loop import arguments, compilations, opened, primitives

from dflash_jax import DSparkVtPolicy, SamplingParams, SpecSession, generate, loop
from dflash_jax.batch import Request, serve
from dflash_jax.benchmark import Prompt, run_trial
from dflash_jax.head import trim_head

TEXT = list(b"def add(first, second):\n    return first + second\n\n\ndef sub(")
PROMPTS = [TEXT, TEXT[5:30], TEXT[:9], TEXT[20:44]]
TREE = {"tree": True, "verify_width": 12}
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
PENALISED = dataclasses.replace(
    SAMPLED, repeat_penalty=1.2, frequency_penalty=0.1, penalty_last_n=20, logit_bias={101: -2.0}
)


def pair(family: str) -> tuple:
    """The trained target and drafter of a family; `rnn` and `gated` are DSpark with those heads."""
    if family in FAMILIES:
        return trained(family)
    target, draft = trained("dspark")
    rank, hidden = draft.markov.w1.shape[1], draft.config.hidden_size
    rows, columns = (rank, hidden + rank) if family == "gated" else (3 * rank, 2 * rank + hidden)
    mix = 0.1 * jax.random.normal(jax.random.key(0), (rows, columns))
    head = draft.markov.replace(mix=mix, mix_bias=jnp.zeros((rows,)), kind=family)
    return target, draft.replace(markov=head, confidence=None)


@pytest.mark.parametrize("family", [*FAMILIES, "gated", "rnn"])
def test_greedy_text_is_plain_decodings(family):
    target, draft = pair(family)
    plain = generate(target, None, PROMPTS, [60, 20, 41, 1], logprobs=True)
    chain = generate(target, draft, PROMPTS, [60, 20, 41, 1], policy=DSparkVtPolicy("fixed"))
    drafted = generate(target, draft, PROMPTS, [60, 20, 41, 1], logprobs=True, check=True, **TREE)
    for ours, theirs in zip(drafted, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-5)
    if family in FAMILIES:
        assert sum(x.rounds for x in drafted) < sum(x.rounds for x in chain)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("params", [SAMPLED, PENALISED], ids=["sampled", "penalised"])
def test_a_seed_draws_what_plain_decoding_draws(family, params):
    """Not its law alone: the very tokens. Beside sequences that are greedy and of other seeds."""
    target, draft = trained(family)
    several = [params, SamplingParams(), dataclasses.replace(params, seed=5), params]
    plain = generate(target, None, PROMPTS, 40, sampling=several)
    drafted = generate(target, draft, PROMPTS, 40, sampling=several, **TREE)
    assert [x.token_ids for x in drafted] == [x.token_ids for x in plain]
    assert sum(x.rounds for x in drafted) < sum(x.rounds for x in plain)


def test_greedy_penalties_see_each_nodes_own_path():
    target, draft = trained("dflash")
    params = dataclasses.replace(PENALISED, temperature=0.0, repeat_penalty=1.5, top_p=1.0)
    plain = generate(target, None, TEXT, 60, sampling=params)
    drafted = generate(target, draft, TEXT, 60, sampling=params, **TREE)
    assert drafted.token_ids == plain.token_ids
    assert drafted.rounds < plain.rounds


@pytest.mark.parametrize("length", [1, 7, 8, 9, 63])
def test_prompts_of_any_length_up_to_the_end_of_the_context(length):
    target, draft = trained("dflash")
    options = {"capacity": 64, "stop_token_ids": ()}
    prompt = (TEXT * 2)[:length]
    plain = generate(target, None, prompt, 100, **options)
    drafted = generate(target, draft, prompt, 100, **options, tree=True, verify_width=32)
    assert drafted.token_ids == plain.token_ids
    assert len(prompt) + len(drafted.token_ids) == 65


def test_a_windowed_target_sees_its_window():
    config = dataclasses.replace(TINY_TARGET, layer_window=(6, None, 4))
    target, draft = tiny_target(config), tiny_draft(SLIDING)
    plain = generate(target, None, [1, 2, 3], 60)
    assert generate(target, draft, [1, 2, 3], 60, **TREE).token_ids == plain.token_ids


def test_streams_resumed_texts_and_accepting_nothing():
    target, draft = trained("dflash")
    whole = generate(target, None, TEXT, 50, stop_token_ids=())
    session = SpecSession(target, draft, stop_token_ids=(), **TREE)
    session.open([TEXT], 20)
    assert [t for (piece,) in session.stream() for t in piece] == whole.token_ids[:20]
    suffix = list(b"\nprint(")
    session.resume([suffix], 30)
    session.burst()
    cold = generate(target, None, TEXT + whole.token_ids[:20] + suffix, 30, stop_token_ids=())
    assert session.results()[0].token_ids == cold.token_ids
    alone = generate(target, draft, TEXT, 50, stop_token_ids=(), accept=False, **TREE)
    assert alone.token_ids == whole.token_ids
    assert set(alone.acceptance_lengths) == {1}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_rounds_as_that_of_a_round_that_accepts_nothing(family):
    """To the bit: the log-probabilities that the target gave, and the rows that it keeps."""
    target, draft = trained(family)
    options = {"stop_token_ids": (), "logprobs": True, "capacity": 256, "verify_width": 16}

    def decoded(**more):
        session = SpecSession(target, draft, tree=True, **options, **more)
        session.open([TEXT], 48)
        session.burst()
        rows = [leaf[:, :, : len(TEXT) + 47] for leaf in session.state.target.k]
        return session.results()[0], rows

    (drafted, rows), (alone, rows_alone) = decoded(), decoded(accept=False)
    assert drafted.rounds < alone.rounds
    assert drafted.logprobs == alone.logprobs
    for ours, theirs in zip(rows, rows_alone, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_figures_of_a_tree():
    target, draft = trained("dflash")
    out = generate(target, draft, TEXT, 40, stop_token_ids=(), **TREE)
    slots = draft.config.block_size - 1
    assert out.verify_widths == [slots + 1] * out.rounds
    assert out.drafted == slots * out.rounds
    assert len(out.slot_acceptance) == slots
    assert out.accepted == sum(gain - 1 for gain in out.acceptance_lengths)
    trial = run_trial(target, draft, [Prompt(TEXT)], 40, {"stop_token_ids": (), **TREE})
    assert (trial.setting.policy, trial.lossless) == ("tree", 1)
    assert trial.slots.kept == out.slot_acceptance


@pytest.mark.parametrize("batch", [1, 2])
def test_one_loop_no_callback_no_copied_cache(batch):
    session = opened(batch, **TREE)
    names = primitives(session)
    assert names.count("while") == 1
    assert not [n for n in names if "callback" in n]
    session.burst(1)
    text = loop.decode.lower(*arguments(session, 5)).compile().as_text()
    shape = ",".join(map(str, session.state.target.k[0].shape))
    assert f"[{shape}]" in text
    assert not [line for line in text.splitlines() if f"[{shape}]" in line and " copy(" in line]


def test_nothing_recompiles_after_warm_up():
    target, draft = tiny_target(), tiny_draft(SLIDING)
    generate(target, draft, [1] * 9, 100, **TREE)
    with compilations(0):
        for length in (1, 7, 16):
            for stops in ((7,), (5, 11, 60)):
                generate(target, draft, [3] * length, 20, stop_token_ids=stops, **TREE)


def test_sequences_come_and_go():
    target, draft = trained("dspark")
    requests = [Request(p, 20 + 5 * i) for i, p in enumerate([*PROMPTS, TEXT[3:40]])]
    served = dict(serve(target, draft, requests, 2, **TREE))
    for number, request in enumerate(requests):
        alone = generate(target, None, request.ids, request.max_new_tokens)
        assert served[number].token_ids == alone.token_ids


# --- faults and refusals -------------------------------------------------------------------------


def test_non_finite_laws_are_a_fault():
    target, draft = trained("dflash")
    broken = draft.replace(norm=draft.norm.at[0].set(jnp.nan))
    with pytest.raises(ValueError, match="non-finite draft logits"):
        generate(target, broken, TEXT, 20, **TREE)


def test_a_drafter_that_states_no_vocabulary():
    target, draft = trained("dflash")
    unsaid = draft.replace(config=dataclasses.replace(draft.config, vocab_size=None))
    said, silent = (generate(target, x, TEXT, 30, **TREE) for x in (draft, unsaid))
    assert silent.token_ids == said.token_ids
    assert silent.acceptance_lengths == said.acceptance_lengths


def test_candidates_are_those_of_a_smaller_vocabulary():
    target, draft = tiny_target(), trim_head(tiny_draft(TINY), tiny_target(), np.arange(5))
    plain = generate(target, None, [1, 2, 3], 30)
    out = generate(target, draft, [1, 2, 3], 30, tree=True, verify_width=16)
    assert out.token_ids == plain.token_ids
    with pytest.raises(ValueError, match=r"verify_width: expected 2\.\.16, found 17"):
        SpecSession(target, draft, tree=True, verify_width=17)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": 1}, "tree: expected True or False, found 1"),
        ({"tree": True, "verify_width": 33}, r"verify_width: expected 2\.\.32, found 33"),
        ({"tree": True, "verify_width": 10, "block_size": 2}, r"expected 2\.\.9, found 10"),
        ({"tree": True, "policy": DSparkVtPolicy("ladder")}, "'fixed', found 'ladder'"),
        ({"tree": True, "widths": [4]}, r"tree: expected no widths .* found \[4\]"),
        ({"tree": True, "row_draws": "sample"}, "tree: expected row_draws 'argmax'"),
    ],
)
def test_what_trees_are_not_made_for_is_named(options, message):
    target, draft = trained("dflash")
    with pytest.raises(ValueError, match=message):
        SpecSession(target, draft, **options)


def test_a_target_that_takes_none_is_named():
    target = table_target([1, 2, 3, 0])
    with pytest.raises(ValueError, match="expected a target that takes draft trees"):
        SpecSession(target, right_draft(target), tree=True)
