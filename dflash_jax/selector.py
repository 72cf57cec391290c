"""DFlash2's candidate selector: top-k candidates a slot, and a path through them.

`score[k] = unary[p, k] + sum_r pred[prev, r] * hproj[p, r] * succ[cand[p, k], r]`: each slot's
choice depends on the token chosen before it, the anchor for slot 0. Everything here is for one
sequence; batches are vmapped. Two forms of each walk give equal paths: the sequential one
(`lax.scan`), and the lattice, which scores all k x k pairs of a slot at once and then only chases
indices. A third, the GPU kernel, is one launch for a path. Source: z-lab/dflash
`CandidateSelector`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dflash_jax import kernels, sharding
from dflash_jax.kernels import Implementation
from dflash_jax.layers import linear
from dflash_jax.sampling import GREEDY_TEMPERATURE, first_false, inverse_cdf
from dflash_jax.sharding import DATA, MODEL

MOST_CANDIDATES, MOST_ROWS = 64, 65535
"""Of the top-k kernel: k, and rows in one call."""
MOST_TILE = 1 << 14
"""Of the walk kernel: one slot's codebook entries, k * R, which it holds in registers."""


class DFlash2Head(struct.PyTreeNode):
    """The selector: hidden_projection `[R, H]`, predecessor and successor codebooks `[V, R]`."""

    hidden_projection: jax.Array
    predecessor: jax.Array
    successor: jax.Array
    top_k: int = struct.field(pytree_node=False)


class Walk(NamedTuple):
    """A path `[nd]` of token ids, and the law it was drawn from.

    chosen: `[nd]` index of each choice among its slot's candidates; q_rows: `[nd, k]` each slot's
    law given its predecessor; q_chosen: `[nd]`, `q_rows[p, chosen[p]]` bit for bit.
    """

    path: jax.Array
    chosen: jax.Array
    q_chosen: jax.Array
    q_rows: jax.Array


def top_candidates(
    logits: jax.Array, k: int, implementation: Implementation = None, mesh: Mesh | None = None
) -> tuple[jax.Array, jax.Array]:
    """The k best of each row `[..., V]`: (unary, ids) `[..., k]`, descending, ties by lower id.

    A NaN counts as the greatest and comes out first; `candidate_fault` finds it. Below it the order
    is the total order of floats: 0 before -0. The kernel gives the very same arrays. Raises
    NotImplementedError as `kernels.resolve` does.

    mesh: for `[B, nd, V]` split over its `model` axis by vocabulary, where that divides it; the
    arrays are the same again.
    """
    if mesh is not None:
        best = partial(top_candidates, implementation=implementation)
        if sharding.divides(mesh, logits.shape[-1]):
            return _by_vocabulary(logits, k, best, mesh)
        return sharding.by_sequence(partial(best, k=k), mesh, shared=0, rows=1)(logits)
    if kernels.resolve(implementation, _top_k_refusal(logits, k)) == "pallas":
        return kernels.kernel("topk").top_k(logits, k)
    # A NaN with its sign bit set, which x86 arithmetic makes, would come out last.
    best = jax.lax.top_k(jnp.where(jnp.isnan(logits), jnp.nan, logits), k)
    # Where XLA folds the slices of its result into what reads them, it sorts the whole vocabulary:
    # 200 ms instead of one for 11 rows of 49152 on a CPU.
    # Two barriers: one over both aborts XLA's compiler on a CPU inside shard_map (jax 0.10.2).
    unary, ids = (jax.lax.optimization_barrier(part) for part in best)
    return unary, ids.astype(jnp.int32)


def _by_vocabulary(logits, k: int, best: Callable[..., Any], mesh: Mesh) -> Any:
    """`best(rows, k)` -> (values, ids) of rows whose vocabulary is split over a mesh: each shard's
    own, then the best of those. Shards hold ascending ids, so a tie still goes to the lower one.
    """

    def shard(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        size = rows.shape[-1]
        values, ids = best(rows, min(k, size))
        ids = ids + jax.lax.axis_index(MODEL) * size
        last = values.ndim - 1
        values, ids = (jax.lax.all_gather(x, MODEL, axis=last, tiled=True) for x in (values, ids))
        values, places = best(values, k)
        return values, jnp.take_along_axis(ids, places, axis=-1)

    split, joined = P(DATA, None, MODEL), P(DATA)
    return jax.shard_map(
        shard, mesh=mesh, in_specs=(split,), out_specs=(joined, joined), check_vma=False
    )(logits)


def _top_k_refusal(logits: jax.Array, k: int) -> str | None:
    *lead, vocabulary = logits.shape
    most = min(MOST_CANDIDATES, vocabulary)
    if not 1 <= k <= most:
        return f"k: expected 1 to {most}, found {k}"
    if not 1 <= math.prod(lead) <= MOST_ROWS:
        return f"rows of logits: expected 1 to {MOST_ROWS}, found {math.prod(lead)}"
    return _dtype_refusal("logits", logits.dtype)


def _dtype_refusal(name: str, dtype: jnp.dtype) -> str | None:
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"{name}: expected float32 or bfloat16, found {dtype}"
    return None


def best_ids(
    logits: jax.Array, implementation: Implementation = None, mesh: Mesh | None = None
) -> jax.Array:
    """`jnp.argmax` of each row `[..., V]` as int32: the first NaN where there is one.

    implementation: XLA unless the kernel is asked for, which was measured slower. Raises
    NotImplementedError as `kernels.resolve` does. mesh: as in `top_candidates`.
    """
    if kernels.resolve(implementation, _top_k_refusal(logits, 1), best="xla") == "pallas":
        argmax = kernels.kernel("topk").argmax
        if mesh is None or not sharding.divides(mesh, logits.shape[-1]):
            return sharding.by_sequence(argmax, mesh, shared=0, rows=1)(logits)

        def best(rows: jax.Array, _: int) -> tuple[jax.Array, jax.Array]:
            ids = argmax(rows)[..., None]
            return jnp.take_along_axis(rows, ids, axis=-1), ids

        return _by_vocabulary(logits, 1, best, mesh)[1][..., 0]
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def candidate_fault(unary: jax.Array) -> jax.Array:
    """First slot of `[..., nd, k]` that has a NaN or fewer than k finite candidates, -1 if none."""
    return first_false(jnp.isfinite(unary).all(axis=-1))


def hidden_projection(head: DFlash2Head, hidden: jax.Array) -> jax.Array:
    """Draft rows `[..., nd, H]` -> `[..., nd, R]` in f32."""
    return linear(hidden, head.hidden_projection, dtype=jnp.float32)


def dflash2_walk_greedy(
    pred, succ, unary, cand, hproj, anchor, implementation: Implementation = None
) -> jax.Array:
    """The greedy path `[nd]`: argmax of each slot's scores, ties to the lowest candidate index.

    Args:
      pred, succ: codebooks `[V, R]`. unary, cand: `[nd, k]` from `top_candidates`.
      hproj: `[nd, R]` from `hidden_projection`. anchor: the token before slot 0.
      implementation: the kernel sums over R in another order, so scores agree to 1e-6, and paths
        wherever no two scores are that close.

    Raises NotImplementedError as `kernels.resolve` does.
    """
    walk = (pred, succ, unary, cand, hproj, anchor)
    return _walk("greedy", lambda *walk: _scan_greedy(*walk)[0], implementation, *walk)


def dflash2_walk_greedy_q(
    pred, succ, unary, cand, hproj, anchor, implementation: Implementation = None
) -> tuple[jax.Array, jax.Array]:
    """`dflash2_walk_greedy` with each choice's softmax probability at T = 1: (path, q `[nd]`)."""
    walk = (pred, succ, unary, cand, hproj, anchor)
    return _walk("greedy_q", _scan_greedy, implementation, *walk)


def _scan_greedy(pred, succ, unary, cand, hproj, anchor) -> tuple[jax.Array, jax.Array]:
    def step(prev, slot):
        scores = _scores(_rows(pred, prev), succ, *slot)
        choice = jnp.argmax(scores)
        token = slot[1][choice]
        return token, (token, jax.nn.softmax(scores)[choice])

    anchor = jnp.asarray(anchor, cand.dtype)
    return jax.lax.scan(step, anchor, (unary, cand, hproj))[1]


def dflash2_walk_sampled(
    pred,
    succ,
    unary,
    cand,
    hproj,
    anchor,
    temperature,
    uniforms,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A path drawn slot by slot from softmax(scores / temperature); no top-k or top-p here.

    Args: as `dflash2_walk_greedy`; temperature `[]`; uniforms `[nd]` in [0, 1), one a slot. The
    draw is an inverse CDF in candidate order, a residue goes to the likeliest.

    Returns (path `[nd]`, q_chosen `[nd]`, q_rows `[nd, k]`). At or below
    `sampling.GREEDY_TEMPERATURE` the path is the greedy one and each row one-hot.
    """
    walk = (pred, succ, unary, cand, hproj, anchor)
    drawn = sampled_walk(*walk, temperature, uniforms, implementation)
    return drawn.path, drawn.q_chosen, drawn.q_rows


def sampled_walk(
    pred,
    succ,
    unary,
    cand,
    hproj,
    anchor,
    temperature,
    uniforms,
    implementation: Implementation = None,
) -> Walk:
    """`dflash2_walk_sampled` with the chosen candidate indices: a `Walk`."""
    walk = (pred, succ, unary, cand, hproj, anchor, temperature, uniforms)
    return Walk(*_walk("sampled", _scan_sampled, implementation, *walk))


def _scan_sampled(pred, succ, unary, cand, hproj, anchor, temperature, uniforms) -> Walk:
    def step(prev, slot):
        *slot, u = slot
        choice, row = _draw(_scores(_rows(pred, prev), succ, *slot), temperature, u)
        token = slot[1][choice]
        return token, Walk(token, choice, row[choice], row)

    anchor = jnp.asarray(anchor, cand.dtype)
    return jax.lax.scan(step, anchor, (unary, cand, hproj, uniforms))[1]


def _walk(
    kernel: str,
    reference: Callable[..., Any],
    implementation: Implementation,
    pred,
    succ,
    unary,
    cand,
    *rest,
) -> Any:
    """A walk by the kernel of that name or by the reference, whichever shall run."""
    k, rank = cand.shape[-1], pred.shape[-1]
    refusal = _dtype_refusal("codebooks", pred.dtype)
    if k * rank > MOST_TILE:
        refusal = f"k * rank: expected at most {MOST_TILE}, found {k} * {rank}"
    chosen = kernels.resolve(implementation, refusal)
    run = getattr(kernels.kernel("walk"), kernel) if chosen == "pallas" else reference
    return run(pred, succ, unary, cand, *rest)


def pair_scores(pred, succ, unary, cand, hproj, anchor) -> jax.Array:
    """All scores of the lattice: `[nd, k, k]`, entry [p, i, j] scoring candidate j of slot p after
    candidate i of slot p - 1. Slot 0 has one predecessor, the anchor, in every row i.
    """
    first = jnp.full_like(cand[:1], anchor)
    previous = jnp.concatenate([first, cand[:-1]])
    after = jax.vmap(_scores, in_axes=(0, None, None, None, None))
    return jax.vmap(after, in_axes=(0, None, 0, 0, 0))(
        _rows(pred, previous), succ, unary, cand, hproj
    )


def lattice_walk_greedy(
    pred, succ, unary, cand, hproj, anchor, implementation: Implementation = None
) -> jax.Array:
    """`dflash2_walk_greedy` by the lattice form, where the kernel does not run."""
    walk = (pred, succ, unary, cand, hproj, anchor)
    return _walk("greedy", _lattice_greedy, implementation, *walk)


def _lattice_greedy(pred, succ, unary, cand, hproj, anchor) -> jax.Array:
    best = jnp.argmax(pair_scores(pred, succ, unary, cand, hproj, anchor), axis=-1)
    return jnp.take_along_axis(cand, _chase(best)[:, None], axis=1)[:, 0]


def lattice_walk_sampled(
    pred,
    succ,
    unary,
    cand,
    hproj,
    anchor,
    temperature,
    uniforms,
    implementation: Implementation = None,
) -> Walk:
    """`sampled_walk` by the lattice form, where the kernel does not run."""
    walk = (pred, succ, unary, cand, hproj, anchor, temperature, uniforms)
    return Walk(*_walk("sampled", _lattice_sampled, implementation, *walk))


def _lattice_sampled(pred, succ, unary, cand, hproj, anchor, temperature, uniforms) -> Walk:
    scores = pair_scores(pred, succ, unary, cand, hproj, anchor)
    over_pairs = jax.vmap(jax.vmap(_draw, in_axes=(0, None, None)), in_axes=(0, None, 0))
    choices, rows = over_pairs(scores, temperature, uniforms)
    chosen = _chase(choices)
    previous = jnp.concatenate([jnp.zeros_like(chosen[:1]), chosen[:-1]])
    rows = jnp.take_along_axis(rows, previous[:, None, None], axis=1)[:, 0]
    path = jnp.take_along_axis(cand, chosen[:, None], axis=1)[:, 0]
    q_chosen = jnp.take_along_axis(rows, chosen[:, None], axis=1)[:, 0]
    return Walk(path, chosen, q_chosen, rows)


def _scores(pred_row, succ, unary_row, cand_row, hproj_row) -> jax.Array:
    """Scores `[k]` of one slot's candidates after one predecessor: multiply, then sum, in f32."""
    pairs = jnp.sum((pred_row * hproj_row)[None] * _rows(succ, cand_row), axis=-1)
    return unary_row.astype(jnp.float32) + pairs


def _rows(codebook, ids) -> jax.Array:
    """Rows of a codebook in f32; the codebook may still be a numpy array."""
    return jnp.asarray(codebook)[ids].astype(jnp.float32)


def _draw(scores, temperature, u) -> tuple[jax.Array, jax.Array]:
    """A candidate index and the law `[k]` it was drawn from."""
    greedy = temperature <= GREEDY_TEMPERATURE
    best = jnp.argmax(scores)
    row = jax.nn.softmax(scores / jnp.where(greedy, 1.0, temperature))
    row = jnp.where(greedy, jax.nn.one_hot(best, scores.shape[0]), row)
    return jnp.where(greedy, best, inverse_cdf(row, u)), row


def _chase(next_of: jax.Array) -> jax.Array:
    """Follow `next_of [nd, k]` (a slot's choice given the one before): choices `[nd]`."""

    def step(previous, row):
        choice = row[previous]
        return choice, choice

    return jax.lax.scan(step, jnp.zeros((), next_of.dtype), next_of)[1]
