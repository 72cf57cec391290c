"""`scripts/train_drafter.py` from records to a drafter that loads."""

import json
from pathlib import Path

import pytest
import train_drafter

from dflash_jax import load_draft
from dflash_jax.targets.hf import load_hf

TINY = Path(__file__).parent / "oracles" / "tiny"


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """The tiny target's own answers, as training data and as held-out prompts."""
    file = tmp_path_factory.mktemp("data") / "records.jsonl"
    known = json.loads((TINY / "expected.json").read_text())["prompts"][:4]
    lines = [
        {"prompt_ids": r["prompt_ids"], "answer_ids": r["greedy_target_ids"], "kind": f"k{i % 2}"}
        for i, r in enumerate(known)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.fixture(scope="module")
def run(records, tmp_path_factory):
    """Run the script with small settings; returns its exit code and the drafter's directory."""
    root = tmp_path_factory.mktemp("runs")

    def call(name, *options):
        common = ["--target", TINY / "target", "--data", records, "--heldout", records]
        common += ["--out", root / name, "--length", 128, "--batch", 4, "--anchors", 4]
        common += ["--max-new-tokens", 8, "--steps", 4, "--mask-id", 256, "--devices", 1]
        return train_drafter.main([str(x) for x in (*common, *options)]), root / name

    return call


SHAPE = ("--taps", 1, 3, "--layers", 1, "--intermediate-size", 64, "--block-size", 4)


def test_from_nothing_to_another_family(run):
    code, base = run("base", *SHAPE)
    assert code == 0
    options = ["--init", base, "--family", "dflash2", "--rank", 4, "--top-k", 3]
    code, out = run("next", *options, "--block-size", 6, "--weighting", "reach")
    assert code == 0
    draft = load_draft(out, load_hf(TINY / "target"))
    assert draft.config.family == "dflash2"
    assert draft.config.block_size == 6
    report = json.loads((out / "report.json").read_text())
    assert report["lossless"] is True
    assert [k["kind"] for k in report["kinds"]] == ["k0", "k1", "all"]
    assert report["facts"]["started from"] == str(base)
    assert "4 of 4, 4 sequences x 4 blocks of 6 each" in (out / "README.md").read_text()


def test_a_run_stopped_and_resumed_is_one_run(run):
    assert run("whole", *SHAPE)[0] == 0
    assert run("halves", *SHAPE, "--stop-at", 2)[0] == 0
    code, out = run("halves", *SHAPE, "--resume")
    assert code == 0
    assert (out / "model.safetensors").read_bytes() == (
        out.parent / "whole" / "model.safetensors"
    ).read_bytes()


def test_what_cannot_run_is_one_line(run, capsys):
    for options, expected in [
        ((*SHAPE, "--resume"), "--resume: expected"),
        ((*SHAPE, "--devices", 99), "devices: expected 1..8, found 99"),
        ((*SHAPE, "--devices", 8), "batch: expected a multiple of 8 devices, found 4"),
        (("--init", "nowhere"), "nowhere"),
    ]:
        assert run("refused", *options)[0] == 2
        line = capsys.readouterr().err
        assert expected in line
        assert line.count("\n") == 1
