"""Every Python block of the documentation and every example runs, and prints what the page says it does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# A Python block; a text block with nothing but an empty line between is what it prints.
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


def run(script: Path, folder: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)  # of all blocks of a page, each of which starts an interpreter
@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name)
def test_the_python_blocks_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    for block, output in BLOCK.findall(page.read_text()):
        script = tmp_path / "example.py"
        script.write_text(block)
        printed = run(script, tmp_path)
        assert not output or printed == output


@pytest.mark.parametrize("example", sorted(ROOT.glob("examples/*.py")), ids=lambda p: p.name)
def test_an_example_runs(example: Path) -> None:
    assert run(example)
