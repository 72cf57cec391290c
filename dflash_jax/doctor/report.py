"""What the doctor found, for people (one screen) and for programs (JSON)."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fault.

    where: "loading", "config", "tensors", "target" or "self-test". name: the config's key, or the
    tensors. text: what is wrong with it.
    """

    where: str
    name: str
    text: str


def merged(loading: list[Finding], tensors: list[Finding]) -> list[Finding]:
    """Both, but for a tensor that loading refused and whose numbers say more."""
    named = {finding.name for finding in tensors}
    return [finding for finding in loading if finding.name not in named] + tensors


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """What the drafter accepted on the target's own greedy texts.

    position1: share of anchors whose first draft was right; floor: the same for a guess by word
    pairs. slots: the same for every slot, given that the ones before were right or not.
    tokens: a round, the target's own one included. tried, left: other settings, and those there was
    no time for. confidence: mean predicted and true share of right drafts, None without a head.
    """

    texts: int
    anchors: int
    position1: float
    floor: float
    slots: list[float]
    tokens: float
    tried: int
    left: int
    confidence: tuple[float, float] | None = None


@dataclasses.dataclass
class Report:
    """Everything about one drafter. `trials` holds each other setting's figures, best first.

    compared: of a target that runs outside JAX, the lengths of the texts after which one row and
    several were run; too_long: lengths at which its config says that it changes, not tried.
    """

    draft: str
    target: str
    family: str | None
    findings: list[Finding]
    self_test: SelfTest | None = None
    trials: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    compared: list[int] = dataclasses.field(default_factory=list)
    too_long: list[int] = dataclasses.field(default_factory=list)
    seed: int = 0
    seconds: float = 0.0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """Nothing found."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"healthy": self.healthy} | dataclasses.asdict(self)

    def text(self, most: int = 16) -> str:
        """One screen."""
        kind = f"{self.family} drafter" if self.family else "drafter"
        lines = [f"{self.draft}: {kind} for {self.target}"]
        test = self.self_test
        if self.compared:
            lines += [
                "self-test   not run: the target is outside JAX",
                f"rows        one and several compared after {len(self.compared)} texts of "
                f"{min(self.compared)} to {max(self.compared)} tokens"
                + "".join(f", not at {edge}, where it changes" for edge in self.too_long),
            ]
        elif test is None:
            lines.append("self-test   not run")
        else:
            lines += [
                f"self-test   position 1 {test.position1:.2f} (word pairs {test.floor:.2f}), "
                f"{test.tokens:.2f} tokens a round, {test.anchors} anchors in {test.texts} texts",
                "  by slot   " + " ".join(f"{rate:.2f}" for rate in test.slots),
                f"  settings  {test.tried} others tried"
                + (f", {test.left} left out for time" if test.left else ""),
            ]
            if test.confidence is not None:
                said, true = test.confidence
                lines.append(f"  confidence  says {said:.2f}, right {true:.2f}")
        for finding in self.findings[:most]:
            lines.append(f"FAULT [{finding.where}] {finding.name}: {finding.text}")
        if len(self.findings) > most:
            lines.append(f"... and {len(self.findings) - most} more (--json lists all)")
        lines.append(
            f"healthy ({self.seconds:.0f} s)"
            if self.healthy
            else f"{len(self.findings)} found ({self.seconds:.0f} s)"
        )
        return "\n".join(lines)
