"""Which implementation of an op runs, and the only door to `dflash_jax.pallas`."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import jax

Choice = Literal["xla", "pallas"]
Implementation = Choice | None
"""`xla` is the reference, `pallas` the GPU kernel (Triton); None takes the best that runs here."""


def resolve(
    implementation: Implementation, refusal: str | None = None, best: Choice = "pallas"
) -> Choice:
    """The implementation to run.

    `refusal` says why the kernel cannot take these arguments ("head_dim: expected ..., found ...");
    None where it can. Left to choose, `best` runs on an NVIDIA GPU of Ampere or newer where nothing
    speaks against it ("xla" for an op whose kernel was measured slower), the reference everywhere
    else.

    Raises NotImplementedError where "pallas" is asked for and cannot run, ValueError for a name
    that does not exist.
    """
    if implementation not in (None, *get_args(Choice)):
        raise ValueError(
            f"implementation: expected 'xla', 'pallas' or None, found {implementation!r}"
        )
    if (implementation or best) == "xla":
        return "xla"
    refusal = device_refusal() or refusal
    if refusal is None:
        return "pallas"
    if implementation is None:
        return "xla"
    raise NotImplementedError(f"implementation 'pallas': {refusal}")


def device_refusal() -> str | None:
    """Why the kernels cannot run on this process's default device, None where they can."""
    config: Any = jax.config  # its options are made at run time
    device = config.jax_default_device
    if isinstance(device, str):
        device = jax.devices(device)[0]
    device = jax.devices()[0] if device is None else device
    if device.platform != "gpu":
        return f"device: expected an NVIDIA GPU, found {device.platform}"
    capability = str(getattr(device, "compute_capability", "none"))
    major = capability.partition(".")[0]
    if not major.isdigit() or int(major) < 8:
        return f"compute capability: expected 8.0 or more, found {capability}"
    return None


def kernel(op: str) -> ModuleType:
    """The module `dflash_jax.pallas.<op>`, imported when first needed.

    Raises ImportError where it comes from another checkout than this package.
    """
    module = importlib.import_module(f"dflash_jax.pallas.{op}")
    here, there = Path(__file__).resolve().parent, Path(str(module.__file__)).resolve().parent
    # Installed, the folder lies inside the package; in a checkout, beside it.
    if there not in (here / "pallas", here.parent / "pallas"):
        raise ImportError(f"dflash_jax.pallas: expected it at or beside {here}, found {there}")
    return module
