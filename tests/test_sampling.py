"""Filters, penalties, rejection, residual and random numbers, one by one."""

import dataclasses
import json
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import arrays, assert_close
from targets import ORACLES

from dflash_jax import sampling
from dflash_jax.sampling import (
    Event,
    Filters,
    Penalties,
    SamplingParams,
    accept_len,
    filtered_probs,
    inverse_cdf,
    make_sampler,
    penalised,
    product_below,
    rejection_accept_len,
    residual,
    residual_sparse,
    shaped_logits,
)


def records(name):
    return json.loads((ORACLES / "sampling" / f"{name}.json").read_text(encoding="utf-8"))


GRID = records("probs")["grid"]
TIES = records("probs")["ties"]
filter_rows = jax.jit(jax.vmap(filtered_probs, in_axes=(0, None)))


def law(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Filtered probabilities of one row or many."""
    filters = Filters(
        jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p)
    )
    rows = jnp.asarray(logits, jnp.float32)
    return np.asarray(filter_rows(jnp.atleast_2d(rows), filters)).reshape(rows.shape)


def log(*probs):
    return np.log(np.asarray(probs, np.float64)).astype(np.float32)


# --- filters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GRID, ids=lambda c: f"case{c['i']}")
def test_recorded_filters(case):
    recorded = arrays("sampling", "probs.npz")
    options = {name: case[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    got = law(recorded["logits"], **options)
    expected = recorded[f"case{case['i']}_probs"]
    np.testing.assert_array_equal(got > 0, expected > 0)
    assert (got > 0).sum(-1).tolist() == case["kept"]
    for row, reference in zip(got, expected, strict=True):
        assert_close(row, reference)


@pytest.mark.parametrize("case", TIES, ids=lambda c: f"tie{c['i']}")
def test_recorded_ties_keep_the_lower_id(case):
    recorded = arrays("sampling", "probs.npz")
    expected = recorded[f"tie{case['i']}_probs"]
    got = law(recorded["tie_logits"], top_p=case["top_p"])
    assert np.flatnonzero(got).tolist() == case["kept_mass_ids"]
    np.testing.assert_array_equal(got > 0, expected > 0)
    assert_close(got, expected)


def test_temperature_comes_before_top_p():
    """Tempered first, token 0 alone makes .865; filtered first, two tokens would stay."""
    assert law([2, 1, 0, -1], temperature=0.5, top_p=0.85).tolist() == [1, 0, 0, 0]
    np.testing.assert_allclose(law([2, 1, 0, -1], top_p=0.85)[:2], [0.7311, 0.2689], atol=1e-4)


def test_top_p_works_on_what_top_k_left():
    """Of .4 .3 .2 .1, top-k 2 leaves 4/7 and 3/7: top-p .5 then keeps one, where .4 alone is less
    than .5 and would have kept two.
    """
    logits = log(0.4, 0.3, 0.2, 0.1)
    assert (law(logits, top_p=0.5) > 0).tolist() == [True, True, False, False]
    assert law(logits, top_k=2, top_p=0.5).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-6, 1), (0.5, 1), (0.5001, 2), (0.75, 2), (0.76, 3), (1.0, 4)]
)
def test_top_p_keeps_while_the_sum_before_is_below_it(top_p, kept):
    """Halves and eighths are exact in f32, so the boundary itself is tested."""
    got = law(log(0.5, 0.25, 0.125, 0.125), top_p=top_p)
    assert (got > 0).sum() == kept
    assert got.sum() == pytest.approx(1, abs=1e-6)


def test_min_p_is_relative_to_the_greatest_and_equality_stays():
    assert (law([1, 1 - np.log(2), 0, -9], min_p=0.4) > 0).tolist() == [True, True, False, False]
    assert law(log(0.6, 0.25, 0.15), min_p=0.5).tolist() == [1, 0, 0]
    # Equal probabilities have a ratio of exactly one, and so has min-p 1.
    np.testing.assert_allclose(law([3, 1, 3, 3], min_p=1), [1 / 3, 0, 1 / 3, 1 / 3], atol=1e-6)
    assert law([0, 0], min_p=1).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_top_k_keeps_exactly_k_and_the_lower_ids_of_a_tie(k):
    got = law([2, 7, 7, 1, 7, 7], top_k=k)
    expected = [np.isin(i, [1, 2, 4, 5, 0][:k]) for i in range(6)]
    assert (got > 0).tolist() == expected


@pytest.mark.parametrize("top_k", [0, 6, 7, 10**6])
def test_top_k_off(top_k):
    logits = np.random.default_rng(0).normal(size=6)
    np.testing.assert_allclose(law(logits, top_k=top_k), jax.nn.softmax(np.float32(logits)), 1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6, 1e-5])
def test_temperatures_at_the_threshold_are_greedy(temperature):
    """Whatever the other filters say; ties to the lower id."""
    assert law([1, 5, 5, 2], temperature).tolist() == [0, 1, 0, 0]
    assert law([1, 5, 5, 2], temperature, 3, 0.9, 0.1).tolist() == [0, 1, 0, 0]
    assert law([-1e30, 1e30, 0, 0], temperature).tolist() == [0, 1, 0, 0]


def test_just_above_the_threshold_is_a_law_without_nan():
    got = law([[1, 1.00001, 0, -50], [1e4, 0, -1e4, 9999]], 1.01e-5)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got.sum(-1), 1, atol=1e-6)
    assert got[0, 0] > 0.2


def test_tokens_that_may_never_be_chosen_have_probability_zero():
    never = np.finfo(np.float32).min
    for temperature in (0.0, 0.5, 1.0, 3.0):
        got = law([never, 1, never, 0], temperature)
        assert got[[0, 2]].tolist() == [0, 0]
        assert got.sum() == pytest.approx(1)
    assert law([-np.inf, 1, -np.inf, 0], top_k=3)[[0, 2]].tolist() == [0, 0]


def test_each_row_follows_its_own_filters():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 9)), jnp.float32)
    settings = [(0.0, 0, 1.0, 0.0), (0.7, 4, 1.0, 0.0), (1.5, 0, 0.6, 0.2)]
    columns = zip(*settings, strict=True)
    filters = Filters(*(jnp.asarray(c, d) for c, d in zip(columns, "fiff", strict=True)))
    together = jax.jit(jax.vmap(filtered_probs))(logits, filters)
    for b, options in enumerate(settings):
        alone = law(logits[b], *options)
        np.testing.assert_array_equal(together[b] > 0, alone > 0)
        np.testing.assert_allclose(together[b], alone, rtol=2e-7)  # two programs: an ulp


def test_a_filter_that_nobody_wants_costs_nothing():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=9), jnp.float32)
    bare = make_sampler([SamplingParams(temperature=0.7, seed=3)], 9, 9).filters
    bare = jax.tree.map(lambda x: x[0], bare)
    assert (bare.top_k, bare.top_p, bare.min_p) == (None, None, None)
    # Two programs: they may differ by some ulp.
    np.testing.assert_allclose(jax.jit(filtered_probs)(logits, bare), law(logits, 0.7), rtol=1e-6)
    loops = [str(jax.make_jaxpr(filtered_probs)(logits, f)).count("scan[") for f in (
        bare, bare.replace(top_p=jnp.float32(0.9)))]  # fmt: skip
    assert loops == [0, 1], "of a length known beforehand"


# --- penalties -----------------------------------------------------------------------------------

LOGITS = np.asarray([1.5, 0.8, 0.3, -0.2, -0.7, -1.2], np.float32)
PENALTIES = Penalties(jnp.float32(1.6), jnp.float32(0.8), jnp.float32(1.2), jnp.int32(-1))
EMPTY = [0.463291, 0.230063, 0.139540, 0.084636, 0.051334, 0.031136]
AFTER_0 = [0.062409, 0.401903, 0.243767, 0.147852, 0.089677, 0.054392]
AFTER_00 = [0.029040, 0.416207, 0.252442, 0.153114, 0.092868, 0.056328]
AFTER_11 = [0.593734, 0.013282, 0.178829, 0.108465, 0.065788, 0.039902]


@pytest.mark.parametrize(
    ("history", "expected"), [([], EMPTY), ([0], AFTER_0), ([0, 0], AFTER_00), ([1, 1], AFTER_11)]
)
def test_penalties_by_hand(history, expected):
    counts = jnp.asarray(np.bincount(history, minlength=6), jnp.float32)
    got = penalised(jnp.asarray(LOGITS), counts, PENALTIES)
    np.testing.assert_allclose(law(got), expected, atol=1e-6)


def rows_after(history, length, rows, last_n=-1, logits=LOGITS, **options):
    """The laws of a verify's rows, where `history[length:]` are this round's drafts."""
    given = {"repeat_penalty": 1.6, "frequency_penalty": 0.8, "presence_penalty": 1.2} | options
    params = SamplingParams(temperature=1, penalty_last_n=last_n, **given)
    sampler = make_sampler([params], len(logits), len(logits))
    padded = np.zeros((1, 12), np.int32)
    padded[0, : len(history)] = history
    everywhere = jnp.broadcast_to(jnp.asarray(logits), (1, rows, len(logits)))
    shaped = shaped_logits(sampler, everywhere, jnp.asarray(padded), jnp.asarray([length]))
    return law(shaped[0])


def test_each_row_sees_the_drafts_before_it():
    """History: anchor 5 (in no row of the table above), then drafts 0, 0, 3."""
    got = rows_after([0, 0, 3], 0, rows=3)
    np.testing.assert_allclose(got, [EMPTY, AFTER_0, AFTER_00], atol=1e-6)
    ahead = rows_after([1, 1, 4], 2, rows=1)
    np.testing.assert_allclose(ahead, [AFTER_11], atol=1e-6)


def test_the_penalty_window_moves_with_the_rows():
    """Window 2 over 1, 1 | 0, 0: rows see (1 1), (1 0), (0 0)."""
    got = rows_after([1, 1, 0, 0], 2, rows=3, last_n=2)
    np.testing.assert_allclose(got[[0, 2]], [AFTER_11, AFTER_00], atol=1e-6)
    counts = jnp.asarray([1, 1, 0, 0, 0, 0], jnp.float32)
    np.testing.assert_allclose(
        got[1], law(penalised(jnp.asarray(LOGITS), counts, PENALTIES)), atol=1e-6
    )


def test_a_window_longer_than_the_history_sees_all_of_it():
    everything = rows_after([1, 1, 0, 0], 2, rows=3, last_n=-1)
    np.testing.assert_array_equal(everything, rows_after([1, 1, 0, 0], 2, rows=3, last_n=9))


@pytest.mark.parametrize(
    ("history", "last_n", "expected"),
    [([0, 0], 1, AFTER_0), ([1, 0, 0], 2, AFTER_00), ([0, 1, 1], 2, AFTER_11)],
)
def test_what_left_the_window_is_not_penalised(history, last_n, expected):
    got = rows_after(history, len(history), rows=1, last_n=last_n)
    np.testing.assert_allclose(got, [expected], atol=1e-6)


def test_a_negative_logit_is_multiplied_and_zero_stays():
    only_repeat = dataclasses.replace(
        PENALTIES, frequency=jnp.float32(0), presence=jnp.float32(0), repeat=jnp.float32(2)
    )
    got = penalised(jnp.asarray([4.0, -4.0, 0.0, 4.0]), jnp.asarray([1.0, 3, 1, 0]), only_repeat)
    assert got.tolist() == [2, -8, 0, 4]


def test_frequency_counts_and_presence_does_not():
    base = dataclasses.replace(PENALTIES, repeat=jnp.float32(1))
    got = penalised(jnp.zeros(3), jnp.asarray([0.0, 1, 4]), base)
    np.testing.assert_allclose(got, [0, -2.0, -4.4], atol=1e-6)


def test_the_bias_is_added_after_the_penalties():
    """0.8 / 1.6 + 3: were it added first, the sum would be divided."""
    got = rows_after(
        [1], 1, rows=1, frequency_penalty=0, presence_penalty=0, logit_bias={1: 3.0, 4: -np.inf}
    )
    biased = np.asarray([1.5, 0.5 + 3, 0.3, -0.2, -np.inf, -1.2])
    np.testing.assert_allclose(got[0], law(biased), atol=1e-6)
    assert got[0, 4] == 0


def test_sequences_have_their_own_penalties_and_biases():
    params = [
        SamplingParams(temperature=1, repeat_penalty=1.6, logit_bias={2: 1.0}),
        SamplingParams(temperature=1),
        SamplingParams(temperature=1, repeat_penalty=1.6, penalty_last_n=0),
    ]
    sampler = make_sampler(params, 6, 6)
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (3, 2, 6))
    history = jnp.zeros((3, 9), jnp.int32)
    got = np.asarray(shaped_logits(sampler, logits, history, jnp.asarray([4, 4, 4])))
    np.testing.assert_allclose(got[0, :, 0], 1.5 / 1.6, rtol=1e-6)
    np.testing.assert_allclose(got[0, :, 2], 1.3, rtol=1e-6)
    for b in (1, 2):
        np.testing.assert_array_equal(got[b], logits[b])


# --- acceptance ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "q", "u", "expected"),
    [
        ([0.5, 0.5], [0.5, 0.5], [0.9, 0.9], 2),
        ([0.25], [0.5], [0.5], 0),
        ([1e-6], [0], [0.999], 1),
        ([0.9, 0, 0.9], [0.1, 0.9, 0.1], [0.5, 0.5, 0.5], 1),
    ],
)
def test_acceptance_by_hand(p, q, u, expected):
    assert rejection_accept_len(p, q, u) == expected
    assert int(accept_len(*(jnp.asarray(x, jnp.float32) for x in (p, q, u)))) == expected


@pytest.mark.parametrize(
    ("index", "label"),
    list(enumerate(records("accept")["labels"])),
    ids=records("accept")["labels"],
)
def test_recorded_acceptance(index, label):
    recorded = arrays("sampling", "accept.npz")
    p, q, u = (recorded[name][index] for name in "pqu")
    expected = recorded["accept_len"][index]
    assert rejection_accept_len(p, q, u) == expected
    assert int(jax.jit(accept_len)(p, q, u)) == expected


def bits(*patterns):
    return np.asarray(patterns, np.uint32).view(np.float32)


def near_ties(count, seed, tiny):
    """(u, q, p) with p within two steps of the rounded product; `tiny` reaches subnormals."""
    rng = np.random.default_rng(seed)
    u, q = rng.uniform(size=(2, count)).astype(np.float32)
    scale = np.exp2(rng.integers(-149 if tiny else -30, 0, count)).astype(np.float32)
    q = q * scale
    product = (u.astype(np.float64) * q.astype(np.float64)).astype(np.float32)
    near = product.view(np.int32) + rng.integers(-2, 3, count)
    return u, q, np.maximum(near, 0).astype(np.int32).view(np.float32)


@pytest.mark.parametrize("tiny", [False, True], ids=["normal", "subnormal"])
def test_exact_comparison_of_near_ties(tiny):
    """200,000 of them, against f64, in which every product of two f32 is exact."""
    u, q, p = near_ties(100_000, 7, tiny)
    expected = u.astype(np.float64) * q.astype(np.float64) < p.astype(np.float64)
    np.testing.assert_array_equal(jax.jit(product_below)(u, q, p), expected)
    assert 0.2 < expected.mean() < 0.8
    if tiny:
        assert ((p < np.finfo(np.float32).tiny) & (p > 0)).sum() > 5000
    else:  # the cases that f32 would get wrong are among them
        assert ((u * q < p) != expected).sum() > 1000


def test_exact_comparison_at_the_edges():
    least, most, step = bits(1), np.float32(1), np.float32(1 - 2**-24)
    zero, two_least = np.float32(0), bits(2)
    cases = [
        (zero, zero, zero, False),
        (zero, most, zero, False),
        (zero, most, least, True),
        (most, most, most, False),
        (step, most, most, True),
        (most, least, least, False),
        (step, least, least, True),
        (np.float32(0.5), two_least, least, False),
        (np.float32(0.5), least, zero, False),
        (np.float32(0.5), least, least, True),
        (bits(0x3F000001), two_least, least, False),
        (least, least, least, True),
        (least, least, zero, False),
        (np.float32(2**-75), np.float32(2**-75), least, True),
        (np.float32(2**-74), np.float32(2**-75), least, False),
    ]
    columns = (np.asarray([np.squeeze(c[i]) for c in cases], np.float32) for i in range(3))
    assert product_below(*columns).tolist() == [c[3] for c in cases]


def test_all_pairs_of_awkward_numbers():
    """Mantissas of all ones, powers of two, their neighbours, subnormals: every triple."""
    awkward = bits(
        0, 1, 2, 3, 0x7FFFFF, 0x800000, 0x800001, 0xFFFFFF, 0x1000000, 0x33800000, 0x33FFFFFF,
        0x3EFFFFFF, 0x3F000000, 0x3F000001, 0x3F3504F3, 0x3F3504F4, 0x3F7FFFFF, 0x3F800000,
    )  # fmt: skip
    u, q, p = (x.ravel() for x in np.meshgrid(awkward, awkward, awkward))
    expected = u.astype(np.float64) * q.astype(np.float64) < p.astype(np.float64)
    np.testing.assert_array_equal(jax.jit(product_below)(u, q, p), expected)


def test_in_loop_lengths_equal_the_hosts_on_near_ties():
    u, q, p = (x.reshape(-1, 7) for x in near_ties(7 * 500, 3, tiny=False))
    got = jax.jit(accept_len)(p, q, u)
    assert np.asarray(got).tolist() == [rejection_accept_len(*row) for row in zip(p, q, u)]  # noqa: B905
    assert len(set(np.asarray(got).tolist())) > 4


# --- residual ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", range(6))
def test_recorded_residuals(row):
    recorded = {name: values[row] for name, values in arrays("sampling", "residual.npz").items()}
    p = jnp.asarray(recorded["p"])
    dense = residual(p, jnp.asarray(recorded["q_dense"]))
    assert_close(dense, recorded["residual_dense"])
    ids, q = jnp.asarray(recorded["candidate_ids"]), jnp.asarray(recorded["q_sparse"])
    assert_close(residual_sparse(p, ids, q), recorded["residual_sparse"])
    for got, degenerate in zip((dense, residual_sparse(p, ids, q)), recorded["degenerate"],
                               strict=True):  # fmt: skip
        assert np.array_equal(got, p) == bool(degenerate)


def test_the_residual_of_a_certain_draft_is_p_without_it():
    """p = .5 .3 .2, draft 0: after the rejection 0 .6 .4."""
    p = jnp.asarray([0.5, 0.3, 0.2])
    np.testing.assert_allclose(residual(p, jnp.eye(3)[0]), [0, 0.6, 0.4], atol=1e-6)
    sparse = residual_sparse(p, jnp.asarray([0]), jnp.ones(1))
    np.testing.assert_allclose(sparse, [0, 0.6, 0.4], atol=1e-6)


def test_nothing_left_over_gives_p_itself():
    p = jnp.asarray([0.25, 0.75, 0.0])
    np.testing.assert_array_equal(residual(p, p), p)
    np.testing.assert_array_equal(residual(p, jnp.asarray([1.0, 1.0, 1.0])), p)


def test_a_candidate_listed_twice_counts_twice():
    p = jnp.asarray([0.5, 0.5, 0.0])
    got = residual_sparse(p, jnp.asarray([0, 0, 2]), jnp.asarray([0.2, 0.2, 0.6]))
    np.testing.assert_allclose(got, [1 / 6, 5 / 6, 0], atol=1e-6)


# --- draws ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("u", "expected"), [(0, 1), (0.2499, 1), (0.25, 2), (0.4999, 2), (0.5, 4), (0.9999, 4)]
)
def test_a_draw_is_the_first_index_above_u(u, expected):
    """In id order, strictly, and never an id without probability."""
    probs = jnp.asarray([0, 0.25, 0.25, 0, 0.5, 0])
    assert int(inverse_cdf(probs, jnp.float32(u))) == expected


def test_a_residue_falls_to_the_likeliest():
    probs = jnp.asarray([0.2, 0.5, 0.29])
    assert int(inverse_cdf(probs, jnp.float32(0.9999))) == 1


def test_a_draw_never_leaves_the_support():
    """A vocabulary of 49,152 of which most is filtered out: a cdf summed in parallel in f32 rises
    by a rounding at places of probability zero.
    """
    rng = np.random.default_rng(0)
    probs = rng.exponential(size=49_152) ** 3 * (rng.uniform(size=49_152) < 0.3)
    probs = jnp.asarray(probs / probs.sum(), jnp.float32)
    cdf = jnp.cumsum(probs)
    rises = (jnp.diff(cdf) > 0) & (probs[1:] == 0)
    places = np.flatnonzero(rises)
    drawn = jax.vmap(inverse_cdf, in_axes=(None, 0))(probs, cdf[:-1][places[:200]])
    assert len(places) > 0
    assert (probs[drawn] > 0).all()


@pytest.mark.parametrize("p", [0.5, 0.9])
def test_draws_are_not_the_argmax(p):
    """p = .5 .5 at T 1: in 1,000 draws both are seen, each 450 to 550 times."""
    u = sampling_uniforms("bonus", 1000, seed=3)
    drawn = jax.vmap(inverse_cdf, in_axes=(None, 0))(jnp.asarray([p, 1 - p], jnp.float32), u)
    assert abs((np.asarray(drawn) == 0).sum() - 1000 * p) < 50


# --- random numbers ------------------------------------------------------------------------------


def sampling_uniforms(event, count, seed=0, sequence=0):
    sampler = make_sampler([SamplingParams(temperature=1, seed=seed, sequence=sequence)], 4, 4)
    return np.asarray(sampler.uniforms(event, jnp.arange(count)[None])[0])


EVENTS = get_args(Event)


def test_events_of_one_position_share_no_draw():
    """Correlation of any two events' uniforms over 10,000 positions: below 0.03."""
    drawn = np.stack([sampling_uniforms(event, 10_000) for event in EVENTS])
    off_diagonal = np.corrcoef(drawn) - np.eye(len(EVENTS))
    assert np.abs(off_diagonal).max() < 0.03
    shifted = np.corrcoef(drawn[:, 1:], drawn[:, :-1])[:4, 4:]  # a position against the next one
    assert np.abs(shifted).max() < 0.03
    assert (drawn >= 0).all()
    assert (drawn < 1).all()
    assert len(EVENTS) == 4


def test_neighbouring_seeds_and_sequences_are_independent():
    streams = [(0, 0), (1, 0), (0, 1), (1, 1), (2**32 - 1, 2**32 - 1)]
    drawn = np.stack([sampling_uniforms("draft", 10_000, *stream) for stream in streams])
    assert np.abs(np.corrcoef(drawn) - np.eye(len(streams))).max() < 0.04


def test_uniforms_are_uniform():
    drawn = sampling_uniforms("accept", 20_000)
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees, p 1e-3


def test_a_draw_is_a_function_of_seed_sequence_event_and_position():
    params = [
        SamplingParams(temperature=1, seed=s, sequence=q) for s, q in [(3, 0), (0, 7), (9, 9)]
    ]
    batch = make_sampler(params, 4, 4)
    positions = jnp.asarray([[5, 6], [0, 100], [2, 3]])
    together = batch.uniforms("residual", positions)
    for b, one in enumerate(params):
        alone = make_sampler([one], 4, 4).uniforms("residual", positions[b : b + 1])
        np.testing.assert_array_equal(together[b], alone[0])
    single = sampling.uniform(jnp.uint32(3), jnp.uint32(0), "residual", jnp.int32(6))
    assert single == together[0, 1]


# --- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", 2**31),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repeat_penalty", 0),
        ("repeat_penalty", -1),
        ("repeat_penalty", 1e-300),
        ("repeat_penalty", 1e300),
        ("temperature", 1e38),
        ("frequency_penalty", -1e300),
        ("presence_penalty", 1e39),
        ("logit_bias", {3: 1e39}),
        ("logit_bias", {True: 1.0}),
        ("frequency_penalty", float("nan")),
        ("presence_penalty", float("inf")),
        ("penalty_last_n", -2),
        ("penalty_last_n", 0.5),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", 1.5),
        ("sequence", -1),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {3: float("inf")}),
        ("logit_bias", {3: "much"}),
        ("logit_bias", {"3": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", [1.0, 2.0]),
    ],
)
def test_out_of_range_fields_are_refused_by_name_and_value(field, value):
    with pytest.raises(ValueError, match=f"^{field}: expected .*, found "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["typical_p", "mirostat", "best_of", "top_a"])
def test_fields_that_are_not_supported_are_refused_by_name(field):
    with pytest.raises(TypeError, match=field):
        SamplingParams(**{field: 1})


@pytest.mark.parametrize(
    ("given", "greedy"),
    [({}, True), ({"temperature": 1e-5}, True), ({"temperature": 1.0001e-5}, False)],
)
def test_one_threshold_says_what_is_greedy(given, greedy):
    params = SamplingParams(**given)
    assert params.greedy == greedy
    filters = make_sampler([params], 4, 4).filters
    probs = filtered_probs(jnp.asarray([1.0, 1.0, 0, 0]), jax.tree.map(lambda x: x[0], filters))
    assert (probs.tolist() == [1, 0, 0, 0]) == greedy


@pytest.mark.parametrize(
    ("given", "penalised"),
    [
        ({}, False),
        ({"repeat_penalty": 1.1}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"presence_penalty": 0.1}, True),
        ({"presence_penalty": 0.1, "penalty_last_n": 0}, False),
    ],
)
def test_penalties_that_do_nothing_need_no_history(given, penalised):
    params = SamplingParams(temperature=1, **given)
    assert params.penalised == penalised
    assert (make_sampler([params], 4, 4).penalties is None) != penalised


@pytest.mark.parametrize(
    "given",
    [
        {"top_p": 1e-50},
        {"top_p": 1e-320, "min_p": 1e-320},
        {"temperature": 1e20},
        {"temperature": 1.1e-5, "repeat_penalty": 1e-20},
        {"temperature": 1.1e-5, "repeat_penalty": 1e20},
        {"frequency_penalty": 1e20, "presence_penalty": -1e20},
        {"logit_bias": {0: -1e300, 1: 1e20}},
    ],
    ids=str,
)
def test_extreme_numbers_leave_a_law_over_real_tokens(given):
    """Vocabulary 3 of 4 rows; the history holds tokens 0 and 1."""
    sampler = make_sampler([SamplingParams(**{"temperature": 1.0} | given)], 3, 4)
    logits = jnp.array([30.0, 0.0, -30.0, jnp.finfo(jnp.float32).min])[None, None]
    shaped = shaped_logits(sampler, logits, jnp.array([[0, 1, 1]]), jnp.array([3]))[0, 0]
    probs = filtered_probs(shaped, jax.tree.map(lambda x: x[0], sampler.filters))
    assert float(probs.sum()) == pytest.approx(1)
    assert probs[3] == 0


def test_the_least_top_p_keeps_the_best_token():
    filters = make_sampler([SamplingParams(temperature=1.0, top_p=1e-50)], 3, 3).filters
    probs = filtered_probs(jnp.array([1.0, 2.0, 0.0]), jax.tree.map(lambda x: x[0], filters))
    assert probs.tolist() == [0, 1, 0]


def test_a_bias_that_forbids_every_token_is_refused():
    whole = SamplingParams(logit_bias=dict.fromkeys(range(4), -np.inf))
    part = SamplingParams(logit_bias=dict.fromkeys(range(3), -np.inf))
    assert make_sampler([part], 4, 8).bias is not None
    with pytest.raises(
        ValueError, match=r"logit_bias: expected a token that may .* all 4 forbidden"
    ):
        make_sampler([part, whole], 4, 8)


def test_a_bias_outside_the_vocabulary_is_refused():
    params = SamplingParams(temperature=1, logit_bias={4: 1.0})
    with pytest.raises(ValueError, match=r"logit_bias: expected ids in 0\.\.3, found 4"):
        make_sampler([params], 4, 8)


def test_the_bias_is_as_wide_as_the_targets_padded_logits():
    sampler = make_sampler([SamplingParams(temperature=1, logit_bias={3: -np.inf})], 4, 8)
    assert sampler.bias.tolist() == [[0, 0, 0, -np.inf, 0, 0, 0, 0]]


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), 0.5])
def test_numpy_numbers_are_numbers(number):
    assert SamplingParams(temperature=number).temperature == 0.5
    assert SamplingParams(top_k=np.int32(5), seed=np.uint32(7)).seed == 7
