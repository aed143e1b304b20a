"""The transport of one rank whose peers do not run."""

import sys
from array import array
from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._collectives import Allocate, Finish, Ranks, draw_from_torch
from shardwise._collectives.call_log import CallLog
from shardwise._collectives.threads import ThreadGuard
from shardwise._collectives.value_notes import Note, ValueNotes
from shardwise._layout import Owner
from shardwise._trace.user_stack import StackFrame, is_user_file
from shardwise.simulation.result import Recorded


class OneRank:
    """One rank of a world. Every other rank is taken to send what this rank sends to itself.

    So an exchange returns this rank's own slice once for each rank, shortened or padded with zeros to the size that
    this rank expects, and a sum is that of equal tensors. Memory is taken, and held until the result is dropped, as by
    the transport of processes.
    """

    def __init__(self, rank: int, world_size: int, recorded: Recorded) -> None:
        self._rank, self.world_size = rank, world_size
        self.rank_reads: dict[StackFrame, None] = {}  # where the program calls `rank()`
        self.owner = Owner(rank, world_size)
        self.calls: dict[Ranks, int] = {}
        self.logs: dict[Ranks, CallLog] = {}
        self.notes = ValueNotes(on=False)
        self.threads = ThreadGuard()
        self.fingerprints: ExitStack | None = None
        self.recorded = recorded

    @property
    def rank(self) -> int:
        caller = sys._getframe(2)  # of `rank()`
        if is_user_file(caller.f_code.co_filename):
            self.rank_reads[StackFrame(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name)] = None
        return self._rank

    def message_device(self, ranks: Ranks) -> torch.device:
        return torch.device("cpu")

    def compare_calls(self, log: CallLog, record: "array[int]") -> None:
        """Other ranks make the same calls."""

    def share_note(self, log: CallLog, note: Note) -> None:
        """Other ranks have the same values."""

    def start_all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        ranks: Ranks,
        allocate: Allocate | None = None,
    ) -> Finish:
        here = ranks.index(self.rank)
        self.recorded.received(ranks, (sum(recv_counts) - recv_counts[here]) * send.element_size())
        start = sum(send_counts[:here])
        received = _from_all(send[start : start + send_counts[here]], recv_counts, allocate)
        return _finished(received, send.contiguous())

    def start_all_reduce(self, local: Tensor, reduce_op: str, ranks: Ranks, in_place: bool = False) -> Finish:
        self.recorded.received(ranks, local.numel() * local.element_size())
        with torch.no_grad():
            match reduce_op:
                case "sum" if local.dtype != torch.bool:
                    return _finished(local.mul_(len(ranks)) if in_place else local * len(ranks), local)
                case "product":
                    return _finished(local ** len(ranks), local)
            return _finished(local.clone(), local)

    def start_all_gather(
        self, local: Tensor, counts: Sequence[int], ranks: Ranks, allocate: Allocate | None = None
    ) -> Finish:
        others = sum(counts) - counts[ranks.index(self.rank)]
        self.recorded.received(ranks, others * local.element_size())
        width = max(counts)
        padded = local.contiguous() if len(local) == width else F.pad(local, (0, width - len(local)))
        received = _from_all(padded, [width] * len(ranks), allocate)
        if min(counts) == width:
            return _finished(received, padded)

        def finish() -> Tensor:
            parts = [part[:count] for part, count in zip(received.split(width), counts, strict=True)]
            return torch.cat(parts, out=(allocate or local.new_empty)(sum(counts)))

        return finish

    def start_reduce_scatter(self, local: Tensor, counts: Sequence[int], ranks: Ranks) -> Finish:
        here = ranks.index(self.rank)
        self.recorded.received(ranks, (len(ranks) - 1) * counts[here] * local.element_size())
        start = sum(counts[:here])
        with torch.no_grad():
            return _finished(local[start : start + counts[here]] * len(ranks), local)

    def start_broadcast(self, local: Tensor, count: int, root: int, ranks: Ranks) -> Finish:
        self.recorded.received(ranks, 0 if root == self.rank else count * local.element_size())
        return _finished(_from_all(local, [count]), local)

    def draw_seed(self) -> int:
        return draw_from_torch()


def _finished(received: Tensor, sent: Tensor) -> Finish:
    """Returns `received`, and keeps both tensors meanwhile."""
    return lambda: (received, sent)[0]


def _from_all(own: Tensor, counts: Sequence[int], allocate: Allocate | None = None) -> Tensor:
    """A new tensor of `counts` elements of each rank: those of `own`, as far as it has them."""
    with torch.no_grad():
        received = (allocate or own.new_empty)(sum(counts)).zero_()
        if received.is_floating_point():  # without values
            return received
        if len(set(counts)) == 1 and len(own) >= counts[0]:
            return received.copy_(own[: counts[0]].repeat(len(counts)))
        start = 0
        for count in counts:
            some = min(count, len(own))
            received[start : start + some] = own[:some]
            start += count
        return received
