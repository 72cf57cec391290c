"""A drafter's own head: rows for the tokens that it may draft, and their ids in the target.

The target's head is most of what a small drafter reads, and most of its rows are never drafted.
`trim_head` copies the rows of some tokens; proposals are made over those and mapped back before
anything else sees them, so the output stays the target's own and only acceptance can change.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import quant
from dflash_jax.arrays import read_npy
from dflash_jax.config import DFlashConfig
from dflash_jax.draft import DFlashDraft, DraftHead
from dflash_jax.keys import printable

LM_HEAD, D2T = "lm_head.weight", "d2t"
"""A head's tensors in a checkpoint. d2t holds offsets: target id = draft id + d2t[draft id]."""


def read_ranks(path: str | Path) -> np.ndarray:
    """Token ids, the most frequent first, out of a ranks file: int64 `[n]`.

    A `.npy` array of integers, or text with one id a line. The ids are the target's own (where a
    checkpoint's `d2t` holds offsets). FileNotFoundError or ValueError naming the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"ranks: expected a file {path}, found nothing")
    if path.suffix == ".npy":
        ids = read_npy(path)
    else:
        try:
            ids = np.array([int(word) for word in path.read_text(encoding="utf-8").split()], int)
        except (ValueError, OverflowError) as error:
            raise ValueError(
                f"{path}: expected one token id a line or .npy ({printable(error)})"
            ) from None
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{path}: expected token ids [n], found {list(ids.shape)} of {ids.dtype}")
    return ids.astype(np.int64)


def draft_ids(
    target: Any, head_rows: int | None = None, ranks: str | Path | Sequence[int] | None = None
) -> np.ndarray:
    """The ids to draft, ascending: the first `head_rows` (default: all) of `ranks`.

    ranks: a file (`read_ranks`) or ids. Default: the target's stop tokens, then every id in order:
    a byte-pair vocabulary numbers its merges as it found them, the frequent ones first.
    """
    size = target.vocab_size
    if ranks is None:
        stops = [i for i in dict.fromkeys(target.stop_token_ids) if i < size]
        ids = np.array([*stops, *np.delete(np.arange(size), stops)], np.int64)
    else:
        ids = read_ranks(ranks) if isinstance(ranks, str | Path) else np.asarray(ranks)
    if ids.ndim != 1 or not (np.issubdtype(ids.dtype, np.integer) or not ids.size):
        raise ValueError(f"ranks: expected token ids [n], found {list(ids.shape)} of {ids.dtype}")
    if len(ids) and not 0 <= ids.min() <= ids.max() < size:
        bad = ids[(ids < 0) | (ids >= size)][0]
        raise ValueError(f"ranks: expected ids in 0..{size - 1}, found {bad}")
    if len(np.unique(ids)) != len(ids):
        values, counts = np.unique(ids, return_counts=True)
        raise ValueError(f"ranks: expected distinct ids, found {values[counts > 1][0]} twice")
    rows = len(ids) if head_rows is None else head_rows
    if (
        isinstance(rows, bool)
        or not isinstance(rows, int | np.integer)
        or not 1 <= rows <= len(ids)
    ):
        raise ValueError(f"head_rows: expected 1..{len(ids)} (ids there are), found {rows!r}")
    return np.sort(ids[:rows])


def trim_head(draft: DFlashDraft, target: Any, ids: np.ndarray) -> DFlashDraft:
    """The drafter with a head of its own over `ids` (ascending, so that ties stay what they were).

    The head's rows are the target's, in the drafter's precision; of a Markov head's output table
    the same rows are kept. ValueError for a drafter that has a head already.
    """
    if draft.head is not None:
        raise ValueError(
            "head_rows: expected a drafter that uses the target's head, found one with "
            f"{draft.head.d2t.shape[0]} rows of its own"
        )
    check_rows(draft.config, len(ids))
    rows = jnp.asarray(target.lm_head)[ids].astype(draft.dtype)
    if draft.config.precision is not None:
        quantised = quant.quantize(np.asarray(rows, np.float32), draft.config.precision)
        rows = jax.tree.map(jnp.asarray, quantised)
    d2t = jnp.asarray(ids - np.arange(len(ids)), jnp.int32)
    markov = draft.markov
    if markov is not None:
        markov = markov.replace(w2=markov.w2[ids])
    return draft.replace(head=DraftHead(rows, d2t), markov=markov)


def check_rows(config: DFlashConfig, rows: int, name: str = "head_rows") -> None:
    """ValueError where a head of so many rows has fewer than the selector's candidates."""
    least = 1 if config.dflash2 is None else config.dflash2.selector_top_k
    if rows < least:
        raise ValueError(
            f"{name}: expected at least selector_top_k {least} candidates, found {rows}"
        )


def own_head_rows(files: Any, config: DFlashConfig, target: Any) -> int | None:
    """Rows of a checkpoint's own head; None where the target's head is used.

    files: a `tensor_files.TensorSource`. ValueError for a head or a map that cannot be one.
    """
    hidden = config.hidden_size
    head, d2t = (name in files.names() for name in (LM_HEAD, D2T))
    if d2t and not head:
        raise ValueError(f"{files.directory}: d2t without lm_head.weight (the reduced head)")
    shape = files.shape(LM_HEAD) if head else (0, hidden)
    if len(shape) != 2 or shape[1] != hidden or (d2t and not shape[0]):
        raise ValueError(
            f"{files.directory}: lm_head.weight: expected [rows, {hidden}], found {list(shape)}"
        )
    rows = shape[0]
    if d2t and files.shape(D2T) != (rows,):
        raise ValueError(
            f"{files.directory}: d2t: expected [{rows}], found {list(files.shape(D2T))}"
        )
    if head and not d2t and target is not None and rows < target.vocab_size:
        raise ValueError(
            f"{files.directory}: lm_head.weight has {rows} rows, the target {target.vocab_size} "
            "tokens: expected a d2t map, found none"
        )
    if not d2t:
        return None
    check_rows(config, rows, f"{files.directory}: lm_head.weight")
    return rows


def read_d2t(files: Any, target: Any) -> np.ndarray:
    """The offsets, int32; ValueError where one leads out of the target's vocabulary."""
    offsets = files.read(D2T)
    if not np.issubdtype(offsets.dtype, np.integer):
        raise ValueError(f"{files.directory}: d2t: expected integers, found {offsets.dtype}")
    ids = offsets.astype(np.int64) + np.arange(len(offsets))
    vocabulary = None if target is None else target.vocab_size
    bad = ids[(ids < 0) | (ids >= (ids.max() + 1 if vocabulary is None else vocabulary))]
    if len(bad):
        upper = " and up" if vocabulary is None else f"..{vocabulary - 1}"
        raise ValueError(f"{files.directory}: d2t: expected ids in 0{upper}, found {bad[0]}")
    return offsets.astype(np.int32)
