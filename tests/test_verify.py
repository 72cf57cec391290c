"""The target's side of a round: which rows run, which drafts stay, which token comes next."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from dflash_jax.propose import Proposal
from dflash_jax.sampling import (
    Filters,
    filtered_probs,
    inverse_cdf,
    rejection_accept_len,
    residual,
)
from dflash_jax.verify import decide_greedy, decide_sampled

V = 9
decide = jax.jit(decide_sampled)


# --- greedy decisions -----------------------------------------------------------------------------


def test_drafts_stay_while_they_are_the_targets_argmax():
    cand = jnp.asarray([[8, 1, 2, 3], [8, 1, 5, 3], [8, 0, 2, 3], [8, 1, 2, 3]])
    logits = jnp.broadcast_to(jax.nn.one_hot(jnp.asarray([1, 2, 3, 4]), V), (4, 4, V))
    decision = decide_greedy(cand, logits, jnp.asarray([4, 4, 4, 2]))
    assert decision.accepted.tolist() == [3, 1, 0, 1]
    assert decision.tokens.tolist() == [[1, 2, 3, 4]] * 4
    assert decision.tokens.dtype == jnp.int32


def test_equal_logits_go_to_the_lower_id():
    logits = jnp.zeros((1, 2, V)).at[:, :, [3, 5, 7]].set(2.0)
    accepted = [
        int(decide_greedy(jnp.asarray([[0, draft]]), logits, jnp.asarray([2])).accepted[0])
        for draft in (3, 5, 7)
    ]
    assert accepted == [1, 0, 0]


# --- sampled decisions ----------------------------------------------------------------------------


@struct.dataclass
class GivenNumbers:
    """A sampler that hands out given uniforms `[B, w]` an event."""

    filters: Filters
    accept: jax.Array
    residual: jax.Array
    bonus: jax.Array

    def uniforms(self, event, positions):
        return getattr(self, event)[:, : positions.shape[1]]


def given(batch, width, filters=None, **numbers):
    half = {name: jnp.full((batch, width), 0.5) for name in ("accept", "residual", "bonus")}
    half |= {name: jnp.broadcast_to(jnp.float32(x), (batch, width)) for name, x in numbers.items()}
    one = jnp.ones((batch,), jnp.float32)
    return GivenNumbers(filters or Filters.off(batch).replace(temperature=one), **half)


def certain(tokens):
    """A proposal with a one-hot law."""
    tokens = jnp.asarray(tokens)
    return Proposal(tokens, jnp.ones(tokens.shape), jnp.full(tokens.shape[:1], -1))


P = jnp.log(jnp.asarray([0.5, 0.3, 0.2]))
START = jnp.asarray([10])


def decided(draft, width=2, **numbers):
    cand = jnp.asarray([[0, draft]])
    logits = jnp.broadcast_to(P, (1, 2, 3))
    decision = decide(
        certain([[draft]]), cand, logits, jnp.asarray([width]), given(1, 2, **numbers), START
    )
    return int(decision.accepted[0]), decision.tokens[0, : int(decision.accepted[0]) + 1].tolist()


@pytest.mark.parametrize(
    ("draft", "u", "accepted"),
    [(0, 0.499, 1), (0, 0.501, 0), (1, 0.299, 1), (1, 0.301, 0), (2, 0.199, 1), (2, 0.201, 0)],
)
def test_a_certain_draft_stays_with_the_targets_probability(draft, u, accepted):
    """p = .5 .3 .2 and a one-hot proposal."""
    assert decided(draft, accept=u)[0] == accepted


@pytest.mark.parametrize(
    ("draft", "u", "token"),
    [(0, 0.59, 1), (0, 0.61, 2), (1, 0.71, 0), (1, 0.72, 2), (2, 0.62, 0), (2, 0.63, 1)],
)
def test_after_a_rejection_p_without_the_draft_is_renormalised(draft, u, token):
    """Draft 0: [0 .6 .4]; draft 1: [5/7 0 2/7]; draft 2: [5/8 3/8 0]."""
    assert decided(draft, accept=0.99, residual=u) == (0, [token])


@pytest.mark.parametrize(("u", "token"), [(0.49, 0), (0.51, 1), (0.79, 1), (0.81, 2)])
def test_a_full_window_draws_the_bonus_from_p(u, token):
    assert decided(0, accept=0.1, bonus=u) == (1, [0, token])


@pytest.mark.parametrize(("u", "token"), [(0.49, 0), (0.51, 1)])
def test_a_window_of_the_anchor_alone_draws_from_p(u, token):
    """Nothing was rejected: the draft beyond the window does not matter."""
    assert decided(0, width=1, accept=0.1, bonus=u, residual=0.99) == (0, [token])


def test_plain_decoding_draws_the_bonus():
    logits = jnp.broadcast_to(P, (1, 1, 3))
    decision = decide_sampled(
        None, jnp.asarray([[0]]), logits, jnp.asarray([1]), given(1, 1, bonus=0.51), START
    )
    assert decision.accepted.tolist() == [0]
    assert decision.tokens.tolist() == [[1]]


def random_round(form, batch=400, width=5, seed=0):
    """Proposals of one form with laws that overlap the target's, and everything else of a round."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.5, (batch, width, V)).astype(np.float32)
    drafts = width - 1
    if form == "one-hot":
        tokens = rng.integers(0, V, (batch, drafts)).astype(np.int32)
        proposal = certain(tokens)
        law = np.eye(V, dtype=np.float32)[tokens]
    else:
        k = V if form == "dense" else 4
        cand = np.stack([[rng.permutation(V)[:k] for _ in range(drafts)] for _ in range(batch)])
        at = np.take_along_axis(logits[:, :-1], cand, -1)
        q_rows = jax.nn.softmax(jnp.asarray(at + rng.normal(size=at.shape), jnp.float32), axis=-1)
        chosen = rng.integers(0, k, (batch, drafts, 1))
        tokens = np.take_along_axis(cand, chosen, -1)[..., 0].astype(np.int32)
        q_chosen = jnp.take_along_axis(q_rows, jnp.asarray(chosen), -1)[..., 0]
        law = np.zeros((batch, drafts, V), np.float32)
        np.put_along_axis(law, cand, np.asarray(q_rows), -1)
        fault = jnp.full((batch,), -1)
        if form == "dense":
            proposal = Proposal(jnp.asarray(tokens), q_chosen, fault, q_dense=jnp.asarray(law))
        else:
            proposal = Proposal(
                jnp.asarray(tokens), q_chosen, fault, cand=jnp.asarray(cand), q_rows=q_rows
            )
    anchors = rng.integers(0, V, (batch, 1)).astype(np.int32)
    cand = jnp.asarray(np.concatenate([anchors, tokens], axis=1))
    widths = jnp.asarray(rng.integers(1, width + 1, batch), jnp.int32)
    draws = {e: jnp.asarray(rng.uniform(size=(batch, width)), jnp.float32) for e in
             ("accept", "residual", "bonus")}  # fmt: skip
    filters = Filters(
        jnp.asarray(rng.choice([0.0, 0.7, 1.3], batch), jnp.float32),
        jnp.asarray(rng.choice([0, 4], batch), jnp.int32),
        jnp.asarray(rng.choice([1.0, 0.9], batch), jnp.float32),
        jnp.asarray(rng.choice([0.0, 0.05], batch), jnp.float32),
    )
    return proposal, law, cand, jnp.asarray(logits), widths, GivenNumbers(filters, **draws)


@pytest.mark.parametrize("form", ["one-hot", "dense", "sparse"])
def test_rounds_equal_the_rule_sequence_by_sequence(form):
    """400 rounds against: accept on the host in f64, then residual or bonus, then inverse CDF."""
    proposal, law, cand, logits, widths, sampler = random_round(form)
    batch = len(cand)
    start = jnp.arange(batch)
    decision = jax.device_get(decide(proposal, cand, logits, widths, sampler, start))
    cand, widths = np.asarray(cand), np.asarray(widths)
    each = jax.vmap(jax.vmap(filtered_probs, in_axes=(0, None)))
    probs = np.asarray(each(logits, sampler.filters))
    law_of_token, numbers = [], []
    for b in range(batch):
        drafts = np.arange(int(widths[b]) - 1)
        p = probs[b, drafts, cand[b, drafts + 1]]
        q = np.asarray(proposal.q_chosen)[b, drafts]
        m = rejection_accept_len(p, q, np.asarray(sampler.accept)[b, drafts])
        assert int(decision.accepted[b]) == m
        assert decision.tokens[b, :m].tolist() == cand[b, 1 : m + 1].tolist()
        full = m == int(widths[b]) - 1
        left = probs[b, m] if full else np.asarray(residual(probs[b, m], law[b, m]))
        law_of_token.append(left)
        numbers.append((sampler.bonus if full else sampler.residual)[b, m])
    last = jax.vmap(inverse_cdf)(jnp.asarray(np.stack(law_of_token)), jnp.stack(numbers))
    got = np.take_along_axis(decision.tokens, decision.accepted[:, None], 1)
    np.testing.assert_array_equal(got[:, 0], last)
    assert len(set(decision.accepted.tolist())) >= 3


def test_a_greedy_row_beside_sampled_ones_decides_greedily():
    """At temperature 0 the target's law is one-hot: the same rule is token equality."""
    proposal, _, cand, logits, widths, sampler = random_round("one-hot", seed=1)
    drafts = np.where(np.random.default_rng(2).uniform(size=(400, 4)) < 0.7,
                      logits[:, :-1].argmax(-1), cand[:, 1:])  # fmt: skip
    cand = cand.at[:, 1:].set(drafts)
    temperature = jnp.where(jnp.arange(400) % 2 == 0, 0.0, 1.0)
    sampler = sampler.replace(filters=sampler.filters.replace(temperature=temperature))
    proposal = proposal.replace(tokens=cand[:, 1:])
    got = decide(proposal, cand, logits, widths, sampler, jnp.zeros_like(widths))
    expected = decide_greedy(cand, logits, widths)
    got, expected = jax.device_get((got, expected))
    for b in range(0, 400, 2):
        m = int(expected.accepted[b])
        assert int(got.accepted[b]) == m
        assert got.tokens[b, : m + 1].tolist() == expected.tokens[b, : m + 1].tolist()
    assert len(set(expected.accepted.tolist())) == 5


def test_every_draw_is_asked_for_at_the_position_of_its_own_token():
    """A token's position names its draws, whatever round it falls into."""
    asked = {}

    class Listener:
        filters = Filters.off(2).replace(temperature=jnp.ones(2))

        def uniforms(self, event, positions):
            asked[event] = positions.tolist()
            return jnp.full(positions.shape, 0.5)

    cand, logits = jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3, V))
    decide_sampled(
        certain(cand[:, 1:]), cand, logits, jnp.asarray([3, 2]), Listener(), jnp.asarray([10, 0])
    )
    assert asked == {
        "accept": [[11, 12], [1, 2]],
        "residual": [[11, 12, 13], [1, 2, 3]],
        "bonus": [[11, 12, 13], [1, 2, 3]],
    }
