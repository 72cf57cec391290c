"""Drafter checkpoints: files <-> pytree, driven by one table of names and shapes.

`tables.tensor_table` says, for every tensor a family has on disk, its exact shape and where it
lives in the pytree. Loading, saving, the census gate and its error texts all read that table.
"""

import dataclasses
import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from dflash_jax import quant, sharding
from dflash_jax.config import DFlashConfig, DSparkConfig, MarkovKind
from dflash_jax.config_json import config_dict, parse_config, read_config
from dflash_jax.draft import DFlashDraft
from dflash_jax.gguf_file import GGUFFile, write_gguf
from dflash_jax.head import D2T, LM_HEAD, draft_ids, own_head_rows, read_d2t, trim_head
from dflash_jax.keys import decode_json
from dflash_jax.leaves import Entry, check_finite, load_tree
from dflash_jax.quant import Precision, QuantizedLinear
from dflash_jax.shapes import abstract
from dflash_jax.sharding import named_leaves
from dflash_jax.tables import (
    CONFIDENCE,
    DSPARK_KEYS,
    FAMILY_PARTS,
    MARKOV,
    MARKOV_IN,
    MARKOV_OUT,
    MIXES,
    tensor_table,
)
from dflash_jax.tensor_files import (
    COMPARED,
    INDEX,
    INTEGERS,
    WEIGHTS,
    TensorFiles,
    TensorSource,
    check_shapes,
    compute_dtype,
    listing,
    read_floats,
    read_tensor,
)

ASSETS = Path(__file__).parent / "assets"
STORED = re.compile("F32|F16|BF16|I8|U8|.*Q.*")
"""Dtypes that weights are stored in; those with a Q are GGUF's blocks."""
GGUF_CONFIG = "dflash.config"
"""Metadata key of a drafter's config (its JSON text) in a GGUF file."""


TARGET_COPIES = ("embed_tokens.weight", LM_HEAD)
"""Tensors of the target that some exports carry along: compared with it, then left alone."""


def load_draft(
    directory: str | Path,
    target: Any = None,
    dtype: Any = None,
    *,
    precision: Precision | Literal["float"] | None = None,
    head_rows: int | None = None,
    ranks: str | Path | Sequence[int] | None = None,
    mesh: Mesh | None = None,
    progress: bool | None = None,
) -> DFlashDraft:
    """Load a drafter: a directory with `config.json` beside `model.safetensors` (or shards).

    Args:
      directory: Hugging Face style, tensors in HF names, floats or quantised (see `quant`); or a
        `.gguf` file that `save_draft` wrote; or the name of a shipped drafter.
      target: a loaded target (see `targets.Target`); when given, the drafter is checked against
        it: hidden size, layer count, mask id, and any embedding or head the checkpoint carries.
      dtype: of the loaded weights; default f32 on a CPU, bf16 elsewhere.
      precision: what the projections are held in (see `quant`): "int8", "q8_0", "q4_0", or "float"
        for `dtype`. Default: what the config says, else floats. Integers that are stored in the
        precision that is asked for stay exactly what they are.
      head_rows, ranks: give the drafter a head over that many of the target's tokens, those first
        in `ranks` (see `head.draft_ids`); with head_rows the target's vocab_size, a quantised head
        of the whole vocabulary. Default: the target's head, or the checkpoint's own.
      mesh: what to split it over (`sharding.make_mesh`); default the target's.
      progress: whether a bar is drawn, see `progress.Progress`.

    Raises FileNotFoundError or ValueError naming what is missing, left over or misshapen.

    >>> draft = load_draft("my-drafter")            # doctest: +SKIP
    >>> draft.config.block_size                     # doctest: +SKIP
    16
    """
    found = survey_draft(directory, target, precision)
    files, trimmed = found.files, head_rows is not None or ranks is not None
    if target is not None:
        _compare_copies(files, target, skip=found.table)
    mesh = getattr(target, "mesh", None) if mesh is None else mesh
    shapes = found.abstract(compute_dtype(dtype))
    draft = load_tree(
        shapes,
        found.table,
        partial(read_floats, files),
        ready=_made(found, shapes, target),
        mesh=None if trimmed else mesh,
        source=files.directory,
        progress=progress,
    )
    if not trimmed:
        return draft
    if target is None:
        raise ValueError("head_rows: expected a target to take the rows from, found none")
    draft = trim_head(draft, target, draft_ids(target, head_rows, ranks))
    return draft if mesh is None else sharding.shard(draft, mesh)


def _made(found: "Survey", shapes: DFlashDraft, target: Any) -> dict[str, Callable[[], np.ndarray]]:
    """The leaves that are not rows of float tensors, by path: integers with scales, an own head's
    map, and a Markov table cut to that head's tokens.
    """
    files, config, table, made = found.files, found.config, found.table, {}

    @functools.lru_cache(maxsize=1)  # values and scales are read at once, and used one by one
    def quantized(leaf: str) -> QuantizedLinear:
        parts = {name: entry for name, entry in table.items() if entry.leaf == leaf}
        return read_quantized(files, parts, config.precision)

    for leaf in _quantized(shapes):
        made[leaf + ".values"] = lambda leaf=leaf: quantized(leaf).values
        made[leaf + ".scales"] = lambda leaf=leaf: quantized(leaf).scales
    if found.head_rows is None:
        return made
    offsets = read_d2t(files, target)
    made["head.d2t"] = lambda: offsets
    if _spans_target(files, config, found.head_rows):
        name = next(name for name, entry in table.items() if entry.leaf == "markov.w2")
        ids = offsets + np.arange(found.head_rows)
        made["markov.w2"] = lambda: read_floats(files, name)[ids]
    return made


class Survey(NamedTuple):
    """A drafter that passed every check but those that read its tensors.

    table: the tensors a drafter is made of, under the names the files use. head_rows: of its own
    reduced head, None where the target's is used. unused: tensors that nothing reads.
    """

    files: TensorSource
    config: DFlashConfig
    table: dict[str, Entry]
    head_rows: int | None
    unused: list[str]

    def abstract(self, dtype: Any = None, head_rows: int | None = None) -> DFlashDraft:
        """The shapes and dtypes that `load_draft` would load, with `head_rows` as there."""
        return abstract(self.config, compute_dtype(dtype), self.head_rows or head_rows)


def survey_draft(directory: str | Path, target: Any = None, precision: str | None = None) -> Survey:
    """Config and census of a drafter, from headers alone.

    `target` may be an abstract one; `precision` as in `load_draft`, which raises the same.
    """
    precision = quant.resolve_precision(precision)
    files, config = open_draft(draft_directory(directory), getattr(target, "token_to_id", None))
    held = config.precision if precision is None else precision
    config = dataclasses.replace(config, precision=None if held == quant.FLOAT else held)
    if config.dspark is not None:
        config = dataclasses.replace(config, dspark=_resolve_dspark(files, config.dspark))
    if target is not None:
        target.check_drafter(config)
    head_rows = own_head_rows(files, config, target)
    try:
        table = _names_on_disk(files, tensor_table(config, head_rows))
    except ValueError as error:
        raise ValueError(f"{files.directory}: {error}") from None
    if _spans_target(files, config, head_rows):
        shape = (config.vocabulary, table[MARKOV_OUT].shape[1])
        table[MARKOV_OUT] = dataclasses.replace(table[MARKOV_OUT], shape=shape)
    unused = _census(files, table, config)
    return Survey(files, config, table, head_rows, unused)


def open_draft(path: Path, token_to_id: Any = None) -> tuple[TensorSource, DFlashConfig]:
    """The tensors and the config of a drafter's directory or GGUF file."""
    if path.is_dir():
        return TensorFiles(path), read_config(path, token_to_id)
    file = GGUFFile(path)
    text = file.metadata.get(GGUF_CONFIG)
    if not isinstance(text, str):
        raise ValueError(f"{path}: expected a drafter (metadata {GGUF_CONFIG}), found none")
    try:
        return file, parse_config(decode_json(text), token_to_id)
    except ValueError as error:
        raise ValueError(f"{path}: {GGUF_CONFIG}: {error}") from None


def _quantized(shapes: DFlashDraft) -> set[str]:
    """Paths of the matrices that an `abstract` tree holds quantised."""
    return {path.removesuffix(".values") for path, _ in named_leaves(shapes) if ".values" in path}


def _spans_target(files: TensorSource, config: DFlashConfig, own_rows: int | None) -> bool:
    """Whether a Markov output table has a row a token of the target beside a smaller head."""
    if own_rows is None or MARKOV_OUT not in files.names() or own_rows == config.vocab_size:
        return False
    return files.shape(MARKOV_OUT)[:1] == (config.vocab_size,)


def shipped_drafts() -> list[str]:
    """Names of the drafters that come with the package (all for SmolLM2-135M-Instruct)."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def draft_directory(name: str | Path) -> Path:
    """The directory (or `.gguf` file) of a drafter: a shipped one's name, or a path.

    FileNotFoundError names what is shipped where neither is there.
    """
    if str(name) in shipped_drafts():
        return ASSETS / str(name)
    path = Path(name)
    if str(name) and (path.is_dir() or (path.suffix == ".gguf" and path.is_file())):
        return path
    raise FileNotFoundError(
        f"drafter: expected a directory or one of {shipped_drafts()} or a .gguf file, "
        f"found {str(name)!r}"
    )


def save_draft(draft: DFlashDraft, directory: str | Path, *, storage: str | None = None) -> None:
    """Save as a Hugging Face style directory that `load_draft` and public loaders read; or, where
    the name ends in `.gguf`, as one file of that format (which has no int8 rows).

    storage: None keeps floats' dtype and quantised projections as they are (the config then names
    their precision); "int8" writes a float drafter's matrices as int8 rows with f32 scales
    (`quant.quantize_rows`), norms as they are. A save that fails leaves what was there before.
    """
    if storage not in (None, "int8"):
        raise ValueError(f"storage: expected None or 'int8', found {storage!r}")
    precision, directory = draft.config.precision, Path(directory)
    if storage is not None and precision is not None:
        raise ValueError(f"storage: expected None for a drafter in {precision}, found {storage!r}")
    tensors = named_tensors(draft)
    config = json.dumps(config_dict(draft.config), indent=2, sort_keys=True) + "\n"
    if directory.suffix == ".gguf":
        if "int8" in (precision, storage):
            raise ValueError(f"{directory}: expected q8_0, q4_0 or floats in GGUF, found int8 rows")
        _replace({directory: lambda path: write_gguf(path, {GGUF_CONFIG: config}, tensors)})
        return
    if (directory / INDEX).exists():
        # Loaders would go by the index, and read what lay there before.
        raise ValueError(f"{directory}: expected no {INDEX} (another checkpoint's), found one")
    directory.mkdir(parents=True, exist_ok=True)
    stored = {}
    for name, tensor in tensors.items():
        if storage == "int8" and tensor.ndim == 2:
            tensor = quant.quantize(tensor, "int8")
        if isinstance(tensor, QuantizedLinear):
            stored[name], stored[name + quant.SCALE] = tensor.values, tensor.scales
        else:
            stored[name] = np.ascontiguousarray(tensor)
    _replace(
        {
            directory / WEIGHTS: lambda path: save_file(stored, path, metadata={"format": "pt"}),
            directory / "config.json": lambda path: path.write_text(config, encoding="utf-8"),
        }
    )


def _replace(writers: Mapping[Path, Callable[[Path], Any]]) -> None:
    """Write files under names of their own, and rename them once all are whole.

    What was there stays as it was where a write fails.
    """
    fresh = {path.with_name(f".{path.name}.{os.getpid()}.part"): path for path in writers}
    try:
        for part, path in fresh.items():
            writers[path](part)
        for part, path in fresh.items():
            part.replace(path)
    finally:
        for part in fresh:
            part.unlink(missing_ok=True)


def named_tensors(draft: DFlashDraft) -> dict[str, Any]:
    """Every tensor of a drafter under its checkpoint name: numpy arrays, and `QuantizedLinear`s of
    them.
    """
    rows = None if draft.head is None else draft.head.d2t.shape[0]
    leaves = {path: np.asarray(leaf) for path, leaf in named_leaves(sharding.whole(draft))}
    quantised, tensors = _quantized(draft), {}
    for name, entry in tensor_table(draft.config, rows).items():
        part = slice(entry.start, entry.start + entry.shape[0])
        if entry.leaf in quantised:
            values, scales = (leaves[f"{entry.leaf}.{f}"][part] for f in ("values", "scales"))
            assert draft.config.precision is not None
            tensors[name] = QuantizedLinear(values, scales, draft.config.precision)
        else:
            tensors[name] = leaves[entry.leaf][part]
    return tensors if rows is None else tensors | {D2T: leaves["head.d2t"]}


def read_quantized(
    files: TensorSource, table: Mapping[str, Entry], precision: Precision | None
) -> QuantizedLinear:
    """The integers and scales of the leaf that the tensors of `table` make, one under the other.

    Tensors stored in another form are quantised here.
    """
    assert precision is not None
    parts = []
    for name in sorted(table, key=lambda name: table[name].start):
        weight = files.quantized(name)
        if weight is None or weight.precision != precision:
            tensor = read_tensor(files, name)
            check_finite(tensor, f"{files.directory}: {name}")
            weight = quant.quantize(tensor, precision)
        parts.append(weight)
    values, scales = (
        np.concatenate([getattr(w, field) for w in parts]) for field in ("values", "scales")
    )
    return QuantizedLinear(values, scales, precision)


def _names_on_disk(files: TensorSource, table: Mapping[str, Entry]) -> dict[str, Entry]:
    """The table under the names this checkpoint uses, where it has a tensor by an alias."""
    names = files.names()
    return {
        next((n for n in (name, *entry.aliases) if n in names), name): entry
        for name, entry in table.items()
    }


def _resolve_dspark(files: TensorSource, stated: DSparkConfig) -> DSparkConfig:
    """What the tensors say of the heads; ValueError naming both where the config disagrees."""
    names = files.names()
    weight, norm = CONFIDENCE + "weight", "norm.weight"
    for name in {MARKOV_IN, MARKOV_OUT, weight} & names:
        if len(files.shape(name)) != 2:
            shape = list(files.shape(name))
            raise ValueError(f"{files.directory}: {name}: expected two axes, found {shape}")
    rank = files.shape(MARKOV_IN)[1] if MARKOV_IN in names else 0
    kinds: list[MarkovKind] = [k for k, mix in MIXES.items() if f"{MARKOV}{mix}.weight" in names]
    if len(kinds) > 1:
        raise ValueError(f"{files.directory}: expected one Markov head, found {kinds}")
    kind: MarkovKind = kinds[0] if kinds else "vanilla"
    confidence = weight in names
    plain = confidence and norm in names and files.shape(weight)[1:] == files.shape(norm)
    held = DSparkConfig(
        markov_head_type=kind,
        markov_rank=rank,
        confidence=confidence,
        confidence_with_markov=confidence and not plain,
    )
    for field in dataclasses.fields(held):
        says, has = getattr(stated, field.name), getattr(held, field.name)
        moot = field.name == "confidence_with_markov" and not confidence
        moot = moot or (field.name == "markov_head_type" and not rank)
        if says is not None and not moot and says != has:
            raise ValueError(
                f"{files.directory}: {DSPARK_KEYS[field.name]}: config.json says {says!r}, "
                f"the tensors say {has!r}"
            )
    return held


def _census(files: TensorSource, table: Mapping[str, Entry], config: DFlashConfig) -> list[str]:
    """The gate: every required tensor in its exact shape, every tensor in the file consumed.

    Returns, for a plain DFlash drafter, where they are no error, the tensors left over.
    """
    check_shapes(files, table)
    odd = [name for name in table if not STORED.fullmatch(files.dtype(name))]
    if odd:
        raise ValueError(
            f"{files.directory}: {odd[0]}: expected F32, F16, BF16 or I8, "
            f"found {files.dtype(odd[0])}"
        )
    scales = {name + quant.SCALE for name in table if files.dtype(name) in INTEGERS}
    lacking = sorted(scales - files.names())
    if lacking:
        raise ValueError(f"{files.directory}: int8 tensors without scales {listing(lacking)}")
    extra = files.names() - set(table) - scales
    foreign = sorted(n for n in extra if n.startswith(FAMILY_PARTS) or "_conv." in n)
    if foreign:
        raise ValueError(
            f"{files.directory}: config.json declares family {config.family!r}, found tensors of "
            f"another {listing(foreign)}"
        )
    left = sorted(extra - {*TARGET_COPIES, *({D2T} if LM_HEAD in table else ())})
    if left and config.family != "dflash":
        raise ValueError(f"{files.directory}: unused tensors {listing(left)}")
    if left:
        warnings.warn(f"{files.directory}: unused tensors {listing(left)}", stacklevel=4)
    return left


def _compare_copies(files: TensorSource, target: Any, skip: Iterable[str]) -> None:
    """Warn where a copy of the target's tables differs from the target's own, which is used."""
    for name in set(TARGET_COPIES) & files.names() - set(skip):
        own = target.embedding if name == TARGET_COPIES[0] else target.lm_head
        shape = files.shape(name)
        if len(shape) != 2 or shape[1:] != own.shape[1:]:
            raise ValueError(
                f"{files.directory}: {name}: expected [rows, {own.shape[1]}], found {list(shape)}"
            )
        if not _same_rows(files, name, own, min(own.shape[0], shape[0])):
            warnings.warn(
                f"{files.directory}: {name} differs from the target's; the target's is used",
                stacklevel=3,
            )


def _same_rows(files: TensorSource, name: str, own: jax.Array, rows: int) -> bool:
    """Whether a tensor's first rows are those of a table, looked at where each part of it lies."""
    for part in own.addressable_shards:
        first, last, _ = part.index[0].indices(rows)
        for at in range(first, last, COMPARED):
            end = min(at + COMPARED, last)
            copy = read_floats(files, name, slice(at, end)).astype(own.dtype, copy=False)
            if not np.array_equal(copy, np.asarray(part.data[at - first : end - first])):
                return False
    return True
