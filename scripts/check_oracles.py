"""Compare dflash_jax with recorded numbers of the public reference implementations.

    python scripts/check_oracles.py DIR [--case NAME] [--implementation xla|pallas] [--json]

DIR has the layout of `tests/oracles` (its README describes every array): `stages/CASE/`, `tiny/`
and `sampling/`. A case that this version cannot run is reported as skipped, by name. One line a
check: case, stage, error, tolerance; the last line is one JSON object with the counts. Exit status
1 when a check failed, 2 for a bad DIR or CASE.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from oracle_backbone import Check
from oracle_checks import SAMPLING, check_stage_case, check_tiny_family

from dflash_jax import kernels
from dflash_jax.cli import Parser
from dflash_jax.kernels import Implementation


def find_cases(
    directory: Path, implementation: Implementation = "xla"
) -> dict[str, Callable[[], Iterator[Check]]]:
    """Case name -> its checks, for everything the folder holds.

    implementation: of the ops that have kernels; head dims and shapes a kernel does not take are
    skipped, and say so.

    Raises FileNotFoundError where the folder has none of `stages/`, `tiny/`, `sampling/`.
    """
    cases: dict[str, Callable[[], Iterator[Check]]] = {}
    for stage in sorted((directory / "stages").glob("*/manifest.json")):
        cases[stage.parent.name] = lambda d=stage.parent: check_stage_case(d, implementation)
    tiny = directory / "tiny"
    for config in sorted(tiny.glob("*/config.json")):
        family = config.parent.name
        if family != "target":
            cases[f"tiny/{family}"] = lambda f=family: check_tiny_family(tiny, f, implementation)
    for file in sorted((directory / "sampling").glob("*.npz")):
        name = f"sampling/{file.stem}"
        if file.stem in SAMPLING:
            cases[name] = lambda f=file: SAMPLING[f.stem](f.parent)
        else:
            unknown = Check(name, "all", None, note="this version knows no such case")
            cases[name] = lambda check=unknown: iter([check])
    if not cases:
        raise FileNotFoundError(
            f"{directory}: expected cases under stages/, tiny/ or sampling/, found none"
        )
    return cases


def guarded(name: str, run: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """The case's checks; one that cannot be read fails, one that cannot run here is skipped."""
    try:
        yield from run()
    except NotImplementedError as error:
        yield Check(name, "all", None, note=str(error))
    except (KeyError, OSError, ValueError) as error:
        yield Check(name, "all", float("nan"), note=f"{type(error).__name__}: {error}")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=RawHelp)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--case", metavar="NAME", help="run one case, e.g. dflash_yarn")
    parser.add_argument("--implementation", choices=("xla", "pallas"), default="xla")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    try:
        options = parser.parse_args(arguments)
        kernels.resolve(options.implementation)
        cases = find_cases(options.directory, options.implementation)
        if options.case is not None and options.case not in cases:
            raise ValueError(f"--case: expected one of {', '.join(cases)}, found {options.case!r}")
    except (FileNotFoundError, NotImplementedError, ValueError) as error:
        print(f"check_oracles.py: {error}", file=sys.stderr)
        return 2
    chosen = cases if options.case is None else {options.case: cases[options.case]}
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    # An accelerator would multiply f32 in fewer bits by default.
    with jax.default_matmul_precision("highest"):
        for name, run in chosen.items():
            for check in guarded(name, run):
                counts[check.status] += 1
                print(json.dumps(check.record()) if options.json else check.line(), flush=True)
    print(json.dumps(counts))
    return 1 if counts["failed"] else 0


RawHelp = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    sys.exit(main())
