"""Every recorded case of `tests/oracles`, through `scripts/check_oracles.py`."""

import functools
import json
import shutil

import check_oracles
import jax
import numpy as np
import oracle_checks
import pytest
from oracle_backbone import Check, close, same
from targets import ORACLES

CASES = check_oracles.find_cases(ORACLES)
DFLASH = [
    "dflash_causal_true",
    "dflash_mixed_window",
    "dflash_plain",
    "dflash_sliding_causal_default",
    "dflash_window_lt_block",
    "dflash_yarn",
]
REST = [
    "dflash2",
    "dflash2_k3",
    "dspark_gated",
    "dspark_rnn",
    "dspark_vanilla",
    "sampling/accept",
    "sampling/probs",
    "sampling/residual",
    "selector_ties",
    "tiny/dflash",
    "tiny/dflash2",
    "tiny/dspark",
]


@functools.cache
def checks(case):
    with jax.default_matmul_precision("highest"):
        return list(CASES[case]())


def test_all_recorded_cases_are_found():
    assert sorted(CASES) == sorted(DFLASH + REST)


@pytest.mark.parametrize("case", DFLASH + REST)
def test_case(case):
    assert [check.line() for check in checks(case) if check.status != "passed"] == []


@pytest.mark.parametrize("case", DFLASH)
def test_every_stage_of_a_drafter_is_looked_at(case):
    stages = {check.stage for check in checks(case)}
    layers = sum(s.startswith("layer") for s in stages)
    with np.load(ORACLES / "stages" / case / "io.npz") as io:
        recorded = {n for n in io if n.startswith(("l0_", "layer", "rope_"))}
    assert layers >= 2
    assert recorded <= stages
    expected = {"ctx_features", "final", "draft_logits", "draft_greedy"}
    for r in range(5):
        expected |= {
            f"r{r}_{part}" for part in ("cached", "uncached", "cache_rows", "cache_values")
        }
    assert expected <= stages


def test_tiny_generations_cover_prompts_edges_and_most_rounds():
    stages = [check.stage for check in checks("tiny/dflash")]
    for part in ("output_ids", "acceptance", "blocks"):
        assert sum(s.startswith("prompts") and s.endswith(part) for s in stages) == 8
    assert sum(s.startswith("runs") and s.endswith("output_ids") for s in stages) == 20


# --- the script ----------------------------------------------------------------------------------


def test_output_ends_in_counts(capsys):
    assert check_oracles.main([str(ORACLES), "--case", "selector_ties"]) == 0
    *lines, counts = capsys.readouterr().out.splitlines()
    assert json.loads(counts) == {"passed": len(lines), "failed": 0, "skipped": 0}
    assert all("selector_ties" in line and "tolerance" in line for line in lines)


def test_json_has_an_object_a_line(capsys):
    assert check_oracles.main([str(ORACLES), "--case", "sampling/accept", "--json"]) == 0
    *records, counts = map(json.loads, capsys.readouterr().out.splitlines())
    assert counts == {"passed": 2, "failed": 0, "skipped": 0}
    for record in records:
        assert record["case"] == "sampling/accept"
        assert (record["status"], record["error"], record["tolerance"]) == ("passed", 0.0, 0.0)


@pytest.fixture
def folder(tmp_path):
    """A folder of the layout with one case."""
    shutil.copytree(ORACLES / "stages" / "selector_ties", tmp_path / "stages" / "selector_ties")
    return tmp_path


def change(folder, name, value):
    path = folder / "stages" / "selector_ties" / "selector.npz"
    with np.load(path) as stored:
        arrays = dict(stored)
    arrays[name] = value(arrays[name])
    np.savez(path, **arrays)


def test_a_wrong_number_fails(folder, capsys):
    change(folder, "greedy_scores", lambda x: x * (1 + 3e-5))
    assert check_oracles.main([str(folder)]) == 1
    *lines, counts = capsys.readouterr().out.splitlines()
    assert json.loads(counts)["failed"] == 1
    (failed,) = [line for line in lines if "failed" in line]
    assert "greedy_scores" in failed
    assert float(failed.split()[2]) == pytest.approx(3e-5, rel=0.01)


def test_a_wrong_id_fails(folder, capsys):
    change(folder, "greedy_path", lambda x: np.where(np.arange(len(x)) == 4, x + 1, x))
    assert check_oracles.main([str(folder)]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == 2  # both walks


def test_what_the_code_cannot_run_is_skipped_by_name(folder, capsys, monkeypatch):
    shutil.copytree(ORACLES / "stages" / "dflash_plain", folder / "stages" / "dflash_plain")
    shutil.copytree(ORACLES / "sampling", folder / "sampling")
    monkeypatch.delitem(oracle_checks.FAMILY_STAGES, "dflash")
    monkeypatch.delitem(oracle_checks.SAMPLING, "probs")
    assert check_oracles.main([str(folder)]) == 0
    *lines, counts = capsys.readouterr().out.splitlines()
    assert json.loads(counts)["skipped"] == 2
    skipped = [line for line in lines if "skipped" in line]
    assert "dflash_plain" in skipped[0]
    assert "family dflash" in skipped[0]
    assert "sampling/probs" in skipped[1]


def test_a_broken_case_fails_and_the_others_run(folder, capsys):
    broken = folder / "stages" / "dflash_plain"
    shutil.copytree(ORACLES / "stages" / "dflash_plain", broken)
    (broken / "checkpoint" / "model.safetensors").write_bytes(b"")
    assert check_oracles.main([str(folder), "--json"]) == 1
    *records, counts = map(json.loads, capsys.readouterr().out.splitlines())
    assert counts["failed"] == 1
    assert counts["passed"] > 5
    (failed,) = [r for r in records if r["status"] == "failed"]
    assert (failed["case"], failed["error"]) == ("dflash_plain", None)
    assert "not safetensors" in failed["note"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: expected cases under stages/, tiny/ or sampling/, found none"),
        ([str(ORACLES), "--case", "dflash3"], "--case: expected one of dflash2, "),
        (
            [str(ORACLES), "--implementation", "pallas"],
            "implementation 'pallas': device: expected an NVIDIA GPU",
        ),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, capsys):
    assert check_oracles.main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_comparisons_are_relative_to_the_largest_value_and_strict():
    reference = np.array([1.0, -100.0])
    assert close("c", "s", reference - [0, 9e-4], reference).status == "passed"
    assert close("c", "s", reference - [0, 2e-3], reference).status == "failed"
    assert close("c", "s", np.array([np.nan, -100]), reference).status == "failed"
    assert close("c", "s", reference[:1], reference).status == "failed"
    assert close("c", "s", np.zeros(2), np.zeros(2)).status == "passed"
    assert same("c", "s", [1, 2], [1, 2]).status == "passed"
    assert same("c", "s", [1, 2], [1, 3]).status == "failed"
    assert same("c", "s", [1], [1, 3]).status == "failed"
    assert same("c", "s", [], []).status == "passed"
    assert Check("c", "s", None).status == "skipped"
