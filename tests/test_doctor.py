"""The doctor names planted faults, and is silent about healthy drafters."""

import json
import shutil

import jax
import numpy as np
import pytest
from families import FAMILIES, ORACLES
from safetensors.numpy import load_file, save_file

from dflash_jax import doctor as clinic
from dflash_jax import load_draft, load_target
from dflash_jax.checkpoint import ASSETS, TensorFiles, save_draft
from dflash_jax.cli import main
from dflash_jax.config import read_config, resolve_harvest
from dflash_jax.doctor import Doctor, Effort
from dflash_jax.doctor import config as statements
from dflash_jax.doctor.probe import Probe, Setting
from dflash_jax.doctor.suspects import Suspect, Tensors, orders, other_taps, suspects
from dflash_jax.doctor.tensors import check_tensors
from dflash_jax.doctor.trial import compare, confidence, sign_test, standard_errors

TINY = ORACLES / "tiny"
WORK = Effort(screen=16, confirm=64, anchors=8, new=48, slots=7)
Q, K, V, O = (f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo")
GATE, UP, DOWN = (f"layers.1.mlp.{x}_proj.weight" for x in ("gate", "up", "down"))


@pytest.fixture(scope="module")
def loaded():
    return load_target(TINY / "target")


@pytest.fixture(scope="module")
def doctor(loaded):
    """One for all tests: its texts are written once."""
    return Doctor(loaded, work=WORK)


@pytest.fixture
def plant(tmp_path):
    """A tiny drafter with a fault: `change(config, tensors)` in place."""

    def planted(family, change=lambda config, tensors: None):
        directory = tmp_path / family
        directory.mkdir()
        config = json.loads((TINY / family / "config.json").read_text())
        tensors = load_file(TINY / family / "model.safetensors")
        change(config, tensors)
        (directory / "config.json").write_text(json.dumps(config))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    return planted


def stated(**values):
    """A fault of the config, wherever a key lies."""

    def change(config, _):
        for key, value in values.items():
            holder = config["dflash_config"] if key in config["dflash_config"] else config
            holder[key] = value

    return change


def swapped(a, b):
    def change(_, tensors):
        tensors[a], tensors[b] = tensors[b], tensors[a]

    return change


def mapped(name, function):
    def change(_, tensors):
        value = function(tensors[name].astype(np.float32))
        tensors[name] = np.ascontiguousarray(value.astype(tensors[name].dtype))

    return change


def only(monkeypatch, *names):
    """Let the search try suspects of these names alone: a fraction of the time."""
    every = suspects
    monkeypatch.setattr(
        clinic, "suspects", lambda *args: (s for s in every(*args) if s.name in names)
    )


def names(report):
    return [(finding.where, finding.name) for finding in report.findings]


# --- the files ------------------------------------------------------------------------------------


def file_findings(directory, loaded):
    """(where, name, text) of all that is found without drafting."""
    draft, found = statements.load_and_listen(directory, loaded, "float32")
    found += check_tensors(TensorFiles(directory))
    if draft is not None:
        raw, target_raw = statements.raw_config(directory), statements.raw_config(TINY / "target")
        found += statements.check_config(raw, draft.config, loaded, target_raw)
    return [(f.where, f.name, f.text) for f in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_files_say_nothing(loaded, family):
    assert file_findings(TINY / family, loaded) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_shipped_tensors_say_nothing(family):
    assert check_tensors(TensorFiles(ASSETS / family)) == []


def nan_at_seven(x):
    x = x.copy()
    x.flat[7] = np.nan
    return x


def half_empty(x):
    x = x.copy()
    x[len(x) // 2 :] = 0
    return x


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (mapped(UP, nan_at_seven), ("tensors", UP, "1 of 32768 values are NaN or infinite")),
        (mapped(O, np.zeros_like), ("tensors", O, "every value is 0")),
        (
            mapped("layers.1.input_layernorm.weight", np.ones_like),
            ("tensors", "layers.1.input_layernorm.weight", "every value is 1 (lost?)"),
        ),
        (
            mapped(DOWN, lambda x: 10 * x),
            ("tensors", DOWN, "9.84 times as large (rms) as the other layers'"),
        ),
        (
            mapped("hidden_norm.weight", lambda x: x - 1),
            ("tensors", "hidden_norm.weight", None),
        ),
        (mapped(GATE, np.sign), ("tensors", GATE, None)),
        (
            mapped("fc.weight", half_empty),
            ("tensors", "fc.weight", "64 of 128 rows are zero (64..127)"),
        ),
        (
            lambda c, t: t.update({UP: t[GATE]}),
            ("tensors", UP, f"holds the same numbers as {GATE}"),
        ),
        (
            lambda c, t: t.update({"old.weight": np.eye(9, dtype=np.float32)}),
            ("loading", "checkpoint", "unused tensors old.weight"),
        ),
        (
            lambda c, t: t.pop("norm.weight"),
            ("loading", "checkpoint", "missing tensors norm.weight"),
        ),
        (
            stated(mask_token_id=257),
            (
                "config",
                "mask_token_id",
                "257 is a stop token of the target, expected a token without another use",
            ),
        ),
        (
            stated(mask_token_id=255),
            (
                "config",
                "mask_token_id",
                "255 lies apart from the target's special tokens [257, 258, 259]",
            ),
        ),
        (
            stated(mask_token_id=264),
            ("loading", "mask_token_id", "expected an id below vocab_size 264, found 264"),
        ),
        (
            stated(rms_norm_eps=0.1),
            ("config", "rms_norm_eps", "0.1 is no small number (the target's is 1e-06)"),
        ),
        (
            stated(target_layer_ids=[1, 3, 6]),
            ("loading", "target_layer_ids", "expected ids in 0..5 (num_target_layers 6), found [6]"),
        ),
        (
            lambda c, t: c.update(rope_parameters={"rope_theta": 5e5}),
            (
                "loading",
                "rope_theta",
                "rope_parameters says 500000.0, top level says 10000; using 500000.0",
            ),
        ),
        (
            stated(vocab_size=300),
            (
                "config",
                "vocab_size",
                "300, the target has 264 tokens in 264 rows: another vocabulary?",
            ),
        ),
    ],
)
def test_a_fault_of_the_files_is_named(plant, loaded, change, finding):
    found = file_findings(plant("dflash", change), loaded)
    assert [(where, name) for where, name, _ in found] == [finding[:2]]
    assert finding[2] in (None, found[0][2])


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, 1e6])
def test_a_bad_row_scale_is_named(tmp_path, bad):
    save_draft(load_draft(TINY / "dflash", dtype="float32"), tmp_path, storage="int8")
    assert check_tensors(TensorFiles(tmp_path)) == []
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[DOWN + ".scale"][3] *= bad
    save_file(tensors, file)
    found = check_tensors(TensorFiles(tmp_path))
    assert found
    assert all(finding.name.startswith(DOWN) for finding in found)


def test_a_dspark_config_that_forgot_its_family_is_named(plant, loaded):
    def change(config, _):
        config["architectures"] = ["DFlashDraftModel"]
        del config["dflash_config"]["projector_type"]

    (_, _, text), *others = file_findings(plant("dspark", change), loaded)
    assert "declares family 'dflash', found tensors of another" in text
    assert "markov_head.markov_w1.weight" in text
    assert others == []


# --- settings and statistics ----------------------------------------------------------------------


def test_other_taps_are_shifted_reordered_and_inside_the_target():
    found = list(other_taps((1, 3, 4), 6))
    assert found[:2] == [(0, 2, 3), (2, 4, 5)]
    assert {(4, 3, 1), (3, 1, 4), (-1, 1, 2), (1, 3, 5)} <= set(found)
    assert (1, 3, 4) not in found
    assert all(-1 <= t < 6 for taps in found for t in taps)
    assert len(orders(tuple(range(9)))) < 24


def test_tensors_are_edited_by_their_names_on_disk():
    draft = load_draft(TINY / "dflash", dtype="float32")
    disk = load_file(TINY / "dflash" / "model.safetensors")
    tensors = Tensors(draft)
    np.testing.assert_array_equal(tensors.get(V), disk[V].astype(np.float32))
    tensors.set(V, tensors.get(K))
    edited = Tensors(tensors.done())
    np.testing.assert_array_equal(edited.get(V), tensors.get(K))
    np.testing.assert_array_equal(edited.get(K), tensors.get(K))
    np.testing.assert_array_equal(Tensors(draft).get(V), disk[V].astype(np.float32))


def test_statistics_by_hand():
    assert sign_test(3, 0) == 0.125
    assert sign_test(1, 1) == 0.75
    assert sign_test(0, 0) == 1.0
    assert sign_test(900, 300) < 1e-12
    # Two texts of two anchors: means 1 and 3, mean 2, standard error sqrt(2) / sqrt(2).
    assert standard_errors(np.array([0.0, 2.0, 3.0, 3.0]), 2) == pytest.approx(2.0)
    assert standard_errors(np.ones(4), 2) == 0.0


# --- the self-test --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sight(doctor):
    return doctor._sights[0]


@pytest.mark.parametrize("family", ["dflash"])
def test_scores_are_what_rounds_accept(loaded, sight, family):
    """Teacher-forced drafting at an anchor gives the drafts of a real round there."""
    from dflash_jax import SpecSession

    draft = load_draft(TINY / family, loaded.target, "float32")
    harvest = resolve_harvest(draft.config)
    probe = Probe(loaded.target, draft, harvest.drafts(8), 8)
    scores = probe.score(sight, Setting(draft.config, harvest))
    ids, anchors = np.asarray(sight.ids), np.asarray(sight.anchors)
    session = SpecSession(loaded.target, draft, stop_token_ids=[], policy=None)
    rows = [0, 3]
    session.open([ids[r, : anchors[r, 0]].tolist() for r in rows], max_new_tokens=9)
    session.burst(rounds=1)
    lengths = scores.lengths.reshape(anchors.shape)
    for row, result in zip(rows, session.results(), strict=True):
        assert ids[row, anchors[row, 0]] == result.token_ids[0]
        assert result.acceptance_lengths == [lengths[row, 0] + 1]


def test_a_healthy_drafter_is_healthy(doctor):
    report = doctor.examine(TINY / "dflash", seconds=600)
    assert report.healthy, report.text()
    test = report.self_test
    assert (test.texts, test.anchors, test.left) == (64, 512, 0)
    assert test.tried > 150
    assert 0.6 < test.floor < test.position1 < 0.95
    assert len(report.text().splitlines()) < 8
    assert json.loads(json.dumps(report.to_dict()))["healthy"] is True


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        (stated(target_layer_ids=[2, 4, 5]), "target_layer_ids", "[1, 3, 4] instead of [2, 4, 5]"),
        (stated(rope_theta=1000000), "rope", "theta 10000 instead of theta 1e+06"),
        (swapped(K, V), f"{K} and {V}", "swapped does better"),
    ],
)
def test_a_setting_that_does_better_is_named(doctor, plant, monkeypatch, change, name, says):
    only(monkeypatch, "target_layer_ids", "rope", "is_causal", f"{K} and {V}")
    report = doctor.examine(plant("dflash", change), seconds=600)
    assert names(report) == [("self-test", name)], report.text()
    assert report.findings[0].text.startswith(says)


def test_what_nothing_explains_is_said_to_be_unexplained(doctor, plant, monkeypatch):
    only(monkeypatch, "is_causal")
    shuffled = mapped("fc.weight", lambda x: np.random.default_rng(0).permutation(x))
    report = doctor.examine(plant("dflash", shuffled))
    assert names(report) == [("self-test", "unexplained")], report.text()
    assert "guess by word pairs" in report.findings[0].text


def test_settings_left_out_for_time_are_counted(doctor, monkeypatch):
    only(monkeypatch, "is_causal", "rope")
    report = doctor.examine(TINY / "dflash", seconds=0)
    assert report.self_test.tried == 0
    assert report.self_test.left == 8
    assert "8 left out for time" in report.text()


# --- the command ----------------------------------------------------------------------------------


def test_the_command_names_a_fault_and_exits_1(plant, capsys, monkeypatch):
    monkeypatch.setattr(clinic, "effort", lambda target: WORK)
    draft = plant("dflash", mapped(UP, nan_at_seven))
    command = ["doctor", "--target", str(TINY / "target"), "--draft", str(draft), "--seconds", "0"]
    assert main(command) == 1
    out = capsys.readouterr().out
    assert f"FAULT [tensors] {UP}: 1 of 32768 values are NaN or infinite" in out
    assert main([*command, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is False
    assert report["findings"][0]["name"] == UP
    assert set(report["versions"]) == {"dflash-jax", "jax"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--draft", "nowhere"], "expected a directory or one of"),
        (["--draft", str(TINY / "dflash"), "--prompts", "nowhere"], "expected nowhere"),
        (["--draft", str(TINY / "dflash"), "--seconds", "-1"], "--seconds: expected 0 or more"),
        (["--draft", str(TINY / "dflash"), "--seed", "-1"], "--seed: expected 0 to"),
        (["--draft", str(TINY / "dflash"), "--harvest", "odd"], "harvest: expected"),
    ],
)
def test_bad_input_exits_2(options, says, capsys):
    assert main(["doctor", "--target", str(TINY / "target"), *options]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1


# --- the rest, slowly -----------------------------------------------------------------------------
