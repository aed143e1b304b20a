"""All-to-alls with gradients: of elements, of rows, and of boxes that other ranks hold, such as halos."""

from collections.abc import Callable, Sequence
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
from shardwise._redistribute.packing import Region, Regions
from shardwise._trace import comm_trace
from shardwise._trace.autograd_function import TensorFunction
from shardwise._trace.comm_trace import INTERNAL, Cause, CommEvent, Purpose

Ranks = tuple[int, ...]
Boxes = tuple[Box, ...]
Wanted = tuple[tuple[int, Box], ...]  # (index of a tensor, box of it)


@dataclass(frozen=True)
class Exchange:
    """All-to-alls among `ranks`. Counts are of elements of 1-D tensors, or of rows."""

    ranks: Ranks
    cause: Cause = INTERNAL

    def start(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        allocate: Callable[[int], Tensor] | None = None,
    ) -> Wait:
        """Start one of a 1-D tensor, without a gradient; call the result to wait for it.

        `allocate` makes the memory of what is received; None: it is new.
        """
        collective = Collective("all_to_all", send, self.ranks, (), send_counts, recv_counts, allocate=allocate)
        if len(self.ranks) == 1:
            return collectives.start(collective)

        def event() -> CommEvent:
            sent, cause = collective.sent_bytes(collectives.rank()), comm_trace.with_call_site(self.cause)
            return CommEvent(cause, None, None, self.ranks, sent, None)

        return comm_trace.send(Purpose(self.cause), event, lambda: collectives.start(collective))

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
    own = [boxes[me] for boxes in held]
    found = _regions_of(ranks, rank, held, wanted)
    if found is None:
        return [_own_box(xs[i], own[i], goal) for i, goal in wanted[me]]
    in_boxes = [x.view(box.sizes) for x, box in zip(xs, own, strict=True)]  # an empty shard may have other sizes
    return list(_Fetch.apply(Exchange(ranks, cause), *found, *in_boxes))


class _Fetch(TensorFunction):
    """Sends some regions of tensors, and makes tensors of the regions received; backward does the opposite."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, sends: Regions, recvs: Regions, *xs: Tensor) -> tuple[Tensor, ...]:
        exchange = exchange.here()
        ctx.args = exchange, recvs, sends
        received = exchange.start(sends.pack(xs, xs[0]), sends.counts, recvs.counts)()
        return tuple(recvs.join(recvs.split(received), received))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange, *regions = ctx.args
        return None, None, None, *_Fetch.apply(exchange.for_backward(), *regions, *grads)


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


@lru_cache(maxsize=4096)
def _regions_of(
    ranks: Ranks, rank: int, held: tuple[Boxes, ...], wanted: tuple[Wanted, ...]
) -> tuple[Regions, Regions] | None:
    """What `rank` sends and receives; None if no rank wants what another one holds.

    The regions that it sends say also how their gradients are added.
    """
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
    if not anything_sent:
        return None
    recvs.sort(key=itemgetter(0))
    # The order in which autograd adds the gradients of slices of a tensor: the last one first.
    order, none = range(len(sends))[::-1], [False] * len(sends)
    added = Regions.of([boxes[me].sizes for boxes in held], ranks, sends, order, none, "sum")
    return added, Regions.of([goal.sizes for _, goal in wanted[me]], ranks, recvs)
