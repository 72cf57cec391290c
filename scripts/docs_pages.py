"""The pages of the documentation that are made, not written: the reference and the notebooks.

    python scripts/docs_pages.py DIR     # write them as markdown, to look at

`mkdocs.yml` names this file as a hook, so that `mkdocs build` makes them on the way. The reference
is read out of the source's docstrings without importing anything; the notebooks are shown with the
outputs that they are stored with.
"""

import argparse
import ast
import base64
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dflash_jax"
ORDER = (
    "config",
    "config_json",
    "tensor_files",
    "checkpoint",
    "quant",
    "draft",
    "shapes",
    "kv",
    "layers",
    "attention",
    "conv",
    "selector",
    "markov",
    "propose",
    "window",
    "sampling",
    "verify",
    "round",
    "loop",
    "hosted",
    "options",
    "results",
    "session",
    "streaming",
    "compare",
    "batch",
    "targets",
    "text",
)
"""Modules in the order a value walks through them; others follow by name."""
Definition = ast.FunctionDef | ast.ClassDef


def pages() -> dict[str, str | bytes]:
    """Path within the documentation -> content, of every page (and picture) made here."""
    made: dict[str, str | bytes] = {"api.md": public_page(), "modules.md": modules_page()}
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        made |= notebook_page(notebook)
    return made


def on_files(files: Any, config: Any) -> Any:
    """The hook that mkdocs calls once it has found the written pages."""
    from mkdocs.structure.files import File

    for path, content in pages().items():
        files.append(File.generated(config, path, content=content))
    return files


# --- the reference ------------------------------------------------------------------------------


def modules() -> dict[str, ast.Module]:
    """Dotted name within the package -> its syntax tree; commands and kernels are left out."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name and parts[0] != "cli":
            found[name] = ast.parse(file.read_text(encoding="utf-8"))
    known = {name: i for i, name in enumerate(ORDER)}
    return dict(sorted(found.items(), key=lambda item: (known.get(item[0], len(ORDER)), item[0])))


def public_names() -> dict[str, str]:
    """Name -> module of everything that `dflash_jax/__init__.py` imports from the package."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    imports = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module]
    return {
        alias.name: node.module.removeprefix("dflash_jax.")  # type: ignore[union-attr]
        for node in imports
        for alias in node.names
    }


def public_page() -> str:
    """`api.md`: the names importable from `dflash_jax`, grouped by module."""
    homes, lines = public_names(), ["# Public names", ""]
    lines += ["Everything here is importable from `dflash_jax`. Shapes are written `[B, rows, H]`;"]
    lines += ["what else the modules hold is in [the modules](modules.md).", ""]
    for module, tree in modules().items():
        mine = [d for d in definitions(tree) if homes.get(d.name) == module]
        if mine:
            lines += [f"## dflash_jax.{module}", "", first_line(ast.get_docstring(tree)), ""]
            lines += [line for d in mine for line in entry(d)]
    return "\n".join(lines)


def modules_page() -> str:
    """`modules.md`: every module's own account of itself, and its other documented names."""
    homes, lines = public_names(), ["# Modules", ""]
    lines += ["What stands behind [the public names](api.md), module by module. A name without an"]
    lines += ["underscore may be used; only the public ones are promised to stay.", ""]
    for module, tree in modules().items():
        lines += [f"## dflash_jax.{module}", "", *prose(ast.get_docstring(tree) or ""), ""]
        for d in definitions(tree):
            if homes.get(d.name) != module:
                lines += entry(d)
    return "\n".join(lines)


def definitions(tree: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    """Functions and classes that have no underscore and a docstring, in the source's order."""
    for node in tree.body:
        named = isinstance(node, Definition) and not node.name.startswith("_")
        if named and ast.get_docstring(node):
            yield node


def entry(node: Definition, level: int = 3, prefix: str = "") -> list[str]:
    """A heading, the signature and the docstring; of a class, its methods too."""
    lines = ["#" * level + f" {prefix}{node.name}", "", "```python", *signature(node), "```", ""]
    lines += [*prose(ast.get_docstring(node) or ""), ""]
    if isinstance(node, ast.ClassDef):
        lines += [line for d in definitions(node) for line in entry(d, level + 1, f"{node.name}.")]
    return lines


def signature(node: Definition) -> list[str]:
    """The definition's head as it is written: arguments, or a class's fields."""
    if isinstance(node, ast.FunctionDef):
        names = [ast.unparse(d) for d in node.decorator_list]
        head = [f"@{name}" for name in names if name in ("property", "classmethod")]
        return [*head, *function_head(node)]
    made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    fields = [ast.unparse(n) for n in node.body if isinstance(n, ast.AnnAssign | ast.Assign)]
    bases = ", ".join(ast.unparse(b) for b in node.bases)
    return [
        f"class {node.name}" + (f"({bases})" if bases else ""),
        *(f"    {field}" for field in fields),
        *(f"    {line}" for init in made for line in function_head(init)),
    ]


def function_head(node: ast.FunctionDef) -> list[str]:
    """`def name(arguments) -> result`, one argument a line where one line does not hold it."""
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    parts = list(arguments(node.args))
    line = f"def {node.name}({', '.join(parts)}){result}"
    if len(line) < 90:
        return [line]
    return [f"def {node.name}(", *(f"    {part}," for part in parts), f"){result}"]


def arguments(args: ast.arguments) -> Iterator[str]:
    """Each argument with its annotation and default, the bare star included."""
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    for arg, default in zip(positional, defaults, strict=True):
        yield one_argument(arg, default)
    if args.vararg or args.kwonlyargs:
        yield "*" + (ast.unparse(args.vararg) if args.vararg else "")
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield one_argument(arg, default)
    if args.kwarg:
        yield f"**{ast.unparse(args.kwarg)}"


def one_argument(arg: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(arg)
    equals = " = " if arg.annotation else "="
    return f"{ast.unparse(arg)}{equals}{ast.unparse(default)}"


def prose(docstring: str) -> list[str]:
    """A docstring as markdown: lists of arguments as lists, examples as code, the rest as it is."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", docstring):
        rows = paragraph.split("\n")
        if rows[0].lstrip().startswith(">>>"):
            example = re.sub(r" *# doctest: .*", "", textwrap.dedent(paragraph))
            lines += ["```python", example, "```", ""]
        elif paragraph.startswith("    "):
            lines += [*rows, ""]
        else:
            lines += [*paragraph_lines(rows), ""]
    return lines


def paragraph_lines(rows: list[str]) -> Iterator[str]:
    """Text as it is; what is indented under `Args:` (or another label) becomes a list."""
    base = None
    for row in rows:
        indent = len(row) - len(row.lstrip())
        if not indent:
            base = None
            label = row.endswith(":") and " " not in row
            yield f"**{row}**\n" if label else escaped(row)
            continue
        base = indent if base is None else base
        name, colon, text = row.strip().partition(": ")
        if indent == base and colon:
            names = ", ".join(f"`{part}`" for part in name.replace("`", "").split(", "))
            yield f"- {names}: {escaped(text)}"
        else:
            yield f"  {escaped(row.strip())}"


def escaped(text: str) -> str:
    """Markdown's own characters outside of code, spelt out."""
    parts = re.split(r"(`[^`]*`)", text)
    plain = (re.sub(r"([*<])", r"\\\1", part) for part in parts[::2])
    return "".join(x for pair in zip(plain, [*parts[1::2], ""], strict=True) for x in pair)


def first_line(docstring: str | None) -> str:
    return escaped((docstring or "").split("\n\n")[0].replace("\n", " "))


# --- the notebooks ------------------------------------------------------------------------------


def notebook_page(path: Path) -> dict[str, str | bytes]:
    """One notebook as a page, and its pictures beside it."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    made: dict[str, str | bytes] = {}
    lines: list[str] = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [source, ""]
            continue
        lines += ["```python", source, "```", ""]
        for output in cell["outputs"]:
            data = output.get("data", {})
            text = output.get("text", data.get("text/plain"))
            if "image/png" in data:
                picture = f"{path.stem}_{len(made) + 1}.png"
                made[f"notebooks/{picture}"] = base64.b64decode("".join(data["image/png"]))
                lines += [f"![figure {len(made)}]({picture})", ""]
            elif text:
                lines += ["```text", "".join(text).rstrip(), "```", ""]
    return {f"notebooks/{path.stem}.md": "\n".join(lines), **made}


def main(arguments: list[str]) -> int:
    """Write all pages under the directory named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where to write them, made where it is not")
    directory = parser.parse_args(arguments).directory
    for name, content in pages().items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
