"""DSpark's heads: a Markov bias along the block, and the confidence that sizes the verify window.

Slot j's logits get a bias made of the token before it, so the block is a chain, left to right.
Everything here is for one sequence; batches are vmapped.
Source: SpecForge `modeling/draft/dspark.py`.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.kernels import Implementation
from dflash_jax.layers import linear
from dflash_jax.sampling import Filters, draw, filtered_probs


class MarkovHead(struct.PyTreeNode):
    """w1 `[V, r]`, w2 `[V_draft, r]`; gated and rnn heads add `mix` (weight, bias).

    vanilla: bias = W2 W1[prev]. gated: mix `[r, H + r]` gates the embedding by the hidden row.
    rnn: mix `[3 r, 2 r + H]` makes gate, candidate and output of a state that starts at zero in
    every block. Any token of the target may come before a slot, so w1 has a row for each; w2 has
    one for each that may be drafted: beside a head over a smaller vocabulary, that head's rows.
    """

    w1: jax.Array
    w2: jax.Array
    mix: jax.Array | None
    mix_bias: jax.Array | None
    kind: Literal["vanilla", "gated", "rnn"] = struct.field(pytree_node=False, default="vanilla")


class ConfidenceHead(struct.PyTreeNode):
    """weight `[1, in]`, bias `[1]`: a raw (pre-sigmoid) acceptance score a row.

    in = H, or H + r where `with_markov`: the row's predecessor embedding is appended.
    """

    weight: jax.Array
    bias: jax.Array
    with_markov: bool = struct.field(pytree_node=False)


class Chain(NamedTuple):
    """A drawn block: tokens `[nd]`, the token before each `[nd]`, the probability `[nd]` that each
    had, and its law q `[nd, V_draft]` (None along a greedy chain, whose law is one-hot).
    """

    tokens: jax.Array
    previous: jax.Array
    q_chosen: jax.Array
    q_rows: jax.Array | None


TargetIds = Callable[[jax.Array], jax.Array]


def _same(ids: jax.Array) -> jax.Array:
    return ids


def markov_state(markov: MarkovHead) -> jax.Array:
    """The recurrent state `[r]` a block starts from."""
    return jnp.zeros((markov.w1.shape[1],), jnp.float32)


def markov_bias(
    markov: MarkovHead, prev: jax.Array, hidden: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Bias `[V_draft]` (f32) on the logits of the slot after `prev`, and the next state `[r]`.

    hidden: the slot's own row `[H]`. Only the rnn head uses and changes the state.
    """
    features, state = markov_features(markov, prev, hidden, state)
    return linear(features, markov.w2, dtype=jnp.float32), state


def markov_features(
    markov: MarkovHead, prev: jax.Array, hidden: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What `markov.w2` turns into the bias: features `[r]`, and the next state."""
    e = markov.w1[prev]
    if markov.kind == "vanilla":
        return e, state
    if markov.kind == "gated":
        mixed = _mix(markov, jnp.concatenate([hidden.astype(e.dtype), e]))
        return jax.nn.sigmoid(mixed).astype(e.dtype) * e, state
    rows = [state.astype(e.dtype), e, hidden.astype(e.dtype)]
    gate, candidate, output = jnp.split(_mix(markov, jnp.concatenate(rows)), 3)
    gate = jax.nn.sigmoid(gate)
    state = gate * state + (1 - gate) * jnp.tanh(candidate)
    return jnp.tanh(output).astype(e.dtype), state


def _mix(markov: MarkovHead, x: jax.Array) -> jax.Array:
    assert markov.mix is not None and markov.mix_bias is not None
    return linear(x, markov.mix, dtype=jnp.float32) + markov.mix_bias.astype(jnp.float32)


def dspark_chain_greedy(
    markov: MarkovHead,
    base_logits: jax.Array,
    hidden: jax.Array,
    anchor: jax.Array,
    target_ids: TargetIds = _same,
) -> Chain:
    """The greedy chain over `base_logits [nd, V_draft]`, `hidden [nd, H]`; ties to the lower id.

    target_ids: target id of a draft id, where the two vocabularies differ.
    """

    def step(carry, slot):
        prev, state = carry
        logits, row = slot
        bias, state = markov_bias(markov, prev, row, state)
        token = target_ids(jnp.argmax(logits + bias).astype(jnp.int32))
        return (token, state), (token, prev)

    start = (jnp.asarray(anchor, jnp.int32), markov_state(markov))
    # Unrolled, a round of SmolLM2 on an H200 takes 1.11 ms where it took 1.15.
    tokens, previous = jax.lax.scan(step, start, (base_logits, hidden), unroll=True)[1]
    return Chain(tokens, previous, jnp.ones(tokens.shape, jnp.float32), None)


def dspark_chain_sampled(
    markov: MarkovHead,
    base_logits: jax.Array,
    hidden: jax.Array,
    anchor: jax.Array,
    filters: Filters,
    uniforms: jax.Array,
    target_ids: TargetIds = _same,
    implementation: Implementation = None,
) -> Chain:
    """A chain drawn slot by slot from each corrected row's own filtered softmax.

    target_ids: as in `dspark_chain_greedy`. uniforms `[nd]` in [0, 1). Greedy where the filters'
    temperature is at the greedy threshold. implementation: of the filters, see `sampling.leading`.
    """

    def step(carry, slot):
        prev, state = carry
        logits, row, u = slot
        bias, state = markov_bias(markov, prev, row, state)
        q = filtered_probs(logits + bias, filters, implementation)
        drawn = draw(q, u)
        token = target_ids(drawn)
        return (token, state), Chain(token, prev, q[drawn], q)

    start = (jnp.asarray(anchor, jnp.int32), markov_state(markov))
    return jax.lax.scan(step, start, (base_logits, hidden, uniforms))[1]


def pair_scores(
    markov: MarkovHead,
    unary: jax.Array,
    ids: jax.Array,
    cand: jax.Array,
    hidden: jax.Array,
    anchor: jax.Array,
) -> jax.Array:
    """Corrected logits of all pairs of candidates: `[nd, k, k]`, entry [p, i, j] of candidate j of
    slot p after candidate i of slot p - 1. Slot 0 has one predecessor, the anchor, in every row i.

    Args: unary, ids, cand `[nd, k]`: base logits of candidates, best first, their draft and target
    ids; hidden `[nd, H]`. A recurrent state is that of the best candidates by themselves.
    """
    first = jnp.full_like(cand[:1], anchor)
    previous = jnp.concatenate([first, cand[:-1]])
    states = jnp.broadcast_to(markov_state(markov), (cand.shape[0], markov.w1.shape[1]))
    if markov.kind == "rnn":

        def step(state, slot):
            token, row = slot
            return markov_features(markov, token, row, state)[1], state

        states = jax.lax.scan(step, markov_state(markov), (previous[:, 0], hidden))[1]

    def of_pair(token, row, state):
        return markov_features(markov, token, row, state)[0]

    features = jax.vmap(jax.vmap(of_pair, in_axes=(0, None, None)))(previous, hidden, states)
    after = markov.w2[ids].astype(features.dtype)
    contract = (((2,), (2,)), ((0,), (0,)))
    bias = jax.lax.dot_general(features, after, contract, preferred_element_type=jnp.float32)
    return unary[:, None] + bias


def teacher_logits(
    markov: MarkovHead, base_logits: jax.Array, hidden: jax.Array, previous: jax.Array
) -> jax.Array:
    """Corrected logits `[nd, V_draft]` where the tokens before the slots are given: `[nd]`."""

    def step(state, slot):
        token, row = slot
        features, state = markov_features(markov, token, row, state)
        return state, features

    features = jax.lax.scan(step, markov_state(markov), (previous, hidden))[1]
    bias = linear(features, markov.w2, dtype=jnp.float32, implementation="xla")  # of many blocks
    return base_logits + bias


def confidence_raws(
    confidence: ConfidenceHead, markov: MarkovHead | None, hidden: jax.Array, previous: jax.Array
) -> jax.Array:
    """Raw (pre-sigmoid) f32 scores `[nd]` of rows `[nd, H]` after tokens `previous [nd]`."""
    rows = hidden.astype(jnp.float32)
    if confidence.with_markov:
        assert markov is not None
        rows = jnp.concatenate([rows, markov.w1[previous].astype(jnp.float32)], axis=-1)
    weight = confidence.weight.astype(jnp.float32)
    return jnp.sum(rows * weight, axis=-1) + confidence.bias[0].astype(jnp.float32)
