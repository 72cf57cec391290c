"""Targets from a GGUF file, the one-file format of llama.cpp, quantised or not."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from dflash_jax.config import RopeConfig
from dflash_jax.gguf_file import GGUFFile
from dflash_jax.keys import Keys, token_id
from dflash_jax.layers import rope_frequencies
from dflash_jax.leaves import load_tree
from dflash_jax.targets.dense import DecoderConfig, DenseTarget, abstract
from dflash_jax.targets.hf import layer_count, table
from dflash_jax.tensor_files import check_shapes, compute_dtype, listing, read_floats

ARCHITECTURES = ("llama", "qwen3")

NAMES = {
    "embedding": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "input_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "o": "blk.{}.attn_output.weight",
    "post_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
}
"""The parts of a dense decoder and their tensors' names (`{}`: the layer)."""

ROPE_FACTORS = "rope_freqs.weight"
UNUSED = 5
"""`tokenizer.ggml.token_type` of a padding row."""


def load_gguf(
    source: str | Path | GGUFFile,
    dtype: Any = None,
    *,
    mesh: Mesh | None = None,
    progress: bool | None = None,
) -> DenseTarget:
    """Load a target of architecture llama or qwen3 from a GGUF file.

    Rows of q and k that the converter reordered for llama.cpp's interleaved rotary embedding
    (architecture llama) are put back in half-split order.

    Args:
      source: a path, or a file already opened.
      dtype: of the loaded weights; default f32 on a CPU, bf16 elsewhere.
      mesh: what to split it over, see `sharding`. progress: of a bar, see `progress.Progress`.

    Raises what `GGUFFile` does, ValueError naming missing, left-over or misshapen tensors and
    NotImplementedError for an architecture or a setting that this decoder does not have.
    """
    file, config = open_gguf(source)
    permuted = file.metadata["general.architecture"] == "llama"

    def transform(name: str, tensor: np.ndarray) -> np.ndarray:
        if permuted and name.endswith((".attn_q.weight", ".attn_k.weight")):
            return half_split_rows(tensor, config.head_dim)
        return tensor

    return load_tree(
        abstract(config, compute_dtype(dtype)),
        table(config, NAMES),
        partial(read_floats, file),
        transform=transform,
        mesh=mesh,
        source=file.directory,
        progress=progress,
    )


def open_gguf(source: str | Path | GGUFFile) -> tuple[GGUFFile, DecoderConfig]:
    """What `load_gguf` checks before it reads a tensor; raises as it does."""
    file = source if isinstance(source, GGUFFile) else GGUFFile(source)
    try:
        config = parse_config(file)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"{file.directory}: {error}") from None
    names = table(config, NAMES)
    check_shapes(file, names)
    left = sorted(file.names() - set(names) - {ROPE_FACTORS})
    if left:
        raise ValueError(f"{file.directory}: unused tensors {listing(left)}")
    return file, config


def half_split_rows(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Undo the converter's row order: pairs (2i, 2i + 1) of a head become (i, i + D/2)."""
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def parse_config(file: GGUFFile) -> DecoderConfig:
    """The metadata as a `DecoderConfig`; errors name the key."""
    metadata = file.metadata
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        supported = " or ".join(map(repr, ARCHITECTURES))
        raise NotImplementedError(
            f"general.architecture: expected {supported}, found {arch!r:.200}"
        )
    # A few settings may be given layer by layer; only one value for all of them is run here.
    keys = Keys({name: _uniform(name, value) for name, value in metadata.items()})

    def positive(name: str) -> int:
        return keys.positive_int(f"{arch}.{name}")

    hidden, heads = positive("embedding_length"), positive("attention.head_count")
    kv_heads = keys.optional_int(f"{arch}.attention.head_count_kv") or heads
    if heads % kv_heads:
        raise ValueError(
            f"{arch}.attention.head_count: expected a multiple of head_count_kv {kv_heads}, "
            f"found {heads}"
        )
    dim = keys.optional_int(f"{arch}.attention.key_length") or hidden // heads
    _refuse_unsupported(keys, arch, dim)
    layers = layer_count(keys, f"{arch}.block_count", file)
    rows = file.shape(NAMES["embedding"])[0] if NAMES["embedding"] in file.names() else 0
    return DecoderConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        intermediate_size=positive("feed_forward_length"),
        num_hidden_layers=layers,
        rms_norm_eps=keys.positive_float(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope=_rope(file, keys, arch, dim),
        vocab_size=min(rows, _known_tokens(metadata) or rows),
        embedding_rows=rows,
        max_position_embeddings=positive("context_length"),
        layer_window=(None,) * layers,
        qk_norm=arch == "qwen3",
        tied=NAMES["head"] not in file.names(),
        stop_token_ids=_stop_ids(metadata),
    )


def _refuse_unsupported(keys: Keys, arch: str, head_dim: int) -> None:
    for name in ("expert_count", "attention.sliding_window", "attention.scale", "logit_scale"):
        value = keys.get(f"{arch}.{name}")
        if value:
            raise NotImplementedError(f"{arch}.{name}: expected none, found {value!r:.200}")
    for name in ("attention.value_length", "rope.dimension_count"):
        value = keys.get(f"{arch}.{name}", head_dim)
        if value != head_dim:
            raise NotImplementedError(
                f"{arch}.{name}: expected the head size {head_dim}, found {value!r:.200}"
            )


def _uniform(name: str, value: Any) -> Any:
    if not isinstance(value, list) or name.startswith(("tokenizer.", "general.")):
        return value
    if len(set(value)) != 1:
        raise NotImplementedError(
            f"{name}: expected one value for all layers, found {value!s:.200}"
        )
    return value[0]


def _rope(file: GGUFFile, keys: Keys, arch: str, head_dim: int) -> RopeConfig:
    theta = keys.positive_float(f"{arch}.rope.freq_base")
    scaling = f"{arch}.rope.scaling."
    kind = keys.get(scaling + "type", "none")
    if kind not in ("none", "yarn"):
        raise NotImplementedError(f"{scaling}type: expected 'none' or 'yarn', found {kind!r:.200}")
    if kind == "none":
        plain = RopeConfig(theta=theta)
        return _llama3_rope(file, plain, head_dim) if ROPE_FACTORS in file.names() else plain
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if keys.get(scaling + name, 1.0) != 1.0:
            found = keys.get(scaling + name)
            raise NotImplementedError(f"{scaling}{name}: expected 1, found {found}")
    return RopeConfig(
        theta=theta,
        rope_type="yarn",
        factor=keys.positive_float(scaling + "factor"),
        original_max_position_embeddings=keys.positive_int(scaling + "original_context_length"),
        beta_fast=keys.positive_float(scaling + "yarn_beta_fast", 32.0),
        beta_slow=keys.positive_float(scaling + "yarn_beta_slow", 1.0),
    )


def _llama3_rope(file: GGUFFile, plain: RopeConfig, head_dim: int) -> RopeConfig:
    """Llama 3's scaling, which a GGUF holds as divisors of the frequencies, one a pair.

    The published models share all but the factor; that is the largest divisor.
    """
    divisors = file.read(ROPE_FACTORS)
    rope = RopeConfig(
        theta=plain.theta,
        rope_type="llama3",
        factor=float(divisors.max()),
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    expected = rope_frequencies(plain, head_dim)[0] / rope_frequencies(rope, head_dim)[0]
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise NotImplementedError(
            f"{ROPE_FACTORS}: expected Llama 3's divisors (8192 positions, frequency factors "
            f"1 and 4) for {head_dim // 2} pairs, found others"
        )
    return rope


def _known_tokens(metadata: dict[str, Any]) -> int | None:
    """Tokens up to the last that is not padding (the converter pads the vocabulary at its end)."""
    types, tokens = (metadata.get(f"tokenizer.ggml.{name}") for name in ("token_type", "tokens"))
    for name, value in (("token_type", types), ("tokens", tokens)):
        if value is not None and not isinstance(value, list):
            raise ValueError(f"tokenizer.ggml.{name}: expected a list, found {value!r:.60}")
    if types is None:
        return len(tokens) if tokens else None
    return max((i + 1 for i, kind in enumerate(types) if kind != UNUSED), default=0) or None


def _stop_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """End of sequence, of turn and of message, each where the file names one."""
    ids = (token_id(metadata, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(i for i in ids if i is not None))
