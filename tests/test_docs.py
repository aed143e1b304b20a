"""Every Python block of the documentation and every example runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run(script: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name)
def test_the_python_blocks_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(BLOCK.findall(page.read_text())):
        script = tmp_path / f"block_{number}.py"
        script.write_text(block)
        run(script)


@pytest.mark.parametrize("example", sorted(ROOT.glob("examples/*.py")), ids=lambda p: p.name)
def test_an_example_runs(example: Path) -> None:
    assert run(example)
