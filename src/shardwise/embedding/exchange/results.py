"""Messages 2 and 3 on the requesting rank: which element of its output each received sum belongs to.

Outputs and messages are seen as rows of `unit` elements, the most that divide the columns of all blocks. With that,
column-wise, row-wise and mixed blocks of any width are one gather, or one gather and sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ResultIndex:
    """Where the sums of runs belong.

    Attributes:
        unit: elements.
        num_units: of the output.
        targets: for each unit of message 3, the units of the output that it is added to.
        target_offsets: where those of each unit of message 3 start in `targets`; None if it has exactly one.
        replies: which units of message 3 are also in message 2; None: all.
        sources: for each unit of the output, the units of message 2 that are added.
        offsets: where those of each unit of the output start in `sources`; None if it has exactly one.
        received: elements of message 2 from each owner.
        sent: elements of message 3 to each owner.
        own: the position of this rank among the owners.
    """

    unit: int
    num_units: int
    targets: Tensor
    target_offsets: Tensor | None
    replies: Tensor | None
    sources: Tensor
    offsets: Tensor | None
    received: tuple[int, ...]
    sent: tuple[int, ...]
    own: int

    def only(self, sent: Tensor) -> "ResultIndex":
        """The index if only some of the units are `sent`, each of which is added to one unit of the output."""
        received = sent if self.replies is None else sent[self.replies]
        chosen = received[self.sources]
        positions, ends = received.cumsum(0) - 1, F.pad(chosen.cumsum(0), (1, 0))
        return ResultIndex(
            self.unit,
            self.num_units,
            self.targets[sent],
            None,
            None if self.replies is None else self.replies[sent],
            positions[self.sources[chosen]],
            ends[:-1] if self.offsets is None else ends[self.offsets],
            self._elements(received, self.received),
            self._elements(sent, self.sent),
            self.own,
        )

    def _elements(self, chosen: Tensor, all_elements: tuple[int, ...]) -> tuple[int, ...]:
        """How many elements of those to each owner are `chosen`."""
        units = torch.tensor([0, *all_elements], device=chosen.device).cumsum(0) // self.unit
        counts: list[int] = F.pad(chosen.cumsum(0), (1, 0))[units].diff().tolist()
        return tuple(n * self.unit for n in counts)

    @cached_property
    def _arrived(self) -> Tensor:
        """`sources`, if what this rank has for itself comes last."""
        before, until, total = (sum(self.received[:n]) // self.unit for n in (self.own, self.own + 1, None))
        if until == total:
            return self.sources
        return torch.where(self.sources < before, self.sources, (self.sources - until) % (total - before) + before)

    def combine(self, message: Tensor) -> Tensor:
        """The output, flat, of message 2: of other ranks in their order, and at the end of this one."""
        return _sums(message.view(-1, self.unit), self._arrived, self.offsets).view(-1)

    def spread(self, grad: Tensor, empty: Callable[[int], Tensor]) -> Tensor:
        """Message 3, of the gradient of the output, in memory that `empty` makes."""
        units = grad.reshape(-1, self.unit)
        if self.target_offsets is not None:
            return _sums(units, self.targets, self.target_offsets).view(-1)
        message = empty(self.targets.numel() * self.unit)
        torch.index_select(units, 0, self.targets, out=message.view(-1, self.unit))
        return message


def _sums(units: Tensor, index: Tensor, offsets: Tensor | None) -> Tensor:
    """The sums of bags of rows of `units`; None: one each."""
    if offsets is None:
        return units.index_select(0, index)
    if not index.numel():
        return units.new_zeros(offsets.numel(), units.shape[1])
    return F.embedding_bag(index, units, offsets, mode="sum")


def counts_of(numbers: Tensor, most: int) -> Tensor:
    """How often each number below `most` is there. Off CPUs `bincount` would wait for the largest."""
    if numbers.device.type == "cpu":
        return torch.bincount(numbers, minlength=most)
    return numbers.new_zeros(most).index_add_(0, numbers, torch.ones_like(numbers))


def unit_targets(counts: Tensor, widths: Tensor, first: Tensor, strides: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Of requests of `counts` runs, each `widths` units wide, `total` in all: the run and output unit of each unit.

    Run i of a request is added to the units of the output from `first + i * strides` on.
    """
    per_request = counts * widths
    starts, run_starts = per_request.cumsum(0) - per_request, counts.cumsum(0) - counts
    of = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), per_request, output_size=total)
    inside = torch.arange(total, device=counts.device) - starts[of]
    run = inside.div(widths[of], rounding_mode="floor")
    return run + run_starts[of], first[of] + run * strides[of] + (inside - run * widths[of])


def result_index(
    unit: int,
    num_units: int,
    targets: Tensor,
    replies: Tensor | None,
    received: Sequence[int],
    sent: Sequence[int],
    own: int,
) -> ResultIndex:
    """The index of units with `targets`, of which only those that are `replies` are in message 2 (None: all)."""
    replied = targets if replies is None else targets[replies]
    counts = counts_of(replied, num_units)
    sources = replied.argsort(stable=True)
    offsets = None if bool((counts == 1).all()) else counts.cumsum(0) - counts
    return ResultIndex(unit, num_units, targets, None, replies, sources, offsets, tuple(received), tuple(sent), own)
