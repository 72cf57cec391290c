"""A drafter's shapes, and a fresh drafter of them to train."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax import quant
from dflash_jax.config import DFlashConfig, DSparkConfig
from dflash_jax.conv import DFlash2Conv
from dflash_jax.draft import DFlashDraft, DFlashLayer, DraftHead
from dflash_jax.markov import ConfidenceHead, MarkovHead
from dflash_jax.selector import DFlash2Head


def abstract(config: DFlashConfig, dtype: jnp.dtype, head_rows: int | None = None) -> DFlashDraft:
    """The drafter's shapes and dtypes: the one source for loading, init, sharding and tests.

    `config.precision` says how projections are held. head_rows: of a head of its own.
    """

    def array(*shape: int, dtype: jnp.dtype = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def matrix(rows: int, columns: int) -> Any:
        if config.precision is None:
            return array(rows, columns)
        return quant.abstract(rows, columns, config.precision)

    hidden, ff = config.hidden_size, config.intermediate_size
    spark, two = config.dspark, config.dflash2

    def conv() -> DFlash2Conv | None:
        if two is None:
            return None
        taps, groups = two.conv_kernel_size, hidden // two.conv_group_size
        return DFlash2Conv(array(2, taps, hidden), array(2 * taps * groups, hidden))

    def layer() -> DFlashLayer:
        return DFlashLayer(
            input_norm=array(hidden),
            qkv=matrix(config.q_size + 2 * config.kv_size, hidden),
            q_norm=array(config.head_dim),
            k_norm=array(config.head_dim),
            o=matrix(hidden, config.q_size),
            post_norm=array(hidden),
            gate_up=matrix(2 * ff, hidden),
            down=matrix(hidden, ff),
            attention_conv=conv(),
            mlp_conv=conv(),
        )

    head = markov = confidence = selector = None
    if head_rows is not None:
        head = DraftHead(lm_head=matrix(head_rows, hidden), d2t=array(head_rows, dtype=jnp.int32))
    if spark is not None and spark.markov_rank:
        markov = _markov(config, spark, head_rows or config.vocabulary, array)
    if spark is not None and spark.confidence:
        with_markov, rank = bool(spark.confidence_with_markov), spark.markov_rank or 0
        width = hidden + (rank if with_markov else 0)
        confidence = ConfidenceHead(array(1, width), array(1), with_markov)
    if two is not None:
        vocabulary, rank = config.vocabulary, two.selector_rank
        codebook = array(vocabulary, rank)
        selector = DFlash2Head(array(rank, hidden), codebook, codebook, two.selector_top_k)
    return DFlashDraft(
        layers=[layer() for _ in range(config.num_hidden_layers)],
        fc=matrix(hidden, config.tap_size),
        hidden_norm=array(hidden),
        norm=array(hidden),
        head=head,
        markov=markov,
        confidence=confidence,
        dflash2=selector,
        config=config,
    )


def _markov(
    config: DFlashConfig, spark: DSparkConfig, rows: int, array: Callable[..., Any]
) -> MarkovHead:
    rank, hidden = spark.markov_rank or 0, config.hidden_size
    mix = {
        "vanilla": None,
        "gated": (rank, hidden + rank),
        "rnn": (3 * rank, 2 * rank + hidden),
    }
    kind = spark.markov_head_type or "vanilla"
    shape = mix[kind]
    return MarkovHead(
        w1=array(config.vocabulary, rank),
        w2=array(rows, rank),
        mix=array(*shape) if shape else None,
        mix_bias=array(shape[0]) if shape else None,
        kind=kind,
    )


def init_draft(config: DFlashConfig, key: jax.Array, dtype: jnp.dtype) -> DFlashDraft:
    """A fresh drafter: matrices normal(0, 0.02), norms one, biases zero.

    The parts a family adds start without effect: convolutions as the identity, and the output
    side of the Markov head and of the selector at zero.
    """
    shapes, tree = jax.tree.flatten(abstract(config, dtype))
    keys = jax.random.split(key, len(shapes))
    leaves = [
        jnp.ones(s.shape, dtype)
        if len(s.shape) == 1
        else (0.02 * jax.random.normal(k, s.shape, jnp.float32)).astype(dtype)
        for s, k in zip(shapes, keys, strict=True)
    ]
    draft = jax.tree.unflatten(tree, leaves)
    if draft.dflash2 is not None:
        draft = draft.replace(
            layers=[
                layer.replace(
                    attention_conv=_identity_conv(layer.attention_conv),
                    mlp_conv=_identity_conv(layer.mlp_conv),
                )
                for layer in draft.layers
            ],
            dflash2=draft.dflash2.replace(successor=jnp.zeros_like(draft.dflash2.successor)),
        )
    if draft.markov is not None:
        bias = draft.markov.mix_bias
        draft = draft.replace(
            markov=draft.markov.replace(
                w2=jnp.zeros_like(draft.markov.w2),
                mix_bias=None if bias is None else jnp.zeros_like(bias),
            )
        )
    if draft.confidence is not None:
        zero = jax.tree.map(jnp.zeros_like, draft.confidence)
        draft = draft.replace(confidence=zero)
    return draft


def _identity_conv(conv: DFlash2Conv) -> DFlash2Conv:
    kernel = jnp.zeros_like(conv.base_kernel).at[:, 0].set(1)
    return DFlash2Conv(kernel, jnp.zeros_like(conv.kernel_projection))
