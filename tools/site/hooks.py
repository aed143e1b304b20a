"""What mkdocs calls while it builds the site: the pages that are made from files outside docs/, and the version."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import shardwise

ROOT = Path(__file__).parents[2]
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.extra["version"] = shardwise.__version__
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose text is a file of the repository's root, and the examples that pages link to."""
    for source, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=_from_docs((ROOT / source).read_text(encoding="utf-8"))))
    examples = ROOT / "examples"
    for example in sorted(x for end in ("py", "sbatch", "yaml") for x in examples.rglob(f"*.{end}")):
        files.append(File.generated(config, f"examples/{example.relative_to(examples)}", abs_src_path=str(example)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    return markdown.replace("](../examples/", "](examples/").replace("](../README.md", "](index.md")


def _from_docs(text: str) -> str:
    """`text` with its links as seen from docs/."""
    text = text.replace("](docs/", "](")
    for source, page in FROM_ROOT.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text
