"""The pytest plugin: ends the processes of real worlds with the session. Importing it imports no torch."""

import sys


def pytest_sessionfinish() -> None:
    """Stop all pools, if any test has started one."""
    pool = sys.modules.get("shardwise.testing.pool")
    if pool is not None:
        pool.close_pools()
