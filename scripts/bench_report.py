"""What follows from the figures of `bench.py`: its table, its conclusions, a plot, a page.

    python scripts/bench_report.py docs/bench/*.json --into docs/performance.md
    python scripts/bench_report.py run.json --plot run.png

The first writes the tables of JSON lines into a page, between its two marker lines; the second
draws one. Needs neither JAX nor a GPU. Exit status 2 with one line on stderr on bad input.
"""

import argparse
import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
KEYS = ("family", "implementation", "batch", "context", "capacity")
"""What sets one case of a run apart from another."""
COLUMNS = {
    "time_ms": ("time ms", 3),
    "floor_ms": ("floor ms", 3),
    "ratio": ("ratio", 2),
    "mbu_percent": ("MBU %", 1),
    "spread_percent": ("spread %", 1),
    "compile_seconds": ("compile s", 1),
}
"""The table: what a column shows, its title, its decimals."""
WIDTHS = (17, 9, 7, 6, 8, 9)
"""Of the columns that say what a row is of: the stage, then `KEYS`."""

Report = dict[str, Any]


def table_header() -> str:
    """The table's first line."""
    names = ("stage", "family", "impl", "batch", "context", "capacity")
    left = "".join(f"{name:<{width}}" for name, width in zip(names, WIDTHS, strict=True))
    return left + "".join(f"{title:>11}" for title, _ in COLUMNS.values())


def table_row(case: Report, name: str) -> str:
    """One stage of a case."""
    cells = (name, *(str(case[key]) for key in KEYS))
    left = "".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
    return left + "".join(f"{cell:>11}" for cell in _cells(case["stages"][name]))


def _cells(row: Report) -> list[str]:
    return [
        "-" if row[key] is None else f"{row[key]:.{digits}f}"
        for key, (_, digits) in COLUMNS.items()
    ]


def conclude(report: Report) -> None:
    """Add to a report what follows from its stages together: `derived` of each case, `ratios`
    between cases, and `over_draft_round` of the rival (its time / ours, in the case it ran as).
    """
    for case in report["cases"]:
        case["derived"] = _derived(case)
    report["ratios"] = list(_ratios(report["cases"]))
    rival = report["torch"]
    if rival is not None and "milliseconds" in rival:
        best, first = min(rival["milliseconds"].values()), report["cases"][0]
        alike = [c for c in report["cases"] if _differs(first, c, "implementation")]
        rival["over_draft_round"] = {
            case["implementation"]: best / case["stages"]["draft_round"]["time_ms"]
            for case in (first, *alike)
            if "draft_round" in case["stages"]
        }


def _derived(case: Report) -> dict[str, float | None]:
    stages = case["stages"]

    def microseconds(name: str, of: str | None = None) -> float | None:
        layers = 1 if of is None else case["shapes"][of]["layers"]
        return 1e3 * stages[name]["time_ms"] / layers if name in stages else None

    def figure(name: str, key: str) -> float | None:
        return stages.get(name, {}).get(key)

    round_in_steps = None
    if {"spec_round", "plain_step"} <= set(stages):
        round_in_steps = stages["spec_round"]["time_ms"] / stages["plain_step"]["time_ms"]
    return {
        "attention_us_per_layer": microseconds("attention", "draft"),
        "verify_attention_us_per_layer": microseconds("verify_attention", "target"),
        "selection_us": microseconds("selection"),
        "round_in_plain_steps": round_in_steps,
        "tokens_per_second": figure("loop", "tokens_per_second"),
        "tokens_per_round": figure("loop", "tokens_per_round"),
        "plain_tokens_per_second": figure("plain_step", "tokens_per_second"),
        "cost_tokens_per_second": figure("cost_loop", "tokens_per_second"),
        **_payoff(stages),
    }


def _payoff(stages: Report) -> dict[str, float | bool | None]:
    """Tokens a round from which drafting whole blocks pays at this batch, and whether it did."""
    if not {"loop", "plain_step"} <= set(stages):
        return {"pays_from_tokens_per_round": None, "pays": None}
    least = stages["loop"]["time_ms"] / stages["plain_step"]["time_ms"]
    return {
        "pays_from_tokens_per_round": least,
        "pays": stages["loop"]["tokens_per_round"] > least,
    }


def _differs(a: Report, b: Report, key: str) -> bool:
    """Whether two cases differ in `key` and in nothing else."""
    return [k for k in KEYS if a[k] != b[k]] == [key]


def _ratios(cases: Sequence[Report]) -> Iterator[Report]:
    """Of every two cases that differ in one key, stage by stage: the later's time / the earlier's.

    Where the context differs, also what it adds in time and what its bytes alone would add.
    """
    for key in ("implementation", "capacity", "context", "batch"):
        for a, b in itertools.combinations(cases, 2):
            if not _differs(a, b, key):
                continue
            for name in a["stages"].keys() & b["stages"].keys():
                early, late = a["stages"][name], b["stages"][name]
                if early["time_ms"] <= 0:
                    continue
                case = {k: a[k] for k in KEYS if k != key}
                change = {"of": key, "stage": name, "from": a[key], "to": b[key]}
                ratio = {"ratio": late["time_ms"] / early["time_ms"]}
                if key == "batch" and "tokens_per_second" in early:
                    ratio["throughput"] = late["tokens_per_second"] / early["tokens_per_second"]
                if key == "context":
                    ratio["added_ms"] = late["time_ms"] - early["time_ms"]
                    ratio["added_floor_ms"] = late["floor_ms"] - early["floor_ms"]
                yield case | change | ratio


def conclusions(report: Report) -> list[str]:
    """The same in sentences, a line each, of a concluded report."""
    lines = []
    for case in report["cases"]:
        label = " ".join(str(case[key]) for key in KEYS)
        lines += [f"{label}: {text}" for text in _sentences(case)]
    for r in report["ratios"]:
        text = f"{r['stage']}, {r['of']} {r['from']} -> {r['to']}: {r['ratio']:.3f}x the time"
        if "throughput" in r:
            text += f", {r['throughput']:.2f}x the tokens/s"
        if "added_ms" in r:
            text += f" (+{r['added_ms']:.3f} ms, its bytes alone +{r['added_floor_ms']:.3f})"
        lines.append(text)
    rival = report["torch"]
    if rival is not None and "error" in rival:
        lines.append(f"torch: {rival['error']}")
    elif rival is not None:
        for label, milliseconds in rival["milliseconds"].items():
            lines.append(f"torch {rival['torch']}, one CUDA graph, {label}: {milliseconds:.3f} ms")
        if rival.get("cut_short"):
            lines.append("torch: cut short, what it does faster may be missing")
        for implementation, ratio in rival["over_draft_round"].items():
            lines.append(f"draft_round, {implementation}: {ratio:.2f}x as fast as torch")
    return lines


def _sentences(case: Report) -> Iterator[str]:
    d, stages = case["derived"], case["stages"]
    for name, side in (("attention", "draft"), ("verify_attention", "target")):
        if name in stages:
            floor = 1e3 * stages[name]["floor_ms"] / case["shapes"][side]["layers"]
            time = d[f"{name}_us_per_layer"]
            yield f"{name} adds {time:.1f} us a layer, its K/V bytes alone {floor:.1f}"
    if "selection" in stages:
        yield f"selection adds {d['selection_us']:.1f} us to backbone and head"
    if d["round_in_plain_steps"] is not None:
        yield f"a round costs {d['round_in_plain_steps']:.2f} plain steps"
    if "loop" in stages:
        rate, gain = d["tokens_per_second"], d["tokens_per_round"]
        yield f"the whole loop makes {rate:.1f} tokens/s at {gain:.2f} tokens a round"
    if "plain_step" in stages:
        yield f"plain decoding makes {d['plain_tokens_per_second']:.1f} tokens/s"
    if "cost_loop" in stages:
        taken = stages["cost_loop"]["rounds_by_width"]
        widths = ", ".join(f"{count} of {width}" for width, count in taken.items())
        rate = d["cost_tokens_per_second"]
        yield f"the policy cost makes {rate:.1f} tokens/s; rounds by width: {widths}"
    if d["pays"] is not None:
        least = d["pays_from_tokens_per_round"]
        verdict = "pays" if d["pays"] else "DOES NOT PAY"
        yield f"drafting whole blocks {verdict} here; it does from {least:.2f} tokens a round"
    small = [name for name, row in stages.items() if row["copies"] > 1]
    if small:
        yield f"{', '.join(small)}: over several copies of the weights, to be beyond the cache"
    if case["skipped"]:
        yield f"no time for {', '.join(case['skipped'])}"


def markdown(report: Report) -> str:
    """A report as a section of a page."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    read = report["bandwidth"]["read_bytes_per_second"] / 1e12
    shapes = report["cases"][0]["shapes"]
    facts = (
        f"{report['device']}, {report['dtype']}, {versions}; block "
        f"{shapes['block_size']}; read bandwidth {read:.2f} TB/s; medians of {report['repeats']} x "
        f"{report['iterations']} turns."
    )
    titles = ["stage", *KEYS, *(title for title, _ in COLUMNS.values())]
    lines = [f"### {report['name']}", "", facts, "", _line(titles), _line(["---"] * len(titles))]
    for case in report["cases"]:
        keys = [str(case[key]) for key in KEYS]
        lines += [_line([name, *keys, *_cells(row)]) for name, row in case["stages"].items()]
    return "\n".join([*lines, "", *(f"- {line}" for line in conclusions(report))])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def into_page(page: str, reports: Sequence[Report]) -> str:
    """The page with the reports between its markers; ValueError where it has not one of each."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"page: expected one line {BEGIN} and one {END} after it, found otherwise")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    tables = "\n\n".join(markdown(report) for report in reports)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def require_matplotlib() -> None:
    """ModuleNotFoundError, saying what to do, where there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "--plot: expected matplotlib (pip install matplotlib), found none"
        )


def bars(report: Report) -> list[tuple[str, int, float]]:
    """For each stage of each case its label, the case's number and what it must read over its
    time, in GB/s. Stages that must read nothing are left out.
    """
    cases = report["cases"]
    varying = [key for key in KEYS if len({case[key] for case in cases}) > 1]
    return [
        (
            " ".join([name, *(str(case[key]) for key in varying)]),
            number,
            row["floor_bytes"] / row["time_ms"] / 1e6,
        )
        for name in dict.fromkeys(name for case in cases for name in case["stages"])
        for number, case in enumerate(cases)
        if (row := case["stages"].get(name)) and row["ratio"] is not None
    ]


def plot(report: Report, file: Path) -> None:
    """Draw the bandwidth that each stage achieves beside the measured one."""
    require_matplotlib()
    from matplotlib.figure import Figure

    drawable = bars(report)
    if not drawable:
        raise ValueError("--plot: expected a stage with a time and a floor, found none")
    labels, numbers, rates = zip(*drawable, strict=True)
    read = report["bandwidth"]["read_bytes_per_second"] / 1e9
    figure = Figure(figsize=(9, 1.8 + 0.28 * len(rates)), layout="constrained")
    axes = figure.add_subplot()
    drawn = axes.barh(range(len(rates)), rates, color=[f"C{number % 10}" for number in numbers])
    texts = [f"{rate:.3g} ({100 * rate / read:.0f}%)" for rate in rates]
    axes.bar_label(drawn, texts, padding=3, fontsize=8)
    axes.axvline(read, color="black", linestyle="--", label=f"measured read: {read:.3g} GB/s")
    axes.set_yticks(range(len(rates)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max([read, *rates]))
    axes.set_xlabel("bytes that must be read once / time (GB/s)")
    axes.set_ylabel("stage")
    axes.set_title(_title(report), fontsize=10)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(file, dpi=150)


def _title(report: Report) -> str:
    case = report["cases"][0]
    fixed = [f"{key} {case[key]}" for key in KEYS if len({c[key] for c in report["cases"]}) == 1]
    return f"{report['name']}, {report['device']}, {report['dtype']}\n{', '.join(fixed)}"


def read_report(file: Path) -> Report:
    """A report from the JSON file that `bench.py --json` wrote; ValueError where it is none."""
    report = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(report, dict) or "cases" not in report:
        raise ValueError(f"{file}: expected a report of bench.py, found something else")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path, help="JSON files of bench.py")
    parser.add_argument("--into", metavar="PAGE", type=Path, help="rewrite its tables")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the first report")
    args = parser.parse_args(argv)
    try:
        reports = [read_report(file) for file in args.reports]
        if args.plot is not None:
            plot(reports[0], args.plot)
        if args.into is None:
            print("\n\n".join(markdown(report) for report in reports))
        else:
            page = into_page(args.into.read_text(encoding="utf-8"), reports)
            args.into.write_text(page, encoding="utf-8")
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"bench_report.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
