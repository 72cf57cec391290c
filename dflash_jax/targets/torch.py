"""A PyTorch causal language model of `transformers` as a target: what has no port to JAX runs too.

    model = AutoModelForCausalLM.from_pretrained("org/name", dtype=torch.bfloat16).to("cuda").eval()
    out = generate(TorchTarget(model), draft, prompt)

The model decides every token: its own logits are verified. It runs eagerly, a forward a sequence a
round, between the compiled halves of a round (`hosted.py`). Token ids, logits, taps and the two
tables that drafting needs change sides over DLPack: on one device nothing is copied.
"""

import copy
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from safetensors import SafetensorError

from dflash_jax.config import DFlashConfig, check_against_target
from dflash_jax.extras import require
from dflash_jax.layers import linear
from dflash_jax.targets import HostedOutput, check_taps, rounding
from dflash_jax.tensor_files import compute_dtype

ENDLESS = 2**30
"""`max_positions` of a model whose config names none."""
PROBE = 8
"""Tokens of the check that a model can go on from a cache and take rows back."""


class TorchTables(struct.PyTreeNode):
    """Embedding `[rows, H]`, output head `[V, H]` and its bias: the torch weights, not copies."""

    embedding: jax.Array
    lm_head: jax.Array
    bias: jax.Array | None

    @property
    def vocab_size(self) -> int:
        return self.lm_head.shape[0]

    def embed(self, ids: jax.Array) -> jax.Array:
        return self.embedding[ids]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The head alone, as drafters use it: what a model does to its own logits is not done."""
        logits = linear(hidden.astype(self.lm_head.dtype), self.lm_head, dtype=jnp.float32)
        return logits if self.bias is None else logits + self.bias.astype(jnp.float32)


@dataclasses.dataclass
class Row:
    """One sequence: its cache, the ids of the last forward, and the cache's layers before it (None
    where rows are taken back by cropping).

    Of a model that changes its rope on the way (`_rope_switch`): text, the ids committed so far, as
    long as it has not; beyond, where the last forward reached it, the cache that holds from there
    on, and the rows that came before."""

    cache: Any
    ids: Any = None
    before: list[Any] | None = None
    text: Any = None
    beyond: tuple[Any, int] | None = None


@dataclasses.dataclass(frozen=True)
class TorchState:
    """len `[B]`: rows committed. rows: a transformers cache each, so that no sequence sees another,
    whatever their lengths."""

    len: np.ndarray
    rows: list[Row]


class TorchTarget:
    """A `transformers` causal language model as a `HostedTarget`.

    Args:
      model: in eval mode, all of it on one device, the one that JAX runs on.

    The wrapper runs the model a few times to see that it can go on from a cache and take rows
    back: attention layers by cropping, others (linear attention, state spaces, convolutions) from
    a copy of their state and a replay of the rows that stay. A longrope model has another rope for
    every position once its text is long: there it reads the text again.

    ValueError or NotImplementedError names what does not fit.

    edges: lengths of a text at which the config says that the model changes its way.
    """

    mesh = None
    """It is on one device."""

    def __init__(self, model: Any):
        self._torch = require("torch", "torch")
        self._transformers = require("transformers", "torch")
        self.model = model
        self.device = _device_of(model)
        config = model.config
        self.name = f"model_type {config.model_type!r}"
        if getattr(config, "is_encoder_decoder", False):
            raise NotImplementedError(f"{self.name}: expected a decoder, found an encoder-decoder")
        text = config.get_text_config(decoder=True)
        self.hidden_size, self.num_layers = text.hidden_size, text.num_hidden_layers
        self.max_positions = getattr(text, "max_position_embeddings", None) or ENDLESS
        self.stop_token_ids = _stop_ids(getattr(model, "generation_config", None), text)
        self._arguments = inspect.signature(model.forward).parameters
        self.tables = _tables_of(model, self.name, self.hidden_size)
        self._crops = all(map(_crops, self._new_cache().layers))
        self._switch = _rope_switch(text, self.name)
        lengths = [getattr(text, n, None) for n in ("sliding_window", "attention_chunk_size")]
        self.edges = tuple(n for n in (*lengths, self._switch) if n)
        if self._switch is not None and not self._crops:
            raise NotImplementedError(
                f"{self.name}: expected attention alone with longrope, found recurrent layers"
            )
        self._check()

    @property
    def embedding(self) -> jax.Array:
        """The input table `[rows, H]`."""
        return self.tables.embedding

    @property
    def lm_head(self) -> jax.Array:
        """The output table `[V, H]`, tied or not."""
        return self.tables.lm_head

    @property
    def vocab_size(self) -> int:
        return self.tables.vocab_size

    def check_drafter(self, config: DFlashConfig) -> None:
        check_against_target(
            config,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            embedding_rows=self.embedding.shape[0],
        )

    def init_state(self, batch: int, slots: int) -> TorchState:
        """Empty caches; they grow as rows come, whatever the `slots`."""
        empty = self._torch.zeros((1, 0), dtype=self._torch.long, device=self.device)
        text = None if self._switch is None else empty
        rows = [Row(self._new_cache(), text=text) for _ in range(batch)]
        return TorchState(np.zeros(batch, np.int32), rows)

    def forward(
        self,
        state: TorchState,
        ids: jax.Array,
        count: np.ndarray,
        taps: tuple[int, ...] = (),
        last_only: bool = False,
    ) -> tuple[HostedOutput, TorchState]:
        check_taps(taps, self.num_layers)
        torch, rows = self._torch, ids.shape[1]
        tokens = torch.from_dlpack(jax.block_until_ready(ids)).to(self.device).long()
        pieces = []
        for b, row in enumerate(state.rows):
            row.ids = tokens[b : b + 1, : count[b]]
            row.before = None if self._crops else [_kept(layer) for layer in row.cache.layers]
            if count[b]:
                pieces.append(self._read(row, int(state.len[b]), taps, int(last_only)))
            else:
                pieces.append(None)
        logits = self._side_by_side([p and p[0] for p in pieces], 1 if last_only else rows)
        tapped = self._side_by_side([p and p[1] for p in pieces], rows, len(taps))
        return HostedOutput(jnp.from_dlpack(logits), jnp.from_dlpack(tapped)), state

    def commit(self, state: TorchState, count: np.ndarray) -> TorchState:
        torch = self._torch
        for b, row in enumerate(state.rows):
            ran, kept = row.ids.shape[1], int(count[b])
            if row.text is not None:
                row.text = torch.cat([row.text, row.ids[:, :kept]], dim=1)
            if row.beyond is not None:
                cache, short = row.beyond
                if kept > short:
                    row.cache, row.text = cache, None
                else:
                    ran = short
                row.beyond = None
            if row.before is None:
                if ran:
                    # Of all rows kept, too: sliding layers then drop what left their window.
                    row.cache.crop(kept - ran)
            elif kept < ran:
                row.cache.layers = row.before
                if kept:
                    self._run(row.cache, row.ids[:, :kept], int(state.len[b]), (), keep=1)
            row.ids = row.before = None
        return TorchState(state.len + count.astype(np.int32), state.rows)

    def _new_cache(self) -> Any:
        cache = self._transformers.DynamicCache(config=self.model.config)
        if not hasattr(cache, "activate_past_recording"):
            raise NotImplementedError(
                "transformers: expected a version whose caches record their past (5.15 does), "
                f"found {self._transformers.__version__}"
            )
        if all(map(_crops, cache.layers)):
            cache.activate_past_recording()
        return cache

    def _read(self, row: Row, start: int, taps: tuple[int, ...], keep: int) -> tuple[Any, Any]:
        """One sequence's rows, `row.ids`: logits `[1, n, V]` (of the last `keep`, 0: all), taps.

        Rows on both sides of a rope's switch are read as each would be alone: those before it by
        the cache, those behind it after the whole text in the other rope (`row.beyond`). Taps that
        were handed out before stay what they were, so a prompt's do not depend on its chunks.
        """
        torch, rows = self._torch, row.ids.shape[1]
        if self._switch is None or not start <= self._switch < start + rows:
            return self._run(row.cache, row.ids, start, taps, keep)
        cache, short = row.beyond = self._new_cache(), self._switch - start
        long, again = rows - short, torch.cat([row.text, row.ids], dim=1)
        logits, tapped = self._run(cache, again, 0, taps, min(keep or long, long))
        parts = [(logits, tapped[:, -long:])]
        if short:
            parts.insert(0, self._run(row.cache, row.ids[:, :short], start, taps, keep))
        logits, tapped = (torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True))
        return logits[:, -(keep or rows) :], tapped

    def _run(
        self, cache: Any, ids: Any, start: int, taps: tuple[int, ...], keep: int
    ) -> tuple[Any, Any]:
        """One forward of one sequence: logits `[1, n, V]` (of the last `keep`, 0: all) and taps."""
        torch = self._torch
        given = {
            "input_ids": ids,
            "position_ids": start + torch.arange(ids.shape[1], device=self.device)[None],
            "cache": cache,
            "past_key_values": cache,
            "use_cache": True,
            "output_hidden_states": bool(taps),
            "logits_to_keep": keep,
        }
        if "cache" in self._arguments:  # the newer name; some versions take both
            del given["past_key_values"]
        known = {name: value for name, value in given.items() if name in self._arguments}
        if taps:
            known["output_hidden_states"] = True  # some take it as a keyword of no name
        with torch.inference_mode():
            out = self.model(**known)
            logits = out.logits[:, -keep:]  # 0: of all rows
            if not taps:
                return logits, logits.new_zeros((1, ids.shape[1], 0))
            hidden = out.hidden_states
            if hidden is None or len(hidden) != self.num_layers + 1:
                found = "none" if hidden is None else len(hidden)
                raise NotImplementedError(
                    f"{self.name}: expected {self.num_layers + 1} hidden states, found {found}"
                )
            return logits, torch.cat([hidden[i + 1] for i in taps], dim=-1)

    def _side_by_side(self, pieces: list[Any], rows: int, taps: int | None = None) -> Any:
        """Pieces `[1, n, W]` (None: no rows) as one tensor `[B, rows, W]`, zeros behind."""
        torch = self._torch
        if len(pieces) == 1 and pieces[0] is not None and pieces[0].shape[1] == rows:
            return pieces[0].contiguous()
        width = self.vocab_size if taps is None else taps * self.hidden_size
        first = next((p for p in pieces if p is not None), None)
        dtype = self.model.dtype if first is None else first.dtype
        out = torch.zeros((len(pieces), rows, width), dtype=dtype, device=self.device)
        for b, piece in enumerate(pieces):
            if piece is not None:
                out[b, : piece.shape[1]] = piece[0]
        return out

    def _check(self) -> None:
        """Refuse a model that cannot go on from its cache, take rows back, or show its layers.

        Logits after context, wrong rows taken back and the true ones in their place (several, then
        one alone) must be those of one forward over it all, measured by how far from them are
        logits without the context.
        """
        half, last = PROBE // 2, (self.num_layers - 1,)
        ids = (np.arange(PROBE, dtype=np.int32) * 7919 + 1) % self.vocab_size
        wrong = np.concatenate([ids[:half], ids[:half]])

        def logits(state: TorchState, rows: np.ndarray, keep: int) -> tuple[Any, TorchState]:
            count = np.array([len(rows)], np.int32)
            out, state = self.forward(state, jnp.asarray(rows[None]), count, last)
            kept = np.array([keep], np.int32)
            return np.asarray(out.logits[0], np.float64), self.commit(state, kept)

        try:
            whole, _ = logits(self.init_state(1, PROBE), ids, PROBE)
            alone, _ = logits(self.init_state(1, PROBE), ids[half:], half)
            _, state = logits(self.init_state(1, PROBE), wrong, half)
            several, state = logits(state, ids[half:-1], half - 1)
            one, _ = logits(state, ids[-1:], 1)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise NotImplementedError(
                f"{self.name}: cannot be driven with a cache ({reason})"
            ) from error
        if whole.shape[-1] != self.vocab_size:
            raise NotImplementedError(
                f"{self.name}: expected logits of the head's {self.vocab_size} rows, "
                f"found {whole.shape[-1]}"
            )
        off = np.linalg.norm(np.concatenate([several, one]) - whole[half:])
        forgot = np.linalg.norm(alone - whole[half:])
        share = off / forgot if forgot else np.inf
        if np.isnan(off):
            raise ValueError(f"{self.name}: expected logits that are numbers, found NaN")
        if not share <= rounding(self.model.dtype.itemsize):
            raise NotImplementedError(
                f"{self.name}: expected a cache that goes on where it was and takes rows back, "
                f"found logits off by {share:.2g} of what no cache at all does"
            )


def load_torch(directory: str | Path, dtype: Any = None, **options: Any) -> TorchTarget:
    """Load a Hugging Face directory with `transformers`.

    Args:
      directory: what `AutoModelForCausalLM.from_pretrained` takes as a local directory.
      dtype: of the weights; default f32 on a CPU, bf16 elsewhere.
      **options: further ones of `from_pretrained` (`attn_implementation`, `trust_remote_code`).

    Raises OSError or ValueError naming the directory, and the tensor, where weights are missing or
    damaged; for what is not taken see `TorchTarget`.
    """
    torch, transformers = require("torch", "torch"), require("transformers", "torch")
    kind = getattr(torch, str(compute_dtype(dtype)))
    options = {"dtype": kind, "local_files_only": True} | options | {"output_loading_info": True}
    load = transformers.AutoModelForCausalLM.from_pretrained
    try:
        model, told = load(str(directory), **options)
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(f"{directory}: expected weights that load, found: {error}") from error
    absent = sorted(told["missing_keys"])  # which transformers would make up
    if absent:
        more = f" (nor {len(absent) - 1} others)" if len(absent) > 1 else ""
        raise ValueError(f"{directory}: expected a tensor {absent[0]}, found none{more}")
    return TorchTarget(model.to("cpu" if jax.default_backend() == "cpu" else "cuda").eval())


def _device_of(model: Any) -> Any:
    """The model's device; ValueError unless all of it lies on JAX's own, in eval mode."""
    if not hasattr(model, "get_output_embeddings"):
        raise ValueError(f"model: expected a transformers model, found a {type(model).__name__}")
    if model.training:
        raise ValueError("model: expected eval mode (model.eval()), found training mode")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"model: expected one device, found {found}")
    (device,) = devices
    ours = "cpu" if jax.default_backend() == "cpu" else "cuda"
    if device.type != ours:
        raise ValueError(f"model: expected it on JAX's device ({ours}), found {device}")
    return device


def _tables_of(model: Any, name: str, hidden_size: int) -> TorchTables:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    found = {"embedding": embedding, "output head": head}
    for what, module in found.items():
        weight = getattr(module, "weight", None)
        if weight is None or weight.ndim != 2 or not weight.is_floating_point():
            raise NotImplementedError(
                f"{name}: expected an {what} of float weights, found {module}"
            )
        if weight.shape[1] != hidden_size:
            raise NotImplementedError(
                f"{name}: expected an {what} of width {hidden_size}, found {weight.shape[1]}"
            )
    bias = getattr(head, "bias", None)
    return TorchTables(
        embedding=jnp.from_dlpack(embedding.weight.detach()),
        lm_head=jnp.from_dlpack(head.weight.detach()),
        bias=None if bias is None else jnp.from_dlpack(bias.detach()),
    )


def _rope_switch(text: Any, name: str) -> int | None:
    """The position from which on a longrope model takes its long factors, for all of its text."""
    rope = getattr(text, "rope_parameters", None) or {}
    tables = [t for t in (rope, *rope.values()) if isinstance(t, dict)]  # one, or one a layer type
    found = {
        table.get("original_max_position_embeddings")
        or getattr(text, "original_max_position_embeddings", None)
        for table in tables
        if table.get("rope_type") == "longrope"
    }
    if len(found) > 1 or None in found:
        raise NotImplementedError(
            f"{name}: expected one original_max_position_embeddings of its longrope, found "
            f"{sorted(map(str, found))}"
        )
    return found.pop() if found else None


def _stop_ids(*configs: Any) -> tuple[int, ...]:
    """`eos_token_id` of every config: a number, a list or none."""
    ids: list[int] = []
    for config in configs:
        value = getattr(config, "eos_token_id", None)
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def _crops(layer: Any) -> bool:
    """Whether a cache layer holds rows alone: those with a state besides cannot take rows back."""
    return hasattr(layer, "crop") and not hasattr(layer, "conv_states")


def _kept(layer: Any) -> Any:
    """A cache layer as it is now: recurrent states are written in place, so they are copied; keys
    and values are replaced as they grow, so those of now stay what they are."""
    kept = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            copies = {i: v.clone() if hasattr(v, "clone") else v for i, v in value.items()}
            setattr(kept, name, copies)
    return kept
