"""The self-test: what the drafter accepts as it stands, and whether another setting does better."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.doctor.probe import Probe, Scores, Setting, Sight
from dflash_jax.doctor.suspects import Suspect

FINALISTS = 6
"""Suspects that are tried again, on texts they were not picked by."""
SURE, LIKELIER, MORE = 3.0, 0.01, 3.0
"""A better setting: its log-probability per token gains LIKELIER, SURE standard errors above none;
or its accepted length gains MORE of them."""
EQUAL = 0.97
"""Share of the largest gain that explains as much."""
RARE = 1e-3
"""Sign test over the anchors that changed, for acceptance to count."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two settings on the same anchors: `other` against `base`.

    gain: log-probability a token; sigmas: its standard errors, texts being the independent units.
    longer, shorter: anchors that accept more or fewer drafts; length_sigmas: of the mean length.
    position1, tokens: (base, other). rarer: one-sided p of the sign test on accepted lengths,
    mcnemar: of the one on the first draft alone.
    """

    gain: float
    sigmas: float
    longer: int
    shorter: int
    length_sigmas: float
    position1: tuple[float, float]
    tokens: tuple[float, float]
    rarer: float
    mcnemar: float

    @property
    def longer_by(self) -> float:
        """Tokens a round more."""
        return self.tokens[1] - self.tokens[0]

    def better(self, calibrates: bool) -> bool:
        """Whether `other` does better by more than the noise."""
        accepts = self.length_sigmas >= MORE and self.rarer < RARE
        likelier = self.sigmas >= SURE and self.gain >= LIKELIER and self.length_sigmas > -1.0
        return accepts or (likelier and not calibrates)

    def promise(self, calibrates: bool) -> float:
        """For ranking: the stronger of the two kinds of evidence that count."""
        if calibrates:
            return self.length_sigmas
        likely = self.sigmas if self.gain > 0.1 * LIKELIER else 0.0
        return max(likely, self.length_sigmas)


def compare(base: Scores, other: Scores) -> Comparison:
    """`Comparison` over the slots that both draft."""
    both = base.known & other.known
    slots = np.maximum(both.sum(axis=1), 1)
    gain = np.where(both, other.logp - base.logp, 0.0).sum(axis=1) / slots
    lengths = [np.cumprod(s.correct & both, axis=1).sum(axis=1) for s in (base, other)]
    change = lengths[1] - lengths[0]
    firsts = [s.correct[:, 0] for s in (base, other)]
    longer, shorter = int((change > 0).sum()), int((change < 0).sum())
    won, lost = int((firsts[1] & ~firsts[0]).sum()), int((firsts[0] & ~firsts[1]).sum())
    return Comparison(
        gain=float(gain.mean()),
        sigmas=standard_errors(gain, base.texts),
        longer=longer,
        shorter=shorter,
        length_sigmas=standard_errors(change, base.texts),
        position1=(float(firsts[0].mean()), float(firsts[1].mean())),
        tokens=(1.0 + float(lengths[0].mean()), 1.0 + float(lengths[1].mean())),
        rarer=sign_test(longer, shorter),
        mcnemar=sign_test(won, lost),
    )


def standard_errors(values: np.ndarray, texts: int) -> float:
    """A mean over its standard error, where anchors of one text count as one observation."""
    means = np.asarray(values, np.float64).reshape(texts, -1).mean(axis=1)
    error = means.std(ddof=1) / math.sqrt(texts) if texts > 1 else 0.0
    return float(means.mean() / error) if error > 1e-12 else 0.0


def sign_test(wins: int, losses: int) -> float:
    """One-sided p of at least `wins` out of wins + losses fair coins."""
    n = wins + losses
    if n > 1000:
        return 0.5 * math.erfc((wins - losses - 1) / math.sqrt(2 * n))
    return sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n


@dataclasses.dataclass
class Search:
    """Looks for settings that do better than the stated one.

    screen: texts all suspects are tried on. confirm: other texts, for the few that look better.
    deadline: `time.monotonic()` after which no further suspect is started. tell: told how many
    were. Once something is mended, only what looked better before is tried again (`hopeful`).
    """

    probe: Probe
    screen: Sight
    confirm: Sight
    deadline: float
    tell: Callable[[str], None]
    tried: int = 0
    left: int = 0
    hopeful: set[str] | None = None
    trials: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def best(self, base: Setting, suspects: Iterable[Suspect]) -> tuple[Suspect, Comparison] | None:
        """The suspect that does best, of those that do better by more than the noise."""
        before, seen = self.probe.score(self.screen, base), []
        for suspect in suspects:
            if self.hopeful is not None and suspect.name not in self.hopeful:
                continue
            if time.monotonic() > self.deadline:
                self.left += 1
                continue
            self.tell(f"trying other settings ({self.tried} so far)")
            found = compare(before, self.probe.score(self.screen, suspect.setting))
            seen.append((found.promise(suspect.calibrates), suspect, found))
            self.tried += 1
        order = {suspect: place for place, (_, suspect, _) in enumerate(seen)}
        seen.sort(key=lambda item: -item[0])
        self.trials += [
            {"name": s.name, "says": s.says, "promise": promise} | dataclasses.asdict(found)
            for promise, s, found in seen
        ]
        self.hopeful = {suspect.name for promise, suspect, _ in seen if promise > 0.5}
        finalists = [suspect for promise, suspect, _ in seen[:FINALISTS] if promise > 1.0]
        by_gain = sorted(seen, key=lambda item: -item[2].gain)[:FINALISTS]
        for promise, suspect, _ in by_gain:
            if promise > 1.0 and not suspect.calibrates and suspect not in finalists:
                finalists.append(suspect)
        if not finalists:
            return None
        before = self.probe.score(self.confirm, base)
        proven = []
        for suspect in finalists:
            found = compare(before, self.probe.score(self.confirm, suspect.setting))
            if found.better(suspect.calibrates):
                proven.append((suspect, found))
        return most_telling(proven, order)


def most_telling(
    proven: Sequence[tuple[Suspect, Comparison]], order: Mapping[Suspect, int]
) -> tuple[Suspect, Comparison] | None:
    """The proven suspect that explains most; of equals the likelier one, which came first.

    Half a remedy may stand out as clearly as the whole one, so size counts here: of the gained
    log-probability, or of the accepted length where that speaks a much louder language.
    """
    likely = [(s, c) for s, c in proven if not s.calibrates and c.gain > 0]
    others = [one for one in proven if one not in likely]
    longest = [max((c.longer_by for _, c in group), default=0.0) for group in (likely, others)]
    if likely and longest[1] <= 1.5 * longest[0] + 0.02:
        most = max(c.gain for _, c in likely)
        equals = [(s, c) for s, c in likely if c.gain >= EQUAL * most]
    else:
        equals = [(s, c) for s, c in others if c.longer_by >= EQUAL * longest[1]]
    return min(equals, key=lambda one: order[one[0]], default=None)


def low(scores: Scores, floor: float) -> str | None:
    """Why position-1 acceptance is low, None where it is not.

    Low: under one tenth, or below what a guess by word pairs hits by two standard errors.
    """
    first, n = scores.first, scores.texts
    error = float(scores.correct[:, 0].reshape(n, -1).mean(axis=1).std()) / math.sqrt(n)
    if first < 0.1:
        return "under 0.10"
    if first < floor - 2 * error:
        return f"below the {floor:.2f} of a guess by word pairs"
    return None


@dataclasses.dataclass(frozen=True)
class Confidence:
    """A confidence head against the truth, over all slots: mean prediction for right and for wrong
    drafts, the share that is right, and how often a right one gets more than a wrong one (AUC).
    """

    for_right: float
    for_wrong: float
    right: float
    ranks: float

    @property
    def says(self) -> float:
        """Mean prediction."""
        return self.right * self.for_right + (1.0 - self.right) * self.for_wrong

    def faults(self) -> list[str]:
        """What is wrong with it. Heads are trained for the overlap of two laws, which is less than
        how often the likeliest tokens agree: only much too sure is a fault, and hopelessly unsure.
        """
        found = []
        if self.ranks < 0.5:
            found.append(f"ranks right drafts above wrong ones {self.ranks:.2f} of the time")
        if self.for_wrong > 0.9 or self.says > self.right + 0.15:
            found.append(f"says {self.for_wrong:.2f} where drafts are wrong")
        if self.for_right < 0.1 or self.says < self.right - 0.45:
            found.append(f"says {self.for_right:.2f} where drafts are right")
        return found


def confidence(scores: Scores) -> Confidence | None:
    """None without a head, or where all drafts are right or all wrong."""
    if scores.raws is None:
        return None
    raws = scores.raws[scores.known].astype(np.float64)
    right = scores.correct[scores.known]
    if right.all() or not right.any():
        return None
    said = 1.0 / (1.0 + np.exp(-np.clip(raws, -50, 50)))
    order = np.argsort(np.argsort(raws))
    wins = order[right].sum() - right.sum() * (right.sum() - 1) / 2
    return Confidence(
        for_right=float(said[right].mean()),
        for_wrong=float(said[~right].mean()),
        right=float(right.mean()),
        ranks=float(wins / (right.sum() * (~right).sum())),
    )
