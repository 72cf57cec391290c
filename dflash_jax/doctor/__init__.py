"""The doctor: why does a drafter accept so little, when the text is right and nothing complains?

`examine` reads what a checkpoint's config and numbers give away, then drafts along the target's own
greedy texts under the stated setting and under the plausible wrong ones. The target's tokens at the
anchors are known, so one teacher-forced pass scores hundreds of rounds.

    report = examine(load_target("smollm2"), "my-drafter")
    print(report.text())
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from dflash_jax.checkpoint import draft_directory
from dflash_jax.config import resolve_harvest
from dflash_jax.doctor import config as statements
from dflash_jax.doctor import texts
from dflash_jax.doctor.blocks import check_block
from dflash_jax.doctor.probe import Probe, Setting, Sight, look
from dflash_jax.doctor.report import Finding, Report, SelfTest, merged
from dflash_jax.doctor.rows import check_rows, contexts, reached
from dflash_jax.doctor.suspects import Suspect, rope_words, suspects
from dflash_jax.doctor.tensors import check_target, check_tensors
from dflash_jax.doctor.trial import Comparison, Search, confidence, low
from dflash_jax.draft import DFlashDraft
from dflash_jax.options import token_ids_of
from dflash_jax.targets import HostedTarget, dense, drafting_tables
from dflash_jax.targets.loading import TORCH, LoadedTarget

__all__ = ["Doctor", "Finding", "Report", "SelfTest", "examine"]

SMALL = 20_000_000
"""Weights of a target that many texts cost little of."""
PROMPTS = 8
"""Built-in ones for a hosted target."""
LONGEST = 256
"""Tokens of a prompt that are kept (its last ones) for the self-test, which shall be quick."""
FAULTS = 3
"""Settings mended one on top of the other."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much the self-test does: texts for all suspects and for the finalists, anchors in each,
    greedy tokens of a text, drafts scored at an anchor.
    """

    screen: int
    confirm: int
    anchors: int
    new: int
    slots: int


def effort(target: Any) -> Effort:
    """By the target's size (a pytree) and the device."""
    size = sum(leaf.size for leaf in jax.tree.leaves(target))
    if size < SMALL or jax.default_backend() != "cpu":
        return Effort(screen=32, confirm=256, anchors=8, new=64, slots=7)
    return Effort(screen=8, confirm=12, anchors=8, new=48, slots=3)


class Doctor:
    """Examines drafters of one target; its texts are written once, for the first.

    prompts: token ids to answer; default: built-in ones, or the target's own inventions where it
    has no tokenizer. seed: of texts and anchors. work: how many; default: by the target's size.
    Of a target that runs outside JAX (`HostedTarget`) there is no self-test: instead its rows are
    compared, one and several at once. Raises NotImplementedError for other targets.
    """

    def __init__(
        self,
        loaded: LoadedTarget,
        prompts: Sequence[Sequence[int]] | None = None,
        seed: int = 0,
        work: Effort | None = None,
    ):
        self._hosted = isinstance(loaded.target, HostedTarget)
        if not isinstance(loaded.target, dense.DenseTarget | HostedTarget):
            raise NotImplementedError(
                f"doctor: expected a dense or a hosted target, found {type(loaded.target).__name__}"
            )
        self._loaded, self._seed, self._prompts = loaded, seed, None
        if prompts is not None:
            size = loaded.target.vocab_size
            ids = [token_ids_of(f"prompt {i}", p, size) for i, p in enumerate(prompts)]
            if [] in ids:
                raise ValueError(f"prompt {ids.index([])}: expected tokens, found none")
            self._prompts = ids if self._hosted else [one[-LONGEST:] for one in ids]
        self._work = work or effort(drafting_tables(loaded.target))
        self._raw = statements.raw_config(Path(loaded.name.removeprefix(TORCH)))

    def examine(
        self,
        draft: str | Path,
        *,
        seconds: float = 25.0,
        harvest: str | None = None,
        dtype: Any = None,
        tell: Callable[[str], None] = lambda what: None,
    ) -> Report:
        """Examine a drafter directory, or a shipped drafter by its name.

        seconds: after which no further setting is tried; loading, texts and compilation come on
        top. harvest: as `resolve_harvest`; dtype: as `load_draft`. tell: told what is under way,
        for who waits.

        Raises FileNotFoundError where there is no such directory. Whatever is wrong with what is
        in it is a finding, not an error.
        """
        began, directory, loaded = time.monotonic(), draft_directory(draft), self._loaded
        model, findings = statements.load_and_listen(directory, loaded, dtype)
        report = Report(str(draft), loaded.name, None, findings, seed=self._seed)
        try:
            report.findings = merged(findings, check_tensors(statements.open_tensors(directory)))
        except (OSError, ValueError) as error:
            if model is not None or not findings:
                report.findings.append(Finding("tensors", "checkpoint", str(error)))
        if self._hosted:
            tell("running one row and several")
            report.compared = [len(text) for text in self._contexts]
            report.too_long = reached(loaded.target)[1]
        report.findings += self._target_findings
        if model is not None:
            report.family = model.config.family
            raw = statements.raw_config(directory)
            report.findings += statements.check_config(raw, model.config, loaded, self._raw)
            base = Setting(model.config, resolve_harvest(model.config, harvest))
            if not self._hosted:
                self._self_test(report, model, base, seconds, tell)
        report.seconds = time.monotonic() - began
        return report

    def _self_test(
        self,
        report: Report,
        draft: DFlashDraft,
        base: Setting,
        seconds: float,
        tell: Callable[[str], None],
    ) -> None:
        """Fill in `report.self_test` and what it finds."""
        tell("writing texts with the target")
        screen, confirm, floor = self._sights
        config = base.config
        slots = min(base.harvest.drafts(config.block_size), self._work.slots)
        probe = Probe(self._loaded.target, draft, slots, config.block_size)
        tell("drafting along them")
        whole = probe.score(confirm, base)
        if not whole.finite:
            text = "non-finite draft logits in the self-test"
            report.findings.append(Finding("self-test", "draft logits", text))
        search = Search(probe, screen, confirm, time.monotonic() + seconds, tell)
        mended = self._search(report, search, base)
        if time.monotonic() < search.deadline:
            report.findings += check_block(self._loaded.target, draft, mended, confirm)
        head = confidence(whole)
        report.self_test = SelfTest(
            texts=whole.texts,
            anchors=len(whole.known),
            position1=whole.first,
            floor=floor,
            slots=(whole.correct.sum(0) / whole.known.sum(0).clip(1)).tolist(),
            tokens=whole.tokens,
            tried=search.tried,
            left=search.left,
            confidence=None if head is None else (head.says, head.right),
        )
        report.trials = search.trials
        if head is not None and not report.findings:
            faults = [Finding("self-test", "confidence_head", text) for text in head.faults()]
            report.findings += faults
        # A chance find among two hundred settings is no reason for what stays low with it.
        if whole.finite and all(finding.where == "self-test" for finding in report.findings):
            best = whole if mended is base else probe.score(confirm, mended)
            rest = "no other setting explains it" if mended is base else "that does not explain it"
            if why := low(best, floor):
                text = f"position 1 {best.first:.2f} is {why}, and {rest}"
                report.findings.append(Finding("self-test", "unexplained", text))

    @functools.cached_property
    def _target_findings(self) -> list[Finding]:
        target = self._loaded.target
        if not self._hosted:
            return check_target(target)
        return [*check_target(target.tables), *check_rows(target, self._contexts)]

    @functools.cached_property
    def _contexts(self) -> list[list[int]]:
        """Texts of a hosted target after which its rows are compared."""
        prompts = self._prompts or texts.builtin_prompts(self._loaded, PROMPTS, self._seed)
        return contexts(self._loaded.target, prompts, self._seed)

    @functools.cached_property
    def _sights(self) -> tuple[Sight, Sight, float]:
        """Texts to try all settings on, others to confirm with, and the floor of the latter."""
        loaded, work, prompts = self._loaded, self._work, self._prompts
        count = work.screen + work.confirm
        if prompts is None:
            prompts = texts.builtin_prompts(loaded, count, self._seed)
        else:
            prompts = [prompts[i % len(prompts)] for i in range(max(2, min(count, len(prompts))))]
        ids, begin = texts.greedy_texts(loaded, prompts, count, work.new, self._seed)
        stops = loaded.target.stop_token_ids
        anchors = texts.choose_anchors(ids, begin, stops, work.anchors, work.slots, self._seed)
        sight = look(loaded.target, ids, anchors)
        split = max(1, len(ids) * work.screen // count)
        floor = texts.follower_floor(ids[split:], anchors[split:])
        return sight.rows(slice(0, split)), sight.rows(slice(split, None)), floor

    def _search(self, report: Report, search: Search, base: Setting) -> Setting:
        """Mend the setting while another does better, each step a finding; the last one."""
        target, longest = self._loaded.target, search.screen.ids.shape[1]
        for _ in range(FAULTS):
            masks = statements.mask_candidates(base.config, self._loaded, self._raw)
            found = search.best(base, suspects(base, target, masks, longest))
            if found is None:
                break
            suspect, comparison = found
            report.findings.append(_finding(suspect, comparison, base))
            base = suspect.setting
        return base


def examine(
    loaded: LoadedTarget,
    draft: str | Path,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
    **options: Any,
) -> Report:
    """`Doctor(loaded, prompts, seed).examine(draft, **options)`."""
    return Doctor(loaded, prompts, seed).examine(draft, **options)


def _finding(suspect: Suspect, found: Comparison, base: Setting) -> Finding:
    stated = stated_value(suspect.name, base)
    instead = f" instead of {stated}" if stated else ""
    (first, first_then), (tokens, tokens_then) = found.position1, found.tokens
    text = (
        f"{suspect.says}{instead} does better: position 1 {first:.2f} -> {first_then:.2f}, "
        f"tokens a round {tokens:.2f} -> {tokens_then:.2f}, {found.longer} anchors longer and "
        f"{found.shorter} shorter, log-probability {found.gain:+.3f} a token "
        f"({found.sigmas:.1f} standard errors)"
    )
    return Finding("self-test", suspect.name, text)


def stated_value(name: str, base: Setting) -> str | None:
    """What the setting says now of a config key; None for tensors."""
    config = base.config
    return {
        "target_layer_ids": str(list(config.target_layer_ids)),
        "harvest": base.harvest.value,
        "rope": rope_words(config.rope),
        "is_causal": str(list(config.layer_causal)).lower(),
        "sliding_window": str(list(config.layer_window)).lower(),
        "mask_token_id": str(config.mask_token_id),
        "rms_norm_eps": f"{config.rms_norm_eps:g}",
        "input_embedding_scale": f"{config.input_embedding_scale:g}",
        "output_multiplier": f"{config.output_multiplier:g}",
        "final_logit_softcapping": str(config.final_logit_softcapping or "off"),
        "selector_top_k": str(config.dflash2 and config.dflash2.selector_top_k),
        "block_size": str(config.block_size),
    }.get(name)
