"""Messages 2 and 3 on the owner: its stacks, the sums of runs of their rows, and the gradients of these sums."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise._lookups.row_requests import RowRequests
from shardwise.embedding.kernels import Allocate, ByRow, Kernels, Stack
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.embedding.plan import Plan


@dataclass(frozen=True)
class RunGradients:
    """The gradients of the sums of all runs of a stack.

    Attributes:
        runs: of all ranks.
        values: [runs, columns].
        known: the ids of `runs` by row, if they were sorted before.
    """

    runs: RowRequests
    values: Tensor
    known: ByRow | None = None

    def by_row(self, kernels: Kernels, empty: Allocate | None = None) -> ByRow:
        """The ids of the runs by row; `empty` makes int64."""
        return self.known or kernels.by_row(self.runs.rows, self.runs.offsets, self.runs.weights, empty)


def new_stack(
    plan: Plan, rank: int, number: int, device: torch.device, kernels: Kernels, optimizers: Sequence[RowOptimizer]
) -> Stack:
    """The stack of `rank` for a key of the plan, not initialized; `optimizers` are those of each group, or none."""
    rows, key = int(plan.stack_rows[plan.ranks.index(rank), number]), plan.keys[number]
    weight = torch.empty(rows, key.cols, dtype=getattr(torch, key.dtype), device=device)
    return Stack(weight, kernels, optimizers[key.group].new_states(weight) if optimizers else {}, key.group)


def rows_of(plan: Plan, rank: int, table: int, stacks: Sequence[Tensor]) -> Tensor:
    """The rows of a table on a rank among those of all its stacks; the blocks of a table follow each other."""
    blocks = plan.blocks_of(rank, table)
    if not blocks:
        return stacks[0][:0, :0]
    first, last = blocks[0], blocks[-1]
    return stacks[first.stack][first.first : last.first + len(last.rows)]


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


def by_stack(message: Tensor, runs: Sequence[Sequence[int]], cols: Sequence[int], empty: Allocate) -> list[Tensor]:
    """The inverse of `by_rank`: for each stack, [runs, columns] in the order of ranks."""
    if len(cols) == 1:
        return [message.view(-1, cols[0])]
    sizes = [counts[rank] * width for rank in range(len(runs[0])) for counts, width in zip(runs, cols, strict=True)]
    parts = message.split(sizes)
    return [
        torch.cat(parts[stack :: len(cols)], out=empty(sum(sizes[stack :: len(cols)]))).view(-1, width)
        for stack, width in enumerate(cols)
    ]


def dense_gradient(stack: Stack, of_runs: RunGradients) -> Tensor:
    """The gradient of a stack, of those of its runs."""
    dense = torch.zeros_like(stack.weight, dtype=of_runs.values.dtype)
    for rows, sums in stack.kernels.sums_by_row(of_runs.by_row(stack.kernels), of_runs.values):
        dense[rows] = sums
    return dense.to(stack.weight.dtype)
