"""What holds for all tests."""

import gc

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no garbage collection needs to visit their million objects again."""
    gc.collect()
    gc.freeze()
