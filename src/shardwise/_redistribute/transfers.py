"""All-to-alls of boxes: the regions that a rank sends and receives, and boxes that other ranks hold, such as halos."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import Collective, Wait
from shardwise._layout import Box
from shardwise._trace import comm_trace
from shardwise._trace.autograd_function import TensorFunction
from shardwise._trace.comm_trace import INTERNAL, Cause, CommEvent, Purpose

Ranks = tuple[int, ...]
Boxes = tuple[Box, ...]
Wanted = tuple[tuple[int, Box], ...]  # (index of a tensor, box of it)


@dataclass(frozen=True)
class Region:
    """A region of one of several tensors."""

    index: int  # of the tensor
    slices: tuple[slice, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, box: Box, outer: Sequence[Box]) -> "Region":
        """The region of the first of the `outer` boxes that contains `box`."""
        index = next(i for i, b in enumerate(outer) if b.intersect(box) == box) if len(outer) > 1 else 0
        return cls(index, box.relative_to(outer[index]), box.sizes)


@dataclass(frozen=True)
class Regions:
    """What one rank sends and receives in an all-to-all, both in the order of `ranks`."""

    ranks: Ranks
    sends: tuple[Region, ...]
    recvs: tuple[Region, ...]
    sent: tuple[tuple[int, int], ...]  # to which of the ranks, and how many elements; of thousands of ranks only few
    received: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ranks: Ranks, sends: Sequence[tuple[int, Region]], recvs: Sequence[tuple[int, Region]]) -> "Regions":
        """Those to and from peers.

        Args:
            ranks: those that take part, rising; none if nothing is sent.
            sends: (receiver, region), in the order of `ranks`.
            recvs: (sender, region), in the order of `ranks`.
        """

        def counts(parts: Sequence[tuple[int, Region]]) -> tuple[tuple[int, int], ...]:
            found: dict[int, int] = {}
            for peer, region in parts if ranks else ():
                index = bisect_left(ranks, peer)
                found[index] = found.get(index, 0) + prod(region.sizes)
            return tuple(found.items())

        return cls(ranks, tuple(p for _, p in sends), tuple(p for _, p in recvs), counts(sends), counts(recvs))

    @property
    def send_counts(self) -> list[int]:
        """The elements sent to each rank."""
        return _counts(self.sent, len(self.ranks))

    @property
    def recv_counts(self) -> list[int]:
        """The elements received from each rank."""
        return _counts(self.received, len(self.ranks))

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The regions to send."""
        return [tensors[region.index][region.slices] for region in self.sends]

    def split(self, received: Tensor) -> list[Tensor]:
        """The regions received, each in its own shape."""
        found, end = [], 0
        for region in self.recvs:  # slices, because autograd refuses in-place ops on the views that `split` returns
            start, end = end, end + prod(region.sizes)
            found.append(received[start:end].view(region.sizes))
        return found


def _counts(found: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    counts = [0] * ranks
    for index, count in found:
        counts[index] = count
    return counts


# ---- all-to-all with gradients ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """All-to-alls among `ranks`. Counts are of elements of 1-D tensors, or of rows."""

    ranks: Ranks
    cause: Cause = INTERNAL

    def start(self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Wait:
        """Start one of a 1-D tensor, without a gradient; call the result to wait for it."""
        collective = Collective("all_to_all", send, self.ranks, (), send_counts, recv_counts)
        if len(self.ranks) == 1:
            return collectives.start(collective)
        before = comm_trace.set_purpose(Purpose(self.cause))
        try:
            if not comm_trace.listening():
                return collectives.start(collective)
            sent, cause = collective.sent_bytes(collectives.rank()), comm_trace.with_call_site(self.cause)
            with comm_trace.emitting(CommEvent(cause, None, None, self.ranks, sent, None)):
                return collectives.start(collective)
        finally:
            comm_trace.set_purpose(before)

    def all_to_all(self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        """One with a gradient: backward sends the gradients back."""
        return _AllToAll.apply(send, send_counts, recv_counts, self)

    def rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """The rows received for `rows`, both in the order of ranks, so many to and from each. Differentiable."""
        shape = rows.shape[1:]
        width = prod(shape)
        counts = [n * width for n in sent], [n * width for n in received]
        return self.all_to_all(rows.reshape(-1), *counts).view(sum(received), *shape)

    def gather(self, rows: Tensor, lengths: Sequence[int]) -> Tensor:
        """The rows of all ranks, which have so many, in the order of ranks. Differentiable."""
        count = len(self.ranks)
        repeated = rows.repeat(count, *[1] * (rows.ndim - 1))
        return self.rows(repeated, [len(rows)] * count, lengths)

    def headers(self, headers: Sequence[Sequence[int]], device: torch.device) -> list[list[int]]:
        """Send one header of integers to each rank, on this device; returns those received, in the order of ranks."""
        sent = torch.tensor(headers, device=device)
        counts = [sent.shape[1]] * len(self.ranks)
        received: list[list[int]] = self.start(sent.view(-1), counts, counts)().view(sent.shape).tolist()
        return received

    def for_backward(self) -> "Exchange":
        """The same, reported as part of the backward."""
        return Exchange(self.ranks, self.cause.for_backward())

    def here(self) -> "Exchange":
        """With the call site in its cause, if a listener wants it: its backward has it from the forward."""
        return Exchange(self.ranks, comm_trace.with_call_site(self.cause)) if comm_trace.listening() else self


class _AllToAll(TensorFunction):
    @staticmethod
    def forward(
        ctx: Any, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], exchange: Exchange
    ) -> Tensor:
        exchange = exchange.here()
        ctx.args = recv_counts, send_counts, exchange
        return exchange.start(send, send_counts, recv_counts)()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        *counts, exchange = ctx.args
        sent: Tensor = _AllToAll.apply(grads[0].contiguous(), *counts, exchange.for_backward())
        return sent, None, None, None


# ---- boxes that other ranks hold: halos, windows, rows at other indices --------------------------------------


def fetch(
    xs: Sequence[Tensor],
    ranks: Ranks,
    rank: int,
    held: tuple[Boxes, ...],
    wanted: tuple[Wanted, ...],
    cause: Cause,
) -> list[Tensor]:
    """The boxes that this rank wants. Differentiable.

    Args:
        xs: the local tensors of this rank, of one dtype.
        ranks: the ranks that take part.
        rank: this rank.
        held: for every tensor, its box on each of `ranks`; equal boxes are replicas, others do not overlap.
        wanted: for each of `ranks`, the boxes that it wants.

    Returns:
        One tensor for each box wanted; views of `xs` if no rank wants what another one holds.
    """
    me = ranks.index(rank)
    own, goals = [boxes[me] for boxes in held], wanted[me]
    plan = _regions_of(ranks, rank, held, wanted)
    if plan is None:
        return [_own_box(xs[i], own[i], goal) for i, goal in goals]
    # A rank that sends nothing of a tensor still depends on it, so that its backward has the same collectives.
    unsent = set(range(len(xs))) - {region.index for region in plan.sends}
    send = flat_cat([*(view.reshape(-1) for view in plan.views(xs)), *(xs[i].reshape(-1)[:0] for i in sorted(unsent))])
    received = Exchange(ranks, cause).all_to_all(send, plan.send_counts, plan.recv_counts)
    by_goal: list[list[tuple[Region, Tensor]]] = [[] for _ in goals]
    for region, x in zip(plan.recvs, plan.split(received), strict=True):
        by_goal[region.index].append((region, x))
    return [_assembled(parts, goal, received) for parts, (_, goal) in zip(by_goal, goals, strict=True)]


def flat_cat(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate 1-D tensors, some of them empty.

    The gradient that `torch.cat` gives an empty 1-D tensor is a constant. In double backward the graph of this rank
    would lack collectives that the graphs of other ranks have. An empty tensor of two dims gets a slice.
    """
    return torch.cat([x.unsqueeze(1) for x in parts]).squeeze(1)


def _own_box(x: Tensor, own: Box, goal: Box) -> Tensor:
    if own == goal:
        return x
    return x[goal.relative_to(own)] if goal.numel else x.reshape(-1)[:0].view(goal.sizes)


def _assembled(parts: list[tuple[Region, Tensor]], goal: Box, received: Tensor) -> Tensor:
    if not parts:
        return received[:0].view(goal.sizes)
    if len(parts) == 1:
        return parts[0][1]
    starts = [[s.start for s in region.slices] for region, _ in parts]
    dims = [dim for dim, column in enumerate(zip(*starts, strict=True)) if len(set(column)) > 1]
    if len(dims) == 1:  # the regions differ in one dim only
        parts = sorted(parts, key=lambda item: item[0].slices[dims[0]].start)
        return torch.cat([x for _, x in parts], dims[0])
    out = received.new_empty(goal.sizes)
    for region, x in parts:
        out[region.slices] = x
    return out


@lru_cache(maxsize=4096)
def _regions_of(ranks: Ranks, rank: int, held: tuple[Boxes, ...], wanted: tuple[Wanted, ...]) -> Regions | None:
    """What `rank` sends and receives; None if no rank wants what another one holds."""
    sends: list[tuple[int, Region]] = []
    recvs: list[tuple[int, Region]] = []
    anything_sent, me = False, ranks.index(rank)
    holders: list[dict[Box, list[int]]] = []
    for boxes in held:
        holders.append({})
        for index, box in enumerate(boxes):
            holders[-1].setdefault(box, []).append(index)
    for receiver, goals in enumerate(wanted):
        for number, (i, goal) in enumerate(goals):
            anything_sent |= goal.numel > 0 and held[i][receiver].intersect(goal) != goal
            for box in holders[i] if receiver == me else (held[i][me],):
                common, owners = box.intersect(goal), holders[i][box]
                if common is None:
                    continue
                sender = receiver if held[i][receiver] == box else owners[receiver % len(owners)]
                if sender == me:
                    sends.append((ranks[receiver], Region(i, common.relative_to(box), common.sizes)))
                if receiver == me:
                    recvs.append((ranks[sender], Region(number, common.relative_to(goal), common.sizes)))
    recvs.sort(key=itemgetter(0))
    return Regions.of(ranks, sends, recvs) if anything_sent else None
