"""The documentation: links and pages that exist, every public name described, commands that run."""

import ast
import importlib
import re
from html.parser import HTMLParser
from pathlib import Path

import docs_pages
import pytest

import dflash_jax
from dflash_jax import cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = docs_pages.pages()
PAGES = {
    **{p.relative_to(DOCS).as_posix(): p.read_text(encoding="utf-8") for p in DOCS.rglob("*.md")},
    **{name: text for name, text in MADE.items() if isinstance(text, str)},
}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
WRITTEN = sorted([*DOCS.rglob("*.md"), ROOT / "README.md"])
FENCED = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAV = re.findall(r"^ +- .*?: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


def without_code(text: str) -> str:
    """Markdown without fenced blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


def anchors(text: str) -> set[str]:
    """The fragments of a page's headings, as Markdown's table of contents makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def broken(name: str, text: str, pages: dict[str, str]) -> list[str]:
    """Internal links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(without_code(text)):
        if "://" in link:
            continue
        path, _, fragment = link.partition("#")
        place = Path(name).parent / path if path else Path(name)
        to = place.as_posix()
        there = to in pages or to in MADE or (DOCS / to).is_file()
        if not there or (fragment and fragment not in anchors(pages[to])):
            found.append(link)
    return found


@pytest.mark.parametrize("name", sorted(PAGES))
def test_links_lead_somewhere(name):
    assert broken(name, PAGES[name], PAGES) == []


def test_a_link_that_leads_nowhere_is_seen():
    pages = {"a.md": "# One two\n[x](b.md) [y](#one-two) [z](#three) [w](c.md#no)", "c.md": "# Yes"}
    assert broken("a.md", pages["a.md"], pages) == ["b.md", "#three", "c.md#no"]


def test_the_navigation_names_every_page_once():
    assert sorted(NAV) == sorted(PAGES)


def test_links_of_the_readme_lead_somewhere():
    text = without_code((ROOT / "README.md").read_text(encoding="utf-8"))
    local = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link]
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_every_public_name_is_documented():
    headings = re.findall(r"^### (\S+)$", PAGES["api.md"], re.MULTILINE)
    assert sorted(headings) == sorted(dflash_jax.__all__)


def test_commands_in_the_pages_exist():
    calls = re.compile(r"(?:^|`|&& )dflash-jax ([a-z]+)", re.MULTILINE)
    named = {name for page in WRITTEN for name in calls.findall(page.read_text(encoding="utf-8"))}
    assert "generate" in named
    assert named <= {command.__name__.rpartition(".")[2] for command in cli.COMMANDS}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_examples_are_python_and_import_what_exists(page):
    for block in FENCED.findall(page.read_text(encoding="utf-8")):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("dflash_jax"):
                module = importlib.import_module(node.module)
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []


class Shapes(HTMLParser):
    """Tags left open."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("figure", sorted(DOCS.glob("figures/*.svg")), ids=lambda f: f.stem)
def test_figures_are_used_and_whole(figure):
    shapes = Shapes()
    shapes.feed(figure.read_text(encoding="utf-8"))
    assert not shapes.open
    assert any(f"figures/{figure.name}" in text for text in PAGES.values())
