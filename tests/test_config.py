"""What a drafter is: its harvest, and whether it fits a target."""

import dataclasses

import pytest

from dflash_jax.config import (
    DFlashConfig,
    DSparkHarvest,
    RopeConfig,
    check_against_target,
    resolve_harvest,
)

CONFIG = DFlashConfig(
    family="dflash",
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    num_hidden_layers=3,
    rms_norm_eps=1e-6,
    rope=RopeConfig(1e6),
    block_size=16,
    mask_token_id=127,
    target_layer_ids=(1, 3, 5),
    layer_causal=(False,) * 3,
    layer_window=(None,) * 3,
    vocab_size=128,
    num_target_layers=8,
)


def changed(**fields) -> DFlashConfig:
    return dataclasses.replace(CONFIG, **fields)


def test_config_is_a_static_value():
    assert hash(changed()) == hash(changed())
    assert changed() == changed()
    assert changed() != changed(block_size=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed().block_size = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("harvest", "block", "first_row", "drafts"),
    [(DSparkHarvest.DFLASH, 16, 1, 15), (DSparkHarvest.DSPARK, 7, 0, 7)],
)
def test_a_block_yields_one_draft_per_harvested_row(harvest, block, first_row, drafts):
    assert harvest.first_row == first_row
    assert harvest.drafts(block) == drafts


def test_harvest_follows_the_family_unless_explicit():
    mask_fill, shifted = changed(), changed(family="dspark")
    assert resolve_harvest(mask_fill) is DSparkHarvest.DFLASH
    assert resolve_harvest(shifted) is DSparkHarvest.DSPARK
    assert resolve_harvest(shifted, "dflash") is DSparkHarvest.DFLASH
    assert resolve_harvest(mask_fill, DSparkHarvest.DSPARK) is DSparkHarvest.DSPARK


def test_unknown_harvest_is_refused_never_mapped():
    with pytest.raises(ValueError, match=r"harvest: expected 'dflash' or 'dspark', found 'DFlash'"):
        resolve_harvest(changed(), "DFlash")


def test_dflash2_refuses_the_shifted_harvest():
    two = changed(family="dflash2")
    assert resolve_harvest(two) is DSparkHarvest.DFLASH
    with pytest.raises(ValueError, match=r"harvest: .*DFlash2.*'dspark'"):
        resolve_harvest(two, "dspark")


# --- against a target --------------------------------------------------------------------------


def test_a_drafter_of_this_target_is_accepted():
    check_against_target(changed(), hidden_size=64, num_layers=8, embedding_rows=128)


def test_another_hidden_size_is_refused_with_both_widths():
    config = changed(hidden_size=32, num_target_layers=None, target_layer_ids=(0, 1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"drafter expects 32 .*160 wide.*48 \(240 wide\)"):
        check_against_target(config, hidden_size=48, num_layers=8, embedding_rows=128)


def test_a_tap_beyond_the_target_is_refused():
    config = changed(num_target_layers=None)
    with pytest.raises(ValueError, match=r"target_layer_ids: .*0\.\.4 .*5 layers.*found \[5\]"):
        check_against_target(config, hidden_size=64, num_layers=5, embedding_rows=128)


def test_another_layer_count_is_refused():
    with pytest.raises(ValueError, match=r"num_target_layers: the drafter expects 8, .* 12 layers"):
        check_against_target(changed(), hidden_size=64, num_layers=12, embedding_rows=128)


def test_a_mask_outside_the_embedding_is_refused():
    config = changed(vocab_size=None)
    with pytest.raises(ValueError, match=r"mask_token_id: .* 127 embedding rows, found 127"):
        check_against_target(config, hidden_size=64, num_layers=8, embedding_rows=127)
