"""What a rank requests from the owners of rows (message 1), and in which form.

    bags   a run for each bag at each owner, which answers with the sum of its rows (`request_bags`)
    rows   a run for each distinct row, which the requesting rank repeats, or adds into its bags (`request_rows`)

For features a and b of two bags each, both row-wise on two ranks, the runs of the message to an owner are those of a's
first and second bag, then b's. A run may have no id. What depends only on the plan and the sizes of the batch is
computed once (`BatchIndex`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._lookups.ids import distinct_ids
from shardwise._lookups.pooling import owners_pool
from shardwise._lookups.row_requests import as_integers
from shardwise.embedding.batch import Batch
from shardwise.embedding.exchange.results import ResultIndex, counts_of, result_index, unit_targets
from shardwise.embedding.exchange.routes import Routes
from shardwise.embedding.kernels import RowUses, RunIndex, Runs

MOST_RUNS = 0.75  # if fewer runs than this fraction have an id, only these are sent
SPARSE = 0.5  # if at most this fraction can have an id, those without one are not numbered: measured, on CPUs
CHECK_EVERY = 64  # batches between comparisons of bags and rows: finding distinct rows costs as much as it may save


@dataclass(frozen=True)
class IdRequest:
    """Message 1 of a rank, in the order of owners and stacks, and where the results belong.

    Attributes:
        lengths: of runs; None: each run has one id.
        runs, ids: where those of each segment (owner, stack) end, starting with 0.
    """

    lengths: Tensor | None
    rows: Tensor
    weights: Tensor | None
    runs: list[int]
    ids: list[int]
    results: ResultIndex

    def messages(self, num_owners: int) -> list[list[Tensor]]:
        """The parts of the message to each owner."""
        per_owner = (len(self.runs) - 1) // num_owners
        runs, ids = self.runs[::per_owner], self.ids[::per_owner]
        parts: list[list[Tensor]] = [[] for _ in range(num_owners)]
        weights = None if self.weights is None else as_integers(self.weights, self.rows.dtype)
        for owner in range(num_owners):
            if self.lengths is not None:
                parts[owner].append(self.lengths[runs[owner] : runs[owner + 1]])
            parts[owner].append(self.rows[ids[owner] : ids[owner + 1]])
            if weights is not None:
                parts[owner].append(weights[ids[owner] : ids[owner + 1]])
        return parts

    def headers(self, num_owners: int) -> list[list[int]]:
        """For each owner and stack: whether lengths are sent, and the numbers of runs and of ids."""
        has_lengths = int(self.lengths is not None)
        counts = [
            n
            for (a, b), (c, d) in zip(pairwise(self.runs), pairwise(self.ids), strict=True)
            for n in (has_lengths, b - a, d - c)
        ]
        size = len(counts) // num_owners
        return [counts[i : i + size] for i in range(0, len(counts), size)]


# ---- bags ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllRuns:
    """What follows if every run is requested, also those without an id."""

    cell_of_run: Tensor | None  # None: runs are cells
    run_of_unit: Tensor
    results: ResultIndex


@dataclass(frozen=True)
class BatchIndex:
    """What follows from the plan and how many bags each feature has.

    Bags are numbered by feature. An interval is a range of rows that one owner holds. A cell is one bag within one
    interval; cells are in the order of the positions of their intervals.
    """

    routes: Routes
    feature_of_bag: Tensor
    base_of_bag: Tensor
    cell_shift: Tensor  # for each interval, what is added to a bag to get its cell
    num_cells: int
    cell_bounds: Tensor  # the first cell of each position
    runs_of_request: Tensor
    runs: list[int]  # where those of each segment end
    ends: Tensor  # the same
    num_units: int  # of the output
    bag_of_unit: Tensor  # of the output
    first_unit: Tensor  # the first unit of the output, of each bag
    stride: Tensor  # for each feature, units of the output from a bag to the next
    first_interval: Tensor  # of each bag
    interval_size: Tensor | None  # for each bag; None: look them up
    most_requests: Tensor  # for each bag, the requests that one of its ids is part of
    for_kernels: RunIndex | None  # None: intervals of several sizes, or ids of 64 bits

    @cached_property
    def all_runs(self) -> AllRuns:
        """Made when a batch needs it: there are tables × ranks × bags of them."""
        routes, runs = self.routes, self.runs_of_request
        first = F.pad(self.first_unit, (0, 1))[torch.searchsorted(self.feature_of_bag, routes.feature)]
        elements, stride = _elements(routes, runs, self.runs), self.stride[routes.feature]
        num_sent = sum(elements[1]) // routes.plan.unit
        run_of_unit, targets = unit_targets(runs, routes.widths, first + routes.column, stride, num_sent)
        replies = None if routes.replies is None else torch.repeat_interleave(routes.replies, runs * routes.widths)
        return AllRuns(
            cell_of_run=None if routes.in_order else _ranges(self.cell_bounds[routes.at], runs, self.runs[-1]),
            run_of_unit=run_of_unit,
            results=result_index(routes.plan.unit, self.num_units, targets, replies, *elements, routes.own),
        )

    def is_sparse(self, batch: Batch) -> bool:
        """Whether few of the runs can have an id: each id is in as many runs as its interval has requests."""
        most = SPARSE * self.runs[-1]
        return batch.values.numel() < most and int((batch.lengths * self.most_requests).sum()) < most

    def intervals(self, values: Tensor, rows: Tensor, bag: Tensor) -> Tensor:
        """The interval of each id. Dividing takes half as long as a search, or less."""
        if self.interval_size is None:
            return torch.searchsorted(self.routes.starts, rows, right=True) - 1
        quotients = values.div(self.interval_size.index_select(0, bag), rounding_mode="trunc")
        return quotients.add_(self.first_interval.index_select(0, bag))


def make_batch_index(routes: Routes, bags: tuple[int, ...]) -> BatchIndex:
    """The index of a batch with `bags` of each feature.

    If all features have as many, the output is one row a bag, with the columns of all features; else the outputs of
    the features are one after the other.
    """
    device, dims, sizes_of = routes.base.device, routes.dims, routes.sizes
    sizes = torch.tensor(bags, dtype=torch.int64, device=device)
    feature_of_bag = torch.repeat_interleave(torch.arange(len(bags), device=device), sizes)
    cells = torch.empty_like(routes.feature_of).index_copy_(0, routes.position, sizes[routes.feature_of])
    cell_bounds = F.pad(cells.cumsum(0), (1, 0))
    bag_base = sizes.cumsum(0) - sizes
    cell_shift = cell_bounds[routes.position] - bag_base[routes.feature_of]
    runs = sizes[routes.feature]
    if len(set(bags)) == 1:
        offsets, stride = dims.cumsum(0) - dims, dims.sum().expand(len(dims))
        bag_of_unit = (torch.repeat_interleave(bag_base, dims) + torch.arange(bags[0], device=device)[:, None]).view(-1)
    else:
        offsets, stride = (sizes * dims).cumsum(0) - sizes * dims, dims
        bag_of_unit = torch.repeat_interleave(dims[feature_of_bag])
    segments = routes.bounds(runs)
    return BatchIndex(
        routes=routes,
        feature_of_bag=feature_of_bag,
        base_of_bag=routes.base[feature_of_bag],
        cell_shift=cell_shift,
        num_cells=int(cells.sum()),
        cell_bounds=cell_bounds,
        runs_of_request=runs,
        runs=segments,
        ends=torch.tensor(segments, device=device),
        num_units=int((sizes * dims).sum()),
        bag_of_unit=bag_of_unit,
        first_unit=unit_targets(sizes, torch.ones_like(sizes), offsets, stride, sum(bags))[1],
        stride=stride,
        first_interval=torch.searchsorted(routes.feature_of, feature_of_bag),
        interval_size=None if sizes_of is None else torch.from_numpy(sizes_of).to(device)[feature_of_bag],
        most_requests=routes.most_requests[feature_of_bag],
        for_kernels=_for_kernels(routes, bags, cell_bounds, cell_shift),
    )


def _for_kernels(routes: Routes, bags: Sequence[int], cell_bounds: Tensor, cell_shift: Tensor) -> RunIndex | None:
    """The same for compiled kernels; None: intervals of several sizes, ids of 64 bits, or another device."""
    if routes.sizes is None or routes.dtype != torch.int32 or cell_bounds.device.type != "cpu":
        return None
    if max(table.layout.shape[0] for table in routes.plan.tables) > 1 << 31:  # ids of more bits than an owner's rows
        return None
    return RunIndex(
        bag_ends=np.cumsum(bags, dtype=np.int64),
        interval_size=routes.sizes,
        first_interval=np.searchsorted(routes.feature_of.numpy(), np.arange(len(bags))),
        position=routes.position.numpy(),
        cell_shift=cell_shift.numpy(),
        cell_bounds=cell_bounds.numpy(),
        at=routes.at.numpy(),
        shift=(routes.shift + routes.base[routes.feature]).numpy(),
    )


def _elements(routes: Routes, runs: Tensor, bounds: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The elements of message 2 from each owner and of message 3 to each owner.

    Args:
        runs: of each request.
        bounds: `routes.bounds(runs)`.
    """
    cols = np.array([key.cols for key in routes.plan.keys])
    sent = tuple((np.diff(bounds).reshape(-1, len(cols)) @ cols).tolist())
    if routes.replies is None:
        return sent, sent
    return tuple(routes.by_owner(runs * routes.widths * routes.plan.unit * routes.replies)), sent


def _ranges(starts: Tensor, counts: Tensor, total: int) -> Tensor:
    """`start, start + 1, …`, `count` of them, one range after the other, `total` in all."""
    shift = torch.repeat_interleave(starts - (counts.cumsum(0) - counts), counts, output_size=total)
    return shift + torch.arange(total, device=starts.device)


def request_bags(index: BatchIndex, batch: Batch) -> IdRequest:
    """Request the sums of the bags of a batch; of all, unless fewer than `MOST_RUNS` have an id at an owner."""
    if index.is_sparse(batch):
        return _request_occupied(index, batch)
    routes, found, segments = index.routes, None, index.runs
    if index.for_kernels is not None and batch.weights is None:
        found = routes.kernels.runs(index.for_kernels, batch.values, batch.lengths)
    rows, lengths, counts, weights = found or _runs(index, batch)
    results, occupied = index.all_runs.results, lengths > 0
    *ids, num_occupied = torch.cat([routes.ends(counts), occupied.sum().view(1)]).tolist()
    if num_occupied < MOST_RUNS * lengths.numel():
        lengths, segments = lengths[occupied], F.pad(occupied.cumsum(0), (1, 0))[index.ends].tolist()
        results = results.only(occupied[index.all_runs.run_of_unit])
    return IdRequest(lengths, rows, weights, segments, [0, *ids], results)


def _request_occupied(index: BatchIndex, batch: Batch) -> IdRequest:
    """Request the bags that have an id at an owner, in time and memory by the ids: no run without one is made."""
    routes, values, bag = index.routes, batch.values, batch.bag
    rows = values + index.base_of_bag.index_select(0, bag)
    interval = index.intervals(values, rows, bag)
    order = _stable_order(routes.position.index_select(0, interval), len(routes.starts))
    cells, lengths = torch.unique_consecutive(
        (index.cell_shift.index_select(0, interval) + bag).index_select(0, order), return_counts=True
    )
    id_ends = F.pad(lengths.cumsum(0), (1, 0))
    bounds = torch.searchsorted(cells, index.cell_bounds)  # the first of these cells of each position
    first, runs = bounds[routes.at], bounds.diff()[routes.at]
    ids = id_ends[bounds].diff()[routes.at]
    run_bounds, id_bounds = ([0, *ends] for ends in torch.stack([routes.ends(runs), routes.ends(ids)]).tolist())
    received, sent = _elements(routes, runs, run_bounds)
    picked, cell = order[_ranges(id_ends[first], ids, id_bounds[-1])], _ranges(first, runs, run_bounds[-1])
    request = torch.repeat_interleave(runs, output_size=cell.numel())
    targets = index.first_unit[bag[order][id_ends[:-1]]][cell] + routes.column[request]
    widths = routes.widths[request]
    return IdRequest(
        lengths=lengths.to(routes.dtype)[cell],
        rows=routes.shifted(rows[picked], ids),
        weights=None if batch.weights is None else batch.weights[picked],
        runs=run_bounds,
        ids=id_bounds,
        results=result_index(
            routes.plan.unit,
            index.num_units,
            _ranges(targets, widths, sum(sent) // routes.plan.unit),
            None if routes.replies is None else torch.repeat_interleave(routes.replies[request], widths),
            received,
            sent,
            routes.own,
        ),
    )


def _runs(index: BatchIndex, batch: Batch) -> Runs:
    routes, values, bag, lengths, weights = index.routes, batch.values, batch.bag, batch.lengths, batch.weights
    rows = values + index.base_of_bag.index_select(0, bag)
    if routes.several:
        interval = index.intervals(values, rows, bag)
        lengths = counts_of(index.cell_shift.index_select(0, interval) + bag, index.num_cells)
        order = _stable_order(routes.position.index_select(0, interval), len(routes.starts))
        rows, weights = rows.index_select(0, order), None if weights is None else weights.index_select(0, order)
    ends = F.pad(lengths.cumsum(0), (1, 0))[index.cell_bounds]
    counts = ends.diff()[routes.at]
    if index.all_runs.cell_of_run is not None:
        picked = _ranges(ends[routes.at], counts, int(counts.sum()))
        rows, weights = rows.index_select(0, picked), None if weights is None else weights.index_select(0, picked)
        lengths = lengths[index.all_runs.cell_of_run]
    return routes.shifted(rows, counts), lengths.to(routes.dtype), counts, weights


def _stable_order(keys: Tensor, num_keys: int) -> Tensor:
    """The stable order of small integers. On CPUs numpy has a radix sort for short ones, which is 6 times as fast."""
    if keys.device.type == "cpu" and num_keys <= 1 << 16:
        short = keys.numpy().astype(np.uint8 if num_keys <= 1 << 8 else np.uint16)
        return torch.from_numpy(np.argsort(short, kind="stable"))
    return keys.argsort(stable=True)


# ---- rows ---------------------------------------------------------------------------------------------------


def request_rows(routes: Routes, values: Tensor, feature: Tensor, first: Tensor, num_units: int) -> IdRequest:
    """Request each distinct row of valid ids.

    Args:
        values: the ids, int64.
        feature: of each id.
        first: the first unit of the output to which the row of each id is added.
        num_units: of the output.
    """
    found, index = None, routes.of_rows
    if index is not None:
        found = routes.kernels.row_uses(index, values, feature, first, num_units)
    if found is not None:
        uses, segments = found, routes.bounds(found.counts)
    else:
        uses, segments = _row_uses(routes, values, feature, first, num_units)
    from_owners, to_owners = _elements(routes, uses.counts, segments)
    results = ResultIndex(
        unit=routes.plan.unit,
        num_units=num_units,
        targets=uses.targets,
        target_offsets=uses.target_offsets,
        replies=_replies(routes, uses.counts),
        sources=uses.sources,
        offsets=uses.offsets,
        received=from_owners,
        sent=to_owners,
        own=routes.own,
    )
    return IdRequest(None, uses.rows, None, segments, segments, results)


def _replies(routes: Routes, counts: Tensor) -> Tensor | None:
    """Which units of message 3 are also in message 2, of `counts` runs of each request; None: all."""
    return None if routes.replies is None else torch.repeat_interleave(routes.replies, counts * routes.widths)


def _row_uses(
    routes: Routes, values: Tensor, feature: Tensor, first: Tensor, num_units: int
) -> tuple[RowUses, list[int]]:
    """The distinct rows and, starting with 0, where those of each segment end."""
    device, found = feature.device, distinct_ids(values + routes.base.index_select(0, feature))  # over all features
    bounds = F.pad(torch.searchsorted(found.values, routes.starts), (0, 1), value=found.values.numel())
    counts = bounds.diff()[routes.interval]
    widths = routes.dims[torch.searchsorted(routes.base, found.values, right=True) - 1]
    row_starts = F.pad(widths.cumsum(0), (1, 0))  # the first unit of each distinct row, as if they were all here
    of_id = routes.dims[feature]
    totals = torch.stack([(counts * routes.widths).sum(), row_starts[-1], of_id.sum()])
    *ends, num_sent, of_rows, of_ids = torch.cat([routes.ends(counts), totals]).tolist()
    rows = found.values[_ranges(bounds[routes.interval], counts, ends[-1])]
    starts, stride = row_starts[bounds[routes.interval]] + routes.column, routes.dims[routes.feature]
    _, held = unit_targets(
        counts, routes.widths, starts, stride, num_sent
    )  # the unit of the output that each unit of message 3 holds

    own, ones = torch.zeros(1, dtype=torch.int64, device=device).expand(feature.numel()), torch.ones_like(feature)
    _, wanted = unit_targets(ones, of_id, row_starts[found.inverse], own, of_ids)
    _, outputs = unit_targets(ones, of_id, first, own, of_ids)

    replies = _replies(routes, counts)
    received = held if replies is None else held[replies]
    position = torch.empty_like(received).index_copy_(0, received, torch.arange(received.numel(), device=device))
    per_output = counts_of(outputs, num_units)
    by_output = outputs.argsort(stable=True)
    by_row = found.order if wanted.numel() == feature.numel() else wanted.argsort(stable=True)
    uses = counts_of(wanted, of_rows)
    used = uses[held]
    num_used, once = torch.stack([used.sum(), (per_output == 1).all()]).tolist()
    uses_of_rows = RowUses(
        rows=routes.shifted(rows, counts),
        counts=counts,
        targets=outputs[by_row][_ranges((uses.cumsum(0) - uses)[held], used, num_used)],
        target_offsets=used.cumsum(0) - used,
        sources=position[wanted[by_output]],
        offsets=None if once else per_output.cumsum(0) - per_output,
    )
    return uses_of_rows, [0, *ends]


class PoolingChoice:
    """Whether a rank requests bags or rows, from what each would have cost for one of its last batches.

    Owners do not know which it is, so each rank chooses for itself.

    Args:
        element_size: of message 2, in bytes.
    """

    def __init__(self, element_size: int = 4) -> None:
        self._element_size = element_size
        self.by_owners = True
        self._batches = 0

    def request(self, index: BatchIndex, batch: Batch) -> IdRequest:
        """The request of a batch of bags."""
        compare, self._batches = self._batches % CHECK_EVERY == 0 and batch.weights is None, self._batches + 1
        bags = request_bags(index, batch) if self.by_owners or compare else None
        if bags is not None and not compare:
            return bags
        feature, first = (x.index_select(0, batch.bag) for x in (index.feature_of_bag, index.first_unit))
        rows = request_rows(index.routes, batch.values, feature, first, index.num_units)
        if bags is not None:
            sums, of_rows = (self._element_size * sum(way.results.received) for way in (bags, rows))
            self.by_owners = not of_rows or owners_pool(sums, of_rows, indexed_ids=batch.values.numel())
        return bags if bags is not None and self.by_owners else rows


# ---- bags whose weights of ids need gradients ---------------------------------------------------------------


def needs_gradients(batch: Batch) -> bool:
    """Whether the weights of ids need gradients."""
    return batch.weights is not None and batch.weights.requires_grad


def request_weighted(index: BatchIndex, batch: Batch) -> IdRequest:
    """Request the row of every id, by feature; owners of a weighted collection multiply it by 1.

    The gradient of the weight of an id is the dot product of its row and the gradient of its bag. Autograd computes it
    where both are, so a step still has three collectives.
    """
    routes, feature = index.routes, index.feature_of_bag.index_select(0, batch.bag)
    dims = routes.dims[feature]
    rows = request_rows(routes, batch.values, feature, dims.cumsum(0) - dims, int(dims.sum()))
    return replace(rows, weights=torch.ones_like(rows.rows, dtype=torch.float32))


def pool_weighted(batch: Batch, flat: Tensor, dims: Sequence[int], dtypes: Sequence[torch.dtype]) -> Tensor:
    """The weighted sums of rows, in the places of `BatchIndex`: flat, float32.

    Args:
        flat: the result of `request_weighted`.
        dims: the columns of each feature.
        dtypes: of the table of each feature, to which weights are rounded, as in one process.
    """
    assert batch.weights is not None
    rows = flat.split([n * dim for n, dim in zip(batch.sizes, dims, strict=True)])
    sums = [
        F.embedding_bag(
            torch.arange(n, device=flat.device),
            of_feature.view(n, dim),
            F.pad(lengths.cumsum(0), (1, 0)),
            mode="sum",
            per_sample_weights=weights.to(dtype).float(),
            include_last_offset=True,
        )
        for n, dim, of_feature, lengths, weights, dtype in zip(
            batch.sizes, dims, rows, batch.lengths.split(batch.bags), batch.weights.split(batch.sizes), dtypes,
            strict=True,
        )
    ]  # fmt: skip
    return (torch.cat(sums, 1) if len(set(batch.bags)) == 1 else torch.cat([s.reshape(-1) for s in sums])).view(-1)
