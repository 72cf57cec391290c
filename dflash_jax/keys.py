"""Typed look-ups in decoded JSON: errors name the key, what was expected and what was found."""

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LARGEST = 2**31 - 1
"""Sizes and token ids are int32 on the device."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError naming the file for anything else."""
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    try:
        return decode_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def decode_json(text: str) -> dict[str, Any]:
    """A JSON object from its text; ValueError for anything else."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"expected a JSON object, found {type(raw).__name__}")
    return raw


def table(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested object of a config, empty where it is absent or null."""
    inner = raw.get(name)
    if inner is not None and not isinstance(inner, Mapping):
        raise ValueError(f"{name}: expected an object, found {inner!r}")
    return inner or {}


def names(raw: Mapping[str, Any], name: str) -> list[str]:
    """A list of strings of a config, empty where it is absent or null."""
    value = raw.get(name)
    items = [] if value is None else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{name}: expected a list of names, found {value!r}")
    return items


def token_id(raw: Mapping[str, Any], name: str) -> int | None:
    """A token id of a file's metadata; None where it is absent or stands for none (-1)."""
    value = raw.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{name}: expected a token id, found {value!r:.60}")
    return value if value is not None and 0 <= value <= LARGEST else None


class Keys:
    """Typed look-ups in a config: in nested tables first, in the order named, then at top level.

    Every error names the key, what was expected and what was found.
    """

    def __init__(self, raw: Mapping[str, Any], *nested: str):
        self._tables: dict[str, Mapping[str, Any]] = {}
        for name in nested:
            self._tables[name] = table(raw, name)
        self._tables["top level"] = raw

    def get(self, name: str, default: Any = None) -> Any:
        found = {t: v[name] for t, v in self._tables.items() if v.get(name) is not None}
        if not found:
            return default
        (first, value), *others = found.items()
        for table, other in others:
            if other != value:
                warnings.warn(
                    f"{name}: {first} says {value!r}, {table} says {other!r}; using {value!r}",
                    stacklevel=3,
                )
        return value

    def optional_bool(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name}: expected true or false, found {value!r}")
        return value

    def positive_int(self, name: str) -> int:
        value = self.optional_int(name)
        if value is None:
            raise ValueError(f"{name}: expected a positive integer, found nothing")
        return value

    def optional_int(self, name: str) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"{name}: expected a positive integer, found {value!r}")
        if value > LARGEST:
            raise ValueError(f"{name}: expected an integer below 2**31, found {value}")
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        value = self.optional_float(name)
        value = default if value is None else value
        if value is None or value <= 0:
            found = "nothing" if value is None else repr(value)
            raise ValueError(f"{name}: expected a positive finite number, found {found}")
        return value

    def optional_float(self, name: str) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise ValueError(f"{name}: expected a finite number, found {value!r}")
        return float(value)
