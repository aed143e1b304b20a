"""Bags of ids, the distinct ids among many (`DistinctIds`), and the ids for owners of rows (`OwnedIds`).

Ids are sorted once, for forward and backward. Sorting gives the distinct ids, and the gradient of a row is the sum of
the gradients of its ids, one segment of the sorted ids. These sums are one more pooled lookup, an order of magnitude
cheaper than torch's backward of a lookup on CPUs, which sorts again, or scatters.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._layout import checked
from shardwise._trace.autograd_function import TensorFunction
from shardwise.errors import IdTypeError

Span = tuple[int, int]  # from, to


class Bags(NamedTuple):
    """The division of ids into bags."""

    mode: str
    offsets: Tensor | None  # start of each bag, counted from this rank's first id; None for 2-D ids
    include_last_offset: bool = False

    def fit(self, num_ids: int) -> bool:
        """Whether the offsets rise from 0 to at most the number of this rank's ids."""
        if self.offsets is None:
            return True
        if self.offsets.numel() == 0:
            return num_ids == 0
        rising = bool((self.offsets.diff() >= 0).all())
        return rising and int(self.offsets[0]) == 0 and int(self.offsets[-1]) <= num_ids

    def without_end(self, ids: Tensor) -> tuple[Tensor, "Bags"]:
        """Equal ids and bags without `include_last_offset`: the last offset, and the ids after it, are dropped."""
        if self.offsets is None or not self.include_last_offset:
            return ids, self
        return ids[: int(self.offsets[-1])], Bags(self.mode, self.offsets[:-1])

    def count(self, ids: Tensor) -> int:
        """The number of bags."""
        return ids.shape[0] if self.offsets is None else self.offsets.numel() - self.include_last_offset

    def ends(self, ids: Tensor) -> Tensor:
        """The end of each bag, counted from the first id."""
        if self.offsets is None:
            return torch.arange(1, ids.shape[0] + 1, device=ids.device) * ids.shape[1]
        ends = self.offsets.long()
        return ends[1:] if self.include_last_offset else F.pad(ends, (0, 1), value=ids.numel())[1:]

    def lengths(self, ids: Tensor) -> Tensor:
        """The number of ids of each bag."""
        ends = self.ends(ids)
        return ends.diff(prepend=ends.new_zeros(1))

    def bag_of(self, ids: Tensor) -> Tensor:
        """The bag of each id; ids after the last bag get the number of bags."""
        positions = torch.arange(ids.numel(), device=ids.device)
        if self.offsets is None:
            return positions.div(max(ids.shape[1], 1), rounding_mode="floor")
        return torch.searchsorted(self.ends(ids), positions, right=True)


@dataclass(frozen=True)
class DistinctIds:
    """The distinct values of a 1-D tensor of ids; of 7 9 7:"""

    values: Tensor  # rising: 7 9
    inverse: Tensor  # the position of each id among `values`: 0 1 0
    order: Tensor  # positions of the ids, sorted by id: 0 2 1
    starts: Tensor  # where the positions of each value start in `order`: 0 2


def distinct_ids(ids: Tensor) -> DistinctIds:
    """The distinct ids in rising order (sorting beats hashing here)."""
    in_order, order = sort_ids(ids)
    values, runs, counts = torch.unique_consecutive(in_order, return_inverse=True, return_counts=True)
    inverse = torch.empty_like(runs).index_copy_(0, order, runs)
    return DistinctIds(values, inverse, order, counts.cumsum(0) - counts)


def sort_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted ids and their positions. On CPUs numpy sorts ids and positions packed in one word, which is faster."""
    bits = ids.numel().bit_length()
    if ids.device.type == "cpu" and 0 < bits <= 31:
        low, high = torch.aminmax(ids)
        if int(low) >= -(1 << 31) and int(high) < 1 << 31:
            packed = ids.long().bitwise_left_shift(bits).bitwise_or_(torch.arange(ids.numel()))
            keys = torch.from_numpy(np.sort(packed.numpy()))
            return keys.bitwise_right_shift(bits), keys.bitwise_and((1 << bits) - 1)
    in_order, order = ids.long().sort(stable=True)
    return in_order, order


@dataclass(frozen=True)
class OwnedIds:
    """The ids that a rank sends, ordered by the owner of their rows.

    An owner answers each run of ids with one sum. A run is a full bag, the part of a bag at one owner,
    or a distinct id.

    Attributes:
        spans: the ids of each owner: first, last + 1. Several owners may get equal ids.
        lengths: of each run; None: all are equal.
        runs: the runs of each owner: first, last + 1.
        bags: the bag of each run, if a run is the part of a bag; else None.
        distinct: if a run is a distinct id; else None.
    """

    ids: Tensor
    spans: tuple[Span, ...]
    lengths: Tensor | None
    runs: tuple[Span, ...]
    bags: Tensor | None = None
    distinct: DistinctIds | None = None

    def message_lengths(self) -> list[int]:
        """The number of integers for each owner: lengths of runs, and ids."""
        return [b - a + d - c for (a, b), (c, d) in zip(self.spans, self.runs, strict=True)]


def full_bags(ids: Tensor, bags: Bags, owners: Sequence[bool]) -> OwnedIds:
    """All ids, for each of the `owners` that gets any."""
    lengths = None if bags.offsets is None else bags.lengths(ids)
    spans, runs = (tuple((0, n) if needed else (0, 0) for needed in owners) for n in (ids.numel(), bags.count(ids)))
    return OwnedIds(ids.reshape(-1), spans, lengths, runs)


def distinct_by_owner(ids: Tensor, bounds: Sequence[Span]) -> OwnedIds:
    """The distinct ids of each owner, whose rows are `bounds`: first, last + 1."""
    distinct = distinct_ids(ids.reshape(-1))
    ends = torch.searchsorted(distinct.values, torch.tensor(bounds, device=ids.device)).tolist()
    spans = tuple((first, stop) for first, stop in ends)
    return OwnedIds(distinct.values, spans, None, spans, distinct=distinct)


def group_ids(ids: Tensor, bags: Bags, bounds: Sequence[Span]) -> OwnedIds:
    """The ids of each owner, by bag.

    Args:
        bounds: the rows of each owner: first, last + 1. Several owners may have equal rows.

    Returns:
        Without ids outside all bounds, and without those after the last bag.
    """
    ends = sorted({end for pair in bounds for end in pair})
    flat, bag, count = ids.reshape(-1), bags.bag_of(ids), bags.count(ids)
    if flat.numel() and int(bag[-1]) == count:
        flat, bag = flat[bag < count], bag[bag < count]
    band = torch.bucketize(flat, torch.tensor(ends, device=flat.device), right=True)
    table = torch.bincount(band * count + bag, minlength=(len(ends) + 1) * count).view(-1, count)
    at = table.nonzero()
    bands = [bisect_right(ends, start) if start < stop else -1 for start, stop in bounds]  # -1: an owner of nothing

    def spans(per_band: Tensor) -> tuple[Span, ...]:
        starts = [0, *per_band.cumsum(0).tolist()]
        return tuple((starts[b], starts[b + 1]) if b >= 0 else (0, 0) for b in bands)

    return OwnedIds(
        ids=flat[band.to(torch.int16).argsort(stable=True)],  # within a band by bag, in their order
        spans=spans(table.sum(1)),
        lengths=table[at[:, 0], at[:, 1]],
        runs=spans((table > 0).sum(1)),
        bags=at[:, 1],
    )


def expand(rows: Tensor, distinct: DistinctIds, ids: Tensor, bags: Bags | None) -> Tensor:
    """The row of every id of `ids`; with bags, their sums or means.

    Args:
        rows: one row for each of `distinct.values`.
        ids: only their shape is read: any without bags, else as for `F.embedding_bag`.
    """
    if rows.shape[0] == 0:
        shape = ids.shape if bags is None else bags.lengths(ids).shape
        return rows.new_zeros(*shape, rows.shape[1]) + rows.sum(dtype=rows.dtype)
    return _Lookup.apply(rows, distinct, ids, bags, False)


def coalesced_lookup(table: Tensor, ids: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
    """`F.embedding` of `ids` (with bags: `F.embedding_bag`); a sparse gradient is coalesced: each row is there once."""
    return _Lookup.apply(table, None, ids, bags, sparse)


class _Lookup(TensorFunction):
    """A lookup of `ids` in all rows, or only in the rows of `distinct`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, distinct: DistinctIds | None, ids: Tensor, bags: Bags | None, sparse: bool
    ) -> Tensor:
        ctx.args = distinct, ids, bags, sparse, rows.shape
        return plain_lookup(ids if distinct is None else distinct.inverse.view(ids.shape), rows, bags)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        distinct, ids, bags, sparse, shape = ctx.args
        found = distinct or distinct_ids(ids.reshape(-1))
        grad = _summed(grads[0], found, ids, bags)
        if distinct is None and sparse:
            grad = torch.sparse_coo_tensor(found.values[None], grad, shape, check_invariants=False, is_coalesced=True)
        elif distinct is None:
            grad = grad.new_zeros(shape).index_copy_(0, found.values, grad)
        return grad, None, None, None, None


def plain_lookup(ids: Tensor, rows: Tensor, bags: Bags | None, sparse: bool = False) -> Tensor:
    """torch's own lookup, with its own gradient."""
    if bags is None:
        if ids.numel() or sparse:
            return F.embedding(ids, rows, sparse=sparse)
        return rows.index_select(0, ids.reshape(-1)).view(*ids.shape, rows.shape[1])  # can be differentiated twice
    offsets = None if bags.offsets is None else bags.offsets.to(ids.dtype)
    return pool(ids, rows, offsets, bags.mode, sparse=sparse, include_last_offset=bags.include_last_offset)


def pool(
    ids: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    mode: str,
    weights: Tensor | None = None,
    padding_idx: int | None = None,
    sparse: bool = False,
    include_last_offset: bool = False,
) -> Tensor:
    """`F.embedding_bag`, also of rows without columns, on which torch's CUDA kernels read invalid memory."""
    if rows.shape[1]:
        return F.embedding_bag(
            ids, rows, offsets, mode=mode, sparse=sparse, per_sample_weights=weights, padding_idx=padding_idx,
            include_last_offset=include_last_offset,
        )  # fmt: skip
    bags = len(ids) if offsets is None else len(offsets) - include_last_offset
    nothing = F.embedding(ids.reshape(-1)[:0], rows, sparse=sparse).sum(0)  # has a gradient, and no kernel runs
    if weights is not None:
        nothing = nothing + weights.reshape(-1)[:0].sum()
    return nothing.expand(bags, 0)


def _summed(grad: Tensor, distinct: DistinctIds, ids: Tensor, bags: Bags | None) -> Tensor:
    """The gradient of the row of each of `distinct.values`: the sum of the gradients of its ids."""
    if bags is None:
        grad, row_of = grad.reshape(ids.numel(), grad.shape[-1]), distinct.order
    else:
        if bags.mode == "mean":
            grad = grad / bags.lengths(ids).clamp(min=1).unsqueeze(1).to(grad.dtype)
        if bags.include_last_offset:
            grad = F.pad(grad, (0, 0, 0, 1))  # ids after the last bag
        row_of = bags.bag_of(ids)[distinct.order]
    if not row_of.numel():
        return grad[:0]
    return pool(row_of, grad, distinct.starts, "sum")


@checked
def from_lengths(lengths: Tensor) -> Tensor:
    """The `offsets` of `F.embedding_bag`, the start of each bag, from the number of ids of each bag.

    For ids and bags that each rank has by itself, with `lengths` a DTensor: `DTensor.from_local(lengths, mesh,
    [Shard(0)])`. Offsets are positions among the ids of all ranks.

    Raises:
        IdTypeError: lengths that are not 1-D and int32 or int64.
    """
    if lengths.ndim != 1 or lengths.dtype not in (torch.int32, torch.int64) or lengths.layout != torch.strided:
        raise IdTypeError(
            f"from_lengths: lengths are 1-D and int32 or int64, got {lengths.ndim}-D {lengths.dtype}. "
            f"Fix: lengths.long(), one of each bag."
        )
    return lengths.cumsum(0) - lengths
