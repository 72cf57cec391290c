"""From tensors in files to leaves on devices, one leaf at a time.

A leaf may be several tensors in a file (q, k and v) and, over a mesh, lie on several devices; each
device's part is read from where its rows are. So a model needs its own bytes of device memory, and
of host memory only what its largest leaf takes, and on a CPU, where both are one, little more than
its bytes.
"""

import dataclasses
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dflash_jax import sharding
from dflash_jax.progress import Progress

ALL = slice(None)
CHUNK = 32 << 20
"""Bytes of a leaf that are read at once: what is held beside the leaf while types are changed."""

Read = Callable[[str, slice, slice], np.ndarray]
"""`read(name, rows, columns)`: that part of a tensor, in any float type (vectors: rows alone)."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor in a file: its exact shape, the dotted path of its leaf, its first row there (in the
    order of one device), and other names that exports give it.
    """

    shape: tuple[int, ...]
    leaf: str
    start: int = 0
    aliases: tuple[str, ...] = ()


def load_tree(
    shapes: Any,
    table: Mapping[str, Entry],
    read: Read,
    *,
    ready: Mapping[str, Callable[[], np.ndarray]] | None = None,
    transform: Callable[[str, np.ndarray], np.ndarray] | None = None,
    mesh: Mesh | None = None,
    source: str | Path = "",
    progress: bool | None = None,
) -> Any:
    """The pytree of an `abstract` tree, on the device or split over a mesh.

    Args:
      shapes: shapes and dtypes of the leaves.
      table: tensor name -> `Entry`; together they fill every leaf that is not `ready`.
      read: reads a part of a tensor.
      ready: path -> what makes that leaf, in the layout of one device, once its turn comes.
      transform: applied to each tensor's rows, or to a device's share of them.
      mesh: see `sharding`, and `sharding.check` for what it does not divide.
      source: where the tensors come from, for the bar and error texts. progress: see
        `progress.Progress`.

    ValueError naming a tensor that holds what is not finite, as stored or in the dtype of `shapes`.
    """
    if mesh is not None:
        sharding.check(shapes, mesh)
    parts: dict[str, list[tuple[str, Entry]]] = {}
    for name, part in sorted(table.items(), key=lambda item: item[1].start):
        parts.setdefault(part.leaf, []).append((name, part))
    ready = {} if ready is None else ready
    count = 1 if mesh is None else mesh.shape[sharding.MODEL]
    paths, leaves = sharding.named_leaves(shapes), []
    size = sum(math.prod(shape.shape) * shape.dtype.itemsize for _, shape in paths)
    label = f"loading {Path(source).name}"
    with Progress(label, size, scale=1e9, unit="GB", show=progress) as bar:
        for path, shape in paths:
            if path in ready:
                host = ready[path]().astype(shape.dtype, copy=False)
                check_finite(host, f"{source}: {path}")
                order = sharding.shard_order(shapes.config, path, count)
                part_of = (host if order is None or count == 1 else host[order]).__getitem__
            else:
                part_of = partial(_fill, parts[path], shape, read, transform, source)
            spec = sharding.spec(path, shape, shapes.config, count)
            leaves.append(_place(shape, spec, mesh, part_of))
            part_of = host = None  # nothing on the host outlives its leaf
            bar.add(math.prod(shape.shape) * shape.dtype.itemsize)
    tree = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    return tree if mesh is None else tree.replace(mesh=mesh)


def _place(shape: Any, spec: Any, mesh: Mesh | None, part_of: Callable[..., Any]) -> jax.Array:
    """A leaf on its devices; returns once it is there and nothing on the host is needed."""
    if mesh is None:
        leaf = jax.device_put(part_of((slice(None),) * len(shape.shape)))
    else:
        split = NamedSharding(mesh, spec)
        leaf = jax.make_array_from_callback(shape.shape, split, part_of)
    leaf = jax.block_until_ready(leaf)
    gc.collect(0)  # JAX lets go of the host's arrays at the next collection, whichever it is
    return leaf


def _empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array that a CPU device can take over as it is: aligned to 64 bytes."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.empty(size + 64, np.uint8)
    at = -room.ctypes.data % 64
    return room[at : at + size].view(dtype).reshape(shape)


def check_finite(values: np.ndarray, name: str, first: tuple[int, ...] = (0, 0)) -> None:
    """ValueError that names the first number that is NaN or infinite; integers are fine.

    first: the place of `values` in what `name` calls it. Numbers are looked at as integers, whose
    largest says whether any exponent is all ones: much faster than to read them from a file.
    """
    if np.issubdtype(values.dtype, np.integer) or _bits_finite(values):
        return
    wide = values.astype(np.float64)
    places = np.argwhere(~np.isfinite(wide))
    if len(places):
        where = [int(i) + offset for i, offset in zip(places[0], first, strict=False)]
        found = wide[tuple(places[0])]
        raise ValueError(f"{name}: expected finite {values.dtype}, found {found} at {where}")


def _bits_finite(values: np.ndarray) -> bool:
    """Whether all are finite for sure, by the largest positive and the largest negative one."""
    size = values.itemsize
    if size == 1:  # not all of those formats have an infinity
        return False
    # A sign, an exponent, the rest; infinity is the number whose exponent is all ones and no more.
    signed = np.ascontiguousarray(values).view(f"i{size}")
    infinity = int(np.array(np.inf, values.dtype).view(f"i{size}"))
    largest, least = signed.max(initial=0), signed.view(f"u{size}").max(initial=0)
    return bool(largest < infinity and least < infinity + (1 << (8 * size - 1)))


def _fill(
    parts: Sequence[tuple[str, Entry]],
    shape: Any,
    read: Read,
    transform: Callable[[str, np.ndarray], np.ndarray] | None,
    source: str | Path,
    index: tuple[slice, ...],
) -> np.ndarray:
    """The host array of one device's part, `index`, of a leaf that `parts` fill."""
    first, last, _ = index[0].indices(shape.shape[0])
    columns = index[1] if len(index) > 1 else slice(None)
    width = [len(range(*columns.indices(n))) for n in shape.shape[1:2]]
    out = _empty((last - first, *width, *shape.shape[2:]), shape.dtype)
    # Rows are split evenly: this is share number `first / (last - first)` of every part.
    shares = shape.shape[0] // max(1, last - first)
    share, at = first // max(1, last - first), 0
    for name, part in parts:
        rows = part.shape[0] // shares
        block = out[at : at + rows]
        step = max(1, CHUNK // max(1, block[:1].nbytes))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            theirs = slice(share * rows + begin, share * rows + end)
            with np.errstate(over="ignore", invalid="ignore"):  # looked at below
                block[begin:end] = read(name, theirs, columns)
            check_finite(block[begin:end], f"{source}: {name}", (theirs.start, columns.start or 0))
        if transform is not None:
            block[:] = transform(name, block)
        at += rows
    return out
