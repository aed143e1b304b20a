"""Python's garbage collection, which is off while thousands of objects are made that all stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_off() -> Iterator[None]:
    """Collect no garbage in the block, or in the function that this decorates.

    A full collection visits every object of the process, a million of them after `import torch`. Parsing the manifest
    of 100,000 chunks starts several: they took two thirds of its time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
