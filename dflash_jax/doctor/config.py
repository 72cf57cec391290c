"""What a drafter's config says, against itself, its tensors and the target."""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax import quant
from dflash_jax.checkpoint import GGUF_CONFIG, load_draft
from dflash_jax.config import DFlashConfig
from dflash_jax.doctor.report import Finding
from dflash_jax.draft import DFlashDraft
from dflash_jax.gguf_file import GGUFFile
from dflash_jax.keys import Keys, decode_json, read_json, table
from dflash_jax.targets import drafting_tables
from dflash_jax.targets.loading import LoadedTarget
from dflash_jax.tensor_files import TensorFiles, TensorSource

LARGEST_EPS = 1e-4
"""RMSNorm's epsilon in published models is 1e-5 or 1e-6."""


def load_and_listen(
    directory: Path, loaded: LoadedTarget, dtype: Any
) -> tuple[DFlashDraft | None, list[Finding]]:
    """The drafter (None where it does not load) and what the loader said on the way.

    A quantised one as the floats that its integers stand for: settings can be other weights, too.
    """
    draft, findings = None, []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            draft = load_draft(directory, loaded.target, dtype, precision=quant.FLOAT)
        except (ValueError, OSError, NotImplementedError) as error:
            findings.append(_from_loader(str(error), directory))
    for warning in said:
        if issubclass(warning.category, UserWarning):
            findings.append(_from_loader(str(warning.message), directory))
    return draft, findings


def _from_loader(text: str, directory: Path) -> Finding:
    """A loader's line, which names the key or tensor first."""
    for lead in (f"{directory / 'config.json'}: ", f"{directory}: "):
        text = text.removeprefix(lead)
    name, found, rest = text.partition(": ")
    if found and " " not in name:
        return Finding("loading", name, rest)
    return Finding("loading", "checkpoint", text)


def check_config(
    raw: Mapping[str, Any], config: DFlashConfig, loaded: LoadedTarget, target_raw: Mapping
) -> list[Finding]:
    """Statements that contradict one another, the target, or good sense."""
    found = [
        *check_rope_tables(raw),
        *check_mask(raw, config, loaded, target_raw),
        *check_numbers(config, loaded),
    ]
    return [Finding("config", name, text) for name, text in found]


def check_rope_tables(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """`rope_scaling` and `rope_parameters`, where a config has both."""
    old, new = table(raw, "rope_scaling"), table(raw, "rope_parameters")
    for key in sorted(set(old) & set(new)):
        if old[key] != new[key]:
            yield (
                "rope_scaling",
                f"says {key} {old[key]!r}, rope_parameters {new[key]!r}; using {new[key]!r}",
            )


def check_numbers(config: DFlashConfig, loaded: LoadedTarget) -> Iterator[tuple[str, str]]:
    """Epsilon and vocabulary."""
    target = loaded.target
    if config.rms_norm_eps > LARGEST_EPS:
        own = getattr(
            getattr(target, "config", None), "rms_norm_eps", None
        )  # not every one shows it
        theirs = "" if own is None else f" (the target's is {own:g})"
        yield "rms_norm_eps", f"{config.rms_norm_eps:g} is no small number{theirs}"
    rows = (target.vocab_size, drafting_tables(target).embedding.shape[0])
    if config.vocab_size is not None and config.vocab_size not in rows:
        yield (
            "vocab_size",
            f"{config.vocab_size}, the target has {rows[0]} tokens in {rows[1]} rows: "
            "another vocabulary?",
        )


def special_ids(target_raw: Mapping[str, Any], stops: tuple[int, ...]) -> dict[int, str]:
    """Ids the target's config gives a role."""
    named = dict.fromkeys(stops, "a stop token")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        value = target_raw.get(key)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int) and not isinstance(one, bool) and one >= 0:
                named.setdefault(one, f"its {key}")
    return named


def check_mask(
    raw: Mapping[str, Any],
    config: DFlashConfig,
    loaded: LoadedTarget,
    target_raw: Mapping[str, Any],
) -> Iterator[tuple[str, str]]:
    """A mask token should mean nothing else, and have an embedding."""
    mask, target, key = config.mask_token_id, loaded.target, "mask_token_id"
    special = special_ids(target_raw, target.stop_token_ids)
    if mask in special:
        yield key, f"{mask} is {special[mask]} of the target, expected a token without another use"
    elif loaded.text is not None:
        text = _ordinary(loaded.text, mask)
        if text is not None:
            yield key, f"{mask} is the target's ordinary token {text!r}"
    elif special and mask < target.vocab_size:
        # Without a tokenizer, what is known of the special tokens is where they lie.
        low, high = min(special), max(special)
        if high - low < 4 * len(special) and mask < low - 1:
            yield key, f"{mask} lies apart from the target's special tokens {sorted(special)}"
    embed = drafting_tables(target).embed
    row = np.asarray(embed(np.asarray([[mask]]))[0, 0], np.float32)
    if not row.any():
        yield key, f"{mask} has an embedding of zeros"
    name = Keys(raw, "dflash_config").get("mask_token")
    if isinstance(name, str) and loaded.text is not None:
        other = loaded.text.token_to_id(name)
        if other is not None and other != mask:
            yield key, f"{mask}, but mask_token {name!r} is {other} in the target's vocabulary"


def _ordinary(codec: Any, token: int) -> str | None:
    """A token's text where it is a piece of text like any other."""
    text = codec.decode([token], skip_special_tokens=True)
    name = codec.tokenizer.id_to_token(token) or ""
    bracketed = name[:1] + name[-1:] in ("<>", "[]")
    return None if not text.strip() or bracketed else text


def mask_candidates(
    config: DFlashConfig, loaded: LoadedTarget, target_raw: Mapping[str, Any], most: int = 16
) -> list[int]:
    """Ids that a mask token may be meant to have: neighbours, special ids, the tables' ends, names
    with "mask" in them.
    """
    target, mask = loaded.target, config.mask_token_id
    rows, special = target.config.embedding_rows, special_ids(target_raw, target.stop_token_ids)
    found = [mask + 1, mask - 1]
    if loaded.text is not None:
        vocabulary = loaded.text.tokenizer.get_vocab(with_added_tokens=True)
        found += sorted(i for name, i in vocabulary.items() if _names_a_mask(name))
    if special:
        found += [min(special) - 1, max(special) + 1]
    found += [target.vocab_size, target.vocab_size - 1, rows - 1, *sorted(special), 0]
    return [i for i in dict.fromkeys(found) if 0 <= i < rows and i != mask][:most]


def _names_a_mask(name: str) -> bool:
    return "mask" in name.lower() and name[:1] + name[-1:] in ("<>", "[]")


def open_tensors(path: Path) -> TensorSource:
    """A checkpoint's tensors: a directory's, or those of one GGUF file."""
    return GGUFFile(path) if path.suffix == ".gguf" else TensorFiles(path)


def raw_config(path: Path) -> Mapping[str, Any]:
    """A directory's config.json, or a GGUF drafter's; {} where there is none to read."""
    try:
        if path.suffix == ".gguf":
            return decode_json(GGUFFile(path).metadata[GGUF_CONFIG])
        return read_json(path / "config.json")
    except (OSError, ValueError, KeyError, TypeError):
        return {}
