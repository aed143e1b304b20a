"""Messages 1, 2 and 3 on the owner: its stacks, runs of their rows, sums of these, and the gradients of the sums."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.embedding.exchange.ids import Headers
from shardwise.embedding.exchange.requests import as_weights
from shardwise.embedding.kernels import Kernels, Stack
from shardwise.embedding.plan import Plan

Allocate = Callable[[int], Tensor]  # a 1-D tensor of so many elements


def make_stacks(plan: Plan, rank: int, device: torch.device, kernels: Kernels) -> list[Stack]:
    """The stacks of `rank`, one for each key of the plan; not initialized."""
    rows = plan.stack_rows[plan.ranks.index(rank)].tolist()
    return [
        Stack(torch.empty(n, key.cols, dtype=getattr(torch, key.dtype), device=device), kernels, group=key.group)
        for key, n in zip(plan.keys, rows, strict=True)
    ]


@dataclass(frozen=True)
class StackRequests:
    """What all ranks requested of one stack, in the order of ranks.

    Attributes:
        runs: how many each rank requested.
        ids: how many each rank sent.
    """

    rows: Tensor
    offsets: Tensor
    weights: Tensor | None
    runs: tuple[int, ...]
    ids: tuple[int, ...]

    def only(self, ranks: Sequence[int]) -> "StackRequests":
        """Those of some of the ranks, given by position."""
        if len(ranks) == len(self.runs):
            return self
        rows, lengths = self.rows.split(self.ids), self.offsets.diff().split(self.runs)
        weights = None if self.weights is None else self.weights.split(self.ids)
        return StackRequests(
            torch.cat([self.rows[:0], *(rows[r] for r in ranks)]),
            _offsets([self.offsets[:0], *(lengths[r] for r in ranks)]),
            None if weights is None else torch.cat([weights[0][:0], *(weights[r] for r in ranks)]),
            tuple(self.runs[r] for r in ranks),
            tuple(self.ids[r] for r in ranks),
        )


def received_requests(
    messages: Sequence[Tensor], headers: Headers, num_stacks: int, weighted: bool
) -> list[StackRequests]:
    """The requests of each stack, of the messages of all ranks; see `Request.messages` and `headers`."""
    lengths: list[list[Tensor]] = [[] for _ in range(num_stacks)]
    rows: list[list[Tensor]] = [[] for _ in range(num_stacks)]
    weights: list[list[Tensor]] = [[] for _ in range(num_stacks)]
    for message, (with_lengths, *counts) in zip(messages, headers, strict=True):
        runs, ids = counts[::2], counts[1::2]
        sizes = [*(runs if with_lengths else ()), *ids, *(ids if weighted else ())]
        parts = iter(message.split(sizes))
        for stack in range(num_stacks):
            lengths[stack].append(next(parts) if with_lengths else message.new_ones(runs[stack]))
        for stack in range(num_stacks):
            rows[stack].append(next(parts))
        for stack in range(num_stacks if weighted else 0):
            weights[stack].append(next(parts))
    return [
        StackRequests(
            torch.cat(rows[stack]),
            _offsets(lengths[stack]),
            as_weights(torch.cat(weights[stack])) if weighted else None,
            tuple(header[1 + 2 * stack] for header in headers),
            tuple(header[2 + 2 * stack] for header in headers),
        )
        for stack in range(num_stacks)
    ]


def _offsets(lengths: Sequence[Tensor]) -> Tensor:
    joined = torch.cat(list(lengths))
    return F.pad(joined.cumsum(0, dtype=joined.dtype), (1, 0))


def by_rank(per_stack: Sequence[Tensor], runs: Sequence[Sequence[int]], empty: Allocate) -> Tensor:
    """A message of the sums of all stacks: for each rank, those of each stack.

    Args:
        per_stack: [runs, columns], in the order of ranks.
        runs: of each stack, for each rank; 0 where a rank gets none.
        empty: makes the message.
    """
    if len(per_stack) == 1:
        return per_stack[0].reshape(-1)
    split = [sums.split(list(counts)) for sums, counts in zip(per_stack, runs, strict=True)]
    parts = [of_stack[rank].reshape(-1) for rank in range(len(runs[0])) for of_stack in split]
    return torch.cat(parts, out=empty(sum(part.numel() for part in parts)))


def by_stack(message: Tensor, runs: Sequence[Sequence[int]], cols: Sequence[int]) -> list[Tensor]:
    """The inverse of `by_rank`: for each stack, [runs, columns] in the order of ranks."""
    if len(cols) == 1:
        return [message.view(-1, cols[0])]
    sizes = [counts[rank] * width for rank in range(len(runs[0])) for counts, width in zip(runs, cols, strict=True)]
    parts = message.split(sizes)
    return [torch.cat(parts[stack :: len(cols)]).view(-1, width) for stack, width in enumerate(cols)]


def joined(parts: Sequence[Sequence[tuple[StackRequests, Tensor]]]) -> list[tuple[StackRequests, Tensor]]:
    """For each stack, the runs of several backwards and the gradients of their sums, as if they were of one."""
    found = []
    for of_stack in zip(*parts, strict=True):
        requests, grads = zip(*of_stack, strict=True)
        weights = [one.weights for one in requests if one.weights is not None]
        of_all = StackRequests(
            torch.cat([one.rows for one in requests]),
            _offsets([one.offsets.diff() for one in requests]),
            torch.cat(weights) if weights else None,
            tuple(n for one in requests for n in one.runs),
            tuple(n for one in requests for n in one.ids),
        )
        found.append((of_all, torch.cat(grads)))
    return found


def dense_gradient(requests: StackRequests, grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a stack, of those of its runs."""
    of_rows = torch.repeat_interleave(grad, requests.offsets.diff().long(), dim=0, output_size=requests.rows.numel())
    if requests.weights is not None:
        of_rows = of_rows * requests.weights[:, None]
    dense = torch.zeros(weight.shape, dtype=grad.dtype, device=grad.device)
    return dense.index_add_(0, requests.rows.long(), of_rows).to(weight.dtype)
