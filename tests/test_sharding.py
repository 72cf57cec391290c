"""Models over a mesh give what they give on one device, and move no weight and no cache."""

import dataclasses
import json
import re
import socket
import subprocess
import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import ampere
from families import FAMILIES, assert_close, trained
from target_files import HF_TARGETS, write_gguf
from targets import F32, ORACLES, TINY, TINY_TARGET, tiny_draft, tiny_target

from dflash_jax import (
    SamplingParams,
    SpecSession,
    generate,
    kernels,
    load_draft,
    loop,
    quant,
    save_draft,
    sharding,
)
from dflash_jax.cli import main
from dflash_jax.config import DFlash2Config, DSparkConfig
from dflash_jax.draft import ctx_features, forward_block, forward_round, ingest_ctx
from dflash_jax.kv import allocate
from dflash_jax.layers import linear
from dflash_jax.propose import draft_logits
from dflash_jax.selector import best_ids, top_candidates
from dflash_jax.targets.gguf import load_gguf
from dflash_jax.targets.hf import load_hf

HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8}
TARGET = dataclasses.replace(
    TINY_TARGET, **HEADS, num_hidden_layers=1, layer_window=(None,), tied=False
)
PARTS = {
    "dflash": {},
    "dspark": {"dspark": DSparkConfig("gated", 8, True, True)},
    "dflash2": {"dflash2": DFlash2Config(8, 4, 2, 8)},
}
PROMPT = [*range(5, 25)]
SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=3)


def pair(family):
    """A random target and drafter of one layer each, with 8 kv heads to split."""
    config = dataclasses.replace(
        TINY,
        **HEADS,
        family=family,
        num_hidden_layers=1,
        layer_causal=(False,),
        layer_window=(6,),
        num_target_layers=1,
        target_layer_ids=(0,),
        **PARTS[family],
    )
    return tiny_target(TARGET), tiny_draft(config)


def split(family, devices):
    mesh = sharding.make_mesh(devices)
    return tuple(sharding.shard(model, mesh) for model in pair(family))


def every(*default):
    """Every family on 2, 4 and 8 devices; but for the `default` ones, slow."""
    pairs = [(f, n) for f in FAMILIES for n in (2, 4, 8)]
    return [pytest.param(*p, marks=() if p in default else pytest.mark.slow) for p in pairs]


@jax.jit
def draft_once(target, draft, taps, block):
    """Draft logits of one block over ingested taps, cached and uncached."""
    pos = jnp.arange(taps.shape[1] + block.shape[1])[None]
    count = taps.shape[1]
    feats = ctx_features(draft, taps)
    kv = allocate(draft.config, 1, 32, draft.dtype, mesh=draft.mesh)
    kv = ingest_ctx(draft, kv, feats[:, : count - 3], pos[:, : count - 3], jnp.array([count - 3]))
    kv = ingest_ctx(draft, kv, feats[:, count - 3 :], pos[:, count - 3 : count], jnp.array([3]))
    noise = target.embed(block)
    cached, _ = forward_round(draft, kv, noise, pos[:, count:])
    uncached = forward_block(draft, feats, noise, pos)
    return draft_logits(target, draft, cached), draft_logits(target, draft, uncached)


@pytest.mark.parametrize(("family", "devices"), every(("dspark", 2), ("dflash2", 4)))
def test_draft_logits(family, devices):
    target, draft = pair(family)
    taps = jnp.asarray(np.random.default_rng(0).normal(size=(1, 12, draft.config.tap_size)), F32)
    block = jnp.array([[7, 63, 63, 63]])
    expected = draft_once(target, draft, taps, block)[1]
    for logits in draft_once(*split(family, devices), taps, block):
        assert logits.sharding.spec[-1] == sharding.MODEL
        assert_close(logits, expected)


def checked_generation(family, devices, sampling):
    expected = generate(*pair(family), PROMPT, 24, sampling=sampling)
    found = generate(*split(family, devices), PROMPT, 24, sampling=sampling)
    assert found.token_ids == expected.token_ids
    assert found.acceptance_lengths == expected.acceptance_lengths
    assert found.verify_widths == expected.verify_widths


@pytest.mark.parametrize(("family", "devices"), every(("dflash2", 8)))
def test_greedy_generation(family, devices):
    checked_generation(family, devices, SamplingParams())


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_generation(family, devices):
    checked_generation(family, devices, SAMPLED)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), pytest.param(SAMPLED, marks=pytest.mark.slow)]
)
def test_nothing_large_moves_and_caches_stay_where_they_are(sampling):
    """Between devices go rows, sums and candidates: no weight, no cache."""
    target, draft = split("dspark", 4)
    session = SpecSession(target, draft, sampling=sampling)
    session.open([PROMPT], 24)
    lowered = loop.decode.lower(
        target, draft, session.state, session._stops, jnp.int32(1), session.plan
    )
    compiled = lowered.compile()
    sizes = [
        np.prod([int(n) for n in shape.split(",")])
        for line in compiled.as_text().splitlines()
        if re.search(r" (all-gather|all-to-all|collective-permute)(-start)?\(", line)
        for shape in re.findall(r"\[([0-9,]+)\]", line.partition("=")[2].partition("(")[0])
    ]
    # The largest thing to move is the law of a verify's rows; the smallest that must not, the part
    # of a table that one device has.
    laws = session.plan.verify_width * TARGET.embedding_rows
    assert sizes and max(sizes) <= laws < TARGET.embedding_rows * TARGET.hidden_size / 4
    # A compiled program takes nothing that lies otherwise than at first: not even its own results.
    for rounds in (1, 2, 99):
        session.state = compiled(target, draft, session.state, session._stops, jnp.int32(rounds))
    assert session.state.target.k[0].sharding.spec[:2] == (None, sharding.MODEL)
    expected = generate(*pair("dspark"), PROMPT, 24, sampling=sampling)
    assert session.results()[0].token_ids == expected.token_ids


def test_split_laws_are_filtered_by_xla(monkeypatch):
    """No kernel reduces over several devices; on one, as on a GPU, it is the kernel's to do."""
    asked = []

    def leading(x, weight, limit):
        asked.append(x.shape)
        return x > 0

    def trace(models):
        session = SpecSession(*models, sampling=SAMPLED)
        session.open([PROMPT], 24)
        with monkeypatch.context() as patched:
            patched.setattr(kernels, "device_refusal", ampere)
            patched.setattr(kernels.kernel("leading"), "leading", leading)
            loop.decode.trace(*models, session.state, session._stops, jnp.int32(1), session.plan)

    trace(split("dspark", 2))
    assert not asked
    trace(pair("dspark"))
    assert asked
    jax.clear_caches()


def test_a_long_prompts_chunk_over_a_mesh():
    """Attention in tiles of keys is a loop within each device: it traces, and gives the same."""
    logits = []
    for target, draft in (pair("dflash"), split("dflash", 2)):
        caches = loop.empty_caches(target, draft, 1, 2300)
        caches = loop.prefill(target, draft, caches, [PROMPT * 2], [0], 2300)
        logits.append(target.logits(caches.last))
    assert_close(logits[1], logits[0])


@pytest.mark.slow
def test_sequences_over_the_data_axis():
    target, draft = pair("dflash2")
    mesh = sharding.make_mesh(2, data=2)
    prompts, budget = [PROMPT, PROMPT[:7]], [24, 16]
    expected = generate(target, draft, prompts, budget)
    found = generate(target, draft, prompts, budget, mesh=mesh)
    assert [g.token_ids for g in found] == [g.token_ids for g in expected]
    with pytest.raises(ValueError, match=r"batch: expected a multiple of 2 \(data axis\), found 3"):
        generate(target, draft, [PROMPT] * 3, 4, mesh=mesh)


@pytest.mark.parametrize("devices", [2, 8])
def test_top_k_and_argmax_over_a_split_vocabulary_are_the_very_same(devices):
    """Ties within and across shards, both zeros, NaN, more candidates than a shard has tokens."""
    mesh = sharding.make_mesh(devices)
    rng = np.random.default_rng(0)
    logits = rng.integers(-2, 3, (1, 6, 64)).astype(np.float32)
    logits[0, 0] = 1.0
    logits[0, 1, 40:] = -0.0
    logits[0, 2, [9, 50]] = np.nan
    rows = jax.device_put(logits, jax.NamedSharding(mesh, jax.P(None, None, sharding.MODEL)))
    for k in (4, 12):
        expected = top_candidates(jnp.asarray(logits), k)
        found = jax.jit(lambda rows, k=k: top_candidates(rows, k, mesh=mesh))(rows)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
            np.testing.assert_array_equal(np.signbit(a), np.signbit(b))
    found = jax.jit(lambda rows: best_ids(rows, mesh=mesh))(rows)
    np.testing.assert_array_equal(found, best_ids(jnp.asarray(logits)))


def test_a_sum_over_shards_left_out_is_an_error_before_anything_runs(monkeypatch):
    monkeypatch.setattr(
        "dflash_jax.draft.row_linear", lambda x, weight, *_, **__: linear(x, weight)
    )
    target, draft = split("dflash", 2)
    taps = jnp.zeros((1, 9, draft.config.tap_size))
    with pytest.raises(ValueError, match="replicat"):
        jax.eval_shape(draft_once.__wrapped__, target, draft, taps, jnp.zeros((1, 3), int))


def assert_split(found, single):
    """`found` is what `single` gives, split over the same mesh."""
    expected = sharding.shard(single, found.mesh)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), (_, b) in zip(
        sharding.named_leaves(found), sharding.named_leaves(expected), strict=True
    ):
        assert a.sharding == b.sharding, path
        np.testing.assert_array_equal(a, b)


def test_a_gguf_to_shards(tmp_path):
    """Rows that the converter reordered are put back within each device's share."""
    kind = gguf.GGMLQuantizationType.F16
    path = write_gguf(tmp_path / "m.gguf", HF_TARGETS / "llama3", "llama", quantize=kind)
    assert_split(load_gguf(path, F32, mesh=sharding.make_mesh(2)), load_gguf(path, F32))


@pytest.mark.parametrize("family", FAMILIES)
def test_files_to_shards_and_back(family, tmp_path):
    """Each device reads its own rows; saving a split drafter writes what was loaded."""
    mesh, (target, draft) = sharding.make_mesh(2), trained(family)
    split_target = load_hf(ORACLES / "tiny" / "target", F32, mesh=mesh)
    split_draft = load_draft(ORACLES / "tiny" / family, split_target, F32)
    assert_split(split_target, target)
    assert_split(split_draft, draft)
    save_draft(split_draft, tmp_path)
    again = load_draft(tmp_path, target, F32)
    jax.tree.map(np.testing.assert_array_equal, again, draft)


@pytest.mark.parametrize("precision", quant.PRECISIONS)
def test_quantised_drafters(precision):
    """Integers and scales go where their rows and blocks do; sums over devices stay f32."""
    mesh, (target, _) = sharding.make_mesh(2), trained("dflash")
    ours = load_draft(ORACLES / "tiny" / "dflash", target, F32, precision=precision)
    split_target = sharding.shard(target, mesh)
    found = load_draft(ORACLES / "tiny" / "dflash", split_target, F32, precision=precision)
    assert_split(found, ours)
    taps = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, ours.config.tap_size)), F32)
    features = [jax.jit(ctx_features)(draft, taps) for draft in (ours, found)]
    assert_close(features[1], features[0])
    trimmed = load_draft(
        ORACLES / "tiny" / "dflash", split_target, F32, precision=precision, head_rows=64
    )
    assert trimmed.mesh == mesh
    whole = sharding.whole(trimmed)
    logits = [
        jax.jit(draft_logits)(*models, features[0])
        for models in ((target, whole), (split_target, trimmed))
    ]
    assert logits[1].sharding.spec[-1] == sharding.MODEL
    assert_close(logits[1], logits[0])


@pytest.mark.slow
@pytest.mark.parametrize("precision", quant.PRECISIONS)
def test_generation_with_a_quantised_drafter(precision):
    options = {"precision": precision, "head_rows": 128}
    target, _ = trained("dspark")
    draft = load_draft(ORACLES / "tiny" / "dspark", target, F32, **options)
    split_target = sharding.shard(target, sharding.make_mesh(2))
    split_draft = load_draft(ORACLES / "tiny" / "dspark", split_target, F32, **options)
    expected = generate(target, draft, PROMPT, 24)
    found = generate(split_target, split_draft, PROMPT, 24)
    assert found.token_ids == expected.token_ids
    assert found.acceptance_lengths == expected.acceptance_lengths


def test_a_shard_is_a_smaller_model_of_the_same_kind():
    """Its heads' q, k and v rows lie together, in the order that one device has."""
    target = tiny_target(TARGET)
    qkv = sharding.shard(target, sharding.make_mesh(4)).layers[0].qkv
    q, k, v = np.split(np.asarray(target.layers[0].qkv), [128, 192])
    expected = np.concatenate([q[64:96], k[32:48], v[32:48]])
    np.testing.assert_array_equal(qkv.addressable_shards[2].data, expected)


def odd(draft_part=None, **sizes):
    """A pair whose sizes no mesh was thought of for."""
    target, draft = pair("dflash2")
    rows = sizes.pop("rows", 64)
    config = dataclasses.replace(target.config, vocab_size=rows, embedding_rows=rows, **sizes)
    table = {"vocab_size": max(rows, 64), "mask_token_id": 62}
    drafted = dataclasses.replace(draft.config, **table, **(draft_part or sizes))
    return tiny_target(config), tiny_draft(drafted)


THREE = {"num_attention_heads": 9, "num_key_value_heads": 3}


@pytest.mark.parametrize(
    ("sizes", "devices", "whole"),
    [
        (
            {"rows": 63, "draft_part": {"intermediate_size": 47}},
            2,
            {
                "DenseTarget": ["embedding (embedding, axis 0: 63)", "head (head, axis 0: 63)"],
                "DFlashDraft": ["mlp (intermediate_size: 47)"],
            },
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (
                    {"intermediate_size": 47},
                    2,
                    {
                        "DenseTarget": ["mlp (intermediate_size: 47)"],
                        "DFlashDraft": ["mlp (intermediate_size: 47)"],
                    },
                ),
                (
                    THREE,
                    2,
                    {
                        "DenseTarget": ["attention (num_key_value_heads: 3)"],
                        "DFlashDraft": ["attention (num_key_value_heads: 3)"],
                    },
                ),
                (
                    THREE | {"intermediate_size": 48, "rows": 66},
                    3,
                    {"DFlashDraft": ["fc (fc, axis 1: 32)"]},
                ),
                (
                    THREE | {"intermediate_size": 50, "rows": 66},
                    3,
                    {
                        "DenseTarget": ["mlp (intermediate_size: 50)"],
                        "DFlashDraft": ["mlp (intermediate_size: 50)", "fc (fc, axis 1: 32)"],
                    },
                ),
            )
        ),
    ],
)
def test_what_the_devices_do_not_divide_is_whole_on_each_of_them(sizes, devices, whole):
    """And is named in a warning; heads, caches and all else are split as ever."""
    models, mesh = odd(**sizes), sharding.make_mesh(devices)
    expected = generate(*models, PROMPT, 20)
    with pytest.warns(UserWarning, match="whole on each of") as warned:
        split = sharding.shard_pair(*models, mesh)
    texts = [str(warning.message) for warning in warned]
    lead = f": whole on each of {devices} devices, which do not divide it: "
    assert texts == [name + lead + "; ".join(parts) for name, parts in whole.items()]
    found = generate(*split, PROMPT, 20)
    assert found.token_ids == expected.token_ids
    assert found.acceptance_lengths == expected.acceptance_lengths
    taps = jnp.asarray(np.random.default_rng(0).normal(size=(1, 12, 32)), F32)
    block = jnp.array([[7, 62, 62, 62]])
    for a, b in zip(draft_once(*split, taps, block), draft_once(*models, taps, block), strict=True):
        assert_close(a, b)
    for model, one in zip(split, models, strict=True):
        jax.tree.map(np.testing.assert_array_equal, sharding.whole(model), sharding.whole(one))


def test_devices_that_divide_nothing_of_a_target_are_refused():
    with pytest.raises(
        ValueError,
        match=r"mesh: expected 5 tensor-parallel devices to divide some of the target's sizes, "
        r"found attention \(num_key_value_heads: 2\); mlp \(intermediate_size: 48\); "
        r"embedding \(embedding, axis 0: 64\)",
    ):
        sharding.shard(tiny_target(), sharding.make_mesh(5))
    with pytest.raises(ValueError, match="mesh: expected 1 to 8 devices, found 9"):
        sharding.make_mesh(9)


def test_both_models_are_on_one_mesh():
    target, draft = pair("dflash")
    mesh = sharding.make_mesh(2)
    with pytest.raises(ValueError, match=r"target's mesh \(one device\), found .*'model': 2"):
        SpecSession(target, sharding.shard(draft, mesh))
    with pytest.raises(ValueError, match=r"the model's own .*'model': 2.*, found .*'model': 4"):
        SpecSession(sharding.shard(target, mesh), draft, mesh=sharding.make_mesh(4))
    assert SpecSession(target, draft, mesh=mesh).draft.mesh == mesh


TINY_COMMAND = (
    f"generate --ids --target {ORACLES}/tiny/target --draft {ORACLES}/tiny/dspark "
    "--max-new-tokens 12 --json"
).split()
IDS = "40 41 42 43 44 45 46 47"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--tp", "5"], "mesh: expected 5 tensor-parallel devices to divide some of the target's"),
        (["--tp", "9"], "mesh: expected 1 to 8 devices, found 9"),
        (["--tp", "0"], "mesh: expected 1 to 8 devices, found 0"),
        (["--data", "2"], "--data: expected with --prompts FILE, found one prompt"),
        (["--processes", "2"], "--processes: expected with --coordinator, found without"),
        (["--coordinator", "localhost:1", "--processes", "2"], "--process-id: expected with"),
        (
            ["--coordinator", "localhost:1", "--processes", "2", "--process-id", "2"],
            "--process-id: expected 0..1, found 2",
        ),
    ],
)
def test_the_command_refuses_in_one_line(options, line, capsys):
    assert main([*TINY_COMMAND, IDS, *options]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


@pytest.mark.slow
def test_the_command_over_two_devices(capsys):
    answers = []
    for options in ([], ["--tp", "2"], ["--tp", "2", "--compare"]):
        assert main([*TINY_COMMAND, IDS, *options]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0]["token_ids"] == answers[1]["token_ids"] == answers[2]["token_ids"]
    assert answers[2]["lossless"]


@pytest.mark.slow
def test_the_command_answers_a_file_of_prompts_over_devices(tmp_path, capsys):
    """Side by side, over two devices and four, and under the policy cost, whose measured costs may
    choose any width: greedy answers are those of one device.
    """
    file = tmp_path / "prompts.jsonl"
    records = [{"prompt_ids": [*range(40, 40 + n)], "max_new_tokens": 4 + n} for n in range(3, 9)]
    file.write_text("\n".join(map(json.dumps, records)))
    command = ["generate", "--prompts", str(file), *TINY_COMMAND[2:-1]]
    cost = ["--window-policy", "cost"]
    answers = []
    for options in (
        [],
        ["--tp", "2"],
        ["--tp", "2", "--batch", "3", *cost],
        ["--tp", "2", "--data", "2", "--batch", "4", *cost],
    ):
        assert main([*command, *options]) == 0
        lines = map(json.loads, capsys.readouterr().out.splitlines())
        answers.append({line["request"]: line["token_ids"] for line in lines})
    assert answers[0].keys() == set(range(6))
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--window-policy", "cost"]])
def test_two_processes_give_what_one_gives(options, capsys):
    """Choosing the same widths, whatever each of them measures."""
    assert main([*TINY_COMMAND, IDS]) == 0
    expected = json.loads(capsys.readouterr().out)["token_ids"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = "import jax, sys; jax.config.update('jax_platforms', 'cpu'); " + (
        "from dflash_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    group = ["--coordinator", f"localhost:{port}", "--processes", "2", "--process-id"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *TINY_COMMAND, IDS, *options, *group, str(i)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        first, second = (process.communicate(timeout=300)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    answer = next(line for line in first.splitlines() if line.startswith("{"))
    assert json.loads(answer)["token_ids"] == expected
    assert "{" not in second
