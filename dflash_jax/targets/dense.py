"""The dense decoder: Qwen3 (with q/k head norms) and Llama-class models (without).

One function serves prefill, verify and the one-token step: `DenseTarget.forward`.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dflash_jax import kernels, sharding
from dflash_jax.attention import BlockPlace, HeadNorms, append_and_attend, project_qkv
from dflash_jax.config import DFlashConfig, RopeConfig, check_against_target
from dflash_jax.integers import round_up
from dflash_jax.kernels import Implementation
from dflash_jax.kv import ABSENT, keep_path
from dflash_jax.layers import SUM_TILE, add_norm, gated, linear, rms_norm, rope_tables
from dflash_jax.sharding import ALONE, Sums
from dflash_jax.targets import TargetOutput, check_taps
from dflash_jax.tree import DraftTree


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Static geometry of a dense decoder.

    `vocab_size` counts the tokens that exist; `embedding_rows` the rows of the tables, padding
    included. `layer_window` is None on layers that see everything. `qk_norm`: per-head RMSNorm.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    rope: RopeConfig
    vocab_size: int
    embedding_rows: int
    max_position_embeddings: int
    layer_window: tuple[int | None, ...]
    qk_norm: bool
    tied: bool
    stop_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_key_value_heads * self.head_dim


class DenseLayer(struct.PyTreeNode):
    """One decoder layer; the fused rows of `DFlashLayer`, norms of q and k only where present."""

    input_norm: jax.Array
    qkv: jax.Array
    q_norm: jax.Array | None
    k_norm: jax.Array | None
    o: jax.Array
    post_norm: jax.Array
    gate_up: jax.Array
    down: jax.Array

    @property
    def head_norms(self) -> HeadNorms:
        """The norms of q and k together, where there are any."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm, self.k_norm


class DenseState(struct.PyTreeNode):
    """KV cache: k, v one leaf a layer `[B, kv_heads, slots, D]`; slot = position; len `[B]`.

    Rows at and past `len` may hold anything.
    """

    k: list[jax.Array]
    v: list[jax.Array]
    len: jax.Array


class DenseTarget(struct.PyTreeNode):
    """A dense decoder as a `Target`: embedding `[rows, H]`, layers, norm `[H]`, head `[rows, H]`.

    `head` is None where it is tied to the embedding. `mesh`: what it is split over, see `sharding`;
    None on one device.
    """

    embedding: jax.Array
    layers: list[DenseLayer]
    norm: jax.Array
    head: jax.Array | None
    config: DecoderConfig = struct.field(pytree_node=False)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.config.stop_token_ids

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings

    @property
    def lm_head(self) -> jax.Array:
        """The output table `[rows, H]`, tied or not."""
        return self.embedding if self.head is None else self.head

    def check_drafter(self, config: DFlashConfig) -> None:
        check_against_target(
            config,
            hidden_size=self.config.hidden_size,
            num_layers=self.config.num_hidden_layers,
            embedding_rows=self.config.embedding_rows,
        )

    @property
    def takes_trees(self) -> bool:
        return True

    def embed(self, ids: jax.Array) -> jax.Array:
        return self.embedding[ids]

    def init_state(self, batch: int, slots: int) -> DenseState:
        config = self.config
        sharding.check_batch(self.mesh, batch)
        slots = round_up(slots, SUM_TILE)  # which attention sums over
        shape = (batch, config.num_key_value_heads, slots, config.head_dim)

        def leaves() -> list[jax.Array]:
            return [jnp.zeros(shape, self.embedding.dtype) for _ in self.layers]

        state = DenseState(k=leaves(), v=leaves(), len=jnp.zeros((batch,), jnp.int32))
        specs = sharding.cache_specs(state, config, self.mesh)
        return sharding.constrain(state, self.mesh, specs)

    def forward(
        self,
        state: DenseState,
        ids: jax.Array,
        taps: tuple[int, ...] = (),
        implementation: Implementation = None,
        tree: DraftTree | None = None,
    ) -> tuple[TargetOutput, DenseState]:
        check_taps(taps, self.config.num_hidden_layers)
        run, x = partial(_layers, taps=taps, implementation=implementation), self.embed(ids)
        if self.mesh is None:
            return run(self, state, x, tree)
        caches = sharding.cache_specs(state, self.config, self.mesh)
        return sharding.per_shard(
            partial(run, sums=sharding.sums(self)),
            self,
            state,
            x,
            tree,
            in_specs=(caches, sharding.ROWS, sharding.ROWS),
            out_specs=(sharding.ROWS, caches),
            checked=kernels.resolve(implementation) == "xla",
        )

    def commit(
        self,
        state: DenseState,
        count: jax.Array,
        path: jax.Array | None = None,
        implementation: Implementation = None,
    ) -> DenseState:
        if path is not None:
            how = implementation if self.mesh is None else "xla"
            leaves = keep_path([*state.k, *state.v], state.len, path, how)
            state = state.replace(k=leaves[: len(state.k)], v=leaves[len(state.k) :])
        return state.replace(len=state.len + count)

    def logits(self, hidden: jax.Array) -> jax.Array:
        logits = linear(hidden, self.lm_head, dtype=jnp.float32)
        if self.mesh is not None and sharding.divides(self.mesh, self.config.embedding_rows):
            by_vocabulary = P(*[P.UNCONSTRAINED] * (logits.ndim - 1), sharding.MODEL)
            logits = sharding.constrain(logits, self.mesh, by_vocabulary)
        if self.config.vocab_size == self.config.embedding_rows:
            return logits
        real = jnp.arange(self.config.embedding_rows) < self.config.vocab_size
        return jnp.where(real, logits, jnp.finfo(jnp.float32).min)


def _layers(
    target: DenseTarget,
    state: DenseState,
    x: jax.Array,
    tree: DraftTree | None,
    taps: tuple[int, ...],
    implementation: Implementation,
    sums: Sums = ALONE,
) -> tuple[TargetOutput, DenseState]:
    """`DenseTarget.forward` from embedded rows `x [B, rows, H]` on; `sums`: within a shard."""
    config, rows, eps = target.config, x.shape[1], target.config.rms_norm_eps
    depth = jnp.arange(rows)[None] if tree is None else tree.depth
    pos = state.len[:, None] + depth
    slots = jnp.arange(state.k[0].shape[2])[None]
    # No row but itself sees a leaf; the spine's rows stand as a chain's.
    seen = rows if tree is None else jnp.sum(tree.on_spine, axis=1, dtype=jnp.int32)[:, None]
    k_pos = jnp.where(slots < state.len[:, None] + seen, slots, ABSENT)
    cos, sin = rope_tables(config.rope, config.head_dim, pos)
    place = BlockPlace(
        cos,
        sin,
        q_pos=pos,
        k_pos=k_pos,
        slot=state.len,
        end=state.len,
        tree=tree is not None,
    )
    new_k, new_v, tapped = list(state.k), list(state.v), {}
    norms = [layer.input_norm for layer in target.layers] + [target.norm]
    end, h = partial(add_norm, implementation=implementation), rms_norm(x, norms[0], eps)
    for i, layer in enumerate(target.layers):
        with jax.named_scope(f"target_layer_{i}"):
            attended, new_k[i], new_v[i] = append_and_attend(
                project_qkv(h, layer.qkv, state.k[i], implementation),
                layer.head_norms,
                eps,
                place,
                state.k[i],
                state.v[i],
                causal=True,
                window=config.layer_window[i],
                implementation=implementation,
            )
            x, h = end(x, attended, layer.o, layer.post_norm, eps, sums.attention)
            h = gated(h, layer.gate_up, implementation)
            x, h = end(x, h, layer.down, norms[i + 1], eps, sums.mlp)
            tapped[i] = x
    hidden = h  # the last layer's end is the final norm
    # transformers' hidden_states hold the last layer's output after the final norm.
    tapped[config.num_hidden_layers - 1] = hidden
    empty = jnp.zeros((*x.shape[:2], 0), x.dtype)
    joined = jnp.concatenate([empty, *(tapped[i] for i in taps)], axis=-1)
    return TargetOutput(hidden, joined), state.replace(k=new_k, v=new_v)


def abstract(config: DecoderConfig, dtype: jnp.dtype) -> DenseTarget:
    """The target's shapes and dtypes, the one source for loaders, random init and sharding."""

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    hidden, ff = config.hidden_size, config.intermediate_size

    def layer() -> DenseLayer:
        return DenseLayer(
            input_norm=array(hidden),
            qkv=array(config.q_size + 2 * config.kv_size, hidden),
            q_norm=array(config.head_dim) if config.qk_norm else None,
            k_norm=array(config.head_dim) if config.qk_norm else None,
            o=array(hidden, config.q_size),
            post_norm=array(hidden),
            gate_up=array(2 * ff, hidden),
            down=array(hidden, ff),
        )

    return DenseTarget(
        embedding=array(config.embedding_rows, hidden),
        layers=[layer() for _ in range(config.num_hidden_layers)],
        norm=array(hidden),
        head=None if config.tied else array(config.embedding_rows, hidden),
        config=config,
    )
