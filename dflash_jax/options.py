"""What callers may ask for: options and token ids checked, and the plan of a round they make."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import kernels, sharding
from dflash_jax.attention import for_int8
from dflash_jax.config import DSparkHarvest, resolve_harvest
from dflash_jax.draft import DFlashDraft
from dflash_jax.integers import round_up
from dflash_jax.kernels import Implementation
from dflash_jax.kv import DraftKVDtype
from dflash_jax.propose import RowDraws, tree_candidates
from dflash_jax.round import RoundPlan
from dflash_jax.sampling import SamplingParams
from dflash_jax.targets import AnyTarget, HostedTarget, Target, takes_trees
from dflash_jax.tree import most_nodes
from dflash_jax.window import (
    Costs,
    DSparkVtPolicy,
    by_context,
    default_widths,
    resolve_policy,
)

MIN_CAPACITY, CAPACITY_STEP = 256, 4096
TREE_WIDTH = 16
"""Nodes of a draft tree where nothing else is asked for: the rows that a GPU's matrix units take at
the price of one."""
ALL_ROUNDS = np.iinfo(np.int32).max
STOPS = 8
"""Stop ids that share a program: sets are padded to a multiple of this."""


def round_plan(
    target: AnyTarget,
    draft: DFlashDraft | None,
    *,
    block_size: int | None = None,
    verify_width: int | None = None,
    harvest: DSparkHarvest | str | None = None,
    policy: DSparkVtPolicy | None = None,
    widths: Sequence[int] | None = None,
    costs: Costs | None = None,
    tree: bool = False,
    row_draws: RowDraws = "argmax",
    draft_kv_dtype: DraftKVDtype = "auto",
    logprobs: bool = False,
    implementation: Implementation = None,
    capacity: int = 1,
    sampled: bool = False,
) -> RoundPlan:
    """The plan of a round, as `session.SpecSession` documents its options.

    ValueError or NotImplementedError naming what does not fit.
    """
    if not isinstance(target, Target | HostedTarget):
        raise ValueError(
            f"target: expected a Target (load_target(...).target), found a {kind_of(target)}"
        )
    if not isinstance(draft, DFlashDraft | None):
        raise ValueError(
            f"draft: expected a DFlashDraft (load_draft) or None, found a {kind_of(draft)}"
        )
    sharding.check_pair(target, draft)
    kernels.check(implementation)
    if not isinstance(draft_kv_dtype, str) or draft_kv_dtype not in get_args(DraftKVDtype):
        raise ValueError(f"draft_kv_dtype: expected 'auto' or 'int8', found {draft_kv_dtype!r}")
    same = {
        "capacity": capacity,
        "logprobs": logprobs,
        "implementation": implementation,
        "sampled": sampled,
    }
    if draft is None:
        return RoundPlan(block_size=1, verify_width=1, **same)
    target.check_drafter(draft.config)
    harvest = resolve_harvest(draft.config, harvest)
    block = between("block_size", block_size, 2, draft.config.block_size)
    if not isinstance(tree, bool):
        raise ValueError(f"tree: expected True or False, found {tree!r}")
    slots = harvest.drafts(block)
    most = most_rows(draft, slots, tree)
    if tree and verify_width is None:
        verify_width = min(TREE_WIDTH, most)
    width = between("verify_width", verify_width, 2, most)
    if row_draws not in get_args(RowDraws):
        raise ValueError(f"row_draws: expected 'argmax' or 'sample', found {row_draws!r}")
    if draft_kv_dtype == "int8":
        for_int8(implementation)
    if tree:
        policy = _policy_of_trees(target, policy, widths, row_draws)
    policy = resolve_policy(
        policy,
        is_dspark=draft.config.family == "dspark",
        has_confidence=draft.confidence is not None,
    )
    return RoundPlan(
        block_size=block,
        verify_width=width,
        harvest=harvest,
        policy=policy,
        widths=_widths(policy, widths, costs, width),
        tree=tree,
        row_draws=row_draws,
        draft_kv_dtype=draft_kv_dtype,
        **same,
    )


def most_rows(draft: DFlashDraft, slots: int, tree: bool) -> int:
    """The widest verify of a block of `slots` drafts, anchor included: a chain's, or a tree's."""
    return most_nodes(slots, tree_candidates(draft)) if tree else slots + 1


def _policy_of_trees(
    target: AnyTarget,
    policy: DSparkVtPolicy | None,
    widths: Sequence[int] | None,
    row_draws: RowDraws,
) -> DSparkVtPolicy:
    """The policy that verifies all nodes; ValueError for what is not made for draft trees."""
    if not takes_trees(target):
        raise ValueError(
            f"tree: expected a target that takes draft trees, found a {kind_of(target)}"
        )
    policy = DSparkVtPolicy("fixed") if policy is None else policy
    if isinstance(policy, DSparkVtPolicy) and policy.kind != "fixed":
        raise ValueError(f"tree: expected the window policy 'fixed', found {policy.kind!r}")
    if widths is not None:
        raise ValueError(f"tree: expected no widths (its own is verify_width), found {widths!r}")
    if row_draws != "argmax":
        raise ValueError(f"tree: expected row_draws 'argmax', found {row_draws!r}")
    return policy


def _widths(
    policy: DSparkVtPolicy,
    widths: Sequence[int] | None,
    costs: Costs | None,
    widest: int,
) -> tuple[int, ...]:
    """Compiled verify widths, ascending, ending in the widest."""
    paid = policy.kind == "cost"
    if costs is not None and not paid:
        raise ValueError(f"costs: expected with the policy 'cost', found {policy.kind!r}")
    if not isinstance(costs, Mapping | None):
        raise ValueError(f"costs: expected a mapping of widths to seconds, found {costs!r}")
    rows = () if costs is None else [*by_context(costs).values()]
    least = 1 if paid else 2
    given = () if widths is None else sequence_of("widths", widths)
    chosen = {*(between("widths", w, least, widest) for w in given), widest}
    if widths is None:
        priced = rows[0] if rows and isinstance(rows[0], Mapping) else ()
        chosen = {*(priced if rows else default_widths(policy, widest))}
    chosen |= {1} if paid else set()
    for row in rows:
        _check_costs(row, chosen, widest)
    return tuple(sorted(chosen))


def _check_costs(costs: Any, widths: Iterable[int], widest: int) -> None:
    """ValueError unless there is a price for each width: 1, the widest, and those between."""
    if not isinstance(costs, Mapping) or set(costs) != {1, *widths, widest}:
        found = sorted(costs) if isinstance(costs, Mapping) else costs
        raise ValueError(
            f"costs: expected seconds for {sorted({1, *widths, widest})}, found {found}"
        )
    for width, seconds in costs.items():
        number = isinstance(seconds, Real) and not isinstance(seconds, bool)
        if not number or not 0 < float(seconds) < float("inf"):
            raise ValueError(f"costs: expected seconds above 0, found {seconds!r} for {width}")


def stop_table(stops: Sequence[Sequence[int]], room: int = STOPS) -> jax.Array:
    """Stop ids of each sequence `[B, n]`, padded with -1 to `room` or a multiple of it."""
    longest = max(map(len, stops))
    room = round_up(max(1, longest), room)
    return jnp.asarray([[*ids, *[-1] * (room - len(ids))] for ids in stops], jnp.int32)


def default_capacity(rows: int, limit: int) -> int:
    """Rows to allocate for `rows`, at most `limit`: a power of two, or a multiple of 4096.

    Nearby lengths so share compiled programs, and a long context is not doubled.
    """
    if rows > CAPACITY_STEP:
        return min(round_up(rows, CAPACITY_STEP), limit)
    capacity = MIN_CAPACITY
    while capacity < rows:
        capacity *= 2
    return min(capacity, limit)


def budget_of(value: Any) -> int:
    """Most tokens to emit, a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"max_new_tokens: expected a positive integer, found {value!r}")
    return min(int(value), ALL_ROUNDS)


def between(name: str, value: int | None, low: int, high: int) -> int:
    """An integer in `low..high`; None stands for the highest."""
    value = high if value is None else value
    if (
        isinstance(value, bool)
        or not isinstance(value, int | np.integer)
        or not low <= value <= high
    ):
        raise ValueError(f"{name}: expected {low}..{high}, found {value!r}")
    return int(value)


def kind_of(value: Any) -> str:
    """The name of a value's type, for errors."""
    return type(value).__name__


def rounds_of(rounds: int | None, least: int) -> int:
    """Rounds to run as an int32; None stands for all."""
    if rounds is None:
        return ALL_ROUNDS
    if isinstance(rounds, bool) or not isinstance(rounds, int | np.integer) or rounds < least:
        raise ValueError(f"rounds: expected an integer from {least} or None, found {rounds!r}")
    return min(int(rounds), ALL_ROUNDS)


def stop_limit(target: AnyTarget) -> int:
    """Stop ids are below this: the vocabulary's size, but a target's own may lie beyond it."""
    return max([target.vocab_size, *(token + 1 for token in target.stop_token_ids)])


def stop_ids_of(stops: Any, vocabulary: int | None) -> list[int] | list[list[int]]:
    """Stop ids for all sequences, or a list of them for each."""
    every: Any = listed(stops)
    many = isinstance(every, Sequence) and not isinstance(every, str) and len(every) > 0
    first = listed(every[0]) if many else None
    if isinstance(first, Sequence) and not isinstance(first, str):
        return [token_ids_of("stop_token_ids", ids, vocabulary) for ids in every]
    return token_ids_of("stop_token_ids", every, vocabulary)


def requests_of(sampling: Any) -> SamplingParams | Sequence[SamplingParams]:
    """ValueError for what is neither `SamplingParams` nor a list of them."""
    for params in sampling if isinstance(sampling, Sequence) else [sampling]:
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"sampling: expected SamplingParams (or one a prompt), found {params!r}"
            )
    return sampling


def listed(value: Any) -> Any:
    """The elements of an array of either library, anything else as it is."""
    return np.asarray(value).tolist() if isinstance(value, np.ndarray | jax.Array) else value


def sequence_of(name: str, values: Any) -> Sequence[Any]:
    """A sequence as it is, the elements of an array; ValueError for others."""
    values = listed(values)
    if not isinstance(values, Sequence):
        raise ValueError(f"{name}: expected a list, found {values!r}")
    return values


def token_ids_of(name: str, ids: Any, vocabulary: int | None) -> list[int]:
    """Token ids as ints; without a vocabulary, those that an int32 holds."""
    ids = listed(ids)
    if not isinstance(ids, Iterable):
        raise ValueError(f"{name}: expected token ids, found {ids!r}")
    last = np.iinfo(np.int32).max if vocabulary is None else vocabulary - 1
    out = []
    for token in ids:
        if isinstance(token, jax.Array) and token.ndim == 0:
            token = token.item()
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise ValueError(f"{name}: expected token ids, found {token!r}")
        if not 0 <= token <= last:
            raise ValueError(f"{name}: expected ids in 0..{last}, found {token}")
        out.append(int(token))
    return out
