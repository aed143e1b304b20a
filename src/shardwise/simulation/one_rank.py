"""The transport of one rank whose peers do not run."""

import sys
from array import array
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._collectives import Allocate, Collective, Ranks, Wait
from shardwise._collectives.checks.calls import CallLog
from shardwise._collectives.checks.ledger import Ledger
from shardwise._collectives.checks.values import Note
from shardwise._collectives.threads import ThreadGuard
from shardwise._layout import Owner, ring_elements
from shardwise._trace.user_stack import StackFrame, is_user_file
from shardwise.simulation.result import Recorded


class OneRank:
    """One rank of a world. Every other rank is assumed to send what this rank sends to itself.

    An exchange returns this rank's slice once for each rank, shortened or padded with zeros to the expected size. A sum
    adds equal tensors. Memory is allocated, and held until the result is dropped, as in the transport of processes.
    """

    def __init__(self, rank: int, world_size: int, recorded: Recorded) -> None:
        self._rank, self.world_size = rank, world_size
        self.rank_reads: dict[StackFrame, None] = {}  # frames where the program calls `rank()`
        self.owner = Owner(rank, world_size)
        self.ledger = Ledger(rank, values=False)
        self.threads = ThreadGuard(self.ledger)
        self.recorded = recorded

    @property
    def rank(self) -> int:
        caller = sys._getframe(2)  # the caller of `rank()`
        if is_user_file(caller.f_code.co_filename):
            self.rank_reads[StackFrame(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name)] = None
        return self._rank

    def message_device(self, ranks: Ranks) -> torch.device:
        return torch.device("cpu")

    def compare_calls(self, log: CallLog, record: "array[int]") -> None:
        """Other ranks make the same calls."""

    def share_note(self, note: Note) -> None:
        """Other ranks have the same values."""

    def start(self, collective: Collective) -> Wait:
        kind, x, ranks, shape, sent, received, reduce_op, root, allocate, in_place = collective
        count, here, empty = len(ranks), ranks.index(self.rank), allocate or x.new_empty
        with torch.no_grad():
            match kind:
                case "all_reduce":
                    self._receive(collective, ring_elements(x.numel(), count, (here - 1) % count))
                    if reduce_op == "sum" and x.dtype != torch.bool:
                        return _finished(x.mul_(count) if in_place else x * count, x)
                    return _finished(x**count if reduce_op == "product" else x.clone(), x)
                case "all_gather":
                    self._receive(collective, sum(shape) - shape[here])
                    return _start_all_gather(x, shape, empty)
                case "reduce_scatter":
                    self._receive(collective, (count - 1) * shape[here])
                    return _finished(x.split(list(shape))[here] * count, x)
                case "broadcast":
                    self._receive(collective, 0 if root == self.rank else shape[0])
                    return _finished(_from_all(x, shape, empty), x)
        self._receive(collective, sum(received) - received[here])
        return _finished(_from_all(x.split(list(sent))[here], received, empty), x.contiguous())

    def _receive(self, collective: Collective, elements: int) -> None:
        self.recorded.received(collective.ranks, elements * collective.tensor.element_size())


def _start_all_gather(x: Tensor, counts: Sequence[int], empty: Allocate) -> Wait:
    width = max(counts)
    padded = x.contiguous() if len(x) == width else F.pad(x, (0, width - len(x)))
    received = _from_all(padded, [width] * len(counts), empty)
    if min(counts) == width:
        return _finished(received, padded)
    if received.is_floating_point():  # without values: no view for each of hundreds of ranks
        return lambda: empty(sum(counts)).copy_(received[: sum(counts)])
    parts = [part[:count] for part, count in zip(received.split(width), counts, strict=True)]
    return lambda: torch.cat(parts, out=empty(sum(counts)))


def _finished(received: Tensor, sent: Tensor) -> Wait:
    """Returns `received`; holds both tensors until then."""
    return lambda: (received, sent)[0]


def _from_all(own: Tensor, counts: Sequence[int], allocate: Allocate) -> Tensor:
    """A new tensor of `counts` elements for each rank, copied from `own` as far as possible."""
    with torch.no_grad():
        received = allocate(sum(counts)).zero_()
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
