"""What mkdocs calls while it builds the site: the pages that are made from files outside docs/, the version, what the
search finds first, and which output is wrapped."""

import re
import tomllib
from html import unescape
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import shardwise

ROOT = Path(__file__).parents[2]
# A block of text or of output; code has spans of its tokens.
PLAIN_BLOCK = re.compile(r'<div class="highlight">(?=<pre><span></span><code>([^<]*)</code>)')
COLUMNS = re.compile(r"\S {3,}\S")
LONG = 100  # characters
SOURCE = '<details class="mkdocstrings-source"'  # the code of a function in the reference
WORDS: dict[str, list[str]] = tomllib.loads((ROOT / "tools/site/search.toml").read_text(encoding="utf-8"))
LAST = {"Reference", "Internals"}  # sections that the search lists after guides
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.copyright = f"shardwise {shardwise.__version__}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose text is a file of the repository's root, and the examples that pages link to."""
    for source, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=_from_docs((ROOT / source).read_text(encoding="utf-8"))))
    examples = ROOT / "examples"
    for example in sorted(x for end in ("py", "sbatch", "yaml") for x in examples.rglob(f"*.{end}")):
        files.append(File.generated(config, f"examples/{example.relative_to(examples)}", abs_src_path=str(example)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    page.meta["tags"] = WORDS.get(page.file.src_uri, [])
    if {section.title for section in page.ancestors} & LAST:
        page.meta.setdefault("search", {"boost": 0.1})
    return markdown.replace("](../examples/", "](examples/").replace("](../README.md", "](index.md")


def on_page_content(html: str, **_: object) -> str:
    """Wrap long lines of text, such as errors; not those of tables, whose columns would be lost. Search no code."""

    def marked(block: re.Match[str]) -> str:
        lines = unescape(block[1]).splitlines()
        is_text = any(len(line) > LONG for line in lines) and not any(map(COLUMNS.search, lines))
        return '<div class="highlight wrapped">' if is_text else block[0]

    return PLAIN_BLOCK.sub(marked, html).replace(SOURCE, f"{SOURCE} data-search-exclude")


def _from_docs(text: str) -> str:
    """`text` with its links as seen from docs/."""
    text = text.replace("](docs/", "](")
    for source, page in FROM_ROOT.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text
