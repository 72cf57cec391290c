"""The compiled programs: prompt chunks, the start of a generation, and the loop over rounds."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dflash_jax import kv as cache
from dflash_jax import sharding
from dflash_jax.draft import DFlashDraft, ctx_features, for_rounds, ingest_ctx
from dflash_jax.kernels import Implementation
from dflash_jax.kv import DraftKV, DraftKVDtype
from dflash_jax.propose import first_fault
from dflash_jax.round import DecodeState, RoundPlan, spec_round
from dflash_jax.sampling import (
    Kind,
    Sampler,
    SamplingParams,
    kinds_of,
    make_sampler,
    shaped_logits,
)
from dflash_jax.targets import Target
from dflash_jax.tree import MOST_NODES
from dflash_jax.verify import decide_sampled
from dflash_jax.window import Costs, Meter

CHUNKS = (16, 64, 256)
"""Widths of a prompt chunk; a prompt runs in the widest that fits, its tail padded."""
LONG_CHUNK, LONG_PROMPT, LONG_ROWS = 1024, 4096, 2048
"""A prompt of LONG_PROMPT tokens or more runs in chunks of LONG_CHUNK, if those of all sequences
together are no more than LONG_ROWS."""

WARM_ROUNDS = 0
"""Rounds to decode for the programs of a round to be compiled."""


class Caches(NamedTuple):
    """Both sides' rows between programs.

    last: `[B, H]`, the target's final hidden row of each sequence's latest token.
    """

    target: Any
    draft: DraftKV | None
    last: jax.Array


Sequences = tuple[DecodeState, jax.Array]
"""A state and the stop ids `[B, n]` of its sequences."""


@partial(jax.jit, static_argnames=("batch", "capacity", "draft_kv_dtype"))
def empty_caches(
    target: Target,
    draft: DFlashDraft | None,
    batch: int,
    capacity: int,
    draft_kv_dtype: DraftKVDtype = "auto",
) -> Caches:
    """Caches for `capacity` rows a sequence and, behind them, the padding of a prompt's last chunk
    or a round's rows.
    """
    slack = CHUNKS[0] if draft is None else max(CHUNKS[0], draft.config.block_size + 1)
    behind = slack if draft is None else max(slack, MOST_NODES)
    state = target.init_state(batch, capacity + behind)
    kv = None
    if draft is not None:
        dtype = cache.held_dtype(draft_kv_dtype, draft.dtype)
        kv = cache.allocate(draft.config, batch, capacity, dtype, overhang=slack, mesh=draft.mesh)
    return Caches(state, kv, no_last(target, batch))


def no_last(target: Target, batch: int) -> jax.Array:
    """`Caches.last` before there is a latest token."""
    return jnp.zeros_like(target.embed(jnp.zeros((batch, 1), jnp.int32))[:, 0])


def last_logits(target: Target, caches: Caches) -> jax.Array:
    """The target's logits after each sequence's latest token, `[B, V]`."""
    return target.logits(caches.last)


def prefill(
    target: Target,
    draft: DFlashDraft | None,
    caches: Caches,
    rows: Sequence[Sequence[int]],
    lengths: Sequence[int],
    capacity: int,
    implementation: Implementation = None,
    *,
    chunk: int | None = None,
    tick: Callable[[int], None] | None = None,
) -> Caches:
    """Feed `rows` (tokens of each sequence, any counts) behind the `lengths` rows already held.

    Runs on the host chunk by chunk: beyond the caches, memory is that of one chunk, whatever the
    prompt's length. The result does not depend on how the rows fall into chunks.

    chunk: the widest to take (default: `widest_chunk`); each width in use is compiled once.
    tick: told after each chunk how many rows it took, once they are there.
    """
    longest, fed = max(len(row) for row in rows), 0
    for width in chunk_widths([len(row) for row in rows], lengths, capacity, chunk):
        tokens = map(jnp.asarray, piece(rows, fed, width))
        caches = prefill_chunk(target, draft, caches, *tokens, implementation=implementation)
        if tick is not None:
            jax.block_until_ready(caches.last)
            tick(min(width, longest - fed))
        fed += width
    return caches


def warm_up(
    target: Target,
    draft: DFlashDraft | None,
    caches: Caches,
    counts: Sequence[int],
    capacity: int,
    implementation: Implementation = None,
    chunk: int | None = None,
) -> Caches:
    """Compile `prefill` for prompts of `counts` tokens: each width runs once and commits nothing.

    The caches are donated; what comes back holds no rows.
    """
    nothing = [0] * len(counts)
    for width in dict.fromkeys(chunk_widths(counts, nothing, capacity, chunk)):
        tokens = jnp.zeros((len(counts), width), jnp.int32), jnp.asarray(nothing, jnp.int32)
        caches = prefill_chunk(target, draft, caches, *tokens, implementation=implementation)
    return caches


def chunk_widths(
    counts: Sequence[int], lengths: Sequence[int], capacity: int, chunk: int | None = None
) -> list[int]:
    """The chunks in which prompts of `counts` tokens are read behind `lengths` rows."""
    longest, fed, widths = max(counts), 0, []
    chunk = widest_chunk(len(counts), longest) if chunk is None else chunk
    while fed < longest:
        held = max(n + min(fed, count) for n, count in zip(lengths, counts, strict=True))
        widths.append(chunk_width(longest - fed, capacity + CHUNKS[0] - held, chunk))
        fed += widths[-1]
    return widths


def piece(rows: Sequence[Sequence[int]], fed: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `fed ..` of each row as ids `[B, width]`, zeros behind, and how many count `[B]`."""
    pieces = [row[fed : fed + width] for row in rows]
    ids = np.zeros((len(rows), width), np.int32)
    for b, tokens in enumerate(pieces):
        ids[b, : len(tokens)] = tokens
    return ids, np.array([len(tokens) for tokens in pieces], np.int32)


def widest_chunk(batch: int, longest: int) -> int:
    """The widest prompt chunk for `batch` prompts of which the longest has `longest` tokens."""
    long = longest >= LONG_PROMPT and batch * LONG_CHUNK <= LONG_ROWS
    return LONG_CHUNK if long else CHUNKS[-1]


def chunk_width(left: int, room: int, widest: int) -> int:
    """The narrowest chunk that takes `left` tokens, else the widest; never wider than `room`.

    One wider than CHUNKS is for prompts of more than half its tokens: padding costs time too.
    """
    widths = [*(w for w in CHUNKS if w < widest), widest]
    fitting = [w for w in widths if w <= room and (w <= CHUNKS[-1] or w < 2 * left)] or CHUNKS[:1]
    return next((width for width in fitting if width >= left), fitting[-1])


@partial(jax.jit, static_argnames=("implementation",), donate_argnames=("caches",))
def prefill_chunk(
    target: Target,
    draft: DFlashDraft | None,
    caches: Caches,
    ids: jax.Array,
    count: jax.Array,
    implementation: Implementation = None,
) -> Caches:
    """Commit `count [B]` tokens of `ids [B, C]` to both caches.

    Logits are made later, of the `last` row alone, never of a whole prompt.
    """
    state, kv, last = caches
    taps = () if draft is None else draft.config.target_layer_ids
    pos = state.len[:, None] + jnp.arange(ids.shape[1])[None]
    out, state = target.forward(state, ids, taps, implementation)
    state = target.commit(state, count)
    if draft is not None:
        feats = ctx_features(draft, out.taps, implementation)
        assert kv is not None
        kv = ingest_ctx(draft, kv, feats, pos, count, implementation)
    index = jnp.maximum(count - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(out.hidden, index, axis=1)[:, 0]
    return Caches(state, kv, jnp.where((count > 0)[:, None], newest, last))


def sampling_state(
    target: Target,
    plan: RoundPlan,
    params: Sequence[SamplingParams],
    contexts: Sequence[Sequence[int]],
    kinds: Iterable[Kind] = (),
) -> tuple[Sampler | None, jax.Array | None]:
    """The device form of the requests' sampling, None where all are plainly greedy, and their
    history where penalties need it. kinds: see `make_sampler`.
    """
    kinds = kinds_of(params, kinds)
    if not kinds & {"sampled", "penalised", "biased"}:
        return None, None
    row = jax.eval_shape(lambda t: t.logits(t.embed(jnp.zeros((1, 1), jnp.int32))), target)
    sampler = make_sampler(params, target.vocab_size, row.shape[-1], kinds)
    if "penalised" not in kinds:
        return sampler, None
    history = np.zeros((len(params), plan.capacity + 1 + plan.verify_width), np.int32)
    for b, context in enumerate(contexts):
        history[b, : len(context)] = context
    return sampler, jnp.asarray(history)


@partial(jax.jit, static_argnames=("plan",), donate_argnames=("state", "kv", "history"))
def start(
    target: Target,
    state: Any,
    kv: DraftKV | None,
    last: jax.Array,
    budget: jax.Array,
    verify_cap: jax.Array,
    stop_ids: jax.Array,
    sampler: Sampler | None,
    history: jax.Array | None,
    plan: RoundPlan,
    meter: Meter | None = None,
) -> DecodeState:
    """Emit the first token (the prompt's own next token) and open the books of a generation.

    stop_ids: `[B, n]`, or `[n]` for all sequences. history `[B, capacity + 1 + w]`: the prompts,
    where penalties need them. meter: for the policy `cost`.
    """
    raw = target.logits(last)[:, None]
    logits = raw if sampler is None else shaped_logits(sampler, raw, history, state.len)
    how = sharding.of_laws(getattr(target, "mesh", None), plan.implementation)
    anchor = _first_token(logits, sampler, state.len, plan.sampled, how)
    batch, width = anchor.shape[0], plan.capacity + 1 + plan.verify_width
    zeros = jnp.zeros((batch,), jnp.int32)
    if history is not None:
        history = cache.write_at(history, anchor[:, None], state.len, axis=1)
    logprobs = None
    if plan.logprobs:
        first = jnp.take_along_axis(jax.nn.log_softmax(raw[:, 0], axis=-1), anchor[:, None], axis=1)
        logprobs = jnp.zeros((batch, width), jnp.float32).at[:, :1].set(first)
    fault = first_fault(raw)
    stopped = (anchor[:, None] == jnp.atleast_2d(stop_ids)).any(-1)
    finished = stopped | (budget <= 1) | (state.len >= plan.capacity)
    books = DecodeState(
        target=None,
        draft=None,
        anchor=anchor,
        tokens=jnp.zeros((batch, width), jnp.int32).at[:, 0].set(anchor),
        emitted=zeros + 1,
        budget=budget,
        done=finished | (fault >= 0),
        verify_cap=verify_cap,
        accepted=zeros - 1,
        rounds=zeros,
        drafted=zeros,
        gains=jnp.zeros((batch, plan.capacity + 1), jnp.int32),
        windows=jnp.zeros((batch, plan.capacity + 1), jnp.int32),
        draft_fault=zeros - 1,
        target_fault=fault,
        sampler=sampler,
        history=history,
        logprobs=logprobs,
        meter=meter,
    )
    books = sharding.constrain(books, getattr(target, "mesh", None), sharding.ROWS)
    return books.replace(target=state, draft=kv)


def _first_token(
    logits: jax.Array,
    sampler: Sampler | None,
    length: jax.Array,
    sampled: bool,
    implementation: Implementation,
) -> jax.Array:
    """The token `[B]` behind prompts of `length [B]`, by the logits `[B, 1, V]` of their ends."""
    if not sampled:
        return jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
    assert sampler is not None
    # The prompt's last row stands where an anchor would: its next token is a bonus draw.
    anchor, ones = jnp.zeros_like(length)[:, None], jnp.ones_like(length)
    decision = decide_sampled(None, anchor, logits, ones, sampler, length - 1, implementation)
    return decision.tokens[:, 0]


@partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def decode(
    target: Target,
    draft: DFlashDraft | None,
    state: DecodeState,
    stop_ids: jax.Array,
    max_rounds: jax.Array,
    plan: RoundPlan,
    idle: jax.Array | None = None,
) -> DecodeState:
    """At most `max_rounds` rounds on the device, ending early once every sequence is done, or more
    than `idle []` of them.

    A whole generation is one call with a large `max_rounds`; a stream calls the same compiled
    program with a small one. The caches in `state` are donated and updated in place.
    """
    ready = None if draft is None else for_rounds(draft)

    def unfinished(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        taken, state = carry
        more = ~state.done.all()
        if idle is not None:
            more = more & (state.done.sum() <= idle)
        return (taken < max_rounds) & more

    def step(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        taken, state = carry
        return taken + 1, spec_round(target, ready, state, stop_ids, plan)

    return jax.lax.while_loop(unfinished, step, (jnp.int32(0), state))[1]


def read_alone(
    target: Target,
    draft: DFlashDraft | None,
    plan: RoundPlan,
    ids: Sequence[int],
    stop_ids: jax.Array,
    params: SamplingParams,
    kinds: Iterable[Kind],
    *,
    budget: int,
    verify_cap: int,
    costs: Costs | None = None,
) -> Sequences:
    """One sequence with its first token: the prompt `ids`, read into caches of its own.

    Over a mesh, one copy of it for each group of the data axis: see `side_by_side` and `join`.
    stop_ids: `[n]`. costs: what its meter starts from, for the policy `cost`.
    """
    copies = sharding.groups(getattr(target, "mesh", None))
    rows, stops = [ids] * copies, jnp.tile(stop_ids[None], (copies, 1))
    caches = empty_caches(target, draft, copies, plan.capacity, plan.draft_kv_dtype)
    caches = prefill(target, draft, caches, rows, [0] * copies, plan.capacity, plan.implementation)
    state = start(
        target,
        *caches,
        jnp.full((copies,), budget, jnp.int32),
        jnp.full((copies,), verify_cap, jnp.int32),
        stops,
        *sampling_state(target, plan, [params] * copies, rows, kinds),
        plan,
        None if costs is None else Meter.of(costs, copies),
    )
    return state, stops


@partial(jax.jit, static_argnames=("slots", "mesh"))
def side_by_side(row: Sequences, slots: int, mesh: Mesh | None = None) -> Sequences:
    """`slots` copies of one sequence, all of them done: room for others, see `join`.

    row: of `read_alone`.
    """
    count = slots // row[1].shape[0]

    def copied(row: Sequences) -> Sequences:
        state, stops = jax.tree.map(lambda leaf: jnp.repeat(leaf, count, axis=0), row)
        return state.replace(done=jnp.ones_like(state.done)), stops

    return sharding.by_group(copied, mesh, row)


@partial(jax.jit, static_argnames=("mesh",), donate_argnames=("rows",))
def join(rows: Sequences, row: Sequences, slot: jax.Array, mesh: Mesh | None = None) -> Sequences:
    """`rows` with the sequence `slot []` replaced by that of `row`, in place.

    Every leaf of a state leads with the batch, the target's own too; no other sequence is touched.
    row: as in `side_by_side`, so that whichever group has the slot has the sequence: nothing moves.
    """

    def put(rows: Sequences, row: Sequences, slot: jax.Array) -> Sequences:
        size = rows[1].shape[0]
        own = slot if mesh is None else slot - jax.lax.axis_index(sharding.DATA) * size
        here, at = (own >= 0) & (own < size), jnp.clip(own, 0, size - 1)

        def put_leaf(leaf: jax.Array, new: jax.Array) -> jax.Array:
            held = jax.lax.dynamic_index_in_dim(leaf, at, 0, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(leaf, jnp.where(here, new[0], held), at, 0)

        return jax.tree.map(put_leaf, rows, row)

    return sharding.by_group(put, mesh, rows, row, slot)
