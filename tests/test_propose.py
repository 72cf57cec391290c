"""From a drafter's rows to a proposal: which tokens, drawn from which law."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, RecordedHead, arrays, assert_close, stage_draft, trained
from targets import F32, TINY, random_tree

from dflash_jax import SpecSession, dspark_accept_prefix
from dflash_jax.config import DFlash2Config, DSparkConfig, DSparkHarvest
from dflash_jax.draft import DraftHead
from dflash_jax.markov import confidence_raws
from dflash_jax.propose import (
    dflash2_propose_greedy,
    dflash2_propose_sampled,
    draft_logits,
    propose,
    propose_rows,
)
from dflash_jax.sampling import Filters, filtered_probs
from dflash_jax.shapes import abstract

BATCH, SLOTS, V, H = 3, 3, 64, 32
jitted = jax.jit(propose, static_argnames=("row_draws",))


@functools.cache
def random_draft(family, **changes):
    """A random drafter of the tiny size, with every head its family may have."""
    config = dataclasses.replace(
        TINY,
        family=family,
        dspark=DSparkConfig("gated", 8, True, True) if family == "dspark" else None,
        dflash2=DFlash2Config(2, 16, 8, 5) if family == "dflash2" else None,
        **changes,
    )
    return random_tree(abstract(config, F32), seed=3)


def rows(seed=0, width=V):
    """Logits `[B, nd, V]`, hidden rows `[B, nd, H]` and anchors of three sequences."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (BATCH, SLOTS, width)).astype(np.float32)
    hidden = rng.normal(size=(BATCH, SLOTS, H)).astype(np.float32)
    return jnp.asarray(logits), jnp.asarray(hidden), jnp.asarray([1, 7, 63], jnp.int32)


def sampled_filters(temperature=0.9, top_k=6):
    off = Filters.off(BATCH)
    return off.replace(
        temperature=jnp.full((BATCH,), temperature, jnp.float32),
        top_k=jnp.full((BATCH,), top_k, jnp.int32),
    )


def uniforms(seed=0):
    return jnp.asarray(np.random.default_rng(seed).uniform(size=(BATCH, SLOTS)), jnp.float32)


def dense_law(proposal, vocabulary=V):
    """The law of every slot `[B, nd, V]`, whatever form it was recorded in."""
    if proposal.q_dense is not None:
        return np.asarray(proposal.q_dense)
    law = np.zeros((*proposal.tokens.shape, vocabulary), np.float32)
    if proposal.cand is None:
        np.put_along_axis(law, np.asarray(proposal.tokens)[..., None], 1, -1)
        return law
    for place in np.ndindex(*proposal.tokens.shape):
        np.add.at(law[place], np.asarray(proposal.cand)[place], np.asarray(proposal.q_rows)[place])
    return law


FORMS = {f: (f, "argmax") for f in FAMILIES} | {"dflash-sample": ("dflash", "sample")}


# --- every family ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_the_recorded_law_is_one_and_gives_the_drafts_probability(form):
    family, row_draws = FORMS[form]
    draft = random_draft(family)
    proposal = jitted(draft, *rows(), sampled_filters(), uniforms(), row_draws=row_draws)
    law = dense_law(proposal)
    np.testing.assert_allclose(law.sum(-1), 1, atol=1e-6)
    chosen = np.take_along_axis(law, np.asarray(proposal.tokens)[..., None], -1)[..., 0]
    np.testing.assert_array_equal(proposal.q_chosen, chosen)
    assert (chosen > 0).all()
    assert proposal.fault.tolist() == [-1] * BATCH
    assert proposal.tokens.dtype == jnp.int32
    # A one-hot law is recorded by recording nothing.
    assert (proposal.q_dense is None and proposal.cand is None) == (form == "dflash")


@pytest.mark.parametrize("form", FORMS)
def test_drafts_follow_the_recorded_law(form):
    """The first slot of 20,000 proposals of one row."""
    family, row_draws = FORMS[form]
    logits, hidden, anchor = (x[:1] for x in rows())
    off = Filters.off(1).replace(temperature=jnp.ones(1), top_k=jnp.full((1,), 6, jnp.int32))
    draws = np.random.default_rng(1).uniform(size=(20_000, 1, SLOTS)).astype(np.float32)
    draft = random_draft(family)
    one = functools.partial(propose, row_draws=row_draws)
    drawn = jax.jit(jax.vmap(one, in_axes=(None, None, None, None, None, 0)))(
        draft, logits, hidden, anchor, off, draws
    )
    seen = np.bincount(np.asarray(drawn.tokens)[:, 0, 0], minlength=V) / 20_000
    law = dense_law(jax.tree.map(lambda x: x[0], drawn))[0, 0]
    assert np.abs(seen - law).sum() / 2 < 0.015
    assert (seen.max() < 1) == (form != "dflash")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6, 1e-5])
def test_at_the_greedy_threshold_drafts_are_the_greedy_ones(form, temperature):
    family, row_draws = FORMS[form]
    draft = random_draft(family)
    greedy = jitted(draft, *rows())
    drawn = jitted(draft, *rows(), sampled_filters(temperature), uniforms(), row_draws=row_draws)
    np.testing.assert_array_equal(drawn.tokens, greedy.tokens)
    np.testing.assert_array_equal(drawn.q_chosen, np.ones((BATCH, SLOTS)))
    np.testing.assert_array_equal(dense_law(drawn), dense_law(greedy))


@pytest.mark.parametrize("form", FORMS)
def test_sequences_do_not_mix(form):
    """Each one's proposal alone equals its row of the batch, its own temperature included."""
    family, row_draws = FORMS[form]
    draft, inputs, draws = random_draft(family), rows(), uniforms()
    filters = sampled_filters().replace(temperature=jnp.asarray([0.0, 0.7, 1.4], jnp.float32))
    together = jitted(draft, *inputs, filters, draws, row_draws=row_draws)
    for b in range(BATCH):
        part = [jax.tree.map(lambda x, b=b: x[b : b + 1], x) for x in (*inputs, filters, draws)]
        alone = jitted(draft, *part, row_draws=row_draws)
        assert alone.tokens[0].tolist() == together.tokens[b].tolist()
        np.testing.assert_allclose(dense_law(alone)[0], dense_law(together)[b], atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_non_finite_rows_are_named_for_each_sequence(family, sampled):
    logits, hidden, anchor = rows()
    logits = np.asarray(logits).copy()
    logits[1, 2, 5] = np.nan
    logits[2] = -np.inf
    extra = (sampled_filters(), uniforms()) if sampled else ()
    proposal = jitted(random_draft(family), logits, hidden, anchor, *extra)
    assert proposal.fault.tolist() == [-1, 2, 0]


# --- DFlash ---------------------------------------------------------------------------------------


def test_dflash_rows_are_argmaxes_by_default():
    """Also when sampling: independent draws make incoherent blocks."""
    logits, hidden, anchor = rows()
    for extra in ((), (sampled_filters(), uniforms())):
        proposal = jitted(random_draft("dflash"), logits, hidden, anchor, *extra)
        np.testing.assert_array_equal(proposal.tokens, logits.argmax(-1))
        np.testing.assert_array_equal(proposal.q_chosen, np.ones((BATCH, SLOTS)))
    np.testing.assert_array_equal(propose_rows(random_draft("dflash"), logits), proposal.tokens)


def test_dflash_rows_may_be_drawn_from_their_own_filtered_softmax():
    logits, hidden, anchor = rows()
    filters, draws = sampled_filters(), uniforms()
    proposal = jitted(
        random_draft("dflash"), logits, hidden, anchor, filters, draws, row_draws="sample"
    )
    expected = jax.vmap(jax.vmap(filtered_probs, in_axes=(0, None)))(logits, filters)
    np.testing.assert_allclose(proposal.q_dense, expected, atol=1e-6)
    for place in np.ndindex(BATCH, SLOTS):
        token = int(np.argmax(draws[place] < np.cumsum(expected[place])))
        assert proposal.tokens[place] == token


def trimmed(draft, rows_kept):
    """The drafter with a head of its own over the ids `rows_kept`."""
    head = np.random.default_rng(5).normal(size=(len(rows_kept), H)).astype(np.float32)
    offsets = np.asarray(rows_kept) - np.arange(len(rows_kept))
    return draft.replace(head=DraftHead(jnp.asarray(head), jnp.asarray(offsets, jnp.int32)))


EVEN = list(range(0, V, 2))


@pytest.mark.parametrize("row_draws", ["argmax", "sample"])
def test_a_trimmed_head_proposes_target_ids_under_a_law_over_target_ids(row_draws):
    draft = trimmed(random_draft("dflash"), EVEN)
    logits, hidden, anchor = rows(width=len(EVEN))
    proposal = jitted(
        draft, logits, hidden, anchor, sampled_filters(), uniforms(), row_draws=row_draws
    )
    law = dense_law(proposal)
    assert (law[..., 1::2] == 0).all()
    chosen = np.take_along_axis(law, np.asarray(proposal.tokens)[..., None], -1)[..., 0]
    np.testing.assert_array_equal(proposal.q_chosen, chosen)
    if row_draws == "sample":
        rows_of = jax.vmap(jax.vmap(filtered_probs, in_axes=(0, None)))
        np.testing.assert_allclose(law[..., ::2], rows_of(logits, sampled_filters()), atol=1e-6)
    else:
        np.testing.assert_array_equal(proposal.tokens, 2 * logits.argmax(-1))


# --- DSpark ---------------------------------------------------------------------------------------


def test_confidences_see_the_token_before_each_slot():
    draft = random_draft("dspark")
    logits, hidden, anchor = rows()
    for extra in ((), (sampled_filters(), uniforms())):
        proposal = jitted(draft, logits, hidden, anchor, *extra)
        for b in range(BATCH):
            previous = jnp.asarray([anchor[b], *proposal.tokens[b, :-1]])
            raws = confidence_raws(draft.confidence, draft.markov, hidden[b], previous)
            np.testing.assert_allclose(proposal.raws[b], raws, rtol=1e-5, atol=1e-5)


def test_a_dspark_drafter_without_a_markov_head_proposes_rows():
    config = dataclasses.replace(TINY, family="dspark", dspark=DSparkConfig(None, 0, True, False))
    draft = random_tree(abstract(config, F32), seed=3)
    assert draft.markov is None
    logits, hidden, anchor = rows()
    proposal = jitted(draft, logits, hidden, anchor)
    np.testing.assert_array_equal(proposal.tokens, logits.argmax(-1))
    assert proposal.raws.shape == (BATCH, SLOTS)


def test_a_drafter_without_a_confidence_head_has_no_confidences():
    config = dataclasses.replace(TINY, family="dspark", dspark=DSparkConfig("vanilla", 8, False))
    draft = random_tree(abstract(config, F32), seed=3)
    assert jitted(draft, *rows()).raws is None
    assert jitted(random_draft("dflash2"), *rows()).raws is None


# --- DFlash2 --------------------------------------------------------------------------------------

CASES = ["dflash2", "dflash2_k3"]


@functools.cache
def recorded(case):
    """The drafter, its draft logits and hidden rows, and the selector's record."""
    heads, record = (arrays("stages", case, f"{name}.npz") for name in ("heads", "selector"))
    hidden = jnp.asarray(arrays("stages", case, "io.npz")["final"][1:])
    logits = draft_logits(RecordedHead(heads["lm_head"]), stage_draft(case), hidden)
    return stage_draft(case), heads, logits, hidden, record


@pytest.mark.parametrize("case", CASES)
def test_recorded_draft_logits(case):
    draft, heads, logits, hidden, _ = recorded(case)
    assert_close(hidden @ heads["lm_head"].T, heads["raw_logits"])
    assert_close(logits, heads["draft_logits"])
    same = np.array_equal(heads["raw_logits"], heads["draft_logits"])
    assert same == (draft.config.final_logit_softcapping is None)


def test_the_multiplier_comes_before_the_soft_cap():
    """100 * 0.19611613513818404 = 19.61; 20 tanh(19.61 / 20) = 15.0663. Capped first: 3.92."""
    draft = stage_draft("dflash2")
    config = dataclasses.replace(
        draft.config, output_multiplier=0.19611613513818404, final_logit_softcapping=20.0
    )
    head = RecordedHead(np.ones((1, 64), np.float32))
    row = jnp.zeros((1, 64)).at[0, 0].set(100)
    got = draft_logits(head, draft.replace(config=config), row)
    np.testing.assert_allclose(got, [[15.0663]], atol=1e-4)


def test_a_token_that_may_never_be_chosen_stays_so_under_the_soft_cap():
    draft, never = stage_draft("dflash2"), np.finfo(np.float32).min
    assert draft.config.final_logit_softcapping

    class Padded:
        def logits(self, hidden):
            return jnp.where(jnp.arange(4) < 3, hidden[..., :4], never)

    got = draft_logits(Padded(), draft, jnp.asarray([[-900.0, -900.0, -900.0, 5.0]]))
    assert got[0, 3] == never
    assert (got[0, :3] > -30).all()


@pytest.mark.parametrize("case", CASES)
def test_recorded_paths_from_logits_and_rows(case):
    draft, _, logits, hidden, record = recorded(case)
    anchor = record["anchor"][0]
    path = dflash2_propose_greedy(draft, logits, hidden, anchor)
    np.testing.assert_array_equal(path, record["greedy_path"])
    np.testing.assert_array_equal(
        jax.jit(dflash2_propose_greedy)(draft, logits, hidden, anchor), path
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", ["0.7", "1.3"])
def test_recorded_draws_from_logits_and_rows(case, temperature):
    draft, _, logits, hidden, record = recorded(case)
    of = {k.removeprefix(f"t{temperature}_"): v for k, v in record.items()}
    path, q_chosen, q_rows = dflash2_propose_sampled(
        draft,
        logits,
        hidden,
        record["anchor"][0],
        np.float32(temperature),
        jnp.asarray(of["uniforms"]),
    )
    np.testing.assert_array_equal(path, of["path"])
    assert_close(q_rows, of["q_rows"])
    assert_close(q_chosen, of["q_chosen"])


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_are_an_error_that_names_the_slot(fault):
    draft, _, logits, hidden, record = recorded("dflash2")
    bad = logits.at[4].set(fault)
    message = "non-finite draft logits: sequence 0, draft slot 5"
    with pytest.raises(ValueError, match=message):
        dflash2_propose_greedy(draft, bad, hidden, record["anchor"][0])
    with pytest.raises(ValueError, match=message):
        dflash2_propose_sampled(
            draft, bad, hidden, record["anchor"][0], np.float32(1), jnp.zeros(7)
        )


def test_fewer_finite_logits_than_candidates_are_an_error():
    draft, _, logits, hidden, record = recorded("dflash2")
    k = draft.dflash2.top_k
    enough, too_few = (logits.at[2, n:].set(-jnp.inf) for n in (k, k - 1))
    path = dflash2_propose_greedy(draft, enough, hidden, record["anchor"][0])
    assert int(path[2]) < k
    with pytest.raises(ValueError, match="non-finite draft logits: sequence 0, draft slot 3"):
        dflash2_propose_greedy(draft, too_few, hidden, record["anchor"][0])


def test_top_k_and_top_p_do_not_touch_the_selectors_scores():
    draft = random_draft("dflash2")
    wide, narrow = (jitted(draft, *rows(), sampled_filters(top_k=k), uniforms()) for k in (0, 1))
    np.testing.assert_array_equal(wide.q_rows, narrow.q_rows)
    assert (np.asarray(narrow.q_rows) > 0).all()


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("sampled", [False, True])
def test_candidates_are_picked_without_sorting_the_vocabulary(batch, sampled):
    """A program that only wants some of the best may still turn `top_k` into a sort of all."""
    draft, (logits, hidden, anchor) = random_draft("dflash2"), rows()
    draws = (sampled_filters(), uniforms()) if sampled else ()
    args = jax.tree.map(lambda x: x[:batch], (logits, hidden, anchor, *draws))
    text = jitted.lower(draft, *args).compile().as_text()
    assert 'custom_call_target="TopK"' in text
    assert " sort(" not in text


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_only_a_dflash2_drafter_has_a_path_to_propose(family):
    draft, (logits, hidden, _) = random_draft(family), rows()
    expected = f"draft: expected a DFlash2 drafter, found {family}"
    with pytest.raises(ValueError, match=expected):
        dflash2_propose_greedy(draft, logits[0], hidden[0], 1)
    with pytest.raises(ValueError, match=expected):
        dflash2_propose_sampled(draft, logits[0], hidden[0], 1, 0.5, uniforms()[0])


def test_candidates_are_remapped_before_the_walk():
    """A trimmed head whose row i is token V - 1 - i: the codebooks are read at the target's ids."""
    draft = random_draft("dflash2")
    backwards = np.arange(V)[::-1]
    logits, hidden, anchor = rows()
    plain = jitted(draft, logits, hidden, anchor)
    mapped = jitted(trimmed(draft, backwards), logits[..., ::-1], hidden, anchor)
    np.testing.assert_array_equal(mapped.tokens, plain.tokens)


# --- harvest --------------------------------------------------------------------------------------


def test_harvest_alignment_by_hand():
    """Row r argmaxes to 1001 + r after anchor 1000, and the target says 1001..1008."""
    said, target_says = np.arange(1001, 1009), np.arange(1001, 1009)

    def accepted(harvest, vt):
        first, count = harvest.first_row, harvest.drafts(8)
        drafts = said[first : first + count][: vt - 1]
        return int(dspark_accept_prefix(jnp.asarray([1000, *drafts]), target_says[:vt], vt))

    assert accepted(DSparkHarvest.DSPARK, 8) == 7
    assert accepted(DSparkHarvest.DFLASH, 7) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_gives_as_many_drafts_as_its_harvest_says(family):
    session = SpecSession(*trained(family))
    expected = 9 if family == "dspark" else 8
    assert session._plan.verify_width == expected
    assert session._plan.block_size == 8
