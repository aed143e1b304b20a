"""How far warm calls go through the library: `tools/walk.py`."""

import pytest

from shardwise.testing import world
from tools.walk import walks

MOST_FRAMES = {"matmul": 4, "gathering matmul": 30, "redistribute": 32, "x[2:5]": 14}


@pytest.mark.processes
def test_warm_calls_make_few_frames() -> None:
    found, _ = world(2, real=True).run(walks)
    counts = {name: len(found[name][-1]) for name in MOST_FRAMES}
    assert all(counts[name] <= most for name, most in MOST_FRAMES.items()), counts
