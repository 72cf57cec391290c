"""A target that runs outside JAX: are a token's logits the same, however many rows run at once?

Plain decoding runs a row at a time, a verify several, a prompt all of its own. A model that takes
another way by the number of rows or by the length (sparse attention, another rope) is verified by
other logits than it decodes by: the text is then not its own, and no error says so.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.doctor.report import Finding
from dflash_jax.keys import reason_of
from dflash_jax.targets import HostedTarget, rounding

WIDTH = 8
"""Rows of a verify."""
INVENTED, JOINED = 24, 256
"""Tokens of a text where there are no prompts; of all prompts in a row, which are one text more."""
LONGEST_EDGE_CPU, LONGEST_EDGE = 1024, 8192
"""Longest text made for one of a target's `edges`."""


def contexts(
    target: HostedTarget, prompts: Sequence[Sequence[int]] | None, seed: int
) -> list[list[int]]:
    """What the rows looked at come after: the shortest and the longest prompt (or an invented one),
    a longer text of several, and one that ends just before each edge that is `reached`.
    """
    if prompts is None:
        rng, shape = np.random.default_rng(seed), (JOINED // INVENTED, INVENTED)
        return contexts(target, rng.integers(0, target.vocab_size, shape).tolist(), seed)
    joined = [token for prompt in prompts for token in prompt]
    found = [min(prompts, key=len), max(prompts, key=len), joined[:JOINED]]
    for edge in reached(target)[0]:
        found.append((joined * (1 + edge // len(joined)))[: edge - WIDTH // 2])
    room = target.max_positions - WIDTH
    return [list(text) for text in dict.fromkeys(tuple(text[:room]) for text in found) if text]


def reached(target: HostedTarget) -> tuple[list[int], list[int]]:
    """The target's `edges` that a text is made for, and those too far off for one."""
    most = LONGEST_EDGE_CPU if jax.default_backend() == "cpu" else LONGEST_EDGE
    stated = set(getattr(target, "edges", ()))
    edges = sorted(edge for edge in stated if WIDTH < edge <= target.max_positions)
    return [edge for edge in edges if edge <= most], [edge for edge in edges if edge > most]


def check_rows(target: HostedTarget, texts: Sequence[Sequence[int]]) -> Iterator[Finding]:
    """WIDTH greedy tokens after each text: one by one, at once, and in one forward with the text.

    The worst disagreement of a verify is a finding, and the worst of a whole text.
    """
    verify, prompt = [], []
    allowed = rounding(target.tables.embedding.dtype.itemsize)  # some models widen their logits
    for text in texts:
        try:
            alone, tokens = _one_by_one(target, text)
            several, _ = _read(target, _opened(target, text)[1], tokens)
            last, _ = _opened(target, [*text, *tokens])
        except RuntimeError as error:  # of a kernel, or of memory
            words = f"expected logits after a text of {len(text)}, found: {reason_of(error)}"
            yield Finding("target", "one row and several rows", words)
            return
        at, end = len(text), len(text) + WIDTH
        verify += _differences(several, alone, allowed, at, f"{WIDTH} rows run at once")
        words = f"all {end} rows of the text run at once"
        prompt += _differences(last, alone[-1:], allowed, end - 1, words)
    for found in (verify, prompt):
        if found:
            yield Finding("target", "one row and several rows", max(found)[1])


def _one_by_one(target: HostedTarget, text: Sequence[int]) -> tuple[jax.Array, list[int]]:
    """The logits of each of WIDTH greedy tokens `[WIDTH, V]`, run alone, and the tokens."""
    row, state = _opened(target, text)
    tokens, rows = [], []
    for _ in range(WIDTH):
        tokens.append(int(row[-1].argmax()))
        row, state = _read(target, state, tokens[-1:])
        rows.append(row)
    return jnp.concatenate(rows), tokens


def _opened(target: HostedTarget, text: Sequence[int]):
    """The logits of a text's last row `[1, V]`, and the state after it."""
    return _read(target, target.init_state(1, len(text) + WIDTH), text, last_only=True)


def _read(target: HostedTarget, state, tokens: Sequence[int], last_only: bool = False):
    """The logits of more tokens, all of them kept, and the state after them."""
    count = np.array([len(tokens)], np.int32)
    ids = jnp.asarray([tokens], jnp.int32)
    out, state = target.forward(state, ids, count, (), last_only=last_only)
    return out.logits[0], target.commit(state, count)


def _differences(
    rows: jax.Array, alone: jax.Array, allowed: float, first: int, when: str
) -> list[tuple[float, str]]:
    """(share, words) of every row that is off by more than is allowed; `first`: its position."""
    ours, own = np.asarray(rows, np.float64), np.asarray(alone, np.float64)
    size = np.linalg.norm(own - own.mean(-1, keepdims=True), axis=-1)
    shares = np.linalg.norm(ours - own, axis=-1) / np.maximum(size, np.finfo(float).tiny)
    found = []
    for i, share in enumerate(np.where(np.isnan(shares), np.inf, shares)):
        if share > allowed:
            tokens = f"token {ours[i].argmax()}, alone {own[i].argmax()}"
            text = f"expected the same logits, found those at position {first + i} off by "
            found.append((share, f"{text}{share:.2g} of their size when {when} ({tokens})"))
    return found
