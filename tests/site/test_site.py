"""The documentation site: it builds without a warning, every link leads somewhere, and every public name is in it."""

import ast
import importlib
import posixpath
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import shardwise
from tests.site.conftest import ROOT, build
from tests.test_public_names import MODULES, public_names
from tools.site.hooks import on_page_content

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}


class Page(HTMLParser):
    """The ids of a page, where its links lead, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.in_navigation: list[str] = []
        self.loaded: list[str] = []
        self.styles: list[str] = []
        self._tags: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.ids |= {attributes[name] for name in ("id", "name") if name in attributes}
        self.styles.append(attributes.get("style", ""))
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
            if "md-nav__link" in attributes.get("class", ""):
                self.in_navigation.append(attributes["href"])
        if tag in LOADED and LOADED[tag] in attributes:
            self.loaded.append(attributes[LOADED[tag]])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    """Every page by its address below the site."""
    found = sorted(file for file in site.rglob("*.html") if file.name != "404.html")
    return {file.relative_to(site).as_posix(): Page(file.read_text(encoding="utf-8")) for file in found}


def target(page: str, link: str) -> tuple[str, str]:
    """The file and the id that a link of `page` leads to."""
    parts = urlsplit(link)
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(parts.path))) if parts.path else page
    return path, unquote(parts.fragment)


def test_every_link_leads_to_a_page_and_an_id_of_it(site: Path, pages: dict[str, Page]) -> None:
    broken = []
    for name, page in pages.items():
        for link in page.links:
            if not urlsplit(link).scheme:
                path, anchor = target(name, link)
                there = path in pages and (not anchor or anchor in pages[path].ids)
                if not there and (anchor or not (site / path).is_file()):
                    broken.append((name, link))
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert broken == []


def test_every_page_is_reached_by_the_navigation(pages: dict[str, Page]) -> None:
    reached, queue = {"index.html"}, ["index.html"]
    while queue:
        name = queue.pop()
        found = {target(name, link)[0] for link in pages[name].in_navigation}
        queue += found - reached
        reached |= found
    assert reached == pages.keys()


def test_nothing_is_loaded_from_another_server(site: Path, pages: dict[str, Page]) -> None:
    loaded = {(name, address) for name, page in pages.items() for address in page.loaded}
    assert {address for name, address in loaded if urlsplit(address).netloc} == set()
    assert [(name, address) for name, address in loaded if not (site / target(name, address)[0]).is_file()] == []
    styles = [file.read_text(encoding="utf-8") for file in site.rglob("*.css")]
    styles += [style for page in pages.values() for style in page.styles]
    assert [style for style in styles if re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style)] == []


def test_each_page_says_which_version_it_is_of(site: Path) -> None:
    for file in site.rglob("*.html"):
        assert f"shardwise {shardwise.__version__}\n" in file.read_text(encoding="utf-8")


def documented(site: Path) -> set[str]:
    """The full names with an entry in the reference."""
    *_, entries = (site / "objects.inv").read_bytes().split(b"\n", 4)
    return {line.split(" ")[0] for line in zlib.decompress(entries).decode().splitlines()}


def names_in_pages() -> set[tuple[str, str]]:
    """Module and name of whatever Python blocks of pages and examples import from public modules."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    block = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
    blocks = [code for page in pages for code in block.findall(page.read_text(encoding="utf-8"))]
    blocks += [example.read_text(encoding="utf-8") for example in ROOT.glob("examples/*.py")]
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    public = [node for node in nodes if re.fullmatch(r"shardwise(\.[a-z]\w*)*", node.module or "")]
    return {(str(node.module), alias.name) for node in public for alias in node.names}


def missing(names: set[tuple[str, str]], entries: set[str]) -> list[str]:
    """The names without an entry; those of torch, and submodules with a page of their own, need none."""
    found = []
    for module, name in sorted(names):
        value = getattr(importlib.import_module(module), name)
        home = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        if not (isinstance(value, ModuleType) or home.startswith("torch.") or {f"{module}.{name}", home} & entries):
            found.append(f"{module}.{name}")
    return found


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    entries = documented(site)
    public = {(name, each) for name in MODULES for each in public_names(importlib.import_module(name))}
    assert len(public) > 150
    assert missing(public | names_in_pages(), entries) == []
    assert missing({("shardwise._layout", "ring_elements")}, entries) == ["shardwise._layout.ring_elements"]


def test_globs_in_docstrings_are_not_read_as_emphasis(site: Path) -> None:
    pages = {file.name: file.read_text(encoding="utf-8") for file in (site / "reference").glob("*.html")}
    assert len(pages) > 10
    assert [(name, found) for name, text in pages.items() for found in re.findall("<em>.{,60}", text)] == []


@pytest.mark.parametrize(
    ("text", "wrapped"),
    [
        ("Fix: " + "a long line " * 10, True),
        ("  cost  op\n     3  matmul\n        avoid: " + "a long line " * 10, True),
        ("&gt;" * 40, False),
        ("name      " * 11 + "\n", False),
        ("a short line", False),
    ],
    ids=["error", "report", "escaped", "table", "short"],
)
def test_long_lines_are_wrapped_but_those_of_tables_are_not(text: str, wrapped: bool) -> None:
    html = f'<p>A</p><div class="highlight"><pre><span></span><code>{text}</code></pre></div>'
    assert ('class="highlight wrapped"' in on_page_content(html)) == wrapped


def test_code_is_not_wrapped() -> None:
    html = f'<div class="highlight"><pre><span></span><code><span class="n">{"x" * 200}</span></code></pre></div>'
    assert on_page_content(html) == html


def test_a_page_without_a_place_a_broken_link_and_a_broken_anchor_fail_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "ops.md").write_text("# Ops\n\n[a](nowhere.md) [b](ops.md#nowhere)\n")
    (docs / "forgotten.md").write_text("# Forgotten\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {docs}\nnav: [ops.md]\nhooks: []\n"
        f"theme: {{custom_dir: {ROOT / 'tools' / 'site' / 'theme'}}}\n"
    )
    done = build(tmp_path / "site", "--config-file", str(config))
    assert done.returncode == 1
    for complaint in ("- forgotten.md", "'nowhere.md'", "'ops.md#nowhere'"):
        assert complaint in done.stderr
