"""Data sets that need no network."""

from shardwise.data.errors import DataError
from shardwise.data.hide_one import Batch, Examples, Quality, examples, places, popularity_baseline, quality
from shardwise.data.pyident import Bags, PyIdent, load_pyident

__all__ = [
    "Bags",
    "Batch",
    "DataError",
    "Examples",
    "PyIdent",
    "Quality",
    "examples",
    "load_pyident",
    "places",
    "popularity_baseline",
    "quality",
]
