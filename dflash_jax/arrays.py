"""Numpy's files, `.npy` and `.npz`: any damage is one line that names the file."""

import contextlib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dflash_jax.keys import reason_of


def read_npy(path: str | Path) -> np.ndarray:
    """The array of a `.npy` file; FileNotFoundError or ValueError naming it."""
    with _one_line(Path(path), ".npy"), Path(path).open("rb") as file:
        return np.lib.format.read_array(file)


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a `.npz` file by name; FileNotFoundError or ValueError naming it."""
    arrays = {}
    with _one_line(Path(path), ".npz"), zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                arrays[name.removesuffix(".npy")] = np.lib.format.read_array(file)
    return arrays


@contextlib.contextmanager
def _one_line(path: Path, kind: str) -> Iterator[None]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a file, found nothing")
    try:
        yield
    except Exception as error:  # of zip, zlib, struct, Python's parser: wherever damage leads
        raise ValueError(f"{path}: not a readable {kind} ({reason_of(error)})") from None
