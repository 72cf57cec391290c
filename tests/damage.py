"""Damaged files for tests: faults in JSON objects and in bytes, and what people may see of them."""

import contextlib
import json
import random
import warnings

from dflash_jax.tensor_files import WEIGHTS

REFUSALS = (ValueError, FileNotFoundError, NotImplementedError)
NESTED = 100_000
RAW = "<raw>"
"""Stands for JSON text that `json.dumps` would not write."""

ABSURD = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 31, 64, -(2**31), 2**31, 2**63, 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, -2.5, 1e-320, 1e30, 1e300, float("nan"), float("inf"), float("-inf")),
    *("", "8", "1e9", "true", "null", "silu", "dspark", "\n", "a\nb", "\x1b[2J", "\ud800", "\0"),
    *("x" * 5000, "/etc/passwd", "../" + WEIGHTS, [], [[]], {}, [1], [1, 1], [-1], [True], ["1"]),
    *([None], [2**40], list(range(3000)), {"a": {"b": 1}}, {"": None}, "F32", "I64", "F8_E4M3"),
    *("full_attention", "sliding_attention", "yarn", "llama3", "default", "gated", "rnn", "q4_0"),
]


def deep(depth: int, opening: str = "[") -> str:
    closing = {"[": "]", '{"a":': "}"}[opening]
    return opening * depth + "1" + closing * depth


def paths(tree: dict, at: tuple = ()) -> list[tuple]:
    """The places of every value of nested objects and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = []
    for key, value in items:
        found.append((*at, key))
        if isinstance(value, dict | list):
            found += paths(value, (*at, key))
    return found


def mutate(tree: dict, chance: random.Random, keys: tuple[str, ...]) -> None:
    """One fault in a decoded JSON object."""
    places = paths(tree)
    if not places:
        return
    *at, last = chance.choice(places)
    holder = tree
    for key in at:
        holder = holder[key]
    kind = chance.randrange(8)
    if kind == 0:
        del holder[last]
    elif kind == 1 and isinstance(holder, dict):
        holder[chance.choice(["", "a\nb", "x" * 900, "\ud800", *keys])] = holder.pop(last)
    elif kind == 2:
        other = chance.choice(places)
        value = tree
        for key in other:
            value = value[key] if key in value or isinstance(value, list) else None
            if not isinstance(value, dict | list):
                break
        holder[last] = json.loads(json.dumps(value))
    elif kind == 3 and isinstance(holder[last], int | float) and holder[last] is not None:
        holder[last] = chance.choice([-1, 0.5, 2, 1000, 1e12, 2**40]) * holder[last]
    elif kind == 4:
        holder[last] = str(holder[last])
    elif kind == 5:
        holder[last] = RAW + deep(
            chance.choice([50, 300, 900, NESTED]), chance.choice(["[", '{"a":'])
        )
    elif kind == 6 and isinstance(holder, dict):
        holder[chance.choice(keys)] = chance.choice(ABSURD)
    else:
        holder[last] = chance.choice(ABSURD)


def encoded(tree: dict, chance: random.Random, fault: bool) -> bytes:
    """Its JSON text; with a key stated twice or damaged where it is to have a fault."""
    text = json.dumps(tree)
    while f'"{RAW}' in text:  # strings that stand for JSON text
        start = text.index(f'"{RAW}')
        value, end = json.JSONDecoder().raw_decode(text, start)
        text = text[:start] + value.removeprefix(RAW) + text[end:]
    twice = fault and chance.random() < 0.3
    if twice and isinstance(tree, dict) and tree:
        key = json.dumps(chance.choice(list(tree)))
        text = text[:-1] + f", {key}: {json.dumps(chance.choice(ABSURD))}" + "}"
    data = text.encode("utf-8", "surrogatepass")
    return damaged(data, chance) if fault and not twice else data


def damaged(data: bytes, chance: random.Random) -> bytes:
    """A file cut short, with bytes changed, or in another encoding."""
    at = chance.randrange(len(data) + 1)
    kind = chance.randrange(6)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes(chance.randrange(256) for _ in range(3)) + data[at + 3 :]
    if kind == 2:
        return b"\xff\xfe" + data
    if kind == 3:
        return data.decode("utf-8", "replace").encode("utf-16")
    if kind == 4:
        return data[:at] + b"\xc3\x28\x00" + data[at:]
    return chance.choice(
        [b"", b"[]", b"null", b"1", b'"x"', b"{", b"\0" * 64, b"version https://\n"]
    )


@contextlib.contextmanager
def one_line_or_loads(naming: str = ""):
    """What a person would see: nothing, or one line that a terminal can show.

    naming: what an error has to say, the file.
    """
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            yield
        except REFUSALS as error:
            assert naming in str(error), str(error)[:300]  # noqa: PT017
            heard.append(error)
    for said in heard:
        line = str(getattr(said, "message", said))
        assert line.isprintable(), line[:300]
        assert 10 < len(line) < 1000, line[:1200]
