"""Generation with a target that runs outside JAX, driven from the host a round at a time.

The same steps under the same names as `loop`. Drafting, acceptance, commit and all randomness are
the compiled loop's own code; between the draft and its acceptance the target runs where it lives,
and what it computed then plays its part in the compiled program (`Ran`).
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dflash_jax import kv as cache
from dflash_jax import loop
from dflash_jax.draft import DFlashDraft, ctx_features, ingest_ctx
from dflash_jax.kernels import Implementation
from dflash_jax.kv import DraftKV, DraftKVDtype
from dflash_jax.loop import CHUNKS, Caches
from dflash_jax.propose import Proposal
from dflash_jax.round import DecodeState, RoundPlan, propose_block, settle_round, window
from dflash_jax.sampling import Sampler, SamplingParams
from dflash_jax.targets import AnyTarget, HostedTarget, Target, TargetOutput
from dflash_jax.window import Meter

WARM_ROUNDS = 1
"""As `loop.WARM_ROUNDS`: a round is more than one program, which only running compiles."""


class Rows(struct.PyTreeNode):
    """All that compiled programs see of a hosted target's state: the rows committed, `len [B]`."""

    len: jax.Array


class Ran(struct.PyTreeNode):
    """A forward that has already run, in the target's place: `[B, rows, V]`, `[B, rows, taps * H]`.

    Its `hidden` is the logits themselves.
    """

    ran_logits: jax.Array | None = None
    ran_taps: jax.Array | None = None

    def forward(
        self,
        state: Rows,
        ids: jax.Array,
        taps: tuple[int, ...],
        implementation: Implementation = None,
    ) -> tuple[TargetOutput, Rows]:
        assert self.ran_logits is not None
        assert self.ran_taps is not None
        return TargetOutput(self.ran_logits, self.ran_taps), state

    def commit(self, state: Rows, count: jax.Array) -> Rows:
        return Rows(state.len + count)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden.astype(jnp.float32)


def driver(target: AnyTarget) -> ModuleType:
    """What runs this target: `loop`, or this module where the target runs outside JAX."""
    return sys.modules[__name__] if isinstance(target, HostedTarget) else loop


def refuse_hosted(target: AnyTarget, what: str) -> Target:
    """The target; NotImplementedError where it runs outside JAX and `what` needs it inside."""
    if isinstance(target, HostedTarget):
        raise NotImplementedError(
            f"{what}: expected a target that JAX compiles, found a {type(target).__name__}"
        )
    return target


def no_last(target: HostedTarget, batch: int) -> jax.Array:
    """`Caches.last` before there is a latest token: the logits after it, `[B, V]`."""
    return jnp.zeros((batch, target.vocab_size), jnp.float32)


def last_logits(target: HostedTarget, caches: Caches) -> jax.Array:
    """The target's logits after each sequence's latest token, `[B, V]`."""
    return caches.last


def sampling_state(
    target: HostedTarget, plan: RoundPlan, params: Sequence[SamplingParams], *rest: Any
) -> tuple[Sampler | None, jax.Array | None]:
    """As `loop.sampling_state`."""
    return loop.sampling_state(target.tables, plan, params, *rest)


def empty_caches(
    target: HostedTarget,
    draft: DFlashDraft | None,
    batch: int,
    capacity: int,
    draft_kv_dtype: DraftKVDtype = "auto",
) -> Caches:
    """Caches for `capacity` rows a sequence and the padding of a prompt's last chunk."""
    kv, slack = None, CHUNKS[0]
    if draft is not None:
        slack = max(slack, draft.config.block_size + 1)
        dtype = cache.held_dtype(draft_kv_dtype, draft.dtype)
        kv = cache.allocate(draft.config, batch, capacity, dtype, overhang=slack)
    return Caches(target.init_state(batch, capacity + slack), kv, no_last(target, batch))


def prefill(
    target: HostedTarget,
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
    """As `loop.prefill`; the target runs no padding, only the drafter does."""
    state, kv, last = caches
    taps = () if draft is None else draft.config.target_layer_ids
    longest, fed = max(len(row) for row in rows), 0
    for width in loop.chunk_widths([len(row) for row in rows], lengths, capacity, chunk):
        ids, count = loop.piece(rows, fed, width)
        start = jnp.asarray(state.len)
        out, state = target.forward(state, jnp.asarray(ids), count, taps, last_only=True)
        state = target.commit(state, count)
        counted = jnp.asarray(count)
        last = jnp.where((counted > 0)[:, None], out.logits[:, 0].astype(jnp.float32), last)
        if draft is not None:
            kv = _ingest(draft, kv, out.taps, start, counted, implementation)
        if tick is not None:
            jax.block_until_ready(last)
            tick(min(width, longest - fed))
        fed += width
    return Caches(state, kv, last)


def warm_up(
    target: HostedTarget,
    draft: DFlashDraft | None,
    caches: Caches,
    counts: Sequence[int],
    capacity: int,
    implementation: Implementation = None,
    chunk: int | None = None,
) -> Caches:
    """As `loop.warm_up`; the target has nothing to compile."""
    state, kv, last = caches
    if draft is None:
        return caches
    nothing = [0] * len(counts)
    taps = len(draft.config.target_layer_ids) * target.hidden_size
    for width in dict.fromkeys(loop.chunk_widths(counts, nothing, capacity, chunk)):
        rows = jnp.zeros((len(counts), width, taps), target.tables.embedding.dtype)
        start = jnp.asarray(nothing, jnp.int32)
        kv = _ingest(draft, kv, rows, start, start, implementation)
    return Caches(state, kv, last)


def start(
    target: HostedTarget,
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
    """As `loop.start`."""
    books = (budget, verify_cap, stop_ids, sampler, history, plan, meter)
    opened = loop.start(Ran(), Rows(jnp.asarray(state.len)), kv, last, *books)
    return opened.replace(target=state)


def decode(
    target: HostedTarget,
    draft: DFlashDraft | None,
    state: DecodeState,
    stop_ids: jax.Array,
    max_rounds: jax.Array | int,
    plan: RoundPlan,
) -> DecodeState:
    """At most `max_rounds` rounds, ending early once every sequence is done.

    The drafter's cache in `state` is donated, the target's is changed in place.
    """
    held = state.target
    taps = () if draft is None else draft.config.target_layer_ids
    widths = [w for w in plan.widths if w > 1] or [plan.verify_width]
    for _ in range(int(max_rounds)):
        live = ~np.asarray(state.done)
        if not live.any():
            break
        state = state.replace(target=Rows(jnp.asarray(held.len)))
        state, proposal, wide, cand = _draft(target.tables, draft, state, plan)
        # As many rows as the compiled loop would verify, for the same arithmetic whatever is kept.
        widest = int(np.asarray(wide)[live].max())
        rows = next(w for w in widths if w >= widest)
        room = np.minimum(rows, target.max_positions - held.len)
        out, held = target.forward(held, cand[:, :rows], np.where(live, room, 0), taps)
        ran = Ran(out.logits, out.taps)
        state = _settle(ran, draft, stop_ids, plan, rows, proposal, wide, state)
        held = target.commit(held, np.asarray(state.target.len) - held.len)
    return state.replace(target=held)


@partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def _draft(
    tables: Any, draft: DFlashDraft | None, state: DecodeState, plan: RoundPlan
) -> tuple[DecodeState, Proposal | None, jax.Array, jax.Array]:
    """The round up to its verify: state, proposal, rows looked at `[B]`, candidates `[B, w]`."""
    anchor = state.anchor[:, None]
    if draft is None:
        return state, None, jnp.ones_like(state.anchor), anchor
    with jax.named_scope("draft"):
        proposal, kv = propose_block(tables, draft, state, plan)
    wide = window(state, proposal, plan)
    cand = jnp.concatenate([anchor, proposal.tokens], axis=1)
    return state.replace(draft=kv), proposal, wide, cand


_settle = jax.jit(settle_round, static_argnames=("plan", "rows"), donate_argnames=("state",))


@partial(jax.jit, static_argnames=("implementation",), donate_argnames=("kv",))
def _ingest(
    draft: DFlashDraft,
    kv: DraftKV,
    taps: jax.Array,
    start: jax.Array,
    count: jax.Array,
    implementation: Implementation,
) -> DraftKV:
    pos = start[:, None] + jnp.arange(taps.shape[1])[None]
    feats = ctx_features(draft, taps, implementation)
    return ingest_ctx(draft, kv, feats, pos, count, implementation)
