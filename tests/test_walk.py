"""How far warm calls go through the library: `tools/walk.py`."""

from pathlib import Path

import pytest

from shardwise import launch
from tools.walk import RANKS, walks

MOST_FRAMES = {
    "matmul": 4,
    "gathering matmul": 26,
    "redistribute": 27,
    "x[2:5]": 13,
    "backward of a gathered leaf": 57,
    "AdamW step": 94,
}


@pytest.mark.processes
def test_warm_calls_make_few_frames(tmp_path: Path) -> None:
    found = launch(walks, str(tmp_path), nproc=RANKS)  # new processes, whose world has no other groups
    counts = {name: len(found[name][-1]) for name in MOST_FRAMES}
    assert all(counts[name] <= most for name, most in MOST_FRAMES.items()), counts
