"""`dflash-jax bench`: figures counted by hand, on the tiny trained models, and what is refused."""

import dataclasses
import json

import pytest
from families import FAMILIES, ORACLES, trained
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax import benchmark, generate
from dflash_jax.benchmark import Prompt, decode, run_trial
from dflash_jax.benchmark.figure import save_figure
from dflash_jax.benchmark.report import (
    Answer,
    Report,
    Setting,
    Trial,
    comparable,
    pairs_of,
    read_report,
)
from dflash_jax.benchmark.text import changes, tables
from dflash_jax.cli import main, make_parser
from dflash_jax.cli.bench import sweep, ways
from dflash_jax.compare import top2_gap
from dflash_jax.results import SlotAcceptance
from dflash_jax.sampling import SamplingParams
from dflash_jax.targets.loading import LoadedTarget

TINY = ORACLES / "tiny"
TEXTS = [
    b"def add(first, second):\n    return first + second\n\n\ndef sub(",
    b"for i in range(10):\n    print(i)\nfor j in ",
    b"import os\nimport sys\n\n\nclass Point:\n    def __init__(self, x",
]
PROMPTS = [Prompt(list(text), kind) for text, kind in zip(TEXTS, "aab", strict=True)]
COUNT = 20


# --- figures --------------------------------------------------------------------------------------


@given(
    st.lists(
        st.integers(1, 8).flatmap(lambda width: st.tuples(st.integers(1, width), st.just(width)))
    )
)
@settings(deadline=None, max_examples=200)
def test_slots_are_counted_draft_by_draft(rounds):
    slots = SlotAcceptance.of([gain for gain, _ in rounds], [width for _, width in rounds])
    longest = max((width for _, width in rounds), default=1) - 1
    assert len(slots.kept) == len(slots.held) == longest
    for slot in range(longest):
        # The fates of this slot's drafts: accepted drafts are the first gain - 1 of width - 1.
        seen = [slot < gain - 1 for gain, width in rounds if slot < width - 1]
        judged = [
            slot < gain - 1 for gain, width in rounds if slot <= gain - 1 and slot < width - 1
        ]
        assert slots.verified[slot] == len(seen)
        assert slots.tried[slot] == len(judged)
        assert slots.kept[slot] == (sum(seen) / len(seen) if seen else 0)
        assert slots.held[slot] == (sum(judged) / len(judged) if judged else 0)


def answer(kind, gains, widths, seconds=1.0):
    return Answer(kind, "", 5, sum(gains) + 1, "length", gains, widths, seconds, 2 * seconds)


def trial(answers, setting=Setting(1, 8, 8, "fixed"), **fields):  # noqa: B008
    known = {"tokens": 60, "seconds": 2.0, "plain_tokens": 60, "plain_seconds": 3.0}
    return Trial(setting, answers, **(known | fields))


def test_a_trials_figures():
    told = trial([answer("qa", [3, 1], [4, 4]), answer("code", [2], [3]), answer("qa", [1], [2])])
    assert told.mean_acceptance_length == 7 / 4
    assert told.histogram == {1: 2, 2: 1, 3: 1}
    assert told.kinds == {"qa": 5 / 3, "code": 2.0}
    assert told.slots.verified == [4, 3, 2]
    assert told.slots.kept == [2 / 4, 1 / 3, 0.0]
    assert (told.tokens_per_second, told.plain_tokens_per_second) == (30.0, 20.0)
    assert told.speedup == 1.5
    assert not told.changed  # sampled text: nothing to hold it against
    assert dataclasses.replace(told, lossless=2).changed
    assert not dataclasses.replace(told, lossless=3).changed


def test_a_trial_without_rounds():
    told = trial([answer("", [], [])], tokens=0, seconds=0.0, plain_tokens=0, plain_seconds=0.0)
    assert (told.mean_acceptance_length, told.speedup, told.histogram, told.kinds) == (0, 0, {}, {})
    assert told.slots == SlotAcceptance([], [], [], [])


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_generate(family):
    target, draft = trained(family)
    told = run_trial(target, draft, PROMPTS, COUNT, {"block_size": 4})
    assert told.setting.block_size == 4
    for answer, prompt in zip(told.answers, PROMPTS, strict=True):
        alone = generate(target, draft, prompt.ids, COUNT, block_size=4)
        assert answer.acceptance_lengths == alone.acceptance_lengths
        assert answer.verify_widths == alone.verify_widths
        assert (answer.emitted, answer.kind) == (COUNT, prompt.kind)
        assert answer.prompt_tokens == len(prompt.ids)
    assert told.same == told.lossless == len(PROMPTS)
    assert told.tokens == told.plain_tokens == len(PROMPTS) * (COUNT - 1)
    assert told.seconds == sum(answer.seconds for answer in told.answers)


def test_a_short_last_group_is_filled_up_for_the_rate_alone():
    target, draft = trained("dflash")
    done = []
    pair = decode(target, draft, PROMPTS, COUNT, {}, batch=2, tick=done.append)
    alone = decode(target, draft, PROMPTS, COUNT, {})
    assert [g.token_ids for g in pair.generations] == [g.token_ids for g in alone.generations]
    assert pair.tokens == 4 * (COUNT - 1)
    assert alone.tokens == 3 * (COUNT - 1)
    assert done == [2, 1]


@pytest.mark.parametrize("batch", [0, 4])
def test_a_batch_is_of_different_prompts(batch):
    with pytest.raises(ValueError, match=rf"batch: expected 1\.\.3 .*, found {batch}"):
        decode(*trained("dflash"), PROMPTS, COUNT, {}, batch)


def test_text_that_parts_from_plain_is_decoded_again_by_the_same_program():
    target, draft = trained("dflash")
    plain = decode(target, None, PROMPTS, COUNT, {})
    flipped = list(plain.generations)
    ids = list(flipped[1].token_ids)
    ids[7] += 1
    flipped[1] = dataclasses.replace(flipped[1], token_ids=ids)
    told = run_trial(
        target, draft, PROMPTS, COUNT, {}, plain=dataclasses.replace(plain, generations=flipped)
    )
    assert (told.same, told.lossless) == (2, 3)
    assert not told.changed
    gap = top2_gap(target, [*PROMPTS[1].ids, *ids[:7]])
    assert told.largest_gap == pytest.approx(gap, rel=1e-6)


def test_a_changed_token_is_seen(monkeypatch):
    target, draft = trained("dflash")
    real = benchmark.decode

    def faulty(target, draft, prompts, *args, **kwargs):
        done = real(target, draft, prompts, *args, **kwargs)
        if draft is None or "accept" in args[1]:
            return done
        broken = [
            dataclasses.replace(g, token_ids=[*g.token_ids[:-1], 1]) for g in done.generations[:1]
        ]
        return dataclasses.replace(done, generations=broken + done.generations[1:])

    monkeypatch.setattr(benchmark, "decode", faulty)
    told = run_trial(target, draft, PROMPTS, COUNT, {})
    assert (told.same, told.lossless, told.changed) == (2, 2, True)


def test_sampled_text_is_held_against_nothing():
    options = {"sampling": SamplingParams(temperature=0.8, seed=3)}
    told = run_trial(*trained("dflash"), PROMPTS, COUNT, options)
    assert (told.same, told.lossless) == (None, None)
    assert told.plain_tokens == 3 * (COUNT - 1)


# --- reports --------------------------------------------------------------------------------------


def test_a_trial_of_trees_without_a_round():
    told = trial([answer("qa", [], [])], setting=Setting(1, 8, 16, "tree"))
    assert told.slots.kept == told.gains == []
    assert told.mean_acceptance_length == 0.0


def report(trials=None, **conditions):
    known = {
        "target": "tiny",
        "dtype": "float32",
        "device": "cpu: cpu",
        "prompts": 2,
        "chat_template": None,
        "template_args": {},
        "max_new_tokens": 8,
        "sampling": {"temperature": 0.0},
    }
    return Report(
        conditions=known | conditions,
        drafter={"name": "d", "family": "dflash", "precision": "float"},
        versions={"dflash-jax": "0", "jax": "0"},
        trials=trials or [trial([answer("qa", [3, 1], [4, 4])], same=1, lossless=1)],
    )


def test_a_report_is_kept(tmp_path):
    ours = report(template_args={"enable_thinking": False})
    ours.save(tmp_path / "run.json")
    assert read_report(tmp_path / "run.json") == ours
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["trials"][0]["figures"]["histogram"] == {"1": 1, "3": 1}


def test_what_was_drafted_with_is_told():
    """Reports of before there were int8 caches say nothing of them."""
    ours = report()
    assert "with d (dflash, float): 2 prompts" in next(tables(ours))
    int8 = dataclasses.replace(ours, drafter={**ours.drafter, "kv_dtype": "int8"})
    assert "with d (dflash, float, int8 draft KV): 2 prompts" in next(tables(int8))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"format": 2}', '{"format": 1, "trials": [{}]}', "[" * 100000, "NaN"],
)
def test_what_is_no_report_is_named(text, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"{file}: expected a report of dflash-jax bench"):
        read_report(file)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sampling": {"temperature": 0.8}}, 'sampling {"temperature": 0.8} (now'),
        ({"template_args": {"enable_thinking": True}}, 'template_args {"enable_thinking": true}'),
        ({"chat_template": "abc"}, "chat_template abc (now null)"),
        ({"prompts": 3, "dtype": "bfloat16"}, "dtype bfloat16 (now float32); prompts 3 (now 2)"),
        ({"new": 1}, "new 1 (now null)"),
    ],
)
def test_unlike_runs_are_not_compared(changes, named):
    with pytest.raises(ValueError, match="expected a run under the same conditions") as error:
        comparable(report(), report(**changes))
    assert named in str(error.value)


def test_runs_share_settings():
    narrow = Setting(1, 4, 4, "fixed")
    both = [trial([answer("", [2], [4])]), trial([answer("", [1], [4])], narrow)]
    pairs = pairs_of(report(both), report([trial([answer("", [3], [4])], narrow)]))
    assert [(a.setting, b.mean_acceptance_length) for a, b in pairs] == [(narrow, 3.0)]
    lines = list(changes("old.json", report(), pairs))
    assert "against old.json: d (dflash, float), dflash-jax 0, jax 0" in lines
    assert "tokens/round 3.00 -> 1.00, tok/s 30.0 -> 30.0 (1.00x)" in lines[-1]
    with pytest.raises(ValueError, match=r"setting of both runs, found block 4, .* \(now block 8,"):
        pairs_of(report(), report([trial([answer("", [3], [4])], narrow)]))


def test_the_tables_flag_what_is_slow_or_wrong():
    slow = trial([answer("qa", [2, 1], [4, 4])], seconds=9.0, same=0, lossless=0, largest_gap=0.25)
    fast = trial([answer("qa", [3, 1], [4, 4])], Setting(4, 8, 8, "ladder"), same=1, lossless=1)
    lines = list(tables(report([slow, fast])))
    row = next(line for line in lines if " fixed " in line)
    assert "(largest top-2 gap 0.25)" in row
    assert row.endswith("CHANGED A TOKEN  slower than plain")
    other = next(line for line in lines if " ladder " in line and "x" in line)
    assert other.endswith("1.50x       1/1       1/1")
    assert "fastest: block 8, 8 rows, ladder, batch 4" in lines


def test_the_figure_says_what_it_shows(tmp_path):
    save_figure(report(), tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    empty = report([trial([answer("", [], [])], tokens=0, plain_tokens=0)])
    save_figure(empty, tmp_path / "empty.png")
    with pytest.raises(ValueError, match=r"run.txt: expected a name that ends in .png"):
        save_figure(report(), tmp_path / "run.txt")


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    records = [{"prompt_ids": prompt.ids, "kind": prompt.kind} for prompt in PROMPTS]
    file.write_text("\n".join(map(json.dumps, records)))
    return file


def command(file, *options, draft="dflash"):
    models = ["--target", TINY / "target", "--draft", TINY / draft]
    arguments = ["bench", *models, "--prompts", file, "--max-new-tokens", 8, *options]
    return [str(argument) for argument in arguments]


def settings_asked_for(*options, family="dspark"):
    loaded = LoadedTarget(trained(family)[0], None, "tiny")
    args = make_parser().parse_args(["bench", "--draft", "x", *options])
    return [
        (
            way["block_size"],
            way["verify_width"],
            "tree" if way.get("tree") else way["policy"].kind,
            way["policy"].tau,
        )
        for way in ways(args, loaded, trained(family)[1])
    ]


def test_every_combination_that_a_block_holds_is_tried():
    rows = ["--block-size", "2", "4", "--verify-width", "2", "4"]
    policies = ["--window-policy", "fixed", "confidence", "--tau", "0.3"]  # for one of the two
    tried = settings_asked_for(*rows, *policies)
    # DSpark's block of 2 holds 3 rows.
    kinds = [("fixed", 0.5), ("confidence", 0.3)]
    assert tried == [(*r, *kind) for r in ((2, 2), (4, 2), (4, 4)) for kind in kinds]


def test_trees_that_a_block_does_not_hold_are_left_out():
    rows = ["--tree", "--block-size", "2", "8", "--verify-width", "4", "16"]
    tried = settings_asked_for(*rows, family="dflash")
    assert [way[:2] for way in tried] == [(2, 4), (8, 4), (8, 16)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sweep_takes_the_drafters_blocks_and_policies(family):
    tried = settings_asked_for("--sweep", family=family)
    whole, head = trained(family)[1].config.block_size, family == "dspark"
    blocks = {block for block, *_ in tried}
    assert (len(blocks), max(blocks), min(blocks)) == (3, whole, max(2, whole // 4))
    confident = {"confidence", "confidence-slot"} if head else set()
    chains = {"fixed", "ladder", "cost"} | confident
    assert {kind for *_, kind, _ in tried} == chains | {"tree"}
    assert len(tried) == len(set(tried)) == 3 * (6 if head else 4)
    untreed = settings_asked_for("--sweep", "--no-tree", family=family)
    assert {kind for *_, kind, _ in untreed} == chains
    hosted = sweep(trained(family)[1], hosted=True)["window_policy"]
    assert set(hosted) == {"fixed", "ladder"} | confident


def test_a_run_is_shown_saved_drawn_and_shown_again(prompts, tmp_path, capsys):
    saved, plot = tmp_path / "run.json", tmp_path / "run.png"
    files = ["--save", saved, "--plot", plot]
    assert main(command(prompts, "--verify-width", 4, "--batch", 1, 2, *files)) == 0
    told = read_report(saved)
    assert [(t.setting.batch, t.setting.verify_width) for t in told.trials] == [(1, 4), (2, 4)]
    assert plot.exists()
    out = capsys.readouterr().out
    assert out.count(" fixed ") == 2
    assert [a.kind for a in told.trials[0].answers] == ["a", "b", "a"]  # of every kind in turn
    assert told.conditions["chat_template"] is None
    assert told.conditions["sampling"]["temperature"] == 0
    assert told.drafter["family"] == "dflash"
    # What was saved is shown as it was, and held against itself.
    assert main(["bench", "--from", str(saved), "--against", str(saved)]) == 0
    again = capsys.readouterr().out
    assert again.startswith(out)
    assert again.count("(1.00x)") == 2
    assert main(["bench", "--from", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(saved.read_text())


def test_a_changed_token_is_exit_code_1(tmp_path, capsys):
    bad = report([trial([answer("qa", [3, 1], [4, 4])], same=0, lossless=0)])
    bad.save(tmp_path / "bad.json")
    assert main(["bench", "--from", str(tmp_path / "bad.json")]) == 1
    assert "CHANGED A TOKEN" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--draft", "none"], "--draft: expected a drafter to measure, found none"),
        (["--sweep", "--block-size", "4"], "--block-size: expected without --sweep"),
        (["--sweep", "--tree"], "--tree: expected without --sweep"),
        (["--limit", "-1"], "--limit: expected 0 or more, found -1"),
        (["--batch", "9"], "batch: expected 1..3 (different prompts), found 9"),
        (["--block-size", "2", "3", "--verify-width", "8"], "--verify-width: expected one that a"),
        (["--block-size", "99"], "block_size: expected"),
        (["--window-policy", "fixed", "ladder", "--tau", "0.4"], "--tau: expected --window-policy"),
        (["--template-arg", "a=1"], "--template-arg: expected a chat template"),
        (["--max-new-tokens", "0"], "max_new_tokens: expected"),
    ],
)
def test_options_that_cannot_be_honoured(options, reason, prompts, capsys):
    assert main(command(prompts, *options)) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert reason in told.err
    assert told.err.count("\n") == 1


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt_ids": [1], "max_new_tokens": 4}, "prompts.jsonl:1: expected keys of"),
        ({"prompt_ids": []}, "prompts.jsonl:1: prompt: expected at least one token"),
        ({"prompt_ids": [1], "kind": 3}, "prompts.jsonl:1: kind: expected text, found 3"),
        ({"prompt": "Hello"}, "prompts.jsonl:1: expected prompt_ids"),
        ({"prompt": "Hello", "prompt_ids": [1]}, "prompts.jsonl:1: expected one of prompt, mess"),
        (None, "expected prompts, found none"),
    ],
)
def test_prompts_that_cannot_be_taken(record, reason, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text("" if record is None else json.dumps(record))
    assert main(command(file)) == 2
    assert reason in capsys.readouterr().err


def test_the_packages_prompts_need_a_tokenizer(capsys):
    models = ["--target", str(TINY / "target"), "--draft", str(TINY / "dflash")]
    assert main(["bench", *models]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_an_unlike_run_is_refused_before_anything_is_decoded(
    prompts, tmp_path, capsys, monkeypatch
):
    report(target="another").save(tmp_path / "old.json")
    monkeypatch.setattr(benchmark, "SpecSession", None)
    assert main(command(prompts, "--against", tmp_path / "old.json")) == 2
    assert "--against" in (reason := capsys.readouterr().err)
    assert "target another (now" in reason


def _edit(path, value):
    def apply(told):
        *way, last = path
        for step in way:
            told = told[step]
        told[last] = value

    return apply


TRIAL, ANSWER = ("trials", 0), ("trials", 0, "answers", 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("trials",), []),
        (("conditions",), "x"),
        (("conditions", "sampling"), {}),
        (("conditions", "target"), None),
        (("conditions", "template_args"), [1]),
        (("drafter",), None),
        (("versions",), [1]),
        ((*TRIAL, "answers"), []),
        ((*TRIAL, "tokens"), "5"),
        ((*TRIAL, "tokens"), 10**400),
        ((*TRIAL, "seconds"), -1),
        ((*TRIAL, "seconds"), float("nan")),
        ((*TRIAL, "lossless"), "1"),
        ((*TRIAL, "lossless"), 99),
        ((*TRIAL, "same"), None),
        ((*TRIAL, "setting", "block_size"), "8"),
        ((*TRIAL, "setting", "batch"), [1]),
        ((*TRIAL, "setting", "policy"), 8),
        ((*TRIAL, "setting", "verify_width"), 10**7),
        ((*ANSWER, "acceptance_lengths"), "31"),
        ((*ANSWER, "acceptance_lengths"), [1, 2, 3]),
        ((*ANSWER, "acceptance_lengths"), [9, 1]),
        ((*ANSWER, "kind"), 3),
        ((*ANSWER, "text"), None),
    ],
)
def test_an_edited_report_is_refused(path, value, tmp_path):
    told = report().as_dict()
    _edit(path, value)(told)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(told))
    with pytest.raises(ValueError, match=rf"{file}: expected a report of dflash-jax bench"):
        read_report(file)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--save", "no/such/run.json"], "--save: expected a file that can be written"),
        (["--save", "."], "--save: expected a file that can be written"),
        (["--plot", "run.foo"], "run.foo: expected a name that ends in .png"),
        (["--save", "run.png", "--plot", "run.png"], "--plot: expected a file of its own, found"),
        (["--save", "old.json", "--against", "old.json"], "--save: expected a file of its own"),
        (["--against", "old.json", "--json"], "--json: expected without --against"),
        (["--batch", "1", "2", "1"], "--batch: expected each value once, found 1 2 1"),
        (["--batch", "1", "4"], "batch: expected 1..3 (different prompts), found 4"),
        (["--block-size", "4", "99"], "block_size: expected 2..8, found 99"),
        (["--from", "old.json"], "--prompts: expected without --from, found both"),
    ],
)
def test_files_are_looked_at_before_anything_runs(
    options, reason, prompts, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    report().save("old.json")
    monkeypatch.setattr(benchmark, "SpecSession", None)
    assert main(command(prompts, *options)) == 2
    told = capsys.readouterr().err
    assert reason in told
    assert told.count("\n") == 1


def test_the_prompts_are_not_written_over(prompts, capsys):
    before = prompts.read_text()
    assert main(command(prompts, "--save", prompts)) == 2
    assert "--save: expected a file of its own, found that of --prompts" in capsys.readouterr().err
    assert prompts.read_text() == before


def test_an_answer_without_rounds_is_not_slow_and_texts_stay_in_their_row():
    bare = trial([answer("a\x1b[31m\nb", [], [])], tokens=0, plain_tokens=0)
    bare = dataclasses.replace(
        bare, answers=[dataclasses.replace(bare.answers[0], text="two\nlines")]
    )
    lines = list(tables(report([bare])))
    assert not any("slower" in line or "\n" in line or "\x1b" in line for line in lines)
    assert lines[-1].endswith(r"two\nlines")
