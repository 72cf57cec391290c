"""A GGUF file, the one-file format of llama.cpp, as named tensors and metadata.

The header is read here: the `gguf` package's reader makes several arrays of every vocabulary
entry, which takes seconds, and follows a damaged count as far as it goes. Its tables of
quantised types and its dequantisation are used.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_jax import quant
from dflash_jax.extras import require
from dflash_jax.integers import round_up
from dflash_jax.keys import printable
from dflash_jax.leaves import ALL
from dflash_jax.quant import QuantizedLinear


class GGUFFile:
    """A GGUF file: `metadata` (key -> value) and its tensors, dequantised one at a time.

    Raises FileNotFoundError, ValueError for a file that is damaged or cut short, and
    ModuleNotFoundError with the install command where the `gguf` package is missing.
    """

    def __init__(self, path: str | Path):
        self.directory = Path(path)
        if not self.directory.is_file():
            raise FileNotFoundError(f"expected a GGUF file {path}, found nothing")
        self._gguf = require("gguf", "gguf")
        try:
            self._data = np.memmap(self.directory, mode="r")
            self._read_header()
        except ValueError as error:
            raise ValueError(f"{path}: not a readable GGUF file ({printable(error)})") from None

    def _read_header(self) -> None:
        header = _Header(self._data.data)
        if header.take(4) != b"GGUF":
            raise ValueError("expected it to begin with 'GGUF'")
        version = header.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"expected version 2 or 3, found {version}")
        tensors, keys = header.scalar("Q"), header.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            name = header.string()
            self.metadata[name] = header.value(header.scalar("I"))
        infos = [header.tensor() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment: expected a positive number, found {alignment!r}")
        base = round_up(header.at, alignment)
        self._tensors = {name: (shape, kind, base + at) for name, shape, kind, at in infos}
        for name in self._tensors:
            end = sum(self._extent(name))
            if end > self._data.size:
                raise ValueError(f"{name} ends at byte {end}, the file at {self._data.size}")

    def names(self) -> set[str]:
        """Every tensor name of the file."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, slowest axis first (the file lists it fastest first)."""
        return self._tensors[name][0]

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> np.ndarray:
        """The tensor, or some rows and columns of it, in f32, whatever ggml type it is stored in;
        32-bit integers as they are.

        Blocks of a quantised type run along a row: rows are dequantised whole.
        """
        shape, stored = self.shape(name), self._bytes(name)
        ggml_type = self._gguf.GGMLQuantizationType[self.dtype(name)]
        if len(shape) > 1:
            stored = stored[rows]
        if ggml_type.name == "I32":
            return stored.view(np.int32)
        try:
            values = self._gguf.dequantize(stored, ggml_type)
        except NotImplementedError:
            raise NotImplementedError(
                f"{self.directory}: {name}: the gguf package does not dequantise {ggml_type.name}"
            ) from None
        values = values.astype(np.float32, copy=False)
        if len(shape) == 1:
            return values.reshape(shape)[rows]
        return values.reshape(-1, *shape[1:])[:, columns]

    def dtype(self, name: str) -> str:
        """The ggml type's name: "F32", "BF16", "Q8_0", ..."""
        return self._gguf.GGMLQuantizationType(self._tensors[name][1]).name

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor in the file."""
        return self._extent(name)[1]

    def quantized(self, name: str) -> QuantizedLinear | None:
        """A q8_0 or q4_0 tensor, its integers and scales as they are; None for any other type."""
        kind = self.dtype(name).lower()
        if kind not in ("q8_0", "q4_0"):
            return None
        return quant.check(quant.from_blocks(self._bytes(name), kind), f"{self.directory}: {name}")

    def _bytes(self, name: str) -> np.ndarray:
        """uint8 `[..., bytes of a row]`."""
        start, size = self._extent(name)
        return np.asarray(self._data[start : start + size]).reshape(*self.shape(name)[:-1], -1)

    def _extent(self, name: str) -> tuple[int, int]:
        """First byte and bytes of a tensor."""
        shape, kind, start = self._tensors[name]
        try:
            block, size = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise ValueError(f"{name}: ggml type {kind} is unknown to the gguf package") from None
        if shape[-1] % block:
            raise ValueError(f"{name}: expected rows of blocks of {block}, found {list(shape)}")
        return start, math.prod(shape) // block * size


class _Header:
    """Reads the header front to back; running past the end is a ValueError."""

    SCALARS = ("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d")
    """struct codes of the value types 0..12; 8 is a string, 9 an array."""

    def __init__(self, data: memoryview):
        self._data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise ValueError(f"it ends at byte {len(self._data)}, inside its header")
        self.at += size
        return bytes(self._data[self.at - size : self.at])

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.string()
        if kind == 9:
            return self.array(self.scalar("I"), self.scalar("Q"))
        return self.scalar(self._code(kind))

    def array(self, kind: int, count: int) -> list[Any]:
        if kind == 8:
            return [self.string() for _ in range(count)]
        dtype = np.dtype("<" + self._code(kind))
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (slowest axis first), ggml type, offset in the data."""
        name = self.string()
        axes = self.scalar("I")
        if not 1 <= axes <= 4:
            raise ValueError(f"{name}: expected 1 to 4 axes, found {axes}")
        dims = [self.scalar("Q") for _ in range(axes)]
        return name, tuple(reversed(dims)), self.scalar("I"), self.scalar("Q")

    def _code(self, kind: int) -> str:
        code = self.SCALARS[kind] if kind < len(self.SCALARS) else None
        if code is None:
            raise ValueError(f"value type {kind} is unknown")
        return code


def write_gguf(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Any]) -> None:
    """Write a drafter's file: architecture "dflash", `metadata`, and named tensors.

    A tensor is a numpy array of floats or int32, or a `QuantizedLinear` of q8_0 or q4_0, whose
    numbers are written as they are. ModuleNotFoundError where the `gguf` package is missing.
    """
    gguf = require("gguf", "gguf")
    writer = gguf.GGUFWriter(path, "dflash")
    for name, value in metadata.items():
        writer.add_string(name, value)
    for name, tensor in tensors.items():
        kind = None
        if isinstance(tensor, QuantizedLinear):
            kind = tensor.precision.upper()
            tensor = quant.to_blocks(tensor)
        elif tensor.dtype == ml_dtypes.bfloat16:
            kind = "BF16"
            tensor = np.ascontiguousarray(tensor).view(np.uint8)
        raw = None if kind is None else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, tensor, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
