"""Data sets that need no network."""

from shardwise.demos.data.compression import lzma_bits, order2_bits
from shardwise.demos.data.criteo import CriteoBatch, CriteoDataset
from shardwise.demos.data.errors import DataError, MissingPackageError, PassError
from shardwise.demos.data.hide_one import (
    Batch,
    Examples,
    Quality,
    examples,
    places,
    popularity_baseline,
    quality,
)
from shardwise.demos.data.movielens import MovieLensDataset, RatingBatch
from shardwise.demos.data.parquet import ParquetBatch, ParquetDataset
from shardwise.demos.data.pydoc_topics import PydocTopics, load_pydoc_topics
from shardwise.demos.data.pyident import Bags, PyIdent, load_pyident

__all__ = [
    "Bags",
    "Batch",
    "CriteoBatch",
    "CriteoDataset",
    "DataError",
    "Examples",
    "MissingPackageError",
    "MovieLensDataset",
    "ParquetBatch",
    "ParquetDataset",
    "PassError",
    "PyIdent",
    "PydocTopics",
    "Quality",
    "RatingBatch",
    "examples",
    "load_pydoc_topics",
    "load_pyident",
    "lzma_bits",
    "order2_bits",
    "places",
    "popularity_baseline",
    "quality",
]
