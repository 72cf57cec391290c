"""What a drafter's files hold: its config in the field's terms, and its tensors by part."""

import dataclasses
import math
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from dflash_jax.checkpoint import TARGET_COPIES, Survey, draft_directory, open_draft, survey_draft
from dflash_jax.config import DFlashConfig, RopeConfig, resolve_harvest
from dflash_jax.draft import DFlashDraft
from dflash_jax.head import D2T
from dflash_jax.plan import PARTS, amount, census, count, part_of
from dflash_jax.quant import SCALE
from dflash_jax.tables import tensor_table
from dflash_jax.tensor_files import compute_dtype, listing


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """One part: its tensors on disk, the drafter's parameters in it, bytes on disk and loaded."""

    name: str
    tensors: int
    parameters: int
    stored: int
    loaded: int


@dataclasses.dataclass(frozen=True)
class Description:
    """A drafter, read from headers alone.

    stored: tensors on disk by dtype. parts: empty where it does not load. copies: tensors of the
    target's that came along, compared with it and left alone; unused: what nothing reads. problem:
    why it does not load, None where it does. shapes: the drafter, abstract.
    """

    directory: Path
    config: DFlashConfig
    stored: dict[str, int]
    parts: tuple[StoredPart, ...]
    copies: tuple[str, ...]
    unused: tuple[str, ...]
    dtype: str
    problem: str | None
    shapes: DFlashDraft | None

    def as_dict(self) -> dict[str, Any]:
        """The description as JSON values."""
        told = dataclasses.asdict(dataclasses.replace(self, shapes=None))
        del told["shapes"]
        return told | {"directory": str(self.directory), "loads": self.problem is None}

    def __str__(self) -> str:
        lines = [f"{self.config.family} drafter: {self.directory}", *config_lines(self.config)]
        stored = ", ".join(f"{number} {dtype}" for dtype, number in self.stored.items())
        kept = self.config.precision
        lines.append(f"  {'tensors':<12}{stored}" + (f"; loaded as {kept}" if kept else ""))
        if self.parts:
            heads = ("part", "tensors", "parameters", "on disk", f"loaded ({self.dtype})")
            rows = [heads, *(_cells(part) for part in (*self.parts, self.whole()))]
            lines += ["{:<18}{:>9}{:>13}{:>14}{:>20}".format(*row) for row in rows]
        lines += [
            f"{name}: {listing(list(names))}"
            for name, names in (("the target's, not read", self.copies), ("unused", self.unused))
            if names
        ]
        loads = "loads" if self.problem is None else f"does not load: {self.problem}"
        return "\n".join([*lines, loads])

    def whole(self) -> StoredPart:
        """All parts together."""
        fields = ("tensors", "parameters", "stored", "loaded")
        return StoredPart("all", *(sum(getattr(p, f) for p in self.parts) for f in fields))


def describe_draft(name: str | Path, target: Any = None, dtype: Any = None) -> Description:
    """Describe a shipped drafter, a directory or a file (see `draft_directory`).

    target: loaded or abstract; the drafter is then checked against it too. dtype: of the weights
    once loaded. What keeps it from loading is told in `problem`; what cannot be described at all,
    no directory, config or tensors, raises FileNotFoundError or ValueError.
    """
    directory, dtype = draft_directory(name), compute_dtype(dtype)
    problem, shapes, parts = None, None, ()
    try:
        found = survey_draft(directory)
    except (ValueError, NotImplementedError) as error:
        with warnings.catch_warnings(action="ignore"):  # said already
            files, config = open_draft(directory)
        problem, known = _reason(error, directory), set(tensor_table(config))
    else:
        files, config, shapes = found.files, found.config, found.abstract(dtype)
        known = {*found.table, *(() if found.head_rows is None else (D2T,))}
        parts = _parts(found, shapes)
        problem = None if target is None else _misfit(directory, target)
    names = files.names()
    copies = (set(TARGET_COPIES) & names) - known
    read = known | {name + SCALE for name in known}
    return Description(
        directory=directory,
        config=config,
        stored=dict(Counter(sorted(files.dtype(name) for name in names))),
        parts=parts,
        copies=tuple(sorted(copies)),
        unused=tuple(sorted(names - read - copies)),
        dtype=str(dtype),
        problem=problem,
        shapes=shapes,
    )


def _misfit(directory: Path, target: Any) -> str | None:
    """Why a drafter that loads alone does not go with `target`, None where it does."""
    with warnings.catch_warnings(action="ignore"):  # said already
        try:
            survey_draft(directory, target)
        except (ValueError, NotImplementedError) as error:
            return _reason(error, directory)
    return None


def _reason(error: Exception, directory: Path) -> str:
    return str(error).removeprefix(f"{directory}: ")


def _parts(found: Survey, shapes: DFlashDraft) -> tuple[StoredPart, ...]:
    """The census of the drafter, beside that of its files."""
    tensors, parameters, stored = Counter(), Counter(), Counter()
    leaves = {name: entry.leaf for name, entry in found.table.items()}
    leaves |= {D2T: "head.d2t"} if found.head_rows is not None else {}
    for name in found.files.names():
        leaf = leaves.get(name.removesuffix(SCALE))
        if leaf is not None:
            tensors[part_of(leaf)] += 1
            stored[part_of(leaf)] += found.files.nbytes(name)
            if name in found.table:
                parameters[part_of(leaf)] += math.prod(found.table[name].shape)
    loaded = {part.name: part.nbytes for part in census(shapes)}
    return tuple(
        StoredPart(name, tensors[name], parameters[name], stored[name], loaded[name])
        for name in PARTS
        if name in loaded
    )


def _cells(part: StoredPart) -> tuple[str, ...]:
    sizes = amount(part.stored), amount(part.loaded)
    return part.name, str(part.tensors), count(part.parameters), *sizes


def config_lines(config: DFlashConfig) -> list[str]:
    """A config in the field's terms, a line a subject."""
    c, harvest = config, resolve_harvest(config)
    order = "shifted" if harvest.first_row == 0 else "mask-fill"
    of = "" if c.num_target_layers is None else f" of {c.num_target_layers} target layers"
    scale = "" if c.input_embedding_scale == 1 else f", embeddings x {c.input_embedding_scale:g}"
    subjects = {
        "backbone": f"{c.num_hidden_layers} layers, hidden {c.hidden_size}, "
        f"{c.num_attention_heads}/{c.num_key_value_heads} heads x {c.head_dim}, "
        f"mlp {c.intermediate_size}, vocabulary {c.vocab_size or 'as the target'}",
        "block": f"{c.block_size} rows, {harvest.drafts(c.block_size)} drafts ({order} harvest), "
        f"mask id {c.mask_token_id}{scale}",
        "taps": f"outputs of layers {', '.join(map(str, c.target_layer_ids))}{of}",
        "attention": _attention(c),
        "rope": _rope(c.rope),
        "heads": _heads(c),
        "logits": _logits(c),
    }
    return [f"  {name:<12}{text}" for name, text in subjects.items() if text]


def _attention(config: DFlashConfig) -> str:
    kinds = Counter(zip(config.layer_window, config.layer_causal, strict=True))

    def kind(window: int | None, causal: bool) -> str:
        seen = "full" if window is None else f"window {window}"
        return f"{seen}, {'causal' if causal else 'not causal'}"

    return "; ".join(f"{number} x {kind(*what)}" for what, number in kinds.items())


def _rope(rope: RopeConfig) -> str:
    if rope.rope_type == "default":
        return f"theta {rope.theta:g}"
    original = rope.original_max_position_embeddings
    return f"theta {rope.theta:g}, {rope.rope_type} x {rope.factor:g} of {original} positions"


def _heads(config: DFlashConfig) -> str:
    parts, spark, two = [], config.dspark, config.dflash2
    if spark is not None:
        rank = spark.markov_rank
        kind = spark.markov_head_type or "vanilla"
        parts.append("no markov" if rank == 0 else f"markov {kind}, rank {rank or 'by tensors'}")
        if spark.confidence is not None:
            reads = "hidden and token" if spark.confidence_with_markov else "hidden"
            parts.append(f"confidence of {reads}" if spark.confidence else "no confidence")
    if two is not None:
        parts.append(
            f"convolutions of {two.conv_kernel_size} taps, groups of {two.conv_group_size}"
        )
        parts.append(f"selector of {two.selector_top_k} candidates, rank {two.selector_rank}")
    return "; ".join(parts)


def _logits(config: DFlashConfig) -> str:
    cap, scale = config.final_logit_softcapping, config.output_multiplier
    parts = [] if scale == 1 else [f"x {scale:g}"]
    return ", ".join(parts if cap is None else [*parts, f"capped at {cap:g}"])
