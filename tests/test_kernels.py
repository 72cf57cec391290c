"""Which implementation runs, and where the kernels come from."""

import types

import jax
import pytest

from dflash_jax import kernels


class Device:
    platform = "gpu"

    def __init__(self, capability):
        self.compute_capability = capability


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "device_refusal", lambda: None)


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
