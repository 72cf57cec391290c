"""Whether `block_size` is the one the drafter was trained with, by how its slots fall off."""

import dataclasses

import numpy as np

from dflash_jax.doctor.probe import Probe, Scores, Setting, Sight
from dflash_jax.doctor.report import Finding
from dflash_jax.doctor.trial import compare
from dflash_jax.draft import DFlashDraft
from dflash_jax.targets import dense

CLIFF = 0.15
"""Least share by which the probability of a right draft falls from one slot to the next where
training ended."""
FOLD = 2.2
"""Times the second deepest fall: an ordinary decline has no single cliff."""
HEALTHY = 0.2
"""Of the first slot: below it something else is the matter."""
GAIN, SURE = 0.003, 2.0
"""Log-probability a token, and its standard errors, that a twice as long block must bring to the
slots of the stated one."""


def check_block(
    target: dense.DenseTarget, draft: DFlashDraft, base: Setting, sight: Sight
) -> list[Finding]:
    """A block that ends too early or too late.

    Too early: twice the rows do the stated slots good, and the slots behind them go on as well.
    Too late: somewhere in the block the drafts fall off a cliff.
    """
    size, first = base.config.block_size, base.harvest.first_row
    double = dataclasses.replace(base, config=dataclasses.replace(base.config, block_size=2 * size))
    probe = Probe(target, draft, 2 * size - first, 2 * size)
    own, wide = probe.score(sight, base), probe.score(sight, double)
    inside = size - first
    rates, beyond = slot_rates(own, inside), slot_rates(wide, inside + 1)
    if inside < 2 or rates is None or beyond is None or min(rates[0], beyond[0]) < HEALTHY:
        return []
    found, text = compare(own, wide), None
    step = 1 - (beyond[inside - 1] / beyond[0]) ** (1 / (inside - 1))
    next_step = 1 - beyond[inside] / beyond[inside - 1]
    falls = 1 - rates[1:] / rates[:-1]
    cliff, *others = np.sort(falls)[::-1]
    if found.gain >= GAIN and found.sigmas >= SURE and next_step < 1.5 * max(step, 0) + 0.03:
        text = (
            f"{size} ends too early: a block of {2 * size} goes on as well behind it "
            f"(slot {inside} {beyond[inside - 1]:.2f}, slot {inside + 1} {beyond[inside]:.2f}), "
            f"and its first slots gain {found.gain:+.3f} a token "
            f"({found.sigmas:.1f} standard errors)"
        )
    elif len(others) > 1 and cliff > CLIFF and cliff > FOLD * max(others):
        at = int(np.argmax(falls)) + 1
        text = (
            f"{size} may be too long: behind slot {at} right drafts fall from {rates[at - 1]:.2f} "
            f"to {rates[at]:.2f}, as if trained with {at + first}"
        )
    return [] if text is None else [Finding("self-test", "block_size", text)]


def slot_rates(scores: Scores, slots: int) -> np.ndarray | None:
    """Mean probability of the right draft in each of the first slots, over anchors that have all.

    None where hardly any anchor has.
    """
    whole = scores.known[:, :slots].all(axis=1)
    if whole.sum() < 32:
        return None
    return np.exp(scores.logp[whole, :slots].astype(np.float64)).mean(axis=0)
