"""Texts for the self-test: the target's own greedy answers, and where in them to draft."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash_jax.corpus import (
    PLAIN,
    ChatFormat,
    PromptTemplates,
    SampleOptions,
    make_starts,
    sample_rows,
)
from dflash_jax.options import token_ids_of
from dflash_jax.records import naming, prompt_ids, read_records
from dflash_jax.targets.loading import LoadedTarget

OPENING = 40
"""Tokens a target without a tokenizer draws before it goes on greedily."""
NO_TURNS = ChatFormat((), (0,), (0,))


def read_prompts(path: str | Path, loaded: LoadedTarget) -> list[list[int]]:
    """The prompts of a `.jsonl` file (`prompt_ids`, `messages` or `prompt`), as token ids.

    FileNotFoundError or ValueError naming the file, and the line, where there are none.
    """
    prompts = []
    for record in read_records(path):
        ids = prompt_ids(record, loaded.text)
        with naming(record):
            prompts.append(token_ids_of("prompt", ids, loaded.target.vocab_size))
    prompts = [ids for ids in prompts if ids]
    if not prompts:
        raise ValueError(f"{path}: expected prompts, found none")
    return prompts


def builtin_prompts(loaded: LoadedTarget, count: int, seed: int) -> list[list[int]] | None:
    """`count` chat prompts (plain openings without a template), None without a tokenizer."""
    codec, rng = loaded.text, random.Random(f"doctor/{seed}")
    if codec is None:
        return None
    templates, prompts = PromptTemplates.load(), []
    while len(prompts) < count:
        if codec.template is None:
            ids = codec.encode(templates.plain(rng))
        else:
            ids = codec.encode_chat([{"role": "user", "content": templates.draw(rng)}])
        if 0 < len(ids) <= 64:
            prompts.append(ids)
    return prompts


def greedy_texts(
    loaded: LoadedTarget, prompts: Sequence[Sequence[int]] | None, count: int, new: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Texts `[B, T]` that end in `new` greedy tokens of the target or more, and where those begin.

    Without prompts the target invents `count` texts: a stop token or a random one, OPENING tokens
    drawn at temperature 1, then greedy ones.
    """
    target, rng = loaded.target, np.random.default_rng(seed)
    if prompts is None:
        some = rng.integers(0, target.vocab_size, count)
        stops = [*target.stop_token_ids][:1] or [int(some[0])]
        starts = [[stops[0] if i % 2 else int(some[i])] for i in range(count)]
        heat, hot, begin = 1.0, OPENING, np.full(count, 1 + OPENING)
    else:
        starts, heat, hot = [list(p) for p in prompts], 0.0, 0
        begin = np.array([len(p) for p in starts])
    length = int(begin.max()) + new
    options = SampleOptions(length=length, stages=(length,), min_p=0.01)
    ids, _ = sample_rows(target, NO_TURNS, make_starts(starts, PLAIN, heat, hot), seed, options)
    return ids, begin


def choose_anchors(
    ids: np.ndarray, begin: np.ndarray, stops: Sequence[int], count: int, slots: int, seed: int
) -> np.ndarray:
    """`count` anchors a text `[B, count]`, ascending: greedy tokens with `slots` more behind them.

    A text is over at its first stop token; where that leaves fewer places they are taken twice.
    """
    rng, rows = np.random.default_rng([seed, 1]), []
    for row, start in zip(ids, begin, strict=True):
        ends = np.flatnonzero(np.isin(row[start:], list(stops)))
        end = start + (int(ends[0]) if len(ends) else len(row) - start)
        last = max(start + 1, min(end, len(row)) - slots)
        places = np.arange(start, last)
        rows.append(np.sort(rng.choice(places, count, replace=len(places) < count)))
    return np.stack(rows).astype(np.int32)


def follower_floor(ids: np.ndarray, anchors: np.ndarray) -> float:
    """How often the commonest follower of the anchor's token, in the other texts, comes next.

    The guess of one who knows word pairs and nothing else: what a drafter must beat.
    """
    pairs: dict[int, dict[int, np.ndarray]] = {}
    for text, row in enumerate(ids):
        for a, b in itertools.pairwise(row):
            follower = pairs.setdefault(int(a), {})
            follower.setdefault(int(b), np.zeros(len(ids), np.int64))[text] += 1
    hits = []
    for text, (row, places) in enumerate(zip(ids, anchors, strict=True)):
        for at in places:
            others = {b: n.sum() - n[text] for b, n in pairs[int(row[at])].items()}
            guess = max(others, key=lambda b: (others[b], -b))
            hits.append(others[guess] > 0 and guess == row[at + 1])
    return float(np.mean(hits))
