"""Sampled and penalised generation from outside: what stays the same, what never happens.

Most of it runs on the table target in batches of four with log-probabilities, so that the tests
share compiled programs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, trained
from table_law import V, drafter, shaped_logits, table_target

from dflash_jax import SpecSession, generate
from dflash_jax.sampling import SamplingParams
from dflash_jax.window import DSparkVtPolicy

PROMPT = [3, 1, 0, 2, 2, 4]
PROMPTS = [PROMPT, [1], [5, 5, 0], [2, 3, 4, 1]]
TEXT = list(b"def add(first, second):\n    return first + second\n\n\ndef sub(")
ROUGH = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
PENALISED = dataclasses.replace(
    ROUGH, repeat_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.1, penalty_last_n=20
)
OPTIONS = {"capacity": 256, "stop_token_ids": (), "logprobs": True}


def decoded(family, prompts, count, params, *, kind="random", **options):
    """Generations of the table target; `family` None decodes plainly."""
    draft = None if family is None else drafter(family, kind)
    return generate(table_target(), draft, prompts, count, sampling=params, **OPTIONS, **options)


def tokens(*args, **options):
    out = decoded(*args, **options)
    return [one.token_ids for one in out] if isinstance(out, list) else out.token_ids


def four(params, **changes):
    """Four requests that differ in their random numbers alone."""
    return [dataclasses.replace(params, sequence=i, **changes) for i in range(4)]


# --- the same request, the same tokens ------------------------------------------------------------


def assert_same_in_any_company(target, draft, prompts, vocabulary):
    """Alone, in slot 0 of 4, in slot 3 of 4, and after other requests of one session."""
    mine = dataclasses.replace(PENALISED, sequence=5)
    others = [
        dataclasses.replace(PENALISED, seed=s, temperature=t) for s, t in enumerate((0, 0.5, 2))
    ]

    def tokens(prompts, budgets, params):
        outs = generate(target, draft, prompts, budgets, sampling=params, **OPTIONS)
        return [out.token_ids for out in outs]

    session = SpecSession(target, draft, sampling=mine, **OPTIONS)
    alone = []
    for prompt in (prompts[0], prompts[1], prompts[0]):
        session.open([prompt], 40)
        session.burst()
        alone.append(session.results()[0].token_ids)
    first = tokens(prompts, [40, 9, 30, 22], [mine, *others])
    last = tokens([*prompts[1:], prompts[0]], [9, 30, 22, 40], [*others, mine])
    assert alone[0] == alone[2] == first[0] == last[3]
    assert first[1:] == last[:3]
    assert len(set(alone[0])) > vocabulary


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_gives_the_same_tokens_in_any_company(family):
    assert_same_in_any_company(table_target(), drafter(family, "random"), PROMPTS, 4)


def test_a_trained_pair_gives_the_same_tokens_in_any_company():
    prompts = [TEXT, TEXT[5:30], TEXT[:9], TEXT[20:44]]
    assert_same_in_any_company(*trained("dflash2"), prompts, 10)


@pytest.mark.parametrize("family", FAMILIES)
def test_seeds_and_sequences_make_other_tokens(family):
    streams = [
        dataclasses.replace(PENALISED, seed=seed, sequence=sequence)
        for seed, sequence in ((0, 0), (1, 0), (0, 1), (0, 0))
    ]
    drawn = tokens(family, [PROMPT] * 4, 40, streams)
    assert drawn[0] == drawn[3]
    assert len({tuple(stream) for stream in drawn}) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_bursts_and_budgets_do_not_change_the_draws(family):
    whole = tokens(family, PROMPT, 40, PENALISED)
    session = SpecSession(
        table_target(), drafter(family, "random"), sampling=PENALISED, check=True, **OPTIONS
    )
    session.open([PROMPT], 40)
    assert [t for (piece,) in session.stream() for t in piece] == whole
    for count in (1, 2, 9, 23):
        assert tokens(family, PROMPT, count, PENALISED) == whole[:count]


@pytest.mark.parametrize("family", FAMILIES)
def test_resuming_equals_opening_the_whole_text_cold(family):
    """With penalties: the history goes on too."""
    params = four(PENALISED)
    session = SpecSession(table_target(), drafter(family, "random"), sampling=params, **OPTIONS)
    suffixes = [[5, 0, 1], [], [2] * 20, [0]]
    session.open(PROMPTS, [9, 14, 1, 2])
    session.burst()
    context = [p + out.token_ids for p, out in zip(PROMPTS, session.results(), strict=True)]
    session.resume(suffixes, 20)
    session.burst()
    warm = [out.token_ids for out in session.results()]
    cold = tokens(family, [c + s for c, s in zip(context, suffixes, strict=True)], 20, params)
    assert warm == cold


def test_accepting_nothing_draws_what_plain_decoding_draws():
    """Every token is then a bonus draw at its own position."""
    plain = tokens(None, PROMPTS, 40, four(PENALISED))
    for family in FAMILIES:
        assert tokens(family, PROMPTS, 40, four(PENALISED), accept=False) == plain


def test_padding_a_batch_changes_no_row():
    """Three requests, and the same with five greedy fillers beside them."""
    params = four(ROUGH)[:3]
    fillers = [SamplingParams()] * 5
    three = decoded("dspark", PROMPTS[:3], 30, params)
    eight = decoded("dspark", PROMPTS[:3] + [[1]] * 5, 30, params + fillers)
    for a, b in zip(three, eight, strict=False):
        assert a.token_ids == b.token_ids
        assert a.acceptance_lengths == b.acceptance_lengths
        assert a.verify_widths == b.verify_widths
        assert a.logprobs == b.logprobs


# --- laws that leave no choice --------------------------------------------------------------------

THRESHOLD = [SamplingParams(temperature=t) for t in (0.0, 1e-9, 1e-6, 1e-5)]
ONE_CHOICE = [
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=1.0, min_p=1.0),
]
FREE = SamplingParams(temperature=1.0, top_p=0.99)


def assert_greedy(run, greedy):
    """`run` decodes four requests; one of them samples, so that the whole program does."""
    at_threshold, one_choice = run([*THRESHOLD[1:], FREE]), run([*ONE_CHOICE, FREE])
    for out in at_threshold[:3] + one_choice[:3]:
        assert out.token_ids == greedy.token_ids
        assert np.isfinite(out.logprobs).all()
    for out in at_threshold[:3]:
        assert out.acceptance_lengths == greedy.acceptance_lengths
    assert at_threshold[3].token_ids != greedy.token_ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_settings_that_leave_one_token_are_greedy(family, kind):
    """T at or below 1e-5, top-k 1, a tiny top-p, min-p 1: the greedy stream, 200 tokens of it."""
    greedy = decoded(family, PROMPT, 200, SamplingParams(), kind=kind)
    assert greedy.token_ids == tokens(None, PROMPT, 200, SamplingParams())
    assert_greedy(lambda params: decoded(family, [PROMPT] * 4, 200, params, kind=kind), greedy)


def test_settings_that_leave_one_token_are_greedy_for_trained_models():
    target, draft = trained("dflash2")
    greedy = generate(target, draft, TEXT, 60, **OPTIONS)
    assert_greedy(
        lambda params: generate(target, draft, [TEXT] * 4, 60, sampling=params, **OPTIONS), greedy
    )


@pytest.mark.parametrize("params", THRESHOLD, ids=lambda p: str(p.temperature))
def test_the_threshold_alone_compiles_the_greedy_program(params):
    session = SpecSession(table_target(), drafter("dflash", "random"), sampling=params, **OPTIONS)
    session.open([PROMPT], 2)
    assert not session.plan.sampled
    assert session.state.sampler is None


@pytest.mark.parametrize("family", [*FAMILIES, None])
def test_forbidden_tokens_never_appear(family):
    """5,000 tokens and more, of drafters that propose the forbidden ones among others."""
    for seed in range(6):
        barred = four(FREE, seed=seed, temperature=1.5, logit_bias={3: -np.inf, 0: -np.inf})
        drawn = np.concatenate(tokens(family, PROMPTS, 220, barred))
        assert len(drawn) == 880
        assert set(drawn.tolist()) == {1, 2, 4, 5}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_large_bias_forces_a_token(family):
    """Greedy and sampled requests of one batch."""
    forced = [
        SamplingParams(temperature=t, logit_bias={4: 1e4}, sequence=i)
        for i, t in enumerate((0.0, 1.0, 0.0, 3.0))
    ]
    assert tokens(family, PROMPTS, 20, forced) == [[4] * 20] * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_min_p_bounds_every_position(family):
    """5,000 tokens and more: each at least half as likely as the likeliest one there."""
    laws = np.asarray(jax.nn.softmax(table_target().table, axis=-1))
    allowed = laws >= 0.5 * laws.max(-1, keepdims=True)
    assert 1 < allowed.sum(-1).max() < V
    for seed in range(6):
        params = four(SamplingParams(temperature=1.0, min_p=0.5, seed=seed))
        for prompt, drawn in zip(PROMPTS, tokens(family, PROMPTS, 220, params), strict=True):
            assert allowed[[prompt[-1], *drawn[:-1]], drawn].all()


# --- penalties ------------------------------------------------------------------------------------


@pytest.mark.parametrize("last_n", [-1, 0, 2, 3, 50])
def test_greedy_penalties_see_prompt_output_and_drafts(last_n):
    """Every family, right and random drafters and plain decoding, against the text read anew for
    each token.
    """
    params = SamplingParams(
        repeat_penalty=1.3, frequency_penalty=0.5, presence_penalty=1.0, penalty_last_n=last_n
    )
    text = list(PROMPT)
    for _ in range(40):
        text.append(int(shaped_logits(params, text).argmax()))
    expected = text[len(PROMPT) :]
    free = tokens(None, PROMPT, 40, SamplingParams())
    assert (expected == free) == (last_n in (0, 2))  # a cycle of three: no token within two
    assert tokens(None, PROMPT, 40, params) == expected
    for family in FAMILIES:
        for kind in ("right", "random"):
            assert tokens(family, PROMPT, 40, params, kind=kind) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_acceptance_under_penalties_does_not_fall_as_the_text_grows(family):
    """The drafter is not penalised and gains less for it, but the window bounds how much."""
    gains = []
    for seed in range(10):
        params = four(PENALISED, frequency_penalty=0.3, penalty_last_n=6, seed=seed)
        outs = decoded(family, PROMPTS, 200, params, kind="right")
        gains += [np.array_split(out.acceptance_lengths, 3) for out in outs]
    thirds = [np.concatenate(third).mean() for third in zip(*gains, strict=True)]
    assert min(thirds) > 1.1
    assert max(thirds) - min(thirds) < 0.1 * max(thirds)


# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("params", [SamplingParams(), PENALISED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", [*FAMILIES, None])
def test_logprobs_are_the_targets_of_every_token(family, params):
    """One a token, accepted drafts included: the log-softmax of the unshaped logits."""
    laws = np.asarray(jax.nn.log_softmax(table_target().table, axis=-1))
    for count in (1, 30):
        out = decoded(family, PROMPT, count, params, kind="right")
        assert len(out.logprobs) == len(out.token_ids) == count
        expected = laws[[PROMPT[-1], *out.token_ids[:-1]], out.token_ids]
        np.testing.assert_allclose(out.logprobs, expected, atol=1e-4)


def test_logprobs_of_a_trained_model_up_to_a_stop_token():
    target, draft = trained("dflash2")
    whole = generate(target, draft, TEXT, 60, **OPTIONS)
    out = generate(target, draft, TEXT, 60, **OPTIONS | {"stop_token_ids": whole.token_ids[30:31]})
    count = whole.token_ids.index(whole.token_ids[30]) + 1
    assert len(out.logprobs) == len(out.token_ids) == count
    run, _ = target.forward(target.init_state(1, 128), jnp.asarray([TEXT + whole.token_ids]), ())
    rows = jax.nn.log_softmax(target.logits(run.hidden[0, len(TEXT) - 1 : -1]), axis=-1)
    expected = np.asarray(rows)[np.arange(60), whole.token_ids]
    np.testing.assert_allclose(whole.logprobs, expected, atol=1e-4)
    np.testing.assert_allclose(out.logprobs, expected[:count], atol=1e-4)
    assert whole.accepted > 10


def test_logprobs_come_only_when_asked_for():
    options = OPTIONS | {"logprobs": False}
    assert generate(table_target(), None, PROMPT, 5, **options).logprobs is None


# --- what cannot be honoured is refused -----------------------------------------------------------


@pytest.mark.parametrize("option", ["typical_p", "beam_size", "n"])
def test_unknown_options_are_refused_by_name(option):
    with pytest.raises(TypeError, match=option):
        decoded("dflash", PROMPT, 4, ROUGH, **{option: 1})


def test_as_many_requests_as_prompts():
    with pytest.raises(ValueError, match=r"sampling: expected 2 \(one a prompt\), found 3"):
        decoded("dflash", [PROMPT, PROMPT], 4, [ROUGH] * 3)


def test_unknown_row_draws_are_refused():
    with pytest.raises(ValueError, match="row_draws: expected 'argmax' or 'sample', found 'beam'"):
        decoded("dflash", PROMPT, 4, ROUGH, row_draws="beam")


def test_a_bias_beyond_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"logit_bias: expected ids in 0\.\.5, found 6"):
        decoded("dflash", PROMPT, 4, SamplingParams(logit_bias={6: 1.0}))


# --- policies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "kind"), [("ladder", "wrong"), ("confidence-slot", "right")])
def test_draws_do_not_depend_on_the_compiled_widths(policy, kind):
    policy = DSparkVtPolicy(policy)
    out, again = (
        decoded("dspark", PROMPTS, 40, four(ROUGH), kind=kind, policy=policy, widths=widths)
        for widths in (None, (3,))
    )
    for a, b in zip(out, again, strict=True):
        assert a.emitted == 40 == 1 + sum(a.acceptance_lengths)
        assert a.token_ids == b.token_ids
        assert a.verify_widths == b.verify_widths
    assert len({width for a in out for width in a.verify_widths}) > 1
