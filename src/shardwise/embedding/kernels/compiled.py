"""Kernels compiled by numba for one CPU thread: the extra `numba`.

    kernels = CompiledKernels()

Ids are sorted by a radix sort, and rows that are needed soon are prefetched, which hides most of the time of random
accesses. Sums are torch's, which are faster. The machine code is cached beside this file, or where
`NUMBA_CACHE_DIR` says.
"""

import torch
from torch import Tensor

from shardwise.embedding.kernels import loops
from shardwise.embedding.kernels.plain import LARGEST_INT32, ByRow, Formula, Kernels, Rows, RunIndex, Runs, plain_kind


class CompiledKernels(Kernels):
    """Faster sorting, and updates by SGD, Adagrad and RowWiseAdagrad of float32 tables."""

    name = "numba"

    def by_row(self, rows: Tensor, offsets: Tensor, scale: Tensor | None) -> ByRow:
        if rows.dtype != torch.int32 or scale is not None or len(rows) > LARGEST_INT32:
            return super().by_row(rows, offsets, scale)
        distinct, starts, bags = map(torch.from_numpy, loops.sort_by_row(rows.numpy(), offsets.numpy()))
        return ByRow(distinct, starts, bags, None)

    def runs(self, index: RunIndex, values: Tensor, lengths: Tensor) -> Runs:
        rows, of_runs, counts = map(torch.from_numpy, loops.runs(values.numpy(), lengths.numpy(), *index))
        return Runs(rows, of_runs, counts, None)

    def update(
        self,
        optimizer: Formula,
        stack: Rows,
        rows: Tensor,
        offsets: Tensor,
        gradient: Tensor,
        scale: Tensor | None,
    ) -> bool:
        formula = _FORMULAS.get(plain_kind(optimizer))
        if formula is None or stack.weight.dtype != torch.float32:
            return False
        options = [getattr(optimizer, name) for name in ("lr", "eps") if hasattr(optimizer, name)]
        arrays = [stack.weight.numpy(), *(state.numpy() for state in stack.states.values())]
        for distinct, sums in self.sums_by_row(rows, offsets, gradient, scale):
            formula(distinct.numpy(), sums.numpy(), *arrays, *options)
        return True


_FORMULAS = {"SGD": loops.sgd, "Adagrad": loops.adagrad, "RowWiseAdagrad": loops.row_wise_adagrad}
