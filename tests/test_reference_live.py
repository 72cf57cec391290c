"""Against the public PyTorch reference itself, run live: PyPI `dflash` 0.1.0.

For developers: skipped where torch, transformers (5 or newer) or `dflash` is not installed
(`pip install torch "transformers>=5"` and `pip install --no-deps dflash==0.1.0`).
"""

import functools
import itertools
import json
import time
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_drafter
from families import ORACLES, assert_close, trained
from targets import F32

from dflash_jax import forward_block, generate, load_draft, save_draft
from dflash_jax.checkpoint import shipped_drafts
from dflash_jax.cli import main
from dflash_jax.draft import ctx_features
from dflash_jax.layers import scaled
from dflash_jax.propose import dflash2_propose_greedy, draft_logits, propose_rows
from dflash_jax.sampling import Filters, filtered_probs
from dflash_jax.targets.loading import load_target
from dflash_jax.targets.torch import TorchTarget

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip(
        "transformers", minversion="5", reason="transformers 5 is not installed"
    )
    reference = pytest.importorskip("dflash.model", reason="PyPI dflash is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")

TINY = ORACLES / "tiny"
MODELS = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
PROMPTS = json.loads((TINY / "expected.json").read_text())["prompts"]
EDGES = json.loads((TINY / "edges.json").read_text())["runs"]
_forward_block = jax.jit(forward_block)


def load_reference(directory, family):
    model = getattr(reference, MODELS[family]).from_pretrained(directory, dtype=torch.float32)
    return model.eval()


@functools.cache
def reference_pair(family):
    """The reference's target and drafter, in f32 on the CPU."""
    target = transformers.AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    return target.eval(), load_reference(TINY / family, family)


def reference_run(family, prompt, count, stops, block_size, monkeypatch):
    """Emitted ids and tokens gained in each round."""
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)  # it waits for a GPU there
    target, draft = reference_pair(family)
    run = reference.dflash_generate(
        draft,
        target,
        torch.tensor([prompt]),
        count,
        stops,
        block_size=block_size,
        return_stats=True,
    )
    return run.output_ids[0, len(prompt) :].tolist(), run.acceptance_lengths


def assert_same_run(family, prompt, count, monkeypatch, stops=None, block_size=None):
    """Equal tokens; equal gains in all rounds but those near the budget's end, where the reference
    shortens its block and this package clips the commit.
    """
    ids, gains = reference_run(family, prompt, count, stops, block_size, monkeypatch)
    out = generate(
        *trained(family), prompt, count, stop_token_ids=stops or (), block_size=block_size
    )
    assert out.token_ids == ids
    before = 1 + np.cumsum([0, *gains])[:-1]
    whole = int((before + (block_size or 8) <= count + 1).sum())
    assert out.acceptance_lengths[:whole] == gains[:whole]
    return whole


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("index", range(3))
def test_the_same_tokens_and_gains(family, index, monkeypatch):
    record = PROMPTS[index]
    whole = assert_same_run(family, record["prompt_ids"], 96, monkeypatch)
    assert whole > 15


@pytest.mark.parametrize("family", MODELS)
def test_prompts_that_are_not_recorded(family, monkeypatch):
    for text in (b"x", b"import os, sys\nclass A(object):\n    ", bytes(range(32, 120))):
        assert_same_run(family, list(text), 40, monkeypatch)


@pytest.mark.parametrize("family", MODELS)
def test_short_budgets_stop_tokens_and_smaller_blocks(family, monkeypatch):
    runs = [run for run in EDGES if family in run][::2]
    assert len(runs) > 5
    for run in runs:
        stops, size = run.get("stop_token_ids"), run.get("block_size")
        assert_same_run(family, run["prompt_ids"], run["max_new_tokens"], monkeypatch, stops, size)


@torch.inference_mode()
def reference_block(model, taps, noise, pos, head):
    """Draft rows 1.. of one uncached block and their logits."""
    hidden = model(
        target_hidden=torch.tensor(taps)[None],
        noise_embedding=torch.tensor(noise)[None],
        position_ids=torch.tensor(pos)[None],
    )
    rows = hidden[:, 1:]
    logits = model.compute_logits(rows, lambda h: h @ torch.tensor(head).T)
    return rows, logits


class Head:
    """A target's output head."""

    def __init__(self, table):
        self.table = jnp.asarray(table)

    def logits(self, hidden):
        return hidden @ self.table.T


def random_inputs(config, seed=0):
    """Taps `[50, taps * H]`, noise `[b, H]` and head `[V, H]` of a block."""
    rng = np.random.default_rng(seed)
    taps = rng.normal(size=(50, config.tap_size)).astype(np.float32)
    noise = rng.normal(size=(config.block_size, config.hidden_size)).astype(np.float32)
    return taps, noise, rng.normal(size=(config.vocabulary, config.hidden_size)).astype(np.float32)


def smollm2_inputs(config, text):
    """The same from the real target, at the end of a prompt."""
    loaded = load_target("smollm2")
    target, ids = loaded.target, loaded.text.encode_chat([{"role": "user", "content": text}])
    state = target.init_state(1, len(ids))
    out, _ = target.forward(state, jnp.asarray([ids]), config.target_layer_ids)
    first = int(target.logits(out.hidden[:, -1])[0].argmax())
    block = jnp.asarray([first] + [config.mask_token_id] * (config.block_size - 1))
    return tuple(np.asarray(x) for x in (out.taps[0], target.embed(block), target.lm_head))


def assert_same_block(model, draft, inputs=None):
    """One block: rows, logits and greedy drafts. Random inputs where none are given."""
    taps, noise, head = inputs or random_inputs(draft.config)
    pos = np.arange(len(taps) + len(noise))
    rows, logits = reference_block(model, taps, noise, pos, head)
    features = ctx_features(draft, jnp.asarray(taps))
    ours = _forward_block(draft, features, jnp.asarray(noise), jnp.asarray(pos))[1:]
    assert_close(ours, rows[0])
    our_logits = draft_logits(Head(head), draft, ours)
    assert_close(our_logits, logits[0])
    if draft.dflash2 is None:
        drafts, expected = propose_rows(draft, our_logits), logits[0].argmax(-1)
    else:
        with torch.inference_mode():
            expected = model.candidate_selector.select(rows, logits, torch.tensor([7]), 0.0)[0][0]
        drafts = dflash2_propose_greedy(draft, our_logits, ours, jnp.int32(7))
    assert drafts.tolist() == expected.tolist()


@pytest.mark.parametrize("family", MODELS)
def test_the_same_blocks(family):
    assert_same_block(reference_pair(family)[1], trained(family)[1])


@pytest.mark.parametrize("family", MODELS)
def test_the_target_has_the_same_logits_and_taps(family):
    target, _ = reference_pair(family)
    ours, draft = trained(family)
    ids = PROMPTS[0]["prompt_ids"]
    with torch.inference_mode():
        out = target(torch.tensor([ids]), output_hidden_states=True)
        taps = reference.extract_context_feature(
            out.hidden_states, list(draft.config.target_layer_ids)
        )
    state = ours.init_state(1, len(ids))
    run, _ = ours.forward(state, jnp.asarray([ids]), draft.config.target_layer_ids)
    assert_close(ours.logits(run.hidden), out.logits)
    assert_close(run.taps, taps)


# --- our drafters in the reference ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gemma_targets_tables_are_used_the_same(dtype):
    """The embedding's rows without the scale that Gemma's own module puts on them, times the
    drafter's; the tied head without the cap that Gemma puts on its logits, but with the drafter's.
    """
    config = transformers.AutoConfig.for_model(
        "gemma2",
        vocab_size=64,
        hidden_size=48,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        final_logit_softcapping=3.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=kind).eval()
    tables, scale = TorchTarget(model).tables, 48**0.5
    ids = np.arange(64)
    with torch.inference_mode():
        noise = reference._raw_input_embeddings(model, torch.tensor(ids), scale)
        rows = torch.randn(5, 48, dtype=kind)
        shape = {"output_multiplier": 0.5, "final_logit_softcapping": 20.0}
        shaper = types.SimpleNamespace(config=types.SimpleNamespace(**shape))
        head = reference._output_head(model)
        logits = reference.DFlashDraftModel.compute_logits(shaper, rows, head).float()
    ours = scaled(tables.embed(jnp.asarray(ids)), scale)
    np.testing.assert_array_equal(np.asarray(ours, np.float32), noise.float())

    shaper.head = None
    ours = draft_logits(tables, shaper, jnp.from_dlpack(rows))
    np.testing.assert_allclose(ours, logits, atol=1e-5 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("family", MODELS)
def test_the_reference_reads_what_we_export(family, tmp_path):
    out = tmp_path / "exported"
    assert main(["export", "--draft", str(TINY / family), "--out", str(out)]) == 0
    model = load_reference(out, family)
    assert_same_block(model, trained(family)[1])
    assert model.block_size == 8
    assert model.mask_token_id == 256
    assert list(model.target_layer_ids) == [1, 3, 4]


def test_the_reference_reads_a_dspark_backbone_that_we_export(tmp_path):
    """It has no DSpark heads of its own, but the block is the same."""
    _, draft = trained("dspark")
    save_draft(draft, tmp_path / "exported")
    model = load_reference(tmp_path / "exported", "dflash")
    assert_same_block(model, draft.replace(markov=None, confidence=None))


@pytest.mark.parametrize("text", ["Why is the sky blue?", "List five fruits."])
@pytest.mark.parametrize("name", shipped_drafts())
def test_the_reference_reads_the_drafters_we_ship(name, text, tmp_path):
    """On the target's own taps and tokens: random ones lie so far outside of what a drafter was
    trained for that f32 itself differs from f64 by more than the tolerance.
    """
    out = tmp_path / "exported"
    assert main(["export", "--draft", name, "--out", str(out)]) == 0
    draft = load_draft(out, dtype=F32)  # norms are bf16 there
    family = draft.config.family
    if family == "dspark":  # the reference has no such heads, but the block is the same
        draft, family = draft.replace(markov=None, confidence=None), "dflash"
    inputs = smollm2_inputs(draft.config, text)
    assert_same_block(load_reference(out, family), draft, inputs)


@pytest.fixture(scope="module")
def trained_here(tmp_path_factory):
    """Directories of drafters that our script has trained for the tiny target, a step or two from
    the recorded ones, and saved for other readers.
    """
    root = tmp_path_factory.mktemp("trained")
    lines = [{"prompt_ids": r["prompt_ids"], "answer_ids": r["greedy_target_ids"]} for r in PROMPTS]
    (root / "records.jsonl").write_text("\n".join(map(json.dumps, lines)))
    records = root / "records.jsonl"

    def train(family):
        common = ["--target", TINY / "target", "--data", records, "--heldout", records]
        common += ["--out", root / family, "--length", 128, "--batch", 4, "--anchors", 4]
        common += ["--max-new-tokens", 8, "--steps", 3, "--devices", 1, "--storage", "bf16"]
        common += ["--init", TINY / family, "--family", family]
        assert train_drafter.main([*map(str, common)]) == 0
        return root / family

    return functools.cache(train)


@pytest.mark.parametrize("family", MODELS)
def test_the_reference_decodes_with_a_drafter_trained_here(family, trained_here, monkeypatch):
    """Equal logits; then its own loop, with torch's target, gains what ours gains."""
    directory = trained_here(family)
    target, before = trained(family)
    draft = load_draft(directory, target, dtype=F32)
    assert not np.array_equal(draft.fc, before.fc)
    model = load_reference(directory, family)
    assert_same_block(model, draft)
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)
    prompt, torch_target = PROMPTS[1]["prompt_ids"], reference_pair(family)[0]
    run = reference.dflash_generate(
        model, torch_target, torch.tensor([prompt]), 48, None, return_stats=True
    )
    for ours in (target, TorchTarget(torch_target)):
        out = generate(ours, draft, prompt, 48, stop_token_ids=())
        assert out.token_ids == run.output_ids[0, len(prompt) :].tolist()
        before_end = 1 + np.cumsum([0, *run.acceptance_lengths])[:-1]
        whole = int((before_end + 8 <= 49).sum())
        assert whole > 5
        assert out.acceptance_lengths[:whole] == run.acceptance_lengths[:whole]


# --- sampling -------------------------------------------------------------------------------------


def test_the_same_filters():
    logits = np.random.default_rng(0).normal(0, 2, (40, 50)).astype(np.float32)
    rows = jax.jit(jax.vmap(filtered_probs, in_axes=(0, None)))
    for temperature, top_p, top_k in itertools.product((0.5, 1, 1.7), (1, 0.9, 0.3), (0, 1, 7)):
        expected = reference._sampling_probs(torch.tensor(logits), temperature, top_p, top_k)
        filters = Filters(
            jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(0)
        )
        got = rows(logits, filters)
        np.testing.assert_array_equal(np.asarray(got) > 0, expected.numpy() > 0)
        assert_close(got, expected)
