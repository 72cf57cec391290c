"""Trimmed heads: which tokens are drafted, through which rows, and that no output changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, ORACLES, trained
from targets import F32, TINY, tiny_draft, tiny_target

from dflash_jax import generate, load_draft, save_draft
from dflash_jax.corpus import Corpus
from dflash_jax.draft import DraftHead
from dflash_jax.head import draft_ids, read_ranks, trim_head
from dflash_jax.propose import draft_logits, propose
from dflash_jax.ranks import corpus_ranks
from dflash_jax.sampling import Filters

PROMPT = list(b"the cat sat on ")
IDS = np.array([3, 32, 97, 99, 100, 101, 104, 110, 111, 116, 120, 257])


@functools.cache
def trimmed(family):
    target, draft = trained(family)
    return trim_head(draft, target, IDS)


# --- which tokens --------------------------------------------------------------------------------


def test_ranks_are_ids_in_text_or_npy(tmp_path):
    (tmp_path / "r.txt").write_text("5\n3\n\n60\n")
    np.save(tmp_path / "r.npy", np.array([5, 3, 60], np.uint16))
    assert read_ranks(tmp_path / "r.txt").tolist() == [5, 3, 60]
    assert read_ranks(tmp_path / "r.npy").tolist() == [5, 3, 60]
    assert draft_ids(tiny_target(), 2, tmp_path / "r.txt").tolist() == [3, 5]
    assert draft_ids(tiny_target(), None, [9, 1, 4]).tolist() == [1, 4, 9]


def test_without_ranks_stop_tokens_come_first_and_then_every_id():
    target = trained("dflash")[0]
    stops = sorted(target.stop_token_ids)
    rows = len(stops) + 4
    assert draft_ids(target, rows).tolist() == [0, 1, 2, 3, *stops]
    assert draft_ids(target, target.vocab_size).tolist() == list(range(target.vocab_size))


@pytest.mark.parametrize(
    ("rows", "ranks", "message"),
    [
        (3, [1, 2], r"head_rows: expected 1\.\.2 \(ids there are\), found 3"),
        (0, [1, 2], r"head_rows: expected 1\.\.2 .*found 0"),
        (True, [1, 2], "head_rows: .*found True"),
        (None, [], r"head_rows: expected 1\.\.0"),
        (1, [1, 64], r"ranks: expected ids in 0\.\.63, found 64"),
        (1, [-1, 4], r"ranks: expected ids in 0\.\.63, found -1"),
        (1, [7, 4, 7], "ranks: expected distinct ids, found 7 twice"),
    ],
)
def test_what_cannot_be_a_draft_vocabulary(rows, ranks, message):
    with pytest.raises(ValueError, match=message):
        draft_ids(tiny_target(), rows, ranks)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.txt", b"1\ntwo\n", "r.txt: expected one token id a line"),
        ("r.txt", b"\xff\xfe", "r.txt: expected one token id a line"),
        ("r.npy", b"not numpy", "r.npy: not a readable .npy"),
    ],
)
def test_a_damaged_ranks_file_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_ranks(tmp_path / name)


def test_ranks_of_another_shape_or_absent(tmp_path):
    np.save(tmp_path / "r.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"expected token ids \[n\], found \[2, 2\] of float64"):
        read_ranks(tmp_path / "r.npy")
    with pytest.raises(FileNotFoundError, match="ranks: expected a file"):
        read_ranks(tmp_path / "none.txt")


def test_a_corpus_counts_the_targets_own_tokens(tmp_path):
    ids = np.array([[9, 9, 9, 5, 2, 5], [9, 9, 7, 2, 5, 0]])
    answer = np.array([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0]], bool)
    Corpus(ids, np.ones_like(ids), answer).save(tmp_path / "c.npz")
    ranks = corpus_ranks(tmp_path / "c.npz", None, 12)
    assert ranks[:5].tolist() == [5, 2, 7, 0, 1]  # 3, 2, 1, and the others by id
    assert sorted(ranks.tolist()) == list(range(12))
    with pytest.raises(ValueError, match=r"c\.npz: expected ids in 0\.\.6, found 7"):
        corpus_ranks(tmp_path / "c.npz", None, 7)


def test_records_count_answers_and_prompts_without_one(tmp_path):
    file = tmp_path / "c.jsonl"
    file.write_text('{"prompt_ids": [1, 1, 1], "answer_ids": [4, 2, 4]}\n{"prompt_ids": [2, 2]}\n')
    assert corpus_ranks(file, None, 6)[:3].tolist() == [2, 4, 0]
    file.write_text("")
    with pytest.raises(ValueError, match="expected tokens to count, found none"):
        corpus_ranks(file, None, 6)


# --- the head ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_targets_at_the_chosen_ids(family):
    (target, draft), small = trained(family), trimmed(family)
    hidden = jax.random.normal(jax.random.key(0), (5, target.hidden_size))
    every = draft_logits(target, draft, hidden)
    few = draft_logits(target, small, hidden)
    np.testing.assert_allclose(few, every[:, IDS], rtol=1e-5, atol=1e-5)
    assert small.head.target_ids(jnp.arange(len(IDS))).tolist() == IDS.tolist()


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_proposals_are_those_of_a_head_that_forbids_the_other_tokens(family, sampled):
    """Tokens, the law of each and the confidences: bias, candidates and codebooks by target id."""
    run = jax.jit(propose, static_argnames="row_draws")
    (target, draft), small = trained(family), trimmed(family)
    hidden = jax.random.normal(jax.random.key(1), (2, 7, target.hidden_size))
    anchor = jnp.array([97, 32], jnp.int32)
    every = draft_logits(target, draft, hidden)
    few = draft_logits(target, small, hidden)
    kept = jnp.zeros(every.shape[-1], bool).at[IDS].set(True)
    masked = jnp.where(kept, every, jnp.finfo(F32).min)
    draws = ()
    if sampled:
        filters = Filters.off(2).replace(temperature=jnp.array([0.7, 1.3]))
        draws = (filters, jax.random.uniform(jax.random.key(2), (2, 7)))
    want = run(draft, masked, hidden, anchor, *draws, row_draws="sample")
    got = run(small, few, hidden, anchor, *draws, row_draws="sample")
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.q_chosen, want.q_chosen, rtol=1e-4)
    assert set(np.asarray(got.tokens).ravel().tolist()) <= set(IDS.tolist())
    if want.raws is not None:
        np.testing.assert_allclose(got.raws, want.raws, rtol=1e-5)
    if sampled and want.q_dense is not None:
        dense = jnp.zeros_like(want.q_dense)
        spread = jax.vmap(jax.vmap(lambda row, ids, q: row.at[ids].add(q)))
        dense = spread(dense, got.cand, got.q_rows)
        # As near as the logits are: a head of other rows may sum in another order.
        np.testing.assert_allclose(dense, want.q_dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("family", "precision"), [("dflash", "int8"), ("dspark", "q4_0")])
def test_the_text_stays_the_targets_own(family, precision):
    """Quantised too. Of DFlash2: test_cli.py."""
    target, _ = trained(family)
    small = load_draft(ORACLES / "tiny" / family, target, dtype=F32, precision=precision, ranks=IDS)
    out = generate(target, small, PROMPT, 30, stop_token_ids=())
    plain = generate(target, small, PROMPT, 30, stop_token_ids=(), accept=False)
    assert out.token_ids == plain.token_ids
    assert out.accepted > 0


@pytest.mark.parametrize(
    ("family", "precision"), [("dflash", None), ("dspark", "int8"), ("dflash2", "q4_0")]
)
def test_a_trimmed_drafter_is_saved_and_loaded(family, precision, tmp_path):
    target, _ = trained(family)
    draft = load_draft(
        ORACLES / "tiny" / family,
        target,
        dtype=F32,
        precision=precision,
        head_rows=len(IDS),
        ranks=IDS[::-1],
    )
    save_draft(draft, tmp_path / "d")
    loaded = load_draft(tmp_path / "d", target, dtype=F32)
    assert loaded.config == draft.config
    jax.tree.map(np.testing.assert_array_equal, loaded, draft)


def test_a_head_of_its_own_is_not_trimmed_and_a_trimmed_one_needs_a_target(tmp_path):
    draft = tiny_draft()
    save_draft(draft, tmp_path)
    with pytest.raises(ValueError, match="head_rows: expected a target to take the rows from"):
        load_draft(tmp_path, head_rows=8)
    own = draft.replace(head=DraftHead(jnp.zeros((8, TINY.hidden_size)), jnp.zeros(8, jnp.int32)))
    with pytest.raises(ValueError, match="found one with 8 rows of its own"):
        trim_head(own, tiny_target(), np.arange(4))


def test_a_selector_needs_its_candidates():
    target, draft = trained("dflash2")
    with pytest.raises(ValueError, match="at least selector_top_k 8 candidates, found 7"):
        trim_head(draft, target, np.arange(7))
