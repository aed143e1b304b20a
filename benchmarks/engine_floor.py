"""The floor of `engine.py`: bare exchanges of the least bytes, and bare local kernels on ids that are already in place.

Nothing is sorted by destination, packed, permuted or checked, and messages have no headers: what a system adds
to this is its own. Kernels and exchanges work on separate buffers that were made before the first step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from engine_cells import Batch, Block, Cell, first_values, select
from torch import Tensor

LEARNING_RATE, EPS = 0.01, 1e-8
CHUNK = 8192  # rows: larger temporary tensors cost page faults, smaller ones more calls


class Exchange:
    """Ids, results, gradients of one batch: three calls of `all_to_all_single`."""

    def __init__(self, cell: Cell, rank: int, batches: Sequence[Batch]) -> None:
        """`batches` are those of all ranks in one step."""
        ids = torch.zeros(2, cell.ranks, dtype=torch.int64)  # sent to, received from each rank
        floats = torch.zeros(2, cell.ranks, dtype=torch.int64)
        for block in cell.blocks:
            for source, batch in enumerate(batches):
                if rank not in {source, block.rank}:
                    continue
                num_ids, num_floats = least(cell, batch, block)
                if source == rank:
                    ids[0, block.rank] += num_ids
                    floats[0, block.rank] += num_floats
                if block.rank == rank:
                    ids[1, source] += num_ids
                    floats[1, source] += num_floats
        self.id_splits, self.float_splits = ids.tolist(), floats.tolist()
        self.ids = [torch.zeros(sum(n), dtype=torch.int32) for n in self.id_splits]
        self.floats = [torch.zeros(sum(n)) for n in self.float_splits]

    def send_ids(self) -> None:
        (sent, received), (to, by) = self.ids, self.id_splits
        dist.all_to_all_single(received, sent, by, to)

    def send_results(self) -> None:
        (received, sent), (by, to) = self.floats, self.float_splits
        dist.all_to_all_single(received, sent, by, to)

    def send_gradients(self) -> None:
        (sent, received), (to, by) = self.floats, self.float_splits
        dist.all_to_all_single(received, sent, by, to)


def least(cell: Cell, batch: Batch, block: Block) -> tuple[int, int]:
    """Numbers to send for the ids and for the results of a rank in a block: sums of bags that are
    not empty, or distinct rows."""
    values, lengths = select(cell, batch, block)
    distinct, width = len(values.unique()), len(block.cols)
    sums, rows = (len(values) + cell.batch, int(lengths.count_nonzero()) * width), (distinct, distinct * width)
    return min(sums, rows, key=lambda n: n[0] + 2 * n[1])


@dataclass(frozen=True)
class Lookups:
    """Ids of all ranks in blocks of one width, in the order of a kernel: bags of [source, block, sample]."""

    rows: Tensor  # int32, rows of the stack of blocks
    offsets: Tensor  # int32
    bags: Tensor  # int64, of each id


class TorchKernels:
    """Blocks of a rank, those of one width stacked; sums and row-wise Adagrad in plain torch and numpy."""

    def __init__(self, cell: Cell, rank: int, steps: Sequence[Sequence[Batch]]) -> None:
        self.blocks = [block for block in cell.blocks if block.rank == rank]
        self.stacks: list[tuple[Tensor, Tensor, Tensor]] = []  # weight, state, gradients of bags
        self.lookups: list[list[Lookups]] = [[] for _ in steps]
        self.views: dict[Block, Tensor] = {}
        for width in sorted({len(block.cols) for block in self.blocks}):
            blocks = [block for block in self.blocks if len(block.cols) == width]
            starts = np.cumsum([0, *(len(block.rows) for block in blocks)]).tolist()
            weight = torch.empty(starts[-1], width)
            for block, (begin, end) in zip(blocks, pairwise(starts), strict=True):
                self.views[block] = weight[begin:end].copy_(first_values(block))
            gradients = torch.cat([cell.gradient_of(block) for block in blocks]).repeat(cell.ranks, 1)
            self.stacks.append((weight, torch.zeros(starts[-1]), gradients))
            for step, batches in enumerate(steps):
                found = [
                    (rows + begin, lengths)
                    for batch in batches
                    for block, begin in zip(blocks, starts[:-1], strict=True)
                    for rows, lengths in [select(cell, batch, block)]
                ]
                rows, lengths = torch.cat([r for r, _ in found]), torch.cat([n for _, n in found])
                offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
                bags = torch.arange(len(lengths)).repeat_interleave(lengths)
                self.lookups[step].append(Lookups(rows.int(), offsets.int(), bags))

    def forward(self, step: int) -> None:
        for (weight, _, _), found in zip(self.stacks, self.lookups[step], strict=True):
            torch.embedding_bag(weight, found.rows, found.offsets, include_last_offset=True)

    def backward(self, step: int) -> None:
        for (weight, state, gradients), found in zip(self.stacks, self.lookups[step], strict=True):
            if len(found.rows):
                row_wise_adagrad(weight, state, gradients, found)


def row_wise_adagrad(weight: Tensor, state: Tensor, gradients: Tensor, found: Lookups) -> None:
    """Sums of gradients of each distinct row, and the update of these rows."""
    rows, bags = sorted_by_row(found)
    first = torch.ones(len(rows) + 1, dtype=torch.bool)
    torch.ne(rows[1:], rows[:-1], out=first[1:-1])
    starts = first.nonzero().squeeze(1)
    distinct, starts = rows[starts[:-1]].long(), starts.int()
    squares = state.index_select(0, distinct)
    for begin in range(0, len(distinct), CHUNK):
        chunk = slice(begin, begin + CHUNK)
        ends = starts[begin : begin + CHUNK + 1]
        low, high = int(ends[0]), int(ends[-1])
        sums = torch.embedding_bag(gradients, bags[low:high], ends - low, include_last_offset=True)[0]
        square = squares[chunk].add_(torch.linalg.vecdot(sums, sums), alpha=1 / weight.shape[1])
        scale = square.sqrt().add_(EPS).reciprocal_().mul_(-LEARNING_RATE)
        weight.index_add_(0, distinct[chunk], sums.mul_(scale[:, None]))
    state.index_copy_(0, distinct, squares)


def sorted_by_row(found: Lookups) -> tuple[Tensor, Tensor]:
    """Rows in order and the bag of each, both int32. numpy sorts few numbers faster, torch many."""
    if len(found.rows) > 100_000:
        rows, order = found.rows.sort()
        return rows, found.bags.index_select(0, order).int()
    keys = found.rows.long().bitwise_left_shift_(32).bitwise_or_(found.bags).numpy()
    halves = torch.from_numpy(np.sort(keys)).view(torch.int32).view(-1, 2)
    return halves[:, 1].contiguous(), halves[:, 0].contiguous()


class FbgemmKernels:
    """The same with fbgemm's table-batched kernels, fused backward and update."""

    def __init__(self, cell: Cell, rank: int, steps: Sequence[Sequence[Batch]]) -> None:
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            OptimType,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self.blocks = [block for block in cell.blocks if block.rank == rank]
        self.inputs: list[tuple[Tensor, Tensor]] = []
        self.out: Any = None
        self.views: dict[Block, Tensor] = {}
        if not self.blocks:
            return
        specs = [(len(b.rows), len(b.cols), EmbeddingLocation.HOST, ComputeDevice.CPU) for b in self.blocks]
        self.kernel = SplitTableBatchedEmbeddingBagsCodegen(
            specs,
            optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LEARNING_RATE,
            eps=EPS,
            pooling_mode=PoolingMode.SUM,
        )
        self.views = dict(zip(self.blocks, self.kernel.split_embedding_weights(), strict=True))
        for block, view in self.views.items():
            view.copy_(first_values(block))
        self.gradients = torch.cat([cell.gradient_of(block) for block in self.blocks], 1).repeat(cell.ranks, 1)
        for batches in steps:
            found = [select(cell, batch, block) for block in self.blocks for batch in batches]
            lengths = torch.cat([n for _, n in found])
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            self.inputs.append((torch.cat([r for r, _ in found]), offsets))

    def forward(self, step: int) -> None:
        if self.blocks:
            self.out = self.kernel(*self.inputs[step])

    def backward(self, step: int) -> None:
        if self.blocks:
            self.out.backward(self.gradients)


class Floor:
    """Steps of exchanges, with kernels or without. The partial sums of row-wise tables are added."""

    def __init__(
        self,
        cell: Cell,
        rank: int,
        exchanges: Sequence[Exchange],
        kernels: TorchKernels | FbgemmKernels | None,
    ) -> None:
        self.exchanges, self.kernels = exchanges, kernels
        row_wise = sum(cell.sharding_of(table) == "row" for table in range(len(cell.rows)))
        self.partial = torch.zeros(cell.ranks, cell.batch * row_wise * cell.dim)
        self.total = torch.empty_like(self.partial[0])

    def step(self, step: int) -> None:
        exchange, kernels = self.exchanges[step], self.kernels
        exchange.send_ids()
        if kernels:
            kernels.forward(step)
        exchange.send_results()
        if kernels:
            torch.sum(self.partial, 0, out=self.total)
        exchange.send_gradients()
        if kernels:
            kernels.backward(step)

    def sums(self, step: int) -> None:
        """The floor assembles no result."""

    def tables(self) -> dict[Block, Tensor]:
        return self.kernels.views if self.kernels else {}
