"""Which implementation of an op runs, and the only door to `dflash_jax.pallas`."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import jax

Choice = Literal["xla", "pallas"]
Implementation = Choice | Literal["mosaic"] | None
"""`xla` is the reference, `pallas` the GPU kernel (Triton); None takes the best that runs here.
`mosaic` is a kernel for Hopper (Mosaic GPU); ops that have none choose as they do for None.
"""
NAMES = (*get_args(Choice), "mosaic")


def resolve(
    implementation: Implementation, refusal: str | None = None, best: Choice = "pallas"
) -> Choice:
    """The implementation to run.

    `refusal` says why the kernel cannot take these arguments ("head_dim: expected ..., found ...");
    None where it can. Left to choose, `best` runs on an NVIDIA GPU of Ampere or newer where nothing
    speaks against it ("xla" for an op whose kernel was measured slower), the reference everywhere
    else.

    An op with a kernel of its own for "mosaic" asks `mosaic_kernel` first.

    Raises NotImplementedError where "pallas" is asked for and cannot run, ValueError for a name
    that does not exist.
    """
    if implementation not in (None, *NAMES):
        names = ", ".join(map(repr, NAMES))
        raise ValueError(f"implementation: expected {names} or None, found {implementation!r}")
    if implementation == "mosaic":
        implementation = None
    if (implementation or best) == "xla":
        return "xla"
    refusal = device_refusal() or refusal
    if refusal is None:
        return "pallas"
    if implementation is None:
        return "xla"
    raise NotImplementedError(f"implementation 'pallas': {refusal}")


def mosaic_kernel(
    implementation: Implementation, op: str, *, best: bool = False
) -> ModuleType | None:
    """The module `dflash_jax.pallas.<op>_mosaic` where "mosaic" is asked for, else None; left to
    choose, also where it is the `best` and can run.

    Raises NotImplementedError where it is asked for and cannot run: on anything but a Hopper GPU,
    or below jax 0.11, which has not all of its interface.
    """
    wanted = implementation == "mosaic" or (implementation is None and best)
    if not wanted:
        return None
    refusal = device_refusal(hopper=True)
    if refusal is None and jax.__version_info__ < (0, 11):
        refusal = f"jax: expected 0.11 or newer, found {jax.__version__}"
    if refusal is None:
        return kernel(f"{op}_mosaic")
    if implementation is None:
        return None
    raise NotImplementedError(f"implementation 'mosaic': {refusal}")


def check(implementation: Implementation) -> None:
    """Raises as `resolve` and `mosaic_kernel` do, whatever the op: what is asked for runs here."""
    resolve(implementation)
    mosaic_kernel(implementation, "attention")


def device_refusal(hopper: bool = False) -> str | None:
    """Why the kernels cannot run on this process's default device, None where they can.

    Those for Hopper run on nothing newer: its products and their layouts are its own.
    """
    device = _default_device()
    if device.platform != "gpu":
        return f"device: expected an NVIDIA GPU, found {device.platform}"
    capability = str(getattr(device, "compute_capability", "none"))
    major = capability.partition(".")[0]
    if hopper and capability != "9.0":
        return f"compute capability: expected 9.0, found {capability}"
    if not major.isdigit() or int(major) < 8:
        return f"compute capability: expected 8.0 or more, found {capability}"
    return None


def on_cpu() -> bool:
    """Whether this process's default device is a CPU."""
    return _default_device().platform == "cpu"


def _default_device() -> Any:
    config: Any = jax.config  # its options are made at run time
    device = config.jax_default_device
    if isinstance(device, str):
        device = jax.devices(device)[0]
    return jax.devices()[0] if device is None else device


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
