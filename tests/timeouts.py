"""How long tests wait, also on a busy machine."""

import os

PATIENCE_SECONDS = 300.0  # what takes longer hangs


def under_load(seconds: float) -> float:
    """A timeout that a test waits for: `seconds`, and in proportion more where many processes share a core."""
    return round(seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)) / 3), 1)
