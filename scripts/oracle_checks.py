"""The cases of `check_oracles.py`: stages of every family, tiny generations, sampling.

`FAMILY_STAGES` and `SAMPLING` say what runs; a new stage is one generator of `Check`s there.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from oracle_backbone import (
    Check,
    StageCase,
    check_backbone,
    check_layer0,
    check_rope,
    check_rounds,
    check_yarn,
    close,
    same,
)

from dflash_jax import SpecSession, load_draft, markov, sampling, selector
from dflash_jax.config_json import read_config
from dflash_jax.conv import d2_conv_finish, d2_conv_prepare
from dflash_jax.draft import DFlashDraft
from dflash_jax.kernels import Implementation
from dflash_jax.layers import linear
from dflash_jax.propose import draft_logits, propose_rows
from dflash_jax.round import propose_block
from dflash_jax.targets import Target
from dflash_jax.targets.hf import load_hf
from dflash_jax.window import DSparkVtPolicy

_propose_block = jax.jit(propose_block, static_argnames=("plan",))
_filtered = jax.jit(jax.vmap(sampling.filtered_probs, in_axes=(0, None)))

# --- draft logits, and the parts that a family adds ---------------------------------------------


@dataclasses.dataclass(frozen=True)
class RecordedHead:
    """The only part of a target that draft logits need: its output head."""

    lm_head: jax.Array

    def logits(self, hidden: jax.Array) -> jax.Array:
        return linear(hidden, self.lm_head, dtype=jnp.float32)


def check_rows(case: StageCase) -> Iterator[Check]:
    """Independent draft rows: their logits and greedy tokens, from the recorded final rows."""
    heads, final = case.arrays("heads"), jnp.asarray(case.arrays("io")["final"])
    target = RecordedHead(jnp.asarray(heads["lm_head"]))
    logits = draft_logits(target, case.draft, final[1:])  # type: ignore[arg-type]
    yield case.close("draft_logits", logits, heads["draft_logits"])
    greedy = propose_rows(case.draft, logits, case.implementation)
    yield case.same("draft_greedy", greedy, heads["draft_greedy"])


def check_conv(case: StageCase) -> Iterator[Check]:
    """DFlash2: both halves of both convolutions of every layer, on recorded inputs."""
    recorded = case.arrays("conv")
    for i, layer in enumerate(case.draft.layers):
        for kind in ("attention_conv", "mlp_conv"):
            name, conv = f"l{i}_{kind}", getattr(layer, kind)
            x, y = (jnp.asarray(recorded[f"{name}_{half}_in"]) for half in ("prepare", "finish"))
            out, dyn = d2_conv_prepare(conv, x, implementation=case.implementation)
            finished = d2_conv_finish(conv, y, dyn, implementation=case.implementation)
            parts = {
                "prepare_out": out,
                "kernel_projection_out": dyn.reshape(dyn.shape[0], -1),
                "finish_dynamic": dyn[:, 1],
                "finish_out": finished,
            }
            for part, got in parts.items():
                yield case.close(f"{name}_{part}", got, recorded[f"{name}_{part}"])


def check_selector(case: StageCase) -> Iterator[Check]:
    """DFlash2: draft logits, candidates, and both forms of the greedy and the sampled walk."""
    heads, head = case.arrays("heads"), case.draft.dflash2
    final = jnp.asarray(case.arrays("io")["final"])[1:]
    target = RecordedHead(jnp.asarray(heads["lm_head"]))
    yield case.close("raw_logits", target.logits(final), heads["raw_logits"])
    logits = draft_logits(target, case.draft, final)  # type: ignore[arg-type]
    yield case.close("draft_logits", logits, heads["draft_logits"])
    assert head is not None
    hproj = selector.hidden_projection(head, final)
    books = head.predecessor, head.successor
    inputs = *books, logits, hproj
    yield from check_walks(case.name, case.arrays("selector"), *inputs, case.implementation)


def check_selector_alone(directory: Path, implementation: Implementation) -> Iterator[Check]:
    """A case without drafter: the selector on numbers with exact ties."""
    with np.load(directory / "selector.npz") as stored:
        recorded = dict(stored)
    names = ("predecessor_codebook", "successor_codebook", "logits", "hidden_proj")
    inputs = (jnp.asarray(recorded[name]) for name in names)
    yield from check_walks(directory.name, recorded, *inputs, implementation)


def check_walks(
    case: str,
    recorded: dict[str, np.ndarray],
    pred: jax.Array,
    succ: jax.Array,
    logits: jax.Array,
    hproj: jax.Array,
    implementation: Implementation,
) -> Iterator[Check]:
    """Candidates, scores along each recorded path, and the paths of both walks."""
    yield close(case, "hidden_proj", hproj, recorded["hidden_proj"])
    unary, cand = selector.top_candidates(logits, recorded["unary"].shape[1], implementation)
    yield close(case, "unary", unary, recorded["unary"])
    yield same(case, "candidates", cand, recorded["candidates"])
    anchor = jnp.asarray(recorded["anchor"][0], jnp.int32)
    lattice = selector.pair_scores(pred, succ, unary, cand, hproj, anchor)

    def along(chosen: np.ndarray) -> jax.Array:
        return lattice[np.arange(len(chosen)), np.concatenate([[0], chosen[:-1]])]

    yield close(case, "greedy_scores", along(recorded["greedy_k"]), recorded["greedy_scores"])
    inputs = pred, succ, unary, cand, hproj, anchor
    for form in ("dflash2_walk_greedy", "lattice_walk_greedy"):
        path = getattr(selector, form)(*inputs, implementation=implementation)
        yield same(case, f"greedy_path ({form})", path, recorded["greedy_path"])
    for t in temperatures(recorded):
        name, uniforms = f"t{t}", jnp.asarray(recorded[f"t{t}_uniforms"])
        yield close(
            case, f"{name}_scores", along(recorded[f"{name}_k"]), recorded[f"{name}_scores"]
        )
        for form in ("sampled_walk", "lattice_walk_sampled"):
            draws = jnp.float32(t), uniforms
            walk = getattr(selector, form)(*inputs, *draws, implementation=implementation)
            yield same(case, f"{name}_k ({form})", walk.chosen, recorded[f"{name}_k"])
            yield same(case, f"{name}_path ({form})", walk.path, recorded[f"{name}_path"])
            yield close(case, f"{name}_q_rows ({form})", walk.q_rows, recorded[f"{name}_q_rows"])
            chosen = recorded[f"{name}_q_chosen"]
            yield close(case, f"{name}_q_chosen ({form})", walk.q_chosen, chosen)


def temperatures(recorded: dict[str, np.ndarray]) -> list[str]:
    """The temperatures that a case records draws for, as they are spelt in its names."""
    return sorted(n[1:].removesuffix("_uniforms") for n in recorded if n.endswith("_uniforms"))


def check_dspark(case: StageCase) -> Iterator[Check]:
    """DSpark: the corrected logits, the chains (greedy, sampled, teacher's) and confidences."""
    recorded, draft = case.arrays("dspark"), case.draft
    final = jnp.asarray(case.arrays("io")["final"])
    target = RecordedHead(jnp.asarray(case.arrays("heads")["lm_head"]))
    base = draft_logits(target, draft, final)  # type: ignore[arg-type]
    yield case.close("base_logits", base, recorded["base_logits"])
    head, anchor = draft.markov, jnp.asarray(recorded["anchor"][0], jnp.int32)
    assert head is not None and draft.confidence is not None
    chain = markov.dspark_chain_greedy(head, base, final, anchor)
    yield case.same("greedy_chain", chain.tokens, recorded["greedy_chain"])
    yield case.same("prev_tokens", chain.previous, recorded["prev_tokens"])
    for prefix, before, logits in (
        ("", "prev_tokens", "corrected_logits"),
        ("teacher_", "teacher_prev", "teacher_logits"),
    ):
        previous = jnp.asarray(recorded[before])
        corrected = markov.teacher_logits(head, base, final, previous)
        yield case.close(logits, corrected, recorded[logits])
        raws = markov.confidence_raws(draft.confidence, head, final, previous)
        name = f"{prefix}confidence_raw"
        yield case.close(name, raws, recorded[name])
    unshifted = markov.dspark_chain_greedy(head, base[1:], final[1:], anchor)
    yield case.same("unshifted_chain", unshifted.tokens, recorded["unshifted_chain"])
    for t in temperatures(recorded):
        filters = one_filter(temperature=float(t))
        uniforms = jnp.asarray(recorded[f"t{t}_uniforms"])
        drawn = markov.dspark_chain_sampled(head, base, final, anchor, filters, uniforms)
        yield case.same(f"t{t}_path", drawn.tokens, recorded[f"t{t}_path"])
        yield case.close(f"t{t}_q_rows", drawn.q_rows, recorded[f"t{t}_q_rows"])
        assert drawn.q_rows is not None
        chosen = jnp.take_along_axis(drawn.q_rows, drawn.tokens[:, None], axis=1)[:, 0]
        yield case.close(f"t{t}_q_chosen", chosen, recorded[f"t{t}_q_chosen"])
    yield from check_other_checkpoints(case, final, recorded)


def check_other_checkpoints(
    case: StageCase, final: jax.Array, recorded: dict[str, np.ndarray]
) -> Iterator[Check]:
    """The flat config style holds the same drafter; a plain confidence head sees no token."""
    flat, plain = (case.directory / f"checkpoint_{name}" for name in ("flat", "conf_plain"))
    if flat.is_dir():
        leaves = zip(
            jax.tree.leaves(load_draft(flat, dtype=jnp.float32)),
            jax.tree.leaves(case.draft),
            strict=True,
        )
        equal = [bool(jnp.array_equal(a, b)) for a, b in leaves]
        yield case.same("checkpoint_flat", equal, [True] * len(equal))
    if plain.is_dir():
        draft = load_draft(plain, dtype=jnp.float32)
        assert draft.confidence is not None
        previous = jnp.asarray(recorded["prev_tokens"])
        raws = markov.confidence_raws(draft.confidence, draft.markov, final, previous)
        yield case.close("confidence_raw_plain", raws, recorded["confidence_raw_plain"])


Stage = Callable[[StageCase], Iterator[Check]]
BACKBONE: tuple[Stage, ...] = (check_rope, check_yarn, check_layer0, check_backbone, check_rounds)
FAMILY_STAGES: dict[str, tuple[Stage, ...]] = {
    "dflash": (*BACKBONE, check_rows),
    "dflash2": (*BACKBONE, check_conv, check_selector),
    "dspark": (*BACKBONE, check_dspark),
}
"""What runs for a drafter of each family. A family that is not here is skipped by name."""


def check_stage_case(directory: Path, implementation: Implementation) -> Iterator[Check]:
    """All stages of one folder under `stages/`."""
    name, checkpoint = directory.name, directory / "checkpoint"
    if not checkpoint.is_dir():
        yield from check_selector_alone(directory, implementation)
        return
    family = read_config(checkpoint).family
    if family not in FAMILY_STAGES:
        yield Check(name, "all", None, note=f"family {family} is not in this version")
        return
    draft = load_draft(checkpoint, dtype=jnp.float32)
    case = StageCase(name, directory, draft, implementation)
    for stage in FAMILY_STAGES[family]:
        yield from stage(case)


# --- tiny/: trained models, whole generations ----------------------------------------------------


def check_tiny_family(
    directory: Path, family: str, implementation: Implementation
) -> Iterator[Check]:
    """Token streams, acceptance lengths and every drafted block of one tiny drafter."""
    case = f"tiny/{family}"
    if family not in FAMILY_STAGES:
        yield Check(case, "all", None, note=f"family {family} is not in this version")
        return
    target = load_hf(directory / "target", dtype=jnp.float32)
    draft = load_draft(directory / family, target, dtype=jnp.float32)
    for file, kind in (("expected.json", "prompts"), ("edges.json", "runs")):
        records = json.loads((directory / file).read_text(encoding="utf-8"))[kind]
        for i, record in enumerate(records):
            if family in record:
                pair = target, draft
                yield from check_generation(
                    f"{kind}[{i}]", case, *pair, record, family, implementation
                )


def check_generation(
    stage: str,
    case: str,
    target: Target,
    draft: DFlashDraft,
    record: dict[str, Any],
    family: str,
    implementation: Implementation,
) -> Iterator[Check]:
    """One recorded generation.

    The reference for DFlash and DFlash2 shrinks the blocks of its last rounds to the budget, where
    this package keeps whole blocks and clips the commit: only rounds a full block away from the
    budget's end must have the same drafts and lengths. The tokens must all be equal.
    """
    expected, budget = record[family], record["max_new_tokens"]
    session = SpecSession(
        target,
        draft,
        stop_token_ids=record.get("stop_token_ids") or (),
        block_size=record.get("block_size"),
        policy=DSparkVtPolicy("fixed"),
        implementation=implementation,
    )
    session.open([record["prompt_ids"]], budget)
    blocks, raws = [], []
    while not session.done:
        block, confidences = drafted_block(session)
        blocks.append(block)
        raws.append(confidences)
        session.burst(1)
    result = session.results()[0]
    yield same(case, f"{stage}.output_ids", result.token_ids, expected["output_ids"])

    lengths = expected["acceptance_lengths"]
    before = 1 + np.cumsum([0, *lengths])[:-1]
    whole = len(lengths)
    if family != "dspark":
        whole = int((before + session.plan.block_size <= budget + 1).sum())
    gains = result.acceptance_lengths
    yield same(case, f"{stage}.acceptance", gains[:whole], lengths[:whole])
    if "verify_blocks" in expected:
        yield same(case, f"{stage}.blocks", blocks[:whole], expected["verify_blocks"][:whole])
    if "confidence_raw" in expected:
        yield close(case, f"{stage}.confidence_raw", raws, expected["confidence_raw"])


def drafted_block(session: SpecSession) -> tuple[list[int], np.ndarray | None]:
    """The tokens the next round will verify (anchor, then drafts) and the drafts' confidences."""
    state = session.state
    assert state is not None and session.draft is not None
    proposal, _ = _propose_block(session.target, session.draft, state, session.plan)
    raws = None if proposal.raws is None else np.asarray(proposal.raws)[0]
    return [int(state.anchor[0]), *np.asarray(proposal.tokens)[0].tolist()], raws


# --- sampling/: filters, acceptance and residual of sampled decoding ------------------------------


def one_filter(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> sampling.Filters:
    """The filters of one sequence."""
    return sampling.Filters(
        temperature=jnp.float32(temperature),
        top_k=jnp.int32(top_k),
        top_p=jnp.float32(top_p),
        min_p=jnp.float32(min_p),
    )


def check_probs(directory: Path) -> Iterator[Check]:
    """Filtered laws over a grid of settings, and top-p cuts inside a group of ties."""
    case = "sampling/probs"
    recorded, settings = load_pair(directory, "probs")
    for entry in settings["grid"]:
        names = ("temperature", "top_k", "top_p", "min_p")
        got = _filtered(recorded["logits"], one_filter(**{n: entry[n] for n in names}))
        name = f"case{entry['i']}_probs"
        yield close(case, name, got, recorded[name])
        yield same(case, f"case{entry['i']}_kept", (got > 0).sum(-1), entry["kept"])
    for entry in settings["ties"]:
        got = _filtered(recorded["tie_logits"], one_filter(top_p=entry["top_p"]))
        name = f"tie{entry['i']}_probs"
        yield close(case, name, got, recorded[name])
        yield same(case, f"tie{entry['i']}_kept", np.flatnonzero(got[0]), entry["kept_mass_ids"])


def check_accept(directory: Path) -> Iterator[Check]:
    """Accepted prefixes, the edges of the strict comparison included, on the host and compiled."""
    case = "sampling/accept"
    recorded, _ = load_pair(directory, "accept")
    rows = [recorded[name] for name in ("p", "q", "u")]
    host = [sampling.rejection_accept_len(p, q, u) for p, q, u in zip(*rows, strict=True)]
    yield same(case, "rejection_accept_len", host, recorded["accept_len"])
    compiled = jax.jit(sampling.accept_len)(*rows)
    yield same(case, "accept_len", compiled, recorded["accept_len"])


def check_residual(directory: Path) -> Iterator[Check]:
    """The law after a rejection, for dense and for sparse proposals, degenerate ones included."""
    case = "sampling/residual"
    with np.load(directory / "residual.npz") as stored:
        r = dict(stored)
    dense = jax.vmap(sampling.residual)(r["p"], r["q_dense"])
    yield close(case, "residual_dense", dense, r["residual_dense"])
    sparse = jax.vmap(sampling.residual_sparse)(r["p"], r["candidate_ids"], r["q_sparse"])
    yield close(case, "residual_sparse", sparse, r["residual_sparse"])
    for column, got in enumerate((dense, sparse)):
        itself = (np.asarray(got) == r["p"]).all(axis=1)
        degenerate = r["degenerate"][:, column] == 1
        yield same(case, f"degenerate_{column}", itself[degenerate], [True] * degenerate.sum())


def load_pair(directory: Path, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the record of one file pair under `sampling/`."""
    with np.load(directory / f"{name}.npz") as stored:
        return dict(stored), json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))


SAMPLING: dict[str, Callable[[Path], Iterator[Check]]] = {
    "probs": check_probs,
    "accept": check_accept,
    "residual": check_residual,
}
"""Name of a file under `sampling/` -> its checks; a file without an entry is skipped by name."""
