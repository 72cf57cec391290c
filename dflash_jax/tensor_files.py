"""Named tensors on disk, of a drafter or a target, whatever the format: found, checked and read."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from dflash_jax import quant
from dflash_jax.keys import printable, read_json
from dflash_jax.leaves import ALL, Entry
from dflash_jax.quant import QuantizedLinear

FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)
COMPARED = 4096
"""Rows of two tables that are compared at once."""
INTEGERS = ("I8", "U8")
"""Dtypes that quantised matrices are stored in."""
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
        bits, stored = re.search(r"[0-9]+", self.dtype(name)), self._slice(name).get_shape()
        return math.prod(stored) * (int(bits.group()) if bits else 8) // 8

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
