"""What a target must offer, and where to load one from.

A target is a pytree (weights inside, geometry static) whose methods are pure, so that it passes
through `jax.jit` like any array. Everything above (round, loop, session) speaks this protocol
only; `dense.DenseTarget` is the built-in one. A target that runs outside JAX offers `HostedTarget`
instead and is driven from the host (`hosted.py`); `torch.TorchTarget` is that.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from dflash_jax.config import DFlashConfig
from dflash_jax.kernels import Implementation
from dflash_jax.tree import DraftTree


class TargetOutput(NamedTuple):
    """One target forward over `rows` new tokens.

    hidden: `[B, rows, H]`, after the final norm: what `logits` takes.
    taps: `[B, rows, taps * H]`, outputs of the tapped layers, concatenated in the given order.
    """

    hidden: jax.Array
    taps: jax.Array


@runtime_checkable
class Target(Protocol):
    """The target side of speculative decoding. `B` sequences, each at its own length.

    A target that takes draft trees is a `TreeTarget`.
    """

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


@runtime_checkable
class TreeTarget(Target, Protocol):
    """A target whose `forward` and `commit` take draft trees, too."""

    takes_trees: bool

    def forward(
        self,
        state: Any,
        ids: jax.Array,
        taps: tuple[int, ...],
        implementation: Implementation = None,
        tree: DraftTree | None = None,
    ) -> tuple[TargetOutput, Any]:
        """tree: of whose nodes `ids` are the tokens. Node i stands at position `state.len + depth`
        and sees the committed rows, those of the spine before it, and itself."""
        ...

    def commit(
        self,
        state: Any,
        count: jax.Array,
        path: jax.Array | None = None,
        implementation: Implementation = None,
    ) -> Any:
        """path `[B, n]`: the rows of the last `forward` whose first `count` are to be kept, in this
        order: ascending but for repetitions of its last."""
        ...


def takes_trees(target: Any) -> bool:
    """Whether a target verifies draft trees."""
    return isinstance(target, TreeTarget) and target.takes_trees


class HostedOutput(NamedTuple):
    """One forward of a hosted target, as arrays of JAX on its device.

    logits: `[B, rows, V]` (`[B, 1, V]` where only the last row's were asked for), any float type.
    taps: `[B, rows, taps * H]`. Both hold zeros past a sequence's count.
    """

    logits: jax.Array
    taps: jax.Array


@runtime_checkable
class HostedTarget(Protocol):
    """A target that runs outside compiled programs. `B` sequences, each at its own length.

    Not a pytree, and its states are no pytrees either: objects with a field `len [B]` (NumPy
    int32) that a call may change in place, so that each is used once, like a donated array.

    May have `edges`, lengths of a text at which it says that it changes its way, for the doctor.
    """

    @property
    def tables(self) -> Any:
        """The part of it that drafting needs in compiled programs: a pytree with `embed`, `logits`
        and `vocab_size` as in `Target`; the doctor looks at its `embedding` `[rows, H]`, too."""
        ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def max_positions(self) -> int: ...

    def check_drafter(self, config: DFlashConfig) -> None: ...

    def init_state(self, batch: int, slots: int) -> Any: ...

    def forward(
        self,
        state: Any,
        ids: jax.Array,
        count: np.ndarray,
        taps: tuple[int, ...],
        last_only: bool = False,
    ) -> tuple[HostedOutput, Any]:
        """Run the first `count [B]` of `ids [B, rows]` at positions `state.len ..`, committing
        nothing. last_only: logits of each sequence's last row alone."""
        ...

    def commit(self, state: Any, count: np.ndarray) -> Any:
        """Keep the first `count [B]` rows of the last `forward`, take the others back."""
        ...


AnyTarget = Target | HostedTarget


def drafting_tables(target: AnyTarget) -> Any:
    """What drafting needs of a target in compiled programs: all of it, or a hosted one's tables."""
    return target.tables if isinstance(target, HostedTarget) else target


ROUNDING_F32, ROUNDING_16_BIT = 1e-3, 0.1
"""What is rounding alone between logits that should be the same, as a share of a size that matters;
of weights in 16 bits with an expert or two that it tips over."""


def rounding(bytes_of_a_weight: int) -> float:
    """The share up to which logits of a target of such weights count as the same."""
    return ROUNDING_F32 if bytes_of_a_weight >= 4 else ROUNDING_16_BIT


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
