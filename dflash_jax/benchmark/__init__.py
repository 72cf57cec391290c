"""A drafter on many prompts: what it accepts, slot by slot, and how much sooner text comes.

>>> prompts = [Prompt(ids, "qa") for ids in many]                                  # doctest: +SKIP
>>> trial = run_trial(target, draft, prompts, 128, {"block_size": 4})              # doctest: +SKIP
>>> trial.mean_acceptance_length, trial.slots.kept, trial.speedup                  # doctest: +SKIP

`report` keeps trials with the conditions they were made under, and says whether two reports may be
held against each other; `text` and `figure` show them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_jax.benchmark.report import TREE, Answer, Setting, Trial
from dflash_jax.compare import first_difference, plain_options
from dflash_jax.draft import DFlashDraft
from dflash_jax.results import Generation
from dflash_jax.round import RoundPlan
from dflash_jax.sampling import SamplingParams
from dflash_jax.session import SpecSession
from dflash_jax.targets import AnyTarget


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids, what kind of prompt they are, and a name to show."""

    ids: Sequence[int]
    kind: str = ""
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Decoding:
    """All prompts decoded one way, in groups: a generation a prompt, tokens gained and seconds in
    all, and the plan of a round.
    """

    generations: list[Generation]
    tokens: int
    seconds: float
    plan: RoundPlan


def decode(
    target: AnyTarget,
    draft: DFlashDraft | None,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    options: Mapping[str, Any],
    batch: int = 1,
    tick: Callable[[int], None] = lambda count: None,
) -> Decoding:
    """Decode prompts, `batch` side by side, compiled before they are timed.

    The last group is filled up with the first prompts, which count for the rate alone. options: of
    `SpecSession`. tick: told how many prompts were done, after each group.
    ValueError unless there are as many prompts as a group has sequences.
    """
    check_batch(prompts, batch)
    generations, tokens, seconds = [], 0, 0.0
    for start in range(0, len(prompts), batch):
        group = [prompts[i % len(prompts)].ids for i in range(start, start + batch)]
        session = SpecSession(target, draft, **options)
        session.warm_up(group, max_new_tokens)
        if session.costs is not None:
            options = {**options, "costs": session.costs}
        session.open(group, max_new_tokens)
        session.burst()
        results = session.results()
        tokens += sum(sum(result.acceptance_lengths) for result in results)
        seconds += results[0].seconds
        counted = min(batch, len(prompts) - start)
        generations += results[:counted]
        tick(counted)
    return Decoding(generations, tokens, seconds, session.plan)


def check_batch(prompts: Sequence[Prompt], batch: int) -> None:
    """ValueError unless there are as many prompts as are decoded side by side."""
    if not 1 <= batch <= len(prompts):
        raise ValueError(f"batch: expected 1..{len(prompts)} (different prompts), found {batch}")


def run_trial(
    target: AnyTarget,
    draft: DFlashDraft,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    options: Mapping[str, Any],
    batch: int = 1,
    plain: Decoding | None = None,
    tick: Callable[[int], None] = lambda count: None,
) -> Trial:
    """Decode prompts with the drafter, and hold them against plain decoding.

    Args: plain: the same prompts and batch from `decode` without a drafter, made here where it is
      None; the others as in `decode`.

    Greedy text that parts from plain decoding is decoded once more by the very program of the
    drafted run, accepting nothing, which tells a rounded near-tie from a token that was changed.
    """
    common = (prompts, max_new_tokens)
    if plain is None:
        plain = decode(target, None, *common, plain_options(options), batch)
    drafted = decode(target, draft, *common, options, batch, tick)
    pairs = list(zip(drafted.generations, plain.generations, strict=True))
    trial = Trial(
        setting=setting_of(drafted.plan, batch),
        answers=[_answer(*row) for row in zip(prompts, *zip(*pairs, strict=True), strict=True)],
        tokens=drafted.tokens,
        seconds=drafted.seconds,
        plain_tokens=plain.tokens,
        plain_seconds=plain.seconds,
    )
    if not options.get("sampling", SamplingParams()).greedy:
        return trial
    parted = [i for i, (ours, theirs) in enumerate(pairs) if ours.token_ids != theirs.token_ids]
    if not parted:
        return dataclasses.replace(trial, same=len(pairs), lossless=len(pairs))
    gaps = []
    for i in parted:
        difference = first_difference(target, prompts[i].ids, *pairs[i])
        assert difference is not None
        gaps.append(difference.top2_gap)
    # One at a time only those; a batch stays as it was, for its program is of its size.
    again = parted if batch == 1 else range(len(prompts))
    those = [prompts[i] for i in again]
    padded = decode(target, draft, those, max_new_tokens, {**options, "accept": False}, batch)
    undrafted = dict(zip(again, padded.generations, strict=True))
    changed = sum(pairs[i][0].token_ids != undrafted[i].token_ids for i in parted)
    return dataclasses.replace(
        trial, same=len(pairs) - len(parted), lossless=len(pairs) - changed, largest_gap=max(gaps)
    )


def setting_of(plan: RoundPlan, batch: int) -> Setting:
    """The setting that a round's plan and a batch size make."""
    policy = plan.policy.kind + (f" {plan.policy.tau:g}" if plan.policy.needs_confidence else "")
    policy = TREE if plan.tree else policy
    return Setting(batch, plan.block_size, plan.verify_width, policy)


def _answer(prompt: Prompt, ours: Generation, theirs: Generation) -> Answer:
    return Answer(
        kind=prompt.kind,
        text=prompt.text,
        prompt_tokens=ours.prompt_tokens,
        emitted=ours.emitted,
        finish_reason=ours.finish_reason,
        acceptance_lengths=ours.acceptance_lengths,
        verify_widths=ours.verify_widths,
        seconds=ours.seconds,
        plain_seconds=theirs.seconds,
    )
