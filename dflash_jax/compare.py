"""Speculative against plain decoding: the same tokens, and how much sooner."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax import hosted, loop
from dflash_jax.draft import DFlashDraft
from dflash_jax.integers import round_up
from dflash_jax.results import Generation
from dflash_jax.sampling import SamplingParams
from dflash_jax.session import generate
from dflash_jax.targets import AnyTarget


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two token streams part: index of the first differing token, the two ids (None past
    a stream's end), and the gap between the target's two best logits there.
    """

    index: int
    ours: int | None
    theirs: int | None
    top2_gap: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One prompt decoded three ways.

    speculative: with the drafter. plain: the fastest plain loop, one row a step; what `speedup` is
    measured against. padded: the very program of `speculative`, accepting nothing, so that each
    token's arithmetic is the same: what `lossless` is judged by.
    plain_difference: where `plain` parts from `speculative`; in bf16 a one-row matmul may round
    another way than a wide one and flip a near-tie, which a tiny `top2_gap` shows.
    """

    speculative: Generation
    plain: Generation
    padded: Generation
    padded_difference: Difference | None
    plain_difference: Difference | None

    @property
    def lossless(self) -> bool:
        """Whether speculation changed no token."""
        return self.padded_difference is None

    @property
    def speedup(self) -> float:
        """Decoding rate over the fastest plain loop's (0.0 where nothing was decoded)."""
        plain = self.plain.tokens_per_second
        return self.speculative.tokens_per_second / plain if plain else 0.0


def compare(
    target: AnyTarget,
    draft: DFlashDraft,
    prompt: Sequence[int],
    max_new_tokens: int = 128,
    **options: Any,
) -> Comparison:
    """Decode `prompt` with and without the drafter (options: those of `SpecSession`).

    Greedy decoding alone: ValueError for a temperature above 0, and for a batch of prompts.
    Call it twice, or after a warm-up of the same shapes, for timings without compilation.
    """
    for params in _each(options.get("sampling", ())):
        if not params.greedy:  # draws differ between the ways, and say nothing of the drafter
            raise ValueError(
                f"sampling: expected greedy decoding, found temperature {params.temperature}"
            )
    speculative = generate(target, draft, prompt, max_new_tokens, **options)
    if isinstance(speculative, list):
        raise ValueError(f"prompt: expected token ids of one, found {len(speculative)} prompts")
    plain = generate(target, None, prompt, max_new_tokens, **plain_options(options))
    padded = generate(target, draft, prompt, max_new_tokens, **options, accept=False)
    return Comparison(
        speculative=speculative,
        plain=plain,
        padded=padded,
        padded_difference=first_difference(target, prompt, speculative, padded),
        plain_difference=first_difference(target, prompt, speculative, plain),
    )


def _each(sampling: SamplingParams | Sequence[SamplingParams]) -> Sequence[SamplingParams]:
    return [sampling] if isinstance(sampling, SamplingParams) else sampling


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The `SpecSession` options that also concern plain decoding."""
    shared = ("stop_token_ids", "capacity", "chunk", "sampling", "implementation")
    return {k: v for k, v in options.items() if k in shared}


def first_difference(
    target: AnyTarget, prompt: Sequence[int], ours: Generation, theirs: Generation
) -> Difference | None:
    """The first token in which two generations of one prompt differ, or None."""
    a, b = ours.token_ids, theirs.token_ids
    if a == b:
        return None
    index = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    index = min(len(a), len(b)) if index is None else index
    context = [*prompt, *a[:index]]
    return Difference(
        index=index,
        ours=a[index] if index < len(a) else None,
        theirs=b[index] if index < len(b) else None,
        top2_gap=top2_gap(target, context),
    )


def top2_gap(target: AnyTarget, context: Sequence[int]) -> float:
    """The target's best logit minus its second best, after `context`."""
    capacity = round_up(len(context), loop.CHUNKS[-1])
    driver = hosted.driver(target)
    caches = driver.empty_caches(target, None, 1, capacity)
    caches = driver.prefill(target, None, caches, [context], [0], capacity)
    best = jax.lax.top_k(driver.last_logits(target, caches), 2)[0]
    return float(jnp.abs(best[0, 0] - best[0, 1]))
