"""How much of a proposal the target verifies and accepts.

A policy never changes the output's law: it looks at hidden rows and proposed tokens of the round
and at earlier rounds' results, never at this round's verify.
"""

import dataclasses
from collections.abc import Mapping
from numbers import Real
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.integers import cdiv
from dflash_jax.sampling import leading_count

PolicyKind = Literal["fixed", "ladder", "confidence", "confidence-slot", "cost"]

OPTIMISM, PRIOR = 0.8, 3.0
"""What `cost` takes a drafter for before it has seen it: this share of drafts accepted, with the
weight of so many drafts."""
FADE, IDLE_FADE = 0.95, 0.99
"""What a round leaves of older evidence. A plain round has none of its own, so that a drafter that
was turned off is tried again as the old evidence fades: the sooner, the less a trial costs."""


@dataclasses.dataclass(frozen=True)
class DSparkVtPolicy:
    """How wide a round verifies.

    fixed: always the cap. ladder: two rows more than the last round accepted, at first the cap.
    confidence: while the product of the drafts' confidences is at least tau. confidence-slot:
    while each draft's own confidence is at least tau. 0 < tau < 1. cost: the width of the most
    expected tokens a second, see `cost_widths`; it may also be 1, a round without a draft.
    """

    kind: PolicyKind = "fixed"
    tau: float = 0.5

    def __post_init__(self):
        if self.kind not in get_args(PolicyKind):
            expected = ", ".join(get_args(PolicyKind))
            raise ValueError(f"window policy: expected one of {expected}, found {self.kind!r}")
        number = isinstance(self.tau, Real) and not isinstance(self.tau, bool)
        if not number or not 0 < self.tau < 1:
            raise ValueError(f"tau: expected a number between 0 and 1, found {self.tau!r}")

    @property
    def needs_confidence(self) -> bool:
        """Whether it reads a confidence head."""
        return self.kind in ("confidence", "confidence-slot")


def resolve_policy(
    policy: DSparkVtPolicy | None, *, is_dspark: bool, has_confidence: bool
) -> DSparkVtPolicy:
    """The policy to use; by default DSpark takes confidence-slot 0.5 with a confidence head and the
    ladder without one, and the other families the fixed cap. ValueError for a confidence policy
    without a head.
    """
    if policy is None:
        if not is_dspark:
            return DSparkVtPolicy("fixed")
        return DSparkVtPolicy("confidence-slot" if has_confidence else "ladder")
    if not isinstance(policy, DSparkVtPolicy):
        raise ValueError(f"policy: expected a DSparkVtPolicy, found {policy!r}")
    if policy.needs_confidence and not has_confidence:
        raise ValueError(
            f"window policy {policy.kind!r}: expected a drafter with a confidence head, found none"
        )
    return policy


def measured_window(family: str, platform: str, trees: bool = False) -> dict[str, Any]:
    """The `SpecSession` options that decoded fastest with the shipped drafters, as keywords.

    Args: family of the drafter; platform: JAX's name of the backend, `cpu` or another; trees:
    whether the target takes draft trees (`dense.DenseTarget` does).

    A GPU verifies a whole block, or a tree of `options.TREE_WIDTH` nodes, at the price of one
    token. A CPU pays for rows: on two cores, f32, four of SmolLM2's take half as long again as one,
    eight twice as long, and every block row adds to the drafter's own head. DSpark's pair scores
    keep the acceptance of a short block, where rows drafted independently lose some, so only its
    block is cut.
    """
    options: dict[str, Any] = {"policy": DSparkVtPolicy("fixed")}
    if platform == "cpu":
        options["verify_width"] = 4
        if family == "dspark":
            options["block_size"] = 4
    return options | ({"tree": True} if trees else {})


def parts_of(rows: int) -> tuple[int, ...]:
    """A quarter and half of a block's rows, two at least, and all of them, ascending."""
    return tuple(sorted({max(2, cdiv(rows, 4)), max(2, cdiv(rows, 2)), rows}))


def default_widths(policy: DSparkVtPolicy, widest: int, rows_cost: bool = False) -> tuple[int, ...]:
    """The verify widths to compile, ascending: each is a program of the target's.

    `cost` chooses among none, a quarter, half and the whole. The others get the whole alone, for a
    GPU verifies it at the price of a row; rows_cost: where it doesn't, as on a CPU, a quarter and a
    half too.
    """
    if policy.kind == "cost":
        return tuple(sorted({1, *parts_of(widest)}))
    return parts_of(widest) if rows_cost and policy.kind != "fixed" else (widest,)


Costs = Mapping[int, float] | Mapping[int, Mapping[int, float]]
"""{width: seconds of a round}, or that at each of some contexts: {context: {width: seconds}}."""


def by_context(costs: Costs) -> dict[int, Mapping[int, float]]:
    """The second form of `Costs`, ascending; what does not depend on a context is that of 0.

    ValueError for a context that is no number of rows.
    """
    rows: dict[int, Any] = dict(costs)
    if not any(isinstance(row, Mapping) for row in rows.values()):
        return {0: rows}
    for context in rows:
        if isinstance(context, bool) or not isinstance(context, int) or context < 0:
            raise ValueError(f"costs: expected contexts from 0 rows on, found {context!r}")
    return dict(sorted(rows.items()))


class Meter(struct.PyTreeNode):
    """What the `cost` policy knows of each of `B` sequences.

    seconds `[B, p, n]`: of a round at each of p contexts (rows held, `contexts [B, p]`, ascending)
    and each compiled width, draft and all; the first width is 1, a step without a draft.
    tried, kept `[B]`: drafts judged and accepted lately, older rounds faded.
    """

    contexts: jax.Array
    seconds: jax.Array
    tried: jax.Array
    kept: jax.Array

    @classmethod
    def of(cls, costs: Costs, batch: int) -> "Meter":
        """Nothing seen yet."""
        table = by_context(costs)
        contexts = jnp.asarray([*table], jnp.float32)
        seconds = jnp.asarray(
            [[float(row[width]) for width in sorted(row)] for row in table.values()], jnp.float32
        )
        zeros = jnp.zeros((batch,), jnp.float32)
        return cls(
            contexts=jnp.tile(contexts[None], (batch, 1)),
            seconds=jnp.tile(seconds[None], (batch, 1, 1)),
            tried=zeros,
            kept=zeros + 0,
        )

    def price(self, held: jax.Array) -> jax.Array:
        """Seconds `[B, n]` of a round over `held [B]` rows: between two contexts by a straight
        line, outside them those of the nearest.
        """
        over_widths = jax.vmap(jnp.interp, in_axes=(None, None, 1))
        return jax.vmap(over_widths)(held.astype(jnp.float32), self.contexts, self.seconds)


def cost_widths(
    meter: Meter, widths: tuple[int, ...], held: jax.Array, live: jax.Array, shared: bool
) -> jax.Array:
    """The width `[B]` of the most expected tokens a second, over `held [B]` rows of context.

    A sequence whose drafts are each accepted at rate a gains (1 - a^w) / (1 - a) tokens of w rows.
    shared: one width for all `live [B]` sequences, of the most tokens together, at the price of
    their mean context. Otherwise each looks at itself alone, so that what it draws does not depend
    on its neighbours.
    """
    rate = (meter.kept + PRIOR * OPTIMISM) / (meter.tried + PRIOR)
    rate = rate[:, None]
    gain = (1 - rate ** jnp.asarray(widths, jnp.float32)[None]) / (1 - rate)
    if shared:
        weight = live.astype(jnp.float32)
        mean = jnp.sum(weight * held.astype(jnp.float32)) / jnp.maximum(jnp.sum(weight), 1)
        held = jnp.full(held.shape, mean)
    speed = gain / meter.price(held)
    if shared:
        speed = jnp.where(live[:, None], speed, 0.0).sum(axis=0, keepdims=True)
    best = jnp.asarray(widths, jnp.int32)[jnp.argmax(speed, axis=1)]
    return jnp.broadcast_to(best, live.shape)


def metered(meter: Meter, accepted: jax.Array, width: jax.Array, live: jax.Array) -> Meter:
    """The meter after a round that verified `width [B]` rows and accepted `accepted [B]` drafts."""
    # The first rejection is the last draft that was judged.
    judged = jnp.minimum(accepted + 1, width - 1).astype(jnp.float32)
    fade = jnp.where(width > 1, FADE, IDLE_FADE)

    def after(count: jax.Array, more: jax.Array) -> jax.Array:
        return jnp.where(live, fade * count + more, count)

    return meter.replace(
        tried=after(meter.tried, judged),
        kept=after(meter.kept, accepted.astype(jnp.float32)),
    )


def choose_vt(
    policy: DSparkVtPolicy, raws: jax.Array | None, accepted: jax.Array, cap: int
) -> jax.Array:
    """The round's verify width `[]`, anchor included.

    Args: raws `[nd]` this round's confidences (None without a head); accepted: drafts the last
      round accepted, -1 before the first; cap: most rows.
    """
    if policy.kind == "ladder":
        return jnp.where(accepted < 0, cap, ladder_vt(accepted, cap)).astype(jnp.int32)
    if policy.needs_confidence:
        assert raws is not None
        survival = policy.kind == "confidence"
        width = dspark_confidence_vt if survival else dspark_slot_confidence_vt
        return width(raws, policy.tau, cap)
    return jnp.int32(cap)


def dspark_accept_prefix(cand: jax.Array, vam: jax.Array, vt: jax.Array | int) -> jax.Array:
    """Accepted drafts m of one round, by token equality.

    Args:
      cand: `[..., w]` verify rows: the anchor (already decided), then the drafts.
      vam: `[..., w]` the target's argmax after each row: vam[j] predicts the token after row j.
      vt: `[...]` verify width, anchor included; rows from vt on are not looked at.

    m grows while m < vt - 1 and cand[m + 1] == vam[m]; rows 0..m are committed and vam[m] is the
    next anchor.

    >>> import jax.numpy as jnp
    >>> int(dspark_accept_prefix(jnp.array([5, 6, 7, 9]), jnp.array([6, 7, 8, 1]), 4))
    2
    """
    agreed = leading_count(cand[..., 1:] == vam[..., :-1])
    return jnp.clip(jnp.asarray(vt) - 1, 0, agreed)


def dspark_confidence_vt(raws: jax.Array, tau: jax.Array | float, cap: int) -> jax.Array:
    """Verify width by survival: keep leading slots while prod sigmoid(raws[..j]) >= tau.

    Args: raws `[nd]` pre-sigmoid scores, one a draft; cap: most rows, anchor included.

    Returns 1 + kept drafts, within 2..max(cap, 2): the block is drafted already, and one more row
    costs less than a round that can gain nothing. f32; equality keeps the slot.
    """
    return _window(jnp.cumprod(_sigmoid(raws)) >= tau, cap)


def dspark_slot_confidence_vt(raws: jax.Array, tau: jax.Array | float, cap: int) -> jax.Array:
    """As `dspark_confidence_vt`, by each slot's own sigmoid: cut at the first one below tau."""
    return _window(_sigmoid(raws) >= tau, cap)


def ladder_vt(accepted: jax.Array, cap: int) -> jax.Array:
    """The next round's width after `accepted` drafts: two more rows than that, 3..cap."""
    return jnp.clip(accepted + 2, min(3, cap), cap)


def _sigmoid(raws: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(jnp.asarray(raws, jnp.float32))


def _window(keeps: jax.Array, cap: int) -> jax.Array:
    return jnp.clip(1 + leading_count(keeps), 2, max(cap, 2))
