"""The memory plan: what a generation keeps on a device, before anything is loaded.

Weights, caches and books are counted leaf by leaf from abstract trees, so they are exact. What the
programs hold beside them while they run is an estimate of their largest buffers, or, asked for, the
compiler's own figure for this device. Of models over a mesh it is what each device has: its share
of what is split, and all of what is not.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dflash_jax import loop, sharding
from dflash_jax.attention import key_tile
from dflash_jax.config import DFlashConfig
from dflash_jax.draft import DFlashDraft
from dflash_jax.kv import DraftKV
from dflash_jax.quant import QuantizedLinear
from dflash_jax.round import DecodeState, RoundPlan
from dflash_jax.sampling import Sampler
from dflash_jax.targets import Target
from dflash_jax.targets.dense import DecoderConfig, DenseTarget
from dflash_jax.window import Meter

NORMS = ("norm", "input_norm", "post_norm", "hidden_norm", "q_norm", "k_norm")
PARTS = {
    "embedding": ("embedding",),
    "features (fc)": ("fc",),
    "attention": ("qkv", "o"),
    "mlp": ("gate_up", "down"),
    "convolutions": ("attention_conv", "mlp_conv"),
    "selector": ("dflash2",),
    "markov head": ("markov",),
    "confidence head": ("confidence",),
    "head": ("head",),
    "norms": NORMS,
    "other": (),
}
"""Parts of a model, and the field names that their leaves' paths hold; the last takes the rest."""
LOGITS = 4
"""Bytes of one logit or one score: both are f32."""
SAMPLED = 5
"""Copies of the verify logits that filtering and drawing make, as compiled for a CPU."""
PART_SUMS = ("tensors", "parameters", "nbytes")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a model: its arrays, the weights that they hold, and their bytes."""

    name: str
    tensors: int
    parameters: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device for `batch` sequences of `capacity` rows, prompts in chunks of `chunk`.

    devices: how many split heads, MLP and vocabulary, and how many groups of those split the
    sequences; all bytes are one device's.
    target, draft: weights by part. target_kv, draft_full, draft_ring: caches; of the drafter's,
    full layers grow with the capacity and rings with their window. books: tokens and counters.
    prefill, round: what each program holds beside all that while it runs; `compiled` says whether
    the compiler told it. What XLA tries while it compiles is not in it.
    """

    batch: int
    capacity: int
    chunk: int
    dtype: str
    target: tuple[Part, ...]
    draft: tuple[Part, ...]
    target_kv: int
    draft_full: int
    draft_ring: int
    books: int
    prefill: int
    round: int
    compiled: bool
    devices: tuple[int, int] = (1, 1)

    @property
    def weights(self) -> int:
        """Bytes of both models."""
        return sum(part.nbytes for part in (*self.target, *self.draft))

    @property
    def caches(self) -> int:
        """Bytes of both caches and the books."""
        return self.target_kv + self.draft_full + self.draft_ring + self.books

    @property
    def working(self) -> int:
        """Bytes of the hungrier program's working memory: they run one at a time."""
        return max(self.prefill, self.round)

    @property
    def total(self) -> int:
        """The most that is in use at a time."""
        return self.weights + self.caches + self.working

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON values, its sums included."""
        sums = {name: getattr(self, name) for name in ("weights", "caches", "working", "total")}
        return dataclasses.asdict(self) | sums

    def __str__(self) -> str:
        sequences = "1 sequence" if self.batch == 1 else f"{self.batch} sequences"
        told = "compiled" if self.compiled else "estimated"
        model, data = self.devices
        mesh = f"on each of {model * data} devices: {model} tensor-parallel x {data} data"
        lines = [
            *([] if model * data == 1 else [mesh]),
            f"{sequences} of {self.capacity} rows, {self.dtype}, prompts in chunks of {self.chunk}",
            *part_lines("target", self.target),
            *part_lines("drafter", self.draft),
            line("target KV", "", self.target_kv),
        ]
        if self.draft:
            lines += [
                line("draft KV, full layers", "", self.draft_full),
                line("draft KV, windowed layers", "", self.draft_ring),
            ]
        lines += [
            line("books", "", self.books),
            line(f"working memory ({told})", "", self.working),
            line("  prompt chunk", "", self.prefill),
            line("  round", "", self.round),
            line("total", "", self.total),
        ]
        return "\n".join(lines)


def part_lines(name: str, parts: Sequence[Part]) -> list[str]:
    """A model as lines of a table: the whole, then its parts."""
    if not parts:
        return []
    whole = Part(name, *(sum(getattr(p, f) for p in parts) for f in PART_SUMS))
    rows = [whole, *(dataclasses.replace(part, name=f"  {part.name}") for part in parts)]
    return [line(row.name, count(row.parameters), row.nbytes) for row in rows]


def line(name: str, parameters: str, nbytes: int) -> str:
    """One line of the table: a name, a number of parameters (or nothing), bytes."""
    return f"{name:<34}{parameters:>12}{amount(nbytes):>14}"


def amount(nbytes: int) -> str:
    """Bytes for the eye: "1.23 GiB"."""
    power = min(int(math.log2(max(nbytes, 1)) // 10), len(UNITS) - 1)
    return f"{nbytes / 1024**power:.{2 if power else 0}f} {UNITS[power]}"


def count(parameters: int) -> str:
    """A number of parameters for the eye: "8.19 B", "134.5 M"."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= size:
            return f"{parameters / size:.{2 if unit == 'B' else 1}f} {unit}"
    return str(parameters)


def part_of(path: str) -> str:
    """The part that a leaf's dotted path belongs to."""
    fields = path.split(".")
    return next((name for name, held in PARTS.items() if not set(held).isdisjoint(fields)), "other")


def census(tree: Any) -> tuple[Part, ...]:
    """A model's arrays, abstract or not, counted by part."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_matrix)
    leaves: dict[str, list[Any]] = {}
    for path, leaf in flat:
        name = part_of(jax.tree_util.keystr(path, simple=True, separator="."))
        leaves.setdefault(name, []).append(leaf)
    return tuple(
        Part(
            name,
            len(jax.tree.leaves(leaves[name])),
            sum(math.prod(x.shape) for x in leaves[name]),
            _nbytes(leaves[name]),
        )
        for name in PARTS
        if name in leaves
    )


def _is_matrix(node: Any) -> bool:
    """Integers and scales count as the matrix that they hold."""
    return isinstance(node, QuantizedLinear)


def plan_memory(
    target: Target,
    draft: DFlashDraft | None,
    plan: RoundPlan,
    *,
    batch: int = 1,
    chunk: int = loop.CHUNKS[-1],
    sampler: Sampler | None = None,
    history: Any = None,
    meter: Meter | None = None,
    compiled: bool = False,
) -> MemoryPlan:
    """What `batch` sequences take under a session's plan (see `SpecSession.memory`).

    target, draft: loaded or abstract (`abstract_target`, `survey_draft(...).abstract()`).
    sampler, history, meter: as `loop.start` takes them, abstract or not.
    compiled: compile both programs here and take their working memory from the compiler.
    NotImplementedError for an estimate of a target other than the dense decoder.
    """
    room = {"capacity": plan.capacity, "draft_kv_dtype": plan.draft_kv_dtype}
    caches = jax.eval_shape(partial(loop.empty_caches, batch=batch, **room), target, draft)
    state = _state(target, caches, plan, batch, sampler, history, meter)
    mesh, layout = getattr(target, "mesh", None), _layout(target, draft, state)
    working = None
    if compiled:
        working = _compiled(target, draft, plan, batch, chunk, caches, state, layout)
    state = sharding.one_device(state, layout, mesh)
    if working is None:
        working = _estimates(target, draft, plan, chunk, caches.last.dtype, state)
    full, ring = _draft_bytes(state.draft)
    target_kv = _nbytes(state.target)
    return MemoryPlan(
        batch=batch,
        capacity=plan.capacity,
        chunk=chunk,
        dtype=str(caches.last.dtype),
        target=census(_own_part(target)),
        draft=() if draft is None else census(_own_part(draft)),
        target_kv=target_kv,
        draft_full=full,
        draft_ring=ring,
        books=_nbytes(state) - target_kv - full - ring,
        prefill=working[0],
        round=working[1],
        compiled=compiled,
        devices=(1, 1) if mesh is None else (mesh.shape[sharding.MODEL], sharding.groups(mesh)),
    )


def _own_part(model: Any) -> Any:
    """What one device has of a model."""
    mesh = getattr(model, "mesh", None)
    return model if mesh is None else sharding.one_device(model, sharding.specs(model), mesh)


def _layout(target: Any, draft: DFlashDraft | None, state: DecodeState) -> Any:
    """The specs of a state's leaves: caches by heads, all by sequence."""
    layout = jax.tree.map(lambda _: sharding.ROWS, state)
    mesh = getattr(target, "mesh", None)
    if mesh is None:
        return layout
    layout = layout.replace(target=sharding.cache_specs(state.target, target.config, mesh))
    if draft is None:
        return layout
    return layout.replace(draft=sharding.cache_specs(state.draft, draft.config, mesh))


def _nbytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def _draft_bytes(kv: DraftKV | None) -> tuple[int, int]:
    """Bytes of the draft KV's full layers and of its rings, slot books included."""
    if kv is None:
        return 0, 0
    rings = [
        leaf
        for leaves in (kv.k, kv.v)
        for leaf, ring in zip(leaves, kv.ring_layers, strict=True)
        if ring
    ]
    ring = _nbytes((rings, kv.ring))
    return _nbytes(kv) - ring, ring


def _state(target, caches, plan, batch, sampler, history, meter) -> DecodeState:
    """The abstract state of a generation."""
    args = target, *caches, _ints(batch), _ints(batch), _ints(batch, 8), sampler, history
    return jax.eval_shape(partial(loop.start, plan=plan), *args, meter=meter)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _compiled(target, draft, plan, batch, chunk, caches, state, layout) -> tuple[int, int]:
    """Temporary bytes of the two programs, as compiled for the default device or the mesh."""
    mesh, prompt = getattr(target, "mesh", None), (_ints(batch, chunk), _ints(batch))
    if mesh is not None:
        places = jax.tree.map(partial(NamedSharding, mesh), layout)
        state = jax.tree.map(_placed, state, places)
        last = _placed(caches.last, NamedSharding(mesh, sharding.ROWS))
        caches = loop.Caches(state.target, state.draft, last)
    implementation = {"implementation": plan.implementation}
    programs = (
        loop.prefill_chunk.lower(target, draft, caches, *prompt, **implementation),
        loop.decode.lower(target, draft, state, _ints(batch, 8), _ints(), plan),
    )
    found: list[Any] = [program.compile().memory_analysis() for program in programs]
    return found[0].temp_size_in_bytes, found[1].temp_size_in_bytes


def _placed(leaf: Any, place: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _estimates(target, draft, plan, chunk, dtype, state) -> tuple[int, int]:
    """The largest buffers that are alive together, of a prompt chunk and of a round.

    Attention's scores or the MLP's inner rows, whichever is more, beside a chunk's residual rows
    and taps; in a round the verify rows' logits and what is made of them, beside attention.
    state: what one device holds.
    """
    if not isinstance(target, DenseTarget):
        raise NotImplementedError(
            f"memory: expected a DenseTarget for an estimate, found a {type(target).__name__}; "
            "compiled=True asks the compiler"
        )
    config, size, table = sharding.share(target), dtype.itemsize, _own_part(target).lm_head
    batch, _, slots, _ = state.target.k[0].shape
    rows = batch * chunk
    residual = rows * config.hidden_size * size
    taps = 0 if draft is None else rows * draft.config.tap_size * size
    mlp = rows * 3 * config.intermediate_size * size
    attention = _attention(config, batch, chunk, slots, size)
    prefill = residual + taps + max(attention, mlp, taps)

    width = plan.verify_width
    logits = batch * width * table.shape[0] * LOGITS
    attention = _attention(config, batch, width, slots, size)
    copies = SAMPLED if plan.sampled else 1
    if draft is not None:
        slots = max(leaf.shape[2] for leaf in state.draft.k)
        shared = sharding.share(draft)
        own = _attention(shared, batch, plan.block_size, slots, size)
        if plan.draft_kv_dtype == "int8":  # its keys, too, as floats
            own += batch * shared.kv_size * slots * size
        attention = max(attention, own)
        copies += draft.markov is not None or draft.dflash2 is not None
    copies += state.history is not None
    return prefill, copies * logits + max(logits, attention)


def _attention(
    config: DecoderConfig | DFlashConfig, batch: int, rows: int, slots: int, size: int
) -> int:
    """Bytes of one layer's attention over a cache of `slots`, elements of `size` bytes.

    Scores and weights of the keys taken at a time, and these keys' values; where that is a tile,
    also its keys, and the queries and sums that stay while the tiles go by.
    """
    heads = config.num_attention_heads
    tile = key_tile(batch, rows, heads, slots)
    keys = tile or slots
    scores = batch * heads * rows * keys * (LOGITS + size)
    values = batch * config.kv_size * keys * size
    if tile is None:
        return scores + values
    return scores + 2 * values + batch * rows * config.q_size * (size + 2 * LOGITS)
