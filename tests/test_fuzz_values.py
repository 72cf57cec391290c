"""Weights that are no numbers are named at load; absurd ones by the doctor, and change no token."""

import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from families import FAMILIES, ORACLES, tiny_trained_target
from safetensors.numpy import load_file, save_file
from target_files import HF_TARGETS, copy_target, write_gguf

from dflash_jax import generate, load_draft, load_target, save_draft
from dflash_jax.cli import main
from dflash_jax.doctor.tensors import check_target, check_tensors
from dflash_jax.gguf_file import GGUFFile
from dflash_jax.leaves import check_finite
from dflash_jax.targets.gguf import load_gguf
from dflash_jax.tensor_files import TensorFiles

TINY = ORACLES / "tiny"
PROMPT = list(b"def add(first, second):\n    return first + second\n\n\ndef sub(")
UP = "layers.1.mlp.up_proj.weight"
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


def absurd(scale):
    return lambda x: (x * np.float32(scale)).clip(-3e38, 3e38)


BAD = {"nan": np.nan, "-nan": -np.nan, "inf": np.inf, "-inf": -np.inf}
ABSURD = {
    "zero": np.zeros_like,
    "denormal": lambda x: np.sign(x) * np.float32(1e-40),
    "1e20": absurd(1e20),
    "1e38": lambda x: np.sign(x) * np.float32(1e38),
}


def spoiled(value):
    """A tensor with one bad number, at its end."""

    def change(x):
        x = x.copy()
        x.flat[-1] = value
        return x

    return change


@pytest.fixture
def changed(tmp_path):
    """A tiny checkpoint, in f32, with one tensor changed."""

    def write(name, tensor, change):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        shutil.copy(TINY / name / "config.json", directory)
        tensors = {n: x.astype(np.float32) for n, x in load_file(sound(name)).items()}
        save_file(tensors | {tensor: change(tensors[tensor])}, directory / "model.safetensors")
        return directory

    return write


def sound(name):
    return TINY / name / "model.safetensors"


def of_first_layer(name):
    """Tensors of the first layer, and all that belong to none."""
    return sorted(n for n in load_file(sound(name)) if "layers." not in n or "layers.0." in n)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
def test_every_bit_pattern_that_is_no_number_is_found(dtype):
    """By the integers' largest: both signs, and the numbers next to infinity are fine."""
    info = ml_dtypes.finfo(dtype)
    fine = np.array([[0, -0.0, 1, info.max], [info.min, info.tiny, -1, -info.tiny]], dtype)
    check_finite(fine, "x")
    check_finite(fine[:0], "x")
    check_finite(np.arange(3), "x")
    for value in BAD.values():
        for place in np.ndindex(fine.shape):
            bad = fine.copy()
            bad[place] = value
            where = rf"\[{place[0] + 10}, {place[1]}\]"
            with pytest.raises(ValueError, match=rf"^x: expected finite {bad.dtype}, .*{where}$"):
                check_finite(bad, "x", (10, 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafters_tensor_that_is_not_finite_is_named(changed, family):
    values = list(BAD.values())
    for i, name in enumerate(of_first_layer(family)):
        directory = changed(family, name, spoiled(values[i % len(values)]))
        with pytest.raises(ValueError, match=rf"{family}: {name}: expected finite float32, found"):
            load_draft(directory, dtype="float32")
        assert name in named(directory)


def test_a_targets_tensor_that_is_not_finite_is_named(tmp_path):
    for name in load_file(HF_TARGETS / "llama3" / "model.safetensors"):
        directory = copy_target(
            "llama3",
            tmp_path,
            tensors=lambda held: held | {name: spoiled(np.inf)(held[name])},  # noqa: B023
        )
        with pytest.raises(ValueError, match=rf"{name}: expected finite float32, found inf at \["):
            load_target(directory, dtype="float32")


def test_a_gguf_targets_tensor_that_is_not_finite_is_named(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    directory = copy_target(
        "llama3",
        tmp_path / "hf",
        tensors=lambda held: held | {name: spoiled(np.nan)(held[name])},
        **PLAIN,
    )
    path = write_gguf(tmp_path / "t.gguf", directory, "llama")
    with pytest.raises(ValueError, match=r"t\.gguf: blk\.1\.ffn_up\.weight: expected finite"):
        load_gguf(path)


@pytest.mark.parametrize("precision", ["float", "q8_0", "int8"])
def test_a_block_whose_scale_is_not_finite_is_named(tmp_path, precision):
    path = tmp_path / "d.gguf"
    save_draft(load_draft(TINY / "dflash", dtype="float32", precision="q8_0"), path)
    start, _ = GGUFFile(path)._extent(UP)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(np.float16(np.nan).tobytes())
    with pytest.raises(ValueError, match=rf"d\.gguf: {UP}.*: expected finite"):
        load_draft(path, precision=precision)


@pytest.mark.parametrize("precision", ["int8", "q8_0", "q4_0"])
def test_what_is_not_finite_is_named_before_it_is_quantised(changed, precision):
    """Integers of a NaN would be numbers like any other."""
    directory = changed("dflash", UP, spoiled(np.nan))
    with pytest.raises(ValueError, match=rf"dflash: {UP}: expected finite float32, found nan"):
        load_draft(directory, precision=precision)


def test_a_number_that_the_dtype_cannot_hold_is_named(changed):
    directory = changed("dflash", UP, spoiled(1e5))
    assert load_draft(directory, dtype="bfloat16").dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=rf"{UP}: expected finite float16, found inf at"):
        load_draft(directory, dtype="float16")


def test_a_drafter_of_one_file_is_looked_at_too(changed, tmp_path):
    draft = load_draft(changed("dflash", UP, np.zeros_like), dtype="float32")
    bad = draft.replace(norm=draft.norm.at[3].set(jnp.nan))
    save_draft(bad, tmp_path / "bad.gguf")
    with pytest.raises(ValueError, match=r"bad\.gguf: norm\.weight: expected finite .* at \[3\]"):
        load_draft(tmp_path / "bad.gguf")


def test_the_command_prints_one_line_and_exits_2(changed, capsys):
    draft = changed("dflash", UP, spoiled(-np.inf))
    command = ["generate", "1 2", "--ids", "--target", str(TINY / "target"), "--draft", str(draft)]
    assert main(command) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"dflash-jax: {draft}: {UP}: expected finite float32, found -inf at [")
    assert line.count("\n") == 1


# --- finite, and absurd ---------------------------------------------------------------------------


def none_is_silent(changed, family, names):
    target = tiny_trained_target()
    plain = generate(target, None, PROMPT, 12).token_ids
    for kind, change in ABSURD.items():
        for name in names:
            directory = changed(family, name, change)
            draft = load_draft(directory, target, dtype="float32")
            try:
                drafted = generate(target, draft, PROMPT, 12).token_ids
            except ValueError as error:
                assert "non-finite draft logits: sequence 0, draft " in str(error)  # noqa: PT017
            else:
                assert drafted == plain
            assert kind in LITTLE.get(name, ()) or name in named(directory), (kind, name)


def named(directory):
    return {finding.name for finding in check_tensors(TensorFiles(directory))}


LITTLE = {"confidence_head.proj.bias": ("zero", "denormal")}
"""What a single number may be."""


def test_absurd_weights_are_named_by_the_doctor_and_change_no_token(changed):
    none_is_silent(changed, "dflash", of_first_layer("dflash")[::5])


def test_a_single_absurd_number_is_named(changed):
    bias = "confidence_head.proj.bias"
    assert bias in named(changed("dspark", bias, ABSURD["1e20"]))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_absurd_tensor_is_named_and_changes_no_token(changed, family):
    none_is_silent(changed, family, of_first_layer(family))


@pytest.mark.parametrize("kind", ["zero", "1e20"])
def test_the_doctor_names_what_a_target_cannot_mean(changed, kind):
    directory = changed("target", "model.layers.2.mlp.down_proj.weight", ABSURD[kind])
    (finding,) = check_target(load_target(directory).target)
    assert (finding.where, finding.name) == ("target", "layers.2.down")
    assert finding.text.startswith("every value is 0" if kind == "zero" else "values up to ")
    assert check_target(tiny_trained_target()) == []


def test_a_targets_own_overflow_is_named_and_nothing_is_made_of_it(changed):
    """Drafted or not: greedy decoding takes no argmax of NaN."""
    directory = changed("target", "model.norm.weight", ABSURD["1e38"])
    target = load_target(directory).target
    with pytest.raises(ValueError, match="non-finite target logits: sequence 0, verify row 0"):
        generate(target, None, PROMPT, 4)
