"""Loading holds one leaf at a time; the bar that shows it."""

import dataclasses
import io
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_shapes import PRESETS
from make_random_target import write_target
from targets import F32, TINY_TARGET

from dflash_jax import leaves
from dflash_jax.progress import Progress
from dflash_jax.targets import dense
from dflash_jax.targets.hf import load_hf, table

SHAPES = dense.abstract(TINY_TARGET, F32)


def noise(name, rows, columns):
    """A part of the tensor that `whole` makes."""
    index = (rows, columns)[: len(TABLE[name].shape)]
    return whole(name)[index]


TABLE = table(TINY_TARGET)


def whole(name):
    seed = list(TABLE).index(name)
    return np.random.default_rng(seed).normal(size=TABLE[name].shape).astype(np.float32)


def test_one_leaf_is_on_the_host_at_a_time(monkeypatch):
    """What has been placed is let go before the next leaf is read."""
    alive, most = 0, 0
    make = leaves._empty

    def watched(shape, dtype):
        nonlocal alive, most
        out = make(shape, dtype)
        alive, most = alive + 1, max(most, alive + 1)
        weakref.finalize(out, gone)
        return out

    def gone():
        nonlocal alive
        alive -= 1

    monkeypatch.setattr(leaves, "_empty", watched)
    # On a CPU a leaf lives on as the device's own: there it must be the only copy of it.
    monkeypatch.setattr(jax, "device_put", lambda host: jnp.zeros(host.shape, host.dtype))
    leaves.load_tree(SHAPES, TABLE, noise)
    assert most == 1 and alive == 0


def test_rows_are_read_in_pieces(monkeypatch):
    """A tensor larger than a chunk is never held whole in the file's own type."""
    longest = 0

    def read(name, rows, columns):
        nonlocal longest
        if len(TABLE[name].shape) > 1:
            longest = max(longest, rows.stop - rows.start)
        return noise(name, rows, columns)

    monkeypatch.setattr(leaves, "CHUNK", 5 * 32 * 4)
    target = leaves.load_tree(SHAPES, TABLE, read)
    assert longest == 5
    for name, entry in TABLE.items():
        leaf = dict(leaves.sharding.named_leaves(target))[entry.leaf]
        np.testing.assert_array_equal(leaf[entry.start : entry.start + entry.shape[0]], whole(name))


def test_the_random_target_loads(tmp_path):
    total = write_target(tmp_path, TINY_TARGET, file_bytes=20_000)
    target = load_hf(tmp_path, jnp.bfloat16)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(target)) == total
    with pytest.raises(ValueError, match="expected no model there, found one"):
        write_target(tmp_path, TINY_TARGET, file_bytes=1e9)


PEAK = """
import sys, jax, jax.numpy as jnp
from dflash_jax.targets.hf import load_hf
def memory(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))
from dflash_jax.sharding import make_mesh
mesh = make_mesh(int(sys.argv[2])) if sys.argv[2] != "1" else None
jnp.zeros(3).block_until_ready()
before = memory("VmRSS")
target = load_hf(sys.argv[1], jnp.bfloat16, mesh=mesh)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(target))
print((memory("VmHWM") - before) / size, size)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own figures")
@pytest.mark.parametrize("devices", [1, 4])
def test_loading_takes_the_models_bytes_and_little_more(tmp_path, devices):
    """On a CPU the devices' memory is the host's: all of it together, mapped files included."""
    config = dataclasses.replace(
        PRESETS["qwen3-8b"].target,
        num_hidden_layers=2,
        hidden_size=1024,
        vocab_size=65536,
        embedding_rows=65536,
        layer_window=(None, None),
    )
    total = write_target(tmp_path, config, file_bytes=1e8)
    command = [sys.executable, "-c", PEAK, str(tmp_path), str(devices)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    share, size = map(float, out.split())
    assert size == total > 3e8
    assert share < 1.2


def drawn(label, total, amounts, **options):
    stream = io.StringIO()
    with Progress(label, total, stream=stream, **options) as bar:
        bar._next = 0.0 if options.get("show") else bar._next
        for amount in amounts:
            bar.add(amount)
    return stream.getvalue()


def test_the_bar_says_how_much_is_done_and_leaves_a_clean_line():
    text = drawn("loading", 4e9, [1e9], scale=1e9, unit="GB", show=True)
    assert "loading [######..................] 1.0/4.0 GB" in text
    assert text.endswith("\r\033[K")


def test_the_bar_is_silent_off_a_terminal_and_for_short_work():
    assert drawn("loading", 4, [1, 1]) == ""
    assert drawn("loading", 4, [1, 1], show=False) == ""
    stream = io.StringIO()
    stream.isatty = lambda: True
    with Progress("loading", 4, stream=stream) as bar:
        bar.add(1)
        assert stream.getvalue() == ""
        bar._next -= 1
        bar.add(1)
        assert "2.0/4.0" in stream.getvalue()
