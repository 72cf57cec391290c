"""Targets that PyTorch runs: every token is torch's own, whatever is drafted.

For developers: skipped where torch or transformers (5.15 or newer) is not installed. The models are
tiny and random, made from configs.
"""

import copy
import dataclasses
import functools
import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, ORACLES, assert_close, trained
from targets import F32, TINY, random_tree

from dflash_jax import SamplingParams, SpecSession, compare, generate, hosted
from dflash_jax.checkpoint import save_draft
from dflash_jax.cli import main
from dflash_jax.doctor import Doctor
from dflash_jax.doctor.rows import check_rows, contexts
from dflash_jax.shapes import abstract
from dflash_jax.targets import torch as torch_target
from dflash_jax.targets.loading import LoadedTarget, load_target
from dflash_jax.targets.torch import TorchTarget, load_torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip(
        "transformers", minversion="5.15", reason="transformers 5.15 is not installed"
    )

    from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.filterwarnings("ignore")

TINY_MODELS = ORACLES / "tiny"
DIRECTORY = TINY_MODELS / "target"
TEXTS = [list(b"def add(first, second):\n    return first + second\n"), list(b"import os, s")]
VOCABULARY, MASK = 64, 63
PROMPTS = ([5, 3, 8, 13, 21], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [40])
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
CAP, SWITCH = 3.0, 24
"""Of Gemma's logits; where the longrope model's rope becomes another one."""
GEMMAS = ("gemma", "gemma2", "gemma3_text")
MIXED = ["linear_attention", "full_attention"] * 2
CONFIGS = {
    "qwen3": {},
    "llama": {},
    "qwen3 with windows": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 6, "final_logit_softcapping": CAP},
    "gemma3_text": {
        "query_pre_attn_scalar": 8,
        "sliding_window": 6,
        "final_logit_softcapping": CAP,
    },
    "phi3": {
        "max_position_embeddings": 512,
        "original_max_position_embeddings": SWITCH,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 2.0, 4.0, 8.0],
            "factor": 512 / SWITCH,
            "original_max_position_embeddings": SWITCH,
        },
    },
    "qwen3_moe": EXPERTS,
    "qwen3_next": LINEAR | EXPERTS | {"layer_types": MIXED},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
}
HYBRIDS = ("qwen3_next", "lfm2")


@functools.cache
def model_of(name, dtype="float32", **changes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name.split()[0], **COMMON | CONFIGS[name] | changes)
    kind = getattr(torch, dtype)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=kind).eval()


@functools.cache
def target_of(name):
    return TorchTarget(model_of(name))


@functools.cache
def tiny_drafter():
    config = dataclasses.replace(TINY, num_target_layers=4)
    return random_tree(abstract(config, F32), 1)


def own(name, prompt, count):
    """Torch's own greedy decode: the whole context again for each token, no cache at all."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model_of(name)(torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture
def told(monkeypatch):
    """Tells the drafter what to propose: the continuations given, but for a wrong token at every
    fifth position of the text. So rows are kept and taken back, some and all of them.
    """
    honest = hosted.propose_block

    def tell(prompts, continuations):
        texts = [[*p, *c, *[0] * 8] for p, c in zip(prompts, continuations, strict=True)]
        table = np.zeros((len(texts), max(map(len, texts))), np.int32)
        for row, text in zip(table, texts, strict=True):
            row[: len(text)] = text
        table[:, ::5] = (table[:, ::5] + 1) % VOCABULARY

        def propose_block(tables, draft, state, plan):
            proposal, kv = honest(tables, draft, state, plan)
            pos = state.target.len[:, None] + 1 + jnp.arange(proposal.tokens.shape[1])[None]
            said = jnp.take_along_axis(jnp.asarray(table), pos, axis=1, mode="clip")
            return proposal.replace(tokens=said), kv

        monkeypatch.setattr(hosted, "propose_block", propose_block)
        hosted._draft.clear_cache()

    yield tell
    hosted._draft.clear_cache()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tokens_are_torchs_own(name, told):
    expected = [own(name, prompt, 14) for prompt in PROMPTS]
    told(PROMPTS, expected)
    outs = generate(target_of(name), tiny_drafter(), PROMPTS, 14, check=True)
    assert [out.token_ids for out in outs] == expected
    gains = {gain for out in outs for gain in out.acceptance_lengths}
    assert gains == {1, 2, 3, 4}
    plain = generate(target_of(name), None, PROMPTS[0], 14)
    assert plain.token_ids == expected[0]


def test_recurrent_states_are_taken_back_by_replay():
    assert [target_of(name)._crops for name in CONFIGS] == [name not in HYBRIDS for name in CONFIGS]


def test_a_batch_is_its_sequences_alone():
    counts = (9, 14, 3)
    together = generate(target_of("qwen3"), tiny_drafter(), PROMPTS, counts)
    for prompt, count, out in zip(PROMPTS, counts, together, strict=True):
        alone = generate(target_of("qwen3"), tiny_drafter(), prompt, count)
        assert out.token_ids == alone.token_ids
        assert out.acceptance_lengths == alone.acceptance_lengths


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GEMMAS)
def test_gemma_scales_its_own_input_and_caps_its_own_logits_and_nobody_elses(name, dtype):
    """The model reads its table times sqrt(hidden), rounded to the weights' dtype. The drafter gets
    the table's rows as they are and the head alone, as from the public reference: what a drafter
    was trained with besides, its own config says (`input_embedding_scale`, ...).
    """
    model = model_of(name, dtype, hidden_size=48)  # sqrt(48) is no bf16 number
    target, ids = TorchTarget(model), np.asarray([PROMPTS[1]])
    with torch.inference_mode():
        own = model(torch.tensor(ids), use_cache=False, output_hidden_states=True)
    table, read = model.get_input_embeddings().weight, own.hidden_states[0].float().numpy()
    rows = target.tables.embed(jnp.asarray(ids))
    assert (np.asarray(rows, np.float32) == table.detach().float().numpy()[ids]).all()
    scale = torch.tensor(48**0.5).to(table.dtype).item()
    assert (np.asarray(rows * jnp.asarray(scale, rows.dtype), np.float32) == read).all()

    count = np.array([ids.shape[1]])
    out, _ = target.forward(target.init_state(1, 64), jnp.asarray(ids), count)
    np.testing.assert_array_equal(np.asarray(out.logits, np.float32), own.logits.float().numpy())
    assert target.lm_head.unsafe_buffer_pointer() == table.data_ptr()  # tied
    head = np.asarray(target.tables.logits(jnp.from_dlpack(own.hidden_states[-1].contiguous())))
    capped = head if name == "gemma" else CAP * np.tanh(head / CAP)
    np.testing.assert_allclose(capped, own.logits.float(), atol=1e-5 if dtype == "float32" else 0.1)
    assert np.abs(head).max() > CAP


def test_rows_on_both_sides_of_a_longrope_switch_are_read_as_each_alone():
    """Blocks of every place before and behind it, all of them kept, some or none."""
    target, model = target_of("phi3"), model_of("phi3")
    text = np.random.default_rng(0).integers(0, VOCABULARY, SWITCH + 10).astype(np.int32)
    with torch.inference_mode():
        alone = [
            model(torch.tensor(text[None, : n + 1]), use_cache=False, output_hidden_states=True)
            for n in range(len(text))
        ]
    rows = 5
    for start in range(SWITCH - 6, SWITCH + 3):
        for kept in range(rows + 1):
            state = target.init_state(1, 64)
            for end, wrong in ((start, 0), (start + kept, rows - kept), (start + rows, 0)):
                begin = int(state.len[0])
                ids = np.concatenate([text[begin:end], (text[end : end + wrong] + 1) % VOCABULARY])
                count, keep = np.array([len(ids)]), np.array([end - begin])
                out, state = target.forward(state, jnp.asarray(ids[None]), count, (1, 3))
                state = target.commit(state, keep)
                for i in range(end - begin):
                    own = alone[begin + i]
                    np.testing.assert_allclose(out.logits[0, i], own.logits[0, -1], atol=1e-4)
                    hidden = np.concatenate([own.hidden_states[j][0, -1] for j in (2, 4)])
                    np.testing.assert_allclose(out.taps[0, i], hidden, atol=1e-4)


# --- one row and several -------------------------------------------------------------------------


def altered(change):
    model = copy.deepcopy(model_of("qwen3"))
    change(model)
    return model


def rows_found(target):
    return [finding.text for finding in check_rows(target, contexts(target, PROMPTS * 4, 0))]


@pytest.mark.parametrize("name", CONFIGS)
def test_one_row_and_several_agree(name):
    assert rows_found(target_of(name)) == []


@pytest.mark.parametrize("name", ["qwen3", "qwen3 with windows", "gemma3_text", "phi3"])
def test_rounding_in_16_bits_is_no_disagreement(name):
    assert rows_found(TorchTarget(model_of(name, "bfloat16"))) == []


def sparse_past(length):
    """Attention that counts for less where several rows look at more than `length` keys."""

    def change(model):
        for layer in model.model.layers:
            honest = layer.self_attn.forward

            def forward(hidden_states, honest=honest, **options):
                out, weights = honest(hidden_states, **options)
                keys = 1 + int(options["position_ids"][0, -1])
                other = hidden_states.shape[1] > 1 and keys > length
                return out * (0.8 if other else 1.0), weights

            layer.self_attn.forward = forward

    return change


def test_a_model_whose_way_with_several_rows_is_another_is_named(tmp_path):
    """One that takes it past 24 tokens, which loading does not try."""
    target = TorchTarget(altered(sparse_past(24)))
    assert "when 8 rows run at once" in rows_found(target)[0]
    assert rows_found(TorchTarget(altered(sparse_past(10_000)))) == []
    with pytest.raises(NotImplementedError, match="found logits off by"):
        TorchTarget(altered(sparse_past(1)))

    loaded = LoadedTarget(target, None, "fickle")
    save_draft(tiny_drafter(), tmp_path)
    report = Doctor(loaded, PROMPTS * 4).examine(tmp_path)
    assert ("target", "one row and several rows") in [(f.where, f.name) for f in report.findings]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_doctor_takes_a_target_of_pytorch(dtype, capsys):
    draft = str(TINY_MODELS / "dflash")
    command = ["doctor", "--target", f"torch:{DIRECTORY}", "--draft", draft, "--dtype", dtype]
    assert main(command) == 0
    assert "one and several compared after" in capsys.readouterr().out


# --- beside the same model in JAX ----------------------------------------------------------------


@functools.cache
def trained_in_torch():
    return load_torch(DIRECTORY, "float32")


def same(family, prompts, counts, **options):
    """Both targets' results, which must be equal in everything but time; torch's are returned."""
    ours, draft = trained(family)
    results = [
        generate(target, draft, prompts, counts, **options) for target in (ours, trained_in_torch())
    ]
    for left, right in zip(*results, strict=True):
        for name in ("token_ids", "acceptance_lengths", "verify_widths", "finish_reason"):
            assert getattr(left, name) == getattr(right, name)
        if left.logprobs is not None:
            np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-4)
    return results[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_rounds_as_in_jax(family):
    outs = same(family, TEXTS, [40, 30], logprobs=True)
    assert all(out.accepted > 0 for out in outs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_draws_as_in_jax(family):
    sampling = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, repeat_penalty=1.1),
        SamplingParams(temperature=1.2, top_k=20, seed=4),
    ]
    same(family, TEXTS, 32, sampling=sampling)


def test_stops_narrow_windows_and_chunks():
    same("dspark", TEXTS, 40, stop_token_ids=[ord("n")], verify_width=4, chunk=16)
    same("dflash", TEXTS, 300, capacity=64)


def test_sessions_go_on():
    expected = None
    for target in (trained("dflash")[0], trained_in_torch()):
        session = SpecSession(target, trained("dflash")[1], check=True)
        session.open(TEXTS[:1], 10)
        streamed = [token for tokens in session.stream() for token in tokens[0]]
        assert streamed == session.results()[0].token_ids
        session.resume([list(b"\ndef")], 12)
        session.burst()
        found = streamed, session.results()[0].token_ids
        assert expected in (None, found)
        expected = found


def test_compare():
    out = compare(trained_in_torch(), trained("dflash")[1], TEXTS[0], 24)
    assert out.lossless
    assert out.plain_difference is None


def test_taps_and_tables_are_the_models_own():
    model, target = trained_in_torch().model, trained_in_torch()
    weight = model.get_input_embeddings().weight
    assert target.embedding.unsafe_buffer_pointer() == weight.data_ptr()
    ours = trained("dflash")[0]
    ids, taps = jnp.asarray([TEXTS[0]]), (1, 3, ours.config.num_hidden_layers - 1)
    run, _ = ours.forward(ours.init_state(1, 128), ids, taps)
    count = np.array([len(TEXTS[0])])
    out, _ = target.forward(target.init_state(1, 128), ids, count, taps)
    assert_close(out.taps, run.taps)
    assert_close(out.logits, ours.logits(run.hidden))
    assert_close(target.tables.logits(run.hidden), ours.logits(run.hidden))


@pytest.mark.parametrize("draft", ["dflash", "none"])
def test_from_the_command_line(draft, capsys):
    draft = draft if draft == "none" else str(TINY_MODELS / draft)
    ids = " ".join(map(str, TEXTS[0]))
    target = ["--target", f"torch:{DIRECTORY}", "--draft", draft]
    assert main(["generate", ids, "--ids", *target, "--max-new-tokens", "12", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["token_ids"] == generate(trained("dflash")[0], None, TEXTS[0], 12).token_ids
    assert report["dtype"] == "float32"


# --- refusals ------------------------------------------------------------------------------------


def forgetful(model):
    """It takes a cache and does not look at it."""
    honest = model.forward

    def forward(input_ids=None, position_ids=None, cache=None, output_hidden_states=None):
        out = honest(input_ids, use_cache=False, output_hidden_states=output_hidden_states)
        for layer in cache.layers:
            layer.keys = layer.values = torch.zeros((1, 1, 100, 1))
            layer.is_initialized = True
        return out

    model.forward = forward


@pytest.fixture
def saved(tmp_path):
    """A directory with a tiny model, and what rewrites its tensors."""
    model_of("qwen3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"

    def rewrite(change):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})

    return tmp_path, rewrite


DOWN = "model.layers.1.mlp.down_proj.weight"


def test_a_missing_tensor_is_named_not_made_up(saved):
    directory, rewrite = saved
    assert load_torch(directory).vocab_size
    rewrite(lambda tensors: tensors.pop(DOWN))
    with pytest.raises(ValueError, match=f"expected a tensor {DOWN}, found none$"):
        load_torch(directory)


def test_damaged_weights_are_one_error_that_names_the_directory(saved):
    directory, rewrite = saved
    rewrite(lambda tensors: tensors.update({DOWN: tensors[DOWN][:-1].clone()}))
    with pytest.raises(ValueError, match=f"{directory}: expected weights that load, found: "):
        load_torch(directory)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match=f"{directory}: expected weights that load, found: "):
        load_torch(directory)


def test_weights_that_are_no_numbers_are_named(saved):
    directory, rewrite = saved
    rewrite(lambda tensors: tensors[DOWN].fill_(float("nan")))
    with pytest.raises(ValueError, match="expected logits that are numbers, found NaN"):
        load_torch(directory)


def test_a_model_that_forgets_its_cache_is_refused():
    with pytest.raises(NotImplementedError, match="model_type 'qwen3': expected a cache that goes"):
        TorchTarget(altered(forgetful))


def test_a_model_that_cannot_take_rows_back_is_refused(monkeypatch):
    monkeypatch.setattr(transformers.DynamicCache, "crop", lambda *_: None)
    with pytest.raises(NotImplementedError, match="takes rows back, found logits off by"):
        TorchTarget(model_of("qwen3"))


def test_a_recurrent_model_without_its_states_back_is_refused(monkeypatch):
    monkeypatch.setattr(torch_target, "_kept", lambda layer: layer)
    with pytest.raises(NotImplementedError, match=r"takes rows back|cannot be driven"):
        TorchTarget(model_of("qwen3_next"))


def test_a_model_whose_own_cache_is_wrong_is_refused():
    """This version's Jamba starts its states afresh where it should go on from them."""
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
    own_code = {"use_mamba_kernels": False, "mamba_d_state": 8}
    config = transformers.AutoConfig.for_model("jamba", **COMMON, **layers, **own_code)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    try:
        target = TorchTarget(model)
    except NotImplementedError as error:
        assert "model_type 'jamba': expected a cache that goes on" in str(error)  # noqa: PT017
        return
    # A later version may have mended it: then its tokens are its own.
    ids = list(PROMPTS[1])
    with torch.inference_mode():
        for _ in range(8):
            logits = model(torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    out = generate(target, tiny_drafter(), PROMPTS[1], 8)
    assert out.token_ids == ids[len(PROMPTS[1]) :]


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="expected eval mode"):
        TorchTarget(altered(lambda m: m.train()))
    with pytest.raises(ValueError, match="expected a transformers model, found a Linear"):
        TorchTarget(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"expected one device, found cpu, meta"):
        TorchTarget(altered(lambda m: m.lm_head.to("meta")))
    with pytest.raises(ValueError, match=r"expected it on JAX's device \(cpu\), found meta"):
        TorchTarget(altered(lambda m: m.to("meta")))
    with pytest.raises(ValueError, match="hidden_size: the drafter expects 32"):
        generate(trained_in_torch(), tiny_drafter(), [1], 2)
    for name in ("torch:nowhere", f"torch:{DIRECTORY / 'config.json'}"):
        with pytest.raises((FileNotFoundError, ValueError), match="target: expected"):
            load_target(name)
