"""The shapes that `bench.py` times, and workloads of them: weights, and a context held by both
sides, all random and made on the device."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import SpecSession, loop
from dflash_jax.config import (
    DFlash2Config,
    DFlashConfig,
    DSparkConfig,
    Family,
    RopeConfig,
    resolve_harvest,
)
from dflash_jax.draft import DFlashDraft
from dflash_jax.kernels import Implementation
from dflash_jax.kv import ABSENT, DraftKV, Slots
from dflash_jax.quant import QuantizedLinear
from dflash_jax.round import DecodeState, RoundPlan
from dflash_jax.shapes import abstract
from dflash_jax.targets import dense
from dflash_jax.targets.dense import DecoderConfig, DenseTarget
from dflash_jax.window import resolve_policy

NO_LIMIT = np.iinfo(np.int32).max
FAMILIES: tuple[Family, ...] = get_args(Family)


@dataclasses.dataclass(frozen=True)
class Preset:
    """A target's shape and its drafter's, and the context rows to time at by default.

    The drafter has the target's geometry but for what is said here. rank: of DSpark's Markov head
    and of DFlash2's codebooks; top_k: DFlash2's. A target without layers is one of which only the
    tables are known, so that only the stages of a draft round run.
    """

    target: DecoderConfig
    layers: int
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    rank: int
    top_k: int
    intermediate_size: int | None = None
    window: int | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    families: tuple[Family, ...] = FAMILIES
    context: int = 2048

    def draft(
        self, family: Family, block_size: int | None = None, window: int | None = None
    ) -> DFlashConfig:
        """The drafter of a family; block_size and window override the preset's.

        ValueError for a family that the preset lacks and for sizes that cannot work.
        """
        block = self.block_size if block_size is None else block_size
        window = self.window if window is None else window
        if family not in self.families:
            expected = ", ".join(self.families)
            raise ValueError(f"--family: expected one of {expected}, found {family!r}")
        if block < 2:
            raise ValueError(f"--block-size: expected at least 2, found {block}")
        if window is not None and window < block:
            raise ValueError(f"--window: expected at least the block's {block}, found {window}")
        target = self.target
        return DFlashConfig(
            family=family,
            hidden_size=target.hidden_size,
            num_attention_heads=target.num_attention_heads,
            num_key_value_heads=target.num_key_value_heads,
            head_dim=target.head_dim,
            intermediate_size=self.intermediate_size or target.intermediate_size,
            num_hidden_layers=self.layers,
            rms_norm_eps=target.rms_norm_eps,
            rope=target.rope,
            block_size=block,
            mask_token_id=self.mask_token_id,
            target_layer_ids=self.taps,
            layer_causal=(False,) * self.layers,
            layer_window=(window,) * self.layers,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_hidden_layers or None,
            output_multiplier=self.output_multiplier,
            final_logit_softcapping=self.final_logit_softcapping,
            dspark=DSparkConfig("vanilla", self.rank, True, True) if family == "dspark" else None,
            # Kernel and group size of every published DFlash2 drafter.
            dflash2=DFlash2Config(2, 16, self.rank, self.top_k) if family == "dflash2" else None,
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
        rank=8,
        top_k=4,
        context=64,
    ),
    # The drafters are those that are shipped.
    "smollm2": Preset(
        _decoder(30, 576, 9, 3, 64, 1536, 49152, 1e5, qk_norm=False, tied=True),
        layers=3,
        block_size=12,
        mask_token_id=16,
        taps=(2, 9, 16, 23, 28),
        rank=32,
        top_k=16,
        intermediate_size=1024,
    ),
    "qwen3-8b": Preset(
        _decoder(36, 4096, 32, 8, 128, 12288, 151936, 1e6, qk_norm=True, tied=False),
        layers=5,
        block_size=16,
        mask_token_id=151669,
        taps=(1, 9, 17, 25, 33),
        rank=256,
        top_k=16,
    ),
    "muse-glimmer": Preset(
        _decoder(0, 6656, 32, 8, 128, 19968, 202048, 1e6, qk_norm=True, tied=False),
        layers=5,
        block_size=16,
        mask_token_id=202047,
        taps=(0, 1, 2, 3, 4),
        rank=256,
        top_k=16,
        window=2048,
        output_multiplier=6656**-0.5 * 16,
        final_logit_softcapping=20.0,
        families=("dflash2",),
    ),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """What the stages run on: the sequences of `state` hold `contexts` rows, an anchor decided.

    context: their mean. acceptance: where given, the stages that accept drafts do so at this rate
    by chance. `state` is only ever copied, never donated. It accepts nothing (`verify_cap` 1),
    which changes no work: a round then gains one token, whatever the weights.
    """

    target: DenseTarget
    draft: DFlashDraft
    state: DecodeState
    plan: RoundPlan
    context: int
    contexts: tuple[int, ...]
    acceptance: float | None = None

    @property
    def batch(self) -> int:
        """Sequences side by side."""
        return self.state.anchor.shape[0]

    def using(self, implementation: Implementation) -> "Workload":
        """The same workload through other implementations of the ops that have kernels."""
        plan = dataclasses.replace(self.plan, implementation=implementation)
        return dataclasses.replace(self, plan=plan)


def make_plan(draft: DFlashDraft, capacity: int) -> RoundPlan:
    """The plan that a greedy `SpecSession` of default options makes."""
    config = draft.config
    harvest = resolve_harvest(config)
    width = harvest.drafts(config.block_size) + 1
    policy = resolve_policy(
        None, is_dspark=config.family == "dspark", has_confidence=draft.confidence is not None
    )
    return RoundPlan(
        config.block_size, width, capacity, harvest=harvest, policy=policy, widths=(width,)
    )


def random_target(config: DecoderConfig, dtype: Any) -> DenseTarget:
    """A target of random weights."""
    return random_tree(dense.abstract(config, dtype), random_keys(0))


def random_draft(config: DFlashConfig, dtype: Any, head_rows: int | None = None) -> DFlashDraft:
    """A drafter of random weights, its codebooks large enough to change the choice of a path.

    config.precision: of its projections. head_rows: of a head of its own, over the first tokens.
    """
    draft = random_tree(abstract(config, dtype, head_rows), random_keys(1))
    if draft.head is not None:
        draft = draft.replace(head=draft.head.replace(d2t=jnp.zeros_like(draft.head.d2t)))
    if draft.dflash2 is None:
        return draft
    head = draft.dflash2
    pair = 16 * head.predecessor, 16 * head.successor
    return draft.replace(dflash2=head.replace(predecessor=pair[0], successor=pair[1]))


def random_workload(
    target: DenseTarget,
    draft: DFlashDraft,
    *,
    batch: int,
    context: int,
    capacity: int,
    contexts: Sequence[int] | None = None,
) -> Workload:
    """The two behind a random context: nothing is read or prefilled.

    contexts: rows of each sequence, default `context` for all.
    """
    contexts = tuple(contexts or (context,) * batch)
    held = np.asarray(contexts, np.int32)
    keys = random_keys(2)
    plan = make_plan(draft, capacity)
    state, kv, _ = loop.empty_caches(target, draft, batch, capacity)

    def rows(leaves: list[jax.Array], scale: float) -> list[jax.Array]:
        return [normal(next(keys), leaf.shape, leaf.dtype, scale) for leaf in leaves]

    # Attention over many random rows averages them away; values as large as this keep it a part
    # of the result that a check cannot miss.
    loud = max(1.0, 0.5 * context**0.5)
    state = state.replace(k=rows(state.k, 1.0), v=rows(state.v, loud), len=jnp.array(held))
    state = loop.start(
        target,
        state,
        _filled(kv.replace(k=rows(kv.k, 1.0), v=rows(kv.v, loud)), held),
        normal(next(keys), (batch, target.hidden_size), draft.dtype, 1.0),
        budget=_each(batch, NO_LIMIT),
        verify_cap=_each(batch, 1),
        stop_ids=no_stops(),
        sampler=None,
        history=None,
        plan=plan,
    )
    return Workload(target, draft, state, plan, context, contexts)


def spread(context: int, batch: int) -> list[int]:
    """A context of its own for each of `batch` sequences: a quarter less to a quarter more than
    `context`, which is their mean.
    """
    return [context + int(context * (2 * b + 1 - batch) / (4 * batch)) for b in range(batch)]


def _filled(kv: DraftKV, contexts: np.ndarray) -> DraftKV:
    """The books of a cache of `contexts [B]` rows, as prompts' last wide chunks leave them."""

    def book(slots: Slots | None) -> Slots | None:
        if slots is None:
            return None
        index = np.arange(slots.pos.shape[1])
        held = np.full_like(contexts, kv.ring_rows) if slots.ring else contexts
        pos = index + (contexts - held)[:, None]
        pos = np.where((index < held[:, None]) & (pos >= 0), pos, ABSENT).astype(np.int32)
        return slots.replace(pos=jnp.asarray(pos), next=jnp.array(held))

    return kv.replace(len=jnp.array(contexts), full=book(kv.full), ring=book(kv.ring))


def _each(batch: int, value: int) -> jax.Array:
    # A buffer of its own every time: the same one may not be donated twice.
    return jnp.full((batch,), value, jnp.int32)


def loaded_workload(
    target: DenseTarget,
    draft: DFlashDraft,
    prompts: Sequence[Sequence[int]],
    *,
    capacity: int,
    block_size: int | None,
) -> Workload:
    """Real checkpoints behind prompts, prefilled as `generate` does."""
    session = SpecSession(
        target,
        draft,
        stop_token_ids=(),
        block_size=block_size,
        capacity=capacity,
        accept=False,
    )
    session.open(prompts, NO_LIMIT)
    assert session.state is not None
    contexts = tuple(map(len, prompts))
    context = round(sum(contexts) / len(contexts))
    return Workload(target, draft, session.state, session.plan, context, contexts)


def random_keys(stream: int) -> Iterator[jax.Array]:
    """Endless distinct keys, the same ones in every run."""
    for i in range(NO_LIMIT):
        yield jax.random.fold_in(jax.random.key(stream, impl="unsafe_rbg"), i)


def random_tree(shapes: Any, keys: Iterator[jax.Array]) -> Any:
    """Arrays for an `abstract` tree, leaf by leaf: matrices normal(0, 0.02), norms one; quantised
    ones uniform, of that deviation.
    """

    def leaf(shape: jax.ShapeDtypeStruct | QuantizedLinear) -> Any:
        if isinstance(shape, QuantizedLinear):
            values, scales = shape.values, shape.scales
            bits = jax.random.bits(next(keys), values.shape, jnp.uint8).astype(values.dtype)
            unit = 0.02 * 12**0.5 / (16 if shape.precision == "q4_0" else 256)
            return shape.replace(values=bits, scales=jnp.full(scales.shape, unit, scales.dtype))
        if len(shape.shape) == 1:
            return jnp.ones(shape.shape, shape.dtype)
        return normal(next(keys), shape.shape, shape.dtype, 0.02)

    return jax.tree.map(leaf, shapes, is_leaf=lambda x: isinstance(x, QuantizedLinear))


@partial(jax.jit, static_argnames=("shape", "dtype"))
def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
    """Normal values of deviation `scale`, drawn in f32."""
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def no_stops() -> jax.Array:
    """A row of stop ids that no token equals."""
    return jnp.full((8,), -1, jnp.int32)
