"""Drafter checkpoints: files <-> pytree, driven by one table of names and shapes.

`tables.tensor_table` says, for every tensor a family has on disk, its exact shape and where it
lives in the pytree. Loading, saving, the census gate and its error texts all read that table.
"""

import dataclasses
import functools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dflash_jax import quant, sharding
from dflash_jax.config import DFlashConfig, DSparkConfig, MarkovKind
from dflash_jax.config_json import config_dict, parse_config, read_config
from dflash_jax.draft import DFlashDraft, abstract
from dflash_jax.gguf_file import GGUFFile, write_gguf
from dflash_jax.head import D2T, LM_HEAD, draft_ids, own_head_rows, read_d2t, trim_head
from dflash_jax.keys import decode_json, printable, read_json
from dflash_jax.leaves import ALL, check_finite, load_tree
from dflash_jax.quant import Precision, QuantizedLinear
from dflash_jax.sharding import named_leaves
from dflash_jax.tables import (
    CONFIDENCE,
    DSPARK_KEYS,
    FAMILY_PARTS,
    MARKOV,
    MARKOV_IN,
    MARKOV_OUT,
    MIXES,
    Entry,
    tensor_table,
)

ASSETS = Path(__file__).parent / "assets"
FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)
COMPARED = 4096
"""Rows of two tables that are compared at once."""
INTEGERS = ("I8", "U8")
"""Dtypes that quantised matrices are stored in."""
STORED = re.compile("F32|F16|BF16|I8|U8|.*Q.*")
"""Dtypes that weights are stored in; those with a Q are GGUF's blocks."""
GGUF_CONFIG = "dflash.config"
"""Metadata key of a drafter's config (its JSON text) in a GGUF file."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
"""A shard's file name. It lies beside its index: no path leads anywhere else."""


def compute_dtype(dtype: Any = None) -> jnp.dtype:
    """The dtype weights are held in: the given one, else f32 on a CPU and bf16 elsewhere."""
    if dtype is not None:
        try:
            known = jnp.dtype(dtype)
        except TypeError:
            known = None
        if known is None or not jnp.issubdtype(known, jnp.floating):
            raise ValueError(f"dtype: expected a floating-point type, found {dtype!r}")
        return known
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


class TensorSource(Protocol):
    """Named tensors on disk: what `check_shapes` and `load_tree` read, whatever the format."""

    directory: Path
    """Where the tensors lie (a directory or one file), for error texts."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str: ...

    def nbytes(self, name: str) -> int: ...

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> np.ndarray: ...

    def quantized(self, name: str) -> QuantizedLinear | None: ...


class TensorFiles:
    """The safetensors of one directory, single or index-sharded, read tensor by tensor."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._open: dict[str, Any] = {}
        self._file_of = self._locate()

    def _locate(self) -> dict[str, str]:
        index = self.directory / INDEX
        if index.is_file():
            table = read_json(index).get("weight_map")
            names = list(table.values()) if isinstance(table, dict) else [None]
            sound = all(isinstance(name, str) and SHARD.fullmatch(name) for name in names)
            if not isinstance(table, dict) or not sound:
                raise ValueError(f"{index}: expected JSON with a weight_map of file names")
            missing = sorted({f for f in table.values() if not (self.directory / f).is_file()})
            if missing:
                raise FileNotFoundError(
                    f"{index}: expected shards beside it, missing {listing(missing)}"
                )
            return table
        if not (self.directory / WEIGHTS).is_file():
            raise FileNotFoundError(
                f"{self.directory}: expected {WEIGHTS} or {INDEX}, found neither"
            )
        return dict.fromkeys(self._handle(WEIGHTS).keys(), WEIGHTS)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = self._opened(file)
        return self._open[file]

    def _opened(self, file: str) -> Any:
        try:
            return safe_open(self.directory / file, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{self.directory / file}: not safetensors ({printable(error)})"
            ) from None

    def names(self) -> set[str]:
        """Every tensor name of the directory."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape from the header, without reading the data; a quantised matrix's own `[out, in]`."""
        shape, scales = tuple(self._slice(name).get_shape()), name + quant.SCALE
        if self.dtype(name) == "U8" and scales in self._file_of:
            blocks = self._slice(scales).get_shape()
            if len(shape) == len(blocks) == 2:
                return shape[0], quant.BLOCK * blocks[1]
        return shape

    def dtype(self, name: str) -> str:
        """Dtype from the header in safetensors spelling: "BF16", "F32", "I8", ..."""
        return self._slice(name).get_dtype()

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor on disk, from the header."""
        bits = re.search(r"[0-9]+", self.dtype(name))
        return math.prod(self.shape(name)) * (int(bits.group()) if bits else 8) // 8

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> np.ndarray:
        """The tensor, or some of its rows and columns, as a numpy array (bf16 by ml_dtypes).

        Through a mapping of its own, closed again: a file's pages would stay in memory as long as
        the file is open, which adds up to the whole checkpoint.
        """
        with self._opened(self._file_of[name]) as handle:
            tensor = handle.get_slice(name)
            shape = tensor.get_shape()
            index = [slice(*s.indices(n)) for s, n in zip((rows, columns), shape, strict=False)]
            return tensor[tuple(index)]

    def quantized(self, name: str) -> QuantizedLinear | None:
        """A quantised matrix, None for any other tensor; ValueError where its scales cannot be."""
        if self.dtype(name) not in INTEGERS:
            return None
        if name + quant.SCALE not in self._file_of:
            raise ValueError(f"{self.directory}: int8 tensors without scales {name}")
        values, scales = self.read(name), self.read(name + quant.SCALE)
        blocks = scales.ndim == 2
        precision = "int8" if not blocks else "q4_0" if values.dtype == np.uint8 else "q8_0"
        if precision == "int8" and scales.dtype in FLOATS:
            scales = scales.astype(np.float32)
        return quant.check(QuantizedLinear(values, scales, precision), f"{self.directory}: {name}")

    def _slice(self, name: str) -> Any:
        handle = self._handle(self._file_of[name])
        if name not in set(handle.keys()):
            raise ValueError(
                f"{self.directory}: {INDEX} puts {printable(name)} in {self._file_of[name]}, "
                "not found there"
            )
        return handle.get_slice(name)


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


def read_tensor(
    files: TensorSource, name: str, rows: slice = ALL, columns: slice = ALL
) -> np.ndarray:
    """One tensor or a part of it, dequantised (int8 rows to bf16, block formats to f32: always the
    same bits).
    """
    tensor = files.read(name, rows, columns)
    weight = files.quantized(name) if tensor.dtype in (np.int8, np.uint8) else None
    if weight is None:
        return tensor
    weight = weight.replace(values=weight.values[rows], scales=weight.scales[rows])
    if weight.precision == "int8":
        return quant.dequantize_rows(weight.values, weight.scales)[:, columns]
    return quant.dequantize(weight)[:, columns]


def check_shapes(files: TensorSource, table: Mapping[str, Entry]) -> None:
    """ValueError listing every tensor that is missing or has another shape than the table says."""
    missing = sorted(set(table) - files.names())
    if missing:
        raise ValueError(f"{files.directory}: missing tensors {listing(missing)}")
    wrong = [
        f"{name}: expected {list(entry.shape)}, found {list(files.shape(name))}"
        for name, entry in table.items()
        if files.shape(name) != entry.shape
    ]
    if wrong:
        raise ValueError(f"{files.directory}: {listing(wrong)}")


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


def read_floats(
    files: TensorSource, name: str, rows: slice = ALL, columns: slice = ALL
) -> np.ndarray:
    """`read_tensor`; ValueError for a tensor that is not stored as floats (or integers of them)."""
    tensor = read_tensor(files, name, rows, columns)
    if tensor.dtype not in FLOATS:
        raise ValueError(
            f"{files.directory}: {name}: expected F32, F16, BF16 or I8, found {tensor.dtype}"
        )
    return tensor


def listing(names: list[str], most: int = 8) -> str:
    """Names for an error text, the first few of a long list."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(printable(name, 80) or "''" for name in names[:most]) + more
