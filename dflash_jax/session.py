"""Generation from Python: `generate` for a whole answer, `SpecSession` to go on from there."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import cost, hosted, loop, sharding
from dflash_jax import kv as cache
from dflash_jax.config import DSparkHarvest
from dflash_jax.draft import DFlashDraft
from dflash_jax.kernels import Implementation
from dflash_jax.kv import DraftKVDtype, DraftTail
from dflash_jax.options import (
    ALL_ROUNDS,
    between,
    budget_of,
    default_capacity,
    listed,
    requests_of,
    round_plan,
    rounds_of,
    sequence_of,
    stop_ids_of,
    stop_limit,
    stop_table,
    token_ids_of,
)
from dflash_jax.plan import MemoryPlan, plan_memory
from dflash_jax.propose import RowDraws
from dflash_jax.results import Generation, books, check_faults, generation_of
from dflash_jax.round import DecodeState, RoundPlan
from dflash_jax.sampling import SamplingParams, kinds_of
from dflash_jax.sharding import AnyMesh
from dflash_jax.targets import AnyTarget
from dflash_jax.window import Costs, DSparkVtPolicy, Meter

GREEDY = SamplingParams()


class SessionOptions(TypedDict, total=False):
    """The keyword arguments of `SpecSession`, which says what they mean."""

    stop_token_ids: Sequence[int] | Sequence[Sequence[int]] | None
    block_size: int | None
    verify_width: int | None
    capacity: int | None
    chunk: int | None
    harvest: DSparkHarvest | str | None
    policy: DSparkVtPolicy | None
    widths: Sequence[int] | None
    costs: Costs | None
    tree: bool
    sampling: SamplingParams | Sequence[SamplingParams]
    row_draws: RowDraws
    draft_kv_dtype: DraftKVDtype
    logprobs: bool
    implementation: Implementation
    mesh: AnyMesh | None
    check: bool
    accept: bool


@overload
def generate(
    target: AnyTarget,
    draft: DFlashDraft | None,
    prompts: Sequence[int],
    max_new_tokens: int | Sequence[int] = 128,
    **options: Unpack[SessionOptions],
) -> Generation: ...


@overload
def generate(
    target: AnyTarget,
    draft: DFlashDraft | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int] = 128,
    **options: Unpack[SessionOptions],
) -> list[Generation]: ...


def generate(
    target: AnyTarget,
    draft: DFlashDraft | None,
    prompts: Sequence[int] | Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int] = 128,
    **options: Unpack[SessionOptions],
) -> Generation | list[Generation]:
    """Decode; tokens (or, when sampling, their law) are the target's own, whatever is drafted.

    Args:
      target: see `targets.Target`.
      draft: a drafter, or None for the plain one-row loop.
      prompts: token ids of one prompt, or a list of prompts of any lengths.
      max_new_tokens: most tokens to emit, for all or per prompt.
      **options: those of `SpecSession`.

    Returns a `Generation`, or a list of them for a list of prompts.

    >>> out = generate(target, draft, codec.encode("Hello"), 32)      # doctest: +SKIP
    >>> out.token_ids, out.mean_acceptance_length                     # doctest: +SKIP
    """
    rows = sequence_of("prompts", prompts)
    single = len(rows) > 0 and not isinstance(rows[0], Sequence) and np.ndim(rows[0]) == 0
    session = SpecSession(target, draft, **options)
    session.open([rows] if single else rows, max_new_tokens)
    session.burst()
    results = session.results()
    return results[0] if single else results


class SpecSession:
    """Sequences in flight: open a prompt, decode in bursts or as a stream, resume with more text.

    Args:
      target, draft: as in `generate`.
      stop_token_ids: for all sequences, or a list a sequence; default the target's eos ids, () for
        none. ValueError for one beyond the vocabulary.
      block_size: rows drafted a round, at most the checkpoint's (default).
      verify_width: rows verified a round, anchor included, 2..drafts + 1 (default: all drafts); of
        a draft tree, its nodes, 2..`tree.most_nodes` (default: 16 of them at most).
      capacity: rows a sequence may hold; default what `default_capacity` makes of prompt and
        budget, at most the model's context.
      chunk: rows of a prompt read at once, from 16; default `loop.widest_chunk`'s.
      harvest: see `resolve_harvest`.
      policy: how wide each round verifies, see `window.resolve_policy`.
      widths: verify widths to compile for the policy to choose from (default: only the widest, but
        `window.default_widths` for the policy `cost`).
      costs: seconds of a round at each width, or that at each of some contexts, for the policy
        `cost` (see `window.Costs`); default what `cost.measure_costs` measures when the first
        prompts of a capacity are opened.
      tree: verify a block's likeliest chain and leaves off it together, see `tree.grow`. Sampled
        tokens are then those of plain decoding with the same seed. ValueError for targets that take
        none (`targets.TreeTarget`), other policies than `fixed`, widths, and row_draws "sample".
      sampling: `SamplingParams` for all sequences, or one a sequence; default greedy.
      row_draws: how plain DFlash rows are drawn when sampling, see `propose.propose`.
      draft_kv_dtype: "int8" holds the drafter's cache as int8 and scales, see `kv.QuantizedRows`;
        default "auto", the drafter's own floats.
      logprobs: keep the target's log-probability of each emitted token.
      implementation: "xla" or "pallas" for the ops that have kernels, "mosaic" for attention on a
        Hopper GPU; default what each op takes by itself, see `kernels`. NotImplementedError where
        the kernels asked for cannot run here.
      mesh: what to split both models over (`sharding.make_mesh`), where they are on one device;
        models that were loaded onto a mesh stay there.
      check: after every burst assert the round invariants (rows held, anchor), for debugging.
      accept: False verifies as usual but accepts nothing: the same compiled program then decodes
        plainly, one token a round, which is what losslessness is checked against.

    >>> session = SpecSession(target, draft)                          # doctest: +SKIP
    >>> session.open([prompt_ids], max_new_tokens=64)                 # doctest: +SKIP
    >>> for tokens in session.stream(): ...                           # doctest: +SKIP
    """

    def __init__(
        self,
        target: AnyTarget,
        draft: DFlashDraft | None,
        *,
        stop_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        block_size: int | None = None,
        verify_width: int | None = None,
        capacity: int | None = None,
        chunk: int | None = None,
        harvest: DSparkHarvest | str | None = None,
        policy: DSparkVtPolicy | None = None,
        widths: Sequence[int] | None = None,
        costs: Costs | None = None,
        tree: bool = False,
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        row_draws: RowDraws = "argmax",
        draft_kv_dtype: DraftKVDtype = "auto",
        logprobs: bool = False,
        implementation: Implementation = None,
        mesh: AnyMesh | None = None,
        check: bool = False,
        accept: bool = True,
    ):
        if mesh is not None:
            hosted.refuse_hosted(target, "mesh")
        target, draft = sharding.shard_pair(target, draft, mesh)
        self._plan = round_plan(
            target,
            draft,
            block_size=block_size,
            verify_width=verify_width,
            harvest=harvest,
            policy=policy,
            widths=widths,
            costs=costs,
            tree=tree,
            row_draws=row_draws,
            draft_kv_dtype=draft_kv_dtype,
            logprobs=logprobs,
            implementation=implementation,
        )
        self.target, self.draft = target, draft
        self._driver = hosted.driver(target)
        if self._plan.policy.kind == "cost":
            hosted.refuse_hosted(target, "policy cost")
        self._given_costs = self.costs = costs
        self._measured: dict[Any, Costs] = {}
        self._capacity, self._accept, self._check = capacity, accept, check
        self._chunk = (
            chunk if chunk is None else between("chunk", chunk, loop.CHUNKS[0], ALL_ROUNDS)
        )
        stops = target.stop_token_ids if stop_token_ids is None else stop_token_ids
        self.stop_token_ids = stop_ids_of(stops, stop_limit(target))
        self._sampling = requests_of(sampling)
        self.state: DecodeState | None = None

    def open(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int] = 128,
        *,
        draft_from: int = 0,
        tail: DraftTail | None = None,
        tick: Callable[[int], None] | None = None,
    ) -> None:
        """Prefill the prompts and emit each one's first token.

        ValueError names what does not fit: prompts, budgets, capacity, `draft_from`, `tail`.

        draft_from: the drafter starts cold at this position and never sees the rows before it.
        tail: one sequence's exported draft rows, where its prompt's first `tail.len` tokens are
        what they were made of; the drafter reads those instead of making them again.
        tick: told of prompt rows as they are read, see `loop.prefill`.
        """
        rows, budget = self._admit(prompts, max_new_tokens)
        caches = self._empty_caches(len(rows))
        self._tick = tick
        began = time.perf_counter()
        caches, done = self._draft_start(caches, rows, draft_from, tail)
        for context, row in zip(self._context, rows, strict=True):
            context.extend(row[:done])
        self._prefill(caches, [row[done:] for row in rows], budget, began)

    def warm_up(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int] = 128
    ) -> None:
        """Compile all that `open` with these arguments and the rounds after it will run.

        Decodes nothing and leaves nothing open. Raises as `open` does.
        """
        rows, budget = self._admit(prompts, max_new_tokens)
        plan, counts = self.plan, [len(row) for row in rows]
        caches = self._empty_caches(len(rows))
        caches = self._driver.warm_up(
            self.target, self.draft, caches, counts, plan.capacity, plan.implementation, self._chunk
        )
        self._start(caches, budget)
        rounds = jnp.int32(self._driver.WARM_ROUNDS)
        self._driver.decode(self.target, self.draft, self.state, self._stops, rounds, self.plan)
        self.state = None

    def burst(self, rounds: int | None = None) -> None:
        """Decode `rounds` more rounds (default: until every sequence is done)."""
        state = self._require_open()
        limit = jnp.int32(rounds_of(rounds, 0))
        began = time.perf_counter()
        self.state = self._driver.decode(
            self.target, self.draft, state, self._stops, limit, self.plan
        )
        jax.block_until_ready(self.state)
        self._seconds += time.perf_counter() - began
        self._check_faults()
        if self._check:
            self._check_invariants()

    def stream(self, rounds: int = 1) -> Iterator[list[list[int]]]:
        """Yield each sequence's new tokens: first the prompt's own, then every `rounds` rounds."""
        self._require_open()
        rounds = rounds_of(rounds, 1)
        sent = [0] * len(self._context)
        while True:
            state = self._require_open()
            tokens, emitted = np.asarray(state.tokens), np.asarray(state.emitted)
            yield [tokens[b, sent[b] : n].tolist() for b, n in enumerate(emitted)]
            sent = emitted.tolist()
            if self.done:
                return
            self.burst(rounds)

    def resume(
        self, suffixes: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int] = 128
    ) -> None:
        """Append text (one suffix a sequence) and emit the token after it.

        Equal to opening prompt + emitted tokens + suffix from cold, without redoing their rows.
        """
        state = self._require_open()
        suffixes = sequence_of("suffixes", suffixes)
        if len(suffixes) != len(self._context):
            raise ValueError(
                f"suffixes: expected {len(self._context)} (one a sequence), found {len(suffixes)}"
            )
        vocabulary = self.target.vocab_size
        rows = [token_ids_of(f"suffix {i}", s, vocabulary) for i, s in enumerate(suffixes)]
        emitted = [result.token_ids for result in self.results()]
        # The last emitted token is decided but has no row: it leads what is fed now.
        rows = [[tokens[-1], *row] for tokens, row in zip(emitted, rows, strict=True)]
        held = [[*c, *e[:-1]] for c, e in zip(self._context, emitted, strict=True)]
        longest = max(len(c) + len(r) for c, r in zip(held, rows, strict=True))
        if longest > self.plan.capacity:
            raise ValueError(
                f"suffix: expected at most {self.plan.capacity} rows in all (capacity), "
                f"found {longest}"
            )
        budget = self._budgets(max_new_tokens, len(rows))
        self._context, self._tick = held, None
        last = self._driver.no_last(self.target, len(rows))
        caches = loop.Caches(state.target, state.draft, last)
        self._prefill(caches, rows, budget, time.perf_counter())

    def memory(
        self,
        context: int,
        batch: int = 1,
        *,
        prompt: int | None = None,
        compiled: bool = False,
    ) -> MemoryPlan:
        """What `batch` sequences of `context` tokens each, prompt and new, take on the device.

        Nothing need be open, and target and draft may be abstract: see `plan.plan_memory`.
        prompt: tokens of the longest prompt, where it is shorter than its widest chunk.
        """
        target = hosted.refuse_hosted(self.target, "memory plan")
        batch = between("batch", batch, 1, 1 << 16)
        context = between("context", context, 1, self.target.max_positions)
        capacity = self._capacity_for(context)
        if context > capacity:
            raise ValueError(f"context: expected at most {capacity} (capacity), found {context}")
        params = self._params(batch)
        plan = self._plan_for(capacity, params)
        sampling = partial(self._driver.sampling_state, self.target, plan, params, [[]] * batch)
        sampler, history = jax.eval_shape(sampling)
        prompt = between("prompt", prompt, 1, context)
        widest = self._chunk or loop.widest_chunk(batch, prompt)
        return plan_memory(
            target,
            self.draft,
            plan,
            batch=batch,
            chunk=loop.chunk_width(prompt, capacity, widest),
            sampler=sampler,
            history=history,
            meter=self._meter(batch),
            compiled=compiled,
        )

    def export_tail(self, sequence: int = 0, upto: int | None = None) -> DraftTail:
        """A sequence's latest draft rows, for `open(tail=...)` elsewhere (see `kv.export_tail`)."""
        state = self._require_open()
        if self.draft is None or state.draft is None:
            raise ValueError("tail: expected a drafter, found a plain session")
        sequence = between("sequence", sequence, 0, len(self._context) - 1)
        return cache.export_tail(self.draft.config, state.draft, upto, sequence)

    @property
    def done(self) -> bool:
        """Whether every sequence has finished."""
        return bool(np.asarray(self._require_open().done).all())

    def results(self) -> list[Generation]:
        """What each sequence has got since `open` or `resume`."""
        host = books(self._require_open())
        stops = self._stops_of(len(self._context))
        times = self._prefill_seconds, self._seconds
        return [
            generation_of(host, b, len(context), stops[b], *times)
            for b, context in enumerate(self._context)
        ]

    def _admit(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int]
    ) -> tuple[list[list[int]], list[int]]:
        """The requests, checked, and the books for them: their plan, no context yet."""
        prompts = sequence_of("prompts", prompts)
        if len(prompts) == 0:
            raise ValueError("prompts: expected at least one, found none")
        rows = [
            token_ids_of(f"prompt {i}", p, self.target.vocab_size) for i, p in enumerate(prompts)
        ]
        if any(len(row) == 0 for row in rows):
            raise ValueError("prompt: expected at least one token, found an empty one")
        budget = self._budgets(max_new_tokens, len(rows))
        self.plan = self._plan_for(self._room_for(rows, budget), self._params(len(rows)))
        self._stops_of(len(rows))
        self.state = None  # before there are new caches, the old ones go
        self._context = [[] for _ in rows]
        if self.plan.policy.kind == "cost":
            # Before the caches, too: measuring takes as much memory as they do.
            self.costs = self._given_costs or self._measured_costs(len(rows))
        return rows, budget

    def _empty_caches(self, batch: int) -> loop.Caches:
        room = self.plan.capacity, self.plan.draft_kv_dtype
        return self._driver.empty_caches(self.target, self.draft, batch, *room)

    def _measured_costs(self, batch: int) -> Costs:
        """What rounds of the plan cost, measured where this session has not done that already."""
        kinds = kinds_of(self._params(batch))
        known = self.plan, batch, kinds
        if known not in self._measured:
            target, draft = hosted.refuse_hosted(self.target, "policy cost"), self.draft
            assert draft is not None
            costs = cost.measure_costs(target, draft, self.plan, batch, kinds=kinds)
            self._measured[known] = costs
        return self._measured[known]

    def _draft_start(
        self,
        caches: loop.Caches,
        rows: list[list[int]],
        draft_from: int,
        tail: DraftTail | None,
    ) -> tuple[loop.Caches, int]:
        """Caches after the tokens that the drafter does not ingest itself, and their number."""
        if tail is not None and not isinstance(tail, DraftTail):
            raise ValueError(f"tail: expected a DraftTail, found {tail!r}")
        done = tail.len if tail is not None else draft_from
        if isinstance(done, bool) or not isinstance(done, int | np.integer):
            raise ValueError(f"draft_from: expected an integer, found {done!r}")
        if done == 0 and tail is None:
            return caches, 0
        if self.draft is None or caches.draft is None:
            raise ValueError("draft_from, tail: expected a drafter, found a plain session")
        if tail is not None and (draft_from or len(rows) != 1):
            raise ValueError(
                f"tail: expected one sequence and no draft_from, found {len(rows)} and {draft_from}"
            )
        shortest = min(len(row) for row in rows)
        if not 0 < done < shortest:
            name = "draft_from" if tail is None else "tail"
            raise ValueError(f"{name}: expected 1..{shortest - 1} prompt tokens, found {done}")
        config, kv = self.draft.config, caches.draft
        kv = cache.cold(kv, done) if tail is None else cache.import_tail(config, kv, tail)
        head = [row[:done] for row in rows]
        bare = caches._replace(draft=None)
        fed = self._feed(None, bare, head, [0] * len(rows))
        return fed._replace(draft=kv), done

    def _feed(
        self,
        draft: DFlashDraft | None,
        caches: loop.Caches,
        rows: list[list[int]],
        lengths: list[int],
    ) -> loop.Caches:
        plan, options = self.plan, {"chunk": self._chunk, "tick": self._tick}
        return self._driver.prefill(
            self.target, draft, caches, rows, lengths, plan.capacity, plan.implementation, **options
        )

    def _prefill(
        self, caches: loop.Caches, rows: list[list[int]], budget: list[int], began: float
    ) -> None:
        caches = self._feed(self.draft, caches, rows, [len(context) for context in self._context])
        for context, row in zip(self._context, rows, strict=True):
            context.extend(row)
        self._start(caches, budget)
        jax.block_until_ready(self.state)
        self._prefill_seconds, self._seconds = time.perf_counter() - began, 0.0
        self._check_faults()

    def _start(self, caches: loop.Caches, budget: list[int]) -> None:
        cap = self.plan.verify_width if self._accept else 1
        self._stops = stop_table(self._stops_of(len(budget)))
        params = self._params(len(budget))
        sampler, history = self._driver.sampling_state(
            self.target, self.plan, params, self._context
        )
        self.state = self._driver.start(
            self.target,
            *caches,
            jnp.asarray(budget, jnp.int32),
            jnp.full((len(budget),), cap, jnp.int32),
            self._stops,
            sampler,
            history,
            self.plan,
            self._meter(len(budget)),
        )

    def _meter(self, batch: int) -> Meter | None:
        """What the policy `cost` starts from; before costs are measured, of that shape."""
        if self._plan.policy.kind != "cost":
            return None
        unmeasured = {context: dict.fromkeys(self._plan.widths, 1.0) for context in (1, 2)}
        return Meter.of(self.costs or unmeasured, batch)

    def _params(self, batch: int) -> list[SamplingParams]:
        if isinstance(self._sampling, SamplingParams):
            return [self._sampling] * batch
        if len(self._sampling) != batch:
            raise ValueError(
                f"sampling: expected {batch} (one a prompt), found {len(self._sampling)}"
            )
        return list(self._sampling)

    def _stops_of(self, batch: int) -> list[list[int]]:
        stops: list[Any] = self.stop_token_ids
        if not stops or not isinstance(stops[0], list):
            return [stops] * batch
        if len(stops) != batch:
            raise ValueError(
                f"stop_token_ids: expected {batch} lists (one a prompt), found {len(stops)}"
            )
        return stops

    def _budgets(self, max_new_tokens: int | Sequence[int], batch: int) -> list[int]:
        asked = listed(max_new_tokens)
        many = isinstance(asked, Sequence) and not isinstance(asked, str)
        budget: list[Any] = list(asked) if many else [asked] * batch
        if len(budget) != batch:
            raise ValueError(
                f"max_new_tokens: expected {batch} (one a prompt), found {len(budget)}"
            )
        return [budget_of(n) for n in budget]

    def _plan_for(self, capacity: int, params: list[SamplingParams]) -> RoundPlan:
        sampled = any(not p.greedy for p in params)
        return dataclasses.replace(self._plan, capacity=capacity, sampled=sampled)

    def _room_for(self, rows: list[list[int]], budget: list[int]) -> int:
        longest = max(len(row) for row in rows)
        capacity = self._capacity_for(
            max(len(row) + n - 1 for row, n in zip(rows, budget, strict=True))
        )
        if longest > capacity:
            raise ValueError(
                f"prompt: expected at most {capacity} tokens (capacity), found {longest}"
            )
        return capacity

    def _capacity_for(self, rows: int) -> int:
        limit = self.target.max_positions
        if self._capacity is None:
            return default_capacity(rows, limit)
        return between("capacity", self._capacity, 1, limit)

    def _check_faults(self) -> None:
        check_faults(self._require_open(), [f"sequence {b}" for b in range(len(self._context))])

    def _check_invariants(self) -> None:
        """Between rounds both caches hold prompt + emitted - 1 rows, and the anchor is last."""
        state = self._require_open()
        emitted = np.asarray(state.emitted)
        rows = emitted - 1 + np.array([len(context) for context in self._context])
        held = {"target": state.target.len} | ({"draft": state.draft.len} if state.draft else {})
        for name, length in held.items():
            if not np.array_equal(length, rows):
                raise AssertionError(f"{name} rows: expected {rows}, found {np.asarray(length)}")
        last = np.asarray(state.tokens)[np.arange(len(emitted)), emitted - 1]
        if not np.array_equal(state.anchor, last):
            raise AssertionError(f"anchor: expected {last}, found {np.asarray(state.anchor)}")

    def _require_open(self) -> DecodeState:
        if self.state is None:
            raise ValueError("session: expected open() first, found nothing open")
        return self.state
