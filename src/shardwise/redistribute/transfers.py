"""All-to-alls of boxes: which regions of its tensors a rank sends and receives, and a differentiable all-to-all."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from shardwise import collectives
from shardwise.layout import Box
from shardwise.trace import comm_trace
from shardwise.trace.autograd_function import TensorFunction
from shardwise.trace.comm_trace import INTERNAL, Cause, CommEvent, Purpose

Ranks = tuple[int, ...]


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
class Schedule:
    """What one rank sends and receives, both in the order of `ranks`."""

    ranks: Ranks
    sends: tuple[Region, ...]
    recvs: tuple[Region, ...]
    sent: tuple[tuple[int, int], ...]  # to which of the ranks, and how many elements; of thousands of ranks only few
    received: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]  # of the regions received

    @property
    def send_counts(self) -> list[int]:
        """The elements sent to each rank."""
        return _counts(self.sent, len(self.ranks))

    @property
    def recv_counts(self) -> list[int]:
        """The elements received from each rank."""
        return _counts(self.received, len(self.ranks))


def _counts(found: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    counts = [0] * ranks
    for index, count in found:
        counts[index] = count
    return counts


def schedule(ranks: Ranks, sends: Sequence[tuple[int, Region]], recvs: Sequence[tuple[int, Region]]) -> Schedule:
    """The schedule of one rank.

    Args:
        ranks: those that take part, rising.
        sends: (receiver, region), in the order of `ranks`.
        recvs: (sender, region), in the order of `ranks`.
    """

    def counts(parts: Sequence[tuple[int, Region]]) -> tuple[tuple[int, int], ...]:
        found: dict[int, int] = {}
        for peer, region in parts if ranks else ():
            index = bisect_left(ranks, peer)
            found[index] = found.get(index, 0) + _numel(region)
        return tuple(found.items())

    received = tuple(region for _, region in recvs)
    return Schedule(
        ranks, tuple(p for _, p in sends), received, counts(sends), counts(recvs), tuple(map(_numel, received))
    )


def _numel(region: Region) -> int:
    return Box((), region.sizes).numel


def pack(tensors: Sequence[Tensor], plan: Schedule) -> list[Tensor]:
    """The regions to send, each in one dim."""
    return [tensors[region.index][region.slices].reshape(-1) for region in plan.sends]


def unpack(received: Tensor, plan: Schedule) -> list[Tensor]:
    """The regions received, each in its own shape."""
    ends = accumulate(plan.lengths)  # slices, because autograd refuses in-place ops on the views that `split` returns
    parts = zip(ends, plan.lengths, plan.recvs, strict=True)
    return [received[end - length : end].view(region.sizes) for end, length, region in parts]


# ---- all-to-all with gradients ------------------------------------------------------------------------------


class _AllToAll(TensorFunction):
    @staticmethod
    def forward(
        ctx: Any,
        send: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        ranks: tuple[int, ...],
        cause: Cause,
    ) -> Tensor:
        if comm_trace.listening():
            cause = comm_trace.with_call_site(cause)
        ctx.args = (recv_counts, send_counts, ranks, cause.for_backward())
        return all_to_all_no_grad(send, send_counts, recv_counts, ranks, cause)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        sent: Tensor = _AllToAll.apply(grads[0].contiguous(), *ctx.args)
        return sent, None, None, None, None


def all_to_all(
    send: Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    ranks: tuple[int, ...],
    cause: Cause = INTERNAL,
) -> Tensor:
    """All-to-all of a 1-D tensor with split sizes; backward sends the gradients back."""
    return _AllToAll.apply(send, send_counts, recv_counts, ranks, cause)


def all_to_all_no_grad(
    send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: tuple[int, ...], cause: Cause
) -> Tensor:
    """`all_to_all` without a gradient."""
    return start_all_to_all(send, send_counts, recv_counts, ranks, cause)()


def start_all_to_all(
    send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: tuple[int, ...], cause: Cause
) -> collectives.Finish:
    """`all_to_all` without a gradient, started: call the result to wait for it."""
    if len(ranks) == 1:
        return collectives.start_all_to_all(send, send_counts, recv_counts, ranks)
    before = comm_trace.set_purpose(Purpose(cause))
    try:
        if not comm_trace.listening():
            return collectives.start_all_to_all(send, send_counts, recv_counts, ranks)
        sent = (sum(send_counts) - send_counts[ranks.index(collectives.rank())]) * send.element_size()
        with comm_trace.emitting(CommEvent(comm_trace.with_call_site(cause), None, None, ranks, sent, None)):
            return collectives.start_all_to_all(send, send_counts, recv_counts, ranks)
    finally:
        comm_trace.set_purpose(before)


@dataclass(frozen=True)
class Exchange:
    """The all-to-alls of one op among `ranks`; an implementation of `rules.local_context.Exchange`."""

    ranks: Ranks
    cause: Cause

    def start(self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> collectives.Finish:
        return start_all_to_all(send, send_counts, recv_counts, self.ranks, self.cause)

    def all_to_all(self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        return all_to_all(send, send_counts, recv_counts, self.ranks, self.cause)

    def for_backward(self) -> "Exchange":
        return Exchange(self.ranks, self.cause.for_backward())
