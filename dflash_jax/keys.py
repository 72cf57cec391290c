"""Typed look-ups in decoded JSON: errors name the key, what was expected and what was found."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LARGEST = 2**31 - 1
"""Sizes and token ids are int32 on the device."""
LARGEST_FLOAT, LEAST_FLOAT = 3.4e38, 1.2e-38
"""Numbers are float32 there."""
DEPTH = 64
"""Objects and lists within each other: no config has so many, and Python's stack allows few more.
"""


def printable(text: Any, most: int = 300) -> str:
    """What a file says, for an error text: one line, nothing that a terminal would act on."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text)[:most])
    return shown[:most]


def reason_of(error: BaseException) -> str:
    """What an error of another package says, on one line; its kind where it says nothing."""
    return printable(" ".join(str(error).split())) or type(error).__name__


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
        raw = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"not JSON (more than {DEPTH} levels deep)") from None
    except _Twice:
        raise
    except ValueError as error:
        raise ValueError(f"not JSON ({printable(error)})") from None
    if _deeper(raw, DEPTH):
        raise ValueError(f"expected at most {DEPTH} levels of JSON, found more")
    if not isinstance(raw, dict):
        raise ValueError(f"expected a JSON object, found {type(raw).__name__}")
    return raw


class _Twice(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; readers disagree on which of two values for one key counts."""
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _Twice(f"{twice!r:.60}: expected one value, found the key twice")
    return made


def _deeper(raw: Any, most: int) -> bool:
    level = [raw]
    for _ in range(most):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def table(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested object of a config, empty where it is absent or null."""
    inner = raw.get(name)
    if inner is not None and not isinstance(inner, Mapping):
        raise ValueError(f"{name}: expected an object, found {inner!r:.200}")
    return inner or {}


def names(raw: Mapping[str, Any], name: str) -> list[str]:
    """A list of strings of a config, empty where it is absent or null."""
    value = raw.get(name)
    items = [] if value is None else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{name}: expected a list of names, found {value!r:.200}")
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
                    f"{name}: {first} says {value!r:.200}, {table} says {other!r:.200}; "
                    f"using {value!r:.200}",
                    stacklevel=3,
                )
        return value

    def optional_bool(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name}: expected true or false, found {value!r:.200}")
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
            raise ValueError(f"{name}: expected a positive integer, found {value!r:.200}")
        if value > LARGEST:
            raise ValueError(f"{name}: expected an integer below 2**31, found {value!r:.60}")
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        value = self.optional_float(name)
        value = default if value is None else value
        if value is None or value < LEAST_FLOAT:
            found = "nothing" if value is None else repr(value)
            raise ValueError(f"{name}: expected a positive finite number, found {found}")
        return value

    def optional_float(self, name: str) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not -LARGEST_FLOAT <= value <= LARGEST_FLOAT:  # nor NaN
            raise ValueError(f"{name}: expected a finite number, found {value!r:.200}")
        return float(value)
