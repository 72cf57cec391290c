"""Verify-window policies: the tables, the defaults, and the widths of real rounds."""

import dataclasses
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import trained
from targets import mistaken_draft, table_target

from dflash_jax import SpecSession, generate, measure_costs
from dflash_jax.round import propose_block
from dflash_jax.window import (
    DSparkVtPolicy,
    Meter,
    PolicyKind,
    choose_vt,
    cost_widths,
    dspark_confidence_vt,
    dspark_slot_confidence_vt,
    ladder_vt,
    metered,
    resolve_policy,
)

TEXT = list(b"def add(first, second):\n    return first + second\n\n\ndef sub(")
POLICIES = [
    DSparkVtPolicy("fixed"),
    DSparkVtPolicy("ladder"),
    DSparkVtPolicy("confidence", 0.05),
    DSparkVtPolicy("confidence-slot", 0.3),
]


def raws(*probabilities):
    """Pre-sigmoid scores of the given confidences."""
    p = np.asarray(probabilities, np.float64)
    return jnp.asarray(np.log(p / (1 - p)), jnp.float32)


# --- tables --------------------------------------------------------------------------------------

FALLING = [0.9, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9]
DIP = [0.9, 0.9, 0.3, 0.9, 0.9, 0.9, 0.9]
FORMS = {"survival": dspark_confidence_vt, "slot": dspark_slot_confidence_vt}


@pytest.mark.parametrize(
    ("slots", "form", "tau", "cap", "vt"),
    [
        (FALLING, "survival", 0.5, 8, 6),
        (FALLING, "survival", 0.7, 8, 3),
        (FALLING, "survival", 0.05, 8, 8),
        (FALLING, "slot", 0.5, 8, 8),
        (DIP, "slot", 0.5, 8, 3),
        (DIP, "slot", 0.95, 8, 2),
        ([0.1] * 3, "survival", 0.5, 8, 2),
        ([0.1] * 3, "slot", 0.5, 8, 2),
        ([0.99] * 7, "survival", 0.5, 5, 5),
        ([0.99] * 7, "slot", 0.5, 5, 5),
        ([], "survival", 0.5, 8, 2),
        ([], "slot", 0.5, 8, 2),
        ([0.99] * 7, "slot", 0.5, 1, 2),
        ([0.99] * 7, "survival", 0.5, 2, 2),
    ],
)
def test_confidence_widths(slots, form, tau, cap, vt):
    scores = raws(*slots)
    for compiled in (False, True):
        function = jax.jit(FORMS[form], static_argnums=2) if compiled else FORMS[form]
        width = function(scores, tau, cap)
        assert width == vt
        assert width.dtype == jnp.int32


@pytest.mark.parametrize("form", FORMS)
def test_equality_keeps_the_slot(form):
    """sigmoid(0) is one half exactly, and so are its powers."""
    halves = jnp.zeros(3)
    assert FORMS[form](halves, 0.5, 8) == (2 if form == "survival" else 4)
    assert FORMS["survival"](halves, 0.25, 8) == 3
    assert FORMS["survival"](halves, 0.125, 8) == 4


@pytest.mark.parametrize("form", FORMS)
def test_thresholds_near_the_ends(form):
    """Near 0 the whole block, near 1 the least width."""
    scores = raws(*[0.7] * 7)
    assert FORMS[form](scores, 1e-6, 8) == 8
    assert FORMS[form](scores, 1 - 1e-6, 8) == 2


@pytest.mark.parametrize("form", FORMS)
def test_extreme_scores_are_certain(form):
    assert FORMS[form](jnp.asarray([1e30, 1e30, -1e30, 1e30]), 0.5, 8) == 3
    assert FORMS[form](jnp.asarray([jnp.inf, -jnp.inf]), 0.5, 8) == 2


def test_the_ladder_climbs_two_rows_past_the_last_acceptance():
    assert [int(ladder_vt(jnp.int32(m), 8)) for m in range(8)] == [3, 3, 4, 5, 6, 7, 8, 8]
    assert [int(ladder_vt(jnp.int32(m), 2)) for m in range(2)] == [2, 2]
    assert [int(ladder_vt(jnp.int32(m), 3)) for m in range(3)] == [3, 3, 3]


def test_each_policy_reads_what_it_should():
    scores = raws(0.9, 0.9, 0.3, 0.9, 0.9, 0.9, 0.9)

    def vt(kind, accepted=1, tau=0.5, scores=scores):
        return int(choose_vt(DSparkVtPolicy(kind, tau), scores, jnp.int32(accepted), 8))

    assert [vt("fixed", m) for m in (-1, 0, 7)] == [8, 8, 8]
    assert [vt("ladder", m) for m in (-1, 0, 1, 2, 7)] == [8, 3, 3, 4, 8]  # the cap comes first
    assert vt("confidence", tau=0.2) == 5  # .9 .81 .243 .2187 | .197
    assert vt("confidence-slot", tau=0.2) == 8
    assert vt("fixed", scores=None) == vt("ladder", 6, scores=None) == 8


# --- which policy ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_dspark", "has_confidence", "kind", "tau"),
    [
        (True, True, "confidence-slot", 0.5),
        (True, False, "ladder", 0.5),
        (False, False, "fixed", 0.5),
    ],
)
def test_defaults(is_dspark, has_confidence, kind, tau):
    policy = resolve_policy(None, is_dspark=is_dspark, has_confidence=has_confidence)
    assert policy == DSparkVtPolicy(kind, tau)


@pytest.mark.parametrize("kind", ["confidence", "confidence-slot"])
def test_a_confidence_policy_needs_a_head(kind):
    policy = DSparkVtPolicy(kind, 0.5)
    assert policy.needs_confidence
    assert resolve_policy(policy, is_dspark=True, has_confidence=True) is policy
    with pytest.raises(ValueError, match=f"window policy '{kind}': expected a drafter with a conf"):
        resolve_policy(policy, is_dspark=True, has_confidence=False)
    for family in ("dflash", "dflash2"):
        with pytest.raises(ValueError, match=f"window policy '{kind}'"):
            SpecSession(*trained(family), policy=policy)


@pytest.mark.parametrize("kind", ["fixed", "ladder"])
@pytest.mark.parametrize("is_dspark", [False, True])
def test_the_other_policies_suit_every_family(kind, is_dspark):
    policy = DSparkVtPolicy(kind)
    assert resolve_policy(policy, is_dspark=is_dspark, has_confidence=False) is policy


@pytest.mark.parametrize("tau", [0, 1, -0.5, 2, float("nan"), float("inf"), "0.5", None, True])
def test_tau_lies_between_0_and_1(tau):
    with pytest.raises(ValueError, match="tau: expected a number between 0 and 1, found"):
        DSparkVtPolicy("confidence", tau)


@pytest.mark.parametrize("policy", ["fixed", "confidence-slot", 5, DSparkVtPolicy])
def test_a_policy_is_a_policy(policy):
    with pytest.raises(ValueError, match="policy: expected a DSparkVtPolicy, found "):
        resolve_policy(policy, is_dspark=True, has_confidence=True)


@pytest.mark.parametrize("kind", ["slot", "Fixed", "", None])
def test_an_unknown_policy_is_refused(kind):
    with pytest.raises(ValueError, match="window policy: expected one of fixed, ladder, conf"):
        DSparkVtPolicy(kind)


# --- real rounds ----------------------------------------------------------------------------------

_propose_block = jax.jit(propose_block, static_argnames=("plan",))


def rounds(session):
    """Step by step: (the round's confidences, width, drafts accepted), one sequence."""
    taken = []
    while not session.done:
        proposal, _ = _propose_block(session.target, session.draft, session.state, session.plan)
        session.burst(1)
        taken.append((proposal.raws[0], int(session.state.accepted[0])))
    widths = session.results()[0].verify_widths
    return [(*step, width) for step, width in zip(taken, widths, strict=True)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.kind)
def test_the_width_of_a_round_follows_from_that_rounds_confidences(policy):
    """Of this round, and of the last one's acceptance for the ladder: never of its own verify."""
    session = SpecSession(*trained("dspark"), policy=policy)
    session.open([TEXT], 60)
    cap, before, seen = session.plan.verify_width, -1, set()
    for scores, accepted, width in rounds(session):
        expected = int(choose_vt(policy, scores, jnp.int32(before), cap))
        assert width == expected
        assert accepted <= width - 1
        before, seen = accepted, seen | {width}
    assert cap == 9
    assert (len(seen) > 1) == (policy.kind != "fixed")


@pytest.mark.parametrize("policy", POLICIES[1::2], ids=lambda p: p.kind)
def test_no_policy_and_no_choice_of_compiled_widths_changes_a_token(policy):
    target, draft = trained("dspark")
    widest, narrow = (
        generate(target, draft, TEXT, 60, policy=policy, widths=widths) for widths in (None, (3, 5))
    )
    assert widest.token_ids == narrow.token_ids == generate(target, None, TEXT, 60).token_ids
    assert widest.verify_widths == narrow.verify_widths
    assert widest.acceptance_lengths == narrow.acceptance_lengths
    assert narrow.drafted == sum(width - 1 for width in narrow.verify_widths)
    assert narrow.accepted == sum(gain - 1 for gain in narrow.acceptance_lengths)


def test_each_row_of_a_batch_keeps_its_own_width():
    target, draft = trained("dspark")
    prompts, budgets = [TEXT, TEXT[5:30], TEXT[:9]], [50, 20, 35]
    policy = POLICIES[3]
    together = generate(target, draft, prompts, budgets, policy=policy, widths=(3, 5))
    for prompt, budget, out in zip(prompts, budgets, together, strict=True):
        alone = generate(target, draft, prompt, budget, policy=policy)
        assert out.token_ids == alone.token_ids
        assert out.verify_widths == alone.verify_widths
    assert len({tuple(out.verify_widths[:7]) for out in together}) == 3


def test_acceptance_by_slot_counts_the_rounds_that_verified_it():
    out = generate(*trained("dspark"), TEXT, 60, policy=POLICIES[3])
    rounds = list(zip(out.acceptance_lengths, out.verify_widths, strict=True))
    assert len(out.slot_acceptance) == max(out.verify_widths) - 1
    for slot, rate in enumerate(out.slot_acceptance, start=1):
        verified = [gain for gain, width in rounds if width > slot]
        assert rate == sum(gain > slot for gain in verified) / len(verified)
    assert 0 < out.slot_acceptance[0] < 1
    assert generate(trained("dspark")[0], None, TEXT, 3).slot_acceptance == []


@pytest.mark.parametrize("policy", [POLICIES[1], POLICIES[3]], ids=lambda p: p.kind)
def test_a_lower_cap_bounds_every_policy(policy):
    out = generate(*trained("dspark"), TEXT, 40, policy=policy, verify_width=4)
    assert max(out.verify_widths) == 4
    assert max(out.acceptance_lengths) == 4


def test_thresholds_near_the_ends_of_real_rounds():
    target, draft = trained("dspark")
    timid = generate(target, draft, TEXT, 30, policy=DSparkVtPolicy("confidence-slot", 1 - 1e-6))
    bold = generate(target, draft, TEXT, 30, policy=DSparkVtPolicy("confidence", 1e-12))
    assert set(timid.verify_widths) == {2}
    assert set(bold.verify_widths) == {9}
    assert timid.token_ids == bold.token_ids


def test_the_last_rows_of_the_context_bound_the_width():
    target, draft = trained("dspark")
    out = generate(target, draft, TEXT, 60, capacity=len(TEXT) + 20, policy=POLICIES[0])
    assert out.finish_reason == "capacity"
    held = len(TEXT) + np.cumsum([0, *out.acceptance_lengths[:-1]])
    room = len(TEXT) + 20 - held
    assert out.verify_widths == np.minimum(9, room).tolist()


@pytest.mark.parametrize("family", ["dflash", "dflash2"])
def test_the_ladder_works_for_the_other_families(family):
    target, draft = trained(family)
    out = generate(target, draft, TEXT, 60, policy=DSparkVtPolicy("ladder"))
    assert out.token_ids == generate(target, None, TEXT, 60).token_ids
    accepted = [gain - 1 for gain in out.acceptance_lengths]
    assert out.verify_widths[0] == 8
    # The last gain is cut at the budget, so that its width alone is known.
    expected = [min(max(m + 2, 3), 8) for m in accepted[:-1]]
    assert out.verify_widths[1:] == expected


def test_policies_hash_as_static_arguments():
    assert {p.kind for p in POLICIES} | {"cost"} == set(get_args(PolicyKind))
    assert hash(POLICIES[2]) == hash(dataclasses.replace(POLICIES[2]))


# --- what pays -----------------------------------------------------------------------------------

FOLLOWS = [(token + 1) % 32 for token in range(32)]
COST = DSparkVtPolicy("cost")


WIDTHS = (1, 2, 4, 8)


def meter(costs, kept=0.0, tried=0.0, batch=1):
    """After `tried` drafts each; costs as in `Costs`, or seconds of `WIDTHS`."""
    costs = costs if isinstance(costs, dict) else dict(zip(WIDTHS, costs, strict=False))
    tried, kept = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), (batch,)) for x in (tried, kept))
    return Meter.of(costs, batch).replace(tried=tried, kept=kept)


def chosen(known, held=(0,), live=None, shared=False, widths=WIDTHS):
    live = jnp.ones(len(held), bool) if live is None else jnp.asarray(live)
    return cost_widths(known, widths, jnp.asarray(held, jnp.int32), live, shared=shared).tolist()


@pytest.mark.parametrize(
    ("accepted", "seconds", "width"),
    [
        (0.5, (1, 5, 5, 5), 1),  # two tokens a round for the price of five
        (0.0, (1, 1.1, 1.1, 1.1), 1),
        (0.5, (1, 1.1, 1.2, 1.3), 4),  # 1.5, 1.875, 1.99 tokens a round
        (0.5, (1, 1.1, 1.2, 1.2), 8),
        (0.5, (1, 1.1, 1.5, 2.0), 2),
        (0.99, (1, 3, 4, 5), 8),
        (0.99, (1, 3, 4, 9), 1),
    ],
)
def test_the_width_of_the_most_tokens_a_second(accepted, seconds, width):
    assert chosen(meter(seconds, kept=1e6 * accepted, tried=1e6)) == [width]


def test_a_batch_decides_together_or_each_for_itself():
    both = meter({1: 1.0, 2: 1.5, 8: 2.0}, kept=[0, 9e5, 0], tried=1e6, batch=3)
    choose = partial(chosen, both, (7, 7, 7), widths=(1, 2, 8))
    assert choose() == [1, 8, 1]
    assert choose(shared=True) == [8, 8, 8]
    # A frozen row has no say.
    assert choose(live=[False, True, False], shared=True) == [8, 8, 8]
    assert choose(live=[True, False, True], shared=True) == [1, 1, 1]


def test_costs_lie_on_lines_between_the_contexts_that_were_measured():
    seconds = {200: {1: 3.0, 4: 9.0}, 100: {1: 1.0, 4: 5.0}}
    prices = Meter.of(seconds, 5).price(jnp.asarray([0, 100, 150, 200, 999]))
    np.testing.assert_allclose(prices, [[1, 5], [1, 5], [2, 7], [3, 9], [3, 9]], 1e-6)
    flat = Meter.of({1: 1.0, 4: 5.0}, 2).price(jnp.asarray([0, 999]))
    np.testing.assert_allclose(flat, [[1, 5], [1, 5]], 1e-6)


def test_each_sequence_goes_by_its_own_context_and_a_greedy_batch_by_the_mean():
    """A draft of 3, all of it accepted, pays below 130 rows of context."""
    known = meter({30: {1: 1.0, 4: 2.0}, 230: {1: 1.0, 4: 6.0}}, kept=1e6, tried=1e6, batch=3)
    choose = partial(chosen, known, (20, 110, 260), widths=(1, 4))
    assert choose() == [4, 4, 1]
    assert choose(shared=True) == [1, 1, 1]  # 130 rows on average
    assert choose(live=[True, True, False], shared=True) == [4, 4, 4]
    assert chosen(known, (10**9,) * 3, widths=(1, 4), shared=True) == [1, 1, 1]


def test_the_meter_counts_the_drafts_that_were_judged():
    known = meter((1, 1), kept=3, tried=10, batch=4)
    accepted, width = jnp.asarray([2, 3, 0, 1]), jnp.asarray([4, 4, 1, 4])
    after = metered(known, accepted, width, jnp.asarray([True, True, True, False]))
    fade, idle = np.float32(0.95), np.float32(0.99)
    np.testing.assert_allclose(after.tried, [10 * fade + 3, 10 * fade + 3, 10 * idle, 10], 1e-6)
    np.testing.assert_allclose(after.kept, [3 * fade + 2, 3 * fade + 3, 3 * idle, 3], 1e-6)


def test_a_drafter_is_turned_off_where_it_does_not_pay_and_on_again_where_it_does():
    """Wrong for the first 120 tokens, right after them; no token changes."""
    size = 256
    target = table_target([(t + 1) % size for t in range(size)])
    draft = mistaken_draft(target, range(120))
    costs = {1: 1.0, 2: 1.6, 4: 2.0}
    out = generate(target, draft, [255], 250, policy=COST, costs=costs)
    assert out.token_ids == list(range(250))
    position, widths = np.cumsum([1, *out.acceptance_lengths[:-1]]), np.asarray(out.verify_widths)
    bad, good = widths[position < 110], widths[position > 190]
    assert bad[0] == 4
    assert 0.8 < np.mean(bad == 1) < 1
    assert any(bad[20:] > 1)  # it is tried again
    assert set(good) == {4}
    dear = {1: 1.0, 2: 5.0, 4: 5.0}
    never = generate(target, draft, [255], 200, policy=COST, costs=dear)
    assert set(never.verify_widths) == {1}


def test_no_decision_changes_a_token():
    """The drafter is fed while it rests: drafting again, it drafts as if it never had."""
    target, draft = trained("dspark")
    prompts, widest = [TEXT, TEXT[:9]], 9
    plain = generate(target, None, prompts, 60)
    costs = {1: 1.0, widest: 1.7}
    session = SpecSession(target, draft, policy=COST, costs=costs, check=True)
    session.open(prompts, 60)
    while not session.done:
        session.burst(7)  # with `check`, that both caches hold the same rows
    outs = session.results()
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert {1, widest} <= {width for out in outs for width in out.verify_widths}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": {1: 1.0, 4: 2.0}}, "costs: expected with the policy 'cost', found 'fixed'"),
        ({"policy": COST, "costs": {4: 1.0}}, r"costs: expected seconds for \[1, 4\], found \[4\]"),
        ({"policy": COST, "costs": {1: 1.0, 4: 0}}, "costs: expected seconds above 0, found 0"),
        ({"policy": COST, "costs": 3}, r"costs: expected"),
        (
            {"policy": COST, "costs": {64: {1: 1.0, 4: 2.0}, 128: {1: 1.0}}},
            r"costs: expected seconds for \[1, 4\], found \[1\]",
        ),
        ({"policy": COST, "costs": {64: {1: 1.0, 4: 2.0}, 4: 2.0}}, "costs: expected seconds for"),
        ({"policy": COST, "costs": {-1: {1: 1.0, 4: 2.0}}}, "costs: expected contexts .* found -1"),
        ({"policy": COST, "widths": [5]}, r"widths: expected 1\.\.4, found 5"),
    ],
)
def test_costs_are_seconds_for_every_width(options, message):
    target = table_target(FOLLOWS)
    with pytest.raises(ValueError, match=message):
        SpecSession(target, mistaken_draft(target, ()), **options)


def test_costs_are_measured_when_none_are_given():
    """Once for all prompts of a capacity, at a short context and a full one."""
    target = table_target(FOLLOWS)
    session = SpecSession(target, mistaken_draft(target, ()), policy=COST, widths=[1, 4])
    session.open([[3], [9, 10]], 30)
    assert session.plan.widths == (1, 4)
    costs = session.costs
    assert list(costs) == [32, 256 - 19]
    assert all(set(row) == {1, 4} for row in costs.values())
    assert all(0 < seconds < 60 for row in costs.values() for seconds in row.values())
    session.burst()
    assert session.results()[1].token_ids == [(11 + i) % 32 for i in range(30)]
    session.open([[5], [6]], 9)
    assert session.costs is costs
    assert SpecSession(target, session.draft, policy=COST, costs=costs).costs is costs


def test_measured_costs_are_those_of_the_clock_at_each_width_and_context():
    """A machine whose rounds take 2 + width * context / 100 seconds, and 5 to be launched."""
    target = table_target(FOLLOWS)
    plan = SpecSession(target, mistaken_draft(target, ()), policy=COST)._plan_for(300, [])
    now, held = [0.0], set()

    def decode(target, draft, state, stops, rounds, plan):
        [width] = [w for w, s in zip(plan.widths, state.meter.seconds[0, 0], strict=True) if s < 9]
        context = int(state.target.len[0])
        now[0] += 5 + int(rounds) * (2 + width * context / 100)
        held.add((state.done.shape, bool(state.done.any()), context))
        return state

    draft = mistaken_draft(target, ())
    measure = partial(measure_costs, target, draft, plan, 3, decode=decode, clock=lambda: now[0])
    assert measure() == {
        context: {w: pytest.approx(2 + w * context / 100) for w in plan.widths}
        for context in (37, 281)
    }
    assert held == {((3,), False, 37), ((3,), False, 281)}
    assert list(measure([37, 9999])) == [37, 281]
    assert measure([37], clock=lambda: 0.0)[37][1] == 1e-9
    short = dataclasses.replace(plan, capacity=19)
    with pytest.raises(ValueError, match=r"capacity: expected at least 20 rows .* found 19"):
        measure_costs(target, draft, short, 1)


def test_a_width_that_pays_at_first_is_given_up_as_the_context_grows():
    """No token changes."""
    target = table_target(FOLLOWS)
    costs = {50: {1: 1.0, 4: 1.5}, 90: {1: 1.0, 4: 9.0}}
    out = generate(target, mistaken_draft(target, ()), [31], 120, policy=COST, costs=costs)
    assert out.token_ids == [token % 32 for token in range(120)]
    held = np.cumsum([1, *out.acceptance_lengths[:-1]])
    widths = np.asarray(out.verify_widths)
    assert set(widths[held < 60]) == {4} and set(widths[held > 70]) == {1}
