"""The law of sampled decoding: the compiled loop against the exact distribution of its tokens.

A target whose next-token logits are a table over 6 tokens, drafters of every family that are right,
wrong or random, 100,000 generations each. Chi-square and total variation tell the loop's tokens
from the exact law, worked out here in f64; and they must tell every mutant of the loop from it.
"""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from table_law import V, chi_square_p, drafter, next_law, table_target

from dflash_jax import SpecSession, markov, round, sampling, verify
from dflash_jax.sampling import SamplingParams

LENGTH = 4
PROMPT = [3, 1, 0]
BATCH = 25_000
SAMPLES = 100_000


# --- the exact law --------------------------------------------------------------------------------

PLAIN = SamplingParams(temperature=1.0)
SHAPED = SamplingParams(
    temperature=0.8,
    top_k=4,
    top_p=0.95,
    min_p=0.03,
    repeat_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.3,
    penalty_last_n=3,
    logit_bias={2: 0.7, 4: -np.inf},
)


@functools.cache
def exact_law(which: str) -> np.ndarray:
    """The joint law `[V] * LENGTH` of the first tokens after PROMPT."""
    params = {"plain": PLAIN, "shaped": SHAPED}[which]
    joint = np.zeros((V,) * LENGTH)
    for prefix in itertools.product(range(V), repeat=LENGTH - 1):
        probability, history = 1.0, list(PROMPT)
        for token in prefix:
            probability *= next_law(params, history)[token]
            history.append(token)
        joint[prefix] = probability * next_law(params, history)
    assert joint.sum() == pytest.approx(1)
    return joint


def marginal(joint: np.ndarray, first: int, count: int) -> np.ndarray:
    others = [axis for axis in range(LENGTH) if not first <= axis < first + count]
    return joint.sum(tuple(others)).ravel()


def frequencies(tokens: np.ndarray) -> np.ndarray:
    """Generations `[n, LENGTH]` -> their counts `[V] * LENGTH`."""
    cells = np.ravel_multi_index(tokens.T, (V,) * LENGTH)
    return np.bincount(cells, minlength=V**LENGTH).reshape((V,) * LENGTH)


def distances(tokens: np.ndarray, which: str) -> tuple[float, float]:
    """(least chi-square p over three tokens, greatest total variation over two)."""
    counts, law = frequencies(tokens), exact_law(which)
    of_three = [chi_square_p(marginal(counts, i, 3), marginal(law, i, 3)) for i in (0, 1)]
    of_two = [
        np.abs(marginal(counts, i, 2) / len(tokens) - marginal(law, i, 2)).sum() / 2
        for i in range(LENGTH - 1)
    ]
    return min(of_three), max(of_two)


# --- sampling from the loop -----------------------------------------------------------------------


@functools.cache
def requests(count: int, *which: str) -> list[SamplingParams]:
    """`count` requests with sequence ids of their own, the kinds taking turns."""
    kinds = [{"plain": PLAIN, "shaped": SHAPED}[name] for name in which]
    return [dataclasses.replace(kinds[i % len(kinds)], sequence=i) for i in range(count)]


def tokens_of(draft, params, row_draws="argmax", capacity=8, **options):
    """The first tokens of one batch `[B, LENGTH]`, and the session."""
    session = SpecSession(
        table_target(), draft, sampling=params, row_draws=row_draws, capacity=capacity, **options
    )
    session.open([PROMPT] * len(params), LENGTH)
    session.burst()
    return np.asarray(session.state.tokens)[:, :LENGTH], session


FORMS = {
    "dflash": ("dflash", "argmax"),
    "dflash-sample": ("dflash", "sample"),
    "dspark": ("dspark", "argmax"),
    "dflash2": ("dflash2", "argmax"),
}


MIXED = ("plain", "plain", "shaped")


def assert_lawful(draft, which=MIXED, **options):
    """Draws 100,000 plain generations, and half as many shaped ones where `which`, the kinds of
    requests that take turns, has them; gives the session of the last batch.
    """
    every = requests(SAMPLES // which.count("plain") * len(which), *which)
    drawn = []
    for first in range(0, len(every), BATCH):
        tokens, session = tokens_of(draft, every[first : first + BATCH], **options)
        drawn.append(tokens)
    kinds = np.resize(which, len(every))
    for name in set(which):
        p, variation = distances(np.concatenate(drawn)[kinds == name], name)
        assert p > 1e-3, name
        assert variation < 0.01, name
    return session


@pytest.mark.runs_long
@pytest.mark.parametrize(
    ("form", "kind"),
    [(form, kind) for form in FORMS for kind in ("right", "wrong", "random")
     if (form, kind) != ("dflash-sample", "wrong")],
)  # fmt: skip
def test_tokens_follow_the_targets_law(form, kind):
    """Every third request has filters, a bias and penalties, the last three tokens' window."""
    family, row_draws = FORMS[form]
    session = assert_lawful(drafter(family, kind), row_draws=row_draws)
    assert len(set(np.asarray(session.state.gains)[:, 0].tolist())) > 1
    widths = set(np.asarray(session.state.windows)[:, 0].tolist())
    assert (len(widths) > 1) == (family == "dspark")  # its confidences size the window


@pytest.mark.runs_long
def test_plain_decoding_follows_the_same_law():
    assert_lawful(None)


@pytest.mark.runs_long
@pytest.mark.parametrize("family", ["dspark", "dflash2"])
def test_one_draft_a_round_follows_the_law(family):
    """Draft, accept, residual and bonus draws meet at one position."""
    session = assert_lawful(drafter(family, "random"), ("plain",), verify_width=2)
    assert session.plan.verify_width == 2


# --- what the test above is worth -----------------------------------------------------------------


def inverted_accept_test(patch):
    below = sampling.product_below
    patch.setattr(sampling, "product_below", lambda a, b, c: ~below(a, b, c))


def residual_without_q(patch):
    patch.setattr(verify, "residual", lambda p, q: p)
    patch.setattr(verify, "residual_sparse", lambda p, ids, q: p)


def q_is_not_the_sampled_law(patch):
    """The law of twice the temperature is recorded."""
    honest = round.propose

    def propose(*args):
        drawn = honest(*args)
        name = "q_rows" if drawn.q_dense is None else "q_dense"
        warm = jnp.sqrt(getattr(drawn, name))
        total = warm.sum(axis=-1, keepdims=True)
        q_chosen = jnp.sqrt(drawn.q_chosen) / total[..., 0]
        return drawn.replace(q_chosen=q_chosen, **{name: warm / total})

    patch.setattr(round, "propose", propose)


def shared_uniforms(patch):
    """One number a position, for draft, accept, residual and bonus alike."""
    by_event = sampling.Sampler.uniforms
    patch.setattr(
        sampling.Sampler, "uniforms", lambda self, event, pos: by_event(self, "draft", pos)
    )


def frozen_penalty_window(patch):
    """Every row of a verify sees what the first one sees."""
    by_row = round.shaped_logits

    def shaped(sampler, logits, history, length):
        rows = [
            by_row(sampler, logits[:, j : j + 1], history, length) for j in range(logits.shape[1])
        ]
        return jnp.concatenate(rows, axis=1)

    patch.setattr(round, "shaped_logits", shaped)


def window_looks_at_what_it_cuts(patch):
    """A slot's confidence sees the slot's own draft, not the one before."""
    by_previous = markov.confidence_raws

    def peeking(confidence, head, hidden, previous):
        return by_previous(confidence, head, hidden, jnp.roll(previous, -1))

    patch.setattr(markov, "confidence_raws", peeking)


MUTANTS = [
    (inverted_accept_test, "dspark", "plain"),
    (inverted_accept_test, "dflash2", "plain"),
    (residual_without_q, "dflash", "plain"),
    (residual_without_q, "dflash2", "plain"),
    (q_is_not_the_sampled_law, "dflash-sample", "plain"),
    (q_is_not_the_sampled_law, "dspark", "plain"),
    (q_is_not_the_sampled_law, "dflash2", "plain"),
    (shared_uniforms, "dflash", "plain"),
    (shared_uniforms, "dspark", "plain"),
    (frozen_penalty_window, "dspark", "shaped"),
    (window_looks_at_what_it_cuts, "dspark", "plain"),
]


def mutants_tokens(form, which, capacity):
    """One batch by a random drafter. No other test has this capacity, which is compiled in: the
    programs are made of what the modules hold now.
    """
    family, row_draws = FORMS[form]
    params = requests(BATCH, which)
    return tokens_of(drafter(family, "random"), params, row_draws, capacity)[0]


@pytest.mark.parametrize(
    ("number", "mutate", "form", "which"),
    [(i, *mutant) for i, mutant in enumerate(MUTANTS)],
    ids=[f"{mutate.__name__}-{form}" for mutate, form, _ in MUTANTS],
)
def test_mutants_fail_it(number, mutate, form, which, monkeypatch):
    mutate(monkeypatch)
    tokens = mutants_tokens(form, which, capacity=10 + number)
    assert distances(tokens, which)[0] < 1e-9


@pytest.mark.parametrize("form", ["dflash", "dflash2"])
def test_without_a_mutation_it_passes(form):
    """What the mutants run, unchanged: no sequence of the batch has penalties or a bias."""
    tokens = mutants_tokens(form, "plain", capacity=9)
    assert distances(tokens, "plain")[0] > 1e-3
