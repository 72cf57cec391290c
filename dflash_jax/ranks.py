"""How often a corpus has each token: what a trimmed head keeps (see `head.draft_ids`)."""

from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.corpus import Corpus
from dflash_jax.records import answer_ids, prompt_ids, read_records


def corpus_ranks(path: str | Path, codec: Any, vocab_size: int) -> np.ndarray:
    """All token ids by their count in a corpus, the most frequent first, equals by id.

    path: a `.npz` that `corpus.Corpus` wrote, of which the target's own tokens count; or a `.jsonl`
    of records as `records.read_records` takes them, of which answers count, and prompts where there
    is no answer. ValueError for ids that the target does not have.
    """
    if Path(path).suffix == ".npz":
        corpus = Corpus.load(path)
        ids = corpus.ids[corpus.answer]
    else:
        rows = [answer_ids(r, codec, ()) or prompt_ids(r, codec) for r in read_records(path)]
        ids = np.concatenate([np.zeros(0, np.int64), *rows])
    if not len(ids):
        raise ValueError(f"{path}: expected tokens to count, found none")
    if ids.max() >= vocab_size:
        raise ValueError(f"{path}: expected ids in 0..{vocab_size - 1}, found {ids.max()}")
    return np.argsort(-np.bincount(ids, minlength=vocab_size), kind="stable")
