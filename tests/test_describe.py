"""`dflash-jax inspect`: what it says of drafters that load, and of those that do not."""

import json
import shutil

import jax
import pytest
from families import FAMILIES, ORACLES, stage, trained
from safetensors.numpy import load_file, save_file

from dflash_jax import load_draft, save_draft
from dflash_jax.checkpoint import survey_draft
from dflash_jax.cli import main
from dflash_jax.describe import describe_draft
from dflash_jax.quant import PRECISIONS

TINY = ORACLES / "tiny"
TARGET = ("--target", str(TINY / "target"))


@pytest.fixture
def changed(tmp_path):
    """A copy of a drafter directory with tensors changed."""

    def change(source, drop=(), add=()):
        shutil.copytree(source, tmp_path / "draft")
        file = tmp_path / "draft" / "model.safetensors"
        tensors = load_file(file)
        first = next(iter(tensors.values()))
        kept = {n: t for n, t in tensors.items() if not n.startswith(tuple(drop) or "-")}
        save_file(kept | dict.fromkeys(add, first[:1].copy()), file)
        return tmp_path / "draft"

    return change


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_those_of_the_file_and_of_the_loaded_drafter(family):
    found, file = describe_draft(TINY / family), TINY / family / "model.safetensors"
    tensors, whole = load_file(file), found.whole()
    assert (found.problem, found.unused, found.copies) == (None, (), ())
    assert whole.tensors == len(tensors)
    assert whole.stored == sum(tensor.nbytes for tensor in tensors.values())
    assert whole.parameters == sum(tensor.size for tensor in tensors.values())
    assert whole.loaded == 4 * whole.parameters
    assert found.config == trained(family)[1].config


def test_int8_rows_count_with_their_scales():
    found = describe_draft("dflash2")
    stored = {part.name: part.stored for part in found.parts}
    config, rows = found.config, found.config.hidden_size
    assert stored["features (fc)"] == rows * config.tap_size + 4 * rows
    assert set(found.stored) == {"F32", "I8"}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_quantised_drafter_is_counted_as_it_is_stored(precision, tmp_path):
    draft = load_draft(TINY / "dspark", dtype="float32", precision=precision)
    save_draft(draft, tmp_path)
    found, tensors = describe_draft(tmp_path), load_file(tmp_path / "model.safetensors")
    assert found.whole().stored == sum(tensor.nbytes for tensor in tensors.values())
    assert found.whole().loaded == sum(leaf.nbytes for leaf in jax.tree.leaves(draft))
    assert found.whole().parameters == describe_draft(TINY / "dspark").whole().parameters


def test_a_drafter_in_words(capsys):
    assert main(["inspect", str(TINY / "dflash2"), "--dtype", "bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"dflash2 drafter: {TINY / 'dflash2'}"
    assert "  block       8 rows, 7 drafts (mask-fill harvest), mask id 256" in lines
    assert any(line.startswith("  taps        outputs of layers 1, 3, 4 of 6") for line in lines)
    assert any("selector of" in line and "convolutions of" in line for line in lines)
    assert lines[-1] == "loads"
    assert max(map(len, lines[1:])) <= 90
    assert len(lines) <= 24


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("dflash_mixed_window", "4 x window 12, not causal; 1 x full, not causal"),
        ("dflash_yarn", "yarn x 32 of 8192 positions"),
        ("dspark_gated", "markov gated, rank 16; confidence of hidden and token"),
        ("dspark_vanilla", "8 rows, 8 drafts (shifted harvest)"),
        ("dflash_causal_true", "causal"),
    ],
)
def test_configs_in_the_fields_terms(case, words):
    assert words in str(describe_draft(stage(case) / "checkpoint"))


def test_the_targets_own_tensors_are_named():
    found = describe_draft(stage("dspark_vanilla") / "checkpoint_flat")
    assert found.copies == ("embed_tokens.weight", "lm_head.weight")
    assert "the target's, not read: embed_tokens.weight, lm_head.weight" in str(found)


def test_with_a_target_it_says_what_both_need(capsys):
    arguments = ["inspect", str(TINY / "dspark"), *TARGET, "--context", "300"]
    assert main(arguments) == 0
    assert ", 512 rows: weights " in capsys.readouterr().out.splitlines()[-1]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["loads"], told["problem"], told["unused"]) == (True, None, [])
    assert told["memory"]["capacity"] == 512
    assert told["config"]["family"] == "dspark"
    assert sum(part["tensors"] for part in told["parts"]) == sum(told["stored"].values())


def test_unused_tensors_are_listed(changed):
    with pytest.warns(UserWarning, match="unused tensors rotary"):
        found = describe_draft(changed(TINY / "dflash", add=["rotary.inv_freq"]))
    assert (found.unused, found.problem) == (("rotary.inv_freq",), None)
    assert "unused: rotary.inv_freq" in str(found)


def test_a_drafter_that_does_not_load_is_described_and_status_1(changed, capsys):
    directory = changed(TINY / "dflash2", drop=["candidate_selector.hidden"], add=["extra"])
    assert main(["inspect", str(directory)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("dflash2 drafter: ")
    assert "unused: extra\n" in text
    missing = "missing tensors candidate_selector.hidden_projection.weight"
    assert text.endswith(f"does not load: {missing}\n")
    with pytest.raises(ValueError, match=missing):
        survey_draft(directory)


def test_a_drafter_of_another_target_does_not_load(capsys):
    source = stage("dflash_plain") / "checkpoint"
    assert main(["inspect", str(source), *TARGET, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["problem"].startswith("hidden_size: the drafter expects 64")
    assert told["parts"] and told["memory"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "drafter: expected a directory or one of"),
        ([str(TINY / "dflash" / "model.safetensors")], "drafter: expected a directory or one of"),
        ([str(TINY)], "expected model.safetensors"),
        ([str(TINY / "target")], "config.json: "),
        ([str(TINY / "dflash"), "--context", "9"], "--context: expected --target beside it"),
    ],
)
def test_what_is_no_drafter_is_refused_in_one_line(arguments, message, capsys):
    assert main(["inspect", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_tensors_without_a_config_are_refused_in_one_line(tmp_path, capsys):
    shutil.copy(TINY / "dflash" / "model.safetensors", tmp_path)
    assert main(["inspect", str(tmp_path)]) == 2
    assert "drafter config: expected " in capsys.readouterr().err
