"""One round: draft logits, proposals, limits on the gain, and what is handed to the drafter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from targets import TINY, mistaken_draft, random_tree, table_target, tiny_draft, tiny_target

import dflash_jax.round as rounds
from dflash_jax import SpecSession, dspark_accept_prefix
from dflash_jax.attention import ABSENT
from dflash_jax.draft import DraftHead
from dflash_jax.propose import draft_logits, first_fault, propose_rows
from dflash_jax.round import clip_gain, propose_block
from dflash_jax.shapes import abstract

STOPS = jnp.asarray([9, -1, -1, -1], jnp.int32)


@dataclasses.dataclass(frozen=True)
class Books:
    """The fields of a decode state that limit a round's gain."""

    budget: jax.Array
    emitted: jax.Array
    done: jax.Array


def gained(vam, accepted, *, left=100, room=100, done=False):
    """(gain, finished) of one sequence."""
    books = Books(jnp.asarray([left + 5]), jnp.asarray([5]), jnp.asarray([done]))
    gain, finished = clip_gain(
        books,  # type: ignore[arg-type]
        jnp.asarray([vam]),
        jnp.asarray([accepted]),
        STOPS,
        jnp.asarray([room]),
    )
    return int(gain[0]), bool(finished[0])


@pytest.mark.parametrize(
    ("accepted", "limits", "expected"),
    [
        (0, {}, (1, False)),
        (3, {}, (4, False)),
        (3, {"left": 2}, (2, True)),
        (3, {"left": 4}, (4, True)),
        (3, {"left": 5}, (4, False)),
        (0, {"left": 1}, (1, True)),
        (3, {"room": 1}, (1, True)),
        (3, {"room": 4}, (4, True)),
        (3, {"done": True}, (0, True)),
    ],
)
def test_gain_is_accepted_drafts_and_one_within_budget_and_context(accepted, limits, expected):
    assert gained([1, 2, 3, 4], accepted, **limits) == expected


@pytest.mark.parametrize(
    ("vam", "accepted", "left", "expected"),
    [
        ([9, 2, 3, 4], 3, 100, (1, True)),  # the stop token is kept, nothing after it
        ([1, 2, 9, 4], 3, 100, (3, True)),
        ([1, 2, 3, 9], 3, 100, (4, True)),  # the bonus token may be the stop token
        ([1, 9, 9, 4], 3, 100, (2, True)),
        ([1, 2, 9, 9], 1, 100, (2, False)),  # beyond what is accepted it says nothing
        ([1, 2, 9, 4], 3, 2, (2, True)),  # nor beyond the budget
        ([1, 2, 9, 4], 3, 3, (3, True)),
    ],
)
def test_a_stop_token_among_the_emitted_ids_ends_the_round(vam, accepted, left, expected):
    assert gained(vam, accepted, left=left) == expected


def test_random_rounds_emit_accepted_drafts_and_one_more():
    """10,000 rounds of 1..15 drafts: what pads the narrow ones never reaches the emitted part."""
    rng, rounds = np.random.default_rng(0), 10_000
    cand, vam = rng.integers(0, 2, (2, rounds, 16))
    drafts = rng.integers(1, 16, rounds)
    padding = np.arange(16) > drafts[:, None]
    cand[padding], vam[padding] = -1, -1
    width = jnp.asarray(drafts + 1)
    accepted = dspark_accept_prefix(jnp.asarray(cand), jnp.asarray(vam), width)
    plenty, no_stops = jnp.full((rounds,), 10**6), jnp.full((8,), -2)
    books = Books(plenty, jnp.zeros((rounds,), jnp.int32), jnp.zeros((rounds,), bool))
    gain, done = clip_gain(books, jnp.asarray(vam), accepted, no_stops, plenty)  # type: ignore[arg-type]
    gain = np.asarray(gain)
    assert not done.any()
    assert (gain == np.asarray(accepted) + 1).all()
    assert ((gain >= 1) & (gain <= drafts + 1)).all()
    assert (vam[np.arange(16) < gain[:, None]] >= 0).all()
    assert set(gain) >= set(range(1, 9))


# --- draft logits and proposals ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Echo:
    """A target whose logits are the hidden rows."""

    def logits(self, hidden):
        return hidden


def scaled(multiplier, cap):
    config = dataclasses.replace(TINY, output_multiplier=multiplier, final_logit_softcapping=cap)
    hidden = jnp.asarray([[100.0, -100.0, 0.0]])
    return draft_logits(Echo(), tiny_draft(config), hidden)[0]  # type: ignore[arg-type]


def test_the_multiplier_comes_before_the_soft_cap():
    got = scaled(0.19611613513818404, 20.0)
    np.testing.assert_allclose(got, [15.0663, -15.0663, 0.0], atol=1e-4)


def test_without_cap_and_multiplier_logits_are_untouched():
    assert scaled(1.0, None).tolist() == [100.0, -100.0, 0.0]
    assert scaled(0.5, None).tolist() == [50.0, -50.0, 0.0]


def test_proposals_are_argmaxes_and_ties_go_to_the_lower_id():
    logits = jnp.asarray([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 1.0]])
    assert propose_rows(tiny_draft(), logits).tolist() == [1, 0, 3]


def test_a_trimmed_head_is_used_and_its_ids_mapped_by_offset():
    draft, hidden = tiny_draft(), np.random.default_rng(0).normal(size=(5, 32))
    head = np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32)
    offsets = np.zeros(32, np.int32)
    offsets[3] = 7
    trimmed = draft.replace(head=DraftHead(jnp.asarray(head), jnp.asarray(offsets)))
    logits = draft_logits(tiny_target(), trimmed, jnp.asarray(hidden, jnp.float32))
    np.testing.assert_allclose(logits, hidden @ head.T, rtol=1e-4, atol=1e-4)
    assert propose_rows(trimmed, jnp.eye(32)).tolist() == [0, 1, 2, 10, *range(4, 32)]


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([[1, 2], [3, 4], [5, 6]], -1),
        ([[1, 2], [3, np.nan], [np.nan, 6]], 1),
        ([[np.inf, 2], [3, 4], [5, 6]], 0),
        ([[1, 2], [3, 4], [-np.inf, -np.inf]], 2),
        ([[1, -np.inf], [3, 4], [5, 6]], -1),  # a banned token is no fault
    ],
)
def test_the_first_row_without_a_finite_best_logit_is_named(rows, fault):
    assert first_fault(jnp.asarray([rows, [[0.0, 1.0]] * 3])).tolist() == [fault, -1]


# --- what is handed to the drafter ---------------------------------------------------------------


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_the_drafter_gets_exactly_the_committed_rows(accepted):
    """The table target's taps hold the row's position, and the drafter's last layer stores them:
    after every round its cache holds the rows 0..len - 1, each with its own taps.
    """
    target = table_target([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0])
    prompt = [7, 3, 3, 0, 1]
    # The anchor is 2, the drafts should be 3, 4, 5: the first wrong one ends the prefix.
    session = SpecSession(target, mistaken_draft(target, [3 + accepted]))
    session.open([prompt], 40)
    rows = len(prompt)
    for gain in (None, accepted + 1):
        if gain is not None:
            session.burst(1)
            assert session.results()[0].acceptance_lengths == [gain]
            rows += gain
        kv = session.state.draft
        assert kv.len.tolist() == session.state.target.len.tolist() == [rows]
        held = np.asarray(kv.full.pos)[0]
        assert sorted(held[held != ABSENT]) == list(range(rows))
        flags = np.asarray(kv.v[-1])[0, 0]
        for slot in np.flatnonzero(held != ABSENT):
            position, one = flags[slot, :2]
            assert position / one == pytest.approx(held[slot], rel=1e-5)


def test_the_rows_held_are_prompt_and_emitted_less_the_anchor():
    target = table_target([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0])
    session = SpecSession(target, mistaken_draft(target, [5]))
    session.open([[0, 1], [4, 5, 6, 7, 8]], 30)
    for _ in range(4):
        session.burst(1)
        emitted = np.asarray(session.state.emitted)
        assert session.state.target.len.tolist() == (np.array([2, 5]) + emitted - 1).tolist()
        assert session.state.draft.len.tolist() == session.state.target.len.tolist()
        assert session.state.anchor.tolist() == [r.token_ids[-1] for r in session.results()]


def test_embeddings_are_scaled_on_their_way_to_the_drafter():
    """Scale 3 with one table proposes what scale 1 proposes with the table times 3."""
    target, draft = tiny_target(), tiny_draft()
    louder = target.replace(
        embedding=target.embedding * 3,
        head=target.embedding,
        config=dataclasses.replace(target.config, tied=False),
    )
    scaled_up = draft.replace(config=dataclasses.replace(TINY, input_embedding_scale=3.0))
    session = SpecSession(target, draft)
    session.open([[1, 2, 3]], 10)
    drafts = [
        propose_block(t, d, session.state, session.plan)[0].tokens.tolist()
        for t, d in ((target, scaled_up), (louder, draft), (target, draft))
    ]
    assert drafts[0] == drafts[1] != drafts[2]


def test_a_scale_is_not_rounded_to_the_weights_dtype(monkeypatch):
    """sqrt(48) times a bf16 row, rounded once: what the public reference feeds a drafter."""
    config, seen = dataclasses.replace(TINY, input_embedding_scale=48**0.5), []
    target = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_target())
    draft = random_tree(abstract(config, jnp.bfloat16), 1)
    honest = rounds.forward_round

    def forward_round(draft, kv, noise, *rest):
        seen.append(noise)
        return honest(draft, kv, noise, *rest)

    monkeypatch.setattr(rounds, "forward_round", forward_round)
    session = SpecSession(target, draft)
    session.open([[1, 2, 3]], 10)
    propose_block(target, draft, session.state, session.plan)
    rows = target.embedding[jnp.asarray([session.state.anchor[0], config.mask_token_id])]
    exact = np.asarray(rows, np.float64) * 48**0.5
    np.testing.assert_array_equal(seen[-1][0, :2], exact.astype(np.float32).astype(jnp.bfloat16))
    assert (seen[-1][0, :2] != rows * 48**0.5).any()
