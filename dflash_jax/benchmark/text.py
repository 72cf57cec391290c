"""A benchmark report as text."""

import json
from collections.abc import Iterator

from dflash_jax.benchmark.report import Report, Trial
from dflash_jax.keys import printable


def tables(report: Report) -> Iterator[str]:
    """The report as text: every setting, and of the fastest its slots, rounds and prompts."""
    given = report.conditions
    greedy = given["sampling"]["temperature"] == 0
    law = "greedy" if greedy else f"temperature {given['sampling']['temperature']:g}"
    chat = "chat template" if given["chat_template"] else "no chat template"
    told = [f"{name}={json.dumps(value)}" for name, value in given["template_args"].items()]
    yield (
        f"{given['target']} ({given['dtype']}) with {_drafter(report)}: {given['prompts']} prompts "
        f"x {given['max_new_tokens']} tokens, {law}, {' '.join([chat, *told])}"
    )
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    yield f"{given['device']}, {versions}"
    yield ""
    widest = max(len(trial.setting.policy) for trial in report.trials)
    widest = max(widest, len("policy"))
    yield (
        f"block rows {'policy':{widest}} batch  tokens/round  tok/s  plain  speedup"
        + ("  as plain  lossless" if greedy else "")
    )
    for trial in report.trials:
        yield _row(trial, widest)
    best = report.best
    yield ""
    yield f"fastest: {best.setting}"
    yield from _slots(best)
    yield from _rounds(best)
    yield from _prompts(best)


def _row(trial: Trial, widest: int) -> str:
    setting, count = trial.setting, len(trial.answers)
    line = (
        f"{setting.block_size:5} {setting.verify_width:4} {setting.policy:{widest}} "
        f"{setting.batch:5} {trial.mean_acceptance_length:13.2f} {trial.tokens_per_second:6.1f} "
        f"{trial.plain_tokens_per_second:6.1f} {trial.speedup:7.2f}x"
    )
    if trial.lossless is not None:
        line += f" {f'{trial.same}/{count}':>9} {f'{trial.lossless}/{count}':>9}"
    if trial.largest_gap:
        line += f"  (largest top-2 gap {trial.largest_gap:.2g})"
    if trial.changed:
        line += "  CHANGED A TOKEN"
    return line + ("  slower than plain" if trial.speedup < 1 and trial.gains else "")


def _slots(trial: Trial) -> Iterator[str]:
    slots = trial.slots
    numbers = range(1, len(slots.kept) + 1)
    yield "draft slot             " + "".join(f"{slot:6}" for slot in numbers)
    yield "verified in rounds     " + "".join(f"{count:6}" for count in slots.verified)
    yield "  accepted in          " + "".join(f"{share:6.2f}" for share in slots.kept)
    yield "all before it accepted " + "".join(f"{count:6}" for count in slots.tried)
    yield "  accepted in          " + "".join(f"{share:6.2f}" for share in slots.held)


def _rounds(trial: Trial) -> Iterator[str]:
    counts = trial.histogram
    most = max(counts.values(), default=1)
    yield "tokens gained  rounds"
    for gain, count in counts.items():
        yield f"{gain:13} {count:7} {'#' * round(40 * count / most)}"


def _prompts(trial: Trial) -> Iterator[str]:
    widest = max(4, *(len(printable(answer.kind)) for answer in trial.answers))
    yield f"{'kind':{widest}} prompt answer rounds  tokens/round"
    for answer in trial.answers:
        yield (
            f"{printable(answer.kind):{widest}} {answer.prompt_tokens:6} {answer.emitted:6} "
            f"{len(answer.acceptance_lengths):6} {answer.mean_acceptance_length:13.2f}"
            + (f"  {printable(answer.text, 44)}" if answer.text else "")
        )


def _drafter(report: Report) -> str:
    """What was drafted with; reports written before there were int8 caches do not speak of them."""
    told = report.drafter
    held = ", int8 draft KV" if told.get("kv_dtype") == "int8" else ""
    return f"{told['name']} ({told['family']}, {told['precision']}{held})"


def changes(file: str, before: Report, pairs: list[tuple[Trial, Trial]]) -> Iterator[str]:
    """What differs from an earlier report, setting by setting."""
    versions = ", ".join(f"{name} {version}" for name, version in before.versions.items())
    yield ""
    yield f"against {file}: {_drafter(before)}, {versions}"
    for ours, theirs in pairs:
        rate = ours.tokens_per_second / theirs.tokens_per_second if theirs.tokens_per_second else 0
        yield (
            f"  {ours.setting}: tokens/round {theirs.mean_acceptance_length:.2f} -> "
            f"{ours.mean_acceptance_length:.2f}, tok/s {theirs.tokens_per_second:.1f} -> "
            f"{ours.tokens_per_second:.1f} ({rate:.2f}x), speedup {theirs.speedup:.2f} -> "
            f"{ours.speedup:.2f}"
        )
