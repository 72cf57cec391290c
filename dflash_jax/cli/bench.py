"""`dflash-jax bench`: what a drafter accepts on many prompts, and what that is worth."""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import jax
from jax.sharding import Mesh

from dflash_jax import __version__, sharding
from dflash_jax.benchmark import Prompt, check_batch, decode, run_trial
from dflash_jax.benchmark.figure import check_ending, save_figure
from dflash_jax.benchmark.report import TREE, Report, comparable, digest, pairs_of, read_report
from dflash_jax.benchmark.text import changes, tables
from dflash_jax.cli import prompts as files
from dflash_jax.cli.cache import add_compile_cache
from dflash_jax.cli.decoding import add_decoding, add_template, session_options
from dflash_jax.cli.devices import add_devices, first_process_prints, join_devices
from dflash_jax.cli.models import add_models, draft_name, load_models
from dflash_jax.cli.shell import Parser, Status
from dflash_jax.compare import plain_options
from dflash_jax.config import resolve_harvest
from dflash_jax.draft import DFlashDraft
from dflash_jax.extras import require
from dflash_jax.options import budget_of, most_rows
from dflash_jax.progress import Progress
from dflash_jax.quant import FLOAT
from dflash_jax.records import HELDOUT, kind_of, naming, read_records
from dflash_jax.session import SpecSession
from dflash_jax.targets import HostedTarget, takes_trees
from dflash_jax.targets.loading import LoadedTarget
from dflash_jax.window import DSparkVtPolicy, PolicyKind, parts_of

LIMIT = 12
"""Prompts taken where no number is given: a few minutes on two CPU cores."""
SWEPT = ("block_size", "verify_width", "window_policy")


def add(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    bench = commands.add_parser(
        "bench", help="measure acceptance and speed over many prompts, settings and batch sizes"
    )
    bench.set_defaults(run=run, ids=False)
    add = bench.add_argument
    add(
        "--prompts",
        metavar="FILE",
        help=".jsonl with prompt, messages or prompt_ids, and perhaps kind (default: a mixed set "
        "that comes with the package)",
    )
    add(
        "--limit",
        type=int,
        metavar="N",
        help=f"prompts taken, of every kind in turn (default: {LIMIT}; 0: all)",
    )
    add("--max-new-tokens", type=int, default=128, metavar="N")
    add_models(bench)
    add_devices(bench)
    add_template(bench)
    add_decoding(bench, several=True)
    add("--batch", type=int, nargs="+", default=[1], metavar="N", help="sequences side by side (1)")
    add(
        "--sweep",
        action="store_true",
        help="try a quarter, a half and all of the drafter's block, under every policy it has, and "
        "draft trees",
    )
    add("--json", action="store_true", help="print one JSON object instead")
    add("--save", metavar="FILE", help="write that object here")
    add("--plot", metavar="FILE.png", help="draw rates and acceptance (needs matplotlib)")
    add("--from", dest="saved", metavar="FILE", help="decode nothing: show what --save wrote")
    add(
        "--against",
        metavar="FILE",
        help="hold the run against an earlier one that --save wrote, made under the same "
        "conditions (drafter and versions may differ)",
    )
    add_compile_cache(bench)


def run(args: argparse.Namespace) -> int:
    """`dflash-jax bench`: 0, or 1 where the drafter changed a token."""
    if args.plot is not None:
        require("matplotlib", "plot")
    _check_files(args)
    against = None if args.against is None else read_report(args.against)
    if args.saved is not None:
        report = read_report(args.saved)
        _show(args, report, against)
    else:
        mesh = join_devices(args)
        with first_process_prints(args):
            report = _measure(args, mesh, against)
            _show(args, report, against)
    return 1 if any(trial.changed for trial in report.trials) else 0


def _check_files(args: argparse.Namespace) -> None:
    """ValueError, before minutes of decoding, for a file that cannot be written or would be lost,
    and for options that would do nothing.
    """
    if args.json and args.against is not None:
        raise ValueError("--json: expected without --against, whose table is text, found both")
    if args.saved is not None:
        plain = make_defaults()
        shown = {"saved", "against", "save", "plot", "json", "compile_cache"}
        for name, value in vars(args).items():
            if name not in shown and name in plain and value != plain[name]:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag}: expected without --from, found both")
    for name in (*SWEPT, "batch"):
        values = getattr(args, name) or []
        if len({*values}) < len(values):
            flag, found = "--" + name.replace("_", "-"), " ".join(map(str, values))
            raise ValueError(f"{flag}: expected each value once, found {found}")
    files = {"--from": args.saved, "--against": args.against}
    taken = {Path(file).resolve(): flag for flag, file in files.items() if file is not None}
    if args.prompts is not None:
        taken[Path(args.prompts).resolve()] = "--prompts"
    for flag, file in (("--save", args.save), ("--plot", args.plot)):
        if file is None:
            continue
        path = Path(file).resolve()
        if path in taken:
            raise ValueError(f"{flag}: expected a file of its own, found that of {taken[path]}")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{flag}: expected a file that can be written, found {file!r}")
        taken[path] = flag
    if args.plot is not None:
        check_ending(args.plot)


def make_defaults() -> dict[str, Any]:
    """What every option is where it is not given."""
    parser = Parser()
    add(parser.add_subparsers())
    return vars(parser.parse_args(["bench"]))


def _measure(args: argparse.Namespace, mesh: Mesh | None, against: Report | None) -> Report:
    status = Status(enabled=sys.stderr.isatty() and not args.json)
    status.show(f"loading {args.target}")
    if draft_name(args) is None:
        raise ValueError("--draft: expected a drafter to measure, found none")
    loaded, draft = load_models(args, mesh, False if args.json else None)
    assert draft is not None
    status.clear()
    prompts = read_prompts(args, loaded)
    several = list(ways(args, loaded, draft))
    for options in several:  # refused before the first of them is decoded
        SpecSession(loaded.target, draft, **options)
    for batch in args.batch:
        check_batch(prompts, batch)
        sharding.check_batch(mesh, batch)
    report = Report(
        conditions=conditions_of(args, loaded, prompts, several[0]),
        drafter=drafter_of(args, draft),
        versions={
            "dflash-jax": __version__,
            "jax": jax.__version__,
            "jaxlib": metadata.version("jaxlib"),
        },
        trials=[],
    )
    if against is not None:  # before anything is decoded for nothing
        with _naming_earlier(args):
            comparable(report, against)
    work = len(prompts) * (len(several) + 1) * len(args.batch)
    with Progress("decoding", work, unit="prompts", show=False if args.json else None) as bar:
        for batch in args.batch:
            common = loaded.target, None, prompts, args.max_new_tokens
            plain = decode(*common, plain_options(several[0]), batch, bar.add)
            for options in several:
                trial = run_trial(
                    loaded.target,
                    draft,
                    prompts,
                    args.max_new_tokens,
                    options,
                    batch,
                    plain,
                    bar.add,
                )
                report.trials.append(trial)
    return report


def read_prompts(args: argparse.Namespace, loaded: LoadedTarget) -> list[Prompt]:
    """The file's prompts, or the package's, of every kind in turn."""
    file = HELDOUT if args.prompts is None else args.prompts
    if args.limit is not None and args.limit < 0:
        raise ValueError(f"--limit: expected 0 or more, found {args.limit}")
    if args.prompts is None and loaded.text is None:
        raise ValueError(f"--prompts: expected a file ({args.target} has no tokenizer), found none")
    template = files.template_args(args, loaded)
    kinds: dict[str, list[Prompt]] = {}
    for record in read_records(file):
        with naming(record):
            files.check_keys(record, (*files.PROMPT_KEYS, "kind"))
        kind, text = kind_of(record, ""), record.get("prompt")
        ids = files.ids_of(record, loaded, args, template)
        prompt = Prompt(ids, kind, text if isinstance(text, str) else "")
        kinds.setdefault(kind, []).append(prompt)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*kinds.values()))
    prompts = [prompt for prompt in turns if prompt is not None]
    if not prompts:
        raise ValueError(f"{file}: expected prompts, found none")
    return prompts[: (LIMIT if args.limit is None else args.limit) or None]


def ways(
    args: argparse.Namespace, loaded: LoadedTarget, draft: DFlashDraft
) -> Iterator[dict[str, Any]]:
    """`SpecSession` options of every setting asked for; windows wider than a block are left out."""
    asked = {name: getattr(args, name) or [None] for name in SWEPT}
    if args.sweep:
        for name in (*SWEPT, "tree"):
            if getattr(args, name):
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag}: expected without --sweep, which sets it, found both")
        trees = args.tree is None and takes_trees(loaded.target)
        asked |= sweep(draft, hosted=isinstance(loaded.target, HostedTarget), trees=trees)
    harvest, found = resolve_harvest(draft.config, args.harvest), False
    # A threshold is for the policies that read one; where none does, it is refused.
    idle = not any((policy or "").startswith("confidence") for policy in asked["window_policy"])
    for block, width, policy in itertools.product(*asked.values()):
        slots = harvest.drafts(block or draft.config.block_size)
        most = most_rows(draft, slots, bool(args.tree))
        if len(asked["block_size"]) > 1 and width is not None and width > most:
            continue
        tau = args.tau if idle or (policy or "").startswith("confidence") else None
        one = {"block_size": block, "verify_width": width, "window_policy": policy, "tau": tau}
        if policy == TREE:
            one |= {"window_policy": None, "tree": True}
        found = True
        yield session_options(argparse.Namespace(**{**vars(args), **one}), loaded, draft)
    if not found:
        raise ValueError(
            f"--verify-width: expected one that a block holds, found {args.verify_width}"
        )


def sweep(draft: DFlashDraft, hosted: bool = False, trees: bool = False) -> dict[str, list[Any]]:
    """Block sizes and policies worth a try with a drafter; hosted targets have no `cost`.

    trees: whether to try draft trees too, as a policy `TREE`.
    """
    kinds = [
        kind
        for kind in get_args(PolicyKind)
        if draft.confidence is not None or not DSparkVtPolicy(kind).needs_confidence
        if not (hosted and kind == "cost")
    ]
    return {
        "block_size": [*parts_of(draft.config.block_size)],
        "verify_width": [None],
        "window_policy": [*kinds, TREE] if trees else kinds,
    }


def conditions_of(
    args: argparse.Namespace,
    loaded: LoadedTarget,
    prompts: list[Prompt],
    options: dict[str, Any],
) -> dict[str, Any]:
    """What must be equal in runs that are held against each other."""
    device, text = jax.devices()[0], loaded.text
    templated = text is not None and text.template is not None and not args.no_chat
    sampling = dataclasses.asdict(options["sampling"])
    return {
        "target": loaded.name,
        "dtype": str(loaded.target.embedding.dtype),
        "device": f"{device.platform}: {device.device_kind}",
        "devices": 1 if loaded.target.mesh is None else loaded.target.mesh.size,
        "prompts": len(prompts),
        "prompt_ids": digest([list(prompt.ids) for prompt in prompts]),
        "chat_template": digest(text.template) if text is not None and templated else None,
        "template_args": files.template_args(args, loaded),
        "max_new_tokens": budget_of(args.max_new_tokens),
        "stop_token_ids": sorted({*options["stop_token_ids"]}),
        "capacity": args.capacity,
        "sampling": sampling
        | {"logit_bias": {str(k): v for k, v in sampling["logit_bias"].items()}},
    }


def drafter_of(args: argparse.Namespace, draft: DFlashDraft) -> dict[str, Any]:
    """What was drafted with."""
    name = draft_name(args)
    return {
        "name": Path(name).name if name is not None else None,
        "family": draft.config.family,
        "block_size": draft.config.block_size,
        "precision": draft.config.precision or FLOAT,
        "head_rows": draft.head.d2t.shape[0] if draft.head is not None else None,
        "kv_dtype": args.draft_kv_dtype or "auto",
        "harvest": resolve_harvest(draft.config, args.harvest).name.lower(),
    }


@contextlib.contextmanager
def _naming_earlier(args: argparse.Namespace) -> Iterator[None]:
    """A ValueError raised inside names the report of --against."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"--against {args.against}: {error}") from None


def _show(args: argparse.Namespace, report: Report, against: Report | None) -> None:
    """Print, save and draw what was asked for."""
    compared: list[str] = []
    if against is not None:
        with _naming_earlier(args):
            compared = list(changes(args.against, against, pairs_of(report, against)))
    first = args.process_id in (None, 0)  # of processes that work together one writes
    if args.save is not None and first:
        report.save(args.save)
    if args.plot is not None and first:
        save_figure(report, args.plot)
    if args.json:
        print(json.dumps(report.as_dict()))
        return
    print("\n".join([*tables(report), *compared]))
