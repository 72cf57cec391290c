"""Models small enough to reason about: a table target with drafters that are right or wrong by
construction, and random ones of the real architecture.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dflash_jax import load_draft
from dflash_jax.config import DFlashConfig, RopeConfig, check_against_target
from dflash_jax.draft import DFlashDraft, DraftHead
from dflash_jax.shapes import abstract
from dflash_jax.targets import HostedOutput, TargetOutput, check_taps, dense
from dflash_jax.targets.hf import load_hf

ORACLES = Path(__file__).parent / "oracles"
SLOT_DECAY = 1 / 16
F32 = jnp.dtype(jnp.float32)


@struct.dataclass
class TableState:
    """The table needs no cache: only the rows committed, `len [B]`."""

    len: jax.Array


@struct.dataclass
class TableTarget:
    """A `Target` whose next-token logits are `table[previous token]`.

    The hidden row `[H]` has `slots` places of width V and two flags. The target's own hidden rows
    hold the token one-hot in place 0; its head reads every place, the later the weaker. Taps hold
    the row's absolute position in the first flag and 1 in the second.
    """

    table: jax.Array
    embedding: jax.Array
    head: jax.Array
    stop_token_ids: tuple[int, ...] = struct.field(pytree_node=False)
    max_positions: int = struct.field(pytree_node=False)
    num_layers: int = struct.field(pytree_node=False, default=4)

    @property
    def hidden_size(self) -> int:
        return self.head.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.table.shape[0]

    @property
    def lm_head(self) -> jax.Array:
        return self.head.T

    def check_drafter(self, config: DFlashConfig) -> None:
        check_against_target(
            config,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            embedding_rows=self.vocab_size,
        )

    def embed(self, ids: jax.Array) -> jax.Array:
        return self.embedding[ids]

    def init_state(self, batch: int, slots: int) -> TableState:
        return TableState(len=jnp.zeros((batch,), jnp.int32))

    def forward(
        self, state: TableState, ids: jax.Array, taps: tuple[int, ...], implementation: Any = None
    ) -> tuple[TargetOutput, TableState]:
        check_taps(taps, self.num_layers)
        hidden = jax.nn.one_hot(ids, self.hidden_size, dtype=F32)
        pos = (state.len[:, None] + jnp.arange(ids.shape[1])[None]).astype(F32)
        tap = jnp.zeros((*ids.shape, self.hidden_size), F32).at[..., -2].set(pos).at[..., -1].set(1)
        return TargetOutput(hidden, jnp.tile(tap, (1, 1, len(taps)))), state

    def commit(self, state: TableState, count: jax.Array) -> TableState:
        return TableState(len=state.len + count)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden @ self.head


def table_target(
    follows: Sequence[int],
    *,
    block_size: int = 4,
    mask: int | None = None,
    stops: tuple[int, ...] = (),
    max_positions: int = 4096,
) -> TableTarget:
    """The target that says `follows[token]` after `token`, with room for a right drafter's blocks.

    V = len(follows) must be even (it is the drafter's head size); `mask` defaults to V - 1.
    """
    size = len(follows)
    rng = np.random.default_rng(0)
    table = rng.uniform(0, 0.5, (size, size)).astype(np.float32)
    table[np.arange(size), list(follows)] = 8.0
    hidden = block_size * size + 2
    embedding = np.eye(size, hidden, dtype=np.float32)
    embedding[size - 1 if mask is None else mask] = np.eye(hidden, dtype=np.float32)[-1]
    places = [np.float32(SLOT_DECAY**i) * table for i in range(block_size)]
    return TableTarget(
        table=jnp.asarray(table),
        embedding=jnp.asarray(embedding),
        head=jnp.asarray(np.concatenate([*places, np.zeros((2, size), np.float32)])),
        stop_token_ids=stops,
        max_positions=max_positions,
    )


def right_draft(target: TableTarget, *, mask: int | None = None) -> DFlashDraft:
    """A real drafter that proposes the table's own chain after any anchor.

    Layer l (causal, window 2, uniform attention) copies place l - 1 of the row before, one step
    of the table on, to place l. So the first filled place of row r is place r, it holds what comes
    r - 1 tokens after the anchor, and the target's head makes the next one of it. A last, full
    layer stores the taps' flags as V and adds nothing.
    """
    size, hidden = target.vocab_size, target.hidden_size
    block = (hidden - 2) // size
    config = DFlashConfig(
        family="dflash",
        hidden_size=hidden,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=size,
        intermediate_size=2,
        num_hidden_layers=block,
        rms_norm_eps=1e-6,
        rope=RopeConfig(10000.0),
        block_size=block,
        mask_token_id=size - 1 if mask is None else mask,
        target_layer_ids=(0, 2),
        layer_causal=(True,) * block,
        layer_window=(2,) * (block - 1) + (None,),
        vocab_size=size,
    )
    draft = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), abstract(config, F32))
    step = np.zeros((size, size), np.float32)
    step[np.asarray(target.table).argmax(axis=1), np.arange(size)] = 1
    for i, layer in enumerate(draft.layers):
        for norm in (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm):
            norm[:] = 1
        value = layer.qkv[2 * size :]
        if i == block - 1:
            value[:2, -2:] = np.eye(2)
        else:
            value[:, i * size : (i + 1) * size] = np.eye(size) if i == 0 else step
            layer.o[(i + 1) * size : (i + 2) * size] = np.eye(size)
    draft.fc[-2:, hidden - 2 : hidden] = np.eye(2)
    draft.hidden_norm[:] = 1
    draft.norm[:] = 1
    return jax.tree.map(jnp.asarray, draft)


def mistaken_draft(
    target: TableTarget, wrong: Iterable[int], *, mask: int | None = None
) -> DFlashDraft:
    """The right drafter, but where it should say a token of `wrong` it says another one."""
    draft, size = right_draft(target, mask=mask), target.vocab_size
    says = {t: (t + 1) % size for t in wrong}
    head = np.zeros((size, target.hidden_size), np.float32)
    for token, column in enumerate(np.asarray(target.head).T):
        head[says.get(token, token)] += column
    offsets = jnp.zeros((size,), jnp.int32)
    return draft.replace(head=DraftHead(lm_head=jnp.asarray(head), d2t=offsets))


def wrong_draft(target: TableTarget, *, mask: int | None = None) -> DFlashDraft:
    """A drafter that never proposes what the target says."""
    return mistaken_draft(target, range(target.vocab_size), mask=mask)


def chain(target: TableTarget, token: int, count: int) -> list[int]:
    """The `count` tokens that the table says after `token`."""
    follows, out = np.asarray(target.table).argmax(axis=1), []
    for _ in range(count):
        token = int(follows[token])
        out.append(token)
    return out


# --- random models of the real architecture ------------------------------------------------------

TINY = DFlashConfig(
    family="dflash",
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    num_hidden_layers=2,
    rms_norm_eps=1e-6,
    rope=RopeConfig(10000.0),
    block_size=4,
    mask_token_id=63,
    target_layer_ids=(0, 1),
    layer_causal=(False, False),
    layer_window=(None, None),
    vocab_size=64,
    num_target_layers=3,
)
SLIDING = dataclasses.replace(TINY, layer_window=(6, None))
"""One sliding and one full layer, both bidirectional."""

TINY_TARGET = dense.DecoderConfig(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    num_hidden_layers=3,
    rms_norm_eps=1e-6,
    rope=RopeConfig(10000.0),
    vocab_size=64,
    embedding_rows=64,
    max_position_embeddings=4096,
    layer_window=(None, None, None),
    qk_norm=True,
    tied=True,
)


def random_tree(shapes: Any, seed: int, scale: float = 0.3) -> Any:
    """Matrices normal(0, scale), vectors near one: large enough that logits are far from ties."""
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(seed)

    def fill(shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.normal(size=shape)
        return 1 + 0.1 * noise if len(shape) == 1 else scale * noise

    return jax.tree.unflatten(tree, [jnp.asarray(fill(s.shape), s.dtype) for s in leaves])


def tiny_target(config: dense.DecoderConfig = TINY_TARGET, seed: int = 0) -> dense.DenseTarget:
    """A random dense target in f32."""
    return random_tree(dense.abstract(config, F32), seed)


def tiny_draft(config: DFlashConfig = TINY, seed: int = 1) -> DFlashDraft:
    """A random drafter in f32."""
    return random_tree(abstract(config, F32), seed)


@functools.cache
def trained_pair() -> tuple[dense.DenseTarget, DFlashDraft]:
    """The trained tiny target and its DFlash drafter of `oracles/tiny`, in f32: byte tokens,
    block 8, 2.85 tokens gained a round.
    """
    target = load_hf(ORACLES / "tiny" / "target", dtype=F32)
    return target, load_draft(ORACLES / "tiny" / "dflash", target, dtype=F32)


def sliding_pair() -> tuple[dense.DenseTarget, DFlashDraft]:
    """The trained pair with a window of 32 on the drafter's first layer: a ring beside a full
    cache. It was not trained that way, so it drafts a little worse; no token may change.
    """
    target, draft = trained_pair()
    return target, draft.replace(config=dataclasses.replace(draft.config, layer_window=(32, None)))


@dataclasses.dataclass
class HostState:
    """len `[B]` and the target's own state, which also knows it."""

    len: np.ndarray
    state: object


class HostedDense:
    """A `HostedTarget` over another one: what it hands out went through the host's memory."""

    def __init__(self, target):
        self._target = self.tables = target
        self.hidden_size, self.vocab_size = target.hidden_size, target.vocab_size
        self.stop_token_ids, self.max_positions = target.stop_token_ids, target.max_positions
        self.check_drafter = target.check_drafter
        self.rows_run = []  # counts of every forward

    def init_state(self, batch, slots):
        return HostState(np.zeros(batch, np.int32), self._target.init_state(batch, slots))

    def forward(self, state, ids, count, taps, last_only=False):
        assert not isinstance(ids, jax.core.Tracer)
        self.rows_run.append(count.tolist())
        run, after = _forward(self._target, state.state, ids, taps)
        logits = np.array(self._target.logits(run.hidden))
        real = np.arange(ids.shape[1]) < count[:, None]
        if last_only:
            last = np.maximum(count - 1, 0)[:, None, None]
            logits = np.take_along_axis(logits, last, axis=1)
        else:
            logits = np.where(real[..., None], logits, 0)
        tapped = np.where(real[..., None], np.array(run.taps), 0)
        out = HostedOutput(jnp.asarray(logits), jnp.asarray(tapped))
        return out, HostState(state.len, after)

    def commit(self, state, count):
        after = self._target.commit(state.state, jnp.asarray(count, jnp.int32))
        return HostState(state.len + count.astype(np.int32), after)


_forward = jax.jit(
    lambda target, state, ids, taps: target.forward(state, ids, taps), static_argnums=3
)
