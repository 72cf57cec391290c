"""Targets from a Hugging Face directory: `config.json` beside safetensors, single or sharded."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from dflash_jax.config_json import layer_types, parse_rope
from dflash_jax.keys import LARGEST, Keys, decode_json, read_json
from dflash_jax.keys import table as nested_table
from dflash_jax.leaves import Entry, load_tree
from dflash_jax.targets.dense import DecoderConfig, DenseTarget, abstract
from dflash_jax.tensor_files import (
    COMPARED,
    TensorFiles,
    TensorSource,
    check_shapes,
    compute_dtype,
    listing,
    read_floats,
)

MODEL_TYPES = ("llama", "qwen3")

NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "input_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "post_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
"""The parts of a dense decoder and their tensors' names (`{}`: the layer)."""


def load_hf(
    directory: str | Path,
    dtype: Any = None,
    *,
    mesh: Mesh | None = None,
    progress: bool | None = None,
) -> DenseTarget:
    """Load a Qwen3 or Llama-class target, leaf by leaf, straight to where it runs.

    Args:
      directory: `config.json`, `model.safetensors` (or shards and their index); where present,
        `generation_config.json` adds stop tokens and `tokenizer.json` says which rows of a
        padded embedding are real tokens.
      dtype: of the loaded weights; default f32 on a CPU, bf16 elsewhere.
      mesh: what to split it over, see `sharding`. progress: of a bar, see `progress.Progress`.

    Raises FileNotFoundError or ValueError naming the missing, left-over or misshapen tensors or
    the key that is wrong, NotImplementedError for a model that this decoder is not.
    """
    files, config = open_hf(directory)
    return load_tree(
        abstract(config, compute_dtype(dtype)),
        table(config),
        partial(read_floats, files),
        mesh=mesh,
        source=files.directory,
        progress=progress,
    )


def open_hf(directory: str | Path) -> tuple[TensorFiles, DecoderConfig]:
    """What `load_hf` checks before it reads a tensor; raises as it does."""
    directory = Path(directory)
    raw = _required_json(directory / "config.json")
    files = TensorFiles(directory)
    stops, known = _generation_stops(directory), _known_tokens(directory)
    try:
        config = parse_config(raw, files, stops, known)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"{directory / 'config.json'}: {error}") from None
    names = table(config)
    check_shapes(files, names)
    _check_leftovers(files, names, config)
    return files, config


def table(config: DecoderConfig, names: Mapping[str, str] = NAMES) -> dict[str, Entry]:
    """Tensor name -> `Entry` for every tensor the config requires, under a format's `names`."""
    hidden, ff, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv, rows = config.q_size, config.kv_size, config.embedding_rows
    entries = {
        names["embedding"]: Entry((rows, hidden), "embedding"),
        names["norm"]: Entry((hidden,), "norm"),
    }
    if not config.tied:
        entries[names["head"]] = Entry((rows, hidden), "head")
    parts = {
        "input_norm": ((hidden,), "input_norm", 0),
        "q": ((q, hidden), "qkv", 0),
        "k": ((kv, hidden), "qkv", q),
        "v": ((kv, hidden), "qkv", q + kv),
        "o": ((hidden, q), "o", 0),
        "post_norm": ((hidden,), "post_norm", 0),
        "gate": ((ff, hidden), "gate_up", 0),
        "up": ((ff, hidden), "gate_up", ff),
        "down": ((hidden, ff), "down", 0),
    }
    if config.qk_norm:
        parts |= {"q_norm": ((dim,), "q_norm", 0), "k_norm": ((dim,), "k_norm", 0)}
    for i in range(config.num_hidden_layers):
        for part, (shape, leaf, start) in parts.items():
            entries[names[part].format(i)] = Entry(shape, f"layers.{i}.{leaf}", start)
    return entries


def parse_config(
    raw: Mapping[str, Any],
    files: TensorFiles,
    generation_stops: Sequence[int] = (),
    known_tokens: int | None = None,
) -> DecoderConfig:
    """A target's `config.json` as a `DecoderConfig`, under transformers' rules for absent keys.

    Args:
      raw: the decoded config.
      files: its tensors: the embedding's rows and whether there is a head are read there.
      generation_stops: stop tokens from elsewhere, united with the config's `eos_token_id`.
      known_tokens: ids the tokenizer knows, rows beyond them are padding; None without one.
    """
    keys = Keys(raw)
    model_type = keys.get("model_type")
    _refuse_unsupported(raw, keys, model_type)
    layers = layer_count(keys, "num_hidden_layers", files)
    hidden, heads = keys.positive_int("hidden_size"), keys.positive_int("num_attention_heads")
    kv_heads = keys.optional_int("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads: expected a multiple of num_key_value_heads {kv_heads}, "
            f"found {heads}"
        )
    vocab_size = keys.positive_int("vocab_size")
    rows = _embedding_rows(files, vocab_size)
    return DecoderConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_head_dim(keys, model_type, hidden, heads),
        intermediate_size=keys.positive_int("intermediate_size"),
        num_hidden_layers=layers,
        rms_norm_eps=keys.positive_float("rms_norm_eps"),
        rope=parse_rope(raw),
        vocab_size=min(vocab_size, known_tokens or vocab_size),
        embedding_rows=rows,
        max_position_embeddings=keys.positive_int("max_position_embeddings"),
        layer_window=_layer_window(keys, layers) if model_type == "qwen3" else (None,) * layers,
        qk_norm=model_type == "qwen3",
        tied=_tied(keys, files),
        stop_token_ids=tuple(dict.fromkeys([*_ids(raw, "eos_token_id"), *generation_stops])),
    )


def layer_count(keys: Keys, name: str, files: TensorSource) -> int:
    """The number of layers; ValueError where a file has fewer tensors than that."""
    layers, tensors = keys.positive_int(name), len(files.names())
    if layers > tensors:
        raise ValueError(
            f"{name}: expected at most the {tensors} tensors there are, found {layers}"
        )
    return layers


def _refuse_unsupported(raw: Mapping[str, Any], keys: Keys, model_type: Any) -> None:
    if model_type not in MODEL_TYPES:
        raise NotImplementedError(
            f"model_type: expected {' or '.join(map(repr, MODEL_TYPES))}, "
            f"found {model_type!r:.200} (transformers runs others: 'torch:' before the name)"
        )
    if keys.get("quantization_config"):
        method = nested_table(raw, "quantization_config").get("quant_method")
        raise NotImplementedError(
            f"quantization_config: expected bf16, f16 or f32 weights, found {method!r:.200}"
        )
    for name in ("attention_bias", "mlp_bias"):
        if keys.optional_bool(name):
            raise NotImplementedError(f"{name}: expected false (biases are not used), found true")
    if keys.optional_bool("is_neox_style") is False:
        raise NotImplementedError("is_neox_style: expected true (half-split), found false")
    act = keys.get("hidden_act", "silu")
    if act != "silu":
        raise NotImplementedError(f"hidden_act: expected 'silu', found {act!r:.200}")
    rope = nested_table(raw, "rope_parameters") or nested_table(raw, "rope_scaling")
    for rotary in (keys.get("partial_rotary_factor"), rope.get("partial_rotary_factor")):
        if rotary not in (None, 1.0):
            raise NotImplementedError(f"partial_rotary_factor: expected 1, found {rotary!r:.200}")


def _head_dim(keys: Keys, model_type: str, hidden: int, heads: int) -> int:
    dim = keys.optional_int("head_dim")
    if dim is None:
        if model_type != "llama":
            raise ValueError("head_dim: expected a positive integer, found nothing")
        if hidden % heads:
            raise ValueError(
                f"hidden_size: expected a multiple of num_attention_heads {heads} "
                f"(head_dim is absent), found {hidden}"
            )
        dim = hidden // heads
    if dim % 2:
        raise ValueError(f"head_dim: expected an even number (rotary pairs), found {dim}")
    return dim


def _layer_window(keys: Keys, layers: int) -> tuple[int | None, ...]:
    """Qwen3's windows: `layer_types` where given, else the layers from `max_window_layers` on."""
    use = keys.optional_bool("use_sliding_window")
    window = keys.positive_int("sliding_window") if use else None
    if keys.get("layer_types") is None:
        first = keys.get("max_window_layers", 28)  # transformers' default
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ValueError(
                f"max_window_layers: expected a number of layers, found {first!r:.200}"
            )
        return tuple(window if i >= first else None for i in range(layers))
    types = layer_types(keys, layers, NotImplementedError)
    if "sliding_attention" in types and window is None:
        raise ValueError(
            f"use_sliding_window: expected true (layer_types has sliding_attention), found {use}"
        )
    return tuple(window if t == "sliding_attention" else None for t in types)


def _embedding_rows(files: TensorFiles, vocab_size: int) -> int:
    name = NAMES["embedding"]
    if name not in files.names():
        return vocab_size  # check_shapes names it among all that is missing
    rows = next(iter(files.shape(name)), 0)
    if rows < vocab_size:
        raise ValueError(
            f"vocab_size: expected at most the {rows} rows of {name}, found {vocab_size}"
        )
    return rows


def _tied(keys: Keys, files: TensorFiles) -> bool:
    tied = bool(keys.optional_bool("tie_word_embeddings"))
    if not tied and NAMES["head"] not in files.names():
        raise ValueError(
            f"tie_word_embeddings: expected true where there is no {NAMES['head']}, found false"
        )
    return tied


def _check_leftovers(files: TensorFiles, names: Mapping[str, Entry], config: DecoderConfig) -> None:
    """Every tensor is used, or an error: an unknown one (a bias, a scale) changes the model."""
    left = {n for n in files.names() - set(names) if not n.endswith("rotary_emb.inv_freq")}
    if config.tied and NAMES["head"] in left:
        left.remove(NAMES["head"])
        if not _equal(files, NAMES["head"], NAMES["embedding"]):
            warnings.warn(
                f"{files.directory}: tie_word_embeddings is true, found a {NAMES['head']} that "
                "differs from the embedding; the embedding is used",
                stacklevel=4,
            )
    if left:
        raise ValueError(f"{files.directory}: unused tensors {listing(sorted(left))}")


def _equal(files: TensorFiles, one: str, other: str) -> bool:
    """Whether two tensors hold the same, compared a few rows at a time."""
    if files.shape(one) != files.shape(other):
        return False
    some = (slice(at, at + COMPARED) for at in range(0, files.shape(one)[0], COMPARED))
    return all(np.array_equal(files.read(one, rows), files.read(other, rows)) for rows in some)


def _generation_stops(directory: Path) -> list[int]:
    path = directory / "generation_config.json"
    if not path.is_file():
        return []
    try:
        return _ids(decode_json(path.read_text(encoding="utf-8")), "eos_token_id")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _ids(raw: Mapping[str, Any], name: str) -> list[int]:
    """Token ids given as one number, a list or null."""
    value = raw.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= LARGEST for i in ids):
        raise ValueError(f"{name}: expected a token id or a list of them, found {value!r:.200}")
    return ids


def _known_tokens(directory: Path) -> int | None:
    """One more than the largest id in `tokenizer.json`, added tokens included."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    raw = read_json(path)
    try:
        vocab = nested_table(raw, "model").get("vocab") or {}
    except ValueError as error:
        raise ValueError(f"{path}: not a tokenizer ({error})") from None
    added = raw.get("added_tokens") or []
    if not isinstance(vocab, dict | list) or not isinstance(added, list):
        raise ValueError(f"{path}: not a tokenizer (vocab and added_tokens are no tables)")
    ids: list[Any] = list(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
    ids += [token.get("id") if isinstance(token, dict) else None for token in added]
    odd = [i for i in ids if type(i) is not int or not 0 <= i <= LARGEST]
    if odd:
        raise ValueError(f"{path}: not a tokenizer (expected token ids, found {odd[0]!r:.200})")
    return max(ids, default=-1) + 1 or None


def _required_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"target: expected {path}, found nothing")
    return read_json(path)
