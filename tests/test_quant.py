"""Formats of quantised weights: their numbers, their products, and drafters in them."""

import functools
import re

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from families import FAMILIES, ORACLES, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import load_file, save_file
from targets import F32, tiny_draft, tiny_target

from dflash_jax import forward, load_draft, quant, save_draft
from dflash_jax.checkpoint import ASSETS, named_tensors
from dflash_jax.config_json import config_dict, parse_config
from dflash_jax.quant import PRECISIONS, QuantizedLinear
from dflash_jax.shapes import abstract
from dflash_jax.sharding import named_leaves
from dflash_jax.training import Recipe, start_training

BLOCKS = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
EXACT = (
    ".input_norm",
    ".post_norm",
    "_norm",
    "norm",
    "conv.",
    "markov.",
    "confidence.",
    "dflash2.",
)
"""Parts of the paths of leaves that are never quantised."""


def weights(seed=0):
    return np.random.default_rng(seed).normal(size=(6, 40)).astype(np.float32)


def test_value_is_bf16_of_quantised_times_scale():
    q, scale = quant.quantize_rows(weights())
    assert (q.dtype, q.shape, scale.dtype, scale.shape) == (np.int8, (6, 40), np.float32, (6,))
    expected = np.zeros((6, 40), ml_dtypes.bfloat16)
    for i in range(6):
        for j in range(40):
            expected[i, j] = np.float32(q[i, j]) * scale[i]
    got = quant.dequantize_rows(q, scale)
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got, expected)


def test_error_is_half_a_step_of_the_row_and_a_rounding():
    w = weights()
    q, scale = quant.quantize_rows(w)
    error = np.abs(quant.dequantize_rows(q, scale).astype(np.float32) - w)
    assert (error <= 0.5 * scale[:, None] + 2**-8 * np.abs(w).max(1, keepdims=True)).all()
    np.testing.assert_allclose(scale, np.abs(w).max(1) / 127, rtol=1e-6)


def test_rows_do_not_share_a_scale():
    w = weights()
    w[2] *= 1000
    q, _ = quant.quantize_rows(w)
    np.testing.assert_array_equal(
        np.delete(q, 2, 0), np.delete(quant.quantize_rows(weights())[0], 2, 0)
    )
    assert (np.abs(q).max(axis=1) == 127).all()


def test_zero_rows_stay_zero():
    q, scale = quant.quantize_rows(np.zeros((2, 4), np.float32))
    np.testing.assert_array_equal(scale, 1)
    assert not quant.dequantize_rows(q, scale).astype(np.float32).any()


def test_the_code_is_symmetric():
    w = weights()
    q, scale = quant.quantize_rows(w)
    negative, same_scale = quant.quantize_rows(-w)
    np.testing.assert_array_equal(-q, negative)
    np.testing.assert_array_equal(scale, same_scale)
    assert q.min() >= -127


ORDINARY = st.floats(-1e4, 1e4, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0)


# --- block formats: GGUF's own numbers ------------------------------------------------------------


def assert_is_gguf(w, precision):
    """Integers, scales, bytes and values are the gguf package's."""
    q = quant.quantize(w, precision)
    stored = gguf.quantize(w, BLOCKS[precision])
    np.testing.assert_array_equal(quant.to_blocks(q), stored)
    np.testing.assert_array_equal(quant.dequantize(q), gguf.dequantize(stored, BLOCKS[precision]))
    back = quant.from_blocks(stored, precision)
    np.testing.assert_array_equal(back.values, q.values)
    np.testing.assert_array_equal(back.scales, q.scales)


@pytest.mark.parametrize("precision", BLOCKS)
@pytest.mark.parametrize("columns", [32, 64, 96])
def test_blocks_are_ggufs(columns, precision):
    rng = np.random.default_rng(columns)
    w = rng.normal(size=(40, columns)).astype(np.float32)
    w *= np.float32(10) ** rng.integers(-6, 4, (40, 1)).astype(np.float32)
    w[3] = 0
    w[4] = rng.integers(-8, 9, columns) / 2  # halves, and ties for the largest
    w[5, 7], w[6, 9] = 9, -9
    assert_is_gguf(w, precision)


@pytest.mark.parametrize("precision", BLOCKS)
@settings(max_examples=30, deadline=None)
@given(arrays(np.float32, (2, 64), elements=ORDINARY))
def test_any_blocks_are_ggufs(precision, w):
    assert_is_gguf(w, precision)


def test_half_bytes_are_the_weights_and_a_block_is_32_neighbouring_bytes():
    codes = np.arange(96, dtype=np.uint8)[None] % 16
    packed = quant.pack_nibbles(codes)
    assert packed.shape == (1, 64)
    low, high = (packed << 4).astype(np.int8) // 16, (packed & 0xF0).astype(np.int8) // 16
    np.testing.assert_array_equal(low[0], np.r_[codes[0, :32], codes[0, 64:]].astype(int) - 8)
    np.testing.assert_array_equal(high[0, :32], codes[0, 32:64].astype(int) - 8)
    np.testing.assert_array_equal(high[0, 32:], 0)  # the missing partner of an odd block


@pytest.mark.parametrize("precision", BLOCKS)
def test_weights_too_small_for_a_scale_are_zeros(precision):
    tiny = np.full((1, 32), 1e-42, np.float32)
    assert not quant.dequantize(quant.quantize(tiny, precision)).any()


@pytest.mark.parametrize("precision", BLOCKS)
def test_weights_that_fit_no_block_or_no_scale_are_refused(precision):
    with pytest.raises(ValueError, match=rf"precision '{precision}': .*blocks of 32, found 48"):
        quant.quantize(np.ones((2, 48), np.float32), precision)
    with pytest.raises(ValueError, match="expected weights that an f16 scale holds"):
        quant.quantize(np.full((2, 32), 1e9, np.float32), precision)


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_product_is_that_of_the_dequantised_matrix(precision, first):
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(24, 96)).astype(np.float32), rng.normal(size=(2, 3, 96))
    q = quant.quantize(w, precision)
    expected = x @ np.asarray(quant.dequantize(q), np.float64)[first:].T
    q = jax.tree.map(jnp.asarray, q)
    got = quant.project(jnp.asarray(x, F32), q, first=first)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    half = quant.project(jnp.asarray(x, jnp.bfloat16), q, F32, first=first)
    assert half.dtype == F32
    np.testing.assert_allclose(half, expected, atol=2e-2 * np.abs(expected).max())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_loop_carries_the_weights_as_floats(precision):
    """XLA would make them once, ahead of the loop over rounds, and keep them."""
    weight = jax.tree.map(jnp.asarray, quant.quantize(np.eye(96, dtype=np.float32), precision))

    def rounds(x, weight, n):
        return jax.lax.fori_loop(0, n, lambda i, x: quant.project(x, weight), x)

    text = jax.jit(rounds).lower(jnp.ones((4, 96)), weight, 3).compile().as_text()
    loops = [line for line in text.splitlines() if " while(" in line]
    assert loops
    assert not any(re.search(r"f\d+\[96,96\]", line) for line in loops)


# --- drafters -------------------------------------------------------------------------------------


@functools.cache
def quantised(family, precision):
    return load_draft(ORACLES / "tiny" / family, trained(family)[0], dtype=F32, precision=precision)


run = jax.jit(forward)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_projections_are_quantised_and_nothing_else(family, precision):
    draft, whole = quantised(family, precision), trained(family)[1]
    shapes = abstract(draft.config, F32)
    assert jax.tree.structure(shapes) == jax.tree.structure(draft)
    for (path, leaf), (_, shape) in zip(named_leaves(draft), named_leaves(shapes), strict=True):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype), path
    floats = dict(named_leaves(whole))
    for path, leaf in named_leaves(draft):
        if path.endswith((".values", ".scales")):
            assert not any(part in path for part in EXACT), path
        else:
            np.testing.assert_array_equal(leaf, floats[path])
    quantities = [path for path, _ in named_leaves(draft) if path.endswith(".values")]
    assert len(quantities) == 4 * len(draft.layers) + 1
    assert quantised(family, precision).dtype == F32


def rows_of(draft):
    """Block rows `[12, 8, H]` of a tiny DFlash drafter behind random taps."""
    rng = np.random.default_rng(1)
    taps = rng.normal(size=(12, 24, draft.config.tap_size)).astype(np.float32)
    block = np.full((12, 8), draft.config.mask_token_id)
    block[:, 0] = rng.integers(97, 122, 12)
    noise = trained("dflash")[0].embed(block)
    return run(draft, taps, noise, jnp.tile(jnp.arange(32), (12, 1)))


@pytest.mark.parametrize(("precision", "least"), [("int8", 0.99), ("q8_0", 0.99), ("q4_0", 0.9)])
def test_a_quantised_drafter_says_what_the_float_one_does(precision, least):
    target, whole = trained("dflash")
    drafts = (whole, quantised("dflash", precision))
    expected, ours = (jnp.argmax(target.logits(rows_of(d)), axis=-1) for d in drafts)
    assert float((ours == expected).mean()) >= least


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_are_those_of_the_dequantised_drafter(precision, tmp_path):
    draft = quantised("dflash", precision)
    save_draft(draft, tmp_path)
    plain = load_draft(tmp_path, trained("dflash")[0], dtype=F32, precision="float")
    assert plain.config == trained("dflash")[1].config
    ours, expected = np.asarray(rows_of(draft)), np.asarray(rows_of(plain))
    # int8 rows are bf16 where they are made floats, which rounds each weight.
    limit = 1e-5 if precision != "int8" else 2e-2
    assert np.abs(ours - expected).max() <= limit * np.abs(expected).max()


# --- on disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["drafter", "drafter.gguf"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_the_numbers_are_the_same(family, precision, form, tmp_path):
    draft = quantised(family, precision)
    if precision == "int8" and form.endswith("gguf"):
        with pytest.raises(ValueError, match="q8_0, q4_0 or floats in GGUF, found int8 rows"):
            save_draft(draft, tmp_path / form)
        return
    save_draft(draft, tmp_path / form)
    loaded = load_draft(tmp_path / form, trained(family)[0], dtype=F32)
    assert loaded.config == draft.config
    jax.tree.map(np.testing.assert_array_equal, loaded, draft)


def test_a_gguf_drafter_holds_ggml_types_under_our_names(tmp_path):
    draft = load_draft(ORACLES / "tiny" / "dspark", dtype=jnp.bfloat16, precision="q4_0")
    save_draft(draft, tmp_path / "d.gguf")
    reader = gguf.GGUFReader(tmp_path / "d.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["layers.0.self_attn.k_proj.weight"] == types["fc.weight"] == "Q4_0"
    assert types["norm.weight"] == types["markov_head.markov_w1.weight"] == "BF16"
    weight = named_tensors(draft)["layers.1.mlp.up_proj.weight"]
    (tensor,) = [t for t in reader.tensors if t.name == "layers.1.mlp.up_proj.weight"]
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    np.testing.assert_array_equal(values, quant.dequantize(weight))


def test_a_gguf_file_that_is_no_drafter_is_refused(tmp_path):
    save_draft(tiny_draft(), tmp_path / "d.gguf")
    whole = load_draft(tmp_path / "d.gguf", tiny_target(), dtype=F32)
    jax.tree.map(np.testing.assert_array_equal, whole, tiny_draft())
    data = (tmp_path / "d.gguf").read_bytes()
    (tmp_path / "e.gguf").write_bytes(data.replace(b"dflash.config", b"dflash.confiX"))
    with pytest.raises(ValueError, match=r"e\.gguf: expected a drafter \(metadata dflash\.config"):
        load_draft(tmp_path / "e.gguf")
    (tmp_path / "f.gguf").write_bytes(data.replace(b'"block_size"', b'"block_sizX"'))
    with pytest.raises(ValueError, match=r"f\.gguf: dflash\.config: block_size: expected"):
        load_draft(tmp_path / "f.gguf")


def test_stored_int8_rows_stay_the_integers_they_are():
    stored = load_file(ASSETS / "dflash" / "model.safetensors")
    draft = load_draft("dflash", precision="int8")
    for name, tensor in named_tensors(draft).items():
        if isinstance(tensor, QuantizedLinear):
            np.testing.assert_array_equal(tensor.values, stored[name])
            np.testing.assert_array_equal(tensor.scales, stored[name + ".scale"])
    assert draft.layers[0].qkv.values.dtype == jnp.int8


def test_the_config_says_the_precision_and_the_caller_may_say_another(tmp_path):
    draft = quantised("dflash", "q4_0")
    assert parse_config(config_dict(draft.config)) == draft.config
    save_draft(draft, tmp_path)
    assert load_draft(tmp_path).config.precision == "q4_0"
    assert load_draft(tmp_path, precision="int8").layers[0].o.precision == "int8"
    with pytest.raises(ValueError, match=r"precision: expected one of int8, .*float, found 'int4'"):
        load_draft(tmp_path, precision="int4")
    raw = config_dict(draft.config)
    raw["dflash_config"]["weight_precision"] = "q5_1"
    with pytest.raises(ValueError, match=r"weight_precision: expected one of .*, found 'q5_1'"):
        parse_config(raw)
    with pytest.raises(ValueError, match="storage: expected None for a drafter in q4_0"):
        save_draft(draft, tmp_path, storage="int8")


def bad_scales(scales, kind):
    scales = scales.copy()
    if kind == "shape":
        return scales[:-1]
    if kind == "type":
        return scales.astype(np.float64)
    scales.flat[0] = {"negative": -1, "nan": np.nan, "inf": np.inf}[kind]
    return scales


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", r"expected \[\d+.*found \["),
        ("type", "expected .* found .* of float64"),
        ("negative", "expected no negative number, found -1.0"),
        ("nan", "expected finite numbers"),
        ("inf", "expected finite numbers"),
    ],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_corrupt_scales_are_one_line_that_names_them(precision, kind, message, tmp_path):
    save_draft(quantised("dflash", precision), tmp_path)
    file, name = tmp_path / "model.safetensors", "layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    tensors[name + ".scale"] = bad_scales(tensors[name + ".scale"], kind)
    save_file(tensors, file)
    if precision == "q4_0" and kind == "negative":
        load_draft(tmp_path)  # a q4_0 scale has a sign
        return
    with pytest.raises(ValueError, match=rf"{re.escape(name)}.*{message}") as caught:
        load_draft(tmp_path)
    assert "\n" not in str(caught.value)


def test_training_refuses_a_quantised_drafter():
    with pytest.raises(ValueError, match="expected float weights to train, found precision 'int8'"):
        start_training(quantised("dflash", "int8"), Recipe())
