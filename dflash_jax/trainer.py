"""A training run from start to finish: the loop with its log and checkpoints, and the report."""

import csv
import dataclasses
import json
import platform
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dflash_jax import corpus as data
from dflash_jax.blocks import Batch
from dflash_jax.checkpoint import save_draft
from dflash_jax.config import resolve_harvest
from dflash_jax.corpus import Corpus
from dflash_jax.draft import DFlashDraft
from dflash_jax.keys import printable
from dflash_jax.losses import Recipe
from dflash_jax.session import generate
from dflash_jax.sharding import named_leaves
from dflash_jax.targets import Target
from dflash_jax.tensor_files import compute_dtype
from dflash_jax.training import (
    Schedule,
    TrainState,
    add_metrics,
    cast,
    eval_step,
    save_state,
    spread,
    train_step,
)
from dflash_jax.window import DSparkVtPolicy

LARGEST = 1e18
"""Of weights: squares and products of larger ones overflow float32."""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Where a run writes and when it stops.

    out: the drafter's directory (weights, log.csv, README.md). state: file to resume from.
    batch: sequences a step. seed: of anchors and of the batches' order. stop_at: stop after this
    step, before the schedule's end. deadline: `time.monotonic()` value after which no further step
    begins. log_every, eval_every: steps between log rows, and between rows with held-out figures.
    save_every: least seconds between saves, at a log row. storage: of the exported weights, see
    `save_draft`; None is bf16. mesh: see `training.data_mesh`.
    """

    out: Path
    state: Path
    batch: int = 32
    seed: int = 0
    stop_at: int | None = None
    deadline: float = float("inf")
    log_every: int = 50
    eval_every: int = 250
    save_every: float = 120.0
    storage: str | None = "int8"
    mesh: Mesh | None = None


def train(
    target: Target,
    state: TrainState,
    corpus: Corpus,
    heldout: Batch | None,
    recipe: Recipe,
    schedule: Schedule,
    options: RunOptions,
    report: Callable[[str], None] = print,
) -> TrainState:
    """Step until the schedule ends, `stop_at` or the deadline; log, export and save on the way.

    Stopping and resuming gives the same weights as not stopping. ValueError at the first loss, or
    before a save whose weights, are not finite; state and drafter are then as they were last saved.
    """
    last = min(schedule.steps, options.stop_at or schedule.steps)
    step = first = int(state.step)
    dtype = compute_dtype()
    log = Log(options.out / "log.csv", keep=first)
    window: list[Any] = []
    mesh = options.mesh
    if mesh is not None and options.batch % mesh.size:
        raise ValueError(
            f"batch: expected a multiple of {mesh.size} devices, found {options.batch}"
        )
    everywhere, state = spread(target, mesh, rows=False), spread(state, mesh, rows=False)
    heldout = spread(heldout, mesh, rows=False)
    began = saved = compiled = time.monotonic()
    while step < last and time.monotonic() < options.deadline:
        batch = spread(corpus.batch(step, options.batch, options.seed), mesh, rows=True)
        rate = jnp.float32(schedule.rate(step))
        seed = jnp.uint32(options.seed)
        state, metrics = train_step(everywhere, state, batch, seed, rate, recipe, dtype, mesh)
        if window:  # the step before: its figures are there while this one computes
            _check_loss(float(window[-1].loss), step)
        window.append(metrics)
        step += 1
        if step == first + 1:
            jax.block_until_ready(metrics)
            compiled = time.monotonic()
            report(f"first step (compilation) {compiled - began:.1f} s")
        due = step % options.eval_every == 0 or step == last
        if due or step % options.log_every == 0:
            row = {"step": step, "rate": schedule.rate(step - 1)}
            row |= add_metrics(window).summary()
            window = []
            _check_loss(float(metrics.loss), step)
            if heldout is not None and due:
                held = eval_step(everywhere, state.ema, heldout, recipe, dtype).summary()
                _check_loss(held["loss"], step, "held-out loss")
                row |= {f"heldout_{name}": value for name, value in held.items()}
            now = time.monotonic()
            speed = (step - first - 1) / (now - compiled)
            log.write(row | {"seconds": round(now - began, 1)})
            left = (last - step) / speed if speed else 0.0
            report(_progress(row, speed, min(options.deadline - now, left)))
            if now - saved > options.save_every:
                _save(state, options)
                saved = now
    _save(state, options)
    return state


def _check_loss(loss: float, step: int, name: str = "loss") -> None:
    if not np.isfinite(loss):
        raise ValueError(f"{name}: expected a finite number, found {loss} at step {step}")


def _save(state: TrainState, options: RunOptions) -> None:
    """Write the state and the drafter; ValueError where a weight is NaN or far too large."""
    for path, leaf in (*named_leaves(state.draft), *named_leaves(state.ema)):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not (jnp.abs(leaf) < LARGEST).all():
            raise ValueError(
                f"weights: expected numbers below {LARGEST:g}, found others in {path} "
                f"at step {state.step}"
            )
    save_state(state, options.state)
    export(state, options)


def export(state: TrainState, options: RunOptions) -> None:
    """Write the averaged weights as a drafter; an older one is replaced once it is whole."""
    draft = state.ema if options.storage == "int8" else cast(state.ema, jnp.bfloat16)
    save_draft(draft, options.out, storage=options.storage)


class Log:
    """A CSV file with one row a report; lists are spread over numbered columns."""

    def __init__(self, path: Path, keep: int):
        self._path = path
        self._rows: list[dict[str, Any]] = []
        if keep and path.is_file():
            try:
                with path.open(newline="", encoding="utf-8") as file:
                    self._rows = [row for row in csv.DictReader(file) if int(row["step"]) <= keep]
            except (ValueError, KeyError, TypeError, csv.Error) as error:
                reason = printable(error)
                raise ValueError(f"{path}: expected the log of a run ({reason})") from None

    def write(self, row: dict[str, Any]) -> None:
        """Add a row and bring the file up to date."""
        flat: dict[str, Any] = {}
        for name, value in row.items():
            if isinstance(value, list):
                flat |= {f"{name}_{k}": f"{v:.4f}" for k, v in enumerate(value, 1)}
            else:
                flat[name] = f"{value:.6g}" if isinstance(value, float) else value
        self._rows.append(flat)
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self._rows)


def _progress(row: dict[str, Any], speed: float, left: float) -> str:
    text = f"step {row['step']}  loss {row['loss']:.3f}  acceptance {row['acceptance']:.2f}"
    if "heldout_acceptance" in row:
        slots = " ".join(f"{a:.2f}" for a in row["heldout_accuracy"])
        text += f"  held-out {row['heldout_acceptance']:.3f} [{slots}]"
    return f"{text}  {speed:.1f} steps/s  {left:.0f} s left"


def heldout_batch(
    target: Target, codec: Any, prompts: Sequence[Sequence[int]], options: data.SampleOptions
) -> Batch:
    """The target's greedy answers to held-out prompts, for teacher-forced figures."""
    chat = data.chat_format(codec)
    starts = data.make_starts(prompts, data.ASSISTANT)
    ids, answer = data.sample_rows(target, chat, starts, 0, options)
    # Behind the first answer the target goes on talking to itself: no part of this text.
    index = np.arange(ids.shape[1])
    ended = (~answer) & (index >= starts.length[:, None])
    answer &= np.cumsum(ended, axis=1) == 0
    kept = answer | (index < starts.length[:, None])
    return Batch(jnp.asarray(ids), jnp.asarray(kept, jnp.int32), jnp.asarray(answer))


@dataclasses.dataclass(frozen=True)
class KindReport:
    """Acceptance on the prompts of one kind: tokens a round, pooled, and per-slot rates."""

    kind: str
    prompts: int
    tokens: int
    rounds: int
    acceptance: float
    slots: list[float]


def measure(
    target: Target,
    draft: DFlashDraft,
    prompts: Sequence[Sequence[int]],
    kinds: Sequence[str],
    max_new_tokens: int,
) -> tuple[list[KindReport], bool]:
    """Real greedy generation on held-out prompts: a report per kind ("all" last), and losslessness.

    Lossless: every stream equals that of the same program with nothing accepted.
    """
    lists = [list(p) for p in prompts]
    # Every draft is verified: a policy that verifies less would hide what the drafter can do.
    whole = DSparkVtPolicy("fixed")
    spec = generate(target, draft, lists, max_new_tokens, policy=whole)
    plain = generate(target, draft, lists, max_new_tokens, policy=whole, accept=False)
    same = all(a.token_ids == b.token_ids for a, b in zip(spec, plain, strict=True))
    drafts = resolve_harvest(draft.config).drafts(draft.config.block_size)

    def pool(kind: str) -> KindReport:
        mine = [g for g, k in zip(spec, kinds, strict=True) if kind in (k, "all")]
        gains = np.array([gain for g in mine for gain in g.acceptance_lengths])
        rate = [float((gains > k).mean()) if len(gains) else 0.0 for k in range(1, drafts + 1)]
        return KindReport(
            kind=kind,
            prompts=len(mine),
            tokens=int(gains.sum()),
            rounds=len(gains),
            acceptance=float(gains.mean()) if len(gains) else 0.0,
            slots=rate,
        )

    return [pool(kind) for kind in [*dict.fromkeys(kinds), "all"]], same


def model_card(
    name: str, facts: dict[str, Any], reports: Sequence[KindReport], lossless: bool, budget: int
) -> str:
    """A README for the drafter: what it belongs to, how it was made, what it reached."""
    lines = [f"# Drafter for {name}", ""]
    lines += ["A block drafter for speculative decoding, in the format of `dflash_jax.load_draft`."]
    lines += ["", "## Training", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
    lines += ["## Held-out acceptance", ""]
    same = "equal to" if lossless else "NOT equal to"
    lines += [
        f"Greedy decoding, at most {budget} new tokens a prompt, prompts that no training template "
        f"makes. Tokens per round count the target's own token. Every stream was {same} plain "
        "greedy decoding.",
        "",
        "| kind | prompts | tokens | tokens per round | reached slot 1, 2, ... |",
        "| --- | --- | --- | --- | --- |",
    ]
    for r in reports:
        slots = " ".join(f"{s:.2f}" for s in r.slots)
        lines += [f"| {r.kind} | {r.prompts} | {r.tokens} | {r.acceptance:.2f} | {slots} |"]
    return "\n".join(lines) + "\n"


def environment() -> dict[str, str]:
    """Device and versions, for the model card."""
    names = ("jax", "jaxlib", "flax", "optax", "numpy", "dflash-jax")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    versions = ", ".join(f"{name} {version}" for name, version in found.items())
    return {
        "device": jax.devices()[0].device_kind,
        "versions": f"Python {platform.python_version()}, {versions}",
    }


def write_report(
    out: Path,
    name: str,
    facts: dict[str, Any],
    reports: Sequence[KindReport],
    lossless: bool,
    budget: int,
) -> None:
    """README.md and report.json in the drafter's directory."""
    card = model_card(name, facts | environment(), reports, lossless, budget)
    (out / "README.md").write_text(card, encoding="utf-8")
    record = {
        "facts": facts | environment(),
        "lossless": lossless,
        "max_new_tokens": budget,
        "kinds": [dataclasses.asdict(r) for r in reports],
    }
    (out / "report.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
