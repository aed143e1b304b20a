"""The memory of a rank (`Stack`), and sums of rows, and of gradients by row, in plain torch.

    weight [100, 4], rows (7, 9, 7), offsets (0, 2, 3): two bags, (7, 9) and (7)
    pool(weight, rows, offsets)            [2, 4]: weight[7] + weight[9], weight[7]
    sums_by_row(by_row(rows, offsets), gradient)   rows (7, 9), [2, 4]: gradient[0] + gradient[1], gradient[0]

A gradient is summed by sorting the rows, and `torch.embedding_bag` of the gradients, whose indices are the bags of each
row: several times as fast as `index_add_`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from shardwise._lookups.ids import sort_ids

Ints = NDArray[np.int64]
Allocate = Callable[[int], Tensor]  # a 1-D tensor of so many elements

CHUNK_BYTES = 1 << 20  # bytes of sums made at once: they stay in the cache until they are used, and cost no page faults
MOST_AT_ONCE = 64  # gradients of a row that a thread block of a GPU adds up one after the other
LEVELS = 4  # of parts; those of the last are longer, if a row has more than MOST_AT_ONCE**LEVELS gradients
LARGEST_INT32 = (1 << 31) - 1


class ByRow(NamedTuple):
    """The ids of bags in the order of their rows.

    Attributes:
        rows: distinct, rising; int64.
        starts: where the bags of each row start in `bags`, and their number; of the dtype of `bags`.
        bags: of each id; int32 or int64.
        scale: of each id, or None.
    """

    rows: Tensor
    starts: Tensor
    bags: Tensor
    scale: Tensor | None


class RunIndex(NamedTuple):
    """How the ids of a batch become runs; integers of a CPU, int64. See exchange/requests.py.

    Attributes:
        bag_ends: the last bag of each feature, and 1; bags are numbered over all features.
        interval_size: rows of each interval of a feature.
        first_interval: of each feature.
        position: of each interval.
        cell_shift: of each interval: from a bag to its cell.
        cell_bounds: the first cell of each position, and the number of cells.
        at: the position of each request.
        shift: of each request: from a row of the feature to one of the owner's stack.
    """

    bag_ends: Ints
    interval_size: Ints
    first_interval: Ints
    position: Ints
    cell_shift: Ints
    cell_bounds: Ints
    at: Ints
    shift: Ints


Runs = tuple[Tensor, Tensor, Tensor, Tensor | None]  # see `Kernels.runs`


class RowIndex(NamedTuple):
    """How distinct rows become requests; integers of a CPU, int64. See `Routes`, whose names these are.

    Attributes:
        replies: whether the owner of each request returns rows; bool.
    """

    base: Ints
    dims: Ints
    starts: Ints
    feature_of: Ints
    interval: Ints
    column: Ints
    widths: Ints
    shift: Ints
    replies: NDArray[np.bool_]


class RowUses(NamedTuple):
    """The distinct rows of a batch by request, and where they are used; int64. See `ResultIndex`.

    Attributes:
        rows: of the owners' stacks, int32 or int64.
        counts: of each request.
        targets, target_offsets, sources, offsets: as in `ResultIndex`.
    """

    rows: Tensor
    counts: Tensor
    targets: Tensor
    target_offsets: Tensor
    sources: Tensor
    offsets: Tensor | None


class Kernels:
    """Local kernels; subclasses replace what they do faster."""

    name = "torch"

    def pool(
        self,
        weight: Tensor,
        rows: Tensor,
        offsets: Tensor,
        scale: Tensor | None = None,
        empty: Allocate | None = None,
    ) -> Tensor:
        """The sum of the rows of each bag, in float32.

        Args:
            weight: [rows, columns].
            rows: int32 or int64, [ids].
            offsets: where each bag starts, and the number of ids; [bags + 1], of the dtype of `rows`.
            scale: of each id, or None.
            empty: makes the memory of the result, float32 of so many elements; None: it is new.
        """
        bags, columns = len(offsets) - 1, weight.shape[1]
        if not rows.numel():
            return weight.new_zeros(bags, columns, dtype=torch.float32)
        scale = None if scale is None else scale.to(weight.dtype)
        chunk = _chunk(columns)
        if empty is None or weight.device.type != "cpu" or bags <= chunk:
            return _bags(weight, rows, offsets, scale).float()
        sums = empty(bags * columns).view(bags, columns)
        for begin in range(0, bags, chunk):
            ends = offsets[begin : begin + chunk + 1]
            low, high = int(ends[0]), int(ends[-1])
            of_ids = None if scale is None else scale[low:high]
            sums[begin : begin + chunk] = _bags(weight, rows[low:high], ends - low, of_ids) if high > low else 0
        return sums

    def sums_by_row(self, by_row: ByRow, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Distinct rows, in order, and the sum of the gradients of each; on CPUs a chunk at a time.

        The gradients of a row are added in the order of bags, so the sums have the same bits on all replicas.

        Args:
            by_row: the ids of the bags.
            gradient: of the sums of bags, [bags, columns], float32.

        Yields:
            int64 [rows], float32 [rows, columns], which the caller may overwrite.
        """
        distinct, starts, bags, scale = by_row
        if not len(distinct):
            return
        if gradient.device.type != "cpu":
            yield distinct, _long_bags(gradient, bags, starts, scale)
            return
        chunk = _chunk(gradient.shape[1])
        for begin in range(0, len(distinct), chunk):
            ends = starts[begin : begin + chunk + 1]
            low, high = int(ends[0]), int(ends[-1])
            of_ids = None if scale is None else scale[low:high]
            yield distinct[begin : begin + chunk], _bags(gradient, bags[low:high], ends - low, of_ids)

    def by_row(
        self, rows: Tensor, offsets: Tensor, scale: Tensor | None = None, empty: Allocate | None = None
    ) -> ByRow:
        """The ids of bags in the order of their rows; arguments as in `pool`, but `empty` makes int64."""
        ordered, bags, scale = _sorted(rows, offsets, scale)
        first = torch.ones(len(ordered) + 1, dtype=torch.bool, device=rows.device)
        torch.ne(ordered[1:], ordered[:-1], out=first[1:-1])
        starts = first.nonzero().squeeze(1)
        return ByRow(ordered.index_select(0, starts[:-1]).long(), starts.to(bags.dtype), bags, scale)

    def update(self, optimizer: object, stack: "Stack", by_row: ByRow, gradient: Tensor) -> bool:
        """Update the rows of bags at once, as `optimizer` would; False: these kernels cannot, and nothing changed.

        Args:
            by_row: the ids of the bags.
            gradient: of the sums of the bags.
        """
        return False

    def runs(self, index: RunIndex, values: Tensor, lengths: Tensor) -> Runs | None:
        """The ids of a batch by request and, for each, by bag; None: these kernels leave that to `request_bags`.

        Args:
            values: valid ids, int64, by feature and bag.
            lengths: of all bags, int64.

        Returns:
            Rows of the owners' stacks, int32 or int64; the lengths of runs, of the same dtype; the ids of each
            request, int64: how many; and the weight of each id, or None.
        """
        return None

    def row_uses(
        self, index: RowIndex, values: Tensor, feature: Tensor, first: Tensor, num_units: int
    ) -> RowUses | None:
        """The distinct rows of a batch; None: these kernels leave that to `request_rows`, whose arguments these are."""
        return None


@dataclass
class Stack:
    """The rows of all blocks of a rank with the same number of columns, dtype and replicas: [rows, columns].

    Attributes:
        states: of the optimizer, by name.
        group: the optimizer of the rows, among those of the collection.
        max_norm: the greatest norm of each row, in float32; None: rows have any.
        frozen: rows that are not trained, as `padding_idx` of tables that are looked up without pooling; or None.
    """

    weight: Tensor
    kernels: Kernels
    states: dict[str, Tensor] = field(default_factory=dict)
    group: int = 0
    frozen: Tensor | None = None
    max_norm: Tensor | None = None

    def renorm(self, rows: Tensor) -> None:
        """Scale those of the `rows` that are longer than their `max_norm`, as `F.embedding` does."""
        if self.max_norm is None:
            return
        rows = rows.long()
        limit, found = self.max_norm[rows], self.weight[rows]
        norm = found.float().norm(dim=1)
        long = norm > limit
        scale = (limit[long] / (norm[long] + 1e-7)).to(found.dtype)
        self.weight[rows[long]] = found[long] * scale[:, None]


def _chunk(columns: int) -> int:
    """Rows of float32 that are made at once."""
    return max(1, CHUNK_BYTES // (columns * 4))


def plain_kind(optimizer: object) -> str:
    """The class of an optimizer of this library whose options but `lr` and `eps` have their defaults; "": another."""
    kind = type(optimizer)
    if kind.__module__ != "shardwise.embedding.optimizers" or not is_dataclass(optimizer):
        return ""
    others = [option for option in fields(optimizer) if option.name not in {"lr", "eps"}]
    return kind.__name__ if all(getattr(optimizer, option.name) == option.default for option in others) else ""


def _sorted(rows: Tensor, offsets: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows in order, and the bag and scale of each."""
    bags = torch.repeat_interleave(offsets.diff().long(), output_size=len(rows))
    ordered, order = sort_ids(rows)
    dtype = torch.int32 if len(offsets) <= LARGEST_INT32 and len(rows) <= LARGEST_INT32 else torch.int64
    return ordered, bags.index_select(0, order).to(dtype), None if scale is None else scale.index_select(0, order)


def _bags(weight: Tensor, rows: Tensor, offsets: Tensor, scale: Tensor | None) -> Tensor:
    found: tuple[Tensor, ...] = torch.embedding_bag(
        weight, rows, offsets, per_sample_weights=scale, include_last_offset=True
    )
    return found[0]


def _long_bags(weight: Tensor, rows: Tensor, offsets: Tensor, scale: Tensor | None) -> Tensor:
    """`_bags` of which some are long: sums of parts of bags, and sums of these, as often as needed.

    The order of additions depends on the lengths alone, so the sums have the same bits on all replicas.
    """
    lengths, sizes = offsets.diff(), [MOST_AT_ONCE**level for level in range(1, LEVELS + 1)]
    parts = [(lengths + (size - 1)).div(size, rounding_mode="floor") for size in sizes]
    totals: list[int] = torch.stack([of_level.sum() for of_level in parts]).tolist()
    for of_level, total in zip(parts, totals, strict=True):
        if total == len(lengths):
            break
        ends = F.pad(of_level.cumsum(0), (1, 0))
        bag = torch.repeat_interleave(of_level, output_size=total)
        inside = torch.arange(total, device=rows.device) - ends[bag]
        starts = offsets[bag] + (inside * MOST_AT_ONCE).to(offsets.dtype)
        weight = _bags(weight, rows, torch.cat([starts, offsets[-1:]]), scale)
        rows, offsets, scale = torch.arange(total, device=rows.device), ends, None
    return _bags(weight, rows, offsets, scale)
