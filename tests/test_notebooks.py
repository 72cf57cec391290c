"""Every notebook runs from top to bottom, in its own folder, without a warning."""

import json
import os
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
LONG = ("04_acceptance", "06_train")
"""They compute for longer than they compile."""
LIMIT = 600
"""Seconds for a cell: a guard against one that hangs, no measurement."""


def run(notebook, quick=True):
    """The notebook executed, its stored outputs replaced; `quick`: compiled with little effort."""
    folder = {"metadata": {"path": str(NOTEBOOKS[0].parent)}}
    options = {"timeout": LIMIT, "kernel_name": "python3", "resources": folder}
    client = nbclient.NotebookClient(notebook, **options)
    # Pictures go into the notebook, whatever backend the shell asks matplotlib for.
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    quickly = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if quick else {}
    return client.execute(env=env | {"JAX_PLATFORMS": "cpu"} | quickly)


def said(notebook):
    """All text that the cells wrote to stderr."""
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    return "".join(o["text"] for o in outputs if o.get("name") == "stderr")


@pytest.mark.filterwarnings("default")  # those of the notebook machinery are not ours
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path):
    done = run(nbformat.read(path, as_version=4), quick=path.stem not in LONG)
    assert "Warning" not in said(done)
    outputs = [o for cell in done.cells for o in cell.get("outputs", [])]
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= 2


@pytest.mark.filterwarnings("default")
def test_a_notebook_that_fails_is_seen():
    cells = [nbformat.v4.new_code_cell("assert 1 == 2")]
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        run(nbformat.v4.new_notebook(cells=cells))


def test_there_are_seven_and_they_are_stored_small():
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06", "07"]
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 700_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_came_from_one_clean_run(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = {o["output_type"] for cell in code for o in cell["outputs"]}
    assert "error" not in kinds
    assert not any(o.get("name") == "stderr" for cell in code for o in cell["outputs"])
