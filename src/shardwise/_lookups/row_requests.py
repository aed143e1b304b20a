"""Requests of ranks from one tensor of an owner, its stack: runs of rows, each answered by one sum.

    rank 0 requests the sum of rows 7 and 9, and row 0; rank 1 requests row 7
    rows (7, 9, 0, 7), lengths (2, 1, 1), runs (2, 1), ids (3, 1)

The message of a rank has the lengths of its runs, then the rows, both by stack. Lengths are omitted if all runs of a
stack have equal lengths. The header has for each stack whether there are lengths, the number of runs, and the number of
rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RowRequests:
    """The requests of all ranks from one stack, in rank order.

    Attributes:
        rows: of the stack, [ids].
        lengths: of the runs, [runs], of the same dtype.
        weights: of each row, float32; None: all are 1.
        runs: number of runs that each rank requested.
        ids: number of ids that each rank sent.
    """

    rows: Tensor
    lengths: Tensor
    weights: Tensor | None
    runs: tuple[int, ...]
    ids: tuple[int, ...]

    @cached_property
    def offsets(self) -> Tensor:
        """The start of each run in `rows`, and the number of rows, [runs + 1]."""
        return F.pad(self.lengths.cumsum(0, dtype=self.lengths.dtype), (1, 0))

    def only(self, ranks: Sequence[int]) -> "RowRequests":
        """The requests of some of the ranks, given by position."""
        if len(ranks) == len(self.runs):
            return self
        return RowRequests(
            _parts(self.rows, self.ids, ranks),
            _parts(self.lengths, self.runs, ranks),
            None if self.weights is None else _parts(self.weights, self.ids, ranks),
            tuple(self.runs[r] for r in ranks),
            tuple(self.ids[r] for r in ranks),
        )


def _parts(x: Tensor, counts: Sequence[int], ranks: Sequence[int]) -> Tensor:
    """The parts of some ranks, one after the other; a view for one rank."""
    parts = x.split(list(counts))
    return parts[ranks[0]] if len(ranks) == 1 else torch.cat([x[:0], *(parts[rank] for rank in ranks)])


def join_requests(several: Sequence[RowRequests]) -> RowRequests:
    """Requests from one stack joined, as if from one exchange."""
    weights = [one.weights for one in several if one.weights is not None]
    return RowRequests(
        torch.cat([one.rows for one in several]),
        torch.cat([one.lengths for one in several]),
        torch.cat(weights) if weights else None,
        tuple(n for one in several for n in one.runs),
        tuple(n for one in several for n in one.ids),
    )


def read_requests(
    messages: Sequence[Tensor], headers: Sequence[Sequence[int]], weighted: bool = False
) -> list[RowRequests]:
    """The requests from each stack, in all ranks' messages and headers; `weighted` ones end with weights."""
    stacks = range(len(headers[0]) // 3)
    lengths: list[list[Tensor]] = [[] for _ in stacks]
    rows: list[list[Tensor]] = [[] for _ in stacks]
    weights: list[list[Tensor]] = [[] for _ in stacks]
    for message, header in zip(messages, headers, strict=True):
        has_lengths, runs, ids = header[::3], header[1::3], header[2::3]
        sent = [n if given else 0 for given, n in zip(has_lengths, runs, strict=True)]
        parts = iter(message.split([*sent, *ids, *(ids if weighted else ())]))
        for stack, given in enumerate(has_lengths):
            part = next(parts)
            lengths[stack].append(
                part if given else message.new_full((runs[stack],), ids[stack] // max(runs[stack], 1))
            )
        for of_stack in (*rows, *(weights if weighted else ())):
            of_stack.append(next(parts))
    return [
        RowRequests(
            torch.cat(rows[stack]),
            torch.cat(lengths[stack]),
            as_weights(torch.cat(weights[stack])) if weighted else None,
            tuple([header[3 * stack + 1] for header in headers]),
            tuple([header[3 * stack + 2] for header in headers]),
        )
        for stack in stacks
    ]


def as_integers(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of float32 weights as integers of a message."""
    return weights.float().view(torch.int32).to(dtype)


def as_weights(integers: Tensor) -> Tensor:
    """The inverse of `as_integers`."""
    return integers.to(torch.int32).view(torch.float32)
