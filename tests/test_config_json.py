"""Reading a drafter's config.json: what is understood, what is refused, by name and value."""

import json
import math

import pytest

from dflash_jax.config import (
    DFlashConfig,
    RopeConfig,
)
from dflash_jax.config_json import (
    config_dict,
    dspark_strategy_census,
    parse_config,
    parse_rope,
    read_config,
)

OLD_STYLE = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 127, "target_layer_ids": [1, 3, 5]},
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "layer_types": ["full_attention", "full_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_target_layers": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "vocab_size": 128,
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 12,
    "use_sliding_window": True,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
}
ABSENT = object()


def raw(**changes):
    """The old-style config with keys changed, ABSENT ones removed."""
    return {k: v for k, v in (OLD_STYLE | changes).items() if v is not ABSENT}


def parsed(**changes) -> DFlashConfig:
    return parse_config(raw(**changes))


def dflash(**changes):
    """`dflash_config` of the old-style config with keys changed, ABSENT ones removed."""
    inner = OLD_STYLE["dflash_config"] | changes
    return {"dflash_config": {k: v for k, v in inner.items() if v is not ABSENT}}


def test_old_style_config():
    config = parsed()
    assert config.family == "dflash"
    assert (config.hidden_size, config.head_dim, config.q_size, config.kv_size) == (64, 16, 64, 32)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (
        16,
        127,
        (1, 3, 5),
    )
    assert config.tap_size == 3 * 64
    assert config.rope == RopeConfig(1e6)
    assert config.layer_causal == (False,) * 3
    assert config.layer_window == (None,) * 3
    assert (config.input_embedding_scale, config.output_multiplier) == (1.0, 1.0)
    assert config.final_logit_softcapping is None


def test_nested_keys_alone_suffice():
    config = parsed(
        block_size=ABSENT,
        rope_theta=ABSENT,
        rope_scaling=ABSENT,
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
        **dflash(block_size=16),
    )
    assert config.rope.theta == 5e5
    assert config.block_size == 16


def test_nested_block_size_wins_over_top_level_with_a_warning():
    with pytest.warns(UserWarning, match=r"block_size: dflash_config says 8, top level says 16"):
        assert parsed(**dflash(block_size=8)).block_size == 8


def test_nested_theta_wins_over_top_level_with_a_warning():
    with pytest.warns(UserWarning, match=r"rope_theta: .* says 500000\.0.*top level says 1000000"):
        assert parsed(rope_parameters={"rope_theta": 5e5}).rope.theta == 5e5


def test_equal_values_in_both_places_do_not_warn():
    assert parsed(**dflash(block_size=16)).block_size == 16


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "num_hidden_layers",
        "rms_norm_eps",
        "rope_theta",
        "block_size",
        "layer_types",
    ],
)
def test_required_keys_have_no_default(key):
    with pytest.raises(ValueError, match=f"^{key}: expected .* found (nothing|None)"):
        parsed(**{key: ABSENT})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size: expected a positive integer, found 0"),
        ({"intermediate_size": -4}, "intermediate_size: expected a positive integer, found -4"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers: expected a positive integer, found 2.5"),
        ({"block_size": True}, "block_size: expected a positive integer, found True"),
        ({"block_size": 1}, "block_size: expected at least 2, found 1"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps: expected a finite number, found nan"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a positive finite number, found 0"),
        ({"rope_theta": math.inf}, "rope_theta: expected a finite number, found inf"),
        ({"rms_norm_eps": 1e-50}, "rms_norm_eps: expected a positive finite number, found 1e-50"),
        ({"rope_theta": -1.0}, "rope_theta: expected a positive finite number, found -1.0"),
        ({"head_dim": 15}, "head_dim: expected an even number"),
        ({"num_attention_heads": 5}, "num_attention_heads: expected a multiple of .* 2, found 5"),
        ({"attention_bias": True}, "attention_bias: expected false"),
        ({"is_neox_style": False}, "is_neox_style: expected true .*, found false"),
        (dflash(is_neox_style="no"), "is_neox_style: expected true or false, found 'no'"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', found 'gelu'"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected 3 .*, found 1"),
        ({"layer_types": "full_attention"}, "layer_types: expected a list of 3 names"),
        ({"layer_types": ["full_attention", "linear", "linear"]}, r"layer_types: .*\['linear'\]"),
        ({"is_causal": "no"}, "is_causal: expected true or false, found 'no'"),
        (SLIDING | {"sliding_window": None}, "sliding_window: expected a window"),
        (SLIDING | {"sliding_window": 0}, "sliding_window: expected a positive integer, found 0"),
        (SLIDING | {"use_sliding_window": False}, "use_sliding_window: .*layer_types.*found false"),
        ({"dflash_config": [1]}, r"dflash_config: expected an object, found \[1\]"),
        ({"dflash_config": []}, r"dflash_config: expected an object, found \[\]"),
        ({"architectures": 5}, "architectures: expected a list of names, found 5"),
        (
            {"architectures": "Qwen3DSparkModel"},
            "architectures: expected a list of names, found 'Q",
        ),
        ({"architectures": [None]}, r"architectures: expected a list of names, found \[None\]"),
        ({"rope_scaling": 5}, "rope_scaling: expected an object, found 5"),
        ({"rope_parameters": [None]}, r"rope_parameters: expected an object, found \[None\]"),
        (
            {"rope_parameters": YARN | {"truncate": 0}, "rope_theta": 1e4},
            "truncate: expected true or false, found",
        ),
        ({"attention_bias": "false"}, "attention_bias: expected true or false, found 'false'"),
        (SLIDING | {"use_sliding_window": "false"}, "use_sliding_window: expected true or false"),
        (SLIDING | {"sliding_window": 2**31}, r"sliding_window: expected an integer below 2\*\*31"),
        ({"block_size": 10**30}, r"block_size: expected an integer below 2\*\*31, found 1000"),
        (dflash(target_layer_ids=[]), r"target_layer_ids: expected a list of layer ids"),
        (dflash(target_layer_ids=[1, 1]), r"target_layer_ids: expected distinct ids"),
        (dflash(target_layer_ids=[1, 8]), r"target_layer_ids: .*0\.\.7.*8.*found \[8\]"),
        (dflash(target_layer_ids=[-1, 2]), r"target_layer_ids: .*found \[-1\]"),
        (dflash(target_layer_ids=[1.5]), r"target_layer_ids: expected a list of layer ids"),
        (
            dflash(mask_token_id=128),
            "mask_token_id: expected an id below vocab_size 128, found 128",
        ),
        (dflash(mask_token_id=-1), "mask_token_id: expected a token id, found -1"),
        (dflash(mask_token_id=ABSENT), "mask_token_id: expected the id .* found nothing"),
        (dflash(output_multiplier=math.inf), "output_multiplier: expected a finite number"),
        (dflash(input_embedding_scale=0.0), "input_embedding_scale: expected a positive"),
    ],
)
def test_refused_by_name_and_value(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        parsed(**changes)
    assert "\n" not in str(error.value)


def test_no_id_of_another_token_stands_in_for_the_mask():
    with pytest.raises(ValueError, match=r"mask_token_id"):
        parsed(eos_token_id=126, pad_token_id=0, **dflash(mask_token_id=ABSENT))


def test_mask_id_at_top_level_nested_or_as_a_token_is_the_same():
    top = parsed(mask_token_id=127, **dflash(mask_token_id=ABSENT))
    token = parse_config(
        raw(**dflash(mask_token_id=ABSENT, mask_token="<mask>")), {"<mask>": 127}.get
    )
    assert parsed() == top == token


def test_mask_token_unknown_to_the_target_is_refused():
    with pytest.raises(ValueError, match=r"mask_token: .* found '<mask>'"):
        parse_config(raw(**dflash(mask_token_id=ABSENT, mask_token="<mask>")), {}.get)
    with pytest.raises(ValueError, match=r"mask_token: .* found '<mask>'"):
        parsed(**dflash(mask_token_id=ABSENT, mask_token="<mask>"))


@pytest.mark.parametrize(
    ("layers", "target_layers", "ids"),
    [
        (1, 36, (18,)),
        (1, 9, (4,)),
        (2, 36, (1, 33)),
        (5, 36, (1, 9, 17, 25, 33)),
        (3, 9, (1, 4, 6)),  # 1 + 2.5 = 3.5 rounds to the even 4
        (3, 11, (1, 4, 8)),  # 1 + 3.5 = 4.5 rounds to the even 4
        (5, 28, (1, 7, 13, 19, 25)),
    ],
)
def test_absent_taps_are_spread_over_the_target(layers, target_layers, ids):
    config = parsed(
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        num_target_layers=target_layers,
        **dflash(target_layer_ids=ABSENT),
    )
    assert config.target_layer_ids == ids


def test_absent_taps_and_target_layers_are_refused():
    with pytest.raises(ValueError, match=r"target_layer_ids: .*num_target_layers.*found neither"):
        parsed(num_target_layers=ABSENT, **dflash(target_layer_ids=ABSENT))


@pytest.mark.parametrize(
    ("is_causal", "causal"),
    [(None, (True, False, True)), (False, (False,) * 3), (True, (True,) * 3)],
)
def test_causality_is_explicit_or_follows_the_layer_type(is_causal, causal):
    config = parsed(**SLIDING, **({} if is_causal is None else {"is_causal": is_causal}))
    assert config.layer_causal == causal
    assert config.layer_window == (12, None, 12)


def test_absent_use_sliding_window_lets_layer_types_decide_with_a_warning():
    without = {k: v for k, v in SLIDING.items() if k != "use_sliding_window"}
    with pytest.warns(UserWarning, match=r"use_sliding_window is absent"):
        assert parsed(**without).layer_window == (12, None, 12)


def test_a_window_without_sliding_layers_does_nothing():
    assert parsed(sliding_window=12, use_sliding_window=False).layer_window == (None,) * 3


def test_draft_logit_scaling_is_read():
    config = parsed(**dflash(output_multiplier=0.5, final_logit_softcapping=20.0))
    assert (config.output_multiplier, config.final_logit_softcapping) == (0.5, 20.0)


@pytest.mark.parametrize("cap", [None, 0, -1.0])
def test_soft_cap_absent_or_not_positive_is_off(cap):
    assert parsed(**dflash(final_logit_softcapping=cap)).final_logit_softcapping is None


# --- rope --------------------------------------------------------------------------------------


def test_rope_is_the_drafters_own():
    assert parsed(rope_theta=10000).rope.theta == 10000.0


def test_null_scaling_is_plain_rope():
    assert parse_rope({"rope_theta": 10000.0, "rope_scaling": None}) == RopeConfig(10000.0)


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_both_spellings_of_yarn_are_the_same(type_key):
    new = parse_rope({"rope_parameters": YARN})
    scaling = {k: v for k, v in YARN.items() if k not in ("rope_type", "rope_theta")}
    old = parse_rope({"rope_theta": 10000.0, "rope_scaling": scaling | {type_key: "yarn"}})
    assert old == new
    assert new == RopeConfig(10000.0, "yarn", 4.0, 4096, beta_fast=32.0, beta_slow=1.0)


@pytest.mark.parametrize("missing", ["factor", "original_max_position_embeddings", "rope_theta"])
def test_yarn_needs_its_keys(missing):
    with pytest.raises(ValueError, match=f"^{missing}: expected .* found nothing"):
        parse_rope({"rope_parameters": {k: v for k, v in YARN.items() if k != missing}})


def test_llama3_rope_needs_its_keys():
    table = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = parse_rope({"rope_parameters": table})
    assert (rope.rope_type, rope.low_freq_factor, rope.high_freq_factor) == ("llama3", 1.0, 4.0)
    del table["high_freq_factor"]
    with pytest.raises(ValueError, match=r"high_freq_factor: expected .* found nothing"):
        parse_rope({"rope_parameters": table})


def test_unknown_rope_type_is_refused():
    with pytest.raises(ValueError, match=r"rope_type: expected .*, found 'ntk'"):
        parsed(rope_parameters={"rope_theta": 1e6, "rope_type": "ntk"})


def test_a_rope_table_per_layer_type_is_refused():
    tables = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ValueError, match=r"rope_parameters: expected one table"):
        parse_rope({"rope_parameters": tables})


# --- family and harvest ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fragment", "dspark"),
    [
        (
            {
                "architectures": ["Qwen3DSparkModel"],
                "dflash_config": {"projector_type": "dspark"},
            },
            True,
        ),
        ({"architectures": ["Qwen3DSparkModel"]}, True),
        ({"dflash_config": {"projector_type": "dspark"}}, True),
        (
            {"architectures": ["Qwen3DFlashModel"], "dflash_config": {"attention_mode": "gqa"}},
            False,
        ),
        ({}, False),
    ],
)
def test_strategy_census(fragment, dspark):
    assert dspark_strategy_census(json.dumps(fragment)) is dspark


@pytest.mark.parametrize("raw", [[], 5, None, {"architectures": 5}, {"dflash_config": "dspark"}])
def test_the_census_refuses_what_is_no_config(raw):
    with pytest.raises(ValueError, match=r"(config|architectures|dflash_config): expected"):
        dspark_strategy_census(json.dumps(raw))


def test_family_by_architecture():
    assert parsed().family == "dflash"
    assert parsed(architectures=["Qwen3DSparkModel"]).family == "dspark"


# --- files -------------------------------------------------------------------------------------


VARIANTS = {
    "plain": {},
    "sliding": SLIDING,
    "bidirectional": SLIDING | {"is_causal": False},
    "causal": {"is_causal": True},
    "yarn": {"rope_theta": ABSENT, "rope_parameters": YARN | {"attention_factor": 1.25}},
    "yarn_untruncated": {"rope_theta": ABSENT, "rope_parameters": YARN | {"truncate": False}},
    "scaled": dflash(output_multiplier=0.2, final_logit_softcapping=20.0),
    "embedding_scale": dflash(input_embedding_scale=2.0),
    "no_vocabulary": {"vocab_size": ABSENT, "num_target_layers": ABSENT},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_written_configs_read_back_equal(variant, tmp_path):
    config = parsed(**VARIANTS[variant])
    (tmp_path / "config.json").write_text(json.dumps(config_dict(config)))
    assert read_config(tmp_path) == config


def test_errors_name_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_config(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        read_config(tmp_path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json: expected a JSON object, found list"):
        read_config(tmp_path)
    path.write_text(json.dumps(raw(hidden_size=0)))
    with pytest.raises(ValueError, match=r"config\.json: hidden_size: .* found 0"):
        read_config(tmp_path)
