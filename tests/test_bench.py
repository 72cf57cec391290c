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

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import bench  # noqa: E402
import bench_stages  # noqa: E402

TINY = Path(__file__).parent / "oracles" / "tiny"
CONTEXT, CAPACITY, ITERATIONS = 64, 512, 200


@functools.cache
def tiny_workload(context=CONTEXT, batch=1):
    preset = bench_stages.PRESETS["tiny"]
    return bench_stages.random_workload(
        preset.target,
        preset.draft(None),
        batch=batch,
        context=context,
        capacity=CAPACITY,
        dtype=jnp.dtype(jnp.float32),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Exit status, lines on stdout and the JSON file of a whole run on the tiny preset."""
    file = tmp_path_factory.mktemp("bench") / "out.json"
    sizes = f"--context {CONTEXT} --capacity {CAPACITY} --iterations {ITERATIONS} --repeats 3"
    argv = ["--preset", "tiny", "--dtype", "float32", *sizes.split(), "--json", str(file)]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(bench, "BANDWIDTH_BYTES", {jax.default_backend(): 1 << 22})
        status = bench.main(argv)
    return status, out.getvalue().splitlines(), file


def test_a_run_ends_in_one_json_line_that_says_what_was_measured_on_what(run):
    status, lines, file = run
    report = json.loads(lines[-1])
    assert status == 0
    assert file.read_text() == lines[-1] + "\n"
    assert set(report["versions"]) == {"python", "jax", "jaxlib"}
    assert report["platform"] == jax.default_backend()
    assert report["dtype"] == "float32"
    assert report["iterations"] == ITERATIONS
    shapes = report["shapes"]
    assert (shapes["batch"], shapes["context"], shapes["capacity"]) == (1, CONTEXT, CAPACITY)
    assert shapes["block_size"] == shapes["verify_width"] == 4
    assert shapes["draft"]["hidden_size"] == shapes["target"]["hidden_size"] == 64
    assert 0 <= report["check_relative_error"] <= (1e-5 if jax.default_backend() == "cpu" else 5e-2)


def test_every_stage_has_a_time_a_floor_and_their_ratio(run):
    report = json.loads(run[1][-1])
    read = report["bandwidth"]["read_bytes_per_second"]
    assert read > 0
    assert report["bandwidth"]["copy_bytes_per_second"] > 0
    assert list(report["stages"]) == list(bench_stages.STAGES)
    for row in report["stages"].values():
        assert row["time_ms"] > 0
        assert row["time_ms"] == pytest.approx(np.median(row["times_ms"]))
        assert len(row["times_ms"]) == 3
        assert row["floor_ms"] == pytest.approx(1e3 * row["floor_bytes"] / read)
        assert row["floor_ms"] > 0
        assert row["ratio"] == pytest.approx(row["time_ms"] / row["floor_ms"])
        assert row["mbu_percent"] == pytest.approx(100 / row["ratio"])
        assert row["compile_seconds"] > 0
    times = {name: row["time_ms"] for name, row in report["stages"].items()}
    steps = times["spec_round"] / times["plain_step"]
    assert report["round_in_plain_steps"] == pytest.approx(steps)


def test_the_table_shows_the_figures_of_the_json_line(run):
    lines = run[1]
    report = json.loads(lines[-1])
    header = next(i for i, line in enumerate(lines) if line.startswith("stage"))
    rows = [line.split() for line in lines[header + 1 : header + 1 + len(report["stages"])]]
    assert [row[0] for row in rows] == list(report["stages"])
    for name, *cells in rows:
        expected = [
            round(report["stages"][name][key], digits) for key, (_, digits) in bench.COLUMNS.items()
        ]
        assert [float(cell) for cell in cells] == pytest.approx(expected, rel=1e-9)


def test_floors_equal_a_count_by_hand():
    # hidden 64, heads 4/2 x 16, mlp 128, 2 layers each, vocabulary 256 (tied), 2 taps, f32
    qkv, o, gate_up, down = (64 + 2 * 32) * 64, 64 * 64, 2 * 128 * 64, 64 * 128
    layer = qkv + o + gate_up + down + 2 * 64 + 2 * 16  # with its two norms, q_norm and k_norm
    block = 2 * layer + 64  # the layers and the final norm, without fc and its hidden_norm
    context = 2 * 2 * CONTEXT * 32  # K and V of 2 layers
    head = 256 * 64
    fc = 64 * 2 * 64 + 64  # with hidden_norm
    ingest = fc + 2 * (2 * 32 * 64 + 16)  # and of every layer the K/V rows of qkv, and k_norm
    step = 2 * layer + 64 + head + context  # the target has the drafter's layers here
    expected = {
        "backbone": block + context,
        "draft_head": head,
        "draft_round": block + context + head,
        "ingest": ingest,
        "verify": step,
        "spec_round": block + context + head + fc + step,
        "plain_step": step,
    }
    floors = bench_stages.floor_bytes(tiny_workload())
    assert floors == {name: 4 * count for name, count in expected.items()}


def test_only_the_context_grows_with_the_batch_and_windows_bound_it():
    one, three = tiny_workload(), tiny_workload(batch=3)
    floors = bench_stages.floor_bytes(one), bench_stages.floor_bytes(three)
    context = 4 * 2 * 2 * CONTEXT * 32
    assert floors[1]["backbone"] - floors[0]["backbone"] == 2 * context
    assert floors[1]["spec_round"] - floors[0]["spec_round"] == 2 * 2 * context
    assert floors[1]["ingest"] == floors[0]["ingest"]
    windowed = dataclasses.replace(one.draft.config, layer_window=(9, None))
    assert bench_stages.context_bytes(one, windowed) == 4 * 2 * (8 + CONTEXT) * 32


def test_a_random_context_keeps_the_books_of_a_prefilled_one():
    work = tiny_workload(context=20, batch=2)
    session = SpecSession(
        work.target, work.draft, stop_token_ids=(), capacity=CAPACITY, accept=False
    )
    session.open([list(range(20)), list(range(100, 120))], bench_stages.NO_LIMIT)
    assert session.plan == work.plan

    def books(state):
        """All but weights' worth: everything of the state that is not K, V or token values."""
        kv = state.draft
        free = {"anchor", "tokens", "target", "draft"}
        rest = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
        counters = {name: value for name, value in rest.items() if name not in free}
        return counters | {
            "target.len": state.target.len,
            "draft.len": kv.len,
            "draft.floor": kv.floor,
            "full.pos": kv.full.pos,
            "full.next": kv.full.next,
        }

    made, real = books(work.state), books(session.state)
    for name in made:
        np.testing.assert_array_equal(made[name], real[name], err_msg=name)
    for ours, theirs in zip(work.state.draft.k, session.state.draft.k, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("name", bench_stages.PARTS)
def test_a_part_leaves_the_context_as_long_as_it_was(name):
    work = tiny_workload()
    run, carry, _ = bench.compile_stage(work, name, iterations=3)
    lengths = [
        leaf
        for path, leaf in bench.named_leaves(run(bench.copied(carry), 2))
        if path.endswith("len") and leaf.ndim == 1
    ]
    assert all(int(length[0]) == CONTEXT for length in lengths)
    assert len(lengths) == {"draft_head": 0, "draft_round": 2}.get(name, 1)


@pytest.mark.parametrize("name", bench_stages.WHOLE)
def test_a_whole_run_takes_every_round_it_is_timed_for(name):
    work = tiny_workload()
    run, carry, _ = bench.compile_stage(work, name, iterations=3)
    state = run(bench.copied(carry), 2)
    assert state.rounds.tolist() == [6]
    assert state.target.len.tolist() == [CONTEXT + 6]
    assert not bool(state.done.any())


def test_weights_that_are_not_finite_are_refused_before_timing():
    work = tiny_workload()
    broken = work.draft.replace(norm=work.draft.norm.at[0].set(jnp.nan))
    bad_draft = dataclasses.replace(work, draft=broken)
    nowhere = work.target.replace(embedding=jnp.full_like(work.target.embedding, jnp.nan))
    bad_target = dataclasses.replace(work, target=nowhere)
    with pytest.raises(ValueError, match="draft round: expected a relative error"):
        bench.check_draft(bad_draft)
    with pytest.raises(ValueError, match="draft_head: expected finite results"):
        bench.measure(bad_target, "draft_head", 1, 1, 1e9)
    with pytest.raises(ValueError, match=r"spec_round: expected finite results.*draft_fault"):
        bench.measure(bad_draft, "spec_round", 1, 1, 1e9)


def test_real_checkpoints_are_timed_behind_prefilled_prompts():
    argv = f"--target {TINY / 'target'} --draft {TINY / 'dflash'} --context 32 --capacity 96"
    argv += " --block-size 6 --batch 2 --dtype float32"
    args = bench.parser().parse_args(argv.split())
    work = bench.build(args, 20)
    shapes = bench.describe(args, work)["shapes"]
    assert (shapes["block_size"], shapes["verify_width"], shapes["batch"]) == (6, 6, 2)
    assert (shapes["target"]["layers"], shapes["draft"]["layers"]) == (6, 2)
    assert work.state.target.len.tolist() == work.state.draft.len.tolist() == [32, 32]
    row = bench.measure(work, "spec_round", 20, 1, 1e9)
    assert row["time_ms"] > 0
    assert row["floor_bytes"] > 4 * 264 * 128 * 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--preset nope", "--preset: expected one of tiny, smollm2, qwen3-8b, found 'nope'"),
        ("--bogus", "unrecognized arguments: --bogus"),
        ("--iterations x", "argument --iterations: invalid int value: 'x'"),
        ("--preset tiny --iterations 0", "--iterations: expected at least 1, found 0"),
        ("--preset tiny --batch 0", "--batch: expected at least 1, found 0"),
        ("--preset tiny --block-size 1", "--block-size: expected at least 2, found 1"),
        ("--preset tiny --iterations 5 --capacity 74", "--capacity: expected at least 75"),
        ("--stages backbone,foo", "--stages: expected some of backbone, "),
        ("--target smollm2", "--target: expected with --draft"),
        (f"--target {TINY / 'target'} --draft none-such", "drafter: expected a directory"),
    ],
)
def test_a_bad_argument_is_one_line_and_status_2(argv, message, capsys):
    assert bench.main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"bench.py: {message}")
    assert err.count("\n") == 1


def test_a_rival_without_torch_is_refused_at_once(monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert bench.main(["--preset", "tiny", "--torch"]) == 2
    assert capsys.readouterr() == (
        "",
        "bench.py: --torch: expected torch and a CUDA GPU, found none\n",
    )


def test_the_rival_gets_the_shape_of_the_drafter(monkeypatch, tmp_path):
    script = tmp_path / "rival.py"
    script.write_text("import json, sys; print('a line'); print(json.dumps(sys.argv[1:]))")
    monkeypatch.setattr(bench, "TORCH_ROUND", script)
    flags = bench.run_rival(tiny_workload())
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given.pop("--dtype") == "float32"
    assert given.pop("--proposal") == "argmax"
    assert given["--vocab-size"] == "256"
    assert given["--kv-heads"] == "2"
    # torch is not a test dependency: read the names that the real script takes.
    tree = ast.parse((SCRIPTS / "torch_round.py").read_text())
    shape = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Shape")
    fields = {n.target.id for n in shape.body if isinstance(n, ast.AnnAssign)}
    assert {name[2:].replace("-", "_") for name in given} == fields


def test_a_rival_that_fails_is_one_line(monkeypatch, tmp_path):
    script = tmp_path / "rival.py"
    script.write_text("import sys; print('warning', file=sys.stderr); sys.exit('no GPU here')")
    monkeypatch.setattr(bench, "TORCH_ROUND", script)
    with pytest.raises(ValueError, match=r"rival\.py failed: no GPU here"):
        bench.run_rival(tiny_workload())


def test_the_rival_is_reported_beside_the_draft_round(capsys):
    report = {"stages": {"draft_round": {"time_ms": 1.5}}}
    bench.compare(report, {"torch": "2", "milliseconds": {"argmax": 4.0, "argmax compiled": 3.0}})
    assert report["torch"]["draft_round_over_torch"] == 0.5
    assert "draft_round / torch: 0.50" in capsys.readouterr().out
