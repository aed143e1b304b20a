"""Hot rows: those that are in many bags are requested once each, and only the other ids in bags.

That saves a run of a bag if all its ids are hot, and costs one run for each hot row, so which rows are hot is computed
from a batch: the most frequent ones of each feature, as many as save most bytes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise.embedding.batch import Batch
from shardwise.embedding.exchange.frequent_rows import Floats, RowCounts, best_counts
from shardwise.embedding.exchange.merged import merged
from shardwise.embedding.exchange.requests import BatchIndex, Outgoing, Routes, request_bags, stable_order
from shardwise.embedding.exchange.rows import request_rows
from shardwise.embedding.plan import Ints
from shardwise.errors import ConfigError, PlanError
from shardwise.lookups.ids import DistinctIds

SAMPLE_EVERY = 32  # batches: one that is sampled is counted, and requested in two ways
COUNTED = 2  # times as many rows are counted as can be hot
SLOTS = 16  # of the hash table, for each hot row
HASH = -7046029254386353131  # 2**64 divided by the golden ratio, odd, as int64


@dataclass(frozen=True)
class HotRowsReport:
    """What hot rows saved on this rank in the last batch that was compared, one of 32.

    Attributes:
        rows: how many are hot; a row counts for each of its features.
        row_bytes: of one message of all of them.
        bytes_without: of messages 2 and 3 between this rank and others, if no row were hot.
        bytes_with: the same, as sent.
    """

    rows: int = 0
    row_bytes: int = 0
    bytes_without: int = 0
    bytes_with: int = 0

    @property
    def share_removed(self) -> float:
        """Of the bytes; 0 to 1."""
        return 1 - self.bytes_with / self.bytes_without if self.bytes_without else 0.0

    def __str__(self) -> str:
        return (
            f"{self.rows} hot rows ({self.row_bytes} bytes); results and gradients: {self.bytes_with} bytes, "
            f"{self.bytes_without} without hot rows, {self.share_removed:.0%} removed"
        )


class HotRows:
    """The hot rows of one rank, which owners need not know.

    Args:
        most_bytes: of all hot rows in one message.
        element_sizes: of messages 2 and 3, in bytes.
        own: the position of this rank among all.
    """

    def __init__(self, routes: Routes, most_bytes: int, element_sizes: tuple[int, int], own: int) -> None:
        plan, device = routes.plan, routes.base.device
        self._base = routes.requests.base
        self._routes, self._most_bytes, self._element_sizes, self._own = routes, most_bytes, element_sizes, own
        replies = torch.ones_like(routes.owner) if routes.replies is None else routes.replies.long()
        sent = routes.widths * plan.unit * (replies * element_sizes[0] + element_sizes[1]) * (routes.owner != own)
        self._run_bytes = torch.zeros(len(routes.starts), dtype=torch.int64, device=device)
        self._run_bytes.index_add_(0, routes.interval, sent)  # of a run of each interval, between this rank and others
        self._row_bytes: Ints = np.array(plan.dims) * element_sizes[0]  # of each feature
        self._widths = [key.cols // plan.unit for key in plan.keys] * len(plan.ranks)
        self._counts = RowCounts(COUNTED * max(1, most_bytes // int(self._row_bytes.min())))
        self._set(np.zeros(0, np.int64))
        self._batches = 0
        self.report = HotRowsReport()

    def request(self, index: BatchIndex, batch: Batch) -> Outgoing:
        """The request of a batch of bags without weights of ids."""
        sample, self._batches = self._batches % SAMPLE_EVERY == 0, self._batches + 1
        if not sample:
            return self._mixed(index, batch)
        self._set(self._choose(index, batch))
        bags, mixed = request_bags(index, batch), self._mixed(index, batch)
        if self._bytes(mixed) >= self._bytes(bags):
            self._set(np.zeros(0, np.int64))
            mixed = bags
        features = np.searchsorted(self._base, self._rows.cpu().numpy(), side="right") - 1
        row_bytes = int(self._row_bytes[features].sum())
        self.report = HotRowsReport(len(features), row_bytes, self._bytes(bags), self._bytes(mixed))
        return mixed

    def _bytes(self, outgoing: Outgoing) -> int:
        """Of messages 2 and 3 between this rank and others."""
        messages = (outgoing.results.received, outgoing.results.sent)
        return sum(
            (sum(sizes) - sizes[self._own]) * element_size
            for sizes, element_size in zip(messages, self._element_sizes, strict=True)
        )

    def _mixed(self, index: BatchIndex, batch: Batch) -> Outgoing:
        """Hot rows once each, the other ids in bags."""
        if not self._rows.numel():
            return request_bags(index, batch)
        rows = batch.values + index.base_of_bag.index_select(0, batch.bag)
        number = self._slots.index_select(0, self._hashed(rows))
        is_hot = self._rows.index_select(0, number) == rows
        at = is_hot.nonzero().squeeze(1)
        if not at.numel():
            return request_bags(index, batch)
        bag, number = batch.bag.index_select(0, at), number.index_select(0, at)
        found = _distinct(self._rows, number)
        feature, first = index.feature_of_bag.index_select(0, bag), index.first_unit.index_select(0, bag)
        hot = request_rows(self._routes, found, feature, first, index.of_all_runs.num_units)
        cold = request_bags(index, batch.where(~is_hot), most_runs=1)
        return merged(cold, hot, self._widths)

    # ---- which rows are hot ----

    def _choose(self, index: BatchIndex, batch: Batch) -> Ints:
        """The rows over all features that would have saved most of this batch, the most frequent ones last."""
        rows = batch.values + index.base_of_bag.index_select(0, batch.bag)
        interval = index.intervals(batch.values, rows, batch.bag)
        far = self._run_bytes.index_select(0, interval) > 0  # of rows that other ranks hold
        cells = (index.cell_shift.index_select(0, interval) + batch.bag)[far]
        looked_up = rows[far].cpu().numpy()
        self._counts.add(looked_up)
        known, counts = self._counts.rows, self._counts.counts
        if not len(known):
            return known
        features = np.searchsorted(self._base, known, side="right") - 1
        order = np.lexsort((-counts, features))
        gains = self._gains(known[order], looked_up, cells.cpu(), index)
        sizes = np.bincount(features, minlength=len(self._base))
        taken = best_counts(gains, sizes, self._row_bytes, self._most_bytes)
        starts = np.repeat(sizes.cumsum() - sizes, sizes)
        chosen = order[np.arange(len(order)) - starts < np.repeat(taken, sizes)]
        return known[chosen[np.argsort(counts[chosen], kind="stable")]]

    def _gains(self, known: Ints, looked_up: Ints, cells: Tensor, index: BatchIndex) -> Floats:
        """The bytes that each known row saves if it and those before it are hot: by the runs that end with it."""
        by_row = np.argsort(known)
        at = by_row[np.searchsorted(known, looked_up, sorter=by_row).clip(max=len(known) - 1)]
        ranks = np.where(known[at] == looked_up, at, len(known))
        last = torch.full((index.num_cells,), -1, dtype=torch.int64)  # of each run, its least frequent row
        last.scatter_reduce_(0, cells, torch.from_numpy(ranks), "amax")
        runs = ((last >= 0) & (last < len(known))).nonzero().squeeze(1)
        intervals = np.argsort(self._routes.position.cpu().numpy())
        of_runs = intervals[np.searchsorted(index.cell_bounds.cpu().numpy(), runs.numpy(), side="right") - 1]
        run_bytes = self._run_bytes.cpu().numpy()
        gains: Floats = np.bincount(last[runs].numpy(), run_bytes[of_runs], len(known)).astype(float)
        present = np.unique(ranks[ranks < len(known)])
        intervals_of = np.searchsorted(self._routes.starts.cpu().numpy(), known[present], side="right") - 1
        gains[present] -= run_bytes[intervals_of]
        return gains

    def _set(self, rows: Ints) -> None:
        """Make rows hot, and a hash table of them. Of those with the same slot only the last is."""
        found = torch.from_numpy(rows)
        self._shift = 64 - max(1, (SLOTS * len(rows)).bit_length())
        slots, hashed = np.zeros(1 << (64 - self._shift), np.int64), self._hashed(found).numpy()
        slots[hashed] = np.arange(len(rows))
        kept = torch.from_numpy(np.sort(rows[slots[hashed] == np.arange(len(rows))]))
        slots[self._hashed(kept).numpy()] = np.arange(len(kept))
        device = self._routes.base.device
        self._rows, self._slots = kept.to(device), torch.from_numpy(slots).to(device)

    def _hashed(self, rows: Tensor) -> Tensor:
        """The slot of each row: the upper bits of a product, as rows may be multiples of anything."""
        return rows.mul(HASH).bitwise_right_shift_(self._shift).bitwise_and_((1 << (64 - self._shift)) - 1)


def check_hot_rows(most_bytes: int, pooled: bool, weighted: bool) -> None:
    """Whether a collection can have hot rows.

    Raises:
        ConfigError: negative bytes.
        PlanError: it cannot.
    """
    if most_bytes < 0:
        raise ConfigError(
            f"hot_rows is {most_bytes}, expected 0 or more bytes. "
            f"Fix: the memory of a rank for copies of rows, such as 64 << 20; 0 for none."
        )
    if most_bytes and not pooled:
        raise PlanError("hot_rows: an EmbeddingCollection requests each row once in any case. Fix: hot_rows=0.")
    if most_bytes and weighted:
        raise PlanError(
            "hot_rows: owners multiply by the weights of ids, so they need all ids in bags. Fix: hot_rows=0."
        )


def _distinct(rows: Tensor, number: Tensor) -> DistinctIds:
    """The distinct ones of `rows`, which are sorted, of ids that are given by their number."""
    counts = torch.bincount(number, minlength=rows.numel())
    present = counts > 0
    inverse = (present.cumsum(0) - 1).index_select(0, number)
    counts = counts[present]
    return DistinctIds(rows[present], inverse, stable_order(inverse, counts.numel()), counts.cumsum(0) - counts)
