"""Drafter checkpoints: safetensors files <-> pytree, driven by one table of names and shapes.

`tensor_table` says, for every tensor a family has on disk, its exact shape and where it lives in
the pytree. Loading, saving, the census gate and its error texts all read that table.
"""

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dflash_jax import quant
from dflash_jax.config import (
    DFlash2Config,
    DFlashConfig,
    DSparkConfig,
    config_dict,
    read_config,
)
from dflash_jax.draft import DFlashDraft, abstract
from dflash_jax.keys import read_json

ASSETS = Path(__file__).parent / "assets"
FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def compute_dtype(dtype: Any = None) -> jnp.dtype:
    """The dtype weights are held in: the given one, else f32 on a CPU and bf16 elsewhere."""
    if dtype is not None:
        try:
            known = jnp.dtype(dtype)
        except TypeError:
            known = None
        if known is None or not jnp.issubdtype(known, jnp.floating):
            raise ValueError(f"dtype: expected a floating-point type, found {dtype!r}")
        return known
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


class TensorSource(Protocol):
    """Named tensors on disk: what `check_shapes` and `read_leaves` read, whatever the format."""

    directory: Path
    """Where the tensors lie (a directory or one file), for error texts."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> np.ndarray: ...


class TensorFiles:
    """The safetensors of one directory, single or index-sharded, read tensor by tensor."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._open: dict[str, Any] = {}
        self._file_of = self._locate()

    def _locate(self) -> dict[str, str]:
        index = self.directory / INDEX
        if index.is_file():
            table = read_json(index).get("weight_map")
            names = table.values() if isinstance(table, dict) else [None]
            if not all(isinstance(name, str) for name in names):
                raise ValueError(f"{index}: expected JSON with a weight_map of file names")
            missing = sorted({f for f in table.values() if not (self.directory / f).is_file()})
            if missing:
                raise FileNotFoundError(f"{index}: expected shards beside it, missing {missing}")
            return table
        if not (self.directory / WEIGHTS).is_file():
            raise FileNotFoundError(
                f"{self.directory}: expected {WEIGHTS} or {INDEX}, found neither"
            )
        return dict.fromkeys(self._handle(WEIGHTS).keys(), WEIGHTS)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.directory / file, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.directory / file}: not safetensors ({error})") from None
        return self._open[file]

    def names(self) -> set[str]:
        """Every tensor name of the directory."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape from the header, without reading the data."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Dtype from the header in safetensors spelling: "BF16", "F32", "I8", ..."""
        return self._slice(name).get_dtype()

    def read(self, name: str) -> np.ndarray:
        """The tensor as a numpy array (bf16 through ml_dtypes)."""
        return self._handle(self._file_of[name]).get_tensor(name)

    def _slice(self, name: str) -> Any:
        handle = self._handle(self._file_of[name])
        if name not in set(handle.keys()):
            raise ValueError(
                f"{self.directory}: {INDEX} puts {name} in {self._file_of[name]}, not found there"
            )
        return handle.get_slice(name)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor on disk: exact shape, its leaf in the pytree, the leaf's first row it fills, and
    other names that exports give it.
    """

    shape: tuple[int, ...]
    leaf: str
    start: int = 0
    aliases: tuple[str, ...] = ()


def tensor_table(config: DFlashConfig) -> dict[str, Entry]:
    """Checkpoint name -> `Entry` for every tensor the config requires.

    11 L + 3 for the backbone, 4 L + 3 more for DFlash2, the heads' own for DSpark.
    """
    hidden, q, kv = config.hidden_size, config.q_size, config.kv_size
    ff, dim = config.intermediate_size, config.head_dim
    table = {
        "fc.weight": Entry((hidden, config.tap_size), "fc"),
        "hidden_norm.weight": Entry((hidden,), "hidden_norm"),
        "norm.weight": Entry((hidden,), "norm"),
    }
    for i in range(config.num_hidden_layers):
        name, leaf = f"layers.{i}.", f"layers.{i}."
        table |= {
            name + "input_layernorm.weight": Entry((hidden,), leaf + "input_norm"),
            name + "self_attn.q_proj.weight": Entry((q, hidden), leaf + "qkv"),
            name + "self_attn.k_proj.weight": Entry((kv, hidden), leaf + "qkv", q),
            name + "self_attn.v_proj.weight": Entry((kv, hidden), leaf + "qkv", q + kv),
            name + "self_attn.q_norm.weight": Entry((dim,), leaf + "q_norm"),
            name + "self_attn.k_norm.weight": Entry((dim,), leaf + "k_norm"),
            name + "self_attn.o_proj.weight": Entry((hidden, q), leaf + "o"),
            name + "post_attention_layernorm.weight": Entry((hidden,), leaf + "post_norm"),
            name + "mlp.gate_proj.weight": Entry((ff, hidden), leaf + "gate_up"),
            name + "mlp.up_proj.weight": Entry((ff, hidden), leaf + "gate_up", ff),
            name + "mlp.down_proj.weight": Entry((hidden, ff), leaf + "down"),
        }
    if config.dflash2 is not None:
        table |= _dflash2_table(config, config.dflash2)
    if config.dspark is not None:
        table |= _dspark_table(config, config.dspark)
    return table


def _dflash2_table(config: DFlashConfig, two: DFlash2Config) -> dict[str, Entry]:
    hidden, taps, rank = config.hidden_size, two.conv_kernel_size, two.selector_rank
    rows = 2 * taps * (hidden // two.conv_group_size)
    table = {
        SELECTOR + "hidden_projection.weight": Entry((rank, hidden), "dflash2.hidden_projection"),
    }
    for side in ("predecessor", "successor"):
        name, shape = f"{SELECTOR}{side}_codebook", (config.vocabulary, rank)
        table[name] = Entry(shape, f"dflash2.{side}", aliases=(name + ".weight",))
    for i in range(config.num_hidden_layers):
        for conv in ("attention_conv", "mlp_conv"):
            name = f"layers.{i}.{conv}."
            table[name + "base_kernel"] = Entry((2, taps, hidden), name + "base_kernel")
            table[name + "kernel_projection.weight"] = Entry(
                (rows, hidden), name + "kernel_projection"
            )
    return table


def _dspark_table(config: DFlashConfig, spark: DSparkConfig) -> dict[str, Entry]:
    hidden, rank, table = config.hidden_size, spark.markov_rank or 0, {}
    if rank:
        for name in ("w1", "w2"):
            shape = (config.vocabulary, rank)
            table[f"{MARKOV}markov_{name}.weight"] = Entry(shape, f"markov.{name}")
    mix = {"gated": (rank, hidden + rank), "rnn": (3 * rank, 2 * rank + hidden)}
    if rank and spark.markov_head_type in mix:
        shape, name = mix[spark.markov_head_type], MARKOV + MIXES[spark.markov_head_type]
        table[name + ".weight"] = Entry(shape, "markov.mix")
        table[name + ".bias"] = Entry(shape[:1], "markov.mix_bias")
    if spark.confidence:
        width = hidden + (rank if spark.confidence_with_markov else 0)
        table[CONFIDENCE + "weight"] = Entry((1, width), "confidence.weight")
        table[CONFIDENCE + "bias"] = Entry((1,), "confidence.bias")
    return table


MARKOV, CONFIDENCE, SELECTOR = "markov_head.", "confidence_head.proj.", "candidate_selector."
MIXES = {"gated": "gate_proj", "rnn": "joint_proj"}
FAMILY_PARTS = (MARKOV, "confidence_head.", SELECTOR)
DSPARK_KEYS = {
    "markov_head_type": "markov_head_type",
    "markov_rank": "markov_rank",
    "confidence": "enable_confidence_head",
    "confidence_with_markov": "confidence_head_with_markov",
}
HEAD_TABLE = ("lm_head.weight", "d2t")
TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight")
"""Tensors of the target that some exports carry along: compared with it, then left alone."""


def load_draft(directory: str | Path, target: Any = None, dtype: Any = None) -> DFlashDraft:
    """Load a drafter directory: `config.json` beside `model.safetensors` (or sharded).

    Args:
      directory: Hugging Face style, tensors in HF names, bf16, f32 or int8 (see `quant`); or the
        name of a shipped drafter.
      target: a loaded target (see `targets.Target`); when given, the drafter is checked against
        it: hidden size, layer count, mask id, and any embedding or head the checkpoint carries.
      dtype: of the loaded weights; default f32 on a CPU, bf16 elsewhere.

    Raises FileNotFoundError or ValueError naming what is missing, left over or misshapen.

    >>> draft = load_draft("my-drafter")            # doctest: +SKIP
    >>> draft.config.block_size                     # doctest: +SKIP
    16
    """
    found = survey_draft(directory, target)
    files, table = found.files, found.table
    if target is not None:
        _compare_copies(files, target, skip=() if found.head_rows is None else HEAD_TABLE)
    leaves = read_leaves(files, table, compute_dtype(dtype))
    if found.head_rows is not None:
        leaves["head.lm_head"] = _read_as(files, HEAD_TABLE[0], compute_dtype(dtype))
        leaves["head.d2t"] = _d2t(files, target)
    return assemble(found.abstract(dtype), leaves)


class Survey(NamedTuple):
    """A drafter directory that passed every check but those that read its tensors.

    table: the tensors a drafter is made of, under the names the files use. head_rows: of its own
    reduced head, None where the target's is used. unused: tensors that nothing reads.
    """

    files: TensorFiles
    config: DFlashConfig
    table: dict[str, Entry]
    head_rows: int | None
    unused: list[str]

    def abstract(self, dtype: Any = None) -> DFlashDraft:
        """The shapes and dtypes that `load_draft` would load."""
        return abstract(self.config, compute_dtype(dtype), self.head_rows)


def survey_draft(directory: str | Path, target: Any = None) -> Survey:
    """Config and census of a drafter directory, from headers alone.

    `target` may be an abstract one. Raises as `load_draft` does.
    """
    directory = draft_directory(directory)
    files = TensorFiles(directory)
    token_to_id = getattr(target, "token_to_id", None)
    config = read_config(directory, token_to_id)
    if config.dspark is not None:
        config = dataclasses.replace(config, dspark=_resolve_dspark(files, config.dspark))
    if target is not None:
        target.check_drafter(config)
    table = _names_on_disk(files, tensor_table(config))
    head_rows, unused = _census(files, table, config, target)
    return Survey(files, config, table, head_rows, unused)


def shipped_drafts() -> list[str]:
    """Names of the drafters that come with the package (all for SmolLM2-135M-Instruct)."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def draft_directory(name: str | Path) -> Path:
    """The directory of a drafter: a shipped one's name, or a path.

    FileNotFoundError names what is shipped where neither is there.
    """
    if str(name) in shipped_drafts():
        return ASSETS / str(name)
    if str(name) and Path(name).is_dir():
        return Path(name)
    raise FileNotFoundError(
        f"drafter: expected a directory or one of {shipped_drafts()}, found {str(name)!r}"
    )


def save_draft(draft: DFlashDraft, directory: str | Path, *, storage: str | None = None) -> None:
    """Save as a Hugging Face style directory that `load_draft` and public loaders read.

    storage: None keeps the weights' dtype; "int8" writes matrices as int8 rows with f32 scales
    (`quant.quantize_rows`), norms as they are.
    """
    if storage not in (None, "int8"):
        raise ValueError(f"storage: expected None or 'int8', found {storage!r}")
    directory = Path(directory)
    if (directory / INDEX).exists():
        # Loaders would go by the index, and read what lay there before.
        raise ValueError(f"{directory}: expected no {INDEX} (another checkpoint's), found one")
    directory.mkdir(parents=True, exist_ok=True)
    leaves = {path: np.asarray(leaf) for path, leaf in named_leaves(draft)}
    tensors = {}
    for name, entry in tensor_table(draft.config).items():
        rows = leaves[entry.leaf][entry.start : entry.start + entry.shape[0]]
        if storage == "int8" and rows.ndim == 2:
            tensors[name], tensors[name + quant.SCALE] = quant.quantize_rows(rows)
        else:
            tensors[name] = np.ascontiguousarray(rows)
    if draft.head is not None:
        tensors |= {HEAD_TABLE[0]: leaves["head.lm_head"], HEAD_TABLE[1]: leaves["head.d2t"]}
    config = json.dumps(config_dict(draft.config), indent=2, sort_keys=True) + "\n"
    (directory / "config.json").write_text(config, encoding="utf-8")
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def read_leaves(
    files: TensorSource,
    table: Mapping[str, Entry],
    dtype: jnp.dtype,
    transform: Callable[[str, np.ndarray], np.ndarray] = lambda name, tensor: tensor,
) -> dict[str, np.ndarray]:
    """Fill every leaf that `table` names; fused leaves are written part by part, no copies held."""
    sizes: dict[str, tuple[int, ...]] = {}
    for entry in table.values():
        rows = max(entry.start + entry.shape[0], sizes.get(entry.leaf, (0,))[0])
        sizes[entry.leaf] = (rows, *entry.shape[1:])
    leaves = {leaf: np.empty(shape, dtype) for leaf, shape in sizes.items()}
    for name, entry in table.items():
        tensor = transform(name, _read_as(files, name, dtype))
        leaves[entry.leaf][entry.start : entry.start + entry.shape[0]] = tensor
    return leaves


def read_tensor(files: TensorSource, name: str) -> np.ndarray:
    """One tensor, dequantised (to bf16, always the same bits) where it is stored as int8."""
    tensor, scales = files.read(name), name + quant.SCALE
    if tensor.dtype != np.int8:
        return tensor
    if scales not in files.names():
        raise ValueError(f"{files.directory}: int8 tensors without scales {name}")
    scale = files.read(scales)
    if tensor.ndim != 2 or scale.shape != tensor.shape[:1] or scale.dtype not in FLOATS:
        raise ValueError(
            f"{files.directory}: {scales}: expected a float for every row of {list(tensor.shape)}, "
            f"found {list(scale.shape)} of {scale.dtype}"
        )
    if not np.isfinite(scale).all():
        raise ValueError(f"{files.directory}: {scales}: expected finite numbers, found others")
    return quant.dequantize_rows(tensor, scale)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Leaves with dotted paths, e.g. ("layers.0.qkv", array)."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in flat]


def assemble(shapes: Any, leaves: Mapping[str, np.ndarray]) -> Any:
    """The pytree of an `abstract` tree, its leaves taken by path and put on the device."""
    paths = [path for path, _ in named_leaves(shapes)]
    arrays = [jnp.asarray(leaves[path]) for path in paths]
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def check_shapes(files: TensorSource, table: Mapping[str, Entry]) -> None:
    """ValueError listing every tensor that is missing or has another shape than the table says."""
    missing = sorted(set(table) - files.names())
    if missing:
        raise ValueError(f"{files.directory}: missing tensors {listing(missing)}")
    wrong = [
        f"{name}: expected {list(entry.shape)}, found {list(files.shape(name))}"
        for name, entry in table.items()
        if files.shape(name) != entry.shape
    ]
    if wrong:
        raise ValueError(f"{files.directory}: {listing(wrong)}")


def _names_on_disk(files: TensorFiles, table: Mapping[str, Entry]) -> dict[str, Entry]:
    """The table under the names this checkpoint uses, where it has a tensor by an alias."""
    names = files.names()
    return {
        next((n for n in (name, *entry.aliases) if n in names), name): entry
        for name, entry in table.items()
    }


def _resolve_dspark(files: TensorFiles, stated: DSparkConfig) -> DSparkConfig:
    """What the tensors say of the heads; ValueError naming both where the config disagrees."""
    names = files.names()
    w1, weight, norm = MARKOV + "markov_w1.weight", CONFIDENCE + "weight", "norm.weight"
    rank = files.shape(w1)[1] if w1 in names else 0
    kinds = [kind for kind, mix in MIXES.items() if f"{MARKOV}{mix}.weight" in names]
    if len(kinds) > 1:
        raise ValueError(f"{files.directory}: expected one Markov head, found {kinds}")
    confidence = weight in names
    plain = confidence and norm in names and files.shape(weight)[-1] == files.shape(norm)[0]
    held = DSparkConfig(
        markov_head_type=kinds[0] if kinds else "vanilla",
        markov_rank=rank,
        confidence=confidence,
        confidence_with_markov=confidence and not plain,
    )
    for field in dataclasses.fields(held):
        says, has = getattr(stated, field.name), getattr(held, field.name)
        moot = field.name == "confidence_with_markov" and not confidence
        moot = moot or (field.name == "markov_head_type" and not rank)
        if says is not None and not moot and says != has:
            raise ValueError(
                f"{files.directory}: {DSPARK_KEYS[field.name]}: config.json says {says!r}, "
                f"the tensors say {has!r}"
            )
    return held


def _census(
    files: TensorFiles, table: Mapping[str, Entry], config: DFlashConfig, target: Any
) -> tuple[int | None, list[str]]:
    """The gate: every required tensor in its exact shape, every tensor in the file consumed.

    Returns the rows of the drafter's own head (None where the target's head is used) and, for a
    plain DFlash drafter, where they are no error, the tensors left over.
    """
    check_shapes(files, table)
    scales = {name + quant.SCALE for name in table if files.dtype(name) == "I8"}
    lacking = sorted(scales - files.names())
    if lacking:
        raise ValueError(f"{files.directory}: int8 tensors without scales {listing(lacking)}")
    extra = files.names() - set(table) - scales
    foreign = sorted(n for n in extra if n.startswith(FAMILY_PARTS) or "_conv." in n)
    if foreign:
        raise ValueError(
            f"{files.directory}: config.json declares family {config.family!r}, found tensors of "
            f"another {listing(foreign)}"
        )
    own_head = _own_head(files, config.hidden_size, target)
    if own_head and config.dspark is not None and config.dspark.markov_rank:
        raise NotImplementedError(
            f"{files.directory}: d2t: expected none beside a Markov head, which spans the target's "
            "vocabulary, found one"
        )
    consumed = set(TARGET_COPIES) | (set(HEAD_TABLE) if own_head else set())
    left = sorted(extra - consumed)
    if left and config.family != "dflash":
        raise ValueError(f"{files.directory}: unused tensors {listing(left)}")
    if left:
        warnings.warn(f"{files.directory}: unused tensors {listing(left)}", stacklevel=4)
    return files.shape(HEAD_TABLE[0])[0] if own_head else None, left


def _own_head(files: TensorFiles, hidden_size: int, target: Any) -> bool:
    """Whether the drafter proposes over a smaller vocabulary through its own head and map."""
    head, d2t = (name in files.names() for name in HEAD_TABLE)
    if d2t and not head:
        raise ValueError(f"{files.directory}: d2t without lm_head.weight (the reduced head)")
    shape = files.shape(HEAD_TABLE[0]) if head else (0, hidden_size)
    if len(shape) != 2 or shape[1] != hidden_size or (d2t and not shape[0]):
        raise ValueError(
            f"{files.directory}: lm_head.weight: expected [rows, {hidden_size}], "
            f"found {list(shape)}"
        )
    rows = shape[0]
    if d2t and files.shape(HEAD_TABLE[1]) != (rows,):
        raise ValueError(
            f"{files.directory}: d2t: expected [{rows}], found {list(files.shape(HEAD_TABLE[1]))}"
        )
    if head and not d2t and target is not None and rows < target.vocab_size:
        raise ValueError(
            f"{files.directory}: lm_head.weight has {rows} rows, the target {target.vocab_size} "
            "tokens: expected a d2t map, found none"
        )
    return d2t


def _d2t(files: TensorFiles, target: Any) -> np.ndarray:
    """The offsets, int32; ValueError where one leads out of the target's vocabulary."""
    offsets = files.read(HEAD_TABLE[1])
    if not np.issubdtype(offsets.dtype, np.integer):
        raise ValueError(f"{files.directory}: d2t: expected integers, found {offsets.dtype}")
    ids = offsets.astype(np.int64) + np.arange(len(offsets))
    vocabulary = None if target is None else target.vocab_size
    bad = ids[(ids < 0) | (ids >= (ids.max() + 1 if vocabulary is None else vocabulary))]
    if len(bad):
        upper = " and up" if vocabulary is None else f"..{vocabulary - 1}"
        raise ValueError(f"{files.directory}: d2t: expected ids in 0{upper}, found {bad[0]}")
    return offsets.astype(np.int32)


def _compare_copies(files: TensorFiles, target: Any, skip: Iterable[str]) -> None:
    """Warn where a copy of the target's tables differs from the target's own, which is used."""
    for name in set(TARGET_COPIES) & files.names() - set(skip):
        own = target.embedding if name == TARGET_COPIES[0] else target.lm_head
        shape = files.shape(name)
        if len(shape) != 2 or shape[1:] != own.shape[1:]:
            raise ValueError(
                f"{files.directory}: {name}: expected [rows, {own.shape[1]}], found {list(shape)}"
            )
        copy, rows = _read_as(files, name, own.dtype), min(own.shape[0], shape[0])
        if not np.array_equal(copy[:rows], np.asarray(own[:rows])):
            warnings.warn(
                f"{files.directory}: {name} differs from the target's; the target's is used",
                stacklevel=3,
            )


def _read_as(files: TensorSource, name: str, dtype: jnp.dtype) -> np.ndarray:
    """`read_tensor` in the dtype that is computed in; ValueError for one not stored as floats."""
    tensor = read_tensor(files, name)
    if tensor.dtype not in FLOATS:
        raise ValueError(
            f"{files.directory}: {name}: expected F32, F16, BF16 or I8, found {tensor.dtype}"
        )
    return tensor.astype(dtype, copy=False)


def listing(names: list[str], most: int = 8) -> str:
    """Names for an error text, the first few of a long list."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
