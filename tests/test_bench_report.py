"""scripts/bench_report.py: what follows from a report of bench.py, and the page made of it."""

import copy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import bench_report  # noqa: E402


def row(time, floor):
    """A measured stage, in milliseconds, on a machine that reads 1 TB/s."""
    return {
        "time_ms": time,
        "floor_ms": floor,
        "floor_bytes": floor * 1e9,
        "ratio": time / floor,
        "mbu_percent": 100 * floor / time,
        "spread_percent": 0.0,
        "compile_seconds": 1.0,
        "copies": 1,
    }


def made_up(**changes):
    """A report of four cases whose draft round takes 2 ms, and of what `changes` says otherwise."""

    def case(implementation, context, capacity, time, floor):
        shapes = {"batch": 1, "block_size": 16, "draft": {"layers": 5}, "target": {"layers": 36}}
        return {
            "family": "dflash",
            "implementation": implementation,
            "batch": 1,
            "context": context,
            "capacity": capacity,
            "shapes": shapes,
            "stages": {"draft_round": row(time, floor)},
            "skipped": [],
        }

    report = {
        "name": "made-up",
        "device": "a GPU",
        "dtype": "bfloat16",
        "versions": {"jax": "1"},
        "bandwidth": {"read_bytes_per_second": 1e12},
        "repeats": 1,
        "iterations": 2,
        "torch": None,
        "cases": [
            case("xla", 2048, 4096, 2.0, 1.0),
            case("pallas", 2048, 4096, 1.5, 1.0),
            case("xla", 2048, 32768, 2.5, 1.0),
            case("xla", 8192, 32768, 3.0, 1.25),
        ],
    }
    return report | changes


def test_cases_that_differ_in_one_thing_are_compared():
    report = made_up(torch={"torch": "2", "milliseconds": {"argmax": 4.0, "compiled": 3.0}})
    bench_report.conclude(report)
    found = [(r["of"], r["from"], r["to"], r["ratio"]) for r in report["ratios"]]
    assert found == [
        ("implementation", "xla", "pallas", 0.75),
        ("capacity", 4096, 32768, 1.25),
        ("context", 2048, 8192, 1.2),
    ]
    assert report["ratios"][-1]["added_ms"] == pytest.approx(0.5)
    assert report["ratios"][-1]["added_floor_ms"] == pytest.approx(0.25)
    assert report["torch"]["over_draft_round"] == {"xla": 1.5, "pallas": 2.0}
    lines = bench_report.conclusions(report)
    assert "draft_round, capacity 4096 -> 32768: 1.250x the time" in lines
    assert (
        "draft_round, context 2048 -> 8192: 1.200x the time (+0.500 ms, its bytes alone +0.250)"
        in lines
    )
    assert lines[-1] == "draft_round, pallas: 2.00x as fast as torch"


def test_a_case_in_sentences():
    report = made_up()
    case = report["cases"][0]
    report["cases"] = [case]
    case["skipped"] = ["ingest"]
    case["stages"] = {
        "draft_round": row(2.0, 1.0) | {"copies": 3},
        "spec_round": row(6.0, 4.0),
        "loop": row(6.1, 4.0) | {"tokens_per_second": 500.0, "tokens_per_round": 3.05},
        "attention": row(0.05, 0.02),
        "selection": row(0.03, 0.01),
        "plain_step": row(5.0, 4.0) | {"tokens_per_second": 200.0},
        "verify_attention": row(0.36, 0.144),
    }
    bench_report.conclude(report)
    report["torch"] = {"error": "--torch: no seconds left"}
    assert bench_report.conclusions(report) == [
        *(
            f"dflash xla 1 2048 4096: {text}"
            for text in (
                "attention adds 10.0 us a layer, its K/V bytes alone 4.0",
                "verify_attention adds 10.0 us a layer, its K/V bytes alone 4.0",
                "selection adds 30.0 us to backbone and head",
                "a round costs 1.20 plain steps",
                "the whole loop makes 500.0 tokens/s at 3.05 tokens a round",
                "plain decoding makes 200.0 tokens/s",
                "drafting whole blocks pays here; it does from 1.22 tokens a round",
                "draft_round: over several copies of the weights, to be beyond the cache",
                "no time for ingest",
            )
        ),
        "torch: --torch: no seconds left",
    ]


def test_batches_are_compared_and_flagged_where_drafting_does_not_pay():
    report = made_up()
    one, many = report["cases"][0], copy.deepcopy(report["cases"][0])
    many["batch"] = 32
    one["stages"] = {
        "loop": row(6.0, 4.0) | {"tokens_per_second": 500.0, "tokens_per_round": 3.0},
        "plain_step": row(4.0, 4.0) | {"tokens_per_second": 250.0},
    }
    taken = {"rounds_by_width": {"1": 30, "8": 2}, "tokens_per_second": 6500.0}
    many["stages"] = {
        "loop": row(16.0, 4.0) | {"tokens_per_second": 6000.0, "tokens_per_round": 3.0},
        "plain_step": row(5.0, 4.0) | {"tokens_per_second": 6400.0},
        "cost_loop": row(5.0, 4.0) | taken | {"tokens_per_round": 1.1},
    }
    report["cases"] = [one, many]
    bench_report.conclude(report)
    lines = bench_report.conclusions(report)
    assert "loop, batch 1 -> 32: 2.667x the time, 12.00x the tokens/s" in lines
    label = "dflash xla 32 2048 4096"
    assert (
        f"{label}: drafting whole blocks DOES NOT PAY here; it does from 3.20 tokens a round"
        in lines
    )
    assert (
        f"{label}: the policy cost makes 6500.0 tokens/s; rounds by width: 30 of 1, 2 of 8" in lines
    )


def test_a_stage_without_a_ratio_has_a_dash():
    case = made_up()["cases"][0]
    case["stages"]["draft_round"]["ratio"] = None
    assert bench_report.table_row(case, "draft_round").split()[6:10] == [
        "2.000",
        "1.000",
        "-",
        "50.0",
    ]


def test_bars_are_what_a_stage_must_read_over_its_time():
    bars = bench_report.bars(made_up())
    assert [(label, case) for label, case, _ in bars] == [
        ("draft_round xla 2048 4096", 0),
        ("draft_round pallas 2048 4096", 1),
        ("draft_round xla 2048 32768", 2),
        ("draft_round xla 8192 32768", 3),
    ]
    assert [rate for *_, rate in bars] == pytest.approx([500, 2000 / 3, 400, 1250 / 3])


def test_a_page_is_filled_between_its_markers_alone():
    report = made_up()
    bench_report.conclude(report)
    page = f"# Title\n{bench_report.BEGIN}\nold\n{bench_report.END}\nafter\n"
    filled = bench_report.into_page(page, [report, copy.deepcopy(report)])
    assert filled.startswith("# Title\n")
    assert filled.endswith(f"{bench_report.END}\nafter\n")
    assert "old" not in filled
    figures = "1.500 | 1.000 | 1.50 | 66.7 | 0.0 | 1.0"
    row = f"| draft_round | dflash | pallas | 1 | 2048 | 4096 | {figures} |"
    assert filled.splitlines().count(row) == 2
    assert bench_report.into_page(filled, [report, report]) == filled
    with pytest.raises(ValueError, match="page: expected one line"):
        bench_report.into_page("# Title", [report])


def test_the_figures_of_the_page_are_those_of_the_reports_beside_it():
    page = (ROOT / "docs" / "performance.md").read_text()
    files = sorted((ROOT / "docs" / "bench").glob("*.json"))
    reports = [bench_report.read_report(file) for file in files]
    assert bench_report.into_page(page, reports) == page


@pytest.mark.parametrize("text", [None, "{", "[1]", '{"stages": 1}'])
def test_a_report_that_is_none_is_one_line_and_status_2(text, tmp_path, capsys):
    file = tmp_path / "none.json"
    if text is not None:
        file.write_text(text)
    assert bench_report.main([str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("bench_report.py: ")
    assert err.count("\n") == 1
