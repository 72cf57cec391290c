"""Which implementation runs, and where the kernels come from."""

import types

import jax
import jax.numpy as jnp
import pytest
from cuda import ampere

from dflash_jax import kernels
from dflash_jax.attention import BlockPlace, append_and_attend
from dflash_jax.kv import ABSENT


class Device:
    platform = "gpu"

    def __init__(self, capability):
        self.compute_capability = capability


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "device_refusal", ampere)


def test_on_cpu_the_reference_runs_and_the_kernel_says_why_not():
    assert kernels.resolve(None) == kernels.resolve("xla") == "xla"
    with pytest.raises(
        NotImplementedError, match=r"'pallas': device: expected an NVIDIA GPU, found cpu"
    ):
        kernels.resolve("pallas")


def test_on_a_gpu_the_kernel_runs_where_it_can(on_gpu):
    assert kernels.resolve(None) == kernels.resolve("pallas") == "pallas"
    assert kernels.resolve("xla") == "xla"
    assert kernels.resolve(None, "head_dim: too odd") == "xla"
    with pytest.raises(NotImplementedError, match=r"'pallas': head_dim: too odd"):
        kernels.resolve("pallas", "head_dim: too odd")


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"implementation: expected 'xla', .* found 'cuda'"):
        kernels.resolve("cuda")


@pytest.mark.parametrize(
    ("rows", "dim", "causal", "expected"),
    [
        (12, 64, True, 0),
        (1, 64, True, 1),
        (12, 64, False, 1),
        (12, 128, True, 1),
        (64, 128, True, 0),
    ],
)
def test_attention_left_to_choose_takes_what_was_measured_faster(
    on_gpu, monkeypatch, rows, dim, causal, expected
):
    """Narrow causal blocks and wide ones are XLA's."""
    kernel, calls = kernels.kernel("attention"), []

    def run(qkv, norms, eps, place, k, v, **kind):
        calls.append(kind)
        return qkv[..., : 4 * dim], k, v

    monkeypatch.setattr(kernel, "append_and_attend", run)
    slots, at = 128, jnp.zeros((1,), jnp.int32)
    angles, pos = jnp.zeros((1, rows, dim // 2)), jnp.arange(rows)[None]
    k_pos = jnp.where(jnp.arange(slots) < rows, jnp.arange(slots), ABSENT)[None]
    place = BlockPlace(jnp.cos(angles), jnp.sin(angles), pos, k_pos, at, at)
    cache = jnp.zeros((1, 1, slots, dim))
    out, *_ = append_and_attend(
        jnp.ones((1, rows, 6 * dim)), None, 1e-6, place, cache, cache, causal=causal, window=None
    )
    assert out.shape == (1, rows, 4 * dim)
    assert len(calls) == expected


@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0"])
def test_ampere_and_newer_run_them(monkeypatch, capability):
    monkeypatch.setattr(jax, "devices", lambda *_: [Device(capability)])
    assert kernels.device_refusal() is None


@pytest.mark.parametrize("capability", ["7.5", "gfx942"])
def test_older_and_other_gpus_do_not(monkeypatch, capability):
    monkeypatch.setattr(jax, "devices", lambda *_: [Device(capability)])
    assert kernels.device_refusal() == (
        f"compute capability: expected 8.0 or more, found {capability}"
    )


def test_the_default_device_decides():
    with jax.default_device(jax.devices("cpu")[0]):
        assert kernels.device_refusal() == "device: expected an NVIDIA GPU, found cpu"


def test_kernels_of_another_checkout_are_refused(monkeypatch, tmp_path):
    stranger = types.ModuleType("dflash_jax.pallas.attention")
    stranger.__file__ = str(tmp_path / "pallas" / "attention.py")
    monkeypatch.setitem(__import__("sys").modules, stranger.__name__, stranger)
    with pytest.raises(ImportError, match=rf"dflash_jax.pallas: expected .*, found {tmp_path}"):
        kernels.kernel("attention")


def test_kernels_of_this_checkout_are_taken():
    assert kernels.kernel("attention").__name__ == "dflash_jax.pallas.attention"
