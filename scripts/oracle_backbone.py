"""What `check_oracles.py` compares of a drafter's backbone, and what a comparison is."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import kv as cache
from dflash_jax.attention import ABSENT, block_attention
from dflash_jax.conv import DFlash2Conv, d2_conv_finish, d2_conv_prepare
from dflash_jax.draft import (
    DFlashDraft,
    block_qkv,
    context_kv,
    ctx_features,
    forward_block,
    forward_round,
    ingest_ctx,
    layer_forward,
)
from dflash_jax.kernels import Implementation
from dflash_jax.layers import linear, rms_norm, rope_frequencies, rope_tables, swiglu

TOLERANCE = 1e-5
"""Of max abs difference / max abs reference, in f32."""

_forward_block, _ingest_ctx = jax.jit(forward_block), jax.jit(ingest_ctx)
_forward_round = jax.jit(forward_round, static_argnames=("implementation",))


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison. `error` is None for what was skipped, and then `note` says why."""

    case: str
    stage: str
    error: float | None
    tolerance: float = TOLERANCE
    note: str = ""

    @property
    def status(self) -> str:
        if self.error is None:
            return "skipped"
        return "passed" if self.error <= self.tolerance else "failed"  # NaN fails

    def line(self) -> str:
        if self.error is None:
            return f"{self.case:32} {self.stage:28} skipped: {self.note}"
        figures = f"{self.error:9.2e} tolerance {self.tolerance:.0e}"
        return f"{self.case:32} {self.stage:28} {figures} {self.status} {self.note}".rstrip()

    def record(self) -> dict[str, Any]:
        """As JSON; an error that is no number is null."""
        finite = self.error is not None and np.isfinite(self.error)
        error = self.error if finite else None
        return {**dataclasses.asdict(self), "error": error, "status": self.status}


def relative_error(got: Any, reference: Any) -> float:
    """Max abs difference over max abs reference."""
    got, reference = np.asarray(got, np.float64), np.asarray(reference, np.float64)
    return float(np.abs(got - reference).max() / (np.abs(reference).max() or 1.0))


def close(case: str, stage: str, got: Any, reference: Any) -> Check:
    """Numbers, by `relative_error`; another shape is a failure."""
    if np.shape(got) != np.shape(reference):
        note = f"expected shape {list(np.shape(reference))}, found {list(np.shape(got))}"
        return Check(case, stage, float("nan"), note=note)
    return Check(case, stage, relative_error(got, reference))


def same(case: str, stage: str, got: Any, reference: Any) -> Check:
    """Ids, paths and lengths: exact. The error is the share of places that differ."""
    got, reference = np.asarray(got), np.asarray(reference)
    if got.shape != reference.shape:
        note = f"expected {reference.size} values, found {got.size}"
        return Check(case, stage, 1.0, 0.0, note)
    return Check(case, stage, float((got != reference).mean()) if got.size else 0.0, 0.0)


# --- stages/CASE: one block forward in parts, and rounds with a growing cache -------------------


@dataclasses.dataclass(frozen=True)
class StageCase:
    """A folder under `stages/` with its drafter, held in f32, and what its ops run on."""

    name: str
    directory: Path
    draft: DFlashDraft
    implementation: Implementation = "xla"

    def arrays(self, file: str) -> dict[str, np.ndarray]:
        """The arrays of `file`.npz."""
        with np.load(self.directory / f"{file}.npz") as stored:
            return dict(stored)

    def close(self, stage: str, got: Any, reference: Any) -> Check:
        return close(self.name, stage, got, reference)

    def same(self, stage: str, got: Any, reference: Any) -> Check:
        return same(self.name, stage, got, reference)


def check_rope(case: StageCase) -> Iterator[Check]:
    """Frequencies, and cos and sin at every position of the block forward."""
    config, io = case.draft.config, case.arrays("io")
    inv_freq, _ = rope_frequencies(config.rope, config.head_dim)
    yield case.close("rope_inv_freq", inv_freq, io["rope_inv_freq"])
    cos, sin = rope_tables(config.rope, config.head_dim, jnp.asarray(io["positions"]))
    yield case.close("rope_cos", jnp.concatenate([cos, cos], axis=-1), io["rope_cos"])
    yield case.close("rope_sin", jnp.concatenate([sin, sin], axis=-1), io["rope_sin"])


def check_yarn(case: StageCase) -> Iterator[Check]:
    """The long-range tables of the cases that record them."""
    if not (case.directory / "rope.npz").is_file():
        return
    config, tables = case.draft.config, case.arrays("rope")
    inv_freq, scaling = rope_frequencies(config.rope, config.head_dim)
    yield case.close("rope/inv_freq", inv_freq, tables["inv_freq"])
    yield case.close("rope/attention_scaling", scaling, tables["attention_scaling"].squeeze())
    cos, sin = rope_tables(config.rope, config.head_dim, jnp.asarray(tables["positions"]))
    yield case.close("rope/cos", jnp.concatenate([cos, cos], axis=-1), tables["cos"])
    yield case.close("rope/sin", jnp.concatenate([sin, sin], axis=-1), tables["sin"])


def check_layer0(case: StageCase) -> Iterator[Check]:
    """Every part of the first layer, from the recorded features."""
    io = case.arrays("io")
    inputs = io["ctx_features"][None], io["noise_embedding"][None], io["positions"][None]
    for name, got in layer0_parts(case.draft, *inputs).items():
        yield case.close(f"l0_{name}", got[0], io[f"l0_{name}"])


@jax.jit
def layer0_parts(
    draft: DFlashDraft, features: jax.Array, x: jax.Array, pos: jax.Array
) -> dict[str, jax.Array]:
    """What `layer_forward` computes on the way, by the names of the recorded arrays."""
    config, layer, ctx, parts = draft.config, draft.layers[0], features.shape[1], {}
    eps = config.rms_norm_eps
    cos, sin = rope_tables(config.rope, config.head_dim, pos)
    parts["after_input_norm"] = h = rms_norm(x, layer.input_norm, eps)
    h, dyn = _prepare(layer.attention_conv, h)
    q, k, v = block_qkv(config, layer, h, cos[:, ctx:], sin[:, ctx:])
    ctx_k, ctx_v = context_kv(config, layer, features, cos[:, :ctx], sin[:, :ctx])
    k, v = jnp.concatenate([ctx_k, k], axis=1), jnp.concatenate([ctx_v, v], axis=1)
    parts |= {"q_rope": q, "k_rope": k, "v": v}
    parts["attn_out"] = attended = block_attention(
        q,
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        pos[:, ctx:],
        pos,
        causal=config.layer_causal[0],
        window=config.layer_window[0],
    )
    parts["after_o_proj"] = projected = linear(attended, layer.o)
    x = x + _finish(layer.attention_conv, projected, dyn)
    parts["after_attn_residual"] = x
    parts["after_post_norm"] = h = rms_norm(x, layer.post_norm, eps)
    parts["mlp_in"], _ = h, _ = _prepare(layer.mlp_conv, h)
    parts["mlp_out"] = swiglu(h, layer.gate_up, layer.down)
    return parts


def _prepare(conv: DFlash2Conv | None, h: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    return (h, None) if conv is None else d2_conv_prepare(conv, h, implementation="xla")


def _finish(conv: DFlash2Conv | None, y: jax.Array, dyn: jax.Array | None) -> jax.Array:
    if conv is None or dyn is None:
        return y
    return d2_conv_finish(conv, y, dyn, implementation="xla")


def check_backbone(case: StageCase) -> Iterator[Check]:
    """One uncached block: features, every layer's output, the final rows."""
    io, draft = case.arrays("io"), case.draft
    features = ctx_features(draft, jnp.asarray(io["target_hidden"]))
    yield case.close("ctx_features", features, io["ctx_features"])
    noise, pos = jnp.asarray(io["noise_embedding"]), jnp.asarray(io["positions"])
    for i, x in enumerate(layer_outputs(draft, features[None], noise[None], pos[None])):
        yield case.close(f"layer{i}_out", x[0], io[f"layer{i}_out"])
    yield case.close("final", _forward_block(draft, features, noise, pos), io["final"])


@jax.jit
def layer_outputs(
    draft: DFlashDraft, features: jax.Array, x: jax.Array, pos: jax.Array
) -> list[jax.Array]:
    """The block's rows after each layer, as `forward_block` computes them."""
    config, ctx, outputs = draft.config, features.shape[1], []
    cos, sin = rope_tables(config.rope, config.head_dim, pos)
    for i, layer in enumerate(draft.layers):
        ctx_k, ctx_v = context_kv(config, layer, features, cos[:, :ctx], sin[:, :ctx])

        def attend(h, layer=layer, ctx_k=ctx_k, ctx_v=ctx_v, i=i):
            q, k, v = block_qkv(config, layer, h, cos[:, ctx:], sin[:, ctx:])
            return block_attention(
                q,
                jnp.concatenate([ctx_k, k], axis=1).swapaxes(1, 2),
                jnp.concatenate([ctx_v, v], axis=1).swapaxes(1, 2),
                pos[:, ctx:],
                pos,
                causal=config.layer_causal[i],
                window=config.layer_window[i],
            )

        x = layer_forward(config, layer, x, attend)
        outputs.append(x)
    return outputs


def check_rounds(case: StageCase) -> Iterator[Check]:
    """Five rounds with a growing cache, each against the reference cached and uncached."""
    rounds, draft = case.arrays("rounds"), case.draft
    counts = rounds["n_new"].tolist()
    manifest = json.loads((case.directory / "manifest.json").read_text(encoding="utf-8"))
    split = [np.split(rounds[f"r{r}_positions"], [new]) for r, new in enumerate(counts)]
    positions = np.concatenate([new for new, _ in split])
    taps = np.concatenate([rounds[f"r{r}_target_hidden"] for r in range(len(counts))])
    features = np.asarray(ctx_features(draft, jnp.asarray(taps)))
    every_row = context_rows(draft, features, positions)
    kv = cache.allocate(draft.config, 1, sum(counts), jnp.dtype(jnp.float32))
    end = 0
    for r, (pos_new, pos_block) in enumerate(split):
        begin, end = end, end + len(pos_new)
        noise = rounds[f"r{r}_noise_embedding"]
        pos = np.concatenate([positions[:end], pos_block])
        uncached = _forward_block(draft, features[:end], noise, pos)
        yield case.close(f"r{r}_uncached", uncached, rounds[f"r{r}_final_uncached"])
        kv = _ingest_ctx(draft, kv, features[begin:end], pos_new)
        cached, kv = _forward_round(draft, kv, noise, pos_block, case.implementation)
        yield case.close(f"r{r}_cached", cached, rounds[f"r{r}_final_cached"])
        kept = manifest["reference_cache_rows_after_crop_per_layer"][r]
        yield from check_cache(case, f"r{r}_cache", kv, every_row, positions[:end], kept)


@jax.jit
def context_rows(draft: DFlashDraft, features: jax.Array, pos: jax.Array) -> list[Any]:
    """(k, v) `[rows, kv_heads, D]` of all context rows, a layer, made without a cache."""
    cos, sin = rope_tables(draft.config.rope, draft.config.head_dim, pos)
    return [context_kv(draft.config, layer, features, cos, sin) for layer in draft.layers]


def check_cache(
    case: StageCase,
    stage: str,
    kv: cache.DraftKV,
    every_row: list[Any],
    positions: np.ndarray,
    kept: list[int],
) -> Iterator[Check]:
    """After a block the cache holds context rows alone, equal to those made of all features anew.

    A sliding layer may hold more rows than the reference, which cuts its cache to window - 1;
    a full layer holds exactly the reference's.
    """
    held, worst, total = [], 0.0, len(positions)
    for i, fresh in enumerate(every_row):
        slot_pos = np.asarray(kv.slots_of(i).pos)[0]
        slots = np.flatnonzero(slot_pos != ABSENT)
        rows = slot_pos[slots] - positions[0]  # the cases' positions are contiguous
        held.append(set(range(total - kept[i], total)) <= set(rows.tolist()) <= set(range(total)))
        slots, rows = slots[rows < total], rows[rows < total]
        for leaf, reference in zip((kv.k[i], kv.v[i]), fresh, strict=True):
            got = np.asarray(leaf)[0][:, slots].swapaxes(0, 1)
            error = relative_error(got, np.asarray(reference)[rows])
            worst = np.maximum(worst, error)  # keeps a NaN
    yield case.same(f"{stage}_rows", held, [True] * len(held))
    yield Check(case.name, f"{stage}_values", float(worst))
