"""`scripts/train_drafter.py` from records to a drafter that loads."""

import json
from pathlib import Path

import pytest
import train_drafter

from dflash_jax import load_draft
from dflash_jax.checkpoint import save_draft
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
        common += ["--max-new-tokens", 8, "--steps", 4, "--devices", 1]
        common += [] if "--init" in options else ["--mask-id", 256]
        return train_drafter.main([str(x) for x in (*common, *options)]), root / name

    return call


SHAPE = ("--taps", 1, 3, "--layers", 1, "--intermediate-size", 64, "--block-size", 4)


def test_from_nothing_to_another_family(run):
    """By way of a quantised copy, which is trained on as the floats it stands for."""
    code, base = run("base", *SHAPE)
    assert code == 0
    target, small = load_hf(TINY / "target"), base.with_name("small")
    save_draft(load_draft(base, target, precision="int8"), small)
    options = ["--init", small, "--family", "dflash2", "--rank", 4, "--top-k", 3]
    code, out = run(
        "next", *options, "--block-size", 6, "--weighting", "reach", "--intermediate-size", 96
    )
    assert code == 0
    draft = load_draft(out, target)
    assert draft.config.family == "dflash2"
    assert draft.config.block_size == 6
    assert draft.config.intermediate_size == 96
    report = json.loads((out / "report.json").read_text())
    assert report["lossless"] is True
    assert [k["kind"] for k in report["kinds"]] == ["k0", "k1", "all"]
    assert report["facts"]["started from"] == str(small)
    assert "4 of 4, 4 sequences x 4 blocks of 6 each" in (out / "README.md").read_text()


def test_a_run_stopped_and_resumed_is_one_run(run):
    assert run("whole", *SHAPE)[0] == 0
    assert run("halves", *SHAPE, "--stop-at", 2)[0] == 0
    code, out = run("halves", *SHAPE, "--resume")
    assert code == 0
    assert (out / "model.safetensors").read_bytes() == (
        out.parent / "whole" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("steps", "message"),
    [(4, "loss: expected a finite number, found nan at step 2"), (1, "weights: expected numbers")],
)
def test_a_run_that_diverges_stops_and_saves_nothing(steps, message, run, capsys):
    code, out = run("diverged", *SHAPE, "--lr", 1e30, "--steps", steps)
    assert code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"train_drafter: {message}")
    assert line.count("\n") == 1
    assert {file.name for file in out.parent.glob("diverged*/*")} <= {"log.csv"}


def test_what_cannot_run_is_one_line(run, capsys):
    for options, expected in [
        ((*SHAPE, "--resume"), "--resume: expected"),
        ((*SHAPE, "--devices", 99), "devices: expected 1..8, found 99"),
        ((*SHAPE, "--devices", 8), "batch: expected a multiple of 8 devices, found 4"),
        (("--init", "nowhere"), "nowhere"),
        (("--init", TINY / "dflash", "--block-size", 1), "--block-size: expected at least 2, fou"),
        (("--init", TINY / "dflash", "--intermediate-size", 8), "intermediate_size: expected 256"),
        (
            ("--init", TINY / "dflash", "--intermediate-size", 2**63),
            "expected an integer below 2**31",
        ),
        (
            ("--init", TINY / "dflash", "--layers", 7),
            "--layers: expected without --init, whose own",
        ),
        (("--init", TINY / "dflash", "--mask-id", 3), "--mask-id: expected without --init"),
        ((*SHAPE, "--data", "nosuch.jsonl"), "--data: expected a file, found none at nosuch.jsonl"),
        ((*SHAPE, "--taps", 1, 1), "target_layer_ids: expected distinct ids, found [1, 1]"),
        ((*SHAPE, "--taps", 1, 99), "target_layer_ids: expected ids in 0..5"),
        ((*SHAPE, "--mask-id", 264), "mask_token_id: expected an id below vocab_size 264"),
        ((*SHAPE, "--family", "dflash2", "--top-k", 265), "selector_top_k: expected at most"),
        ((*SHAPE, "--family", "many"), "argument --family: invalid choice"),
        ((*SHAPE, "--bogus"), "unrecognized arguments: --bogus"),
    ]:
        assert run("refused", *options)[0] == 2
        line = capsys.readouterr().err
        assert expected in line
        assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((name, least - 1) for name, least in train_drafter.LEAST.items()),
        ("seed", 2**32),
        ("gamma", 0),
        ("gamma", "nan"),
        ("lr", 0),
        ("lr", "inf"),
        ("ce", -1),
        ("kl", "nan"),
        ("l1", "inf"),
        ("time_budget", "nan"),
        ("greedy", 1.5),
        ("greedy", "nan"),
        ("warm", 0.6),
    ],
)
def test_numbers_that_cannot_work_are_refused_before_anything_is_loaded(option, value, capsys):
    flag = "--" + option.replace("_", "-")
    arguments = ["--out", "x", "--target", "nowhere", f"{flag}={value}"]
    assert train_drafter.main(arguments) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"train_drafter: {flag}: expected ")
    assert line.count("\n") == 1


@pytest.mark.parametrize(("greedy", "warm"), [(0.9, 0.1), (0.8, 0.2), (1, 0), (0, 1)])
def test_shares_that_make_up_the_whole_are_taken(greedy, warm):
    arguments = ["--out", "x", "--greedy", str(greedy), "--warm", str(warm)]
    train_drafter.check_arguments(train_drafter.parser().parse_args(arguments))


def test_a_loss_without_a_term_is_refused(capsys):
    arguments = ["--out", "x", "--target", "nowhere", "--ce", "0", "--kl", "0"]
    assert train_drafter.main(arguments) == 2
    assert "--ce: expected more than 0 where --kl and --l1 are 0" in capsys.readouterr().err


GOOD = {"prompt_ids": [1, 2], "answer_ids": [3, 4]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "found none"),
        ("hello", ":1: not JSON"),
        ("[" * 100_000, ":1: not JSON"),
        ("[1]", ":1: expected a JSON object, found list"),
        ("{}", "expected prompt_ids, messages or prompt, found []"),
        (
            {"prompt": "text", "answer": "text"},
            "expected prompt_ids (this target has no tokenizer)",
        ),
        (
            {"prompt_ids": [1], "answer": "text"},
            "expected answer_ids (this target has no tokenizer",
        ),
        (GOOD | {"prompt_ids": "12"}, "prompt_ids: expected a list of token ids, found '12'"),
        (GOOD | {"prompt_ids": [1.5]}, "prompt_ids: expected a list of token ids, found [1.5]"),
        (GOOD | {"answer_ids": [True]}, "answer_ids: expected a list of token ids, found [True]"),
        (GOOD | {"answer_ids": [-1]}, "answer_ids: expected a list of token ids, found [-1]"),
        (GOOD | {"answer_ids": [2**31]}, "answer_ids: expected a list of token ids, found [2147"),
        (GOOD | {"answer_ids": [264]}, "--data: expected ids in 0..263, found 264"),
    ],
    ids=str,
)
def test_records_that_cannot_be_trained_on_are_one_line(line, message, run, tmp_path, capsys):
    file = tmp_path / "records.jsonl"
    file.write_text(line if isinstance(line, str) else json.dumps(line))
    assert run("refused", *SHAPE, "--data", file)[0] == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "--heldout: expected prompts, found none in"),
        ({"prompt_ids": []}, "--heldout: expected 1..1024 tokens a prompt, found 0 in record 1"),
        ({"prompt_ids": [1] * 1025}, "--heldout: expected 1..1024 tokens a prompt, found 1025"),
        ({"prompt_ids": [264]}, "--heldout: expected ids in 0..263, found 264"),
    ],
)
def test_prompts_that_could_not_be_reported_on_are_refused_before_the_training(
    record, message, run, tmp_path, capsys
):
    file = tmp_path / "heldout.jsonl"
    file.write_text(json.dumps(record) if record else "\n\n")
    code, out = run("unreported", *SHAPE, "--heldout", file)
    assert code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
