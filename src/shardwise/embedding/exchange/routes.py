"""What a rank requests from which owner, whatever the batch (`Routes`).

A table of 6 rows, row-wise on two ranks, that features a and b share. Rows are numbered over all features: 0 to 5 are
those of a, 6 to 11 those of b. An interval is a range of them that the same owners hold.

    base      (0, 6)          the first row of each feature
    starts    (0, 3, 6, 9)    the first row of each interval

A request is one feature's ids within one interval, sent to one owner. Requests are in the order of messages:

    owner     (0, 0, 1, 1)
    feature   (0, 1, 0, 1)
    interval  (0, 2, 1, 3)
    shift     (0, -6, -3, -9)   from a row over all features to one of the owner's stack

Column-wise, each feature has one interval, and both ranks are sent its ids.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.embedding.kernels import Kernels, RowIndex
from shardwise.embedding.plan import Ints, Plan

LARGEST_INT32 = (1 << 31) - 1


@dataclass(frozen=True)
class Routes:
    """The requests of a rank, as tensors on its device.

    Attributes:
        base: of each feature, its first row.
        dims: of each feature, its columns, in units.
        starts, feature_of: of each interval.
        position: of each interval, in the order in which ids are grouped by interval.
        sizes: for each feature, of all its intervals but the last, which may be smaller; None: there are others.
        interval, owner, feature, shift: of each request.
        at: the position of the interval of each request.
        in_order: whether requests are in the order of positions, one each.
        column, widths: the columns that the owner of each request holds: the first, and how many, in units.
        most_requests: of each feature, the most requests that share an interval.
        replies: whether the owner of each request returns rows; other replicas only need gradients. None: all do.
        segments: the last request of each owner and stack.
        own: the position of the rank among the owners.
    """

    plan: Plan
    kernels: Kernels
    base: Tensor
    dims: Tensor
    starts: Tensor
    feature_of: Tensor
    position: Tensor
    sizes: Ints | None
    interval: Tensor
    owner: Tensor
    feature: Tensor
    shift: Tensor
    at: Tensor
    in_order: bool
    column: Tensor
    widths: Tensor
    most_requests: Tensor
    replies: Tensor | None
    segments: Tensor
    own: int

    @property
    def dtype(self) -> torch.dtype:
        """Of message 1."""
        return torch.int32 if self.plan.ids_fit_int32 else torch.int64

    @property
    def several(self) -> bool:
        """Whether some feature has several intervals."""
        return len(self.starts) > len(self.base)

    @cached_property
    def of_rows(self) -> RowIndex | None:
        """The same for compiled kernels; None: ids of 64 bits, or another device."""
        num_rows = sum(self.plan.tables[t].layout.shape[0] for t in self.plan.table_of)
        if self.dtype != torch.int32 or num_rows > LARGEST_INT32 or self.base.device.type != "cpu":
            return None
        replies = torch.ones_like(self.owner, dtype=torch.bool) if self.replies is None else self.replies
        columns = (self.base, self.dims, self.starts, self.feature_of, self.interval, self.column, self.widths)
        return RowIndex(*(x.numpy() for x in (*columns, self.shift, replies)))

    def by_owner(self, of_requests: Tensor) -> list[int]:
        """The sum over the requests to each owner."""
        sums = torch.zeros(len(self.plan.ranks), dtype=torch.int64, device=of_requests.device)
        return [int(n) for n in sums.index_add_(0, self.owner, of_requests).tolist()]

    def ends(self, of_requests: Tensor) -> Tensor:
        """Where the sums over the requests of each segment (owner, stack) end."""
        return F.pad(of_requests.cumsum(0), (1, 0))[self.segments]

    def bounds(self, of_requests: Tensor) -> list[int]:
        """The same on the host, starting with 0."""
        return [0, *self.ends(of_requests).tolist()]

    def shifted(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows of the owners' stacks, of rows over all features, `counts` for each request."""
        return torch.add(rows, torch.repeat_interleave(self.shift, counts, output_size=len(rows))).to(self.dtype)


def make_routes(plan: Plan, rank: int, device: torch.device, kernels: Kernels) -> Routes:
    """What `rank` requests."""
    rows = np.array([plan.tables[t].layout.shape[0] for t in plan.table_of], dtype=np.int64)
    base = rows.cumsum() - rows
    starts, columns = _requests(plan, rank, base)
    owner, stack, feature, interval, shift, column, width, replies = columns
    all_starts = np.concatenate(starts)
    feature_of = np.repeat(np.arange(len(starts)), [len(of_feature) for of_feature in starts])
    position = np.arange(len(all_starts))
    if len(owner) == len(all_starts) > len(rows):  # ids are sorted by interval: at once in the order of messages
        position[interval] = np.arange(len(all_starts))
    at = position[interval]
    num_segments = len(plan.ranks) * len(plan.keys)

    def put(values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return Routes(
        plan=plan,
        kernels=kernels,
        base=put(base),
        dims=put(np.array(plan.dims) // plan.unit),
        starts=put(all_starts),
        feature_of=put(feature_of),
        position=put(position),
        sizes=_sizes(base, rows, all_starts, feature_of),
        interval=put(interval),
        owner=put(owner),
        feature=put(feature),
        shift=put(shift),
        at=put(at),
        in_order=bool(np.array_equal(at, np.arange(len(all_starts)))),
        column=put(column // plan.unit),
        widths=put(width // plan.unit),
        most_requests=put(
            np.maximum.reduceat(np.bincount(interval), np.searchsorted(feature_of, np.arange(len(rows))))
        ),
        replies=None if replies.all() else put(replies).bool(),
        segments=put(np.searchsorted(owner * len(plan.keys) + stack, np.arange(num_segments), side="right")),
        own=plan.ranks.index(rank),
    )


def _requests(plan: Plan, rank: int, base: Ints) -> tuple[list[Ints], list[Ints]]:
    """The first rows of the intervals of each feature; and of each request, in this order:

    its owner, stack, feature, interval, shift, first column, columns, and whether the owner replies.
    """
    blocks = plan.blocks
    by_table = np.argsort(blocks.table, kind="stable")
    bounds = np.searchsorted(blocks.table[by_table], np.arange(len(plan.tables) + 1))
    mesh = plan.tables[0].layout.mesh
    coordinates = np.array([mesh.coordinate(r) for r in plan.ranks], dtype=np.int64)
    own = coordinates[plan.ranks.index(rank)]
    starts: list[Ints] = []
    found: list[tuple[Ints, ...]] = []
    num_intervals = 0
    for feature, table in enumerate(plan.table_of):
        held = by_table[bounds[table] : bounds[table + 1]]
        first, stop = blocks.row[held], blocks.row[held] + blocks.rows[held]
        ends = np.unique(np.concatenate((first, stop)))
        low, high = np.searchsorted(ends, first), np.searchsorted(ends, stop)
        index = np.repeat(np.arange(len(held)), high - low)  # the index of the block of each request
        inside = np.arange(len(index)) - np.repeat((high - low).cumsum() - (high - low), high - low)
        of, axes = held[index], list(plan.tables[table].replicated)
        replies = (coordinates[:, axes] == own[axes]).all(1)[blocks.position[of]]
        found.append((
            blocks.position[of], blocks.stack[of], np.full(len(of), feature), num_intervals + low[index] + inside,
            blocks.first[of] - blocks.row[of] - base[feature], blocks.col[of], blocks.cols[of], replies,
        ))  # fmt: skip
        starts.append(base[feature] + ends[:-1])
        num_intervals += len(ends) - 1
    columns = [np.concatenate(column).astype(np.int64) for column in zip(*found, strict=True)]
    order = np.lexsort(columns[5::-1])  # the last key counts first
    return starts, [column[order] for column in columns]


def _sizes(base: Ints, rows: Ints, starts: Ints, feature_of: Ints) -> Ints | None:
    """The size of the intervals of each feature, if an id is in the interval that division by it says."""
    first = np.searchsorted(feature_of, np.arange(len(rows)))
    counts = np.bincount(feature_of, minlength=len(rows))
    second = np.append(starts, 0)[first + 1]
    sizes = np.where(counts > 1, second - base, rows)
    even = np.array_equal(starts, base[feature_of] + (np.arange(len(starts)) - first[feature_of]) * sizes[feature_of])
    return sizes if even and bool((counts * sizes >= rows).all()) else None
