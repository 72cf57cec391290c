"""The doctor names planted faults, and is silent about healthy drafters."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from families import FAMILIES, ORACLES
from safetensors.numpy import load_file, save_file
from targets import HostedDense

from dflash_jax import ctx_features, forward_block, load_draft, load_target, quant
from dflash_jax import doctor as clinic
from dflash_jax.checkpoint import ASSETS, save_draft
from dflash_jax.cli import main
from dflash_jax.config import resolve_harvest
from dflash_jax.doctor import Doctor, Effort
from dflash_jax.doctor import config as statements
from dflash_jax.doctor.probe import WORST, Probe, Setting
from dflash_jax.doctor.report import merged
from dflash_jax.doctor.rows import check_rows, contexts
from dflash_jax.doctor.suspects import Tensors, orders, other_taps, suspects
from dflash_jax.doctor.tensors import check_tensors
from dflash_jax.doctor.trial import Confidence, sign_test, standard_errors
from dflash_jax.tensor_files import TensorFiles

TINY = ORACLES / "tiny"
WORK = Effort(screen=16, confirm=64, anchors=8, new=48, slots=7)
K, V, OUT = (f"layers.0.self_attn.{x}_proj.weight" for x in "kvo")
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
    found = merged(found, check_tensors(statements.open_tensors(directory)))
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
        (mapped(OUT, np.zeros_like), ("tensors", OUT, "every value is 0")),
        (
            mapped("layers.1.input_layernorm.weight", np.ones_like),
            ("tensors", "layers.1.input_layernorm.weight", "every value is 1 (lost?)"),
        ),
        (
            mapped(DOWN, lambda x: 10 * x),
            ("tensors", DOWN, "9.83 times as large (rms) as in the other layers"),
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
            (
                "loading",
                "target_layer_ids",
                "expected ids in 0..5 (num_target_layers 6), found [6]",
            ),
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


@pytest.mark.parametrize("precision", ["int8", "q8_0", "q4_0"])
def test_a_quantised_drafter_is_examined_like_any_other(
    tmp_path, doctor, loaded, monkeypatch, precision
):
    only(monkeypatch, "is_causal", f"{K} and {V}")
    save_draft(load_draft(TINY / "dflash", loaded.target, precision=precision), tmp_path / "fine")
    told = []
    report = doctor.examine(tmp_path / "fine", tell=told.append)
    assert names(report) == [], report.text()
    assert told[0] == "writing texts with the target"
    assert told[-1] == f"trying other settings ({report.self_test.tried - 1} so far)"
    assert report.self_test.tried > 1
    weights = tmp_path / "fine" / "model.safetensors"
    tensors = load_file(weights)
    for part in (".weight", ".weight" + quant.SCALE):
        a, b = (name.removesuffix(".weight") + part for name in (K, V))
        tensors[a], tensors[b] = tensors[b], tensors[a]
    save_file(tensors, weights)
    assert names(doctor.examine(tmp_path / "fine")) == [("self-test", f"{K} and {V}")]


@pytest.mark.parametrize("precision", ["float", "q4_0"])
def test_a_drafter_of_one_file_is_looked_at_as_a_directory_is(tmp_path, loaded, precision):
    file = tmp_path / "tiny.gguf"
    save_draft(load_draft(TINY / "dflash", dtype="float32", precision=precision), file)
    found = file_findings(file, loaded)
    assert found == []
    start, _ = statements.open_tensors(file)._extent(OUT)
    with file.open("r+b") as data:
        data.seek(start)
        data.write(b"\xff" * 4)  # a NaN in f32, and as the scale of a block
    assert ("tensors", OUT) in {finding[:2] for finding in file_findings(file, loaded)}


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


def test_scores_are_what_the_drafter_drafts(loaded, sight):
    """One anchor by hand: features, block, head, argmax."""
    target, draft = loaded.target, load_draft(TINY / "dflash", dtype="float32")
    setting = Setting(draft.config, resolve_harvest(draft.config))
    scores = Probe(target, draft, 7, 8).score(sight, setting)
    ids, anchors = np.asarray(sight.ids), np.asarray(sight.anchors)
    text, place = 2, 5
    at = int(anchors[text, place])
    pos = np.arange(at + 8, dtype=np.int32)

    @jax.jit
    def draft_block(target, draft, context, block):
        out, _ = target.forward(target.init_state(1, at), context, (1, 3, 4))
        features = ctx_features(draft, out.taps[0])
        hidden = forward_block(draft, features, target.embed(block[None])[0], pos)
        return target.logits(hidden[1:])

    block = np.array([ids[text, at], *[256] * 7])
    logits = np.asarray(draft_block(target, draft, ids[None, text, :at], block))
    following = ids[text, at + 1 : at + 8]
    row = text * anchors.shape[1] + place
    np.testing.assert_array_equal(scores.correct[row], logits.argmax(-1) == following)
    logp = np.asarray(jax.nn.log_softmax(logits))[np.arange(7), following]
    np.testing.assert_allclose(scores.logp[row], np.maximum(logp, WORST), rtol=1e-4, atol=1e-4)


def test_a_healthy_drafter_is_healthy(doctor, monkeypatch):
    only(monkeypatch, "target_layer_ids", "rope", "is_causal", "sliding_window", f"{K} and {V}")
    report = doctor.examine(TINY / "dflash", seconds=600)
    assert report.healthy, report.text()
    test = report.self_test
    assert (test.texts, test.anchors, test.left) == (64, 512, 0)
    assert test.tried > 20
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


def test_a_chance_find_does_not_explain_what_stays_low(doctor, plant, monkeypatch):
    """fc's rows shuffled: some setting or other accepts a little more of nothing."""
    only(monkeypatch, "hidden_norm.weight", "sliding_window")
    shuffled = mapped("fc.weight", lambda x: np.random.default_rng(0).permutation(x))
    report = doctor.examine(plant("dflash", shuffled))
    assert names(report)[-1] == ("self-test", "unexplained"), report.text()
    assert len(report.findings) > 1


def test_settings_left_out_for_time_are_counted(doctor, monkeypatch):
    only(monkeypatch, "is_causal", "rope")
    report = doctor.examine(TINY / "dflash", seconds=0)
    assert report.self_test.tried == 0
    assert report.self_test.left == 7
    assert "7 left out for time" in report.text()


# --- targets outside JAX -------------------------------------------------------------------------


class Fickle(HostedDense):
    """Where `several(start, rows)`, its layers see the last four keys alone."""

    def __init__(self, target, several):
        super().__init__(target)
        self._several = several
        short = (4,) * target.config.num_hidden_layers
        config = dataclasses.replace(target.config, layer_window=short)
        self._honest, self._short = target, target.replace(config=config)

    def forward(self, state, ids, count, taps, last_only=False):
        short = self._several(int(state.len[0]), int(count[0]))
        self._target = self._short if short else self._honest
        return super().forward(state, ids, count, taps, last_only)


LINES = [list(b"def add(a, b):\n   "), list(b"import os, sys\nimp")]
HOSTED = {
    "healthy": (lambda start, rows: False, []),
    "verify": (lambda start, rows: 1 < rows <= 8 and start + rows > 32, ["8 rows run at once"]),
    "prompt": (lambda start, rows: rows > 38, ["all 44 rows of the text run at once"]),
    "several": (
        lambda start, rows: rows > 1 and start + rows > 40,
        ["8 rows run at once", "all 44 rows of the text run at once"],
    ),
}


@pytest.mark.parametrize("kind", HOSTED)
def test_one_row_and_several_of_a_hosted_target_are_compared(loaded, kind):
    several, says = HOSTED[kind]
    hosted = loaded._replace(target=Fickle(loaded.target, several))
    report = Doctor(hosted, LINES).examine(TINY / "dflash")
    assert names(report) == [("target", "one row and several rows")] * len(says), report.text()
    for finding, words in zip(report.findings, says, strict=True):
        assert "expected the same logits, found those at position" in finding.text
        assert words in finding.text
    assert report.compared == [18, 36]
    assert "one and several compared after 2 texts of 18 to 36 tokens" in report.text()


def test_files_are_examined_beside_a_hosted_target(loaded, plant, monkeypatch):
    monkeypatch.setattr(clinic, "check_rows", lambda *_: [])
    hosted = loaded._replace(target=HostedDense(loaded.target))
    directory = plant("dflash", stated(rms_norm_eps=0.5, mask_token_id=257))
    report = Doctor(hosted, LINES).examine(directory)
    assert names(report) == [("config", "mask_token_id"), ("config", "rms_norm_eps")]


def test_texts_lie_on_both_sides_of_the_targets_edges(loaded):
    target = HostedDense(loaded.target)
    target.edges, target.max_positions = (4, 100, 298, 500), 300
    assert list(map(len, contexts(target, LINES, 0))) == [18, 36, 96, 292]
    assert list(map(len, contexts(target, None, 0))) == [24, 240, 96, 292]


def test_rows_that_cannot_be_run_are_a_finding(loaded):
    def refuse(start, rows):
        if rows == 8:
            raise RuntimeError("no kernel for 8 rows\nlook here")
        return False

    found = list(check_rows(Fickle(loaded.target, refuse), [LINES[0]]))
    text = f"expected logits after a text of {len(LINES[0])}, found: no kernel for 8 rows look here"
    assert [(f.name, f.text) for f in found] == [("one row and several rows", text)]


def test_a_prompt_of_nothing_is_refused(loaded):
    with pytest.raises(ValueError, match="prompt 1: expected tokens, found none"):
        Doctor(loaded, [[1, 2], []])


def test_edges_that_no_text_reaches_are_named(loaded, monkeypatch):
    monkeypatch.setattr(clinic, "check_rows", lambda *_: [])
    target = HostedDense(loaded.target)
    target.edges, target.max_positions = (4096, 100, 131072), 8192
    report = Doctor(loaded._replace(target=target), LINES).examine(TINY / "dflash")
    assert report.too_long == [4096] and report.compared == [18, 36, 96]
    assert "18 to 96 tokens, not at 4096, where it changes" in report.text()


# --- the command ----------------------------------------------------------------------------------


def test_the_command_names_a_fault_and_exits_1(doctor, plant, capsys, monkeypatch):
    monkeypatch.setattr("dflash_jax.cli.doctor.Doctor", lambda *args: doctor)
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
    command[command.index(str(draft))] = str(TINY / "dflash")
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("healthy")


def test_confidence_faults_by_hand():
    fine = Confidence(for_right=0.7, for_wrong=0.4, right=0.8, ranks=0.8)
    assert fine.says == pytest.approx(0.64)
    assert fine.faults() == []
    sure = Confidence(for_right=0.99, for_wrong=0.95, right=0.8, ranks=0.6)
    assert sure.faults() == ["says 0.95 where drafts are wrong"]
    inverted = Confidence(for_right=0.4, for_wrong=0.6, right=0.6, ranks=0.3)
    assert inverted.faults() == ["ranks right drafts above wrong ones 0.30 of the time"]


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


@pytest.fixture(scope="module")
def thorough(loaded):
    return Doctor(loaded)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_healthy_tiny_drafter_is_healthy(thorough, family):
    report = thorough.examine(TINY / family, seconds=1e9)
    assert report.healthy, report.text()
    assert report.self_test.left == 0


W1, W2 = (f"markov_head.markov_{w}.weight" for w in ("w1", "w2"))
BOOKS = [f"candidate_selector.{side}_codebook" for side in ("predecessor", "successor")]


def fc_reversed(_, tensors):
    fc = tensors["fc.weight"]
    blocks = fc.reshape(len(fc), 3, -1)
    tensors["fc.weight"] = np.ascontiguousarray(blocks[:, ::-1].reshape(fc.shape))


def reordered(_, tensors):
    for name in [n for n in tensors if n.startswith("layers.0.")]:
        swapped(name, name.replace("layers.0.", "layers.1."))(_, tensors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "change", "name", "says"),
    [
        ("dflash", stated(target_layer_ids=[0, 2, 3]), "target_layer_ids", "[1, 3, 4] "),
        ("dspark", stated(target_layer_ids=[2, 4, 5]), "target_layer_ids", "[1, 3, 4] "),
        ("dflash2", stated(target_layer_ids=[4, 3, 1]), "target_layer_ids", "[1, 3, 4] "),
        ("dflash", fc_reversed, "target_layer_ids", "[4, 3, 1] (or fc.weight's column blocks"),
        ("dspark", stated(rope_theta=1000000), "rope", "theta 10000 "),
        ("dspark", stated(is_causal=True), "is_causal", "false "),
        ("dflash2", stated(sliding_window=8), "sliding_window", "32 "),
        ("dflash2", stated(final_logit_softcapping=1.0), "final_logit_softcapping", ""),
        ("dflash2", stated(selector_top_k=1), "selector_top_k", "8 "),
        ("dspark", stated(block_size=4), "block_size", "4 ends too early"),
        ("dflash", reordered, "layers", "in the order [1, 0]"),
        ("dspark", swapped(K, V), f"{K} and {V}", "swapped"),
        ("dflash2", swapped(GATE, UP), f"{GATE} and {UP}", "swapped"),
        ("dspark", swapped(W1, W2), f"{W1} and {W2}", "swapped"),
        ("dflash2", swapped(*BOOKS), f"{BOOKS[0]} and {BOOKS[1]}", "swapped"),
    ],
)
def test_a_fault_of_any_family_is_named(thorough, plant, family, change, name, says):
    report = thorough.examine(plant(family, change), seconds=1e9)
    assert names(report) == [("self-test", name)], report.text()
    assert report.findings[0].text.startswith(says)
