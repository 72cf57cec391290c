"""Continuous batching: requests join and leave the rows of one compiled loop between rounds.

    for number, result in serve(target, draft, [Request(ids), Request(other, 32)], slots=8): ...

A request gets the tokens that it would get alone, whoever its neighbours are, whichever slot it
takes and whenever it comes.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dflash_jax import cost, hosted, loop, sharding
from dflash_jax.draft import DFlashDraft
from dflash_jax.options import (
    STOPS,
    between,
    budget_of,
    default_capacity,
    round_plan,
    rounds_of,
    stop_limit,
    stop_table,
    token_ids_of,
)
from dflash_jax.results import Generation, books, check_faults, generation_of
from dflash_jax.round import DecodeState
from dflash_jax.sampling import Kind, SamplingParams, kinds_of
from dflash_jax.session import GREEDY
from dflash_jax.targets import Target


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and what is wanted of it. stop_token_ids: None for the target's own."""

    ids: Sequence[int]
    max_new_tokens: int = 128
    sampling: SamplingParams = GREEDY
    stop_token_ids: Sequence[int] | None = None

    def __post_init__(self):
        if not isinstance(self.sampling, SamplingParams):
            raise ValueError(f"sampling: expected SamplingParams, found {self.sampling!r}")


class Piece(NamedTuple):
    """New tokens of one request, by its number; `result` with the last ones, None before."""

    request: int
    token_ids: list[int]
    result: Generation | None


def serve(
    target: Target,
    draft: DFlashDraft | None,
    requests: Iterable[Request],
    slots: int = 8,
    **options: Any,
) -> Iterator[tuple[int, Generation]]:
    """(number, result) of every request, as they finish; `slots` are decoded at a time.

    Args:
      target, draft: as in `session.generate`.
      requests: a list, or an iterator that is asked for one whenever a slot is free. An iterator
        cannot be looked through beforehand: say `capacity`, and which `kinds` of sampling may come.
      **options: those of `Slots`.

    ValueError names a request that cannot be honoured; of a list, before anything runs.
    """
    for piece in stream(target, draft, requests, slots, rounds=None, **options):
        if piece.result is not None:
            yield piece.request, piece.result


def stream(
    target: Target,
    draft: DFlashDraft | None,
    requests: Iterable[Request],
    slots: int = 8,
    *,
    rounds: int | None = 1,
    **options: Any,
) -> Iterator[Piece]:
    """As `serve`, with new tokens every `rounds` rounds (None: whenever a request finishes)."""
    if isinstance(requests, Sequence):
        options = _needs(target, requests) | options
    elif "capacity" not in options:
        raise ValueError("capacity: expected rows a sequence for an iterator, found none given")
    rows = Slots(target, draft, slots, **options)
    if isinstance(requests, Sequence):
        for number, request in enumerate(requests):
            rows.check(request, number)
    waiting = enumerate(requests)
    while True:
        for number, request in itertools.islice(waiting, len(rows.free)):
            rows.join(request, number)
        if len(rows.free) == slots:
            return
        # A first token may have been the last one: its slot is free before a round runs.
        pieces = rows.news()
        yield from pieces
        if not any(piece.result for piece in pieces):
            rows.burst(rounds)
            yield from rows.news()


def _needs(target: Target, requests: Sequence[Request]) -> dict[str, Any]:
    """The options of `Slots` that a list of requests needs."""
    if not requests:
        raise ValueError("requests: expected at least one, found none")
    rows, stops = 1, [len(target.stop_token_ids)]
    for number, request in enumerate(requests):
        with _naming(number):
            ids = token_ids_of("prompt", request.ids, target.vocab_size)
            rows = max(rows, len(ids) + budget_of(request.max_new_tokens) - 1)
            if request.stop_token_ids is not None:
                stops.append(len(_stop_ids(request.stop_token_ids, target)))
    return {
        "capacity": default_capacity(rows, target.max_positions),
        "kinds": kinds_of(r.sampling for r in requests),
        "stops": max(STOPS, *stops),
    }


def _stop_ids(stops: Sequence[int], target: Target) -> list[int]:
    return token_ids_of("stop_token_ids", stops, stop_limit(target))


@contextlib.contextmanager
def _naming(number: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"request {number}: {error}") from None


class Slots:
    """`slots` sequences side by side, each a request's or free.

    Args:
      target, draft: as in `session.generate`.
      capacity: rows that a request may hold, prompt and output.
      kinds: of sampling that may come, of `sampling.Kind` (none: greedy requests only). They are
        parts of the compiled programs: nothing is compiled again as requests come and go.
      stops: most stop ids of a request.
      mesh: as in `session.SpecSession`; its data axis divides the slots.
      **options: of `options.round_plan` (block_size, verify_width, harvest, policy, widths, costs,
        tree, row_draws, draft_kv_dtype, logprobs, implementation), as in `session.SpecSession`.

    A prompt is read alone, chunk by chunk, into caches of one sequence; these then take the place
    of the slot's, in the donated state: no other sequence is touched or copied. Over a mesh every
    group of its data axis reads it, and one keeps it.
    """

    def __init__(
        self,
        target: Target,
        draft: DFlashDraft | None,
        slots: int,
        *,
        capacity: int,
        kinds: Iterable[Kind] = (),
        stops: int = STOPS,
        mesh: Mesh | None = None,
        **options: Any,
    ):
        capacity = between("capacity", capacity, 1, target.max_positions)
        target = hosted.refuse_hosted(target, "batches that requests join")
        target, draft = sharding.shard_pair(target, draft, mesh)
        self.kinds = kinds_of((), kinds)
        sampled = "sampled" in self.kinds
        self.plan = round_plan(target, draft, capacity=capacity, sampled=sampled, **options)
        self.target, self.draft, self.mesh = target, draft, getattr(target, "mesh", None)
        self.slots, self._stops = between("slots", slots, 1, 1 << 16), stops
        sharding.check_batch(self.mesh, self.slots, "slots")
        self.costs = options.get("costs")
        if self.plan.policy.kind == "cost" and self.costs is None:
            assert draft is not None
            self.costs = cost.measure_costs(target, draft, self.plan, self.slots, kinds=self.kinds)
        self._state: tuple[DecodeState, jax.Array] | None = None
        self._held: list[_Held | None] = [None] * self.slots

    @property
    def free(self) -> list[int]:
        """Slots without a request."""
        return [slot for slot, held in enumerate(self._held) if held is None]

    def check(self, request: Request, number: int = 0) -> tuple[list[int], list[int]]:
        """A request's ids and stop ids; ValueError naming what these slots cannot do for it."""
        with _naming(number):
            ids = token_ids_of("prompt", request.ids, self.target.vocab_size)
            stops = [*self.target.stop_token_ids]
            if request.stop_token_ids is not None:
                stops = _stop_ids(request.stop_token_ids, self.target)
            budget_of(request.max_new_tokens)
            if not 1 <= len(ids) <= self.plan.capacity:
                most = self.plan.capacity
                raise ValueError(f"prompt: expected 1..{most} tokens (capacity), found {len(ids)}")
            if len(stops) > self._stops:
                raise ValueError(
                    f"stop_token_ids: expected at most {self._stops} (stops), found {len(stops)}"
                )
            if not request.sampling.kinds <= self.kinds:
                missing = ", ".join(sorted(request.sampling.kinds - self.kinds))
                raise ValueError(f"sampling: expected slots of these kinds, found none: {missing}")
        return ids, stops

    def join(self, request: Request, number: int = 0) -> int:
        """Read a request's prompt into a free slot and emit its first token; returns the slot.

        ValueError where no slot is free, and as `check`.
        """
        ids, stops = self.check(request, number)
        if not self.free:
            raise ValueError(f"slots: expected a free one, found all {self.slots} taken")
        slot, plan, began = self.free[0], self.plan, time.perf_counter()
        row = loop.read_alone(
            self.target,
            self.draft,
            plan,
            ids,
            stop_table([stops], self._stops)[0],
            request.sampling,
            self.kinds,
            budget=budget_of(request.max_new_tokens),
            verify_cap=plan.verify_width,
            costs=self.costs,
        )
        if self._state is None:
            self._state = loop.side_by_side(row, self.slots, self.mesh)
        self._state = loop.join(self._state, row, jnp.int32(slot), self.mesh)
        jax.block_until_ready(self._state)
        taken = time.perf_counter() - began
        self._held[slot] = _Held(number, len(ids), stops, prefill_seconds=taken)
        return slot

    def leave(self, slot: int) -> None:
        """Give up a slot's request; its neighbours go on."""
        if self._held[slot] is None:
            raise ValueError(f"slot: expected one with a request, found {slot} free")
        assert self._state is not None
        state, stops = self._state
        done = np.array(state.done)
        done[slot] = True
        done = jax.device_put(done, state.done.sharding)
        self._state, self._held[slot] = (state.replace(done=done), stops), None

    def burst(self, rounds: int | None = None) -> None:
        """At most `rounds` rounds, fewer where a request finishes sooner (None: until then)."""
        if self._state is None:
            raise ValueError("slots: expected join() first, found none taken")
        state, stops = self._state
        limit, began = jnp.int32(rounds_of(rounds, 0)), time.perf_counter()
        idle = jnp.sum(state.done)
        state = loop.decode(self.target, self.draft, state, stops, limit, self.plan, idle)
        self._state = jax.block_until_ready((state, stops))
        taken = time.perf_counter() - began
        for held in self._held:
            if held is not None:
                held.seconds += taken

    def news(self) -> list[Piece]:
        """What each request got since the last call; the finished ones leave their slots."""
        assert self._state is not None
        state = self._state[0]
        names = ["a free slot" if h is None else f"request {h.number}" for h in self._held]
        check_faults(state, names)
        done, emitted, tokens = jax.device_get((state.done, state.emitted, state.tokens))
        host, pieces = None, []
        for slot, held in enumerate(self._held):
            if held is None or not (done[slot] or emitted[slot] > held.sent):
                continue
            new, result = tokens[slot, held.sent : emitted[slot]].tolist(), None
            held.sent = int(emitted[slot])
            if done[slot]:
                host = books(state) if host is None else host
                times = held.prefill_seconds, held.seconds
                result = generation_of(host, slot, held.prompt_tokens, held.stops, *times)
                self._held[slot] = None
            pieces.append(Piece(held.number, new, result))
        return pieces


@dataclasses.dataclass
class _Held:
    """A slot's request on the host: sent counts its tokens that were handed out."""

    number: int
    prompt_tokens: int
    stops: list[int]
    prefill_seconds: float
    seconds: float = 0.0
    sent: int = 0
