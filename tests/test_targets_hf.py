"""Targets from Hugging Face directories: numbers of transformers, refusals, rows, heads, stops."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from target_files import (
    ABSENT,
    HF_TARGETS,
    byte_tokens,
    copy_target,
    relative_error,
    run,
    write_tokenizer,
)

from dflash_jax.sharding import named_leaves
from dflash_jax.targets import hf
from dflash_jax.targets.dense import DenseLayer, DenseTarget
from dflash_jax.targets.hf import load_hf

RECORDED = ("qwen3_sliding", "qwen3_yarn", "llama3")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("name", RECORDED)
def test_logits_and_every_layer_equal_transformers(name):
    target = load_hf(HF_TARGETS / name, jnp.float32)
    reference = np.load(HF_TARGETS / name / "reference.npz")
    logits, taps = run(target, reference["ids"], taps=(0, 1, 2))
    assert relative_error(logits, reference["logits"]) < 1e-5
    for i, tap in enumerate(np.split(taps, 3, axis=-1)):
        # A tap is a layer's output: the entry after it, entry 0 being the embedding. The last
        # layer's is after the final norm on both sides.
        assert relative_error(tap, reference["hidden_states"][i + 1]) < 1e-5


@pytest.mark.parametrize("name", RECORDED)
def test_chunks_and_single_rows_equal_one_pass(name):
    target = load_hf(HF_TARGETS / name, jnp.float32)
    reference = np.load(HF_TARGETS / name / "reference.npz")
    forward = jax.jit(lambda target, state, ids: target.forward(state, ids, ()))
    state, hidden = target.init_state(1, 40), []
    for rows in np.split(reference["ids"], [19, 20, 39]):  # 19, 1, 19 and 1 rows
        output, state = forward(target, state, rows[None])
        state = target.commit(state, jnp.asarray([len(rows)]))
        hidden.append(output.hidden[0])
    logits = target.logits(jnp.concatenate(hidden))
    assert relative_error(logits, reference["logits"]) < 1e-5


def test_table_names_every_tensor_of_the_file():
    for name in RECORDED:
        target = load_hf(HF_TARGETS / name)
        names = set(load_file(HF_TARGETS / name / "model.safetensors"))
        assert set(hf.table(target.config)) == names


def test_sharded_checkpoint_is_the_single_one(tmp_path):
    copy_target("llama3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, tmp_path / file)
    weight_map = {n: file for file, part in shards.items() for n in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_same(load_hf(tmp_path), load_hf(HF_TARGETS / "llama3"))


def test_older_spellings_of_a_config(tmp_path):
    """Keys that older files lack or spell otherwise: head_dim, rope_scaling, rotary buffers."""
    config = json.loads((HF_TARGETS / "llama3" / "config.json").read_text())
    rope = dict(config["rope_parameters"])
    theta = rope.pop("rope_theta")
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, "f4") for i in (0, 1)}
    copy_target(
        "llama3",
        tmp_path,
        tensors=lambda tensors: tensors | buffers,
        head_dim=ABSENT,
        rope_parameters=ABSENT,
        rope_theta=theta,
        rope_scaling=rope,
        mlp_bias=ABSENT,
        tie_word_embeddings=ABSENT,
    )
    assert_same(load_hf(tmp_path), load_hf(HF_TARGETS / "llama3"))


def test_dtype():
    target = load_hf(HF_TARGETS / "llama3", jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(target)} == {jnp.dtype(jnp.bfloat16)}
    expected = jnp.bfloat16 if jax.default_backend() != "cpu" else jnp.float32
    assert load_hf(HF_TARGETS / "llama3").embedding.dtype == expected


@pytest.mark.parametrize(
    ("name", "changes", "error", "parts"),
    [
        ("llama3", {"model_type": "gpt2"}, NotImplementedError, ["'llama' or 'qwen3'", "'gpt2'"]),
        ("llama3", {"model_type": "gemma2"}, NotImplementedError, ["'gemma2' (transformers runs"]),
        ("llama3", {"attention_bias": True}, NotImplementedError, ["attention_bias"]),
        ("llama3", {"mlp_bias": True}, NotImplementedError, ["mlp_bias"]),
        ("llama3", {"is_neox_style": False}, NotImplementedError, ["is_neox_style", "false"]),
        ("llama3", {"hidden_act": "gelu"}, NotImplementedError, ["hidden_act", "silu", "gelu"]),
        (
            "llama3",
            {"quantization_config": {"quant_method": "fp8"}},
            NotImplementedError,
            ["quantization_config", "fp8"],
        ),
        (
            "llama3",
            {"partial_rotary_factor": 0.5},
            NotImplementedError,
            ["partial_rotary_factor", "0.5"],
        ),
        ("llama3", {"num_key_value_heads": 3}, ValueError, ["num_attention_heads", "3", "4"]),
        ("llama3", {"num_hidden_layers": 0}, ValueError, ["num_hidden_layers", "0"]),
        ("llama3", {"vocab_size": 65}, ValueError, ["vocab_size", "64", "65"]),
        ("llama3", {"rope_parameters": ABSENT}, ValueError, ["rope_theta"]),
        (
            "llama3",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
            ValueError,
            ["rope_type", "linear"],
        ),
        ("llama3", {"head_dim": ABSENT, "hidden_size": 30}, ValueError, ["hidden_size", "30"]),
        ("llama3", {"hidden_size": 16}, ValueError, [EMBEDDING, "[64, 16]", "[64, 32]"]),
        ("llama3", {"eos_token_id": "x"}, ValueError, ["eos_token_id", "'x'"]),
        ("llama3", {"eos_token_id": [1, 2**31]}, ValueError, ["eos_token_id", "2147483648"]),
        ("llama3", {"rope_parameters": [1]}, ValueError, ["rope_parameters", "object", "[1]"]),
        ("llama3", {"rope_parameters": "x"}, ValueError, ["rope_parameters", "object", "'x'"]),
        ("llama3", {"quantization_config": "fp8"}, ValueError, ["quantization_config", "'fp8'"]),
        ("llama3", {"tie_word_embeddings": "no"}, ValueError, ["tie_word_embeddings", "'no'"]),
        ("llama3", {"attention_bias": "false"}, ValueError, ["attention_bias", "'false'"]),
        ("llama3", {"max_position_embeddings": 10**30}, ValueError, ["max_position", "2**31"]),
        ("qwen3_yarn", {"layer_types": 5}, ValueError, ["layer_types", "list of 3", "5"]),
        ("qwen3_sliding", {"use_sliding_window": "x"}, ValueError, ["use_sliding_window", "'x'"]),
        (
            "qwen3_sliding",
            {"layer_types": None, "max_window_layers": "x"},
            ValueError,
            ["max_window_layers", "'x'"],
        ),
        ("qwen3_yarn", {"head_dim": ABSENT}, ValueError, ["head_dim"]),
        ("qwen3_yarn", {"layer_types": ["full_attention"]}, ValueError, ["layer_types", "3"]),
        (
            "qwen3_yarn",
            {"layer_types": ["linear_attention"] * 3},
            NotImplementedError,
            ["layer_types", "linear_attention"],
        ),
        (
            "qwen3_sliding",
            {"use_sliding_window": False},
            ValueError,
            ["use_sliding_window", "layer_types"],
        ),
        ("qwen3_sliding", {"sliding_window": None}, ValueError, ["sliding_window"]),
    ],
)
def test_refused_by_name(tmp_path, name, changes, error, parts):
    copy_target(name, tmp_path, **changes)
    with pytest.raises(error) as caught:
        load_hf(tmp_path)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": 5},
        {"model": [1]},
        {"model": {"vocab": 5}},
        {"model": {"vocab": {"a": "x"}}},
        {"model": {"vocab": {}}, "added_tokens": [1]},
        {"model": {"vocab": {}}, "added_tokens": [{"content": "x"}]},
    ],
)
def test_a_damaged_tokenizer_is_named(tmp_path, tokenizer):
    copy_target("llama3", tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer \("):
        load_hf(tmp_path)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.float64])
def test_weights_of_another_type_are_named(tmp_path, dtype):
    edit = lambda t: t | {"model.norm.weight": t["model.norm.weight"].astype(dtype)}  # noqa: E731
    copy_target("llama3", tmp_path, tensors=edit)
    with pytest.raises(ValueError, match=r"(scales |: )model\.norm\.weight"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda t: {n: v for n, v in t.items() if n != "model.norm.weight"}, "model.norm.weight"),
        (
            lambda t: t | {"model.layers.0.self_attn.q_proj.bias": np.ones(32, "f4")},
            "model.layers.0.self_attn.q_proj.bias",
        ),
        (lambda t: t | {"model.norm.weight": np.ones(31, "f4")}, "model.norm.weight"),
    ],
    ids=["missing", "left over", "misshapen"],
)
def test_tensors_missing_left_over_or_misshapen_are_named(tmp_path, edit, part):
    copy_target("llama3", tmp_path, tensors=edit)
    with pytest.raises(ValueError, match=part.replace(".", r"\.")):
        load_hf(tmp_path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_hf(tmp_path)
    copy_target("llama3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, 8, 8)),
        ({"layer_types": ABSENT}, (None, 8, 8)),
        ({"layer_types": ABSENT, "max_window_layers": 0}, (8, 8, 8)),
        ({"layer_types": ABSENT, "max_window_layers": ABSENT}, (None, None, None)),
        ({"layer_types": ABSENT, "use_sliding_window": False}, (None, None, None)),
        ({"layer_types": ABSENT, "use_sliding_window": ABSENT}, (None, None, None)),
    ],
)
def test_qwen3_windows(tmp_path, changes, windows):
    copy_target("qwen3_sliding", tmp_path, **changes)
    assert load_hf(tmp_path).config.layer_window == windows


def test_llama_has_no_window(tmp_path):
    copy_target("llama3", tmp_path, sliding_window=8, use_sliding_window=True)
    assert load_hf(tmp_path).config.layer_window == (None, None, None)


class TestHead:
    """Which table the logits come from (case 53)."""

    def test_tied(self):
        target = load_hf(HF_TARGETS / "qwen3_sliding", jnp.float32)
        assert target.head is None
        hidden = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
        assert relative_error(target.logits(hidden), hidden @ np.asarray(target.embedding).T) < 1e-6

    def test_flag_false_with_a_head(self):
        target = load_hf(HF_TARGETS / "llama3", jnp.float32)
        head = load_file(HF_TARGETS / "llama3" / "model.safetensors")[HEAD].astype(np.float32)
        np.testing.assert_array_equal(target.head, head)
        assert not np.array_equal(target.head, target.embedding)

    def test_flag_true_with_an_equal_head(self, tmp_path):
        copy_target("qwen3_sliding", tmp_path, tensors=lambda t: t | {HEAD: t[EMBEDDING]})
        assert load_hf(tmp_path).head is None

    def test_flag_true_with_another_head_warns_and_ties(self, tmp_path):
        copy_target("llama3", tmp_path, tie_word_embeddings=True)
        with pytest.warns(UserWarning, match=r"lm_head\.weight that differs"):
            assert load_hf(tmp_path).head is None

    def test_flag_false_without_a_head(self, tmp_path):
        copy_target("qwen3_sliding", tmp_path, tie_word_embeddings=False)
        with pytest.raises(ValueError, match=r"tie_word_embeddings.*lm_head\.weight"):
            load_hf(tmp_path)


class TestPadding:
    """Rows of the tables that are no tokens are never chosen, whatever the logits say."""

    def largest(self, target):
        ids = np.arange(20, dtype=np.int32)
        return run(target, ids)[0]

    def test_rows_beyond_vocab_size(self, tmp_path):
        copy_target("llama3", tmp_path, vocab_size=50)
        target = load_hf(tmp_path, jnp.float32)
        assert (target.vocab_size, target.config.embedding_rows) == (50, 64)
        logits = self.largest(target)
        assert (logits[:, 50:] == np.finfo(np.float32).min).all()
        full = self.largest(load_hf(HF_TARGETS / "llama3", jnp.float32))
        np.testing.assert_array_equal(logits[:, :50], full[:, :50])
        assert (full.argmax(-1) >= 50).any(), "the padding rows would have been chosen"

    def test_rows_the_tokenizer_does_not_know(self, tmp_path):
        copy_target("llama3", tmp_path)
        write_tokenizer(tmp_path, byte_tokens()[:40], added=["<a>", "<b>"])
        target = load_hf(tmp_path, jnp.float32)
        assert (target.vocab_size, target.config.embedding_rows) == (42, 64)
        assert (self.largest(target)[:, 42:] == np.finfo(np.float32).min).all()

    def test_a_tokenizer_larger_than_the_vocabulary(self, tmp_path):
        copy_target("llama3", tmp_path)
        write_tokenizer(tmp_path, byte_tokens())
        assert load_hf(tmp_path).vocab_size == 64


def test_stop_tokens_unite_both_configs(tmp_path):
    copy_target("llama3", tmp_path)
    assert load_hf(tmp_path).stop_token_ids == (2, 5)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert load_hf(tmp_path).stop_token_ids == (2, 5, 9)
    generation.write_text(json.dumps({"eos_token_id": 7}))
    copy_target("qwen3_yarn", tmp_path / "q", eos_token_id=None)
    (tmp_path / "q" / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load_hf(tmp_path / "q").stop_token_ids == (7,)


class TestTaps:
    """Tap id L is the output of layer L (case 30); ids out of range or twice are refused (32)."""

    def counting(self):
        """Three layers, of which layer i adds i + 1 to entry 1 of the stream, which starts at 0.

        Entry 0 is 1 all the way; every row's value is read from it, so attention averages equals.
        """
        config = load_hf(HF_TARGETS / "llama3", jnp.float32).config
        config = dataclasses.replace(config, rms_norm_eps=1e-12)
        hidden, zeros = config.hidden_size, jnp.zeros

        def layer(i):
            normed = np.sqrt(hidden / (1 + (i * (i + 1) / 2) ** 2))  # of (1, i (i + 1) / 2, 0, ...)
            first_value = config.q_size + config.kv_size
            return DenseLayer(
                input_norm=jnp.ones(hidden),
                qkv=zeros((config.q_size + 2 * config.kv_size, hidden)).at[first_value, 0].set(1),
                q_norm=None,
                k_norm=None,
                o=zeros((hidden, config.q_size)).at[1, 0].set((i + 1) / normed),
                post_norm=jnp.ones(hidden),
                gate_up=zeros((2 * config.intermediate_size, hidden)),
                down=zeros((hidden, config.intermediate_size)),
            )

        table = zeros((config.embedding_rows, hidden))
        return DenseTarget(
            embedding=table.at[:, 0].set(1),
            layers=[layer(i) for i in range(3)],
            norm=jnp.ones(hidden),
            head=table,
            config=config,
        )

    def test_a_tap_is_the_output_of_its_layer(self):
        taps = run(self.counting(), [3, 4], taps=(0, 1))[1].reshape(2, 2, 32)
        np.testing.assert_allclose(taps[..., 1], [[1, 3], [1, 3]], rtol=1e-5)

    def test_the_last_tap_is_after_the_final_norm(self):
        taps = run(self.counting(), [3, 4], taps=(2,))[1]
        expected = 6 / np.sqrt((1 + 36) / 32)
        np.testing.assert_allclose(taps[:, 1], expected, rtol=1e-5)

    def test_taps_come_in_the_given_order(self):
        taps = run(self.counting(), [3], taps=(1, 0))[1].reshape(2, 32)
        np.testing.assert_allclose(taps[:, 1], [3, 1], rtol=1e-5)

    @pytest.mark.parametrize("taps", [(3,), (-1,), (0, 1, 0)])
    def test_refused(self, taps):
        target = load_hf(HF_TARGETS / "llama3")
        with pytest.raises(ValueError, match=r"taps: .*0\.\.2 \(3 layers\)"):
            target.forward(target.init_state(1, 4), jnp.zeros((1, 2), jnp.int32), taps)


def test_every_tensor_matters():
    """Zeroing any leaf changes the logits: nothing that is loaded goes unused (case 32)."""
    target = load_hf(HF_TARGETS / "qwen3_yarn", jnp.float32)
    ids = np.load(HF_TARGETS / "qwen3_yarn" / "reference.npz")["ids"][:12]
    leaves, structure = jax.tree.flatten(target)
    logits = jax.jit(lambda t: t.logits(t.forward(t.init_state(1, 12), ids[None], ())[0].hidden))
    full = logits(target)
    for i, (path, _) in enumerate(named_leaves(target)):
        changed = [jnp.zeros_like(leaf) if j == i else leaf for j, leaf in enumerate(leaves)]
        assert not np.array_equal(full, logits(jax.tree.unflatten(structure, changed))), path


def assert_same(found, expected):
    assert found.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, found, expected)
