"""Write a target directory of a real model's shape with random weights, in several files.

    python scripts/make_random_target.py /tmp/random-8b                       # Qwen3-8B: 16.4 GB
    python scripts/make_random_target.py /tmp/random --layers 10 --file-gb 1  # its first layers

For trying out what a model of that size takes, to load and to run, where it is not at hand.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from bench_shapes import PRESETS
from safetensors.numpy import save_file

from dflash_jax.cli import Parser, run_command
from dflash_jax.targets import hf
from dflash_jax.targets.dense import DecoderConfig
from dflash_jax.tensor_files import INDEX


def parser() -> Parser:
    """The command line's options."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", metavar="DIR", help="must not hold a model already")
    parser.add_argument("--preset", default="qwen3-8b", metavar="|".join(PRESETS))
    parser.add_argument("--layers", type=int, metavar="N", help="default: the preset's")
    parser.add_argument("--file-gb", type=float, default=2.0, help="most bytes of a file, in 1e9")
    return parser


def config_json(config: DecoderConfig) -> dict:
    """`config.json` of a Qwen3 (q and k normed) or Llama-class decoder."""
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "vocab_size": config.embedding_rows,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tied,
    }


def write_target(directory: Path, config: DecoderConfig, file_bytes: float) -> int:
    """Write the directory; returns the bytes of its tensors (bf16).

    Matrices are normal(0, 0.02), cut out of one block of noise at random places: drawing billions
    of numbers would take minutes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.glob("*.safetensors*")):
        raise ValueError(f"{directory}: expected no model there, found one")
    rng = np.random.default_rng(0)
    noise = (0.02 * rng.standard_normal(1 << 22, np.float32)).astype(ml_dtypes.bfloat16)

    def tensor(shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, noise.dtype)
        return np.resize(np.roll(noise, rng.integers(len(noise))), shape)

    files: list[dict[str, tuple[int, ...]]] = [{}]
    held = total = 0
    for name, entry in hf.table(config).items():
        size = 2 * int(np.prod(entry.shape))
        if files[-1] and held + size > file_bytes:
            files.append({})
            held = 0
        files[-1][name] = entry.shape
        held, total = held + size, total + size
    weight_map = {}
    for i, shapes in enumerate(files):
        file = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        save_file({name: tensor(shape) for name, shape in shapes.items()}, directory / file)
        weight_map |= dict.fromkeys(shapes, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config_json(config), indent=2))
    return total


def run(args: argparse.Namespace) -> int:
    """Write what the options say."""
    if args.preset not in PRESETS:
        raise ValueError(f"--preset: expected one of {', '.join(PRESETS)}, found {args.preset!r}")
    config = PRESETS[args.preset].target
    layers = config.num_hidden_layers if args.layers is None else args.layers
    if layers < 1 or args.file_gb <= 0:
        raise ValueError("--layers, --file-gb: expected positive numbers, found others")
    windows = (config.layer_window * layers)[:layers]
    config = dataclasses.replace(config, num_hidden_layers=layers, layer_window=windows)
    total = write_target(Path(args.out), config, args.file_gb * 1e9)
    print(f"{args.out}: {layers} layers, {total / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(run_command("make_random_target.py", lambda: run(parser().parse_args())))
