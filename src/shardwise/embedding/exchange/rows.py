"""Message 1 of lookups without pooling: each distinct row is requested once."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.embedding.exchange.requests import Outgoing, Routes, ranges, results_of
from shardwise.embedding.exchange.results import unit_targets
from shardwise.lookups.ids import DistinctIds, distinct_ids
from shardwise.trace.autograd_function import TensorFunction


@dataclass(frozen=True)
class DistinctRows:
    """The distinct rows among the ids of all features, and where each id finds its own."""

    distinct: DistinctIds
    unit: int
    num_units: int  # of the distinct rows
    units: Tensor  # for each unit of the rows of all ids, that of the distinct rows
    kept: Tensor | None  # which units of the output these are, the others are zero; None: all

    def expand(self, rows: Tensor) -> Tensor:
        """The rows of all ids, flat, of the distinct ones."""
        found = rows.view(-1, self.unit).index_select(0, self.units)
        if self.kept is not None:
            found = found.new_zeros(self.kept.numel(), self.unit).masked_scatter_(self.kept[:, None], found)
        return found.view(-1)

    def sum(self, grad: Tensor) -> Tensor:
        """The gradient of the distinct rows, flat, of that of the rows of all ids."""
        grad = grad.reshape(-1, self.unit)
        if self.kept is not None:
            grad = grad[self.kept]
        if self.num_units == self.distinct.values.numel():  # a row is one unit
            if not self.num_units:
                return grad.view(-1)
            return F.embedding_bag(self.distinct.order, grad, self.distinct.starts, mode="sum").view(-1)
        return grad.new_zeros(self.num_units, self.unit).index_add_(0, self.units, grad).view(-1)


class _Context(Protocol):
    rows: DistinctRows


class ExpandRows(TensorFunction):
    """The rows of all ids, flat, of the distinct ones."""

    @staticmethod
    def forward(ctx: _Context, distinct: Tensor, rows: DistinctRows) -> Tensor:
        ctx.rows = rows
        return rows.expand(distinct)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.sum(grads[0]), None


def request_rows(
    routes: Routes, values: Tensor, feature: Tensor, kept: Tensor | None, all_features: Tensor
) -> tuple[Outgoing, DistinctRows]:
    """Request the row of each id, once for each feature.

    Args:
        values: valid ids, int64, by feature.
        feature: of each id.
        kept: which ids of the input these are; the rows of the others are zero. None: all.
        all_features: of each id of the input.
    """
    found = distinct_ids(values + routes.base[feature])
    bounds = F.pad(torch.searchsorted(found.values, routes.starts), (0, 1), value=found.values.numel())
    counts = bounds.diff()[routes.interval]
    rows = found.values[ranges(bounds[routes.interval], counts)]
    feature_of = torch.searchsorted(routes.base, found.values, right=True) - 1
    widths = routes.dims[feature_of]
    first = widths.cumsum(0) - widths
    starts = F.pad(first, (0, 1))[bounds[routes.interval]] + routes.column
    _, targets = unit_targets(counts, routes.widths, starts, routes.dims[routes.feature])
    num_units = int(widths.sum())
    segments = routes.bounds(counts)
    results = results_of(routes, counts, num_units, targets)
    ones = torch.ones_like(feature)
    _, units = unit_targets(ones, routes.dims[feature], first[found.inverse], ones)
    in_output = None if kept is None else torch.repeat_interleave(kept, routes.dims[all_features])
    expanded = DistinctRows(found, routes.plan.unit, num_units, units, in_output)
    return Outgoing(None, routes.shifted(rows, counts), None, segments, segments, results), expanded
