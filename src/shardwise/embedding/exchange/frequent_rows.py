"""Which rows are the most frequent ones, and how many of each feature it pays to request once."""

import numpy as np
from numpy.typing import NDArray

from shardwise.embedding.plan import Ints

Floats = NDArray[np.float64]

DECAY = 0.5  # of counts, from one sampled batch to the next: rows that are no longer looked up make room after a few
BISECTIONS = 40


class RowCounts:
    """About how often each row was looked up in the sampled batches, of the most frequent rows only.

    Rows that are dropped for others start at 0 again.

    Args:
        most: rows that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.rows: Ints = np.zeros(0, np.int64)
        self.counts: Floats = np.zeros(0)

    def add(self, rows: Ints) -> None:
        """The rows of a batch, each as often as it is looked up."""
        new, new_counts = np.unique(rows, return_counts=True)
        found, position = np.unique(np.concatenate((self.rows, new)), return_inverse=True)
        counts: Floats = np.bincount(position, np.concatenate((self.counts * DECAY, new_counts)), len(found)).astype(
            float
        )
        if len(found) > self._most:
            kept = np.sort(np.argpartition(counts, len(found) - self._most)[len(found) - self._most :])
            found, counts = found[kept], counts[kept]
        self.rows, self.counts = found, counts


def best_counts(gains: Floats, sizes: Ints, row_bytes: Ints, most_bytes: int) -> Ints:
    """How many rows of each feature to take, the first ones of each, so that they gain most.

    Args:
        gains: of the rows of each feature, one feature after the other.
        sizes: the rows of each feature.
        row_bytes: of a row of each feature.
        most_bytes: of all rows that are taken.

    Returns:
        The most that can be gained, if that fits into `most_bytes`. Otherwise the most at a price of each byte, the
        lowest price at which it fits.
    """
    parts = np.split(gains, sizes.cumsum()[:-1])
    totals = [np.concatenate(([0.0], part.cumsum())) for part in parts]

    def at(price: float) -> Ints:
        return np.array(
            [
                (total - price * width * np.arange(len(total))).argmax()
                for total, width in zip(totals, row_bytes.tolist(), strict=True)
            ],
            dtype=np.int64,
        )

    found = at(0.0)
    if int(found @ row_bytes) <= most_bytes:
        return found
    low, high = 0.0, 1.0 + max(float(part.max(initial=0)) for part in parts)  # at which no row is taken
    for _ in range(BISECTIONS):
        price = (low + high) / 2
        low, high = (low, price) if int(at(price) @ row_bytes) <= most_bytes else (price, high)
    return at(high)
