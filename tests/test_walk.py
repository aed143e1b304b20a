"""How far warm calls go through the library: `tools/walk.py`."""

import os
import re
from pathlib import Path

import pytest

from tests.forked import run_forked

MOST_FRAMES = {
    "matmul": 4,
    "gathering matmul": 26,
    "redistribute": 27,
    "x[2:5]": 13,
    "backward of a gathered leaf": 57,
    "AdamW step": 111,
}


@pytest.mark.processes
def test_warm_calls_make_few_frames() -> None:
    table = run_forked(["-m", "tools.walk"], Path(__file__).parents[1], os.environ, ranks=True)
    assert table.returncode == 0, table.stderr
    counts = {line[:30].strip(): int(re.findall(r"(\d+) in ", line)[-1]) for line in table.stdout.splitlines()[1:]}
    assert all(counts[name] <= most for name, most in MOST_FRAMES.items()), table.stdout
