"""A drafter's `config.json`: what published ones say, checked and read, and how ours are written.

Published configs come in two styles: keys nested in `dflash_config` / `rope_parameters`, and
keys at top level. Nested wins; where both exist and differ, a warning names both values.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.config import DFlash2Config, DFlashConfig, DSparkConfig, Family, RopeConfig
from dflash_jax.keys import LARGEST, Keys, decode_json, names, read_json, table
from dflash_jax.quant import PRECISIONS, Precision

LAYER_TYPES = ("full_attention", "sliding_attention")
ARCHITECTURES: dict[Family, str] = {
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash2": "DFlash2DraftModel",
}


def dspark_strategy_census(config_text: str) -> bool:
    """Whether a `config.json` text declares the DSpark training strategy.

    True iff an `architectures` entry contains "DSpark" or `dflash_config.projector_type` is
    "dspark".

    >>> dspark_strategy_census('{"architectures": ["Qwen3DSparkModel"]}')
    True
    >>> dspark_strategy_census('{"dflash_config": {"attention_mode": "gqa"}}')
    False
    """
    try:
        return _declares_dspark(decode_json(config_text))
    except ValueError as error:
        raise ValueError(f"config: {error}") from None


def _declares_dspark(raw: Mapping[str, Any]) -> bool:
    nested = table(raw, "dflash_config")
    return any("DSpark" in name for name in names(raw, "architectures")) or (
        nested.get("projector_type") == "dspark"
    )


def read_config(
    directory: str | Path, token_to_id: Callable[[str], int | None] | None = None
) -> DFlashConfig:
    """Parse `config.json` of a drafter directory. Errors name the file and the key.

    `token_to_id` resolves a `mask_token` string where the config has no `mask_token_id`.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"drafter config: expected {path}, found nothing")
    raw = read_json(path)
    try:
        return parse_config(raw, token_to_id)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_config(
    raw: Mapping[str, Any], token_to_id: Callable[[str], int | None] | None = None
) -> DFlashConfig:
    """A drafter's `config.json` (already decoded) as a `DFlashConfig`.

    Every key is looked up in `dflash_config` first, then at top level. Refuses, by name and
    value, geometry that cannot work and settings that would be misread silently.
    """
    keys = Keys(raw, "dflash_config", "dspark_config")
    layers = keys.positive_int("num_hidden_layers")
    heads = keys.positive_int("num_attention_heads")
    kv_heads = keys.positive_int("num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads: expected a multiple of num_key_value_heads {kv_heads}, "
            f"found {heads}"
        )
    if keys.optional_bool("attention_bias"):
        raise ValueError("attention_bias: expected false (bias tensors are not used), found true")
    if keys.optional_bool("is_neox_style") is False:
        raise ValueError("is_neox_style: expected true (half-split rotary pairs), found false")
    act = keys.get("hidden_act", "silu")
    if act != "silu":
        raise ValueError(f"hidden_act: expected 'silu', found {act!r:.200}")
    family = _family(raw)
    causal, window = _layer_masks(keys, layers, family)
    block_size = keys.positive_int("block_size")
    if block_size < 2:
        raise ValueError(f"block_size: expected at least 2, found {block_size}")
    num_target_layers = keys.optional_int("num_target_layers")
    vocab_size = keys.optional_int("vocab_size")
    cap = keys.optional_float("final_logit_softcapping")
    return DFlashConfig(
        family=family,
        hidden_size=keys.positive_int("hidden_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_even(keys.positive_int("head_dim")),
        intermediate_size=keys.positive_int("intermediate_size"),
        num_hidden_layers=layers,
        rms_norm_eps=keys.positive_float("rms_norm_eps"),
        rope=parse_rope(raw),
        block_size=block_size,
        mask_token_id=_mask_token_id(keys, vocab_size, token_to_id),
        target_layer_ids=_target_layer_ids(keys, layers, num_target_layers),
        layer_causal=causal,
        layer_window=window,
        vocab_size=vocab_size,
        num_target_layers=num_target_layers,
        input_embedding_scale=keys.positive_float("input_embedding_scale", 1.0),
        output_multiplier=keys.positive_float("output_multiplier", 1.0),
        final_logit_softcapping=cap if cap is not None and cap > 0 else None,
        dspark=_dspark(keys) if family == "dspark" else None,
        dflash2=_dflash2(keys, window, block_size) if family == "dflash2" else None,
        precision=_precision(keys),
    )


def _precision(keys: Keys) -> Precision | None:
    value = keys.get("weight_precision")
    if value not in (None, *PRECISIONS):
        expected = ", ".join(PRECISIONS)
        raise ValueError(f"weight_precision: expected one of {expected}, found {value!r:.200}")
    return value


def config_dict(config: DFlashConfig) -> dict[str, Any]:
    """The inverse of `parse_config`: a `config.json` that public loaders read too."""
    sliding = [window is not None for window in config.layer_window]
    windows = [window for window in config.layer_window if window is not None]
    dflash = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    optional = {
        "input_embedding_scale": (config.input_embedding_scale, 1.0),
        "output_multiplier": (config.output_multiplier, 1.0),
        "final_logit_softcapping": (config.final_logit_softcapping, None),
        "weight_precision": (config.precision, None),
    }
    dflash |= {name: value for name, (value, default) in optional.items() if value != default}
    if config.dflash2 is not None:
        dflash |= dataclasses.asdict(config.dflash2)
    if config.dspark is not None:
        stated = {
            "projector_type": "dspark",
            "markov_head_type": config.dspark.markov_head_type,
            "markov_rank": config.dspark.markov_rank,
            "enable_confidence_head": config.dspark.confidence,
            "confidence_head_with_markov": config.dspark.confidence_with_markov,
        }
        dflash |= {name: value for name, value in stated.items() if value is not None}
    raw = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": config.block_size,
        "dflash_config": dflash,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": [LAYER_TYPES[s] for s in sliding],
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": _rope_dict(config.rope),
        "rope_theta": config.rope.theta,
        "sliding_window": windows[0] if windows else None,
        "tie_word_embeddings": False,
        "use_sliding_window": bool(windows),
        "vocab_size": config.vocab_size,
    }
    if len(set(config.layer_causal)) == 1:
        raw["is_causal"] = config.layer_causal[0]
    return raw


def as_saved(config: DFlashConfig) -> DFlashConfig:
    """The config as its `config.json` will be read back; ValueError where that is refused."""
    return parse_config(config_dict(config))


def _rope_dict(rope: RopeConfig) -> dict[str, Any]:
    fields = {k: v for k, v in dataclasses.asdict(rope).items() if v is not None}
    theta = fields.pop("theta")
    if rope.rope_type == "default":
        fields = {"rope_type": "default"}
    return {"rope_theta": theta} | fields


def parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Rope parameters of a drafter's or a target's config.

    Reads `rope_parameters`, the older `rope_scaling` (with `rope_type` or `type`) and a
    top-level `rope_theta`. Theta has no default; unknown types and YaRN or llama3 blocks
    without their required keys are refused.
    """
    nested = {**table(raw, "rope_scaling"), **table(raw, "rope_parameters")}
    # Per-layer-type rope tables describe models we do not build; never pick one silently.
    if any(isinstance(value, Mapping) for value in nested.values()):
        raise ValueError(
            f"rope_parameters: expected one table, found one per {sorted(nested)!s:.200}"
        )
    keys = Keys({"rope_theta": raw.get("rope_theta"), "rope_parameters": nested}, "rope_parameters")
    rope_type = nested.get("rope_type", nested.get("type", "default"))
    theta = keys.positive_float("rope_theta")
    if rope_type in ("default", None):
        return RopeConfig(theta=theta)
    if rope_type == "llama3":
        rope = RopeConfig(
            theta=theta,
            rope_type="llama3",
            factor=keys.positive_float("factor"),
            original_max_position_embeddings=keys.positive_int("original_max_position_embeddings"),
            low_freq_factor=keys.positive_float("low_freq_factor"),
            high_freq_factor=keys.positive_float("high_freq_factor"),
        )
        return rope
    if rope_type == "yarn":
        return RopeConfig(
            theta=theta,
            rope_type="yarn",
            factor=keys.positive_float("factor"),
            original_max_position_embeddings=keys.positive_int("original_max_position_embeddings"),
            beta_fast=keys.positive_float("beta_fast", 32.0),
            beta_slow=keys.positive_float("beta_slow", 1.0),
            attention_factor=keys.optional_float("attention_factor"),
            mscale=keys.optional_float("mscale"),
            mscale_all_dim=keys.optional_float("mscale_all_dim"),
            truncate=keys.optional_bool("truncate") is not False,
        )
    raise ValueError(f"rope_type: expected 'default', 'yarn' or 'llama3', found {rope_type!r:.200}")


def _dspark(keys: Keys) -> DSparkConfig:
    kind = keys.get("markov_head_type")
    if kind not in (None, "vanilla", "gated", "rnn"):
        raise ValueError(f"markov_head_type: expected vanilla, gated or rnn, found {kind!r:.200}")
    rank = keys.get("markov_rank")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0):
        raise ValueError(f"markov_rank: expected an integer >= 0, found {rank!r:.200}")
    confidence = keys.optional_bool("enable_confidence_head")
    with_markov = keys.optional_bool("confidence_head_with_markov")
    if rank == 0 and confidence and with_markov:
        raise ValueError(
            "confidence_head_with_markov: expected false where markov_rank is 0, found true"
        )
    return DSparkConfig(kind, rank, confidence, with_markov)


def _dflash2(keys: Keys, window: tuple[int | None, ...], block_size: int) -> DFlash2Config:
    narrow = [w for w in window if w is not None and w < block_size]
    if narrow:
        raise ValueError(
            f"block_size: expected at most the sliding_window {narrow[0]}, found {block_size}"
        )
    config = DFlash2Config(
        conv_kernel_size=keys.positive_int("conv_kernel_size"),
        conv_group_size=keys.positive_int("conv_group_size"),
        selector_rank=keys.positive_int("selector_rank"),
        selector_top_k=keys.positive_int("selector_top_k"),
    )
    hidden, vocabulary = keys.positive_int("hidden_size"), keys.positive_int("vocab_size")
    if hidden % config.conv_group_size:
        raise ValueError(
            f"conv_group_size: expected a divisor of hidden_size {hidden}, "
            f"found {config.conv_group_size}"
        )
    if config.selector_top_k > vocabulary:
        raise ValueError(
            f"selector_top_k: expected at most vocab_size {vocabulary}, "
            f"found {config.selector_top_k}"
        )
    return config


def _family(raw: Mapping[str, Any]) -> Family:
    if any("DFlash2DraftModel" in name for name in names(raw, "architectures")):
        return "dflash2"
    return "dspark" if _declares_dspark(raw) else "dflash"


def _even(head_dim: int) -> int:
    if head_dim % 2:
        raise ValueError(f"head_dim: expected an even number (rotary pairs), found {head_dim}")
    return head_dim


def layer_types(keys: Keys, layers: int, refusal: type[Exception] = ValueError) -> Sequence[str]:
    """The stated kind of every layer; ValueError for another list, `refusal` for unknown kinds."""
    types = keys.get("layer_types")
    if not isinstance(types, Sequence) or isinstance(types, str):
        raise ValueError(f"layer_types: expected a list of {layers} names, found {types!r:.200}")
    if len(types) != layers:
        raise ValueError(f"layer_types: expected {layers} (num_hidden_layers), found {len(types)}")
    unknown = sorted({str(t) for t in types} - set(LAYER_TYPES))
    if unknown:
        raise refusal(f"layer_types: expected {' or '.join(LAYER_TYPES)}, found {unknown!s:.200}")
    return types


def _layer_masks(
    keys: Keys, layers: int, family: Family
) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    types = layer_types(keys, layers)
    sliding = [t == "sliding_attention" for t in types]
    window = keys.optional_int("sliding_window")
    use = keys.optional_bool("use_sliding_window")
    if any(sliding):
        if window is None:
            raise ValueError("sliding_window: expected a window (layer_types slide), found null")
        if use is False:
            raise ValueError(
                "use_sliding_window: expected true (layer_types has sliding_attention), found false"
            )
        if use is None:
            warnings.warn(
                "use_sliding_window is absent; layer_types decide "
                f"({sum(sliding)} of {layers} layers slide)",
                stacklevel=4,
            )
    causal = keys.optional_bool("is_causal")
    if causal is None and family == "dflash2":
        warnings.warn(
            "is_causal is absent from a DFlash2 config (published ones say false); "
            "sliding layers are causal, full layers are not",
            stacklevel=4,
        )
    layer_causal = tuple(s if causal is None else causal for s in sliding)
    return layer_causal, tuple(window if s else None for s in sliding)


def _mask_token_id(
    keys: Keys, vocab_size: int | None, token_to_id: Callable[[str], int | None] | None
) -> int:
    mask, token = keys.get("mask_token_id"), keys.get("mask_token")
    if mask is None and token is not None:
        mask = token_to_id(token) if token_to_id and isinstance(token, str) else None
        if mask is None:
            raise ValueError(
                f"mask_token: expected a token of the target's vocabulary, found {token!r:.200}"
            )
    if mask is None:
        raise ValueError("mask_token_id: expected the id of the mask token, found nothing")
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask <= LARGEST:
        raise ValueError(f"mask_token_id: expected a token id, found {mask!r:.200}")
    if vocab_size is not None and mask >= vocab_size:
        raise ValueError(
            f"mask_token_id: expected an id below vocab_size {vocab_size}, found {mask}"
        )
    return mask


def _target_layer_ids(
    keys: Keys, draft_layers: int, num_target_layers: int | None
) -> tuple[int, ...]:
    ids = keys.get("target_layer_ids")
    if ids is None:
        if num_target_layers is None:
            raise ValueError(
                "target_layer_ids: expected a list (or num_target_layers to derive it), "
                "found neither"
            )
        n, k = num_target_layers, draft_layers
        if k == 1:
            ids = [n // 2]
        else:
            ids = [round(1 + i * (n - 4) / (k - 1)) for i in range(k)]
    valid = isinstance(ids, Sequence) and not isinstance(ids, str) and len(ids) > 0
    if not valid or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ValueError(f"target_layer_ids: expected a list of layer ids, found {ids!r:.200}")
    if len(set(ids)) != len(ids):
        raise ValueError(f"target_layer_ids: expected distinct ids, found {list(ids)!s:.200}")
    upper = f"..{num_target_layers - 1}" if num_target_layers is not None else " and up"
    ids = tuple(map(int, ids))
    bad = [i for i in ids if i < 0 or (num_target_layers is not None and i >= num_target_layers)]
    if bad:
        raise ValueError(
            f"target_layer_ids: expected ids in 0{upper} "
            f"(num_target_layers {num_target_layers}), found {bad!s:.200}"
        )
    return ids
