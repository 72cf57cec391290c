"""scripts/bench.py reports what it measured, and its floors are counted right."""

import ast
import contextlib
import dataclasses
import functools
import io
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import SpecSession
from dflash_jax.kv import DraftKV
from dflash_jax.shapes import abstract

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))
import bench  # noqa: E402
import bench_report  # noqa: E402
import bench_shapes  # noqa: E402
import bench_stages  # noqa: E402
import bench_timing  # noqa: E402

TINY = Path(__file__).parent / "oracles" / "tiny"
CONTEXT, CAPACITY, ITERATIONS = 64, 512, 200
MEASURED = ["draft_round", "spec_round", "loop", "backbone", "attention", "plain_step"]


@functools.cache
def tiny_workload(family="dflash", context=CONTEXT, batch=1, window=None):
    preset, dtype = bench_shapes.PRESETS["tiny"], jnp.dtype(jnp.float32)
    return bench_shapes.random_workload(
        bench_shapes.random_target(preset.target, dtype),
        bench_shapes.random_draft(preset.draft(family, None, window), dtype),
        batch=batch,
        context=context,
        capacity=CAPACITY,
    )


@pytest.fixture
def small_bandwidth(monkeypatch):
    monkeypatch.setattr(bench_timing, "BANDWIDTH_BYTES", {jax.default_backend(): 1 << 22})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Exit status, lines on stdout and the JSON file of a run on the tiny preset."""
    file = tmp_path_factory.mktemp("bench") / "out.json"
    sizes = f"--context {CONTEXT} --capacity {CAPACITY} --iterations {ITERATIONS} --repeats 3"
    argv = [
        "--preset",
        "tiny",
        "--dtype",
        "float32",
        *sizes.split(),
        "--stages",
        ",".join(MEASURED),
    ]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(bench_timing, "BANDWIDTH_BYTES", {jax.default_backend(): 1 << 22})
        patch.setattr(bench_timing, "_quick_and_exact", lambda work: False)  # compiled is quicker
        status = bench.main([*argv, "--json", str(file)])
    return status, out.getvalue().splitlines(), file


@pytest.fixture
def report(run):
    return json.loads(run[1][-1])


def test_a_run_ends_in_one_json_line_that_says_what_was_measured_on_what(run, report):
    status, lines, file = run
    assert status == 0
    assert file.read_text() == lines[-1] + "\n"
    assert set(report["versions"]) == {"python", "jax", "jaxlib"}
    assert report["platform"] == jax.default_backend()
    assert report["dtype"] == "float32"
    assert report["iterations"] == ITERATIONS
    [case] = report["cases"]
    told = [case[key] for key in bench_report.KEYS]
    assert told == ["dflash", "auto", 1, CONTEXT, CAPACITY]
    assert case["resolved"] == ("xla" if jax.default_backend() == "cpu" else "pallas")
    assert case["skipped"] == []
    shapes = case["shapes"]
    assert (shapes["batch"], shapes["block_size"], shapes["verify_width"]) == (1, 4, 4)
    assert shapes["draft"]["hidden_size"] == shapes["target"]["hidden_size"] == 64
    assert set(case["check_relative_error"]) == {"draft", "verify"}
    assert all(0 <= error <= 3e-2 for error in case["check_relative_error"].values())


def test_every_stage_asked_for_has_a_time_a_floor_and_their_ratio(report):
    read = report["bandwidth"]["read_bytes_per_second"]
    assert read > 0
    assert report["bandwidth"]["copy_bytes_per_second"] > 0
    stages = report["cases"][0]["stages"]
    assert list(stages) == MEASURED
    for name, row in stages.items():
        assert row["time_ms"] == pytest.approx(np.median(row["times_ms"]))
        assert len(row["times_ms"]) == 3
        assert row["floor_ms"] == pytest.approx(1e3 * row["floor_bytes"] / read)
        assert row["compile_seconds"] > 0
        if name in bench_stages.DIFFERENCES:
            assert row["without_ms"] > 0
            continue
        assert row["time_ms"] > 0
        assert row["floor_ms"] > 0
        assert row["ratio"] == pytest.approx(row["time_ms"] / row["floor_ms"])
        assert row["mbu_percent"] == pytest.approx(100 / row["ratio"])
    assert stages["plain_step"]["tokens_per_second"] == pytest.approx(
        1e3 / stages["plain_step"]["time_ms"]
    )


def test_the_loop_counts_the_tokens_that_its_rounds_yield(report):
    row = report["cases"][0]["stages"]["loop"]
    assert row["tokens_per_round"] >= 1
    per_round = 1e3 * row["tokens_per_round"] / row["time_ms"]
    # The rate is of the median call, the time of the median round.
    assert row["tokens_per_second"] == pytest.approx(per_round, rel=1e-6)


def test_what_follows_from_the_stages(report):
    case = report["cases"][0]
    times = {name: row["time_ms"] for name, row in case["stages"].items()}
    derived = case["derived"]
    assert derived["round_in_plain_steps"] == pytest.approx(
        times["spec_round"] / times["plain_step"]
    )
    assert derived["attention_us_per_layer"] == pytest.approx(1e3 * times["attention"] / 2)
    assert derived["selection_us"] is None
    assert report["ratios"] == []


def test_the_table_shows_the_figures_of_the_json_line(run, report):
    lines, [case] = run[1], report["cases"]
    header = next(i for i, line in enumerate(lines) if line.startswith("stage"))
    rows = [line.split() for line in lines[header + 1 : header + 1 + len(case["stages"])]]
    assert [row[0] for row in rows] == list(case["stages"])
    for name, *cells in rows:
        assert cells[:5] == ["dflash", "auto", "1", str(CONTEXT), str(CAPACITY)]
        for cell, (key, (_, digits)) in zip(cells[5:], bench_report.COLUMNS.items(), strict=True):
            figure = case["stages"][name][key]
            assert cell == ("-" if figure is None else f"{figure:.{digits}f}")


# hidden 64, heads 4/2 x 16, mlp 128, 2 layers each, vocabulary 256 (tied), 2 taps, f32
QKV, OUT, GATE_UP, DOWN = (64 + 2 * 32) * 64, 64 * 64, 2 * 128 * 64, 64 * 128
LAYER = QKV + OUT + GATE_UP + DOWN + 2 * 64 + 2 * 16  # with its two norms, q_norm and k_norm
CONVS = 2 * (2 * 2 * 64 + 2 * 2 * 4 * 64)  # two of kernel 2 and 4 groups: base, projection
KV_BYTES = 2 * 2 * CONTEXT * 32  # K and V of 2 layers


@pytest.mark.parametrize(
    ("family", "layer", "selection"),
    [
        ("dflash", LAYER, 0),
        ("dspark", LAYER, 256 * 8 + (64 + 8) + 1),  # w2 and the confidence head
        ("dflash2", LAYER + CONVS, 8 * 64),  # the selector's projection, no codebook
    ],
)
def test_floors_equal_a_count_by_hand(family, layer, selection):
    block = 2 * layer + 64  # the layers and the final norm, without fc and its hidden_norm
    head = 256 * 64
    fc = 64 * 2 * 64 + 64  # with hidden_norm
    ingest = fc + 2 * (2 * 32 * 64 + 16)  # and of every layer the K/V rows of qkv, and k_norm
    step = 2 * LAYER + 64 + head + KV_BYTES  # the target has the drafter's layers here
    whole = block + KV_BYTES + head + selection + fc + step
    expected = {
        "backbone": block + KV_BYTES,
        "attention": KV_BYTES,
        "draft_head": head + selection,
        "selection": selection,
        "draft_round": block + KV_BYTES + head + selection,
        "ingest": ingest,
        "verify": step,
        "verify_attention": KV_BYTES,
        "spec_round": whole,
        "loop": whole,
        "cost_loop": whole,
        "plain_step": step,
    }
    floors = bench_stages.floor_bytes(tiny_workload(family))
    assert floors == {name: 4 * count for name, count in expected.items()}


def test_only_the_context_grows_with_the_batch_and_windows_bound_it():
    one, three = tiny_workload(), tiny_workload(batch=3)
    floors = bench_stages.floor_bytes(one), bench_stages.floor_bytes(three)
    context = 4 * KV_BYTES
    assert floors[1]["backbone"] - floors[0]["backbone"] == 2 * context
    assert floors[1]["spec_round"] - floors[0]["spec_round"] == 2 * 2 * context
    assert floors[1]["ingest"] == floors[0]["ingest"]
    windowed = dataclasses.replace(one.draft.config, layer_window=(9, None))
    assert bench_stages.context_bytes(one, windowed) == 4 * 2 * (8 + CONTEXT) * 32


def abstract_bytes(tree):
    leaves = jax.tree.leaves(tree)
    return sum(leaf.dtype.itemsize * int(np.prod(leaf.shape)) for leaf in leaves)


def test_presets_have_the_sizes_of_their_models():
    presets = bench_shapes.PRESETS

    def gigabytes(tree):
        return round(abstract_bytes(tree) / 1e9, 2)

    qwen, muse = presets["qwen3-8b"], presets["muse-glimmer"]
    bf16 = jnp.dtype(jnp.bfloat16)
    assert gigabytes(bench_stages.dense.abstract(qwen.target, bf16)) == 16.38
    sizes = {family: gigabytes(abstract(qwen.draft(family), bf16)) for family in qwen.families}
    assert sizes == {"dflash": 2.10, "dspark": 2.25, "dflash2": 2.34}
    assert muse.families == ("dflash2",)
    config = muse.draft("dflash2")
    assert config.layer_window == (2048,) * 5
    assert gigabytes(abstract(config, bf16)) == 5.54


@pytest.mark.parametrize(("family", "window"), [("dflash", None), ("dspark", None), ("dflash2", 9)])
def test_a_random_context_keeps_the_books_of_a_prefilled_one(family, window):
    work = tiny_workload(family, context=20, batch=2, window=window)
    session = SpecSession(
        work.target, work.draft, stop_token_ids=(), capacity=CAPACITY, accept=False
    )
    session.open([list(range(20)), list(range(100, 120))], bench_shapes.NO_LIMIT)
    assert session.plan == work.plan

    def books(state):
        """All but weights' worth: everything of the state that is not K, V or token values."""
        free = {"anchor", "tokens", "target", "draft"}
        rest = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
        counters = {name: value for name, value in rest.items() if name not in free}
        counters |= {"target.len": state.target.len}
        kv = {f.name: getattr(state.draft, f.name) for f in dataclasses.fields(DraftKV)}
        return counters | {name: value for name, value in kv.items() if name not in ("k", "v")}

    made, real = books(work.state), books(session.state)
    assert (made["ring"] is None) == (window is None)
    jax.tree.map(np.testing.assert_array_equal, made, real)
    for ours, theirs in zip(work.state.draft.k, session.state.draft.k, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("name", [*bench_stages.PARTS, *bench_stages.DIFFERENCES])
def test_a_part_leaves_the_context_as_long_as_it_was(name):
    run, carry, *_ = bench_timing.compile_stage(tiny_workload(), name, iterations=3)
    lengths = [
        leaf
        for path, leaf in bench_timing.named_leaves(run(bench_timing.copied(carry), 2))
        if path.endswith("len") and leaf.ndim == 1
    ]
    assert all(int(length[0]) == CONTEXT for length in lengths)
    assert len(lengths) == {"draft_head": 0, "draft_round": 2, "selection": 2}.get(name, 1)


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 32])
def test_contexts_are_spread_around_their_mean(batch):
    contexts = bench_shapes.spread(2048, batch)
    assert len(set(contexts)) == batch
    assert sum(contexts) == 2048 * batch
    assert 1536 <= min(contexts) <= max(contexts) <= 2560


def test_every_sequence_holds_its_own_context():
    preset, dtype = bench_shapes.PRESETS["tiny"], jnp.dtype(jnp.float32)
    target = bench_shapes.random_target(preset.target, dtype)
    draft = bench_shapes.random_draft(preset.draft("dflash", None, 9), dtype)
    sizes = {"batch": 2, "context": 30, "capacity": 128}
    both = bench_shapes.random_workload(target, draft, contexts=[24, 36], **sizes)
    for b, context in enumerate((24, 36)):
        kv = both.state.draft
        assert int(both.state.target.len[b]) == int(kv.len[b]) == context
        held = np.asarray(kv.ring.pos)[b]
        assert sorted(held[held >= 0]) == list(range(context - kv.ring_rows, context))
    assert bench_stages.context_bytes(both, target.config) == 2 * 4 * 2 * 60 * 32


def test_drafts_are_accepted_by_chance_at_the_rate_asked_for():
    work = dataclasses.replace(tiny_workload(), acceptance=0.7)
    program = bench_timing.compile_stage(work, "loop", iterations=100)
    _, more = bench_timing._loop_times(program, 1)
    # 1 + 0.7 + 0.49 + 0.343 tokens a round; five deviations of a mean of 100 rounds
    assert more["tokens_per_round"] == pytest.approx(2.53, abs=0.6)


@pytest.mark.parametrize("name", [n for n in bench_stages.WHOLE if n != "cost_loop"])
def test_a_whole_run_takes_every_round_it_is_timed_for(name):
    run, carry, *_ = bench_timing.compile_stage(tiny_workload(), name, iterations=3)
    state = run(bench_timing.copied(carry), 2)
    assert state.rounds.tolist() == [6]
    grown = int(state.target.len[0]) - CONTEXT
    assert grown == 6 if name != "loop" else grown >= 6
    assert not bool(state.done.any())


def once(work, name):
    """One turn of a part, compiled."""
    stage, parts = bench_stages.stage_and_parts(work, name)
    with parts:
        still = jnp.zeros((work.batch,), jnp.int32)
        args = stage.carry, 0, work.target, work.draft, still
        return jax.jit(stage.step).lower(*args).compile(), (args[0], *args[2:])


@pytest.mark.parametrize("name", ["attention", "verify_attention"])
def test_without_attention_no_cache_is_read_but_every_projection_made(name):
    work = tiny_workload()
    whole = bench_stages.DIFFERENCES[name].stage

    def poisoned(held):
        return held.replace(k=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), held.k))

    state = work.state.replace(draft=poisoned(work.state.draft), target=poisoned(work.state.target))
    work = dataclasses.replace(work, state=state)

    def finite(stage):
        program, (carry, *rest) = once(work, stage)
        result = program(carry, 0, *rest)
        rows = result[0] if whole == "backbone" else result["taps"]
        return bool(jnp.isfinite(rows).all()), program.cost_analysis()["flops"]

    (with_it, flops), (without, fewer) = finite(whole), finite(name)
    assert (with_it, without) == (False, True)
    projections = 2 * 4 * 2 * (QKV + OUT + GATE_UP + DOWN)  # 4 rows, 2 layers
    assert projections <= fewer < flops


def test_without_selection_all_logits_are_still_made():
    work = tiny_workload("dflash2")
    flops = {n: once(work, n)[0].cost_analysis()["flops"] for n in ("backbone", "selection")}
    products, sums = 3 * 64 * 256, 3 * 63 * 256  # 3 rows, every id
    assert flops["selection"] - flops["backbone"] >= products + sums


def test_a_stand_in_is_gone_after_its_stage_even_a_failed_one():
    part = bench_stages.DIFFERENCES["attention"]

    def fail():
        with bench_stages.replaced(part):
            assert getattr(part.module, part.name) is part.stand_in
            raise ZeroDivisionError

    before = getattr(part.module, part.name)
    with pytest.raises(ZeroDivisionError):
        fail()
    assert getattr(part.module, part.name) is before


def test_a_difference_that_noise_made_negative_has_no_ratio():
    row = bench_timing.figures([-1.0, -2.0, 3.0], 10**9, 1e12)
    assert row["time_ms"] == -1.0
    assert [row[key] for key in ("ratio", "mbu_percent", "spread_percent")] == [None] * 3
    assert bench_timing.figures([1.0], 0, 1e12)["ratio"] is None


def test_small_stages_take_turns_with_copies_of_their_weights(monkeypatch):
    work = tiny_workload()
    size = bench_stages.floor_bytes(work)["backbone"]
    monkeypatch.setattr(bench_timing, "BEYOND_CACHE", {jax.default_backend(): 2 * size + 1})
    assert bench_timing.weight_copies(work, "backbone") == 3
    assert bench_timing.weight_copies(work, "attention") == 3
    assert bench_timing.weight_copies(work, "ingest") == bench_timing.MOST_COPIES
    row, program = bench_timing.measure(work, "backbone", 50, 1, 1e9)
    assert (row["copies"], program.turns) == (3, 150)
    assert row["working_set_bytes"] == 3 * size


def test_weights_that_are_not_finite_are_refused_before_timing():
    work = tiny_workload()
    broken = work.draft.replace(norm=work.draft.norm.at[0].set(jnp.nan))
    bad_draft = dataclasses.replace(work, draft=broken)
    nowhere = work.target.replace(embedding=jnp.full_like(work.target.embedding, jnp.nan))
    bad_target = dataclasses.replace(work, target=nowhere)
    with pytest.raises(ValueError, match="draft round: expected a relative error"):
        bench_timing.check(bad_draft)
    with pytest.raises(ValueError, match="draft_head: expected finite results"):
        bench_timing.measure(bad_target, "draft_head", 1, 1, 1e9)
    with pytest.raises(ValueError, match=r"spec_round: expected finite results.*draft_fault"):
        bench_timing.measure(bad_draft, "spec_round", 1, 1, 1e9)


def test_another_proposal_than_the_references_is_refused(monkeypatch):
    def wrong(draft, logits, hidden, anchor, implementation):
        proposal = right(draft, logits, hidden, anchor, implementation=implementation)
        return proposal if implementation == "xla" else proposal.replace(tokens=proposal.tokens + 1)

    work, right = tiny_workload("dflash2"), bench_timing.propose
    bench_timing.check_proposal(work)
    monkeypatch.setattr(bench_timing, "propose", wrong)
    with pytest.raises(ValueError, match="proposal: expected"):
        bench_timing.check_proposal(work)


def test_cases_are_all_combinations_of_what_is_asked_for(small_bandwidth, monkeypatch, capsys):
    order = []

    def measure(work, name, iterations, repeats, read_rate, whole):
        order.append((name, work.draft.config.family, work.plan.implementation, work.context))
        row = bench_timing.figures([1.0, 2.0], bench_stages.floor_bytes(work)[name], read_rate)
        return row | {"compile_seconds": 1.0, "copies": 1}, None

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "check", lambda work: {"draft": 0.0})
    argv = "--preset tiny --stages backbone,draft_round --family dflash dspark --context 32 64"
    argv += " --capacities 99 --implementation auto xla"
    assert bench.main(argv.split()) == 0
    *_, line = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    families, contexts, names = ("dflash", "dspark"), (32, 64), ("auto", "xla")
    cases = [tuple(case[key] for key in bench_report.KEYS) for case in report["cases"]]
    assert cases == [(f, n, 1, c, 99) for f in families for c in contexts for n in names]
    assert order == [
        (stage, f, None if n == "auto" else n, c)
        for stage in ("draft_round", "backbone")
        for f, n, _, c, _ in cases
    ]
    assert [(r["of"], r["family"]) for r in report["ratios"] if r["stage"] == "backbone"] == [
        (of, f) for of in ("implementation", "context") for f in families for _ in range(2)
    ]


def test_past_its_seconds_a_run_starts_no_stage_and_says_so(small_bandwidth, capsys):
    argv = "--preset tiny --dtype bfloat16 --seconds 1e-9 --stages backbone,attention"
    assert bench.main(argv.split()) == 0
    *lines, line = capsys.readouterr().out.splitlines()
    [case] = json.loads(line)["cases"]
    assert (case["stages"], case["skipped"]) == ({}, ["backbone", "attention"])
    assert lines[-1].endswith("no time for backbone, attention")


def test_a_difference_brings_the_stage_it_is_taken_from():
    args = bench.parser().parse_args(["--preset", "tiny", "--stages", "selection,ingest"])
    assert bench.choose_stages(args) == ["draft_round", "selection", "ingest"]


def test_a_target_of_which_only_the_tables_are_known_has_draft_stages_only():
    args = bench.parser().parse_args(["--preset", "muse-glimmer"])
    expected = [name for name in bench_stages.STAGES if name not in bench_stages.OF_TARGET]
    assert bench.choose_stages(args) == expected
    preset = bench_shapes.PRESETS["tiny"]
    config = dataclasses.replace(preset.target, num_hidden_layers=0, layer_window=())
    dtype = jnp.dtype(jnp.float32)
    work = bench_shapes.random_workload(
        bench_shapes.random_target(config, dtype),
        bench_shapes.random_draft(preset.draft("dflash2"), dtype),
        batch=1,
        context=CONTEXT,
        capacity=CAPACITY,
    )
    errors = bench_timing.check(work)
    assert set(errors) == {"draft"}
    assert 0 < errors["draft"] <= (1e-5 if jax.default_backend() == "cpu" else 3e-2)
    run, carry, *_ = bench_timing.compile_stage(work, "draft_round", iterations=3)
    bench_timing.check_finite("draft_round", run(bench_timing.copied(carry), 1))


def test_real_checkpoints_are_timed_behind_prefilled_prompts():
    argv = f"--target {TINY / 'target'} --draft {TINY / 'dflash'} --context 32 --capacity 96"
    argv += " --block-size 6 --batch 2 --dtype float32"
    [case] = bench.make_cases(bench.parser().parse_args(argv.split()), 20)
    work, shapes = case.work, case.report["shapes"]
    assert (shapes["block_size"], shapes["verify_width"], shapes["batch"]) == (6, 6, 2)
    assert (shapes["target"]["layers"], shapes["draft"]["layers"]) == (6, 2)
    assert work.state.target.len.tolist() == work.state.draft.len.tolist() == [28, 36]
    row, _ = bench_timing.measure(work, "spec_round", 20, 1, 1e9)
    assert row["time_ms"] > 0
    assert row["floor_bytes"] > 4 * 264 * 128 * 2


@pytest.mark.parametrize(
    ("options", "capacity"), [("--context 600", 1024), ("--context 600 --capacity 700", 700)]
)
def test_the_default_capacity_stays_within_the_models_context(options, capacity):
    argv = f"--target {TINY / 'target'} --draft {TINY / 'dflash'} {options}"
    [case] = bench.make_cases(bench.parser().parse_args(argv.split()), 20)
    assert case.report["capacity"] == case.work.plan.capacity == capacity


def test_a_context_of_text_ends_in_another_question_for_every_sequence(monkeypatch):
    class Codec:
        def encode_chat(self, messages):
            return [int(messages[0]["content"])] * 3

    records = [{"prompt": "1"}, {"prompt": "2"}]
    monkeypatch.setattr(bench, "read_records", lambda file: records)
    rows = bench.context_ids(bench.LoadedTarget(None, Codec(), "any"), [8, 8, 8])
    assert rows == [[1, 1, 2, 2, 2, 1, 1, 1], [2, 2, 1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 2, 1, 1, 1]]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--preset nope", "--preset: expected one of tiny, smollm2, qwen3-8b, muse-glimmer, found"),
        ("--preset tiny --family v1", "--family: expected one of dflash, dspark, dflash2, found"),
        ("--bogus", "unrecognized arguments: --bogus"),
        ("--iterations x", "argument --iterations: invalid int value: 'x'"),
        ("--preset tiny --iterations 0", "--iterations: expected at least 1, found 0"),
        ("--preset tiny --batch 0", "--batch: expected at least 1, found 0"),
        ("--preset tiny --context 8 0", "--context: expected at least 1, found 0"),
        ("--preset tiny --seconds 0", "--seconds: expected more than 0, found 0"),
        ("--preset tiny --block-size 1", "--block-size: expected at least 2, found 1"),
        ("--preset tiny --window 3", "--window: expected at least the block's 4, found 3"),
        ("--preset tiny --iterations 5 --capacity 74", "--capacity: expected at least 75"),
        ("--stages backbone,foo", "--stages: expected some of draft_round, "),
        ("--preset muse-glimmer --stages verify", "--stages: expected some of draft_round, "),
        ("--preset muse-glimmer --family dflash", "--family: expected one of dflash2, found"),
        ("--target smollm2", "--target: expected with --draft"),
        ("--target a --draft b --family dflash", "--family: expected with a preset"),
        (f"--target {TINY / 'target'} --draft none-such", "drafter: expected a directory"),
    ],
)
def test_a_bad_argument_is_one_line_and_status_2(argv, message, capsys):
    assert bench.main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"bench.py: {message}")
    assert err.count("\n") == 1


def test_want_of_memory_is_one_line_and_status_2(monkeypatch, capsys):
    def exhausted(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory, 9 TiB\n\nmore")

    monkeypatch.setattr(bench, "random_target", exhausted)
    assert bench.main(["--preset", "tiny"]) == 2
    expected = "bench.py: out of memory: RESOURCE_EXHAUSTED: Out of memory, 9 TiB\n"
    assert capsys.readouterr() == ("", expected)


def test_kernels_that_cannot_run_are_refused_before_anything_is_made(monkeypatch, capsys):
    monkeypatch.setattr(bench.kernels, "device_refusal", lambda: "device: expected a GPU")
    assert bench.main(["--preset", "qwen3-8b", "--implementation", "pallas"]) == 2
    expected = "bench.py: implementation 'pallas': device: expected a GPU\n"
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--torch"], "--torch: expected torch and a CUDA GPU, found none"),
        (["--plot", "a.png"], "--plot: expected matplotlib (pip install matplotlib), found none"),
    ],
)
def test_what_is_not_installed_is_refused_at_once(flags, message, monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert bench.main(["--preset", "tiny", *flags]) == 2
    assert capsys.readouterr() == ("", f"bench.py: {message}\n")


@pytest.mark.parametrize(("family", "proposal"), [("dflash", "argmax"), ("dflash2", "topk16")])
def test_the_rival_gets_the_shape_of_the_drafter(family, proposal, monkeypatch, tmp_path):
    script = tmp_path / "rival.py"
    script.write_text("import json, sys; print('a line'); print(json.dumps(sys.argv[1:]))")
    monkeypatch.setattr(bench, "TORCH_ROUND", script)
    flags = bench.run_rival(tiny_workload(family))
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given.pop("--dtype") == "float32"
    assert given.pop("--proposal") == proposal
    assert given["--vocab-size"] == "256"
    assert given["--kv-heads"] == "2"
    # torch is not a test dependency: read the names that the real script takes.
    tree = ast.parse((SCRIPTS / "torch_round.py").read_text())
    shape = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Shape")
    fields = {n.target.id for n in shape.body if isinstance(n, ast.AnnAssign)}
    assert {name[2:].replace("-", "_") for name in given} == fields


def test_a_rival_cut_short_reports_what_it_has(monkeypatch, tmp_path):
    script = tmp_path / "rival.py"
    figures = {"milliseconds": {"argmax": 1.5}}
    script.write_text(f"import time; print({json.dumps(figures)!r}, flush=True); time.sleep(60)")
    monkeypatch.setattr(bench, "TORCH_ROUND", script)
    assert bench.run_rival(tiny_workload(), timeout=2.0) == figures | {"cut_short": True}


@pytest.mark.parametrize(
    ("body", "seconds", "why"),
    [
        ("sys.exit('no GPU here')", None, "rival.py failed: no GPU here"),
        ("time.sleep(60)", 0.2, "rival.py ran past --seconds"),
        ("", -1.0, "no seconds left"),
    ],
)
def test_a_rival_that_fails_is_a_line_beside_the_other_figures(
    body, seconds, why, monkeypatch, tmp_path
):
    script = tmp_path / "rival.py"
    script.write_text(f"import sys, time; print('warning', file=sys.stderr); {body}")
    monkeypatch.setattr(bench, "TORCH_ROUND", script)
    clock = bench.Clock(bench.time.monotonic(), seconds)
    assert bench.try_rival(tiny_workload(), clock) == {"error": f"--torch: {why}"}
