"""What `bench.py` times: shapes, workloads, the stages of a round, and the bytes each must read."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dflash_jax.draft as drafter
from dflash_jax import SpecSession, ctx_features, forward_round, ingest_ctx, loop
from dflash_jax.attention import ABSENT
from dflash_jax.config import DFlashConfig, RopeConfig
from dflash_jax.draft import DFlashDraft
from dflash_jax.propose import draft_logits, first_fault, propose
from dflash_jax.round import DecodeState, RoundPlan, propose_block
from dflash_jax.targets import dense
from dflash_jax.targets.dense import DecoderConfig, DenseTarget

NO_LIMIT = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Preset:
    """A target's shape and its drafter's, and the context rows to time at by default."""

    target: DecoderConfig
    layers: int
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    context: int = 2048

    def draft(self, block_size: int | None) -> DFlashConfig:
        """The drafter: like the target but in depth, with q/k norm and full attention."""
        block = self.block_size if block_size is None else block_size
        if block < 2:
            raise ValueError(f"--block-size: expected at least 2, found {block}")
        target = self.target
        return DFlashConfig(
            family="dflash",
            hidden_size=target.hidden_size,
            num_attention_heads=target.num_attention_heads,
            num_key_value_heads=target.num_key_value_heads,
            head_dim=target.head_dim,
            intermediate_size=target.intermediate_size,
            num_hidden_layers=self.layers,
            rms_norm_eps=target.rms_norm_eps,
            rope=target.rope,
            block_size=block,
            mask_token_id=self.mask_token_id,
            target_layer_ids=self.taps,
            layer_causal=(False,) * self.layers,
            layer_window=(None,) * self.layers,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_hidden_layers,
        )


def _decoder(layers, hidden, heads, kv_heads, head_dim, ff, vocabulary, theta, qk_norm, tied):
    return DecoderConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=ff,
        num_hidden_layers=layers,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=theta),
        vocab_size=vocabulary,
        embedding_rows=vocabulary,
        max_position_embeddings=NO_LIMIT,
        layer_window=(None,) * layers,
        qk_norm=qk_norm,
        tied=tied,
    )


PRESETS = {
    "tiny": Preset(
        _decoder(2, 64, 4, 2, 16, 128, 256, 1e4, qk_norm=True, tied=True),
        layers=2,
        block_size=4,
        mask_token_id=255,
        taps=(0, 1),
        context=64,
    ),
    "smollm2": Preset(
        _decoder(30, 576, 9, 3, 64, 1536, 49152, 1e5, qk_norm=False, tied=True),
        layers=3,
        block_size=8,
        mask_token_id=16,
        taps=(2, 9, 16, 23, 28),
    ),
    "qwen3-8b": Preset(
        _decoder(36, 4096, 32, 8, 128, 12288, 151936, 1e6, qk_norm=True, tied=False),
        layers=5,
        block_size=16,
        mask_token_id=151669,
        taps=(1, 9, 17, 25, 33),
    ),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """What the stages run on: every sequence of `state` holds `context` rows, an anchor decided.

    `state` is only ever copied, never donated. It accepts nothing (`verify_cap` 1), which changes
    no work: a round then gains one token, whatever the weights.
    """

    target: DenseTarget
    draft: DFlashDraft
    state: DecodeState
    plan: RoundPlan
    context: int

    @property
    def batch(self) -> int:
        """Sequences side by side."""
        return self.state.anchor.shape[0]


def random_workload(
    target_config: DecoderConfig,
    draft_config: DFlashConfig,
    *,
    batch: int,
    context: int,
    capacity: int,
    dtype: Any,
) -> Workload:
    """Random weights and a random context, all made on the device: nothing is read or prefilled."""
    keys = random_keys()
    target = random_tree(dense.abstract(target_config, dtype), keys)
    draft = random_tree(drafter.abstract(draft_config, dtype), keys)
    block = draft_config.block_size
    plan = RoundPlan(block, verify_width=block, capacity=capacity, widths=(block,))
    state, kv, _ = loop.empty_caches(target, draft, batch, capacity)

    def rows(leaves: list[jax.Array]) -> list[jax.Array]:
        return [normal(next(keys), leaf.shape, leaf.dtype, 1.0) for leaf in leaves]

    def each(value: int) -> jax.Array:
        # A buffer of its own every time: the same one may not be donated twice.
        return jnp.full((batch,), value, jnp.int32)

    slots = jnp.arange(kv.full.pos.shape[1])
    pos = jnp.tile(jnp.where(slots < context, slots, ABSENT).astype(jnp.int32), (batch, 1))
    state = state.replace(k=rows(state.k), v=rows(state.v), len=each(context))
    kv = kv.replace(
        k=rows(kv.k),
        v=rows(kv.v),
        len=each(context),
        full=kv.full.replace(pos=pos, next=each(context)),
    )
    last = normal(next(keys), (batch, target.hidden_size), dtype, 1.0)
    state = loop.start(
        target,
        state,
        kv,
        last,
        budget=each(NO_LIMIT),
        verify_cap=each(1),
        stop_ids=no_stops(),
        sampler=None,
        history=None,
        plan=plan,
    )
    return Workload(target, draft, state, plan, context)


def loaded_workload(
    target: DenseTarget,
    draft: DFlashDraft,
    *,
    batch: int,
    context: int,
    capacity: int,
    block_size: int | None,
) -> Workload:
    """Real checkpoints behind prompts of random ids, prefilled as `generate` does."""
    session = SpecSession(
        target,
        draft,
        stop_token_ids=(),
        block_size=block_size,
        capacity=capacity,
        accept=False,
    )
    ids = np.random.default_rng(0).integers(0, target.vocab_size, (batch, context))
    session.open(ids.tolist(), NO_LIMIT)
    assert session.state is not None
    return Workload(target, draft, session.state, session.plan, context)


def random_keys() -> Iterator[jax.Array]:
    """Endless distinct keys, the same ones in every run."""
    for i in range(NO_LIMIT):
        yield jax.random.fold_in(jax.random.key(0), i)


def random_tree(shapes: Any, keys: Iterator[jax.Array]) -> Any:
    """Arrays for an `abstract` tree, leaf by leaf: matrices normal(0, 0.02), norms one."""

    def leaf(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if len(shape.shape) == 1:
            return jnp.ones(shape.shape, shape.dtype)
        return normal(next(keys), shape.shape, shape.dtype, 0.02)

    return jax.tree.map(leaf, shapes)


@partial(jax.jit, static_argnames=("shape", "dtype", "scale"))
def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
    """Normal values of deviation `scale`, drawn in f32."""
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def no_stops() -> jax.Array:
    """A row of stop ids that no token equals."""
    return jnp.full((8,), -1, jnp.int32)


class Stage(NamedTuple):
    """step(carry, i, target, draft, still) -> carry of the same shapes; the first carry.

    `still [B]` is 0, but the compiler can't know: added to a length it keeps work that depends
    on the length inside the loop, as it is when rounds really commit rows.
    """

    step: Callable[..., Any]
    carry: Any


def backbone(work: Workload) -> Stage:
    """`forward_round`; each call's hidden rows are the next one's noise."""

    def step(carry, i, target, draft, still):
        hidden, kv = carry
        pos = kv.len[:, None] + jnp.arange(hidden.shape[1])
        hidden, kv = forward_round(draft, kv, hidden, pos)
        return hidden, kv.replace(len=kv.len + still)

    rows = jnp.tile(work.state.anchor[:, None], (1, work.plan.block_size))
    return Stage(step, (work.target.embed(rows), work.state.draft))


def draft_head(work: Workload) -> Stage:
    """Draft logits and `propose` (DFlash: an argmax); the embedded drafts are the next rows."""

    def step(carry, i, target, draft, still):
        logits = draft_logits(target, draft, carry["hidden"])
        proposal = propose(draft, logits, carry["hidden"], work.state.anchor)
        return {"hidden": target.embed(proposal.tokens), "fault": proposal.fault}

    shape = (work.batch, work.plan.verify_width - 1, work.target.hidden_size)
    hidden = normal(jax.random.key(1), shape, work.draft.dtype, 1.0)
    return Stage(step, {"hidden": hidden, "fault": jnp.zeros((work.batch,), jnp.int32)})


def draft_round(work: Workload) -> Stage:
    """`propose_block`: embedding, backbone and head; the drafts make the next anchor."""

    def step(state, i, target, draft, still):
        proposal, kv = propose_block(target, draft, state, work.plan)
        return state.replace(
            target=state.target.replace(len=state.target.len + still),
            draft=kv,
            anchor=proposal.tokens.sum(axis=1, dtype=jnp.int32) % target.vocab_size,
            draft_fault=jnp.maximum(state.draft_fault, proposal.fault),
        )

    return Stage(step, without_target_rows(work.state))


def without_target_rows(state: DecodeState) -> DecodeState:
    """The state without the target's K and V, which drafting does not look at."""
    return state.replace(target=state.target.replace(k=[], v=[]))


def ingest(work: Workload) -> Stage:
    """`ctx_features` and `ingest_ctx` over the taps of a verify; other taps every call."""
    width = work.plan.verify_width

    def step(carry, i, target, draft, still):
        kv, taps = carry
        pos = kv.len[:, None] + jnp.arange(width)
        feats = ctx_features(draft, taps[i % taps.shape[0]])
        return ingest_ctx(draft, kv, feats, pos, still), taps

    shape = (4, work.batch, width, work.draft.config.tap_size)
    return Stage(step, (work.state.draft, normal(jax.random.key(2), shape, work.draft.dtype, 1.0)))


def verify(work: Workload) -> Stage:
    """The target over a block, its head, argmax and fault check; the choices are the next rows."""
    width, config = work.plan.verify_width, work.draft.config

    def step(carry, i, target, draft, still):
        out, state = target.forward(carry["state"], carry["ids"], config.target_layer_ids)
        logits = target.logits(out.hidden)
        return {
            "state": target.commit(state, still),
            "ids": jnp.argmax(logits, axis=-1).astype(jnp.int32),
            "taps": out.taps,
            "fault": first_fault(logits),
        }

    rows = work.target.embed(jnp.zeros((work.batch, width), jnp.int32))
    carry = {
        "state": work.state.target,
        "ids": jnp.tile(work.state.anchor[:, None], (1, width)),
        "taps": jnp.zeros((work.batch, width, config.tap_size), rows.dtype),
        "fault": jnp.zeros((work.batch,), jnp.int32),
    }
    return Stage(step, carry)


PARTS = {f.__name__: f for f in (backbone, draft_head, draft_round, ingest, verify)}
WHOLE = ("spec_round", "plain_step")
STAGES = (*PARTS, *WHOLE)
"""Every stage by name. `spec_round`: draft, verify, accept, commit, ingest; `plain_step`: one token
without a drafter."""


def floor_bytes(work: Workload) -> dict[str, int]:
    """What each stage must read once.

    A round reads the head twice, for it must have drafted before it can verify. Its ingest adds
    only fc: the K/V projections could be shared with the next block, which follows at once.
    """
    target, draft = work.target, work.draft
    head = head_bytes(target, draft)
    block = nbytes((draft.layers, draft.norm)) + context_bytes(work, draft.config)
    features = nbytes((draft.fc, draft.hidden_norm))
    key_value_rows = 2 * draft.config.kv_size * draft.config.hidden_size * draft.dtype.itemsize
    projections = len(draft.layers) * key_value_rows + nbytes([x.k_norm for x in draft.layers])
    step = nbytes((target.layers, target.norm, target.lm_head)) + context_bytes(work, target.config)
    return {
        "backbone": block,
        "draft_head": head,
        "draft_round": block + head,
        "ingest": features + projections,
        "verify": step,
        "spec_round": block + head + features + step,
        "plain_step": step,
    }


def head_bytes(target: DenseTarget, draft: DFlashDraft) -> int:
    """The output table and what a family multiplies besides; of codebooks only rows are read."""
    parts: list[Any] = [target.lm_head if draft.head is None else draft.head.lm_head]
    if draft.markov is not None:
        parts += [draft.markov.w2, draft.markov.mix]
    if draft.dflash2 is not None:
        parts += [draft.dflash2.hidden_projection]
    return nbytes([*parts, draft.confidence])


def nbytes(tree: Any) -> int:
    """Bytes of all arrays in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def context_bytes(work: Workload, config: DFlashConfig | DecoderConfig) -> int:
    """K and V of the context rows that each layer sees, over the whole batch."""
    rows = [
        min(work.context, work.context if window is None else window - 1)
        for window in config.layer_window
    ]
    return work.batch * sum(rows) * 2 * config.kv_size * work.draft.dtype.itemsize
