"""The command line, in process, on the tiny trained models (token ids: they have no tokenizer)."""

import io
import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from families import FAMILIES, ORACLES, trained
from safetensors.numpy import load_file

from dflash_jax import Request, SpecSession, generate, load_draft
from dflash_jax.cli import main, make_parser
from dflash_jax.cli.decoding import session_options
from dflash_jax.cli.models import draft_name
from dflash_jax.cli.prompts import request_of, template_args
from dflash_jax.sampling import SamplingParams
from dflash_jax.sharding import named_leaves
from dflash_jax.targets.loading import LoadedTarget
from dflash_jax.text import TextCodec
from dflash_jax.window import DSparkVtPolicy, measured_window

TINY = ORACLES / "tiny"
PROMPT = list(b"def add(first, second):\n    return first + second\n\n\ndef sub(")
IDS = " ".join(map(str, PROMPT))
COUNT = 24
TARGET = ("--target", str(TINY / "target"))


def command(*options, draft="dflash", prompt=IDS, count=COUNT):
    draft = str(TINY / draft) if draft in FAMILIES else draft
    arguments = ["generate", prompt, *TARGET, "--draft", draft, "--ids"]
    return [*arguments, "--max-new-tokens", str(count), *map(str, options)]


@pytest.fixture
def cli(capsys):
    """Runs a command that must succeed; gives what it printed."""

    def run(*args, **kwargs):
        capsys.readouterr()
        assert main(command(*args, **kwargs)) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused: status 2, nothing printed, one line of reason."""

    def run(*args, **kwargs):
        capsys.readouterr()
        assert main(command(*args, **kwargs)) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("dflash-jax: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return run


def expected(family="dflash", count=COUNT, **options):
    target, draft = trained(family)
    return generate(target, draft, PROMPT, count, **options)


# --- generate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_generation_is_printed_with_its_figures(cli, family):
    ids, figures = cli(draft=family).splitlines()
    out = expected(family)
    assert [int(word) for word in ids.split()] == out.token_ids
    assert figures.startswith(
        f"[acceptance length {out.mean_acceptance_length:.2f}, {COUNT} tokens "
    )
    assert re.search(r" tok/s, first token [0-9.]+ s, memory [0-9.]+ MiB\]$", figures)


@pytest.mark.parametrize("family", FAMILIES)
def test_json_is_one_object_with_everything(cli, family):
    report = json.loads(cli("--json", draft=family))
    out = expected(family)
    assert report["token_ids"] == out.token_ids
    assert report["acceptance_lengths"] == out.acceptance_lengths
    assert report["mean_acceptance_length"] == out.mean_acceptance_length
    assert (report["emitted"], report["rounds"]) == (COUNT, out.rounds)
    assert (report["drafted"], report["accepted"]) == (out.drafted, out.accepted)
    assert (report["prompt_tokens"], report["finish_reason"]) == (len(PROMPT), "length")
    assert report["family"] == family
    assert report["dtype"] == "float32"
    assert report["text"] is None
    assert report["device"].startswith("cpu")
    assert set(report["versions"]) >= {"dflash-jax", "jax"}
    assert (report["plain"], report["lossless"], report["speedup"]) == (None, None, None)
    for name in ("seconds", "prefill_seconds", "compile_seconds", "tokens_per_second"):
        assert report[name] > 0
    assert report["first_token_seconds"] == report["prefill_seconds"]
    memory = report["memory"]
    assert memory["total"] == memory["weights"] + memory["caches"] + memory["working"]
    leaves = jax.tree.leaves(trained(family))
    assert memory["weights"] == sum(leaf.nbytes for leaf in leaves)


def test_compare_says_whether_it_is_lossless_and_how_fast(cli):
    report = json.loads(cli("--compare", "--json", draft="dflash2"))
    assert report["lossless"] is True
    assert report["plain"]["token_ids"] == report["token_ids"]
    assert report["speedup"] > 0
    assert report["plain_difference"] is None
    text = cli("--compare", draft="dflash2")
    assert "lossless yes" in text
    assert "speedup " in text


def test_plain_decoding(cli):
    report = json.loads(cli("--json", draft="none"))
    target, _ = trained("dflash")
    assert report["token_ids"] == generate(target, None, PROMPT, COUNT).token_ids
    assert (report["drafted"], report["family"]) == (0, None)


def test_a_prompt_from_standard_input_and_commas(cli, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(", ".join(map(str, PROMPT)) + "\n"))
    assert json.loads(cli("--json", prompt="-"))["token_ids"] == expected().token_ids


def test_streaming_prints_the_same_tokens(cli):
    ids, figures = cli("--stream").splitlines()
    assert [int(word) for word in ids.split()] == expected().token_ids
    assert "acceptance length" in figures


def test_stop_tokens_are_added_to_the_targets(cli):
    whole = expected().token_ids
    report = json.loads(cli("--json", "--stop", whole[5], "--stop", 263))
    assert report["token_ids"] == whole[: whole.index(whole[5]) + 1]
    assert report["finish_reason"] == "stop"


def test_sizes(cli):
    report = json.loads(cli("--json", "--block-size", 4, "--verify-width", 3, "--capacity", 70))
    out = expected(block_size=4, verify_width=3, capacity=70)
    assert report["acceptance_lengths"] == out.acceptance_lengths
    assert report["token_ids"] == out.token_ids
    assert (report["emitted"], report["finish_reason"]) == (out.emitted, "capacity")


def test_the_other_harvest_changes_drafts_but_no_token(cli):
    report = json.loads(cli("--json", "--harvest", "dflash", draft="dspark"))
    out = expected("dspark", harvest="dflash")
    assert report["token_ids"] == out.token_ids == expected("dspark").token_ids
    assert report["acceptance_lengths"] == out.acceptance_lengths


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        (("--window-policy", "fixed"), DSparkVtPolicy("fixed")),
        (("--window-policy", "ladder"), DSparkVtPolicy("ladder")),
        (("--window-policy", "confidence", "--tau", 0.05), DSparkVtPolicy("confidence", 0.05)),
        (("--window-policy", "confidence-slot"), DSparkVtPolicy("confidence-slot", 0.5)),
    ],
    ids=lambda x: x.kind if isinstance(x, DSparkVtPolicy) else "",
)
def test_window_policies(cli, options, policy):
    report = json.loads(cli("--json", *options, "--widths", 9, draft="dspark"))
    out = expected("dspark", policy=policy)
    assert report["acceptance_lengths"] == out.acceptance_lengths
    assert report["drafted"] == out.drafted
    assert report["token_ids"] == out.token_ids


def test_widths_are_compiled_where_rows_cost_and_the_policy_varies():
    target, draft = trained("dspark")

    def widths(*given):
        args = make_parser().parse_args(["generate", "x", "--draft", "own", *given])
        return session_options(args, LoadedTarget(target, None, "tiny"), draft)["widths"]

    assert widths() == widths("--window-policy", "ladder") == (3, 5, 9)
    assert widths("--window-policy", "fixed") == (9,)
    assert widths("--window-policy", "cost") == (1, 3, 5, 9)
    assert widths("--window-policy", "ladder", "--verify-width", "4") == (2, 4)
    assert widths("--window-policy", "cost", "--widths", "4") == [4]


PROMPTS = [
    {"prompt_ids": PROMPT[:9], "max_new_tokens": 12},
    {"prompt_ids": PROMPT[3:12], "kind": "code"},
    {"prompt_ids": PROMPT[:14]},
]


def file_arguments(path, *options):
    names = ("--draft", str(TINY / "dflash"), "--prompts", str(path), "--batch", "2")
    return ["generate", *TARGET, *names, "--max-new-tokens", "8", *options]


def test_a_file_of_prompts_is_answered_in_json_lines(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, PROMPTS)), encoding="utf-8")
    assert main(file_arguments(path)) == 0
    lines = sorted(
        map(json.loads, capsys.readouterr().out.splitlines()), key=lambda x: x["request"]
    )
    assert [line["request"] for line in lines] == [0, 1, 2]
    target, _ = trained("dflash")
    prompts = [record["prompt_ids"] for record in PROMPTS]
    outs = generate(target, None, prompts, [12, 8, 8])
    assert [line["token_ids"] for line in lines] == [out.token_ids for out in outs]
    assert [line["finish_reason"] for line in lines] == ["length"] * 3
    for line in lines:
        assert len(line["token_ids"]) == 1 + line["rounds"] + line["accepted"]
        assert line["drafted"] >= max(1, line["accepted"])


def test_a_lines_own_options_go_before_the_commands():
    args = make_parser().parse_args(["generate", "--prompts", "f", "--max-new-tokens", "9"])
    record = {"prompt_ids": [1, 2], "temperature": 0.5, "seed": 7}
    common = SamplingParams(temperature=1.0, top_p=0.5)
    loaded = LoadedTarget(trained("dflash")[0], None, "tiny")
    request = request_of(record, loaded, args, [3], common)
    assert request == Request([1, 2], 9, SamplingParams(0.5, top_p=0.5, seed=7), [3])
    assert request_of(record | {"max_new_tokens": 2}, loaded, args, [], common).max_new_tokens == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "prompts.jsonl:1: not JSON"),
        ("", "prompts.jsonl: expected prompts, found none"),
        ('{"prompt": "Hi"}', "prompts.jsonl:1: expected prompt_ids"),
        ('{"prompt_ids": [1], "top": 3}', "prompts.jsonl:1: expected keys of prompt, messages"),
        ('{"prompt_ids": [1], "top_p": 3}', "prompts.jsonl:1: top_p: expected a number"),
        ('\n{"prompt_ids": [999]}', "prompts.jsonl:2: prompt: expected ids in 0..263, found 999"),
        ('{"prompt_ids": []}', "prompts.jsonl:1: prompt: expected at least one token, found none"),
        ('{"prompt_ids": [1], "max_new_tokens": "x"}', "prompts.jsonl:1: max_new_tokens: expected"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(text, message, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    assert main(file_arguments(path)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "PROMPT: expected a prompt or --prompts FILE, found neither"),
        (["generate", "x", "--batch", "2"], "--batch: expected with --prompts FILE, found one"),
        (["generate", "x", "--prompts", "f"], "--prompts: expected no PROMPT beside it"),
        (["generate", "--prompts", "f", "--json"], "--json: expected one prompt, found --prompts"),
    ],
)
def test_one_prompt_or_a_file_of_them(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_sampling_flags(cli):
    flags = {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "repeat_penalty": 1.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "seed": 7,
    }
    options = [x for name, value in flags.items() for x in ("--" + name.replace("_", "-"), value)]
    report = json.loads(cli("--json", *options, draft="dflash2"))
    out = expected("dflash2", sampling=SamplingParams(**flags))
    assert report["token_ids"] == out.token_ids
    assert report["acceptance_lengths"] == out.acceptance_lengths
    assert report["token_ids"] != expected("dflash2").token_ids
    again = json.loads(cli("--json", *options, draft="dflash2"))
    assert again["token_ids"] == report["token_ids"]
    other = json.loads(cli("--json", *options[:-1], 8, draft="dflash2"))
    assert other["token_ids"] != report["token_ids"]


def test_two_processes_give_the_same_tokens():
    """Nothing hangs on a process, such as its hash seed."""
    arguments = command("--temperature", 0.9, "--seed", 3, "--json", "--no-compile-cache", count=16)
    code = "import sys; from dflash_jax.cli import main; sys.exit(main(sys.argv[1:]))"

    def start(seed):
        env = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        asked = [sys.executable, "-c", code, *arguments]
        return subprocess.Popen(asked, env=env, stdout=subprocess.PIPE, text=True)

    tokens = []
    for process in [start("1"), start("2")]:
        out, _ = process.communicate()
        assert process.returncode == 0
        tokens.append(json.loads(out)["token_ids"])
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 16


def test_greedy_penalties(cli):
    options = ("--repeat-penalty", 1.5, "--presence-penalty", 0.5)
    report = json.loads(cli("--json", "--compare", *options))
    params = SamplingParams(repeat_penalty=1.5, presence_penalty=0.5)
    assert report["token_ids"] == expected(sampling=params).token_ids
    assert report["lossless"] is True
    assert report["token_ids"] != expected().token_ids


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-k", 5), "--top-k: expected --temperature above 0, found greedy decoding"),
        (("--top-p", 0.5), "--top-p: expected --temperature above 0"),
        (("--min-p", 0.1), "--min-p: expected --temperature above 0"),
        (("--seed", 3), "--seed: expected --temperature above 0"),
        (("--temperature", 1e-6, "--seed", 3), "--seed: expected --temperature above 0"),
        (("--temperature", -1), "temperature: expected a number from 0 to 1e+20, found -1.0"),
        (("--temperature", 1, "--top-p", 1.5), "top_p: expected a number from 0 to 1, found 1.5"),
        (("--temperature", 1, "--top-k", -3), "top_k: expected an integer from 0"),
        (("--temperature", 1, "--min-p", "nan"), "min_p: expected a number from 0 to 1, found nan"),
        (("--temperature", 1, "--seed", 2**32), "seed: expected an integer from 0"),
        (("--repeat-penalty", 0), "repeat_penalty: expected a number from 1e-20 to 1e+20, found 0"),
        (("--compare", "--temperature", 1), "--compare: expected greedy decoding, found --temper"),
        (("--tau", 0.5), "--tau: expected --window-policy confidence or confidence-slot, found no"),
        (("--window-policy", "ladder", "--tau", 0.5), "--tau: expected --window-policy confidence"),
        (("--window-policy", "confidence"), "window policy 'confidence': expected a drafter with"),
        (("--block-size", 9), "block_size: expected 2..8, found 9"),
        (("--verify-width", 1), "verify_width: expected 2..8, found 1"),
        (("--harvest", "dspak"), "harvest: expected 'dflash' or 'dspark', found 'dspak'"),
        (("--capacity", 10), "prompt: expected at most 10 tokens (capacity), found 60"),
        (("--stop", "<end>"), "--stop: expected a token of the vocabulary or an id in 0..263, fo"),
        (("--stop", 264), "or an id in 0..263, found '264'"),
        (("--stop", 2**70), f"or an id in 0..263, found '{2**70}'"),
        (("--stop", "9" * 5000), f"or an id in 0..263, found '{'9' * 60}...'"),
        (("--stop", "\u0663"), "or an id in 0..263, found '\u0663'"),
        (("--stop", ""), "or an id in 0..263, found ''"),
        (("--dtype", "float32", "--capacity", 0), "capacity: expected 1..1024, found 0"),
    ],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, tuple) else "",
)
def test_options_that_cannot_be_honoured(refused, options, message):
    assert message in refused(*options)


def test_tau_lies_between_0_and_1(refused):
    options = ("--window-policy", "confidence", "--tau", 1)
    assert "tau: expected a number between 0 and 1, found 1.0" in refused(*options, draft="dspark")


def test_dflash2_is_mask_fill(refused):
    assert "a DFlash2 checkpoint is mask-fill" in refused("--harvest", "dspark", draft="dflash2")


@pytest.mark.parametrize(
    "option",
    [("--block-size", 4), ("--verify-width", 3), ("--harvest", "dflash"),
     ("--window-policy", "ladder"), ("--tree",)],
    ids=lambda o: o[0],
)  # fmt: skip
def test_drafting_options_need_a_drafter(refused, option):
    message = refused(*option, draft="none")
    assert f"{option[0]}: expected a drafter to apply it to, found --draft none" in message


def test_compare_needs_a_drafter(refused):
    assert "--compare: expected a drafter to compare with" in refused("--compare", draft="none")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("1 2 three", "PROMPT: expected token ids (--ids), found 'three'"),
        ("1_0", "PROMPT: expected token ids (--ids), found '1_0'"),
        ("1.5", "PROMPT: expected token ids (--ids), found '1.5'"),
        ("\uff11", "PROMPT: expected token ids (--ids), found '\uff11'"),
        ("9" * 5000, f"PROMPT: expected token ids (--ids), found '{'9' * 60}...'"),
        ("", "prompt: expected at least one token, found an empty one"),
        ("1 264", "prompt 0: expected ids in 0..263, found 264"),
        ("1 -2", "prompt 0: expected ids in 0..263, found -2"),
    ],
)
def test_prompts_that_are_not_token_ids(refused, prompt, message):
    assert message in refused(prompt=prompt)


def test_budgets_are_positive(refused):
    assert "max_new_tokens: expected a positive integer, found 0" in refused(count=0)


def test_text_needs_a_tokenizer(capsys):
    arguments = [a for a in command() if a != "--ids"]
    assert main(arguments) == 2
    assert "expected a tokenizer beside it (or --ids), found none" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("generate", "x"), ("bench",), ("plan",)])
def test_the_default_drafter(command, monkeypatch):
    def chosen(*given):
        return draft_name(make_parser().parse_args([*command, *given]))

    assert chosen() == "dspark"
    assert chosen("--draft", "dflash") == "dflash"
    assert chosen("--draft", "none") is None
    if command != ("plan",):
        assert chosen("--temperature", "0.8") == "dspark"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert chosen() == "dspark"


@pytest.mark.parametrize("family", FAMILIES)
def test_shipped_drafters_use_the_window_measured_for_the_device(family):
    """Unless any option of a round is given, or the drafter is the user's own."""
    target, draft = trained(family)
    loaded = LoadedTarget(target, None, "tiny")

    def options(*given):
        args = make_parser().parse_args(["generate", "x", *given])
        return session_options(args, loaded, draft)

    chosen = options("--draft", family)
    assert chosen["policy"] == DSparkVtPolicy("fixed")
    assert chosen["tree"] and chosen["verify_width"] == 4
    assert chosen.get("block_size") == (4 if family == "dspark" else None)
    assert options() == options("--tree") == chosen
    assert options("--no-tree") == {k: v for k, v in chosen.items() if k != "tree"}
    session = SpecSession(target, draft, **chosen)
    assert session._plan.tree and session._plan.verify_width == 4
    for given in (("--block-size", "6"), ("--verify-width", "5"), ("--window-policy", "ladder")):
        assert options(*given)["verify_width"] == (5 if "5" in given else None)
    own = options("--draft", str(TINY / family))
    assert own["policy"].kind == ("confidence-slot" if family == "dspark" else "fixed")
    fixed = DSparkVtPolicy("fixed")
    assert measured_window(family, "gpu") == {"policy": fixed}
    assert measured_window(family, "gpu", trees=True) == {"policy": fixed, "tree": True}
    assert measured_window(family, "cpu")["verify_width"] == 4


def test_another_target_has_no_default_drafter(capsys):
    assert main(["generate", IDS, *TARGET, "--ids"]) == 2
    assert "--draft: expected a drafter for " in capsys.readouterr().err


def test_missing_models_are_named(refused, capsys):
    message = refused(draft="nowhere")
    assert "drafter: expected a directory or one of " in message
    assert "'nowhere'" in message
    assert main(["generate", IDS, "--target", "nowhere", "--draft", "none", "--ids"]) == 2
    error = capsys.readouterr().err
    assert "nowhere" in error
    assert error.count("\n") == 1


def test_a_drafter_of_another_target_is_refused(refused):
    draft = str(ORACLES / "stages" / "dspark_vanilla" / "checkpoint")
    assert "hidden_size: the drafter expects 64" in refused(draft=draft)


# --- export ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_export_writes_bf16_tensors_under_their_names(family, tmp_path, capsys):
    out = tmp_path / "exported"
    assert main(["export", "--draft", str(TINY / family), "--out", str(out)]) == 0
    assert f"{family} drafter, bf16" in capsys.readouterr().out
    ours, theirs = (load_file(d / "model.safetensors") for d in (out, TINY / family))
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype.name == "bfloat16"
        np.testing.assert_array_equal(tensor, theirs[name])
    again = load_draft(out, trained(family)[0])
    assert again.config == trained(family)[1].config
    for (path, a), (_, b) in zip(
        named_leaves(again), named_leaves(trained(family)[1]), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=path)


def test_export_needs_a_drafter_and_a_directory(tmp_path, capsys):
    assert main(["export", "--draft", "nowhere", "--out", str(tmp_path)]) == 2
    assert "drafter: expected a directory or one of" in capsys.readouterr().err
    file = tmp_path / "file"
    file.write_text("")
    assert main(["export", "--draft", str(TINY / "dflash"), "--out", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("d", ["--precision", "int8"]),
        ("d.gguf", ["--precision", "q4_0", "--format", "gguf"]),
        ("d.gguf", ["--precision", "q8_0", "--head-rows", "20", *TARGET]),
    ],
)
def test_export_in_other_precisions_and_with_a_smaller_head(name, options, tmp_path, capsys):
    out = tmp_path / name
    assert main(["export", "--draft", str(TINY / "dspark"), "--out", str(out), *options]) == 0
    assert f"dspark drafter, {options[1]}" in capsys.readouterr().out
    draft = load_draft(out, trained("dspark")[0])
    assert draft.config.precision == options[1]
    assert (draft.head is not None) == ("--head-rows" in options)
    # And back to what others read.
    again = tmp_path / "again"
    assert main(["export", "--draft", str(out), "--out", str(again)]) == 0
    assert load_draft(again).config.precision is None
    tensors = load_file(again / "model.safetensors")
    assert {t.dtype.name for n, t in tensors.items() if n != "d2t"} == {"bfloat16"}


def test_export_counts_a_corpus(tmp_path, capsys):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(json.dumps({"prompt_ids": [7, 7, 9, 4, 4, 4]}))
    arguments = ["export", "--draft", str(TINY / "dflash"), "--out", str(tmp_path / "d"), *TARGET]
    assert main([*arguments, "--head-rows", "2", "--corpus", str(corpus)]) == 0
    assert "a head of 2 rows" in capsys.readouterr().out
    draft = load_draft(tmp_path / "d", trained("dflash")[0])
    assert draft.head.target_ids(np.arange(2)).tolist() == [4, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "gguf"], "--format gguf: expected --out to name one"),
        (["--ranks", "a", "--corpus", "b"], "--ranks: expected without --corpus"),
        (["--ranks", "nowhere.npy", *TARGET], "ranks: expected a file nowhere.npy"),
        (
            ["--head-rows", "1000", *TARGET],
            "head_rows: expected 1..264 (ids there are), found 1000",
        ),
        (["--precision", "q5_0"], "invalid choice: 'q5_0'"),
    ],
)
def test_what_export_refuses(options, message, tmp_path, capsys):
    out = ["--out", str(tmp_path / "d")]
    assert main(["export", "--draft", str(TINY / "dflash"), *out, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_drafter_is_quantised_and_trimmed_as_it_loads(cli):
    options = ("--draft-precision", "q8_0", "--draft-head-rows", 200, "--draft-kv-dtype", "int8")
    report = json.loads(cli("--json", *options, draft="dflash2"))
    told = [report[f"draft_{name}"] for name in ("precision", "head_rows", "kv_dtype")]
    assert told == ["q8_0", 200, "int8"]
    plain = generate(trained("dflash2")[0], None, PROMPT, COUNT)
    assert report["token_ids"] == plain.token_ids


@pytest.mark.parametrize(
    ("options", "draft", "message"),
    [
        (("--draft-head-rows", "few"), "dflash", "--draft-head-rows: expected a number or all"),
        (("--draft-head-rows", 7), "dflash2", "at least selector_top_k 8 candidates, found 7"),
        (("--ranks", "x"), "none", "--ranks: expected a drafter to apply it to"),
        (("--draft-precision", "int8"), "none", "--draft-precision: expected a drafter"),
    ],
)
def test_what_a_drafter_cannot_be_loaded_as(refused, options, draft, message):
    assert message in refused(*options, draft=draft)


# --- the parser -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["answer"], "invalid choice: 'answer'"),
        (["generate"], "PROMPT: expected a prompt or --prompts FILE, found neither"),
        (command("--beam", 4), "unrecognized arguments: --beam 4"),
        (command("--top-k", "many"), "argument --top-k: invalid int value: 'many'"),
        (command("--window-policy", "wide"), "argument --window-policy: invalid choice: 'wide'"),
        (["export", "--draft", "x"], "the following arguments are required: --out"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("dflash-jax: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "1", "--ids", "--target", ""], "target: expected 'smollm2', a directory"),
        (["generate", "1", "--ids", *TARGET, "--draft", ""], "drafter: expected a directory or"),
        (["export", "--draft", "", "--out", "x"], "drafter: expected a directory or"),
        (["export", "--draft", str(TINY / "dflash"), "--out", ""], "--out: expected a directory"),
    ],
)
def test_an_empty_name_is_not_the_current_directory(
    arguments, message, capsys, tmp_path, monkeypatch
):
    (tmp_path / "config.json").write_bytes((TINY / "dflash" / "config.json").read_bytes())
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 8 bytes.\nat x"),
            "8 bytes",
        ),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too much"), "RESOURCE_EXHAUSTED"),
        (MemoryError(), "out of memory"),
        (ValueError("one\ntwo"), "dflash-jax: one two"),
    ],
)
def test_want_of_memory_and_long_reasons_are_one_line(error, message, capsys, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("dflash_jax.cli.models.load_target", fail)
    assert main(command()) == 2
    found = capsys.readouterr().err
    assert message in found
    assert found.count("\n") == 1


def test_the_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.startswith("dflash-jax ")


# --- arguments of the chat template ---------------------------------------------------------------


class Arguments:
    """The options that `template_args` looks at."""

    def __init__(self, *given, no_chat=False, ids=False):
        self.template_arg, self.no_chat, self.ids = given, no_chat, ids


THINKING = TextCodec(None, "{{ messages }}{{ enable_thinking }}{{ effort }}{{ tools }}")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], {}),
        (["enable_thinking=false"], {"enable_thinking": False}),
        (["effort=high", "enable_thinking=true"], {"effort": "high", "enable_thinking": True}),
        (["effort=2", 'tools=["a=b"]'], {"effort": 2, "tools": ["a=b"]}),
        (["effort="], {"effort": ""}),
    ],
)
def test_template_arguments_are_json_or_text(given, expected):
    loaded = LoadedTarget(None, THINKING, "it")
    assert template_args(Arguments(*given), loaded) == expected


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (Arguments("enable_thinking"), "expected NAME=VALUE, found 'enable_thinking'"),
        (Arguments("=1"), "expected NAME=VALUE"),
        (Arguments("effort=1", no_chat=True), "expected a chat template to pass it to"),
        (Arguments("effort=1", ids=True), "expected a chat template to pass it to"),
        (
            Arguments("enable_thinkng=false"),
            r"what the chat template reads \(effort, enable_thinking, tools\), found enable_t",
        ),
        (Arguments("messages=[]"), "found messages"),
    ],
)
def test_template_arguments_that_would_do_nothing_are_refused(arguments, reason):
    with pytest.raises(ValueError, match=f"--template-arg: .*{reason}"):
        template_args(arguments, LoadedTarget(None, THINKING, "it"))


def test_template_arguments_need_a_template(refused):
    assert "expected a chat template to pass it to" in refused("--template-arg", "effort=1")
