"""Lowering for a CUDA GPU on a machine that has none."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

GPU = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def lowered(f: Callable[..., Any], *args: Any) -> str:
    """StableHLO of `f(*args)` for CUDA: raises where a kernel uses what its compiler lacks."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=GPU)):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def launches(text: str) -> int:
    """How many Triton kernels a lowered program launches."""
    return text.count("__gpu$xla.gpu.triton")


def ampere(hopper: bool = False) -> str | None:
    """`kernels.device_refusal` as on a GPU that is no Hopper."""
    return "compute capability: expected 9.0, found 8.0" if hopper else None
