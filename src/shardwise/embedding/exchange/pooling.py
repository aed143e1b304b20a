"""Who adds the rows of a bag: their owners, or the requesting rank, which then gets each distinct row once."""

from shardwise.embedding.batch import Batch
from shardwise.embedding.exchange.hot_rows import HotRows
from shardwise.embedding.exchange.requests import BatchIndex, Outgoing, request_bags
from shardwise.embedding.exchange.rows import distinct_rows, request_rows

CHECK_EVERY = 64  # batches between comparisons: finding distinct rows costs as much as it may save
MIN_SAVED = 160  # bytes of message 2 for each id; less is not worth sorting the ids


class PoolingChoice:
    """Whether a rank requests sums or rows, from what each would have cost for one of its last batches.

    Owners do not know which it is, so each rank chooses for itself.

    Args:
        element_size: of message 2, in bytes.
        hot: requests those rows that are in many bags once; or None.
    """

    def __init__(self, element_size: int = 4, hot: HotRows | None = None) -> None:
        self._element_size, self._hot = element_size, hot
        self.by_owners = True
        self._batches = 0

    def request(self, index: BatchIndex, batch: Batch) -> Outgoing:
        """The request of a batch of bags."""
        compare, self._batches = self._batches % CHECK_EVERY == 0 and batch.weights is None, self._batches + 1
        outgoing = None
        if self.by_owners or compare:
            outgoing = request_bags(index, batch) if self._hot is None else self._hot.request(index, batch)
            if not compare:
                return outgoing
        routes, feature = index.routes, index.feature_of_bag.index_select(0, batch.bag)
        first = index.first_unit.index_select(0, batch.bag)
        rows = request_rows(
            routes, distinct_rows(routes, batch.values, feature), feature, first, index.of_all_runs.num_units
        )
        if outgoing is not None:
            saved = (sum(outgoing.results.received) - sum(rows.results.received)) * self._element_size
            self.by_owners = saved <= MIN_SAVED * batch.values.numel()
        return outgoing if outgoing is not None and self.by_owners else rows
