"""What a target must offer, and where to load one from.

A target is a pytree (weights inside, geometry static) whose methods are pure, so that it passes
through `jax.jit` like any array. Everything above (round, loop, session) speaks this protocol
only; `dense.DenseTarget` is the built-in one.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from dflash_jax.config import DFlashConfig
from dflash_jax.kernels import Implementation


class TargetOutput(NamedTuple):
    """One target forward over `rows` new tokens.

    hidden: `[B, rows, H]`, after the final norm: what `logits` takes.
    taps: `[B, rows, taps * H]`, outputs of the tapped layers, concatenated in the given order.
    """

    hidden: jax.Array
    taps: jax.Array


@runtime_checkable
class Target(Protocol):
    """The target side of speculative decoding. `B` sequences, each at its own length."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """Tokens that can be chosen; padding rows of the tables are not among them."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Default stop tokens (the model's eos ids)."""
        ...

    @property
    def max_positions(self) -> int:
        """Longest context the model was made for."""
        ...

    def check_drafter(self, config: DFlashConfig) -> None:
        """Raise ValueError when a drafter of this config does not fit."""
        ...

    def embed(self, ids: jax.Array) -> jax.Array:
        """Token ids `[B, rows]` -> embedding rows `[B, rows, H]`."""
        ...

    def init_state(self, batch: int, slots: int) -> Any:
        """An empty state (KV cache, recurrent state) with room for `slots` rows a sequence.

        The state is a pytree with a field `len [B]`, the rows committed; every leaf leads with the
        batch, so that sequences can join and leave.
        """
        ...

    def forward(
        self,
        state: Any,
        ids: jax.Array,
        taps: tuple[int, ...],
        implementation: Implementation = None,
    ) -> tuple[TargetOutput, Any]:
        """Run `ids [B, rows]` at positions `state.len ..`, causally, committing nothing.

        `taps` are layer ids (id L = the output of layer L; the last layer's is after the final
        norm). `implementation`: of the ops that have kernels, see `kernels.resolve`. The returned
        state carries the rows as candidates for `commit`.
        """
        ...

    def commit(self, state: Any, count: jax.Array) -> Any:
        """Keep the first `count [B]` rows of the last `forward`, drop the others."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """`[..., H]` -> f32 `[..., V]`; entries that may never be chosen hold finfo.min."""
        ...


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Refuse taps outside 0..num_layers - 1 or given twice (ValueError naming id and count)."""
    bad = sorted({i for i in taps if not 0 <= i < num_layers or taps.count(i) > 1})
    if bad:
        raise ValueError(
            f"taps: expected distinct layer ids in 0..{num_layers - 1} "
            f"({num_layers} layers), found {bad} in {list(taps)}"
        )


def __getattr__(name: str) -> Any:
    # The loaders stand on the decoder, which stands on this module: import them when asked for.
    if name in ("LoadedTarget", "load_target"):
        from dflash_jax.targets import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
