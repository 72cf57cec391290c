"""A benchmark report as a picture of four panels."""

from pathlib import Path
from typing import Any

from dflash_jax.benchmark.report import Report, Trial
from dflash_jax.extras import require

LINES = 6
"""Settings whose slots are drawn, the fastest first: more cannot be told apart."""


def save_figure(report: Report, file: str | Path) -> None:
    """Draw rates, acceptance by slot and by round, and every prompt, into a `.png` (or `.pdf`).

    ModuleNotFoundError without matplotlib; ValueError for a kind of file that it cannot write.
    """
    check_ending(file)
    figure = require("matplotlib.figure", "plot").Figure(figsize=(11, 8.5), layout="constrained")
    rates, slots, rounds, prompts = figure.subplots(2, 2).flat
    ranked = sorted(report.trials, key=lambda trial: -trial.tokens_per_second)
    draw_rates(rates, ranked)
    draw_slots(slots, ranked[:LINES])
    draw_rounds(rounds, report.best)
    draw_prompts(prompts, report.best)
    figure.suptitle(title(report), fontsize=11)
    figure.savefig(file, dpi=120)


def check_ending(file: str | Path) -> None:
    """ValueError for a kind of file that matplotlib cannot write."""
    canvas = require("matplotlib.figure", "plot").Figure().canvas
    if Path(file).suffix[1:] not in canvas.get_supported_filetypes():
        raise ValueError(f"{file}: expected a name that ends in .png or another picture's ending")


def title(report: Report) -> str:
    """What was measured, where, in two lines."""
    conditions, drafter = report.conditions, report.drafter
    return (
        f"{conditions['target']} with {drafter['name']} ({drafter['family']}), "
        f"{conditions['prompts']} prompts x {conditions['max_new_tokens']} tokens, "
        f"temperature {conditions['sampling']['temperature']:g}\n"
        f"{conditions['device']}, {conditions['dtype']}, "
        + ", ".join(f"{name} {version}" for name, version in report.versions.items())
    )


def draw_rates(axes: Any, trials: list[Trial]) -> None:
    """Tokens a second under every setting, plain decoding behind it."""
    at = range(len(trials))
    drafted = [trial.tokens_per_second for trial in trials]
    plain = [trial.plain_tokens_per_second for trial in trials]
    axes.barh(at, plain, height=0.8, color="0.85", label="plain")
    colours = ["C0" if trial.speedup >= 1 else "C3" for trial in trials]
    bars = axes.barh(at, drafted, height=0.45, color=colours, label="with the drafter")
    axes.bar_label(bars, [f"{trial.speedup:.2f}x" for trial in trials], padding=3, fontsize=8)
    axes.set_yticks(at, [str(trial.setting) for trial in trials], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * max([*drafted, *plain]) or 1)  # room for the legend
    axes.set_xlabel("tokens a second, all sequences together")
    axes.set_title("Rate (red: slower than plain)", fontsize=10)
    axes.legend(fontsize=8, loc="lower right")


def draw_slots(axes: Any, trials: list[Trial]) -> None:
    """How often each draft slot is accepted."""
    for trial in trials:
        kept = trial.slots.kept
        axes.plot(range(1, len(kept) + 1), kept, marker="o", label=str(trial.setting))
    longest = max(len(trial.slots.kept) for trial in trials)
    axes.set_xticks(range(1, longest + 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("draft slot")
    axes.set_ylabel("accepted, of the rounds that verified it")
    axes.set_title("Acceptance by slot", fontsize=10)
    axes.legend(fontsize=7)


def draw_rounds(axes: Any, trial: Trial) -> None:
    """The rounds of the fastest setting by what they gained."""
    counts = trial.histogram
    total = sum(counts.values())
    axes.bar(list(counts), [count / total for count in counts.values()], color="C0")
    mean = trial.mean_acceptance_length
    axes.axvline(mean, color="black", linestyle="--", label=f"mean {mean:.2f}")
    axes.set_xticks(range(1, max(counts, default=1) + 1))
    axes.set_xlabel("tokens gained in a round, the target's own included")
    axes.set_ylabel("share of rounds")
    axes.set_title(f"Rounds: {trial.setting}", fontsize=10)
    axes.legend(fontsize=8)


def draw_prompts(axes: Any, trial: Trial) -> None:
    """The prompts of the fastest setting, sorted by what they accept, coloured by their kind."""
    answers = sorted(trial.answers, key=lambda answer: -answer.mean_acceptance_length)
    kinds = sorted({answer.kind for answer in answers})
    for number, kind in enumerate(kinds):
        of_kind = [(i, a) for i, a in enumerate(answers) if a.kind == kind]
        axes.bar(
            [i for i, _ in of_kind],
            [answer.mean_acceptance_length for _, answer in of_kind],
            color=f"C{number % 10}",
            hatch="//" if number >= 10 else None,
            label=kind or "prompts",
        )
    axes.set_xticks([])
    axes.set_xlabel("prompts, most accepted first")
    axes.set_ylabel("tokens a round")
    axes.set_title(f"Prompts: {trial.setting}", fontsize=10)
    axes.legend(fontsize=7, ncols=4, loc="upper right")
    axes.set_ylim(0, 1.35 * max([a.mean_acceptance_length for a in answers]) or 1)
