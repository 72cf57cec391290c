"""A world small enough to know the exact law of: a target whose next-token logits are a table over
6 tokens, and real drafters of every family that are right, wrong or random.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from targets import (
    F32,
    SLOT_DECAY,
    TableTarget,
    random_tree,
    right_draft,
    wrong_draft,
)

from dflash_jax.config import DFlash2Config, DSparkConfig
from dflash_jax.draft import DFlashDraft
from dflash_jax.sampling import SamplingParams
from dflash_jax.shapes import abstract

V, BLOCK = 6, 3


@functools.cache
def table_target() -> TableTarget:
    """Random logits after each token, wide enough that laws differ from one another."""
    hidden = BLOCK * V + 2
    table = np.random.default_rng(0).normal(0, 1.2, (V, V)).astype(np.float32)
    embedding = np.eye(V, hidden, dtype=np.float32)
    embedding[V - 1] = np.eye(hidden, dtype=np.float32)[-1]  # the mask's
    places = [np.float32(SLOT_DECAY**i) * table for i in range(BLOCK)]
    head = np.concatenate([*places, np.zeros((2, V), np.float32)])
    return TableTarget(
        jnp.asarray(table), jnp.asarray(embedding), jnp.asarray(head), (), max_positions=512
    )


@functools.cache
def config_of(family):
    """One layer; blocks of three rows."""
    return dataclasses.replace(
        right_draft(table_target()).config,
        family=family,
        num_attention_heads=2,
        head_dim=4,
        num_hidden_layers=1,
        layer_causal=(False,),
        layer_window=(None,),
        dspark=DSparkConfig("vanilla", V, True, True) if family == "dspark" else None,
        dflash2=DFlash2Config(2, 10, V, 4) if family == "dflash2" else None,
    )


def silent(draft: DFlashDraft) -> DFlashDraft:
    """Layers that add nothing: block rows stay the embeddings they were."""
    layers = [
        layer.replace(o=jnp.zeros_like(layer.o), down=jnp.zeros_like(layer.down))
        for layer in draft.layers
    ]
    return draft.replace(layers=layers)


@functools.cache
def drafter(family: str, kind: str) -> DFlashDraft:
    """right: proposes by the table itself. wrong: by its negative. random: anything."""
    target = table_target()
    if family == "dflash" and kind != "random":
        return {"right": right_draft, "wrong": wrong_draft}[kind](target)
    config = right_draft(target).config if family == "dflash" else config_of(family)
    draft = random_tree(abstract(config, F32), seed=1)
    draft = draft.replace(norm=0.3 * draft.norm)
    if draft.confidence is not None:  # by the token before, sure as often as not
        weight = draft.confidence.weight.at[:, : config.hidden_size].set(0)
        draft = draft.replace(confidence=draft.confidence.replace(weight=weight, bias=jnp.zeros(1)))
    if kind == "random":
        return draft
    table = target.table if kind == "right" else -target.table
    draft = silent(draft)
    if family == "dspark":
        markov = draft.markov.replace(w1=jnp.eye(V), w2=table.T)
        return draft.replace(norm=jnp.zeros_like(draft.norm), markov=markov)
    # Mask rows are then the last unit vector, on which the target's head is zero.
    flag = jnp.zeros((V, config.hidden_size)).at[:, -1].set(config.hidden_size**-0.5)
    selector = draft.dflash2.replace(
        hidden_projection=flag, predecessor=jnp.eye(V), successor=table.T
    )
    return draft.replace(norm=jnp.ones_like(draft.norm), dflash2=selector)


def shaped_logits(params: SamplingParams, text: list[int]) -> np.ndarray:
    """Penalised and biased logits `[V]` of the token after `text`, prompt included, in f64."""
    logits = np.asarray(table_target().table, np.float64)[text[-1]].copy()
    last_n = params.penalty_last_n
    seen = text if last_n < 0 else text[len(text) - min(last_n, len(text)) :]
    counts = np.bincount(seen, minlength=V)
    repeated = np.where(
        logits > 0, logits / params.repeat_penalty, logits * params.repeat_penalty
    ) - (params.frequency_penalty * counts + params.presence_penalty)
    logits = np.where(counts > 0, repeated, logits)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    return logits


def next_law(params: SamplingParams, text: list[int]) -> np.ndarray:
    """The law `[V]` of the token after `text`."""
    return filtered(params, shaped_logits(params, text))


def filtered(params: SamplingParams, logits: np.ndarray) -> np.ndarray:
    """The law that temperature and filters leave of logits `[V]` in f64."""
    order = np.argsort(-logits, kind="stable")
    probs = np.exp((logits - logits.max()) / params.temperature)[order]
    probs[params.top_k or len(probs) :] = 0
    probs /= probs.sum()
    probs[np.cumsum(probs) - probs >= params.top_p] = 0
    probs[probs < params.min_p * probs.max()] = 0
    law = np.zeros(len(logits))
    law[order] = probs / probs.sum()
    return law


def chi_square_p(counts: np.ndarray, law: np.ndarray) -> float:
    """p of the counts under the law; cells expected less than 5 times are pooled."""
    expected = law * counts.sum()
    if counts[law == 0].any():
        return 0.0
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    return float(jax.scipy.stats.chi2.sf(np.float32(statistic), np.float32(len(expected) - 1)))
