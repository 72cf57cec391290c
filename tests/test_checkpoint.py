"""Drafter checkpoints: exact round trips, the census of tensors, what is refused and why."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from targets import F32, ORACLES, TINY, tiny_draft, tiny_target

from dflash_jax import load_draft, quant, save_draft
from dflash_jax.config_json import read_config
from dflash_jax.draft import DraftHead
from dflash_jax.sharding import named_leaves
from dflash_jax.tables import tensor_table
from dflash_jax.tensor_files import INDEX, WEIGHTS

PLAIN = ORACLES / "stages" / "dflash_plain" / "checkpoint"
BF16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture
def saved(tmp_path):
    """A saved tiny drafter; `edit` rewrites its tensors."""
    save_draft(tiny_draft(), tmp_path)
    return tmp_path


def edit(directory, **changes):
    """Replace, add or (None) remove tensors."""
    tensors = load_file(directory / WEIGHTS)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, directory / WEIGHTS)


def set_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_equal(got, expected):
    """Equal to the bit, types and config included."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


# --- loading and saving ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_saving_and_loading_is_exact(dtype, tmp_path):
    draft = jax.tree.map(lambda x: x.astype(dtype), tiny_draft())
    save_draft(draft, tmp_path)
    assert_equal(load_draft(tmp_path, dtype=dtype), draft)
    on_disk = load_file(tmp_path / WEIGHTS)
    assert {t.dtype for t in on_disk.values()} == {np.dtype(dtype)}
    assert set(on_disk) == set(tensor_table(TINY))


def test_a_published_checkpoint_survives_a_round_trip(tmp_path):
    draft = load_draft(PLAIN, dtype=BF16)
    save_draft(draft, tmp_path)
    before, after = load_file(PLAIN / WEIGHTS), load_file(tmp_path / WEIGHTS)
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert after[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(after[name], tensor)
    assert read_config(tmp_path) == read_config(PLAIN)


def test_bf16_files_load_to_the_same_values_in_f32():
    draft, tensors = load_draft(PLAIN, dtype=F32), load_file(PLAIN / WEIGHTS)
    np.testing.assert_array_equal(draft.fc, tensors["fc.weight"].astype(np.float32))
    assert draft.dtype == jnp.float32


def test_the_default_type_on_a_cpu_is_f32():
    assert load_draft(PLAIN).dtype == (
        jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    )


def test_fused_rows_are_q_k_v_and_gate_up():
    draft, tensors = load_draft(PLAIN, dtype=BF16), load_file(PLAIN / WEIGHTS)
    for i, layer in enumerate(draft.layers):
        names = [f"layers.{i}.self_attn.{p}_proj.weight" for p in "qkv"]
        np.testing.assert_array_equal(layer.qkv, np.concatenate([tensors[n] for n in names]))
        names = [f"layers.{i}.mlp.{p}_proj.weight" for p in ("gate", "up")]
        np.testing.assert_array_equal(layer.gate_up, np.concatenate([tensors[n] for n in names]))


def test_the_backbone_has_eleven_tensors_a_layer_and_three():
    for layers in (1, 2, 5):
        config = dataclasses.replace(
            TINY,
            num_hidden_layers=layers,
            layer_causal=(False,) * layers,
            layer_window=(None,) * layers,
        )
        assert len(tensor_table(config)) == 11 * layers + 3


def test_leaves_have_paths():
    paths = [path for path, _ in named_leaves(tiny_draft())]
    assert "layers.0.qkv" in paths
    assert "fc" in paths
    assert {entry.leaf for entry in tensor_table(TINY).values()} == set(paths)


def test_nothing_is_saved_beside_the_index_of_another_checkpoint(saved):
    index = saved / INDEX
    index.write_text("{}")
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    with pytest.raises(ValueError, match=rf"expected no {index.name} .*, found one"):
        save_draft(tiny_draft(), saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before


# --- int8 storage ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (np.ones(31, np.float32), r"found \[31\] of float32"),
        (np.ones((1, 32), np.float32), r"found \[1, 32\] of float32"),
        (np.ones(32, np.int32), r"found \[32\] of int32"),
        (np.full(32, np.nan, np.float32), "expected finite numbers"),
        (np.full(32, np.inf, np.float32), "expected finite numbers"),
    ],
)
def test_scales_are_a_finite_float_a_row(scale, message, tmp_path):
    save_draft(tiny_draft(), tmp_path, storage="int8")
    edit(tmp_path, **{"fc.weight.scale": scale})
    with pytest.raises(ValueError, match=rf"fc\.weight\.scale: .*{message}"):
        load_draft(tmp_path)


def test_int8_storage_is_bf16_of_quantised_times_scale(tmp_path):
    draft = tiny_draft()
    save_draft(draft, tmp_path, storage="int8")
    tensors = load_file(tmp_path / WEIGHTS)
    first, second = load_draft(tmp_path, dtype=BF16), load_draft(tmp_path, dtype=BF16)
    assert_equal(first, second)
    for name, entry in tensor_table(TINY).items():
        leaf = np.asarray(dict(named_leaves(first))[entry.leaf])
        got = leaf[entry.start : entry.start + entry.shape[0]]
        if len(entry.shape) == 1:  # norms are stored as they are
            original = np.asarray(dict(named_leaves(draft))[entry.leaf])
            np.testing.assert_array_equal(tensors[name], original)
            continue
        assert tensors[name].dtype == np.int8
        scale = tensors[name + ".scale"]
        assert scale.dtype == np.float32
        values = tensors[name].astype(np.float32) * scale[:, None]
        np.testing.assert_array_equal(got, values.astype(ml_dtypes.bfloat16))


def test_int8_storage_loads_to_the_same_values_in_every_type(tmp_path):
    save_draft(tiny_draft(), tmp_path, storage="int8")
    half, full = load_draft(tmp_path, dtype=BF16), load_draft(tmp_path, dtype=F32)
    np.testing.assert_array_equal(half.fc.astype(jnp.float32), full.fc)
    np.testing.assert_array_equal(half.layers[1].qkv.astype(jnp.float32), full.layers[1].qkv)


def test_int8_storage_is_much_smaller_than_bf16(tmp_path):
    draft = jax.tree.map(lambda x: x.astype(BF16), load_draft(PLAIN))
    for storage in (None, "int8"):
        save_draft(draft, tmp_path / str(storage), storage=storage)
    sizes = [(tmp_path / s / WEIGHTS).stat().st_size for s in ("None", "int8")]
    assert sizes[1] < 0.6 * sizes[0]


def test_int8_tensors_need_their_scales(tmp_path):
    save_draft(tiny_draft(), tmp_path, storage="int8")
    edit(tmp_path, **{"fc.weight" + quant.SCALE: None})
    with pytest.raises(ValueError, match=r"int8 tensors without scales fc\.weight\.scale"):
        load_draft(tmp_path)


@pytest.mark.parametrize("broken", ["weights", "config", "rename"])
def test_a_save_that_fails_leaves_what_was_there(saved, broken, monkeypatch):
    before = {file.name: file.read_bytes() for file in saved.iterdir()}

    def fail(path, *_, **__):
        raise OSError(28, "No space left on device")

    def half(tensors, path, **_):
        Path(path).write_bytes(before[WEIGHTS][:100])
        fail(path)

    if broken == "weights":
        monkeypatch.setattr("dflash_jax.checkpoint.save_file", half)
    else:
        monkeypatch.setattr(Path, "write_text" if broken == "config" else "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        save_draft(tiny_draft(seed=2), saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    load_draft(saved)


def test_a_gguf_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    file = tmp_path / "tiny.gguf"
    save_draft(tiny_draft(), file)
    before = file.read_bytes()

    def half(path, *_):
        path.write_bytes(before[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dflash_jax.checkpoint.write_gguf", half)
    with pytest.raises(OSError, match="No space left"):
        save_draft(tiny_draft(), file)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_unknown_storage_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"storage: expected None or 'int8', found 'int4'"):
        save_draft(tiny_draft(), tmp_path, storage="int4")


# --- the census --------------------------------------------------------------------------------


def test_missing_tensors_are_listed(saved):
    edit(saved, **{"fc.weight": None, "layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ValueError, match=r"missing .*fc\.weight, layers\.1\.mlp\.up_proj\.weight"):
        load_draft(saved)


def test_misshapen_tensors_are_listed_with_both_shapes(saved):
    edit(saved, **{"norm.weight": np.ones(31, np.float32)})
    with pytest.raises(ValueError, match=r"norm\.weight: expected \[32\], found \[31\]"):
        load_draft(saved)


def test_a_transposed_matrix_is_misshapen(saved):
    edit(saved, **{"fc.weight": np.ones((64, 32), np.float32)})
    with pytest.raises(ValueError, match=r"fc\.weight: expected \[32, 64\], found \[64, 32\]"):
        load_draft(saved)


def test_left_over_tensors_of_a_plain_drafter_are_warned_about(saved):
    edit(saved, **{"layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)})
    with pytest.warns(UserWarning, match=r"unused .*layers\.0\.self_attn\.q_proj\.bias"):
        assert_equal(load_draft(saved), tiny_draft())


@pytest.mark.parametrize(
    "name",
    [
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook.weight",
        "markov_head.markov_w1.weight",
        "confidence_head.proj.weight",
        "layers.0.attention_conv.base_kernel",
    ],
)
def test_tensors_of_another_family_are_never_ignored(saved, name):
    edit(saved, **{name: np.ones((2, 2), np.float32)})
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        load_draft(saved)


def test_one_layer_more_in_the_file_than_in_the_config_is_seen(saved):
    set_config(saved, num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.warns(UserWarning, match=r"unused .*layers\.1\."):
        assert len(load_draft(saved).layers) == 1


def test_one_layer_less_is_refused(saved):
    set_config(saved, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ValueError, match=r"missing tensors layers\.2\..* and 3 more"):
        load_draft(saved)


def test_integer_weights_are_refused(saved):
    edit(saved, **{"norm.weight": np.ones(32, np.int32)})
    with pytest.raises(ValueError, match=r"norm\.weight: expected F32, .*, found I32"):
        load_draft(saved)


@pytest.mark.parametrize("missing", ["config.json", WEIGHTS])
def test_a_missing_file_is_named(saved, missing):
    (saved / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing.replace(".", r"\.")):
        load_draft(saved)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"drafter: .*nowhere"):
        load_draft(tmp_path / "nowhere")


def test_errors_are_one_line(saved):
    edit(saved, **{name: None for name in load_file(saved / WEIGHTS)})
    with pytest.raises(ValueError, match=r"missing tensors .* and 17 more") as error:
        load_draft(saved)
    assert "\n" not in str(error.value)


# --- with a target -----------------------------------------------------------------------------


def test_a_drafter_of_this_target_loads(saved):
    assert_equal(load_draft(saved, tiny_target()), tiny_draft())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_target_layers": 5}, "num_target_layers: the drafter expects 5, .* 3 layers"),
        (
            {
                "dflash_config": {"mask_token_id": 64, "target_layer_ids": [0, 1]},
                "vocab_size": None,
            },
            "mask_token_id: .* 64 embedding rows, found 64",
        ),
        (
            {
                "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 3]},
                "num_target_layers": None,
            },
            r"target_layer_ids: .* 3 layers\), found \[3\]",
        ),
    ],
)
def test_a_drafter_of_another_target_is_refused(saved, config, message):
    set_config(saved, **config)
    with pytest.raises(ValueError, match=message):
        load_draft(saved, tiny_target())


def test_copies_of_the_targets_tables_are_compared_and_the_targets_used(saved):
    target = tiny_target()
    edit(saved, **{"embed_tokens.weight": np.asarray(target.embedding)})
    edit(saved, **{"lm_head.weight": np.asarray(target.lm_head)})
    assert load_draft(saved, target).head is None
    edit(saved, **{"lm_head.weight": np.asarray(target.lm_head) + 1})
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs from the target's"):
        assert load_draft(saved, target).head is None


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("shape", [(64, 31), (32,), (64, 32, 1)])
def test_copies_of_another_shape_are_refused(saved, name, shape):
    edit(saved, **{name: np.ones(shape, np.float32)})
    message = rf"{name}: expected \[rows, 32\], found {re.escape(str(list(shape)))}"
    with pytest.raises(ValueError, match=message):
        load_draft(saved, tiny_target())


@pytest.mark.parametrize("dtype", [np.int8, np.int32])
def test_copies_that_are_no_floats_are_refused(saved, dtype):
    edit(saved, **{"embed_tokens.weight": np.ones((64, 32), dtype)})
    with pytest.raises(ValueError, match=r"(scales|:) .*embed_tokens\.weight"):
        load_draft(saved, tiny_target())


# --- a reduced vocabulary ----------------------------------------------------------------------


def head(rows=32):
    rng = np.random.default_rng(0)
    offsets = np.zeros(rows, np.int64)
    offsets[3] = 7
    return {"lm_head.weight": rng.normal(size=(rows, 32)).astype(np.float32), "d2t": offsets}


def test_the_drafters_own_trimmed_head_is_kept(saved):
    edit(saved, **head())
    draft = load_draft(saved, tiny_target())
    np.testing.assert_array_equal(draft.head.lm_head, head()["lm_head.weight"])
    assert draft.head.d2t.dtype == jnp.int32
    assert draft.head.d2t.tolist() == [0, 0, 0, 7] + [0] * 28


def test_a_trimmed_head_survives_a_round_trip(tmp_path):
    offsets = jnp.asarray(head()["d2t"], jnp.int32)
    draft = tiny_draft().replace(head=DraftHead(jnp.asarray(head()["lm_head.weight"]), offsets))
    save_draft(draft, tmp_path)
    assert_equal(load_draft(tmp_path), draft)


def test_a_reduced_head_without_a_map_is_refused(saved):
    edit(saved, **{"lm_head.weight": head()["lm_head.weight"]})
    with pytest.raises(ValueError, match=r"lm_head\.weight has 32 rows, the target 64.*d2t"):
        load_draft(saved, tiny_target())


def test_a_map_without_a_head_is_refused(saved):
    edit(saved, d2t=head()["d2t"])
    with pytest.raises(ValueError, match=r"d2t without lm_head\.weight"):
        load_draft(saved, tiny_target())


def test_a_map_of_another_length_is_refused(saved):
    edit(saved, **head() | {"d2t": head(31)["d2t"]})
    with pytest.raises(ValueError, match=r"d2t: expected \[32\], found \[31\]"):
        load_draft(saved, tiny_target())


@pytest.mark.parametrize("rows", [64, 70])
def test_a_full_head_needs_no_map(saved, rows):
    """As many rows as the target has tokens, or more: it is a copy of the target's."""
    table = np.asarray(tiny_target().lm_head)
    padding = np.zeros((rows - 64, 32), np.float32)
    edit(saved, **{"lm_head.weight": np.concatenate([table, padding])})
    assert load_draft(saved, tiny_target()).head is None


@pytest.mark.parametrize("shape", [(32, 31), (32,), (32, 32, 1)])
def test_a_trimmed_head_of_another_shape_is_refused(saved, shape):
    edit(saved, **head() | {"lm_head.weight": np.ones(shape, np.float32)})
    message = rf"lm_head\.weight: expected \[rows, 32\], found {re.escape(str(list(shape)))}"
    with pytest.raises(ValueError, match=message):
        load_draft(saved, tiny_target())


def test_a_trimmed_head_has_a_row(saved):
    edit(saved, **{name: tensor[:0] for name, tensor in head().items()})
    with pytest.raises(
        ValueError, match=r"lm_head\.weight: expected \[rows, 32\], found \[0, 32\]"
    ):
        load_draft(saved, tiny_target())


@pytest.mark.parametrize("dtype", [np.float32, np.bool_])
def test_a_map_is_of_integers(saved, dtype):
    edit(saved, **head() | {"d2t": np.zeros(32, dtype)})
    with pytest.raises(ValueError, match=r"d2t: expected integers, found (float32|bool)"):
        load_draft(saved, tiny_target())


@pytest.mark.parametrize("offset", [-4, 61, 2**40])
def test_a_map_that_leaves_the_vocabulary_is_refused(saved, offset):
    tensors = head()
    tensors["d2t"][3] = offset
    edit(saved, **tensors)
    with pytest.raises(ValueError, match=rf"d2t: .*0\.\.63.*found {3 + offset}"):
        load_draft(saved, tiny_target())
