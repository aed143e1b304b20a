"""The distinct ids among many (`Distinct`), and their rows expanded to all ids (`spread`).

Bags may be requested in another way: the owners of rows sum what they hold of a bag (`Grouped`).

Sorting the ids is paid once: it gives the different ids, and it is also what the backward needs, which sums
the gradients of all ids of a row. As segments of the sorted ids those sums are one more pooled lookup,
an order of magnitude cheaper on CPUs than torch's own backward of a lookup, which sorts again or scatters.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class Bags(NamedTuple):
    """How ids form bags."""

    mode: str
    offsets: Tensor | None  # where each bag starts, counted from this rank's first id; None for 2-D ids
    include_last_offset: bool = False

    def fit(self, num_ids: int) -> bool:
        """Whether the bags are made of this rank's ids, all of them and no others."""
        if self.offsets is None:
            return True
        if self.offsets.numel() == 0:
            return num_ids == 0
        rising = bool((self.offsets.diff() >= 0).all())
        return rising and int(self.offsets[0]) == 0 and int(self.offsets[-1]) <= num_ids

    def without_end(self, ids: Tensor) -> tuple[Tensor, "Bags"]:
        """The ids up to the last offset, where that ends the last bag, and bags that each go up to the next."""
        if self.offsets is None or not self.include_last_offset:
            return ids, self
        return ids[: int(self.offsets[-1])], Bags(self.mode, self.offsets[:-1])

    def ends(self, ids: Tensor) -> Tensor:
        """Where each bag ends, counted from the first id."""
        if self.offsets is None:
            return torch.arange(1, ids.shape[0] + 1, device=ids.device) * ids.shape[1]
        ends = self.offsets.long()
        return ends[1:] if self.include_last_offset else F.pad(ends, (0, 1), value=ids.numel())[1:]

    def lengths(self, ids: Tensor) -> Tensor:
        """How many ids each bag has."""
        ends = self.ends(ids)
        return ends.diff(prepend=ends.new_zeros(1))

    def bag_of(self, ids: Tensor) -> Tensor:
        """The bag of each id; ids after the last bag get the number of bags."""
        positions = torch.arange(ids.numel(), device=ids.device)
        if self.offsets is None:
            return positions.div(max(ids.shape[1], 1), rounding_mode="floor")
        return torch.searchsorted(self.ends(ids), positions, right=True)


@dataclass(frozen=True)
class Distinct:
    """The distinct values of a 1-D tensor of ids."""

    values: Tensor  # rising
    inverse: Tensor  # the position of each id among `values`
    order: Tensor  # positions of the ids, sorted by id
    starts: Tensor  # where the positions of each of `values` start in `order`


def distinct(ids: Tensor) -> Distinct:
    """The distinct ids in rising order (sorting beats hashing here)."""
    in_order, order = _sorted(ids)
    values, runs, counts = torch.unique_consecutive(in_order, return_inverse=True, return_counts=True)
    inverse = torch.empty_like(runs).index_copy_(0, order, runs)
    return Distinct(values, inverse, order, counts.cumsum(0) - counts)


def _sorted(ids: Tensor) -> tuple[Tensor, Tensor]:
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
class Grouped:
    """The ids of bags by the owner of their rows, and under each owner by bag.

    A run is what one bag has of one owner: what the owner adds up, and answers with one sum.
    """

    ids: Tensor
    spans: tuple[tuple[int, int], ...]  # the ids of each owner
    lengths: Tensor  # of each run
    bags: Tensor  # whose each run is
    runs: tuple[tuple[int, int], ...]  # the runs of each owner

    def message_lengths(self) -> list[int]:
        """How many ids and lengths of runs each owner gets, together."""
        return [b - a + d - c for (a, b), (c, d) in zip(self.spans, self.runs, strict=True)]


def grouped(ids: Tensor, bags: Bags, bounds: Sequence[tuple[int, int]]) -> Grouped:
    """Group the ids of `bags` by owners, each of which has the rows between two `bounds`; several may have the same.

    Ids outside all bounds, or after the last bag, are left out.
    """
    ends = sorted({end for pair in bounds for end in pair})
    flat, bag, count = ids.reshape(-1), bags.bag_of(ids), bags.ends(ids).numel()
    if flat.numel() and int(bag[-1]) == count:
        flat, bag = flat[bag < count], bag[bag < count]
    band = torch.bucketize(flat, torch.tensor(ends, device=flat.device), right=True)
    table = torch.bincount(band * count + bag, minlength=(len(ends) + 1) * count).view(-1, count)
    at = table.nonzero()
    reach_of_ids, reach_of_runs = ([0, *x.sum(1).cumsum(0).tolist()] for x in (table, table > 0))
    bands = [bisect_right(ends, start) if start < stop else -1 for start, stop in bounds]  # -1: an owner of nothing
    return Grouped(
        flat[band.to(torch.int16).argsort(stable=True)],  # within a band by bag, in their order
        tuple((reach_of_ids[b], reach_of_ids[b + 1]) if b >= 0 else (0, 0) for b in bands),
        table[at[:, 0], at[:, 1]],
        at[:, 1],
        tuple((reach_of_runs[b], reach_of_runs[b + 1]) if b >= 0 else (0, 0) for b in bands),
    )


def number_of_distinct(ids: Tensor, num_rows: int) -> int:
    """How many distinct ids there are; an upper bound where counting would cost as much as sorting them."""
    if num_rows > max(64 * ids.numel(), 1 << 16):
        return ids.numel()
    seen = torch.zeros(num_rows + 1, dtype=torch.bool, device=ids.device)
    seen[ids.clamp(-1, num_rows)] = True  # those outside the table count as one
    return int(seen.sum())


def spread(rows: Tensor, found: Distinct, ids: Tensor, bags: Bags | None) -> Tensor:
    """Row `found.inverse[i]` of `rows` for every id i of `ids`; with bags, their sums or means.

    Args:
        rows: one row for each of `found.values`.
        ids: for their shape: any without bags, else as `F.embedding_bag` takes them.
    """
    if rows.shape[0] == 0:
        shape = ids.shape if bags is None else bags.lengths(ids).shape
        return rows.new_zeros(*shape, rows.shape[1]) + rows.sum()
    return _Spread.apply(rows, found, ids, bags)  # type: ignore[no-any-return, no-untyped-call]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, found: Distinct, ids: Tensor, bags: Bags | None) -> Tensor:
        ctx.args = found, ids, bags
        return plain_lookup(found.inverse.view(ids.shape), rows, bags)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _summed(grads[0], *ctx.args), None, None, None


def looked_up(table: Tensor, ids: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
    """`F.embedding` of `ids` (with bags: `F.embedding_bag`) whose gradient, sparse or not, has every row once."""
    return _Lookup.apply(table, ids, bags, sparse)  # type: ignore[no-any-return, no-untyped-call]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
        ctx.args = ids, bags, sparse, table.shape
        return plain_lookup(ids, table, bags)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ids, bags, sparse, shape = ctx.args
        found = distinct(ids.reshape(-1))
        rows = _summed(grads[0], found, ids, bags)
        if sparse:
            grad = torch.sparse_coo_tensor(found.values[None], rows, shape, check_invariants=False, is_coalesced=True)
        else:
            grad = rows.new_zeros(shape).index_copy_(0, found.values, rows)
        return grad, None, None, None


def plain_lookup(ids: Tensor, rows: Tensor, bags: Bags | None, sparse: bool = False) -> Tensor:
    """torch's own lookup, with its own gradient."""
    if bags is None:
        return F.embedding(ids, rows, sparse=sparse)
    offsets, last = None if bags.offsets is None else bags.offsets.to(ids.dtype), bags.include_last_offset
    return F.embedding_bag(ids, rows, offsets, mode=bags.mode, sparse=sparse, include_last_offset=last)


def _summed(grad: Tensor, found: Distinct, ids: Tensor, bags: Bags | None) -> Tensor:
    """The gradient of each of `found.values`: the sum of the gradients of its ids."""
    if bags is None:
        grad, row_of = grad.reshape(-1, grad.shape[-1]), found.order
    else:
        if bags.mode == "mean":
            grad = grad / bags.lengths(ids).clamp(min=1).unsqueeze(1).to(grad.dtype)
        if bags.include_last_offset:
            grad = F.pad(grad, (0, 0, 0, 1))  # ids after the last bag
        row_of = bags.bag_of(ids)[found.order]
    if not row_of.numel():
        return grad[:0]
    return F.embedding_bag(row_of, grad, found.starts, mode="sum")
