"""Training a drafter against a frozen target: labels, the train step and its state.

The target runs once over a batch and gives taps (the drafter's context) and hidden rows (the
teacher). Many blocks a sequence are drafted at once (`blocks`).

Slot k = 1.. of a block drafts the token at anchor + k. Which row that is (`DSparkHarvest`) is all
that differs between the mask-fill and the shifted families; the teacher's distribution for that
token comes from its hidden row at anchor + k - 1.
"""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax.arrays import read_npz
from dflash_jax.blocks import Batch, block_hidden, draw_anchors
from dflash_jax.config import (
    DFlash2Config,
    DFlashConfig,
    DSparkConfig,
    Family,
    resolve_harvest,
)
from dflash_jax.config_json import as_saved, config_dict, parse_config
from dflash_jax.draft import DFlashDraft, DFlashLayer, ctx_features
from dflash_jax.extras import require
from dflash_jax.keys import printable, reason_of
from dflash_jax.layers import scaled
from dflash_jax.leaves import check_finite
from dflash_jax.losses import Blocks, Heads, Recipe, head_loss
from dflash_jax.shapes import init_draft
from dflash_jax.sharding import DATA, named_leaves
from dflash_jax.targets import Target


def data_mesh(devices: int | None = None) -> Mesh | None:
    """A mesh over the first `devices` local ones (default: all); None where that is one.

    ValueError where there are fewer.
    """
    here = jax.local_devices()
    count = len(here) if devices is None else devices
    if not 1 <= count <= len(here):
        raise ValueError(f"devices: expected 1..{len(here)}, found {count}")
    return None if count == 1 else jax.make_mesh((count,), (DATA,), devices=here[:count])


def spread(tree: Any, mesh: Mesh | None, *, rows: bool) -> Any:
    """`tree` on the mesh: its rows (leading axes) shared out, or whole on every device.

    As it is where there is no mesh. The rows must be a multiple of the devices.
    """
    if mesh is None:
        return tree
    return jax.device_put(
        tree, NamedSharding(mesh, PartitionSpec(DATA) if rows else PartitionSpec())
    )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Learning rate by step: linear warm-up to `peak`, then a cosine to `final` of it at `steps`.

    It stays outside the compiled step, so that runs of any length share one program.
    """

    steps: int
    peak: float = 1e-3
    final: float = 0.02
    warmup: int = 200

    def rate(self, step: int) -> float:
        """The rate of the update that follows `step` finished ones."""
        warmup = max(1, min(self.warmup, self.steps // 2))
        if step < warmup:
            return self.peak * (step + 1) / warmup
        share = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        low = self.peak * self.final
        return low + (self.peak - low) * 0.5 * (1 + math.cos(math.pi * share))


class Features(struct.PyTreeNode):
    """A frozen target's view of a batch: hidden `[B, T, H]` (after the final norm) and taps."""

    hidden: jax.Array
    taps: jax.Array


class Metrics(struct.PyTreeNode):
    """Sums over blocks, so that batches can be added up; `summary` turns them into means.

    loss, weight: weighted loss and its weights. correct, labelled `[drafts]`: per slot.
    gained, blocks: teacher-forced tokens a round (the target's own one included), and blocks.
    """

    loss: jax.Array
    weight: jax.Array
    correct: jax.Array
    labelled: jax.Array
    gained: jax.Array
    blocks: jax.Array

    def summary(self) -> dict[str, Any]:
        """loss, acceptance (teacher-forced tokens a round) and accuracy (a list, slot by slot)."""
        return {
            "loss": float(self.loss / jnp.maximum(self.weight, 1e-9)),
            "acceptance": float(self.gained / jnp.maximum(self.blocks, 1)),
            "accuracy": (self.correct / jnp.maximum(self.labelled, 1)).tolist(),
        }


CONFIG = "config"
"""Name of the text that a saved state holds beside its leaves: the drafter's `config.json`."""


class TrainState(struct.PyTreeNode):
    """draft: f32 master weights; ema: their running average; step: steps taken."""

    draft: DFlashDraft
    ema: DFlashDraft
    opt_state: Any
    step: jax.Array


def target_features(target: Target, ids: jax.Array, taps: tuple[int, ...]) -> Features:
    """One forward of the frozen target over whole documents `ids [B, T]`, one a row."""
    out, _ = target.forward(target.init_state(*ids.shape), ids, taps)
    return Features(jax.lax.stop_gradient(out.hidden), jax.lax.stop_gradient(out.taps))


def block_metrics(
    target: Target,
    draft: DFlashDraft,
    features: Features,
    batch: Batch,
    anchors: jax.Array,
    real: jax.Array,
    recipe: Recipe,
) -> Metrics:
    """Draft every block and score it: the loss (differentiable in `draft`) and its metrics.

    anchors, real: `[B, A]`, from `draw_anchors`. Labels outside the answer, past the document's
    end, or outside the draft vocabulary weigh nothing, and so does the block after them in
    counting accepted drafts.
    """
    config, harvest = draft.config, resolve_harvest(draft.config)
    drafts, width = harvest.drafts(config.block_size), batch.ids.shape[1]
    anchor_ids = jnp.take_along_axis(batch.ids, anchors, axis=1)
    masks = jnp.full((*anchors.shape, config.block_size - 1), config.mask_token_id, jnp.int32)
    block = jnp.concatenate([anchor_ids[..., None], masks], axis=-1)
    noise = target.embed(block.reshape(anchors.shape[0], -1))
    noise = scaled(noise, config.input_embedding_scale)
    noise = jax.lax.stop_gradient(noise).reshape(*block.shape, -1)
    feats = ctx_features(draft, features.taps)
    hidden = block_hidden(draft, feats, noise, batch.segment, anchors)
    rows = hidden[:, :, harvest.first_row : harvest.first_row + drafts]

    at = anchors[..., None] + 1 + jnp.arange(drafts)[None, None]
    inside, at = at < width, jnp.minimum(at, width - 1)

    def pick(table, index):
        return jnp.take_along_axis(table, index.reshape(index.shape[0], -1), 1).reshape(index.shape)

    same = pick(batch.segment, at) == pick(batch.segment, anchors)[..., None]
    labelled = inside & same & pick(batch.answer, at) & real[..., None]
    labels, known = _draft_labels(draft, pick(batch.ids, at))
    labelled = labelled & known
    teacher_at = (at - 1).reshape(at.shape[0], -1, 1)
    teacher = jnp.take_along_axis(features.hidden, teacher_at, axis=1)
    size = rows.shape[-1]
    scored: Any = head_loss(
        recipe,
        target,
        draft.replace(markov=None, confidence=None, dflash2=None),
        Heads(draft.markov, draft.confidence, draft.dflash2),
        Blocks(
            rows.reshape(-1, drafts, size),
            teacher.reshape(-1, drafts, size),
            pick(batch.ids, at - 1).reshape(-1, drafts),
            labels.reshape(-1, drafts),
            labelled.reshape(-1, drafts),
        ),
    )
    loss, weight, correct = scored
    correct = correct.reshape(labels.shape) & labelled
    gained = 1 + jnp.cumprod(correct.astype(jnp.int32), axis=-1).sum(-1)
    return Metrics(
        loss=loss,
        weight=weight,
        correct=correct.sum((0, 1)),
        labelled=labelled.sum((0, 1)),
        gained=jnp.where(real, gained, 0).sum(),
        blocks=real.sum(),
    )


def _draft_labels(draft: DFlashDraft, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Target ids as ids of the draft vocabulary, and which of them it holds."""
    if draft.head is None:
        return ids, jnp.ones(ids.shape, bool)
    true_ids = jnp.arange(draft.head.d2t.shape[0]) + draft.head.d2t
    place = jnp.searchsorted(true_ids, ids).clip(0, true_ids.shape[0] - 1)
    return place, true_ids[place] == ids


def make_optimizer(recipe: Recipe) -> Any:
    """The optax transformation of a recipe at learning rate 1 (`train_step` scales its updates).

    ModuleNotFoundError where optax is missing.
    """
    optax = require("optax", "train")
    adamw = optax.adamw(1.0, b2=0.99, weight_decay=recipe.weight_decay)
    if recipe.optimizer == "muon":
        muon = optax.contrib.muon(
            1.0, weight_decay=recipe.weight_decay, consistent_rms=0.2, adam_b2=0.99
        )
        update = optax.multi_transform({"backbone": muon, "heads": adamw}, _parts)
    elif recipe.optimizer == "adamw":
        update = adamw
    else:
        raise ValueError(f"optimizer: expected 'adamw' or 'muon', found {recipe.optimizer!r}")
    return optax.chain(optax.clip_by_global_norm(recipe.clip), update)


def _parts(draft: DFlashDraft) -> DFlashDraft:
    """Which leaves are matrices of the backbone. The heads' tables have a row a token, few of which
    get a gradient in a step: an update that whitens whole matrices is not for them.
    """

    def label(path: Any, _: Any) -> str:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return "heads" if name.startswith(("markov", "confidence", "dflash2")) else "backbone"

    return jax.tree_util.tree_map_with_path(label, draft)


def start_training(draft: DFlashDraft, recipe: Recipe) -> TrainState:
    """The state before step 0, its weights in f32. ValueError for a quantised drafter."""
    if draft.config.precision is not None:
        raise ValueError(
            f"draft: expected float weights to train, found precision {draft.config.precision!r} "
            "(load it with precision 'float')"
        )
    # Copies: a step donates the state, so it may share no buffer with anything else.
    master, ema = (jax.tree.map(jnp.copy, cast(draft, jnp.float32)) for _ in range(2))
    opt_state = make_optimizer(recipe).init(master.replace(head=None))
    return TrainState(draft=master, ema=ema, opt_state=opt_state, step=jnp.int32(0))


def cast(draft: DFlashDraft, dtype: jnp.dtype) -> DFlashDraft:
    """The drafter with its floating-point leaves in `dtype`."""

    def convert(leaf):
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(convert, draft)


@partial(jax.jit, static_argnames=("recipe", "dtype", "mesh"), donate_argnames=("state",))
def train_step(
    target: Target,
    state: TrainState,
    batch: Batch,
    seed: jax.Array,
    rate: jax.Array,
    recipe: Recipe,
    dtype: Any = jnp.bfloat16,
    mesh: Mesh | None = None,
) -> tuple[TrainState, Metrics]:
    """One update at learning rate `rate`.

    Randomness comes from (seed, step) alone, so a resumed run is the same run.

    dtype: of activations and of the weights in the forward pass. A drafter's own reduced head, if
    it has one, stays as it is. mesh: devices (`data_mesh`) that share out the batch's rows; target
    and state lie whole on each. The sums are the same but for their order.
    """
    optax = require("optax", "train")
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    anchors, real = draw_anchors(key, batch, recipe.anchors)
    master, head = state.draft.replace(head=None), state.draft.head

    def slopes(target, master, head, batch, anchors, real):
        features = target_features(target, batch.ids, master.config.target_layer_ids)

        def objective(master):
            draft = cast(master.replace(head=head), dtype)
            metrics = block_metrics(target, draft, features, batch, anchors, real, recipe)
            return metrics.loss, metrics

        summed = jax.grad(objective, has_aux=True)(master)
        return summed if mesh is None else jax.lax.psum(summed, DATA)

    if mesh is not None:
        one, each = PartitionSpec(), PartitionSpec(DATA)
        slopes = jax.shard_map(
            slopes,
            mesh=mesh,
            in_specs=(one, one, one, each, each, each),
            out_specs=one,
            check_vma=False,
        )
    slope, metrics = slopes(target, master, head, batch, anchors, real)
    slope = jax.tree.map(lambda g: g / jnp.maximum(metrics.weight, 1e-9), slope)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        updates, opt_state = make_optimizer(recipe).update(slope, state.opt_state, master)
    master = optax.apply_updates(master, jax.tree.map(lambda u: rate * u, updates))
    # Early weights are no part of the average: its memory grows with the run.
    done = state.step.astype(jnp.float32)
    decay = jnp.minimum(recipe.ema, (1.0 + done) / (10.0 + done))
    ema = jax.tree.map(
        lambda old, new: decay * old + (1 - decay) * new, state.ema.replace(head=None), master
    )
    state = state.replace(
        draft=master.replace(head=head),
        ema=ema.replace(head=head),
        opt_state=opt_state,
        step=state.step + 1,
    )
    return state, metrics


@partial(jax.jit, static_argnames=("recipe", "dtype"))
def eval_step(
    target: Target,
    draft: DFlashDraft,
    batch: Batch,
    recipe: Recipe,
    dtype: Any = jnp.bfloat16,
) -> Metrics:
    """The metrics of a drafter on a batch; the anchors are always the same."""
    draft = cast(draft, dtype)
    anchors, real = draw_anchors(jax.random.key(0), batch, recipe.anchors)
    features = target_features(target, batch.ids, draft.config.target_layer_ids)
    return block_metrics(target, draft, features, batch, anchors, real, recipe)


def add_metrics(parts: list[Metrics]) -> Metrics:
    """The sum over several batches."""
    return jax.tree.map(lambda *xs: sum(xs[1:], xs[0]), *parts)


def save_state(state: TrainState, path: str | Path) -> None:
    """Write everything a run needs to go on; the old file stays until the new one is whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_file = path.with_name(path.name + ".part")
    leaves: dict[str, Any] = {name: np.asarray(leaf) for name, leaf in named_leaves(state)}
    leaves[CONFIG] = np.array(json.dumps(config_dict(state.draft.config)))
    with partial_file.open("wb") as file:
        np.savez(file, **leaves)
    partial_file.replace(path)


def restore_state(state: TrainState, path: str | Path) -> TrainState:
    """`state` with every leaf from `path`; ValueError naming one of another name, shape or type, or
    what the drafter's config says otherwise.
    """
    stored, held = read_npz(path), dict(named_leaves(state))
    _check_config(state.draft.config, stored.pop(CONFIG, None), path)
    odd = sorted(held.keys() ^ stored.keys())
    if odd:
        raise ValueError(
            f"{path}: expected the leaves of this recipe, differs in {printable(odd[0])}"
        )
    for name, leaf in held.items():
        shape, dtype = stored[name].shape, stored[name].dtype
        if (shape, dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(
                f"{path}: {name}: expected {list(leaf.shape)} of {leaf.dtype}, "
                f"found {list(shape)} of {dtype}"
            )
        check_finite(stored[name], f"{path}: {name}")
    leaves = [jnp.asarray(stored[name]) for name in held]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def _check_config(config: DFlashConfig, stored: np.ndarray | None, path: str | Path) -> None:
    """ValueError unless a run's drafter is of this config: not all of it shows in the shapes."""
    if stored is None or stored.dtype.kind != "U" or stored.ndim:
        raise ValueError(f"{path}: expected the config of its drafter, found none")
    try:
        found = parse_config(json.loads(str(stored)))
    except ValueError as error:
        raise ValueError(f"{path}: {CONFIG}: {reason_of(error)}") from None
    own = as_saved(config)
    for field in dataclasses.fields(own):
        ours, theirs = getattr(own, field.name), getattr(found, field.name)
        if ours != theirs:
            raise ValueError(f"{path}: {field.name}: expected {ours}, found {theirs!r:.200}")


def drafter_config(
    target: Any,
    *,
    mask_token_id: int,
    taps: tuple[int, ...],
    layers: int = 3,
    intermediate_size: int | None = None,
    block_size: int = 8,
) -> DFlashConfig:
    """A plain DFlash drafter in the shape of a dense target: its heads, rope and norms."""
    own = target.config
    return DFlashConfig(
        family="dflash",
        hidden_size=own.hidden_size,
        num_attention_heads=own.num_attention_heads,
        num_key_value_heads=own.num_key_value_heads,
        head_dim=own.head_dim,
        intermediate_size=intermediate_size or own.intermediate_size,
        num_hidden_layers=layers,
        rms_norm_eps=own.rms_norm_eps,
        rope=own.rope,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=taps,
        layer_causal=(False,) * layers,
        layer_window=(None,) * layers,
        vocab_size=own.embedding_rows,
        num_target_layers=own.num_hidden_layers,
    )


def family_config(config: DFlashConfig, family: Family, rank: int, top_k: int) -> DFlashConfig:
    """The same backbone as a drafter of another family: DSpark with a vanilla Markov head and a
    confidence head, DFlash2 with two-tap convolutions in groups of 16 channels and a selector.
    """
    spark = DSparkConfig("vanilla", rank, True, True) if family == "dspark" else None
    group = math.gcd(16, config.hidden_size)
    two = DFlash2Config(2, group, rank, top_k) if family == "dflash2" else None
    return dataclasses.replace(config, family=family, dspark=spark, dflash2=two)


def adopt_backbone(fresh: DFlashDraft, trained: DFlashDraft) -> DFlashDraft:
    """`fresh` with the backbone of `trained`: what a family adds starts without effect."""
    shared = ("input_norm", "qkv", "q_norm", "k_norm", "o", "post_norm", "gate_up", "down")
    layers = [
        new.replace(**{name: getattr(old, name) for name in shared})
        for new, old in zip(fresh.layers, trained.layers, strict=True)
    ]
    return fresh.replace(
        layers=layers, fc=trained.fc, hidden_norm=trained.hidden_norm, norm=trained.norm
    )


def widen_mlp(draft: DFlashDraft, intermediate_size: int, key: jax.Array) -> DFlashDraft:
    """`draft` with MLPs of `intermediate_size` units, the new ones without effect yet: it drafts
    what it drafted before, and can learn more.

    `key` draws their inputs, as `init_draft` does; `gate_up [2F, H]` and `down [H, F]` grow in F.
    Raises ValueError for fewer units than there are, and for a quantised drafter.
    """
    config = draft.config
    if config.precision is not None:
        raise ValueError(f"precision: expected a drafter of floats, found {config.precision}")
    if intermediate_size < config.intermediate_size:
        raise ValueError(
            f"intermediate_size: expected {config.intermediate_size}, the drafter's own, or more, "
            f"found {intermediate_size}"
        )
    config = dataclasses.replace(config, intermediate_size=intermediate_size)
    fresh = init_draft(config, key, draft.dtype)

    def wider(new: Any, old: Any) -> DFlashLayer:
        units = old.down.shape[1]
        halves = zip(jnp.split(new.gate_up, 2), jnp.split(old.gate_up, 2), strict=True)
        rows = [half.at[:units].set(own) for half, own in halves]
        down = jnp.zeros_like(new.down).at[:, :units].set(old.down)
        return old.replace(gate_up=jnp.concatenate(rows), down=down)

    layers = [wider(*pair) for pair in zip(fresh.layers, draft.layers, strict=True)]
    return draft.replace(layers=layers, config=config)
