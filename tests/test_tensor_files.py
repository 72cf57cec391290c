"""Named tensors on disk: one file or shards, what is read of them, and what is refused."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from targets import TINY, tiny_draft

from dflash_jax import load_draft, save_draft
from dflash_jax.tables import tensor_table
from dflash_jax.tensor_files import INDEX, WEIGHTS, TensorFiles


@pytest.fixture
def saved(tmp_path):
    """A saved tiny drafter."""
    save_draft(tiny_draft(), tmp_path)
    return tmp_path


def shard(directory, parts=3):
    """Split the weights file into shards with an index."""
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    weight_map = {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        names = sorted(tensors)[part::parts]
        save_file({n: tensors[n] for n in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = directory / INDEX
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_a_sharded_checkpoint_loads_the_same(saved):
    whole = load_draft(saved)
    shard(saved)
    jax.tree.map(np.testing.assert_array_equal, load_draft(saved), whole)


def test_a_missing_shard_is_named(saved):
    shard(saved)
    (saved / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"missing .*model-00002-of-00003"):
        load_draft(saved)


def test_a_tensor_that_is_not_where_the_index_says_is_named(saved):
    index = shard(saved)
    table = json.loads(index.read_text())
    other = next(f for f in table["weight_map"].values() if f != table["weight_map"]["fc.weight"])
    table["weight_map"]["fc.weight"] = other
    index.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=rf"puts fc\.weight in {other}, not found there"):
        load_draft(saved)


@pytest.mark.parametrize(
    "table", [{}, None, [], "x", {"fc.weight": 1}, {"fc.weight": None}, {"fc.weight": [WEIGHTS]}]
)
def test_a_broken_index_is_named(saved, table):
    index = shard(saved)
    index.write_text(json.dumps({} if table == {} else {"weight_map": table}))
    with pytest.raises(ValueError, match=r"index\.json: expected JSON with a weight_map"):
        load_draft(saved)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_not_json_is_named(saved, file, content):
    shard(saved)
    (saved / file).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{file}: not JSON \(") as caught:
        load_draft(saved)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["int8", "float8", bool, 5])
def test_weights_are_computed_with_as_floats(saved, dtype):
    with pytest.raises(ValueError, match=f"dtype: expected a floating-point type, found {dtype!r}"):
        load_draft(saved, dtype=dtype)


def test_a_file_that_is_not_safetensors_is_named(saved):
    (saved / WEIGHTS).write_bytes(b"not a header")
    with pytest.raises(ValueError, match=r"model\.safetensors: not safetensors"):
        load_draft(saved)


def test_headers_are_read_without_the_data(saved):
    files = TensorFiles(saved)
    assert files.shape("fc.weight") == (32, 64)
    assert files.dtype("fc.weight") == "F32"
    assert files.names() == set(tensor_table(TINY))
