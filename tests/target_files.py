"""Target checkpoints for tests: changed copies of the recorded ones, GGUF files, tokenizers."""

import json
import shutil
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from dflash_jax.targets import gguf as gguf_target
from dflash_jax.targets import hf

HF_TARGETS = Path(__file__).parent / "data" / "hf_targets"
ABSENT = object()


def copy_target(name, directory, *, tensors=None, **changes):
    """A copy of a recorded checkpoint with config keys changed (ABSENT removes one).

    tensors: a function from the dict of tensors to the one to save.
    """
    directory = Path(directory)
    shutil.copytree(HF_TARGETS / name, directory, dirs_exist_ok=True)
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ABSENT}))
    if tensors is not None:
        weights = directory / "model.safetensors"
        save_file(tensors(load_file(weights)), weights)
    return directory


def run(target, ids, taps=()):
    """One pass over `ids [T]`: logits `[T, rows]` and taps `[T, taps * H]` as numpy arrays."""

    def forward(target, ids):
        output, _ = target.forward(target.init_state(1, ids.shape[1]), ids, taps)
        return target.logits(output.hidden), output.taps

    logits, tapped = jax.jit(forward)(target, jnp.asarray(ids)[None])
    return np.asarray(logits[0]), np.asarray(tapped[0])


def relative_error(found, expected):
    """Largest difference over the largest expected magnitude."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / np.abs(expected).max()


def interleaved_rows(weight, heads):
    """Rows of q or k as llama.cpp's converter writes them for architecture llama."""
    rows, width = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, width)
    return halves.swapaxes(1, 2).reshape(rows, width)


def write_gguf(path, directory, arch, *, quantize=None, metadata=None, extra=None, skip=()):
    """The GGUF twin of a recorded checkpoint, as llama.cpp's converter would write it.

    quantize: ggml type of the matrices, f32 by default. metadata: a function that adds keys to
    the writer. extra: further tensors.
    """
    config = json.loads((Path(directory) / "config.json").read_text())
    tensors = load_file(Path(directory) / "model.safetensors")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if metadata:
        metadata(writer)
    parts = {
        hf.NAMES[part].format(i): (part, gguf_target.NAMES[part].format(i))
        for part in hf.NAMES
        for i in range(layers)
    }
    for name, tensor in tensors.items():
        part, new_name = parts[name]
        tensor = tensor.astype(np.float32)
        if arch == "llama" and part in ("q", "k"):
            tensor = interleaved_rows(
                tensor, heads if part == "q" else config["num_key_value_heads"]
            )
        if new_name in skip:
            continue
        if quantize is not None and tensor.ndim == 2:
            writer.add_tensor(new_name, gguf.quantize(tensor, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(new_name, np.ascontiguousarray(tensor))
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_tokens():
    """The 256 characters that stand for bytes in a byte-level vocabulary, in order of byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def write_tokenizer(directory, tokens, added=()):
    """`tokenizer.json`: one id a byte character of `tokens`, then `added` special tokens."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    raw = {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": []},
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "added_tokens": [
            {
                "id": len(tokens) + i,
                "content": content,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for i, content in enumerate(added)
        ],
    }
    path = Path(directory) / "tokenizer.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    return path
