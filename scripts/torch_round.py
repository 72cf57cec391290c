"""A strong PyTorch rival for one DFlash draft round: static shapes, all of it in one CUDA graph.

    python scripts/torch_round.py                        # the Qwen3-8B drafter's shape, bf16
    python scripts/torch_round.py --hidden-size 576 ...  # any other

The round is what `bench.py` calls `draft_round`: embed the block, run the drafter's layers over the
cached context, project to the vocabulary, take the argmax. It is timed as PyTorch operations and
through `torch.compile` (max-autotune), both replayed as a CUDA graph, so that no launch or Python
time is in it. `topk16` takes the 16 best of each row instead, as a DFlash2 drafter needs them.

Prints a line a variant, last one JSON line. Needs torch and a CUDA GPU.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

ROPE_THETA, EPS, MASK_ID = 1e6, 1e-6, 7
PROPOSALS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "argmax": lambda logits: logits.argmax(-1),
    "topk16": lambda logits: logits.float().topk(16, -1).indices,
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the drafter and of the round; the defaults are the public Qwen3-8B drafter's."""

    hidden_size: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 12288
    layers: int = 5
    vocab_size: int = 151936
    block_size: int = 16
    context: int = 2048
    capacity: int = 4096
    batch: int = 1


class Rival:
    """Random weights and caches of one shape, and the round over them.

    Weights keep the orientation `[out, in]`; caches are `[B, kv_heads, capacity, D]` a layer.
    """

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype):
        self.shape = shape

        def normal(*size: int, scale: float = 0.02) -> torch.Tensor:
            return (torch.randn(*size, device=device) * scale).to(dtype)

        def ones(size: int) -> torch.Tensor:
            return torch.ones(size, device=device, dtype=dtype)

        hidden, ff, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
        q_size, kv_size = shape.heads * dim, shape.kv_heads * dim
        self.layers = [
            {
                "qkv": normal(q_size + 2 * kv_size, hidden),
                "o": normal(hidden, q_size),
                "gate_up": normal(2 * ff, hidden),
                "down": normal(hidden, ff),
                "input_norm": ones(hidden),
                "post_norm": ones(hidden),
                "q_norm": ones(dim),
                "k_norm": ones(dim),
            }
            for _ in range(shape.layers)
        ]
        self.norm = ones(hidden)
        self.embedding = normal(shape.vocab_size, hidden)
        self.head = normal(shape.vocab_size, hidden)
        cache = (shape.batch, shape.kv_heads, shape.capacity, dim)
        self.keys = [normal(*cache, scale=1.0) for _ in range(shape.layers)]
        self.values = [normal(*cache, scale=1.0) for _ in range(shape.layers)]
        pairs = torch.arange(0, dim, 2, device=device).float() / dim
        self.inverse_frequency = ROPE_THETA**-pairs
        self.ids = torch.full((shape.batch, shape.block_size), MASK_ID, device=device)
        self.positions = shape.context + torch.arange(shape.block_size, device=device)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draft logits `[B, block - 1, V]` of blocks `ids [B, block]` behind the context."""
        x = F.embedding(ids, self.embedding)
        angles = positions[:, None] * self.inverse_frequency
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            x = x + self._attention(layer, keys, values, x, positions, cos, sin)
            gate_up = _rms_norm(x, layer["post_norm"]) @ layer["gate_up"].T
            gate, up = gate_up.chunk(2, -1)
            x = x + (F.silu(gate) * up) @ layer["down"].T
        return _rms_norm(x, self.norm)[:, 1:] @ self.head.T

    def _attention(self, layer, keys, values, x, positions, cos, sin):
        shape = self.shape
        split = [shape.heads, shape.kv_heads, shape.kv_heads]
        qkv = _rms_norm(x, layer["input_norm"]) @ layer["qkv"].T
        q, k, v = qkv.view(*x.shape[:2], sum(split), shape.head_dim).split(split, 2)
        q = _rotate(_rms_norm(q, layer["q_norm"]), cos, sin)
        k = _rotate(_rms_norm(k, layer["k_norm"]), cos, sin)
        keys.index_copy_(2, positions, k.transpose(1, 2))
        values.index_copy_(2, positions, v.transpose(1, 2))
        seen = shape.context + shape.block_size
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys[:, :, :seen], values[:, :, :seen], enable_gqa=True
        )
        return out.transpose(1, 2).flatten(2) @ layer["o"].T


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


@torch.inference_mode()
def graph_milliseconds(function, *args, repeats: int = 5, replays: int = 50) -> float:
    """Median time of one replay of `function(*args)` captured as a CUDA graph."""
    warm_up = torch.cuda.Stream()
    with torch.cuda.stream(warm_up):
        for _ in range(3):
            function(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(*args)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / replays * 1e3)
    return statistics.median(times)


def measure(rival: Rival, proposals: list[str]) -> Iterator[tuple[str, float]]:
    """What was timed ("argmax", "argmax compiled" and so on), milliseconds a round."""
    for name in proposals:

        def draft(ids, positions, propose=PROPOSALS[name]):
            return propose(rival.logits(ids, positions))

        compiled = torch.compile(draft, mode="max-autotune-no-cudagraphs")
        for label, function in ((name, draft), (f"{name} compiled", compiled)):
            milliseconds = graph_milliseconds(function, rival.ids, rival.positions)
            print(f"torch, one CUDA graph, {label}: {milliseconds:.3f} ms", flush=True)
            yield label, milliseconds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for field in dataclasses.fields(Shape):
        parser.add_argument("--" + field.name.replace("_", "-"), type=int, default=field.default)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--proposal", choices=PROPOSALS, action="append", help="default: all")
    args = vars(parser.parse_args(argv))
    dtype, proposals = args.pop("dtype"), args.pop("proposal") or list(PROPOSALS)
    if not torch.cuda.is_available():
        print("torch_round.py: expected a CUDA GPU, found none", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    shape = Shape(**args)
    figures: dict[str, float] = {}
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "dtype": dtype,
        "shape": dataclasses.asdict(shape),
        "milliseconds": figures,
    }
    for label, milliseconds in measure(Rival(shape, "cuda", getattr(torch, dtype)), proposals):
        figures[label] = milliseconds
        print(json.dumps(report), flush=True)  # after each: compiling may run out of time
    return 0


if __name__ == "__main__":
    sys.exit(main())
