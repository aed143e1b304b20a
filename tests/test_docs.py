"""Every Python block of the documentation and every example runs, and prints what the page says it does."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.forked import run_forked

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# A Python block; a text block with nothing but an empty line between is what it prints.
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


def run(script: Path, folder: Path | None = None, arguments: Sequence[Path] = ()) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = run_forked([str(script), *map(str, arguments)], folder or Path.cwd(), environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# All in one process: importing torch takes longer than most of them.
IN_TURN = """
import linecache, pathlib, runpy, sys
example = pathlib.Path("example.py").resolve()
for script in list(sys.argv[1:]):
    example.write_text(pathlib.Path(script).read_text())
    linecache.clearcache()
    sys.argv = [str(example)]
    try:
        runpy.run_path(str(example), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    print("\\0", end="", flush=True)
"""


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name)
def test_the_python_blocks_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    found = BLOCK.findall(page.read_text())
    scripts = [tmp_path / f"block_{number}.txt" for number in range(len(found))]
    for script, (block, _) in zip(scripts, found, strict=True):
        script.write_text(block)
    in_turn = tmp_path / "in_turn.py"
    in_turn.write_text(IN_TURN)
    *printed, _ = run(in_turn, tmp_path, scripts).split("\0")
    for (_, output), text in zip(found, printed, strict=True):
        assert not output or text == output


# `tests/test_examples.py` runs those that say what they print, those that train for longer, and the modules of these.
OTHERS = re.compile(r"^prints$|^from common import |^def (?:on_ranks|invent|texts)\b", re.MULTILINE)
SILENT = [p for p in sorted(ROOT.glob("examples/*.py")) if not OTHERS.search(p.read_text())]


@pytest.mark.parametrize("example", SILENT, ids=lambda p: p.name)
def test_an_example_runs(example: Path) -> None:
    assert run(example)
