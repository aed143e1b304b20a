"""What the tests of kernels and optimizers share: random lookups, and all kernels that are installed."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from shardwise.embedding.kernels import ByRow, Kernels, Stack
from shardwise.embedding.kernels.compiled import CompiledKernels

DTYPES = [torch.int32, torch.int64]
KERNELS: list[Kernels] = [Kernels(), CompiledKernels()]


def stack_of(weight: Tensor, states: dict[str, Tensor] | None = None, kernels: Kernels = KERNELS[0]) -> Stack:
    return Stack(weight, kernels, {} if states is None else states)


@dataclass(frozen=True)
class Lookup:
    rows: Tensor
    offsets: Tensor
    gradient: Tensor
    scale: Tensor | None

    def by_row(self, kernels: Kernels) -> ByRow:
        return kernels.by_row(self.rows, self.offsets, self.scale)

    def dense(self, num_rows: int) -> Tensor:
        """The gradient of the table."""
        found = torch.zeros(num_rows, self.gradient.shape[1], dtype=torch.float64)
        for bag, (first, last) in enumerate(zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True)):
            for at in range(first, last):
                weight = 1.0 if self.scale is None else float(self.scale[at])
                found[self.rows[at]] += weight * self.gradient[bag].double()
        return found


@st.composite
def lookups(draw: st.DrawFn, num_rows: int = 7) -> Lookup:
    """Ragged bags with duplicates; gradients are small integers, whose sums are exact."""
    bags = draw(st.lists(st.lists(st.integers(0, num_rows - 1), max_size=6), max_size=6))
    dtype, columns = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 5))
    rows = torch.tensor([row for bag in bags for row in bag], dtype=dtype)
    offsets = torch.tensor([0, *torch.tensor([len(bag) for bag in bags]).cumsum(0).tolist()], dtype=dtype)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    gradient = torch.randint(-4, 5, (len(bags), columns), generator=generator).float()
    scale = torch.randint(-2, 3, rows.shape, generator=generator).float() if draw(st.booleans()) else None
    return Lookup(rows, offsets, gradient, scale)
