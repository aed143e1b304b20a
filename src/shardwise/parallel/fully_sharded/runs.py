"""The forward and the backward that run on this thread: which units follow, and what is freed at the end."""

import threading
from typing import Protocol
from weakref import ref

import torch

from shardwise.parallel.fully_sharded.gathered import NO_BACKWARD, Gathered
from shardwise.redistribute.together import buffers_of_rank


class Followed(Protocol):
    """A unit, whose place in the order of a forward is known from the last one."""

    order: "list[Followed]"

    def start_ahead(self, as_dtensors: bool) -> None: ...


class Forward:
    """A forward of a root: the outermost unit.

    Args:
        root: its unit.
        as_dtensors: the inputs are DTensors on a mesh with the data axis, so parameters are used as such.
        prefetch: how many units are all-gathered ahead.
    """

    def __init__(self, root: Followed, as_dtensors: bool, prefetch: int) -> None:
        self.root, self.as_dtensors, self.prefetch = root, as_dtensors, prefetch
        self.expected = root.order
        self.units: list[Followed] = []
        self.gathered: list[ref[Gathered]] = []

    def add(self, unit: Followed, gathered: Gathered) -> None:
        """`unit` uses its parameters now; those of the units that followed it last time are started."""
        gathered.before = self.gathered
        gathered.number = len(self.gathered)
        self.gathered.append(ref(gathered))
        self.units.append(unit)
        count = len(self.units)
        if self.prefetch and self.expected[:count] == self.units:
            for following in self.expected[count : count + self.prefetch]:
                following.start_ahead(self.as_dtensors)

    def begin(self) -> "Forward":
        """This is the forward that runs on this thread."""
        running.forward = self
        return self

    def end(self) -> None:
        """It ran."""
        self.root.order = self.units
        running.forward = None
        if not torch.is_grad_enabled():
            buffers_of_rank().clear()


class _Running(threading.local):
    forward: Forward | None = None
    backward: int = NO_BACKWARD
    filled: list[Gathered] = []  # noqa: RUF012 - replaced, never changed


running = _Running()


def end_after_backward(gathered: Gathered) -> None:
    """At the end of the backward that runs, free what is left then: parameters that need no gradient."""
    task = torch._C._current_graph_task_id()
    if running.backward != task:
        filled = running.filled = []
        running.backward = task
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _end(filled))
    running.filled.append(gathered)


def _end(filled: list[Gathered]) -> None:
    running.backward = NO_BACKWARD
    for gathered in filled:
        gathered.unit.end_backward(gathered)
    buffers_of_rank().clear()
