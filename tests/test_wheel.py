"""The package as a wheel, in an environment of its own, away from the repository."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "oracles" / "tiny"
PROGRAM = """
import importlib.metadata, importlib.resources, json, sys
import dflash_jax
import dflash_jax.pallas
from dflash_jax import generate, generate_stream, load_draft, load_target
from dflash_jax.checkpoint import shipped_drafts
target = load_target(sys.argv[1]).target
draft = load_draft(sys.argv[2], target)
prompt = list(b"def add(first, second):")
out = generate(target, draft, prompt, 16)
pieces = list(generate_stream(target, draft, prompt, 16))
plain = generate(target, None, prompt, 16)
print(json.dumps({
    "files": [dflash_jax.__file__, dflash_jax.pallas.__file__],
    "same": out.token_ids == plain.token_ids == [t for piece in pieces for t in piece],
    "accepted": out.accepted,
    "drafts": {name: load_draft(name).config.family for name in shipped_drafts()},
    "typed": importlib.resources.files("dflash_jax").joinpath("py.typed").is_file(),
    "version": importlib.metadata.version("dflash-jax") == dflash_jax.__version__,
}))
"""


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: a build folder in the checkout would carry old modules along."""
    out = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("dflash_jax", "pallas"):
        shutil.copytree(ROOT / folder, out / "source" / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, out / "source")
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out)
    run(sys.executable, "-m", "pip", *build, out / "source")
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of a fresh environment with the wheel in it, and its home.

    Dependencies come from this environment's own folder, behind the new one on the path; a path
    file inside that folder is not followed, so an editable install there stays out.
    """
    home = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", home / "venv")
    inside = home / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    site = run(inside, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel)
    others = [path for path in sys.path if path.endswith("site-packages")]
    Path(site, "others.pth").write_text("\n".join(others))
    return inside, home


def test_everything_is_inside(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "dflash_jax"
    expected = {f"dflash_jax/{p.relative_to(source)}" for p in source.rglob("*.py")}
    expected |= {f"dflash_jax/{p.relative_to(source)}" for p in (source / "assets").glob("*/*")}
    expected |= {f"dflash_jax/pallas/{p.name}" for p in (ROOT / "pallas").glob("*.py")}
    expected.add("dflash_jax/py.typed")
    assert expected <= names
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"dflash_jax"}


def test_it_generates_away_from_the_repository(python):
    inside, home = python
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["JAX_PLATFORMS"] = "cpu"
    program = ("-c", PROGRAM, TINY / "target", TINY / "dflash")
    report = json.loads(run(inside, *program, cwd=home, env=environment).splitlines()[-1])
    assert all(Path(file).is_relative_to(home / "venv") for file in report["files"])
    assert report["same"]
    assert report["accepted"] > 0
    assert report["typed"]
    assert report["version"]
    assert set(report["drafts"].values()) == {"dflash", "dspark", "dflash2"}
    help_text = run(inside, "-m", "dflash_jax.cli", "--help", cwd=home, env=environment)
    assert "generate" in help_text
