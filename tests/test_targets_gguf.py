"""Targets from GGUF files: the same pytree as the Hugging Face directory they were made from."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from target_files import HF_TARGETS, copy_target, interleaved_rows, relative_error, run, write_gguf

from dflash_jax import extras
from dflash_jax.config import RopeConfig
from dflash_jax.sharding import named_leaves
from dflash_jax.targets import gguf as gguf_target
from dflash_jax.targets.gguf import GGUFFile, half_split_rows, load_gguf
from dflash_jax.targets.hf import load_hf

PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.fixture
def llama(tmp_path):
    """A Llama directory with plain rotary frequencies."""
    return copy_target("llama3", tmp_path / "llama", **PLAIN)


@pytest.fixture
def qwen3(tmp_path):
    return copy_target("qwen3_yarn", tmp_path / "qwen3", **PLAIN)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_equals_the_directory_it_was_made_from(tmp_path, request, arch):
    directory = request.getfixturevalue(arch)
    found = load_gguf(write_gguf(tmp_path / "m.gguf", directory, arch))
    expected = load_hf(directory)
    jax.tree.map(np.testing.assert_array_equal, found.layers, expected.layers)
    for leaf in ("embedding", "norm", "head"):
        np.testing.assert_array_equal(getattr(found, leaf), getattr(expected, leaf))
    ids = np.arange(30, dtype=np.int32)
    np.testing.assert_array_equal(run(found, ids)[0], run(expected, ids)[0])


@pytest.mark.parametrize(
    ("name", "value", "stops"),
    [
        ("eot_token_id", 7, (1, 7)),
        ("eot_token_id", 2**32 - 1, (1,)),
        ("eot_token_id", [7], None),
        ("eom_token_id", 1.5, None),
        ("token_type", 5, None),
        ("tokens", "ab", None),
    ],
)
def test_ids_and_tables_of_the_tokenizer(tmp_path, llama, name, value, stops):
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", llama, "llama"))
    file.metadata |= {"tokenizer.ggml.eos_token_id": 1, f"tokenizer.ggml.{name}": value}
    if stops is None:
        with pytest.raises(ValueError, match=rf"tokenizer\.ggml\.{name}: expected a .*, found"):
            load_gguf(file)
    else:
        assert load_gguf(file).stop_token_ids == stops


def test_rotary_rows_go_back_and_forth():
    weight = np.arange(4 * 8 * 3, dtype=np.float32).reshape(32, 3)
    np.testing.assert_array_equal(half_split_rows(interleaved_rows(weight, 4), 8), weight)
    # Head 0, llama.cpp's first pair (rows 0 and 1) is half-split's (0, 4).
    order = half_split_rows(np.arange(8, dtype=np.float32)[:, None], 8)[:, 0]
    assert order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_only_llama_rows_are_reordered(tmp_path, qwen3):
    """A Qwen3 file keeps its rows: written in its own order, it must load unchanged."""
    target = load_gguf(write_gguf(tmp_path / "m.gguf", qwen3, "qwen3"), jnp.float32)
    q = load_file(qwen3 / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(target.layers[0].qkv[: q.shape[0]], q.astype(np.float32))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_stored_types_are_dequantised(tmp_path, llama, kind):
    kind = gguf.GGMLQuantizationType[kind]

    def wide(tensors):
        """Rows of whole blocks: pad the MLP's width, which is no multiple of 32."""
        grown = {}
        for name, tensor in tensors.items():
            if name.endswith("down_proj.weight"):
                tensor = np.pad(tensor, [(0, 0), (0, 16)])
            elif ".mlp." in name:
                tensor = np.pad(tensor, [(0, 16), (0, 0)])
            grown[name] = tensor
        return grown

    directory = copy_target("llama3", llama, tensors=wide, intermediate_size=64, **PLAIN)
    target = load_gguf(write_gguf(tmp_path / "m.gguf", directory, "llama", quantize=kind))
    down = load_file(directory / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    stored = gguf.quantize(down.astype(np.float32), kind)
    expected = gguf.dequantize(stored, kind)
    np.testing.assert_array_equal(target.layers[1].down, expected.astype(target.norm.dtype))


def test_tied_where_there_is_no_output_table(tmp_path, llama):
    path = write_gguf(tmp_path / "m.gguf", llama, "llama", skip=["output.weight"])
    target = load_gguf(path, jnp.float32)
    assert target.head is None and target.config.tied
    hidden = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    assert relative_error(target.logits(hidden), hidden @ np.asarray(target.embedding).T) < 1e-6


def test_geometry_and_stop_tokens(tmp_path, llama):
    def metadata(writer):
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(5)
        writer.add_eom_token_id(2)

    config = load_gguf(write_gguf(tmp_path / "m.gguf", llama, "llama", metadata=metadata)).config
    expected = load_hf(llama).config
    assert config.rms_norm_eps == pytest.approx(expected.rms_norm_eps, rel=1e-6)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert config.rope == RopeConfig(theta=1e4)
    assert config.max_position_embeddings == 512
    assert config.stop_token_ids == (2, 5)


def test_padding_rows_are_never_chosen(tmp_path, llama):
    def metadata(writer):
        names = [f"t{i}" for i in range(50)] + [f"[PAD{i}]" for i in range(50, 64)]
        writer.add_token_list(names)
        writer.add_token_types([1] * 50 + [5] * 14)

    target = load_gguf(write_gguf(tmp_path / "m.gguf", llama, "llama", metadata=metadata))
    assert (target.vocab_size, target.config.embedding_rows) == (50, 64)
    logits = run(target, np.arange(20, dtype=np.int32))[0]
    assert (logits[:, 50:] == np.finfo(np.float32).min).all()


class TestRope:
    def test_yarn(self, tmp_path):
        def metadata(writer):
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(16)

        directory = HF_TARGETS / "qwen3_yarn"
        target = load_gguf(
            write_gguf(tmp_path / "m.gguf", directory, "qwen3", metadata=metadata), jnp.float32
        )
        assert target.config.rope == load_hf(directory).config.rope
        reference = np.load(directory / "reference.npz")
        logits, _ = run(target, reference["ids"])
        # The file rounds rms_norm_eps to f32.
        assert relative_error(logits, reference["logits"]) < 1e-5

    def divisors(self, factor, original=8192, low=1.0, high=4.0, theta=1e4, dim=8):
        """What the converter writes, by the definition of Llama 3's scaling."""
        inv_freq = theta ** (-np.arange(0, dim, 2) / dim)
        smooth = np.clip((original * inv_freq / (2 * np.pi) - low) / (high - low), 0, 1)
        return (1 / (smooth + (1 - smooth) / factor)).astype(np.float32)

    def test_llama3_divisors(self, tmp_path, llama):
        extra = {"rope_freqs.weight": self.divisors(32.0, theta=5e7)}
        directory = copy_target(
            "llama3", llama, rope_parameters={"rope_type": "default", "rope_theta": 5e7}
        )
        target = load_gguf(write_gguf(tmp_path / "m.gguf", directory, "llama", extra=extra))
        assert target.config.rope == RopeConfig(
            theta=5e7,
            rope_type="llama3",
            factor=32.0,
            original_max_position_embeddings=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        )

    def test_other_divisors_are_refused(self, tmp_path, llama):
        extra = {"rope_freqs.weight": self.divisors(8.0, original=100)}
        path = write_gguf(tmp_path / "m.gguf", llama, "llama", extra=extra)
        with pytest.raises(NotImplementedError, match=r"rope_freqs\.weight"):
            load_gguf(path)

    def test_other_scalings_are_refused(self, tmp_path, llama):
        def metadata(writer):
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(2.0)

        path = write_gguf(tmp_path / "m.gguf", llama, "llama", metadata=metadata)
        with pytest.raises(NotImplementedError, match=r"llama\.rope\.scaling\.type.*'linear'"):
            load_gguf(path)


class TestRefusals:
    def test_architecture(self, tmp_path, qwen3):
        path = write_gguf(tmp_path / "m.gguf", qwen3, "gemma")
        with pytest.raises(NotImplementedError, match=r"'llama' or 'qwen3', found 'gemma'"):
            load_gguf(path)

    def test_experts(self, tmp_path, llama):
        path = write_gguf(
            tmp_path / "m.gguf", llama, "llama", metadata=lambda w: w.add_expert_count(8)
        )
        with pytest.raises(NotImplementedError, match=r"llama\.expert_count.*8"):
            load_gguf(path)

    def test_missing_tensor(self, tmp_path, llama):
        path = write_gguf(tmp_path / "m.gguf", llama, "llama", skip=["blk.1.ffn_up.weight"])
        with pytest.raises(ValueError, match=r"missing tensors blk\.1\.ffn_up\.weight"):
            load_gguf(path)

    def test_left_over_tensor(self, tmp_path, llama):
        extra = {"blk.0.attn_q.bias": np.zeros(32, np.float32)}
        path = write_gguf(tmp_path / "m.gguf", llama, "llama", extra=extra)
        with pytest.raises(ValueError, match=r"unused tensors blk\.0\.attn_q\.bias"):
            load_gguf(path)

    def test_no_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no\.gguf"):
            load_gguf(tmp_path / "no.gguf")

    def test_the_package_is_missing(self, tmp_path, llama, monkeypatch):
        path = write_gguf(tmp_path / "m.gguf", llama, "llama")

        def missing(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(extras.importlib, "import_module", missing)
        with pytest.raises(ModuleNotFoundError) as caught:
            load_gguf(path)
        assert str(caught.value) == 'gguf is not installed: pip install "dflash-jax[gguf]"'


class TestDamage:
    """A file that is cut short or overwritten is one clear line, wherever the damage is."""

    @pytest.fixture
    def content(self, tmp_path, llama):
        def metadata(writer):
            writer.add_token_list([f"t{i}" for i in range(64)])
            writer.add_token_types([1] * 64)

        return write_gguf(tmp_path / "m.gguf", llama, "llama", metadata=metadata).read_bytes()

    def refused(self, tmp_path, content):
        path = tmp_path / "damaged.gguf"
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not a readable GGUF file") as caught:
            GGUFFile(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: not a readable GGUF file (") and "\n" not in message
        return message

    def test_cut_anywhere(self, tmp_path, content):
        for size in (0, 3, 4, 20, 30, 100, 500, 1000, 2500, len(content) // 2, len(content) - 1):
            self.refused(tmp_path, content[:size])

    def test_another_format(self, tmp_path):
        assert "begin with 'GGUF'" in self.refused(tmp_path, b"PK\x03\x04" + bytes(100))

    def test_version(self, tmp_path, content):
        damaged = content[:4] + (9).to_bytes(4, "little") + content[8:]
        assert "version 2 or 3, found 9" in self.refused(tmp_path, damaged)

    def test_absurd_counts_end_at_once(self, tmp_path, content):
        for at in (8, 16, 24):  # tensors, keys, the length of the first key
            self.refused(tmp_path, content[:at] + b"\xff" * 8 + content[at + 8 :])

    def test_unknown_type(self, tmp_path, content):
        at = content.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
        damaged = content[:at] + (999).to_bytes(4, "little") + content[at + 4 :]
        assert "token_embd.weight: ggml type 999" in self.refused(tmp_path, damaged)


def test_the_header_equals_the_packages_reader(tmp_path, llama):
    def metadata(writer):
        writer.add_token_list(["a", "é", "日本"])
        writer.add_token_types([1, 3, 5])
        writer.add_bool("x.flag", True)
        writer.add_float32("x.float", 0.5)
        writer.add_int64("x.long", -5)

    path = write_gguf(tmp_path / "m.gguf", llama, "llama", metadata=metadata)
    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    fields = {n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    assert file.metadata == fields
    assert file.names() == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        np.testing.assert_array_equal(
            file.read(tensor.name), gguf.dequantize(tensor.data, tensor.tensor_type)
        )


def test_every_leaf_is_filled_from_the_file(tmp_path, qwen3):
    target = load_gguf(write_gguf(tmp_path / "m.gguf", qwen3, "qwen3"))
    assert {path for path, _ in named_leaves(target)} == {
        entry.leaf for entry in gguf_target.table(target.config, gguf_target.NAMES).values()
    }
