"""DFlash2's candidate selector: candidates, the guard, and both forms of both walks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import arrays, assert_close, stage_draft

from dflash_jax import kernels, selector
from dflash_jax.sampling import GREEDY_TEMPERATURE
from dflash_jax.selector import (
    Walk,
    candidate_fault,
    dflash2_walk_greedy,
    dflash2_walk_greedy_q,
    dflash2_walk_sampled,
    lattice_walk_greedy,
    lattice_walk_sampled,
    pair_scores,
    sampled_walk,
    top_candidates,
)

CASES = ["dflash2", "dflash2_k3"]
TEMPERATURES = ["0.7", "1.3"]

# The worked example: V 8, rank 2, k 2, two slots, anchor 0.
PRED = np.zeros((8, 2), np.float32)
PRED[[0, 1, 2]] = [1, 0], [0, 1], [1, 0]
SUCC = np.zeros((8, 2), np.float32)
SUCC[[1, 2, 3, 4]] = [2, 0], [0, 5], [0, 3], [10, 0]
CAND = np.array([[1, 2], [3, 4]], np.int32)
ONES, ZEROS = np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)
EVEN = (PRED, SUCC, ZEROS, CAND, ONES, 0)


kernel = kernels.kernel("walk")


def kernel_greedy(*walk):
    """The GPU kernel, interpreted."""
    return kernel.greedy(*walk, interpret=True)


def kernel_greedy_q(*walk):
    return kernel.greedy_q(*walk, interpret=True)


def kernel_sampled(*walk):
    return Walk(*kernel.sampled(*walk, interpret=True))


GREEDY = [dflash2_walk_greedy, lattice_walk_greedy, kernel_greedy]
SAMPLED = [sampled_walk, lattice_walk_sampled, kernel_sampled]


def f32(*rows):
    return np.asarray(rows, np.float32)


def recorded_slots(case):
    """(pred, succ, unary, cand, hproj, anchor) of a recorded case, and the record."""
    record = arrays("stages", case, "selector.npz")
    if case == "selector_ties":
        books = record["predecessor_codebook"], record["successor_codebook"]
    else:
        head = stage_draft(case).dflash2
        books = head.predecessor, head.successor
    slots = (record[name] for name in ("unary", "candidates", "hidden_proj"))
    return (*books, *slots, record["anchor"][0]), record


def scores_along(walk, path):
    """The scores each slot of `path` was chosen from, in f64."""
    pred, succ, unary, cand, hproj, anchor = (np.asarray(x) for x in walk)
    previous = [anchor, *path[:-1]]
    pairs = [
        (pred[prev].astype(float) * hproj[p] * succ[cand[p]]).sum(-1)
        for p, prev in enumerate(previous)
    ]
    return unary + np.stack(pairs)


def exact_law(walks, b, drawn, temperature):
    """The law of each slot of walk `b` along the path that was drawn, in f64; greedy: one-hot."""
    if temperature <= GREEDY_TEMPERATURE:
        return np.eye(drawn.q_rows.shape[-1])[np.asarray(drawn.chosen[b])]
    one = (*walks[:2], *(x[b] for x in walks[2:]))
    scaled = scores_along(one, np.asarray(drawn.path[b])) / np.float64(np.float32(temperature))
    weights = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


# --- the worked example ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unary", "hproj", "path", "q"),
    [
        (ZEROS, ONES, [1, 3], [0.880797, 0.952574]),
        (f32([0, 10], [0, 0]), ONES, [2, 4], [0.999665, 0.999955]),
        (f32([0, 1], [0, 0]), f32([0, 1], [1, 1]), [2, 4], [0.731059, 0.999955]),
    ],
)
def test_greedy_example(unary, hproj, path, q):
    walk = (PRED, SUCC, unary, CAND, hproj, 0)
    for form in GREEDY:
        assert form(*walk).tolist() == path
    for form in (dflash2_walk_greedy_q, kernel_greedy_q):
        got_path, got_q = form(*walk)
        assert got_path.tolist() == path
        np.testing.assert_allclose(got_q, q, atol=1e-6)


Q1 = np.e / (1 + np.e)


@pytest.mark.parametrize(
    ("temperature", "uniforms", "path", "q_chosen"),
    [
        (1e-6, [0.5, 0.5], [1, 3], [1, 1]),
        (2, [Q1 - 0.01, 0], [1, 3], [Q1, 0.817574]),
        (2, [Q1 + 0.01, 0], [2, 3], [1 - Q1, 0.006693]),
        (2, [0.99, 0.01], [2, 4], [1 - Q1, 0.993307]),
    ],
)
@pytest.mark.parametrize("form", SAMPLED)
def test_sampled_example(form, temperature, uniforms, path, q_chosen):
    walk = form(*EVEN, np.float32(temperature), f32(*uniforms))
    assert walk.path.tolist() == path
    np.testing.assert_allclose(walk.q_chosen, q_chosen, atol=2e-6)
    np.testing.assert_allclose(walk.q_rows[0], [1, 0] if temperature < 1 else [Q1, 1 - Q1], 1e-6)
    got = dflash2_walk_sampled(*EVEN, np.float32(temperature), f32(*uniforms))
    for ours, of_walk in zip(got, (walk.path, walk.q_chosen, walk.q_rows), strict=True):
        np.testing.assert_array_equal(ours, of_walk)


def test_the_second_slots_law_depends_on_the_first_choice():
    walk = lattice_walk_sampled(*EVEN, np.float32(2), f32(0.99, 0.01))
    np.testing.assert_allclose(walk.q_rows[1], [0.006693, 0.993307], atol=1e-6)


# --- recorded cases -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_recorded_candidates_and_projection(case):
    head, record = stage_draft(case).dflash2, arrays("stages", case, "selector.npz")
    logits = arrays("stages", case, "heads.npz")["draft_logits"]
    unary, cand = top_candidates(jnp.asarray(logits), head.top_k)
    np.testing.assert_array_equal(cand, record["candidates"])
    np.testing.assert_array_equal(unary, record["unary"])
    hidden = jnp.asarray(arrays("stages", case, "io.npz")["final"][1:])
    assert_close(selector.hidden_projection(head, hidden), record["hidden_proj"])


@pytest.mark.parametrize("case", [*CASES, "selector_ties"])
def test_recorded_greedy_paths(case):
    walk, record = recorded_slots(case)
    for form in (*GREEDY, jax.jit(lattice_walk_greedy), jax.jit(kernel_greedy)):
        np.testing.assert_array_equal(form(*walk), record["greedy_path"])
    # The recorded scores are those of the path's own row of the lattice.
    lattice = pair_scores(*walk)
    before = np.concatenate([[0], record["greedy_k"][:-1]])
    assert_close(lattice[np.arange(len(before)), before], record["greedy_scores"], 1e-6)
    chosen = np.take_along_axis(record["candidates"], record["greedy_k"][:, None], 1)[:, 0]
    np.testing.assert_array_equal(chosen, record["greedy_path"])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("form", SAMPLED)
def test_recorded_draws(form, case, temperature):
    walk, record = recorded_slots(case)
    record = {k.removeprefix(f"t{temperature}_"): v for k, v in record.items()}
    drawn = form(*walk, np.float32(temperature), record["uniforms"])
    np.testing.assert_array_equal(drawn.path, record["path"])
    np.testing.assert_array_equal(drawn.chosen, record["k"])
    assert_close(drawn.q_rows, record["q_rows"])
    assert_close(drawn.q_chosen, record["q_chosen"])


def test_exact_ties_go_to_the_lower_id_and_the_lower_candidate():
    """Small dyadic numbers, so that ties are ties in any float type, at the cut and at the top."""
    walk, record = recorded_slots("selector_ties")
    unary, cand = top_candidates(jnp.asarray(record["logits"]), 4)
    np.testing.assert_array_equal(cand, record["candidates"])
    np.testing.assert_array_equal(unary, record["unary"])
    scores = scores_along(walk, record["greedy_path"])
    np.testing.assert_array_equal(scores, record["greedy_scores"])
    np.testing.assert_array_equal(scores.argmax(-1), record["greedy_k"])
    assert (scores == scores.max(-1, keepdims=True)).sum(-1).tolist() == [2, 4, 1, 2, 3]


# --- one form against the other -------------------------------------------------------------------


def random_walks(seed, count, *, dyadic, slots=7, k=8, vocabulary=40, rank=6):
    """A batch of slots; dyadic numbers tie often, and exactly."""
    rng = np.random.default_rng(seed)

    def numbers(*shape):
        if dyadic:
            return rng.integers(-2, 3, shape).astype(np.float32) / 2
        return rng.normal(size=shape).astype(np.float32)

    logits = numbers(count, slots, vocabulary)
    unary, cand = top_candidates(jnp.asarray(logits), k)
    walks = (numbers(vocabulary, rank), numbers(vocabulary, rank), unary, cand)
    anchors = rng.integers(0, vocabulary, count).astype(np.int32)
    uniforms = rng.uniform(size=(count, slots)).astype(np.float32)
    return (*walks, numbers(count, slots, rank), anchors), uniforms


@functools.cache
def over_walks(form, extra=0):
    """A form compiled over a batch of walks that share codebooks (and a temperature)."""
    return jax.jit(jax.vmap(form, in_axes=(None, None, 0, 0, 0, 0, *[None, 0][:extra])))


@pytest.mark.parametrize("dyadic", [False, True], ids=["random", "tied"])
def test_greedy_forms_walk_the_same_paths(dyadic):
    walks, _ = random_walks(0, 500, dyadic=dyadic)
    scan, *others = (over_walks(f)(*walks) for f in GREEDY)
    for other in others:
        np.testing.assert_array_equal(scan, other)
    tied = 0
    for b, path in enumerate(np.asarray(scan)):
        one = (*walks[:2], *(x[b] for x in walks[2:]))
        scores = scores_along(one, path)
        best = np.take_along_axis(np.asarray(walks[3][b]), scores.argmax(-1)[:, None], 1)[:, 0]
        tops = np.sort(scores, axis=-1)
        tied += (tops[:, -1] == tops[:, -2]).any()
        if dyadic:  # argmax of exact numbers, ties to the lowest candidate
            np.testing.assert_array_equal(path, best)
    assert (tied > 300) == dyadic


@pytest.mark.parametrize("temperature", [1e-6, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("dyadic", [False, True], ids=["random", "tied"])
def test_sampled_forms_draw_the_same_paths(dyadic, temperature):
    walks, uniforms = random_walks(1, 300, dyadic=dyadic)
    scan, *others = (over_walks(f, 2)(*walks, jnp.float32(temperature), uniforms) for f in SAMPLED)
    # Two forms may round a score apart by one ulp each way, over the temperature; neither strays
    # further from the exact law.
    off = 1e-6 / min(temperature, 1) if temperature > GREEDY_TEMPERATURE else 0
    for other in others:
        np.testing.assert_array_equal(scan.path, other.path)
        np.testing.assert_array_equal(scan.chosen, other.chosen)
        np.testing.assert_allclose(scan.q_rows, other.q_rows, atol=off)
    exact = np.stack([exact_law(walks, b, scan, temperature) for b in range(300)])
    for walk in (scan, *others):
        np.testing.assert_allclose(walk.q_rows, exact, rtol=0, atol=1e-6)
    for walk in (scan, *others):
        chosen = np.take_along_axis(np.asarray(walk.q_rows), np.asarray(walk.chosen)[..., None], -1)
        np.testing.assert_array_equal(walk.q_chosen, chosen[..., 0])  # bit for bit
        path = np.take_along_axis(np.asarray(walks[3]), np.asarray(walk.chosen)[..., None], -1)
        np.testing.assert_array_equal(walk.path, path[..., 0])


def test_forms_score_pairs_alike():
    walks, _ = random_walks(2, 50, dyadic=False)
    lattice = np.asarray(over_walks(pair_scores)(*walks))
    paths = np.asarray(over_walks(dflash2_walk_greedy)(*walks))
    for b, path in enumerate(paths):
        one = (*walks[:2], *(x[b] for x in walks[2:]))
        places = [(np.asarray(one[3][p]) == t).argmax() for p, t in enumerate(path)]
        along = lattice[b, np.arange(7), [0, *places[:-1]]]
        assert_close(along, scores_along(one, path), 1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6, 1e-5])
@pytest.mark.parametrize("form", SAMPLED)
def test_at_the_greedy_threshold_a_draw_is_the_greedy_walk(form, temperature):
    walks, uniforms = random_walks(3, 100, dyadic=True)
    drawn = over_walks(form, 2)(*walks, jnp.float32(temperature), uniforms)
    np.testing.assert_array_equal(drawn.path, over_walks(dflash2_walk_greedy)(*walks))
    np.testing.assert_array_equal(drawn.q_chosen, np.ones((100, 7)))
    np.testing.assert_array_equal(drawn.q_rows.sum(-1), np.ones((100, 7)))


def test_draws_follow_the_softmax_of_the_scores():
    """40,000 walks of one lattice: the joint frequencies of two slots."""
    count, temperature = 40_000, 0.8
    (pred, succ, unary, cand, hproj, anchor), _ = random_walks(4, 1, dyadic=False, slots=2, k=3)
    one = (pred, succ, unary[0], cand[0], hproj[0], anchor[0])
    uniforms = np.random.default_rng(5).uniform(size=(count, 2)).astype(np.float32)
    draw = jax.jit(jax.vmap(lattice_walk_sampled, in_axes=(*[None] * 7, 0)))
    drawn = draw(*one, jnp.float32(temperature), uniforms)
    law = jax.nn.softmax(pair_scores(*one) / temperature, axis=-1)
    expected = np.asarray(law[0, 0][:, None] * law[1])
    pairs = np.asarray(drawn.chosen)
    seen = np.histogram2d(pairs[:, 0], pairs[:, 1], bins=(range(4), range(4)))[0] / count
    assert np.abs(seen - expected).sum() / 2 < 0.01


@pytest.mark.parametrize("form", SAMPLED)
def test_the_residue_of_a_cdf_falls_to_the_likeliest_candidate(form):
    """A uniform of 1 - 2**-24 may pass a cdf that sums to a little less than one."""
    last = np.float32(1 - 2**-24)
    walks, _ = random_walks(8, 300, dyadic=False)
    drawn = over_walks(form, 2)(*walks, jnp.float32(1.3), np.full((300, 7), last))
    rows, chosen = np.asarray(drawn.q_rows), np.asarray(drawn.chosen)
    residue = ~(last < np.asarray(jnp.cumsum(drawn.q_rows, axis=-1))).any(-1)
    assert 0 < residue.sum() < residue.size
    np.testing.assert_array_equal(chosen[residue], rows.argmax(-1)[residue])


# --- the guard -----------------------------------------------------------------------------------


def faulty_rows(fault):
    logits = np.random.default_rng(6).normal(size=(3, 12)).astype(np.float32)
    if fault == "nan":
        logits[1, 7] = np.nan
    elif fault == "too few":
        logits[1, 3:] = -np.inf
    elif fault == "inf":
        logits[1, 0] = np.inf
    elif fault == "enough":
        logits[1, 4:] = -np.inf
    return top_candidates(jnp.asarray(logits), 4)[0]


@pytest.mark.parametrize("fault", ["nan", "too few", "inf"])
def test_a_row_without_k_finite_logits_is_named(fault):
    assert int(candidate_fault(faulty_rows(fault))) == 1


@pytest.mark.parametrize("fault", ["none", "enough"])
def test_k_finite_logits_are_enough(fault):
    assert int(candidate_fault(faulty_rows(fault))) == -1


def test_the_first_faulty_row_is_named_for_each_sequence():
    unary = np.zeros((3, 4, 2), np.float32)
    unary[0, 2:] = np.nan
    unary[2, 0, 1] = -np.inf
    assert candidate_fault(jnp.asarray(unary)).tolist() == [2, -1, 0]


@pytest.mark.parametrize("k", [1, 4, 12])
def test_candidates_descend_and_ties_go_to_the_lower_id(k):
    logits = np.random.default_rng(7).integers(-2, 3, (50, 12)).astype(np.float32)
    unary, cand = top_candidates(jnp.asarray(logits), k)
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(cand, expected)
    np.testing.assert_array_equal(unary, np.take_along_axis(logits, expected, -1))
    assert cand.dtype == jnp.int32
