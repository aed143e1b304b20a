"""Collections of tables that plans are made for, as production models have them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from engine_cells import KAGGLE

from shardwise.embedding import EmbeddingBagConfig

# MLPerf's DLRM-DCNv2 of Criteo's 1 TB data: rows of its 26 tables, and ids of a bag (recommendation_v2/torchrec_dlrm of
# github.com/mlcommons/training).
MLPERF_ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
MLPERF_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
MLPERF_BATCH = 65536


@dataclass(frozen=True)
class Tables:
    """A collection and its batches.

    Attributes:
        ids: of a bag of each feature, on average.
        bags: of each rank.
    """

    name: str
    configs: tuple[EmbeddingBagConfig, ...]
    ids: Mapping[str, float]
    bags: int


def lognormal(count: int, bags: int = 2048, most_rows: float = 2e8) -> Tables:
    """Rows and ids have lognormal distributions."""
    g = np.random.default_rng(0)
    rows, columns = np.exp(g.normal(14, 2.5, count)).clip(10, most_rows), g.choice([16, 32, 64, 128], count)
    return _tables(str(count), rows.astype(int).tolist(), columns.tolist(), _lognormal_ids(count), bags)


def kaggle(columns: int = 128, bags: int = 2048, most_rows: int = 1 << 40) -> Tables:
    """The 26 tables of Criteo's Kaggle data, with lognormal ids."""
    rows = [min(n, most_rows) for n in KAGGLE]
    return _tables("kaggle", rows, [columns] * len(rows), _lognormal_ids(len(rows)), bags)


def mlperf(columns: int = 128, bags: int = MLPERF_BATCH // 8, most_rows: int = 1 << 40) -> Tables:
    """The 26 tables of MLPerf's DLRM-DCNv2, with its batch on 8 ranks."""
    rows = [min(n, most_rows) for n in MLPERF_ROWS]
    return _tables("mlperf", rows, [columns] * len(rows), MLPERF_IDS, bags)


def _lognormal_ids(count: int) -> list[float]:
    g = np.random.default_rng(1)
    return [float(np.exp(g.normal(1.5, 1.2)).clip(1, 100)) for _ in range(count)]


def _tables(name: str, rows: Sequence[int], columns: Sequence[int], ids: Sequence[float], bags: int) -> Tables:
    configs = tuple(
        EmbeddingBagConfig(n, width, f"t{i}", feature_names=[f"f{i}"])
        for i, (n, width) in enumerate(zip(rows, columns, strict=True))
    )
    return Tables(name, configs, {f"f{i}": float(n) for i, n in enumerate(ids)}, bags)
