"""Recorded data and drafters of the three families, for tests."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from targets import F32, ORACLES

from dflash_jax import DFlashDraft, load_draft
from dflash_jax.targets import dense
from dflash_jax.targets.hf import load_hf

FAMILIES = ("dflash", "dspark", "dflash2")
TOLERANCE = 1e-5
"""Of max abs difference / max abs reference, in f32."""


def arrays(*path: str) -> dict[str, np.ndarray]:
    """The arrays of one recorded .npz file."""
    with np.load(ORACLES.joinpath(*path)) as stored:
        return dict(stored)


def assert_close(got: Any, reference: Any, tolerance: float = TOLERANCE) -> None:
    """Max abs difference within `tolerance` of the reference's largest value; NaN is a failure."""
    got, reference = np.asarray(got, np.float64), np.asarray(reference, np.float64)
    assert got.shape == reference.shape
    worst, scale = np.abs(got - reference).max(), np.abs(reference).max()
    assert worst <= tolerance * scale, f"{worst / scale:.2e}"


def stage(case: str) -> Path:
    """The folder of a recorded case."""
    return ORACLES / "stages" / case


@functools.cache
def stage_draft(case: str, checkpoint: str = "checkpoint") -> DFlashDraft:
    """The random drafter of a recorded case, in f32."""
    return load_draft(stage(case) / checkpoint, dtype=F32)


@functools.cache
def tiny_trained_target() -> dense.DenseTarget:
    """The trained tiny target (byte tokens), in f32."""
    return load_hf(ORACLES / "tiny" / "target", dtype=F32)


@functools.cache
def trained(family: str) -> tuple[dense.DenseTarget, DFlashDraft]:
    """The trained tiny target and its drafter of one family, in f32."""
    target = tiny_trained_target()
    return target, load_draft(ORACLES / "tiny" / family, target, dtype=F32)


class RecordedHead:
    """The only part of a target that draft logits need: its output head `[V, H]`."""

    def __init__(self, lm_head: np.ndarray):
        self.lm_head = jnp.asarray(lm_head)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden @ self.lm_head.T
