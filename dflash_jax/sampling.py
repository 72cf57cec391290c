"""Sampling: filters, penalties, rejection, residual and counter-based randomness.

One order everywhere, drafter on or off: penalties, logit bias, temperature, top-k, top-p, min-p,
renormalise. A temperature at or below `GREEDY_TEMPERATURE` is greedy in every component alike.
Everything here is for one sequence; batches are vmapped.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dflash_jax import kernels
from dflash_jax.kernels import Implementation
from dflash_jax.layers import along_last

GREEDY_TEMPERATURE = 1e-5
DIGIT = 2
"""Bits of a float that one step of `leading` settles."""
EVENTS = ("draft", "accept", "residual", "bonus")
Event = Literal["draft", "accept", "residual", "bonus"]
Kind = Literal["sampled", "top_k", "top_p", "min_p", "penalised", "biased"]
"""Parts of a compiled program that a request may need; left out where none does."""
LARGEST = 1e20
"""Bound of every number of a request: within it no f32 sum or quotient of logits overflows, and
no temperature lifts the entries that may never be chosen."""
RANGES = {
    "temperature": (Real, 0, LARGEST),
    "top_k": (Integral, 0, 2**31 - 1),
    "top_p": (Real, 0, 1),
    "min_p": (Real, 0, 1),
    "repeat_penalty": (Real, 1 / LARGEST, LARGEST),
    "frequency_penalty": (Real, -LARGEST, LARGEST),
    "presence_penalty": (Real, -LARGEST, LARGEST),
    "penalty_last_n": (Integral, -1, 2**31 - 1),
    "seed": (Integral, 0, 2**32 - 1),
    "sequence": (Integral, 0, 2**32 - 1),
}
"""Kind and range of the fields of `SamplingParams`."""


class Filters(struct.PyTreeNode):
    """temperature; top_k (0: off); top_p (1: off); min_p (0: off). Scalars, `[B]` when vmapped.

    None where no sequence has such a filter: a program without it.
    """

    temperature: jax.Array
    top_k: jax.Array | None = None
    top_p: jax.Array | None = None
    min_p: jax.Array | None = None

    @classmethod
    def off(cls, batch: int) -> "Filters":
        """Greedy, nothing filtered, for `batch` sequences."""
        return cls(jnp.zeros((batch,), jnp.float32))


class Penalties(struct.PyTreeNode):
    """repeat (1: off), frequency and presence (0: off) over the last `last_n` tokens of prompt and
    output (0: off, -1: all of them).
    """

    repeat: jax.Array
    frequency: jax.Array
    presence: jax.Array
    last_n: jax.Array


def filtered_probs(
    logits: jax.Array, filters: Filters, implementation: Implementation = None
) -> jax.Array:
    """Logits `[V]` (penalised and biased already) -> the law `[V]` a token is drawn from.

    top-k keeps exactly k, ties at the cut to the lower id. top-p keeps tokens while the
    probability before them, in descending order, is below p: at least one. min-p keeps those with
    at least min_p times the greatest probability. Greedy: one-hot on the argmax.
    """
    vocabulary = logits.shape[-1]
    greedy = filters.temperature <= GREEDY_TEMPERATURE
    x = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, filters.temperature)
    if filters.top_k is not None:
        k = jnp.where(filters.top_k <= 0, vocabulary, filters.top_k)
        kept = leading(x, jnp.ones_like(x), k.astype(jnp.float32), implementation)
        x = jnp.where(kept | (k >= vocabulary), x, -jnp.inf)
    probs = jax.nn.softmax(x)
    if filters.top_p is not None:
        kept = leading(x, probs, filters.top_p, implementation)
        probs = jnp.where(kept | (filters.top_p >= 1), probs, 0.0)
    if filters.min_p is not None:
        probs = jnp.where(probs >= filters.min_p * probs.max(), probs, 0.0)
    best = jax.nn.one_hot(jnp.argmax(logits), vocabulary)
    return jnp.where(greedy, best, probs / probs.sum())


def leading(
    x: jax.Array, weight: jax.Array, limit: jax.Array, implementation: Implementation = None
) -> jax.Array:
    """Mask `[V]` of the entries that, in descending order of `x [V]` (ties: lower index first),
    have less than `limit` of the non-negative `weight [V]` before them.

    Without a sort, which takes ten times as long: the last value that stays is found digit by
    digit, in the integers that order as floats do. In a fixed number of steps: before each step of
    a loop of unknown length, the host waits for a GPU to tell it whether to go on.

    Raises NotImplementedError as `kernels.resolve` does.
    """
    if kernels.resolve(implementation) == "pallas":
        return kernels.kernel("leading").leading(x, weight, limit)
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = np.uint32(1 << 31)
    key = jnp.where(bits >= sign, ~bits, bits | sign)
    digits = jnp.arange(1, 1 << DIGIT, dtype=jnp.uint32)

    def narrow(step: jax.Array, low: jax.Array) -> jax.Array:
        """The greatest `low` so far whose entries from it upwards still weigh `limit`."""
        shift = (32 - DIGIT * (step + 1)).astype(jnp.uint32)
        from_here = key[None] >= (low | (digits << shift))[:, None]
        reached = jnp.where(from_here, weight[None], 0.0).sum(axis=-1) >= limit
        return low | (reached.sum().astype(jnp.uint32) << shift)

    last = jax.lax.fori_loop(0, 32 // DIGIT, narrow, jnp.uint32(0))
    above, tied = key > last, jnp.where(key == last, weight, 0.0)
    before = jnp.where(above, weight, 0.0).sum() + jnp.cumsum(tied) - tied
    return above | ((key == last) & (before < limit))


def inverse_cdf(probs: jax.Array, u: jax.Array) -> jax.Array:
    """First index with `u < cdf`, in the order of `probs [n]`; a residue goes to the likeliest."""
    # Summed in parallel, an f32 cdf of many entries may rise by a rounding where nothing is added.
    first = leading_count(~((u < jnp.cumsum(probs)) & (probs > 0)))
    return jnp.where(first < probs.size, first, jnp.argmax(probs)).astype(jnp.int32)


draw = inverse_cdf
"""A token id from a law over the vocabulary, by inverse CDF in id order."""


def penalised(logits: jax.Array, counts: jax.Array, penalties: Penalties) -> jax.Array:
    """Penalise logits `[V]` by `counts [V]`, how often each id stands in the history.

    Per id that occurs: v / repeat if v > 0 else v * repeat; then minus
    frequency * count + presence.
    """
    repeated = jnp.where(logits > 0, logits / penalties.repeat, logits * penalties.repeat)
    repeated = repeated - (penalties.frequency * counts + penalties.presence)
    return jnp.where(counts > 0, repeated, logits)


def rejection_accept_len(p: np.ndarray, q: np.ndarray, u: np.ndarray) -> int:
    """How many leading drafts are accepted: slot j while `u_j * q_j < p_j`, strictly, in f64.

    Args: p, q `[nd]`, target and proposal probability of each draft; u `[nd]` uniforms.

    >>> rejection_accept_len([.9, 0, .9], [.1, .9, .1], [.5, .5, .5])
    1
    """
    p, q, u = (np.asarray(x, np.float64) for x in (p, q, u))
    accepted = u * q < p
    return int(np.cumprod(accepted).sum())


def accept_len(p: jax.Array, q: jax.Array, u: jax.Array) -> jax.Array:
    """`rejection_accept_len` inside a compiled program: f32 in, exact comparisons, `[]` int32."""
    return leading_count(product_below(u, q, p))


def leading_count(flags: jax.Array) -> jax.Array:
    """How many of `flags [..., n]` are true before the first that is not: `[...]` int32."""
    count = flags.shape[-1]
    place = along_last(np.arange(count, dtype=np.int32), flags.ndim)
    # A minimum, where a running product and its sum would be two GPU kernels.
    return jnp.min(jnp.where(flags, np.int32(count), place), axis=-1, initial=count)


def first_false(flags: jax.Array) -> jax.Array:
    """The first of `flags [..., n]` that is not true, -1 if all are: `[...]` int32."""
    count = leading_count(flags)
    return jnp.where(count < flags.shape[-1], count, -1)


def product_below(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """Whether a * b < c exactly, for non-negative f32 (what f64 arithmetic would say).

    Integer arithmetic on mantissas, so that neither f32 rounding nor a fused multiply-add of some
    backend decides a near-tie.
    """
    (ma, ea), (mb, eb), (mc, ec) = (_mantissa(x) for x in (a, b, c))
    low, high = np.uint32(0xFFF), np.uint32(12)
    al, ah, bl, bh = ma & low, ma >> high, mb & low, mb >> high
    middle = ah * bl + al * bh + ((al * bl) >> high)
    top = ah * bh + (middle >> high)  # product >> 24, in [2**22, 2**24)
    wide = top >= np.uint32(1 << 23)
    top = jnp.where(wide, top, ((ah * bh) << np.uint32(1)) + (middle >> np.uint32(11)))
    exponent = ea + eb + jnp.where(wide, 24, 23)
    below = (exponent < ec) | ((exponent == ec) & (top < mc))
    return jnp.where((ma == 0) | (mb == 0), mc > 0, (mc > 0) & below)


def _mantissa(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x = m * 2**e with m uint32 in [2**23, 2**24), or m = 0."""
    bits = jax.lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.uint32)
    exponent = (bits >> np.uint32(23)).astype(jnp.int32) & 0xFF
    fraction = bits & np.uint32(0x7FFFFF)
    normal = exponent > 0
    mantissa = jnp.where(normal, fraction | np.uint32(1 << 23), fraction)
    shift = jnp.where(normal, 0, jax.lax.clz(fraction).astype(jnp.int32) - 8)
    mantissa = jnp.where(fraction + exponent.astype(jnp.uint32) > 0, mantissa, np.uint32(0))
    mantissa = mantissa << jnp.clip(shift, 0, 31).astype(jnp.uint32)
    return mantissa, jnp.where(normal, exponent, 1) - 150 - shift


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """The law after a rejection: max(0, p - q) renormalised, `[V]`; p itself where that is zero."""
    left = jnp.maximum(p - q, 0.0)
    total = left.sum()
    return jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), p)


def residual_sparse(p: jax.Array, ids: jax.Array, q: jax.Array) -> jax.Array:
    """`residual` where the proposal's law is `q [k]` on candidates `ids [k]` and 0 elsewhere."""
    return residual(p, jnp.zeros_like(p).at[ids].add(q))


def uniform(seed: jax.Array, sequence: jax.Array, event: Event, position: jax.Array) -> jax.Array:
    """The uniform in [0, 1) of one event: a pure function of its four coordinates.

    Draft, accept, residual and bonus draws at one position are four different ones, and a request
    gets the same numbers alone, in a batch and in any slot.
    """
    return _uniform_at(event_keys(seed, sequence)[EVENTS.index(event)], position)


@jax.jit
def event_keys(seed: jax.Array, sequence: jax.Array) -> jax.Array:
    """A sequence's key for each of EVENTS, as data: uint32 `[events, 2]`."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), sequence)
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return jax.random.key_data(fold(key, jnp.arange(len(EVENTS))))


def _uniform_at(key: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position))


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """One request's sampling, in the field's usual names.

    temperature 0 is greedy. penalty_last_n: how many of the latest tokens (prompt and output) the
    penalties see; -1 all, 0 none. logit_bias: {token id: added to its logit}, -inf forbids it.
    seed and sequence pick the random numbers: the same pair gives the same tokens again.

    ValueError names a field that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = -1
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int = 0
    sequence: int = 0

    def __post_init__(self):
        for name, (kind, low, high) in RANGES.items():
            value = getattr(self, name)
            number = isinstance(value, kind) and not isinstance(value, bool)
            if not number or not low <= value <= high:
                what = "an integer" if kind is Integral else "a number"
                raise ValueError(f"{name}: expected {what} from {low} to {high}, found {value!r}")
        if self.top_p == 0:
            raise ValueError("top_p: expected more than 0, found 0")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias: expected a mapping, found {self.logit_bias!r}")
        for token, value in self.logit_bias.items():
            if not isinstance(token, Integral) or isinstance(token, bool) or token < 0:
                raise ValueError(f"logit_bias: expected token ids, found {token!r}")
            if not isinstance(value, Real) or not value <= LARGEST:
                raise ValueError(
                    f"logit_bias: expected numbers up to {LARGEST} or -inf, found {value!r}"
                )

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax."""
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def penalised(self) -> bool:
        """Whether the history matters."""
        off = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty) == (1, 0, 0)
        return self.penalty_last_n != 0 and not off

    @property
    def kinds(self) -> frozenset[Kind]:
        """What a program must be able to do for this request."""
        asked: dict[Kind, bool] = {
            "sampled": not self.greedy,
            "top_k": self.top_k > 0,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "penalised": self.penalised,
            "biased": bool(self.logit_bias),
        }
        return frozenset(kind for kind, wanted in asked.items() if wanted)


def kinds_of(params: Iterable[SamplingParams], more: Iterable[Kind] = ()) -> frozenset[Kind]:
    """The kinds of all requests together, and `more`; ValueError for one that does not exist."""
    unknown = set(more) - set(get_args(Kind))
    if unknown:
        raise ValueError(
            f"kinds: expected some of {', '.join(get_args(Kind))}, found {sorted(unknown)}"
        )
    return frozenset(more).union(*(p.kinds for p in params))


class Sampler(struct.PyTreeNode):
    """`SamplingParams` of `B` sequences on the device; `bias [B, V]` and `penalties` are None where
    no sequence has any. keys `[B, events, 2]`: their seeds and sequence numbers, see `event_keys`.
    """

    filters: Filters
    penalties: Penalties | None
    bias: jax.Array | None
    keys: jax.Array

    def uniforms(self, event: Event, positions: jax.Array) -> jax.Array:
        """The draws of one event at `positions [B, n]`."""
        over_positions = jax.vmap(_uniform_at, in_axes=(None, 0))
        return jax.vmap(over_positions)(self.keys[:, EVENTS.index(event)], positions)


def make_sampler(
    params: Sequence[SamplingParams],
    vocab_size: int,
    rows: int,
    kinds: Iterable[Kind] = (),
) -> Sampler:
    """The device form of `params`, one a sequence; `rows` is the width of the target's logits.

    kinds: what to make room for beyond what the sequences themselves need.
    """
    kinds = kinds_of(params, kinds)

    def column(name: str, dtype: Any = np.float32) -> jax.Array:
        return jnp.asarray(np.array([getattr(p, name) for p in params], dtype))

    bias = penalties = None
    if "biased" in kinds:
        table = np.zeros((len(params), rows), np.float32)
        for b, p in enumerate(params):
            for token, value in p.logit_bias.items():
                if not 0 <= token < vocab_size:
                    raise ValueError(
                        f"logit_bias: expected ids in 0..{vocab_size - 1}, found {token}"
                    )
                table[b, token] = value if value >= -LARGEST else -np.inf
        if np.isneginf(table[:, :vocab_size]).all(axis=1).any():
            raise ValueError(
                f"logit_bias: expected a token that may be chosen, found all {vocab_size} forbidden"
            )
        bias = jnp.asarray(table)
    if "penalised" in kinds:
        penalties = Penalties(
            repeat=column("repeat_penalty"),
            frequency=column("frequency_penalty"),
            presence=column("presence_penalty"),
            last_n=column("penalty_last_n", np.int32),
        )
    filters = Filters(column("temperature"))
    if "top_k" in kinds:
        filters = filters.replace(top_k=column("top_k", np.int32))
    if "top_p" in kinds:
        # A top-p that rounds to 0 would keep no token at all.
        filters = filters.replace(top_p=jnp.maximum(column("top_p"), jnp.finfo(jnp.float32).tiny))
    if "min_p" in kinds:
        filters = filters.replace(min_p=column("min_p"))
    keys = jax.vmap(event_keys)(column("seed", np.uint32), column("sequence", np.uint32))
    return Sampler(filters, penalties, bias, keys)


def shaped_logits(
    sampler: Sampler,
    logits: jax.Array,
    history: jax.Array | None,
    length: jax.Array,
    depth: jax.Array | None = None,
) -> jax.Array:
    """Penalties, then bias, on verify logits `[B, w, V]`.

    Row j sees the first `length[b] + j` tokens of `history [B, n]`: prompt, output with the
    anchor, and drafts 1..j of this round. depth `[B, w]`: of the nodes of a draft tree, which see
    the first `length[b] + depth` tokens of a history of their own, `[B, w, n]`.
    """
    if sampler.penalties is not None:
        assert history is not None
        if depth is None:
            depth = jnp.broadcast_to(jnp.arange(logits.shape[1])[None], logits.shape[:2])
        over_rows = jax.vmap(_counts, in_axes=(0 if history.ndim == 3 else None, 0, None, None))
        counts = jax.vmap(over_rows, in_axes=(0, 0, 0, None))
        ends = length[:, None] + depth
        seen = counts(history, ends, sampler.penalties.last_n, logits.shape[-1])
        over_rows = jax.vmap(penalised, in_axes=(0, 0, None))
        logits = jax.vmap(over_rows)(logits, seen, sampler.penalties)
    return logits if sampler.bias is None else logits + sampler.bias[:, None]


def _counts(history, end, last_n, vocabulary: int) -> jax.Array:
    """How often each id stands in the last `last_n` of the first `end` tokens: `[V]` f32."""
    place = jnp.arange(history.shape[0])
    begin = jnp.where(last_n < 0, 0, jnp.maximum(end - last_n, 0))
    inside = ((place >= begin) & (place < end)).astype(jnp.float32)
    return jnp.zeros((vocabulary,), jnp.float32).at[history].add(inside)
