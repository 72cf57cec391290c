"""Damaged files of prompts, ranks and training data: they serve, or end in one line."""

import argparse
import copy
import io
import json
import random
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
from damage import encoded, mutate, one_line_or_loads
from families import ORACLES, tiny_trained_target
from targets import tiny_draft

from dflash_jax.arrays import read_npy, read_npz
from dflash_jax.cli import main
from dflash_jax.cli.prompts import request_of
from dflash_jax.corpus import Corpus, corpus_from_records
from dflash_jax.doctor.texts import read_prompts
from dflash_jax.head import draft_ids, read_ranks
from dflash_jax.ranks import corpus_ranks
from dflash_jax.records import kind_of, prompt_ids, read_records
from dflash_jax.sampling import SamplingParams
from dflash_jax.targets.loading import LoadedTarget
from dflash_jax.training import TrainState, restore_state, save_state

SEVERAL = 40
"""Cases a seed: 5 seeds of each kind by default, 100 in the slow tests."""
ROWS = 300
TINY = ORACLES / "tiny"
RECORDS = [
    {"prompt_ids": [1, 2, 3], "max_new_tokens": 4, "temperature": 0.5, "top_p": 0.9, "kind": "a"},
    {"prompt": "Hi", "answer": "you", "seed": 7, "logit_bias": {"3": 1.0}, "kind": "b"},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
        ],
        "repeat_penalty": 1.1,
    },
    {"prompt_ids": [5], "answer_ids": [6, 7], "top_k": 3, "min_p": 0.1},
]
KEYS = ("prompt", "messages", "prompt_ids", "answer_ids", "answer", "kind", "role", "content")
ARGS = argparse.Namespace(no_chat=False, ids=False, template_arg=[], max_new_tokens=8)


class Letters:
    """A codec of single characters."""

    template = "{{ messages }}"

    def encode_plain(self, text):
        return [ord(c) % 264 for c in text]

    def encode_chat(self, messages):
        return self.encode_plain("".join(m["role"] + str(m.get("content")) for m in messages))

    encode = encode_plain


@pytest.fixture(scope="module")
def models():
    """With a tokenizer and without."""
    target = tiny_trained_target()
    return [LoadedTarget(target, codec, "tiny") for codec in (Letters(), None)]


def records_case(path, chance):
    """A few records, one of them with faults, in a file that may be damaged too."""
    lines = [encoded(record, chance, False) for record in RECORDS]
    record = copy.deepcopy(chance.choice(RECORDS))
    for _ in range(chance.choice([1, 1, 2])):
        mutate(record, chance, KEYS)
    lines.insert(chance.randrange(5), encoded(record, chance, chance.random() < 0.15))
    path.write_bytes(b"\n".join(lines))


def fuzz_records(models, path, seed):
    chance = random.Random(seed)
    for _ in range(SEVERAL):
        records_case(path, chance)
        for loaded in models:
            codec = loaded.text
            for use in (
                lambda: [
                    request_of(r, loaded, ARGS, [3], SamplingParams())  # noqa: B023
                    for r in read_records(path)
                ],
                lambda: corpus_from_records(read_records(path), codec, 64, [1]),  # noqa: B023
                lambda: corpus_ranks(path, codec, 264),  # noqa: B023
                lambda: read_prompts(path, loaded),  # noqa: B023
                lambda: [kind_of(r) for r in read_records(path)],
            ):
                with one_line_or_loads():
                    use()


@pytest.mark.parametrize("seed", range(5))
def test_damaged_records(models, tmp_path, seed):
    fuzz_records(models, tmp_path / "records.jsonl", seed)


@pytest.mark.slow
def test_four_thousand_damaged_files_of_records(models, tmp_path):
    for seed in range(1000, 1100):
        fuzz_records(models, tmp_path / "records.jsonl", seed)


def odd_array(chance):
    """An array as nobody would store it."""
    return chance.choice(
        [
            np.arange(6),
            np.arange(6).reshape(2, 3).astype(chance.choice(["u2", "f4", "i8", "?", "c8", "u8"])),
            np.zeros((0, 4), np.int32),
            np.zeros((3, 0), np.int32),
            np.float64(np.nan),
            np.array(["a", "b"]),
            np.array([2**63, 1], np.uint64),
            np.array([-1, 5]),
            np.array([[None, 1]], object),
            np.zeros(3, [("a", "i4")]),
            np.array("2020", "M8[Y]"),
            np.full((2, 3), -7),
        ]
    )


def hurt(data: bytes, chance: random.Random) -> bytes:
    """Bytes changed, cut away or put in; the header is where it matters."""
    for _ in range(chance.choice([0, 1, 1, 4])):
        at = chance.randrange(min(len(data), chance.choice([12, 130, len(data)])) or 1)
        kind = chance.randrange(4)
        if kind == 0:
            data = data[:at]
        elif kind == 1:
            data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
        elif kind == 2:
            digits = chance.choice([b"9" * 12, b"-1", b"0", b"None", b"(", b"1e9"])
            data = data[:at] + digits + data[at + len(digits) :]
        else:
            data = data[:at] + bytes(8) + data[at:]
    return data


def array_file(chance, arrays=None) -> bytes:
    buffer = io.BytesIO()
    if arrays is None:
        np.save(buffer, odd_array(chance), allow_pickle=True)
    else:
        chance.choice([np.savez, np.savez_compressed])(buffer, **arrays)
    return hurt(buffer.getvalue(), chance)


def train_state(moments=(1.0, 2.0)):
    """A run's state of a tiny drafter; what stands for the optimizer's: `moments`."""
    draft = tiny_draft()
    return TrainState(draft, draft, {"mu": jnp.asarray(moments)}, jnp.int32(3))


def fuzz_arrays(directory, seed):
    chance, kept, state = random.Random(seed), train_state(), directory / "state.npz"
    save_state(kept, state)
    leaves = read_npz(state)
    for _ in range(SEVERAL):
        damaged = dict(leaves)
        name = chance.choice(["config", *leaves])
        if chance.random() < 0.3:
            del damaged[name]
        elif name == "config" and chance.random() < 0.7:
            told = hurt(str(leaves[name]).encode(), chance).decode(errors="replace")
            damaged[name] = np.array(told)
        elif chance.random() < 0.7:
            damaged[name] = odd_array(chance)
        state.write_bytes(array_file(chance, damaged))
        with one_line_or_loads(naming=str(state)):
            restore_state(kept, state)
        npy, npz, text = (directory / f"file.{end}" for end in ("npy", "npz", "txt"))
        npy.write_bytes(array_file(chance))
        arrays = {
            "ids": np.arange(6).reshape(2, 3),
            "segment": np.ones((2, 3), np.uint8),
            "answer": np.ones((2, 3), bool),
        }
        name = chance.choice(list(arrays))
        if chance.random() < 0.6:
            arrays[name] = odd_array(chance)
        elif chance.random() < 0.3:
            del arrays[name]
        npz.write_bytes(array_file(chance, arrays))
        words = ["1", "2", "-1", "x", "9" * 5000, "1.5", "٣", "\x00", str(2**64), "\x1b[2J", "\n"]
        text.write_text(" ".join(chance.choice(words) for _ in range(4)), encoding="utf-8")
        with one_line_or_loads(naming=str(npy)):
            read_ranks(npy)
        with one_line_or_loads(naming=str(text)):
            read_ranks(text)
        with one_line_or_loads(naming=str(npz)):
            corpus = Corpus.load(npz)
            assert corpus.batch(0, 2, 0).ids.shape == (2, 3)
        with one_line_or_loads():
            corpus_ranks(npz, None, 264)


@pytest.mark.parametrize("seed", range(5))
def test_damaged_arrays(tmp_path, seed):
    fuzz_arrays(tmp_path, seed)


@pytest.mark.slow
def test_four_thousand_damaged_arrays(tmp_path):
    for seed in range(1000, 1100):
        fuzz_arrays(tmp_path, seed)


# --- by name --------------------------------------------------------------------------------------


def test_arrays_come_back(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(3))
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    np.testing.assert_array_equal(read_npy(tmp_path / "a.npy"), [0, 1, 2])
    np.testing.assert_array_equal(read_npz(tmp_path / "a.npz")["x"], [0, 1, 2])
    for read, name in ((read_npy, "a.npz"), (read_npz, "a.npy")):
        with pytest.raises(ValueError, match=rf"{name}: not a readable"):
            read(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"b\.npz: expected a file, found nothing"):
        read_npz(tmp_path / "b.npz")


def test_a_stored_array_of_objects_is_not_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([print], object))
    with pytest.raises(ValueError, match=r"a\.npz: not a readable \.npz \(Object arrays cannot"):
        read_npz(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as file:
        file.writestr("ids.npy", "some text")
    with pytest.raises(ValueError, match=r"b\.npz: not a readable \.npz \(the magic string"):
        Corpus.load(tmp_path / "b.npz")


def test_a_state_that_is_not_finite_is_not_gone_on_from(tmp_path):
    state = train_state([1.0, jnp.nan])
    save_state(state, tmp_path / "state.npz")
    with pytest.raises(ValueError, match=r"state\.npz: opt_state\.mu: expected finite float32"):
        restore_state(state, tmp_path / "state.npz")


@pytest.mark.parametrize("kind", [[1], {"a": 1}, None, 5])
def test_a_kind_that_is_no_text_is_named(tmp_path, kind):
    """Reports are grouped by it, once the training is over."""
    path = tmp_path / "records.jsonl"
    path.write_text("\n" + json.dumps({"prompt_ids": [1], "kind": kind}))
    (record,) = read_records(path)
    with pytest.raises(ValueError, match=r"records\.jsonl:2: kind: expected text, found "):
        kind_of(record)


@pytest.mark.parametrize(
    "turn", [{"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": 5}]
)
def test_a_turn_without_a_text_is_named(turn):
    """A template would print nothing there, or "None"."""
    with pytest.raises(ValueError, match="data: messages: expected turns with a content, found"):
        prompt_ids({"messages": [turn]}, Letters())
    assert prompt_ids({"messages": [{"role": "assistant", "content": "x", "n": 1}] * 2}, Letters())


def test_corpora_of_two_lengths_do_not_join():
    def corpus(width):
        return Corpus(*(np.ones((2, width), dtype) for dtype in (np.int32, np.uint8, bool)))

    with pytest.raises(ValueError, match=r"corpus: expected rows of one length, found \[3, 4\]"):
        Corpus.join([corpus(4), corpus(3)])


@pytest.mark.parametrize("rows", ["0", "265", "x", "1.5", "-3", "9" * 20, ""])
def test_the_rows_of_a_head_are_a_number_of_tokens(rows, capsys):
    command = ["generate", "1 2", "--ids", "--target", str(TINY / "target"), "--draft"]
    assert main([*command, str(TINY / "dflash"), f"--draft-head-rows={rows}"]) == 2
    line = capsys.readouterr().err
    assert "head" in line and "rows: expected " in line and "found " in line
    assert line.count("\n") == 1


@pytest.mark.parametrize("ranks", [[*range(5), 4], [264], [-1], [], [None], [1.5], [[1]]])
def test_ranks_are_distinct_ids_of_the_target(ranks):
    with one_line_or_loads():
        draft_ids(tiny_trained_target(), 1, ranks)
        pytest.fail("taken")
