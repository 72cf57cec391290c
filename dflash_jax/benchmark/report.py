"""What a benchmark found, as values: trials, their figures, and the report that keeps them."""

import dataclasses
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from dflash_jax.keys import LARGEST
from dflash_jax.results import SlotAcceptance, mean_gain

FORMAT = 1
TREE = "tree"
MOST_ROWS = 1 << 16
"""Of a round: more are no drafter's, and a table of their slots would fill memory."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is varied: sequences decoded together, rows drafted, rows verified at most, and their
    window policy, TREE where they are the nodes of a draft tree.
    """

    batch: int
    block_size: int
    verify_width: int
    policy: str

    def __str__(self) -> str:
        rows = f"block {self.block_size}, {self.verify_width} rows, {self.policy}"
        return rows if self.batch == 1 else f"{rows}, batch {self.batch}"


@dataclasses.dataclass(frozen=True)
class Answer:
    """One prompt's rounds; the fields are those of `results.Generation`.

    seconds, plain_seconds: of its rounds with and without the drafter, shared by all sequences of
    its batch.
    """

    kind: str
    text: str
    prompt_tokens: int
    emitted: int
    finish_reason: str
    acceptance_lengths: list[int]
    verify_widths: list[int]
    seconds: float
    plain_seconds: float

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens gained per round; 0.0 where there was no round."""
        return mean_gain(self.acceptance_lengths)


@dataclasses.dataclass(frozen=True)
class Trial:
    """All prompts under one setting.

    tokens, seconds: gained in rounds by all sequences, and the rounds' wall time; plain_ likewise
    without the drafter. same: prompts whose tokens are plain decoding's; lossless: prompts in which
    the drafter changed no token (the others part from plain decoding by a near-tie that a wide
    matmul rounds another way); both None for sampled text. largest_gap: between the target's two
    best logits where a text first parts from plain decoding.
    """

    setting: Setting
    answers: list[Answer]
    tokens: int
    seconds: float
    plain_tokens: int
    plain_seconds: float
    same: int | None = None
    lossless: int | None = None
    largest_gap: float = 0.0

    @property
    def gains(self) -> list[int]:
        """Tokens gained in every round of every prompt."""
        return [gain for answer in self.answers for gain in answer.acceptance_lengths]

    @property
    def slots(self) -> SlotAcceptance:
        """Acceptance slot by slot."""
        widths = [width for answer in self.answers for width in answer.verify_widths]
        return SlotAcceptance.of(self.gains, widths)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens gained per round, pooled over all rounds."""
        return mean_gain(self.gains)

    @property
    def histogram(self) -> dict[int, int]:
        """Rounds by the tokens they gained."""
        return dict(sorted(Counter(self.gains).items()))

    @property
    def tokens_per_second(self) -> float:
        """With the drafter, all sequences together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def plain_tokens_per_second(self) -> float:
        """Without it."""
        return self.plain_tokens / self.plain_seconds if self.plain_seconds else 0.0

    @property
    def speedup(self) -> float:
        """The one over the other."""
        plain = self.plain_tokens_per_second
        return self.tokens_per_second / plain if plain else 0.0

    @property
    def changed(self) -> bool:
        """Whether the drafter changed a token of greedy text."""
        return self.lossless is not None and self.lossless < len(self.answers)

    @property
    def kinds(self) -> dict[str, float]:
        """Tokens gained per round, pooled over the prompts of each kind."""
        pooled: dict[str, list[int]] = {}
        for answer in self.answers:
            pooled.setdefault(answer.kind, []).extend(answer.acceptance_lengths)
        return {kind: mean_gain(gains) for kind, gains in pooled.items() if gains}


@dataclasses.dataclass(frozen=True)
class Report:
    """Trials, and what they were made under.

    conditions: what must be equal in two reports that are held against each other (target, dtype,
    device, prompts, chat template, sampling, ...). drafter: what was drafted with. versions: of the
    packages. trials: one a setting.
    """

    conditions: dict[str, Any]
    drafter: dict[str, Any]
    versions: dict[str, str]
    trials: list[Trial]

    @property
    def best(self) -> Trial:
        """The trial of the highest rate."""
        return max(self.trials, key=lambda trial: trial.tokens_per_second)

    def as_dict(self) -> dict[str, Any]:
        """JSON values: all fields, and of each trial the figures that follow from them."""
        told = dataclasses.asdict(self)
        for fields, trial in zip(told["trials"], self.trials, strict=True):
            fields["figures"] = {
                "mean_acceptance_length": trial.mean_acceptance_length,
                "tokens_per_second": trial.tokens_per_second,
                "plain_tokens_per_second": trial.plain_tokens_per_second,
                "speedup": trial.speedup,
                "slots": dataclasses.asdict(trial.slots),
                "histogram": trial.histogram,
                "kinds": trial.kinds,
            }
        return {"format": FORMAT, **told}

    def save(self, file: str | Path) -> None:
        """Write it as JSON."""
        Path(file).write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")


def read_report(file: str | Path) -> Report:
    """A report that `Report.save` wrote; ValueError naming the file where it is none."""
    try:
        told = json.loads(Path(file).read_text(encoding="utf-8"))
        if told.pop("format") != FORMAT:
            raise ValueError(FORMAT)
        trials = []
        for trial in told.pop("trials"):
            del trial["figures"]
            trial["setting"] = Setting(**trial["setting"])
            trial["answers"] = [Answer(**answer) for answer in trial["answers"]]
            trials.append(Trial(**trial))
        report = Report(trials=trials, **told)
        _check(report)
        return report
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(
            f"{file}: expected a report of dflash-jax bench (format {FORMAT}), found something else"
        ) from None


def _check(report: Report) -> None:
    """ValueError unless everything in a report is what `tables` and the figures go by."""
    given, drafter = report.conditions, report.drafter
    numbers = [given["prompts"], given["max_new_tokens"], given["sampling"]["temperature"]]
    names = [given[name] for name in ("target", "dtype", "device")]
    names += [drafter["family"], drafter["precision"], *report.versions.values()]
    sound = (
        all(_fits(number, float) for number in numbers)
        and all(_fits(name, str) for name in names)
        and _fits(given["chat_template"], str | None)
        and _fits(drafter["name"], str | None)
        and isinstance(given["template_args"], dict)
        and len(report.trials) > 0
        and all(map(_sound, report.trials))
    )
    if not sound:
        raise ValueError("values")


def _sound(trial: Trial) -> bool:
    """Whether a trial adds up; ValueError where an answer's lists are not of one length."""
    if not all(map(_typed, [trial, trial.setting, *trial.answers])):
        return False
    rounds = [
        pair
        for answer in trial.answers
        for pair in zip(answer.acceptance_lengths, answer.verify_widths, strict=True)
    ]
    return (
        len(trial.answers) > 0
        and trial.setting.verify_width <= MOST_ROWS
        and all(1 <= gain <= width <= trial.setting.verify_width for gain, width in rounds)
        and (trial.same is None) == (trial.lossless is None)
        and (trial.same or 0) <= (trial.lossless or 0) <= len(trial.answers)
    )


def _typed(value: Any) -> bool:
    """Whether a dataclass's numbers, texts and lists are of the types that it names."""
    plain = [
        field for field in dataclasses.fields(value) if field.name not in ("setting", "answers")
    ]
    return all(_fits(getattr(value, field.name), field.type) for field in plain)


def _fits(value: Any, kind: Any) -> bool:
    if kind == list[int]:
        return isinstance(value, list) and all(_fits(item, int) for item in value)
    if value is None or isinstance(value, str):
        return isinstance(value, kind) if kind is not float else False
    number = type(value) is int or (kind is float and type(value) is float)
    wanted = kind in (int, float, int | None)
    return wanted and number and 0 <= value <= LARGEST  # nor NaN


def comparable(ours: Report, theirs: Report) -> None:
    """ValueError naming every condition in which two reports differ, each with both values."""
    keys = sorted(ours.conditions.keys() | theirs.conditions.keys())
    differing = [
        f"{key} {_shown(theirs.conditions.get(key))} (now {_shown(ours.conditions.get(key))})"
        for key in keys
        if ours.conditions.get(key) != theirs.conditions.get(key)
    ]
    if differing:
        raise ValueError(f"expected a run under the same conditions, found {'; '.join(differing)}")


def _shown(value: Any, most: int = 40) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= most else text[:most] + "..."


def pairs_of(ours: Report, theirs: Report) -> list[tuple[Trial, Trial]]:
    """Trials of the same setting in both.

    ValueError unless the two are `comparable` and share a setting.
    """
    comparable(ours, theirs)
    before = {trial.setting: trial for trial in theirs.trials}
    both = [(trial, before[trial.setting]) for trial in ours.trials if trial.setting in before]
    if not both:
        raise ValueError(
            f"expected a setting of both runs, found {'; '.join(map(str, before))} "
            f"(now {'; '.join(str(trial.setting) for trial in ours.trials)})"
        )
    return both


def digest(value: Any) -> str:
    """A short name of a JSON value: equal for equal values."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
