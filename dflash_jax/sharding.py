"""Models over a mesh of devices: tensor parallelism in JAX's own SPMD.

The mesh has two named axes: `model` splits heads, MLP and vocabulary, `data` splits sequences.
Programs keep their view of whole arrays. Only the layers run shard by shard (`per_shard`): GPU
kernels cannot be partitioned for us, and the sums over shards are then ours to place. All else,
from the embedding's rows to softmax and argmax over split logits, the compiler partitions.

A shard of a model is a smaller model of the same kind, with its share of the heads and of the MLP,
whose `o` and `down` outputs are summed over shards. Fused rows (q, k, v and gate, up) therefore lie
shard by shard: each shard's rows of every part, in the order that one device has. On one device
that is the plain order; `shard` and `whole` go from one to the other, and the loaders read each
shard's rows from where they are in a checkpoint.

What a number of devices does not divide (`undivided`) is whole on each of them, computed by all
alike, and said in a warning: three devices share SmolLM2's heads and a drafter's, but not the
drafter's MLP of 1024.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflash_jax.kernels import Implementation

AnyMesh = Mesh | AbstractMesh
"""Devices that are here, or that are planned with (`planned_mesh`)."""
MODEL, DATA = "model", "data"
ROWS = P(DATA)
"""An array whose first axis is the batch."""
SPECS = {
    "qkv": P(MODEL),
    "gate_up": P(MODEL),
    "o": P(None, MODEL),
    "down": P(None, MODEL),
    "fc": P(None, MODEL),
    "embedding": P(MODEL),
    "head": P(MODEL),
    "lm_head": P(MODEL),
    "w2": P(MODEL),
}
"""How the leaves of that name are split, in drafters and targets alike. All others are whole on
every device: norms, convolutions, the confidence head, and tables of which a round reads a few
rows (codebooks, Markov's w1, d2t).
"""
PARTS = {"qkv": "attention", "o": "attention", "gate_up": "mlp", "down": "mlp", "fc": "fc"}
"""Leaves that are split together or not at all; a table is split by its own rows."""
UNITS: dict[str | None, int] = {"q8_0": 32, "q4_0": 64}
"""Columns that are split in blocks: q4_0 keeps neighbouring blocks in halves of the same bytes."""


class Sums(NamedTuple):
    """Within a shard, the mesh axis that each part's output is summed over; None: it is whole."""

    attention: str | None = None
    mlp: str | None = None
    fc: str | None = None


ALONE = Sums()
"""On one device nothing is summed."""
_UNKNOWN = object()


def planned_mesh(model: int, data: int = 1) -> AbstractMesh:
    """As `make_mesh`, of devices that need not be here: for abstract models, to plan with."""
    if min(model, data) < 1:
        raise ValueError(f"mesh: expected 1 or more devices, found {model} x {data}")
    return AbstractMesh((data, model), (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def make_mesh(model: int, data: int = 1) -> Mesh:
    """A mesh of `data * model` of the devices there are, of all processes.

    ValueError naming both numbers where they are fewer, or where a process would be left out.
    """
    devices = jax.devices()
    if not 1 <= model * data <= len(devices):
        raise ValueError(f"mesh: expected 1 to {len(devices)} devices, found {model * data}")
    if jax.process_count() > 1 and model * data < len(devices):
        raise ValueError(
            f"mesh: expected all {len(devices)} devices of {jax.process_count()} processes, "
            f"found {model * data}"
        )
    grid = np.array(devices[: model * data]).reshape(data, model)
    return Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Leaves with dotted paths, e.g. ("layers.0.qkv", array)."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in flat]


def undivided(config: Any, count: int) -> dict[str, str]:
    """The `PARTS` of a model that `count` devices do not divide, and the size that is to blame."""
    unit = UNITS.get(getattr(config, "precision", None), 1)
    sizes = [
        ("attention", "num_key_value_heads", config.num_key_value_heads, 1),
        ("attention", "o, axis 1", config.q_size, unit),
        ("mlp", "intermediate_size", config.intermediate_size, 1),
        ("mlp", "down, axis 1", config.intermediate_size, unit),
        ("fc", "fc, axis 1", getattr(config, "tap_size", 0), unit),
    ]
    found: dict[str, str] = {}
    for part, name, size, unit in sizes:
        if count > 1 and size % (unit * count):
            blocks = f" in blocks of {unit}" if unit > 1 else ""
            found.setdefault(part, f"{name}: {size}{blocks}")
    return found


def sums(model: Any) -> Sums:
    """What is summed over the shards of a model on a mesh."""
    apart = undivided(model.config, model.mesh.shape[MODEL])
    return Sums(*(None if part in apart else MODEL for part in Sums._fields))


def spec(path: str, leaf: Any, config: Any, count: int) -> P:
    """How the leaf (abstract or not) of that dotted path is split over `count` devices; what has no
    columns, the scales of int8 rows, is not split by columns.
    """
    name = _name(path)
    split = SPECS.get(name, P())
    if PARTS.get(name) in undivided(config, count) or len(split) > leaf.ndim:
        return P()
    return split if name in PARTS or leaf.shape[0] % count == 0 else P()


def _name(path: str) -> str:
    """The last part of a path; a quantised matrix's, of its values and scales alike."""
    *_, parent, name = ["", *path.split(".")]
    return parent if name in ("values", "scales") else name


def specs(model: Any, mesh: AnyMesh | None = None) -> Any:
    """A model's tree (arrays or `abstract`) with a `PartitionSpec` for each leaf; mesh: default its
    own.
    """
    count = (model.mesh if mesh is None else mesh).shape[MODEL]
    leaves = [spec(path, leaf, model.config, count) for path, leaf in named_leaves(model)]
    return jax.tree.unflatten(jax.tree.structure(model), leaves)


def cache_specs(state: Any, config: Any, mesh: AnyMesh | None) -> Any:
    """The tree of a cache: leaves `[B, kv_heads, slots, D]` are split as the heads are, all by
    sequence.
    """
    apart = mesh is None or "attention" in undivided(config, mesh.shape[MODEL])
    heads = ROWS if apart else P(DATA, MODEL)
    return jax.tree.map(lambda leaf: heads if leaf.ndim == 4 else ROWS, state)


def whole_leaves(model: Any, mesh: AnyMesh) -> dict[str, str]:
    """What a mesh could split of a model and does not: a part's or table's name, and why."""
    count = mesh.shape[MODEL]
    found = undivided(model.config, count)
    for path, leaf in named_leaves(model):
        name = _name(path)
        if name in SPECS and name not in PARTS and leaf.shape[0] % count:
            found.setdefault(name, f"{path}, axis 0: {leaf.shape[0]}")
    return found


def check(model: Any, mesh: AnyMesh) -> None:
    """Warn of what a mesh leaves whole (`model` may be `abstract`); ValueError where that is all of
    a target.
    """
    count, found = mesh.shape[MODEL], whole_leaves(model, mesh)
    if not found:
        return
    listed = "; ".join(f"{part} ({why})" for part, why in found.items())
    names = {_name(path) for path, _ in named_leaves(model)} & SPECS.keys()
    if "embedding" in names and {PARTS.get(name, name) for name in names} <= found.keys():
        raise ValueError(
            f"mesh: expected {count} tensor-parallel devices to divide some of the target's sizes, "
            f"found {listed}"
        )
    warnings.warn(
        f"{type(model).__name__}: whole on each of {count} devices, which do not divide it: "
        f"{listed}",
        stacklevel=3,
    )


def groups(mesh: AnyMesh | None) -> int:
    """How many groups of devices share out the sequences of a batch: the data axis."""
    return 1 if mesh is None else mesh.shape[DATA]


def check_batch(mesh: AnyMesh | None, batch: int, name: str = "batch") -> None:
    """ValueError where the mesh's data axis does not divide the number of sequences."""
    count = groups(mesh)
    if batch % count:
        raise ValueError(f"{name}: expected a multiple of {count} (data axis), found {batch}")


def constrain(tree: Any, mesh: Mesh | None, tree_specs: Any) -> Any:
    """`with_sharding_constraint` by specs (a prefix tree); on one device nothing."""
    if mesh is None:
        return tree
    places = jax.tree.map(lambda s: NamedSharding(mesh, s), tree_specs)
    return jax.lax.with_sharding_constraint(tree, places)


def share(model: Any) -> Any:
    """The config of the smaller model that one device has: its heads, its part of the MLP."""
    if model.mesh is None:
        return model.config
    count, config, split = model.mesh.shape[MODEL], model.config, sums(model)
    heads, inner = (count if axis else 1 for axis in (split.attention, split.mlp))
    return dataclasses.replace(
        config,
        num_attention_heads=config.num_attention_heads // heads,
        num_key_value_heads=config.num_key_value_heads // heads,
        intermediate_size=config.intermediate_size // inner,
    )


def one_device(tree: Any, tree_specs: Any, mesh: AnyMesh | None) -> Any:
    """The shapes and dtypes of what one device holds of a tree that is split by specs."""
    if mesh is None:
        return tree

    def part(leaf: Any, split: P) -> jax.ShapeDtypeStruct:
        shape = NamedSharding(mesh, split).shard_shape(leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(part, tree, tree_specs)


def per_shard(
    body: Callable[..., Any],
    model: Any,
    *args: Any,
    in_specs: tuple[Any, ...],
    out_specs: Any,
    checked: bool = True,
) -> Any:
    """`body(shard of model, *shards of args)` on every device of the model's mesh.

    The shard has its own share of the config's heads and MLP, and no mesh. `checked`: prove at
    trace time that results that are to be the same everywhere are (a sum over shards left out is
    then an error); the GPU kernels do not say enough for that.
    """
    config = share(model)

    def run(weights: Any, *shards: Any) -> Any:
        return body(weights.replace(config=config, mesh=None), *shards)

    mapped = jax.shard_map(
        run,
        mesh=model.mesh,
        in_specs=(specs(model), *in_specs),
        out_specs=out_specs,
        check_vma=checked,
    )
    return mapped(model, *args)


def by_vocabulary(
    body: Callable[..., Any], mesh: Mesh | None, head: Any, hidden: jax.Array
) -> jax.Array:
    """Logits `body(head, hidden [..., H])`, on a mesh each device's rows of a split head."""
    if mesh is None:
        return body(head, hidden)
    lead = [DATA, *[None] * (hidden.ndim - 2)]
    split = MODEL if divides(mesh, head.shape[0]) else None
    rows = jax.tree.map(lambda _: P(split), head)
    return jax.shard_map(
        body, mesh=mesh, in_specs=(rows, P(*lead)), out_specs=P(*lead, split), check_vma=False
    )(head, hidden)


def divides(mesh: AnyMesh, rows: int) -> bool:
    """Whether a table of so many rows, and logits over them, are split by vocabulary."""
    return rows % mesh.shape[MODEL] == 0


def of_laws(mesh: Mesh | None, implementation: Implementation) -> Implementation:
    """How laws over the vocabulary are filtered: split over a mesh, by XLA, for no kernel reduces
    over several devices.
    """
    return implementation if mesh is None else "xla"


def by_sequence(
    body: Callable[..., Any], mesh: Mesh | None, *, shared: int, rows: int
) -> Callable[..., Any]:
    """`body` where kernels that cannot be partitioned may run: every device has the first `shared`
    arguments whole and its sequences of the `rows` after them; so it is with the results.
    """
    if mesh is None:
        return body
    split = (P(),) * shared + (ROWS,) * rows
    return jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=ROWS, check_vma=False)


def by_group(body: Callable[..., Any], mesh: Mesh | None, *args: Any) -> Any:
    """`body(*args)` in each group of the data axis, on its own sequences and on scalars; what lies
    over the model axis stays as it lies. `body` alone where there is no mesh.
    """
    if mesh is None:
        return body(*args)
    split = jax.tree.map(lambda leaf: ROWS if leaf.ndim else P(), args)
    return jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=ROWS, axis_names={DATA})(*args)


def shard(model: Any, mesh: AnyMesh) -> Any:
    """A model of one device, split over a mesh; see `check` for what that does not divide. Of an
    `abstract` model, for a plan, the same shapes that say where they lie.
    """
    own: Any = getattr(model, "mesh", _UNKNOWN)
    if own is _UNKNOWN:
        kind = type(model).__name__
        raise NotImplementedError(f"mesh: expected a DenseTarget and a DFlashDraft, found a {kind}")
    if own == mesh:
        return model
    if own is not None:
        raise ValueError(f"mesh: expected the model's own {_shape(own)}, found {_shape(mesh)}")
    check(model, mesh)
    count = mesh.shape[MODEL]

    def place(path: str, leaf: Any) -> Any:
        split = NamedSharding(mesh, spec(path, leaf, model.config, count))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split)
        order = shard_order(model.config, path, count)
        return jax.device_put(leaf if order is None else leaf[order], split)

    leaves = [place(path, leaf) for path, leaf in named_leaves(model)]
    return jax.tree.unflatten(jax.tree.structure(model), leaves).replace(mesh=mesh)


def shard_pair(target: Any, draft: Any, mesh: AnyMesh | None) -> tuple[Any, Any]:
    """Target and drafter on a mesh, or as they are where it is None; `draft` may be None."""
    if mesh is not None:
        target, draft = shard(target, mesh), None if draft is None else shard(draft, mesh)
    return target, draft


def check_pair(target: Any, draft: Any) -> None:
    """ValueError where target and drafter (or None) are not on the same devices."""
    own = getattr(target, "mesh", None)
    if draft is not None and draft.mesh != own:
        raise ValueError(
            f"draft: expected it on the target's mesh {_shape(own)}, found {_shape(draft.mesh)}"
        )


def _shape(mesh: AnyMesh | None) -> str:
    return "(one device)" if mesh is None else str(dict(mesh.shape))


def whole(model: Any) -> Any:
    """The inverse of `shard`: leaves on the host, fused rows in the order of one device."""
    if model.mesh is None:
        return model
    count = model.mesh.shape[MODEL]

    def gather(path: str, leaf: jax.Array) -> np.ndarray:
        order, host = shard_order(model.config, path, count), np.asarray(leaf)
        return host if order is None else host[np.argsort(order)]

    leaves = [gather(path, leaf) for path, leaf in named_leaves(model)]
    return jax.tree.unflatten(jax.tree.structure(model), leaves).replace(mesh=None)


def shard_order(config: Any, path: str, count: int) -> np.ndarray | None:
    """Which row of one device's layout each row of a fused leaf of `count` shards is; None for
    leaves that are not fused, or not split.
    """
    if PARTS.get(_name(path)) in undivided(config, count):
        return None
    parts = {
        "qkv": (config.q_size, config.kv_size, config.kv_size),
        "gate_up": (config.intermediate_size, config.intermediate_size),
    }.get(_name(path))
    if parts is None:
        return None
    starts = np.cumsum([0, *parts[:-1]])
    rows = [np.arange(size).reshape(count, -1) + at for size, at in zip(parts, starts, strict=True)]
    return np.concatenate(rows, axis=1).reshape(-1)
