"""What a sequence got: from a decoding state's books on the device to a person's figures."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from dflash_jax.round import DecodeState


@dataclasses.dataclass(frozen=True)
class Generation:
    """What one sequence got.

    token_ids: emitted tokens, a stop token included. acceptance_lengths: tokens gained in each
    round, the target's own (bonus) token included, the first token (from the prompt) excluded.
    verify_widths: rows verified in each round, anchor included; of draft trees, those of a path
    that might have been kept whole. drafted: drafts so verified; accepted: drafts committed.
    logprobs: the target's, of each token (None unless asked for). finish_reason: "stop", "length"
    (budget), "capacity" (context full) or "open" (more may come). prefill_seconds: the prompt and
    first token; seconds: all rounds; both are wall time, compilation included where it happened.
    """

    token_ids: list[int]
    prompt_tokens: int
    rounds: int
    drafted: int
    accepted: int
    acceptance_lengths: list[int]
    verify_widths: list[int]
    finish_reason: str
    logprobs: list[float] | None
    prefill_seconds: float
    seconds: float

    @property
    def emitted(self) -> int:
        """How many tokens came out."""
        return len(self.token_ids)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens gained per round, pooled; 0.0 where there was no round."""
        return mean_gain(self.acceptance_lengths)

    @property
    def slot_acceptance(self) -> list[float]:
        """For each draft slot, the share of the rounds that verified it in which it was kept."""
        return SlotAcceptance.of(self.acceptance_lengths, self.verify_widths).kept

    @property
    def tokens_per_second(self) -> float:
        """Tokens gained in rounds over the rounds' wall time; 0.0 where there was no round."""
        return sum(self.acceptance_lengths) / self.seconds if self.rounds else 0.0


def mean_gain(gains: Sequence[int]) -> float:
    """Tokens gained per round, pooled; 0.0 where there was no round."""
    return sum(gains) / len(gains) if gains else 0.0


@dataclasses.dataclass(frozen=True)
class SlotAcceptance:
    """What becomes of each draft slot, over all rounds.

    verified: rounds whose window reached it. kept: the share of those in which it was accepted.
    tried: the rounds in which all drafts before it were accepted too, so that it was judged;
    held: the share of those in which it was accepted.
    """

    verified: list[int]
    kept: list[float]
    tried: list[int]
    held: list[float]

    @classmethod
    def of(cls, gains: Sequence[int], widths: Sequence[int]) -> "SlotAcceptance":
        """From tokens gained and rows verified in each round.

        >>> SlotAcceptance.of(gains=[3, 1, 2, 2], widths=[3, 3, 2, 2])
        SlotAcceptance(verified=[4, 2], kept=[0.75, 0.5], tried=[4, 1], held=[0.75, 1.0])
        """
        rounds = list(zip(gains, widths, strict=True))
        slots = range(1, max(widths, default=1))
        verified = [sum(width > slot for _, width in rounds) for slot in slots]
        kept = [sum(gain > slot for gain, _ in rounds) for slot in slots]
        tried = [sum(gain >= slot < width for gain, width in rounds) for slot in slots]
        return cls(verified, _shares(kept, verified), tried, _shares(kept, tried))


def _shares(parts: Sequence[int], wholes: Sequence[int]) -> list[float]:
    return [part / whole if whole else 0.0 for part, whole in zip(parts, wholes, strict=True)]


def books(state: DecodeState) -> DecodeState:
    """A state's figures and tokens on the host, without caches and what else is large."""
    bare = dataclasses.replace(
        state, target=None, draft=None, sampler=None, history=None, meter=None
    )
    return jax.device_get(bare)


def generation_of(
    host: DecodeState,
    b: int,
    prompt_tokens: int,
    stops: Sequence[int],
    prefill_seconds: float,
    seconds: float,
) -> Generation:
    """What sequence `b` of `books` has got so far."""
    tokens = host.tokens[b, : host.emitted[b]].tolist()
    gains = host.gains[b, : host.rounds[b]].tolist()
    reason = "open"
    if host.done[b]:
        reason = "length" if len(tokens) >= host.budget[b] else "capacity"
        reason = "stop" if tokens[-1] in stops else reason
    return Generation(
        token_ids=tokens,
        prompt_tokens=prompt_tokens,
        rounds=len(gains),
        drafted=int(host.drafted[b]),
        accepted=sum(gains) - len(gains),
        acceptance_lengths=gains,
        verify_widths=host.windows[b, : host.rounds[b]].tolist(),
        logprobs=None if host.logprobs is None else host.logprobs[b, : len(tokens)].tolist(),
        finish_reason=reason,
        prefill_seconds=prefill_seconds,
        seconds=seconds,
    )


def check_faults(host: DecodeState, names: Sequence[str]) -> None:
    """ValueError naming the first sequence of `books` whose logits were not finite, and where."""
    for side in ("draft", "target"):
        fault = np.asarray(getattr(host, f"{side}_fault"))
        if (fault >= 0).any():
            b = int(np.argmax(fault >= 0))
            row = f"draft slot {fault[b] + 1}" if side == "draft" else f"verify row {fault[b]}"
            raise ValueError(f"non-finite {side} logits: {names[b]}, {row}")
