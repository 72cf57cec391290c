"""What a checkpoint's numbers give away, tensor by tensor and against their siblings."""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import quant
from dflash_jax.doctor.report import Finding
from dflash_jax.sharding import named_leaves
from dflash_jax.tensor_files import TensorSource, listing, read_tensor

F16_MAX, BF16_MAX = 65504.0, 3.3895313892515355e38
SIBLING_RATIO = 8.0
"""Least ratio of two layers' sizes (rms) that is called a fault; trained ones stay within 3."""
SIZES = (1e-4, 10.0)
"""Rms of a trained tensor that is no norm: smallest and largest believed."""
NORM_SIZES = (0.1, 50.0)
SPIKE, ROW_SPIKE, SCALE_SPIKE = 300.0, 50.0, 1000.0
"""A value over its tensor's rms, a row's rms over the median row's, a scale over the median one."""
TABLES = ("codebook", "markov_w", "embed_tokens", "lm_head")
"""Tensors with a row a token, most of which training never saw."""
LARGEST = 1e18
"""Of weights: squares and products of larger ones overflow float32, and a norm makes zeros of it.
"""


class Stat:
    """One tensor's figures; `values` are dropped once they are taken."""

    def __init__(self, name: str, values: np.ndarray):
        self.name, self.shape, self.size = name, values.shape, values.size
        wide = values.astype(np.float32)
        finite = np.isfinite(wide)
        self.bad = int(wide.size - finite.sum())
        if self.bad:
            return
        flat = np.abs(wide)
        self.largest = float(flat.max(initial=0.0))
        scale = self.largest or 1.0
        self.rms = float(np.sqrt(np.mean(np.square(flat / scale), dtype=np.float64))) * scale
        self.mean = float(wide.mean(dtype=np.float64))
        self.constant = bool((wide == wide.flat[0]).all()) if wide.size else False
        self.first = float(wide.flat[0]) if wide.size else 0.0
        few = np.unique(wide.flat[: 1 << 16]).size if wide.size >= 1024 else None
        self.distinct = few
        self.digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
        self.rows = self.columns = None
        if wide.ndim == 2:
            self.rows = np.sqrt(np.mean(np.square(flat / scale), axis=1)) * scale
            self.columns = flat.max(axis=0)

    @property
    def is_norm(self) -> bool:
        return self.name.endswith("norm.weight")

    @property
    def is_table(self) -> bool:
        return any(part in self.name for part in TABLES)


def check_tensors(files: TensorSource) -> list[Finding]:
    """Every fault that the stored numbers show by themselves."""
    findings, stats, names = [], [], files.names()
    scales = {n + quant.SCALE for n in names} & names
    for name in sorted(names - scales - {"d2t"}):
        try:
            values = read_tensor(files, name)
        except (ValueError, OSError) as error:
            findings.append(Finding("tensors", name, _reason(error, files)))
            continue
        kind = files.dtype(name)
        if name + quant.SCALE in scales:
            findings += check_scales(files, name)
        stat = Stat(name, values)
        findings += check_range(stat, kind)
        if not stat.bad:
            stats.append(stat)
    faulty = {finding.name for finding in findings}
    fine = [stat for stat in stats if stat.name not in faulty]
    for check in (check_constant, check_sizes, check_shape_of_values, check_twins):
        findings += check(fine)
        faulty |= {finding.name for finding in findings}
        fine = [stat for stat in fine if stat.name not in faulty]
    if "d2t" in names:
        findings += check_map(files.read("d2t"))
    return findings


def check_target(target: Any) -> list[Finding]:
    """Leaves of a target that cannot be meant: all zeros, or numbers whose squares overflow.

    (What is not finite does not load.) Its text is its own; no drafter can follow such a one.
    """
    found = []
    for path, leaf in named_leaves(target):
        if leaf.size < 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        largest = float(_largest(leaf))
        if largest == 0.0:
            found.append(Finding("target", path, "every value is 0"))
        elif largest > LARGEST:
            found.append(Finding("target", path, f"values up to {largest:.3g} overflow float32"))
    return found


@jax.jit
def _largest(leaf: jax.Array) -> jax.Array:
    return jnp.abs(leaf).max()


def _reason(error: Exception, files: TensorSource) -> str:
    return str(error).removeprefix(f"{files.directory}: ")


def check_range(stat: Stat, kind: str) -> Iterator[Finding]:
    """Values that are no numbers, or lie outside of what a format holds."""
    if stat.bad:
        yield Finding("tensors", stat.name, f"{stat.bad} of {stat.size} values are NaN or infinite")
    elif kind == "F16" and stat.largest >= F16_MAX:
        yield Finding("tensors", stat.name, "values at the end of f16's range (overflow)")
    elif stat.largest > BF16_MAX:
        yield Finding("tensors", stat.name, f"values up to {stat.largest:.3g}, beyond bf16's range")


def check_scales(files: TensorSource, name: str) -> Iterator[Finding]:
    """Scales of a quantised matrix's rows or blocks: finite, none far above the rest; those of int8
    and q8_0 positive, where any value is not 0. (q4_0's have the sign of a block's largest weight.)
    """
    scale = files.read(name + quant.SCALE).astype(np.float64).reshape(-1)
    values, where = files.read(name), name + quant.SCALE
    finite = np.isfinite(scale)
    if values.dtype == np.uint8:
        used, good, bad = finite & (scale != 0), finite, "not finite"
    else:
        used = np.abs(values.astype(np.int16)).reshape(scale.size, -1).max(axis=1) > 0
        good, bad = finite & ((scale > 0) | ~used), "zero, negative or not finite"
    sizes = np.abs(scale)
    if not good.all():
        text = f"{int((~good).sum())} of {scale.size} scales are {bad}"
        yield Finding("tensors", where, text)
    elif used.any() and sizes[used].max() > SCALE_SPIKE * np.median(sizes[used]):
        row = int(np.argmax(np.where(used, sizes, 0)))
        ratio = sizes[row] / np.median(sizes[used])
        unit = "row" if scale.size == values.shape[0] else "block"
        yield Finding("tensors", where, f"{unit} {row}'s scale is {ratio:.3g} times the median")


def check_constant(stats: list[Stat]) -> Iterator[Finding]:
    """Tensors that hold one value only, where their like do not."""
    norms = [stat for stat in stats if stat.is_norm]
    # Short training in bf16 can leave norms at 1 exactly: then most of them are.
    usual = sum(stat.constant for stat in norms) * 2 > len(norms)
    for stat in stats:
        if stat.size > 1 and stat.largest == 0.0:
            yield Finding("tensors", stat.name, "every value is 0")
        elif stat.size > 8 and stat.constant and not (stat.is_norm and usual):
            yield Finding("tensors", stat.name, f"every value is {stat.first:g} (lost?)")
        elif stat.distinct is not None and stat.distinct <= 16:
            yield Finding("tensors", stat.name, f"only {stat.distinct} distinct values")


def check_sizes(stats: list[Stat]) -> Iterator[Finding]:
    """Tensors much larger or smaller than other layers' of their name, or than any trained one."""
    matrices = [s.rms for s in stats if len(s.shape) == 2 and not s.is_table]
    norms = [s.rms for s in stats if s.is_norm]
    named: dict[str, list[Stat]] = {}
    for stat in stats:
        named.setdefault(re.sub(r"^layers\.\d+\.", "", stat.name), []).append(stat)
    for siblings in named.values():
        for stat in siblings:
            others = [s.rms for s in siblings if s is not stat]
            if others and _odd(stat, others, norms if stat.is_norm else matrices):
                ratio = stat.rms / float(np.median(others))
                text = f"{ratio:.3g} times as large (rms) as in the other layers"
                yield Finding("tensors", stat.name, text)
                break
            low, high = NORM_SIZES if stat.is_norm else SIZES
            if stat.rms > high or (stat.size > 1 and stat.rms < low):
                text = f"rms {stat.rms:.3g}, expected {low:g} to {high:g}"
                yield Finding("tensors", stat.name, text)
    for stat in stats:
        if stat.is_norm and stat.mean < 0:
            yield Finding("tensors", stat.name, f"mean {stat.mean:.3g}, expected a positive one")


def _odd(stat: Stat, others: list[float], kind: list[float]) -> bool:
    """Whether a tensor is the odd one: of two alone, that which is farther from all of its kind."""
    usual = float(np.median(others))
    ratio = max(stat.rms, usual) / max(min(stat.rms, usual), 1e-30)
    if ratio < SIBLING_RATIO:
        return False
    typical = np.log(float(np.median(kind))) if kind else np.log(usual)
    return len(others) > 1 or abs(np.log(stat.rms) - typical) >= abs(np.log(usual) - typical)


def check_shape_of_values(stats: list[Stat]) -> Iterator[Finding]:
    """Single values or rows out of all proportion, rows and columns without any."""
    for stat in stats:
        if stat.largest > SPIKE * stat.rms:
            text = f"a value of {stat.largest:.3g}, {stat.largest / stat.rms:.0f} times the rms"
            yield Finding("tensors", stat.name, text)
        if stat.rows is None or stat.columns is None or stat.is_table or stat.shape[0] < 8:
            continue
        for axis, sizes in (("rows", stat.rows), ("columns", stat.columns)):
            empty = np.flatnonzero(sizes == 0)
            if len(empty) > 0.02 * len(sizes):
                first, last = empty[0], empty[-1]
                text = f"{len(empty)} of {len(sizes)} {axis} are zero ({first}..{last})"
                yield Finding("tensors", stat.name, text)
        usual = float(np.median(stat.rows))
        if usual > 0 and stat.rows.max() > ROW_SPIKE * usual:
            row = int(np.argmax(stat.rows))
            text = f"row {row} is {stat.rows[row] / usual:.0f} times as large as the median row"
            yield Finding("tensors", stat.name, text)


def check_twins(stats: list[Stat]) -> Iterator[Finding]:
    """Two tensors with the very same numbers."""
    seen: dict[str, str] = {}
    for stat in stats:
        copy = stat.name in ("embed_tokens.weight", "lm_head.weight")  # tied tables may be equal
        if stat.size > 8 and not stat.constant and not copy:
            twin = seen.setdefault(stat.digest, stat.name)
            if twin != stat.name:
                yield Finding("tensors", stat.name, f"holds the same numbers as {twin}")


def check_map(offsets: np.ndarray) -> Iterator[Finding]:
    """A reduced vocabulary's map: every token once, in ascending order."""
    ids = offsets.astype(np.int64) + np.arange(len(offsets))
    falls = np.flatnonzero(np.diff(ids) <= 0)
    if len(falls):
        pairs = [f"{i}->{ids[i]}, {i + 1}->{ids[i + 1]}" for i in falls[:2]]
        text = f"expected offsets to ascending ids, found {listing(pairs)}"
        yield Finding("tensors", "d2t", text)
