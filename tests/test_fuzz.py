"""Damaged checkpoints: whatever the files hold, they load or end in one clear line.

A case is a tiny checkpoint with a few random faults. Only configs and headers are read (what
`survey_draft` and `abstract_target` read): weights are holes in sparse files.
"""

import json
import math
import random
import struct
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from damage import REFUSALS, encoded, mutate, one_line_or_loads
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.checkpoint import GGUF_CONFIG, survey_draft
from dflash_jax.config_json import read_config
from dflash_jax.gguf_file import write_gguf
from dflash_jax.targets.loading import abstract_target
from dflash_jax.tensor_files import INDEX, WEIGHTS

TINY = Path(__file__).parent / "oracles" / "tiny"
DRAFTERS = ("dflash", "dspark", "dflash2")
SEVERAL = 12
"""Cases a seed: 25 seeds by default, 834 in the slow test."""
BITS = {"F32": 32, "BF16": 16, "F16": 16, "F64": 64, "I64": 64, "I8": 8, "U8": 8, "BOOL": 8}
BITS |= {"F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "C64": 64, "U16": 16, "I32": 32}
ADDED = ("markov_head.markov_w1.weight", "markov_head.gate_proj.weight", "embed_tokens.weight")


def _whole(entry: object) -> bool:
    """Whether an entry of a header still has the form of one."""
    if not isinstance(entry, dict) or entry.get("dtype") not in list(BITS):
        return False
    shape = entry.get("shape")
    return isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**20 for n in shape)


class Checkpoint:
    """One tiny checkpoint in pieces: its config, its header, the bytes of its data."""

    def __init__(self, name: str):
        self.config = json.loads((TINY / name / "config.json").read_text())
        with (TINY / name / WEIGHTS).open("rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            self.header = json.loads(file.read(size))
        self.bytes = (TINY / name / WEIGHTS).stat().st_size - 8 - size

    def keys(self) -> tuple[str, ...]:
        return (*self.config, *self.config.get("dflash_config", {}), "rope_scaling", "is_causal")

    def write(self, directory: Path, config: bytes, header: bytes, length=None, size=None) -> None:
        """length: what the file says of its header. size: bytes of data; less cuts the header."""
        for file in directory.iterdir():
            file.unlink()
        (directory / "config.json").write_bytes(config)
        with (directory / WEIGHTS).open("wb") as file:
            file.write(struct.pack("<Q", len(header) if length is None else length) + header)
            file.truncate(max(0, 8 + len(header) + (self.bytes if size is None else size)))

    def case(self, directory: Path, chance: random.Random) -> None:
        """Write it with one to three faults."""
        config, header = (json.loads(json.dumps(x)) for x in (self.config, self.header))
        length = size = None
        index, hurt = None, set()
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            kind = chance.random()
            if kind < 0.08:
                hurt.add(chance.choice(["config", "header", "index"]))
            elif kind < 0.50:
                mutate(config, chance, self.keys())
            elif kind < 0.75:
                size = self._tensors(header, chance)
            elif kind < 0.82:
                mutate(header, chance, (*self.header, "__metadata__"))
            elif kind < 0.86:
                self._offsets(header, chance)
            elif kind < 0.89:
                length = chance.choice([0, 1, 2**20, 2**31, 2**40, 2**63, 2**64 - 1])
            elif kind < 0.92:
                size = chance.choice([0, 4, -8, -100, -(10**9), self.bytes + 5, 10 * self.bytes])
            else:
                names = [name for name in self.header if name != "__metadata__"]
                index = {"weight_map": dict.fromkeys(names, WEIGHTS)}
                for _ in range(chance.randrange(3)):
                    mutate(index, chance, (*self.header, "weight_map"))
        texts = [
            encoded(part, chance, name in hurt)
            for name, part in (("config", config), ("header", header))
        ]
        self.write(directory, *texts, length, size)
        if index is not None:
            (directory / INDEX).write_bytes(encoded(index, chance, "index" in hurt))

    def _tensors(self, header: dict, chance: random.Random) -> int:
        """Another tensor, shape, type or name in a header that is sound; bytes of data it needs."""
        held = {name: entry for name, entry in header.items() if name in self.header}
        held = {name: entry for name, entry in held.items() if _whole(entry)}
        if not held:
            return self.bytes
        name = chance.choice(list(held))
        entry, kind = dict(held[name]), chance.randrange(4)
        if kind == 0:
            shape = entry["shape"]
            shapes = [[], [0], [1], shape[::-1], [*shape, 1], shape[:1], [0, *shape], [2**31, 0]]
            entry["shape"] = chance.choice(
                [*shapes, [n + 1 for n in shape], [n // 2 for n in shape]]
            )
        elif kind == 1:
            entry["dtype"] = chance.choice(list(BITS))
        elif kind == 2:
            odd = [
                "d2t",
                "lm_head.weight",
                name + ".scale",
                name + "\n",
                "norm.weight",
                "",
                "\x1b[2J",
            ]
            held[chance.choice([*odd, *ADDED])] = entry
        else:
            del held[name]
        if kind < 2:
            held[name] = entry
        at = 0
        header.clear()
        for name, entry in held.items():
            size = -(-math.prod(entry["shape"]) * BITS[entry["dtype"]] // 8)
            header[name] = entry | {"data_offsets": [at, at + size]}
            at += size
        return at

    def _offsets(self, header: dict, chance: random.Random) -> None:
        """Tensors that overlap, lie outside, end before they begin, or are of another size."""
        held = [entry for entry in header.values() if isinstance(entry, dict) and "shape" in entry]
        ours, other = chance.choice(held), chance.choice(held)
        field = chance.choice(["data_offsets", "shape", "dtype"])
        begin, end = self.bytes // 2, self.bytes * 2
        ours[field] = chance.choice(
            [other.get(field), [begin, end], [end, begin], [-8, 0], [0, 2**64 - 1], [2**40, 2**41]]
        )


def survey(directory: Path) -> None:
    """Ends in an error that names the place, or holds a config and a shape for every tensor."""
    try:
        found = survey_draft(directory)
    except REFUSALS as error:
        assert str(directory) in str(error), str(error)[:300]  # noqa: PT017
        raise
    assert found.config.hidden_size > 0
    assert found.table


@pytest.fixture(scope="module")
def checkpoints():
    return {name: Checkpoint(name) for name in (*DRAFTERS, "target")}


def fuzz(checkpoints, directory, seed):
    chance = random.Random(seed)
    for i in range(SEVERAL):
        name = (*DRAFTERS, "target")[i % 4]
        checkpoints[name].case(directory, chance)
        with one_line_or_loads():
            abstract_target(directory) if name == "target" else survey(directory)


@pytest.mark.parametrize("seed", range(25))
def test_damaged_checkpoints(checkpoints, tmp_path, seed):
    fuzz(checkpoints, tmp_path, seed)


@pytest.mark.slow
def test_ten_thousand_damaged_checkpoints(checkpoints, tmp_path):
    for seed in range(1000, 1834):
        fuzz(checkpoints, tmp_path, seed)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_value_at_any_key_of_a_config(checkpoints, tmp_path_factory, data):
    config = json.loads(json.dumps(checkpoints[data.draw(st.sampled_from(DRAFTERS))].config))
    for _ in range(data.draw(st.integers(1, 3))):
        holder = data.draw(st.sampled_from([config, config["dflash_config"]]))
        holder[data.draw(st.sampled_from(sorted(holder)) | st.text(max_size=4))] = data.draw(JSON)
        if not isinstance(config.get("dflash_config"), dict):
            break
    directory = tmp_path_factory.getbasetemp()
    (directory / "config.json").write_text(json.dumps(config))
    with one_line_or_loads():
        read_config(directory)


@settings(max_examples=60, deadline=None)
@given(header=st.binary(max_size=60) | JSON.map(lambda raw: json.dumps(raw).encode()))
def test_any_bytes_as_a_header(checkpoints, tmp_path_factory, header):
    tiny, directory = checkpoints["dflash"], tmp_path_factory.getbasetemp() / "header"
    directory.mkdir(exist_ok=True)
    tiny.write(directory, json.dumps(tiny.config).encode(), header)
    with one_line_or_loads():
        survey(directory)
        pytest.fail("loaded")


# --- by name ------------------------------------------------------------------------------------


def changed(checkpoint: Checkpoint, directory: Path, **values) -> Path:
    """The checkpoint with other values in its config."""
    config = {k: v for k, v in checkpoint.config.items() if k not in values} | values
    checkpoint.write(directory, json.dumps(config).encode(), json.dumps(checkpoint.header).encode())
    return directory


@pytest.mark.parametrize("name", ["dflash2", "target"])
@pytest.mark.parametrize("value", [2**30, 2**31 - 1])
@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "head_dim"]
)
def test_a_huge_size_takes_no_memory(checkpoints, tmp_path, name, key, value):
    dropped: dict = {"layer_types": None} if name == "target" else {}
    directory = changed(checkpoints[name], tmp_path, **{key: value}, **dropped)
    read = abstract_target if name == "target" else survey
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="expected"):
            read(directory)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_key_stated_twice_is_refused(checkpoints, tmp_path):
    tiny = checkpoints["dflash"]
    text = json.dumps(tiny.config)[:-1] + ', "head_dim": 16}'
    tiny.write(tmp_path, text.encode(), json.dumps(tiny.header).encode())
    with pytest.raises(ValueError, match=r"config\.json: 'head_dim': expected one value, found"):
        survey(tmp_path)


@pytest.mark.parametrize("name", ["/etc/hostname", "../other.safetensors", "x" * 999, "a\nb", ""])
def test_an_index_leads_nowhere_but_beside_itself(checkpoints, tmp_path, name):
    changed(checkpoints["dflash"], tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    with pytest.raises(ValueError, match="expected JSON with a weight_map of file names"):
        survey(tmp_path)


@pytest.mark.parametrize("dtype", ["I64", "F64", "BOOL", "F8_E4M3"])
def test_weights_of_another_type_are_seen_in_the_header(checkpoints, tmp_path, dtype):
    tiny = checkpoints["dflash"]
    header, at = json.loads(json.dumps(tiny.header)), 0
    header["norm.weight"]["dtype"] = dtype
    for entry in header.values():
        if "shape" in entry:
            size = math.prod(entry["shape"]) * BITS[entry["dtype"]] // 8
            entry["data_offsets"], at = [at, at + size], at + size
    tiny.write(tmp_path, json.dumps(tiny.config).encode(), json.dumps(header).encode(), size=at)
    with pytest.raises(ValueError, match=rf"norm\.weight: expected F32.*, found {dtype}"):
        survey(tmp_path)


# --- GGUF ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_drafter(checkpoints, tmp_path_factory):
    """A drafter in one file; bytes of it up to its data, and all of its bytes."""
    tiny, path = checkpoints["dflash"], tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    entries = {name: e for name, e in tiny.header.items() if name != "__metadata__"}
    tensors = {name: np.zeros(e["shape"], ml_dtypes.bfloat16) for name, e in entries.items()}
    write_gguf(path, {GGUF_CONFIG: json.dumps(tiny.config)}, tensors)
    whole = path.stat().st_size
    data = sum(2 * math.prod(e["shape"]) for e in entries.values())
    return path.read_bytes()[: whole - data], whole


def gguf_case(path: Path, drafter: tuple[bytes, int], chance: random.Random) -> None:
    header, whole = bytearray(drafter[0]), drafter[1]
    for _ in range(chance.choice([1, 1, 2, 4])):
        kind, at = chance.randrange(6), chance.randrange(len(header) - 8)
        if kind < 2:
            header[at] = chance.randrange(256)
        elif kind == 2:  # counts, lengths, offsets, axes
            huge = chance.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1])
            at = chance.choice([8, 16, at])
            header[at : at + 8] = struct.pack("<Q", huge)
        elif kind == 3:
            header[at : at + 4] = struct.pack("<I", chance.randrange(40))
        elif kind == 4:
            whole = chance.choice([0, 3, 24, at, len(header), whole - 1])
        else:
            del header[at : at + chance.randrange(1, 40)]
            header += bytes(64)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(max(0, whole))


@pytest.mark.parametrize("seed", range(8))
def test_damaged_gguf_files(gguf_drafter, tmp_path, seed):
    chance, path = random.Random(seed), tmp_path / "tiny.gguf"
    for _ in range(SEVERAL):
        gguf_case(path, gguf_drafter, chance)
        with one_line_or_loads():
            survey(path)


@pytest.mark.slow
def test_three_thousand_damaged_gguf_files(gguf_drafter, tmp_path):
    chance, path = random.Random(99), tmp_path / "tiny.gguf"
    for _ in range(3000):
        gguf_case(path, gguf_drafter, chance)
        with one_line_or_loads():
            survey(path)
