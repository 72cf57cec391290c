"""DSpark's Markov heads and confidence, against recorded numbers and by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import RecordedHead, arrays, assert_close, stage_draft
from targets import F32, TINY, random_tree, tiny_target

from dflash_jax import generate
from dflash_jax.config import DSparkConfig
from dflash_jax.markov import (
    ConfidenceHead,
    MarkovHead,
    confidence_raws,
    dspark_chain_greedy,
    dspark_chain_sampled,
    markov_bias,
    markov_state,
    teacher_logits,
)
from dflash_jax.propose import draft_logits
from dflash_jax.sampling import Filters
from dflash_jax.shapes import abstract

KINDS = ["vanilla", "gated", "rnn"]
greedy_chain, sampled_chain = jax.jit(dspark_chain_greedy), jax.jit(dspark_chain_sampled)
teacher = jax.jit(teacher_logits)


@functools.cache
def recorded(kind):
    """The drafter of a recorded case, its hidden rows `[B, H]` and its record."""
    case = f"dspark_{kind}"
    hidden = jnp.asarray(arrays("stages", case, "io.npz")["final"])
    return stage_draft(case), hidden, arrays("stages", case, "dspark.npz")


def filters(temperature, top_k=0, top_p=1.0, min_p=0.0):
    return Filters(
        jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p)
    )


# --- recorded cases -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_base_logits(kind):
    draft, hidden, record = recorded(kind)
    assert draft.markov.kind == kind
    head = RecordedHead(arrays("stages", f"dspark_{kind}", "heads.npz")["lm_head"])
    assert_close(draft_logits(head, draft, hidden), record["base_logits"])


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_greedy_chain(kind):
    draft, hidden, record = recorded(kind)
    base = jnp.asarray(record["base_logits"])
    chain = greedy_chain(draft.markov, base, hidden, record["anchor"][0])
    np.testing.assert_array_equal(chain.tokens, record["greedy_chain"])
    np.testing.assert_array_equal(chain.previous, record["prev_tokens"])
    corrected = teacher(draft.markov, base, hidden, chain.previous)
    assert_close(corrected, record["corrected_logits"])
    assert (record["greedy_chain"] != record["base_logits"].argmax(-1)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_logits_for_given_predecessors(kind):
    draft, hidden, record = recorded(kind)
    got = teacher(draft.markov, record["base_logits"], hidden, record["teacher_prev"])
    assert_close(got, record["teacher_logits"])


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_chain_of_the_other_alignment(kind):
    """Mask-fill rows: the chain, and the rnn state, start at row 1."""
    draft, hidden, record = recorded(kind)
    base = jnp.asarray(record["base_logits"])
    chain = greedy_chain(draft.markov, base[1:], hidden[1:], record["anchor"][0])
    np.testing.assert_array_equal(chain.tokens, record["unshifted_chain"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", ["0.7", "1.3"])
def test_recorded_draws(kind, temperature):
    draft, hidden, record = recorded(kind)
    of = {k.removeprefix(f"t{temperature}_"): v for k, v in record.items()}
    base, anchor = jnp.asarray(record["base_logits"]), record["anchor"][0]
    chain = sampled_chain(
        draft.markov, base, hidden, anchor, filters(float(temperature)), of["uniforms"]
    )
    np.testing.assert_array_equal(chain.tokens, of["path"])
    np.testing.assert_array_equal(chain.previous, [anchor, *of["path"][:-1]])
    assert_close(chain.q_rows, of["q_rows"])
    assert_close(chain.q_rows[np.arange(8), chain.tokens], of["q_chosen"])


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_confidences(kind):
    draft, hidden, record = recorded(kind)
    assert draft.confidence.with_markov
    for previous, expected in [
        (record["prev_tokens"], record["confidence_raw"]),
        (record["teacher_prev"], record["teacher_confidence_raw"]),
    ]:
        got = confidence_raws(draft.confidence, draft.markov, hidden, jnp.asarray(previous))
        assert_close(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_confidences_without_markov_features(kind):
    plain = stage_draft(f"dspark_{kind}", "checkpoint_conf_plain")
    _, hidden, record = recorded(kind)
    assert not plain.confidence.with_markov
    for previous in (record["prev_tokens"], record["teacher_prev"]):  # it looks at neither
        got = confidence_raws(plain.confidence, plain.markov, hidden, jnp.asarray(previous))
        assert_close(got, record["confidence_raw_plain"])


# --- by hand --------------------------------------------------------------------------------------


def confidence(weight, bias, *, with_markov):
    weight = jnp.asarray([weight], jnp.float32)
    return ConfidenceHead(weight, jnp.asarray([bias], jnp.float32), with_markov)


def test_confidence_by_hand():
    """Exactly: hidden row first, then the embedding of the token before."""
    hidden, previous = jnp.asarray([[1.0, 2, 3]]), jnp.asarray([1])
    w1 = jnp.asarray([[9.0, 9], [4, 8]])
    markov = MarkovHead(w1=w1, w2=w1, mix=None, mix_bias=None)
    head = confidence([0.5, -1, 2, 0.25, -0.5], 0.125, with_markov=True)
    assert confidence_raws(head, markov, hidden, previous).tolist() == [1.625]
    head = confidence([0.5, -1, 2], -0.25, with_markov=False)
    assert confidence_raws(head, markov, hidden, previous).tolist() == [4.25]
    assert confidence_raws(head, None, hidden, previous).tolist() == [4.25]


HIDDEN_SIZE, RANK, VOCABULARY, SLOTS = 5, 3, 11, 6


def random_head(kind, seed=0):
    rng = np.random.default_rng(seed)
    shape = {
        "vanilla": None,
        "gated": (RANK, HIDDEN_SIZE + RANK),
        "rnn": (3 * RANK, 2 * RANK + HIDDEN_SIZE),
    }[kind]

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return MarkovHead(
        w1=array(VOCABULARY, RANK),
        w2=array(VOCABULARY, RANK),
        mix=array(*shape) if shape else None,
        mix_bias=array(shape[0]) if shape else None,
        kind=kind,
    )


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def bias_by_hand(head, prev, hidden, state):
    """The formulas in f64: (bias, next state)."""
    w1, w2 = (np.asarray(w, np.float64) for w in (head.w1, head.w2))
    e = w1[prev]
    if head.kind == "vanilla":
        return w2 @ e, state
    mix, mix_bias = np.asarray(head.mix, np.float64), np.asarray(head.mix_bias, np.float64)
    if head.kind == "gated":
        return w2 @ (sigmoid(mix @ np.concatenate([hidden, e]) + mix_bias) * e), state
    joined = mix @ np.concatenate([state, e, hidden]) + mix_bias
    gate, candidate, output = joined[:RANK], joined[RANK : 2 * RANK], joined[2 * RANK :]
    state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
    return w2 @ np.tanh(output), state


def random_block(seed=1):
    rng = np.random.default_rng(seed)
    base = rng.normal(size=(SLOTS, VOCABULARY)).astype(np.float32)
    return jnp.asarray(base), jnp.asarray(rng.normal(size=(SLOTS, HIDDEN_SIZE)), jnp.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_biases_term_by_term(kind):
    head, (_, hidden) = random_head(kind), random_block()
    state, by_hand = markov_state(head), np.zeros(RANK)
    np.testing.assert_array_equal(state, by_hand)
    for slot, prev in enumerate([3, 0, 10, 3, 3, 7]):
        bias, state = markov_bias(head, jnp.int32(prev), hidden[slot], state)
        expected, by_hand = bias_by_hand(head, prev, np.asarray(hidden[slot], np.float64), by_hand)
        assert_close(bias, expected)
        np.testing.assert_allclose(state, by_hand, atol=1e-6)
    assert (by_hand != 0).any() == (kind == "rnn")


@pytest.mark.parametrize("kind", KINDS)
def test_chains_step_by_step(kind):
    """Greedy and drawn: each slot's predecessor is the token chosen before it."""
    head, (base, hidden) = random_head(kind), random_block()
    uniforms = np.random.default_rng(2).uniform(size=SLOTS).astype(np.float32)
    greedy = greedy_chain(head, base, hidden, 4)
    drawn = sampled_chain(head, base, hidden, 4, filters(0.8, top_k=5), uniforms)
    assert greedy.q_rows is None
    for chain, by_hand in ((greedy, take_best), (drawn, take_drawn)):
        prev, state = 4, np.zeros(RANK)
        for slot in range(SLOTS):
            assert int(chain.previous[slot]) == prev
            row = np.asarray(hidden[slot], np.float64)
            bias, state = bias_by_hand(head, prev, row, state)
            token, q = by_hand(np.asarray(base[slot]) + bias, uniforms[slot])
            assert int(chain.tokens[slot]) == token
            if q is not None:
                np.testing.assert_allclose(chain.q_rows[slot], q, atol=1e-5)
            prev = token


def take_best(logits, _):
    return int(logits.argmax()), None


def take_drawn(logits, u):
    """T 0.8, top-k 5, inverse CDF in id order."""
    tempered = logits / 0.8
    tempered[np.argsort(-tempered)[5:]] = -np.inf
    q = np.exp(tempered - tempered.max())
    q /= q.sum()
    return int(np.argmax(u < np.cumsum(q))), q


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_ties_go_to_the_lower_id(kind):
    head = random_head(kind)
    head = dataclasses.replace(head, w2=jnp.zeros_like(head.w2))
    tied = jnp.asarray(np.tile([0, 2, 1, 2] + [0] * 7, (SLOTS, 1)), jnp.float32)
    _, hidden = random_block()
    assert greedy_chain(head, tied, hidden, 0).tokens.tolist() == [1] * SLOTS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6, 1e-5])
def test_a_draw_at_the_greedy_threshold_is_the_greedy_chain(kind, temperature):
    head, (base, hidden) = random_head(kind), random_block()
    uniforms = jnp.full(SLOTS, 0.999, jnp.float32)
    drawn = sampled_chain(head, base, hidden, 4, filters(temperature), uniforms)
    np.testing.assert_array_equal(drawn.tokens, greedy_chain(head, base, hidden, 4).tokens)
    np.testing.assert_array_equal(drawn.q_rows, np.eye(VOCABULARY)[np.asarray(drawn.tokens)])


def test_the_rnn_state_starts_at_zero_in_every_block():
    """Two blocks in a batch, and a block after another: nothing is carried over."""
    head, first, second = random_head("rnn"), random_block(1), random_block(2)
    both = jax.vmap(dspark_chain_greedy, in_axes=(None, 0, 0, 0))(
        head, *(jnp.stack(pair) for pair in zip(first, second, strict=True)), jnp.asarray([4, 4])
    )
    for b, block in enumerate((first, second)):
        np.testing.assert_array_equal(both.tokens[b], greedy_chain(head, *block, 4).tokens)


def test_confidences_come_before_the_sigmoid_in_f32():
    head = confidence([100.0] * HIDDEN_SIZE, 0, with_markov=False)
    half = dataclasses.replace(head, weight=head.weight.astype(jnp.bfloat16))
    raws = confidence_raws(half, None, jnp.ones((2, HIDDEN_SIZE), jnp.bfloat16), jnp.zeros(2, int))
    assert raws.tolist() == [500, 500]
    assert raws.dtype == jnp.float32


# --- in the loop ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("harvest", ["dspark", "dflash"])
def test_every_kind_decodes_losslessly(kind, harvest):
    """Random heads, both harvests: greedy tokens are the target's own."""
    config = dataclasses.replace(TINY, family="dspark", dspark=DSparkConfig(kind, 8, True, True))
    draft, target = random_tree(abstract(config, F32), seed=3), tiny_target()
    out = generate(target, draft, [1, 2, 3], 40, harvest=harvest)
    assert out.token_ids == generate(target, None, [1, 2, 3], 40).token_ids
    assert max(out.verify_widths) <= (5 if harvest == "dspark" else 4)
