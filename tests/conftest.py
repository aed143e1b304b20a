"""Settings of all test runs."""

import gc


def pytest_collection_finish() -> None:
    """Garbage collections skip the million objects of imported modules and collected tests: a tenth of all time."""
    gc.collect()
    gc.freeze()
