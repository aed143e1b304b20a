"""Message 1 with one run for each distinct row, which the requesting rank repeats, or adds into its bags."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.embedding.exchange.requests import Outgoing, Routes, elements, ranges
from shardwise.embedding.exchange.results import ResultIndex, unit_targets
from shardwise.lookups.ids import DistinctIds, distinct_ids


def distinct_rows(routes: Routes, values: Tensor, feature: Tensor) -> DistinctIds:
    """The distinct rows among valid ids, int64, of the given features; rows are numbered over all features."""
    return distinct_ids(values + routes.base.index_select(0, feature))


def request_rows(routes: Routes, found: DistinctIds, feature: Tensor, first: Tensor, num_units: int) -> Outgoing:
    """Request each distinct row.

    Args:
        found: the distinct rows.
        feature: of each id.
        first: the first unit of the output to which the row of each id is added.
        num_units: of the output.
    """
    device = feature.device
    bounds = F.pad(torch.searchsorted(found.values, routes.starts), (0, 1), value=found.values.numel())
    counts = bounds.diff()[routes.interval]
    rows = found.values[ranges(bounds[routes.interval], counts)]
    widths = routes.dims[torch.searchsorted(routes.base, found.values, right=True) - 1]
    row_starts = F.pad(widths.cumsum(0), (1, 0))  # the first unit of each distinct row, as if they were all here
    starts = row_starts[bounds[routes.interval]] + routes.column
    _, held = unit_targets(counts, routes.widths, starts, routes.dims[routes.feature])  # by each unit of message 3

    own = torch.zeros(1, dtype=torch.int64, device=device).expand(feature.numel())
    ones, of_id = torch.ones_like(feature), routes.dims[feature]
    _, wanted = unit_targets(ones, of_id, row_starts[found.inverse], own)
    _, outputs = unit_targets(ones, of_id, first, own)

    replies = None if routes.replies is None else torch.repeat_interleave(routes.replies, counts * routes.widths)
    received = held if replies is None else held[replies]
    position = torch.empty_like(received).index_copy_(0, received, torch.arange(received.numel(), device=device))
    per_output = torch.bincount(outputs, minlength=num_units)
    by_output = outputs.argsort(stable=True)
    by_row = found.order if wanted.numel() == feature.numel() else wanted.argsort(stable=True)
    uses = torch.bincount(wanted, minlength=int(row_starts[-1]))
    used = uses[held]
    results = ResultIndex(
        routes.plan.unit,
        num_units,
        outputs[by_row][ranges((uses.cumsum(0) - uses)[held], used)],
        used.cumsum(0) - used,
        replies,
        position[wanted[by_output]],
        None if bool((per_output == 1).all()) else per_output.cumsum(0) - per_output,
        *elements(routes, counts),
    )
    segments = routes.bounds(counts)
    return Outgoing(None, routes.shifted(rows, counts), None, segments, segments, results)
