"""Kernels and fused optimizers beside dense gradients and `torch.optim`."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from shardwise.embedding import kernels
from shardwise.embedding.optimizers import SGD, Adagrad, RowWiseAdagrad
from tests.strategies import laws

DTYPES = [torch.int32, torch.int64]


@dataclass
class Stack:
    weight: Tensor
    states: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Lookup:
    rows: Tensor
    offsets: Tensor
    gradient: Tensor
    scale: Tensor | None

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


@laws
@given(lookups())
def test_sums_by_row_are_those_of_a_dense_gradient(found: Lookup) -> None:
    summed, seen = torch.zeros(7, found.gradient.shape[1]), []
    for rows, sums in kernels.sums_by_row(found.rows, found.offsets, found.gradient, found.scale):
        summed[rows] = sums
        seen += rows.tolist()
    assert seen == sorted(set(found.rows.tolist()))
    assert torch.equal(summed.double(), found.dense(7))


@laws
@given(lookups())
def test_bags_are_pooled_as_by_torch(found: Lookup) -> None:
    weight = torch.arange(7.0 * found.gradient.shape[1]).view(7, -1)
    want = torch.zeros_like(found.gradient)
    lengths = found.offsets.diff().long()
    each = weight[found.rows.long()] * (1 if found.scale is None else found.scale[:, None])
    want.index_add_(0, torch.repeat_interleave(lengths), each)
    assert torch.equal(kernels.pool(weight, found.rows, found.offsets, found.scale), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [kernels.MOST_PACKED - 1, kernels.MOST_PACKED + 1])
def test_many_rows_are_summed_in_chunks(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3 * kernels.CHUNK, (count,), generator=generator, dtype=dtype)
    offsets, gradient = torch.arange(count + 1, dtype=dtype), torch.randint(-4, 5, (count, 2), generator=generator)
    want = torch.zeros(3 * kernels.CHUNK, 2).index_add_(0, rows.long(), gradient.float())
    chunks = list(kernels.sums_by_row(rows, offsets, gradient.float()))
    assert len(chunks) == 3
    assert torch.equal(torch.cat([r for r, _ in chunks]), rows.long().unique())
    assert torch.equal(torch.cat([s for _, s in chunks]), want[rows.long().unique()])


def test_rows_beyond_int32_are_summed() -> None:
    rows = torch.tensor([1 << 40, 3, 1 << 40])
    ((distinct, sums),) = kernels.sums_by_row(rows, torch.tensor([0, 1, 3]), torch.tensor([[1.0], [2.0]]))
    assert (distinct.tolist(), sums.tolist()) == ([3, 1 << 40], [[2.0], [3.0]])


@laws
@given(st.lists(lookups(), min_size=1, max_size=3), st.sampled_from([SGD(0.5), Adagrad(0.5), RowWiseAdagrad(0.5)]))
def test_steps_are_those_of_dense_gradients(batches: list[Lookup], optimizer: SGD | Adagrad | RowWiseAdagrad) -> None:
    columns = min(batch.gradient.shape[1] for batch in batches)
    weight = torch.arange(7.0 * columns).view(7, -1).sin()
    stack, plain = Stack(weight.clone()), weight.double().requires_grad_()
    dense: torch.optim.Optimizer | None = None
    if not isinstance(optimizer, RowWiseAdagrad):
        dense = (torch.optim.SGD if isinstance(optimizer, SGD) else torch.optim.Adagrad)([plain], lr=0.5)
    squares = torch.zeros(7, dtype=torch.float64)
    for batch in batches:
        gradient = batch.gradient[:, :columns].contiguous()
        optimizer(stack, batch.rows, batch.offsets, gradient, batch.scale)
        plain.grad = batch.dense(7)[:, :columns]
        if dense is not None:
            dense.step()
        else:
            squares += plain.grad.square().mean(1)
            with torch.no_grad():
                plain -= 0.5 * plain.grad / (squares.sqrt() + 1e-8)[:, None]
    assert_close(stack.weight.double(), plain.detach(), rtol=1e-6, atol=1e-6)
    untouched = [row for row in range(7) if not any(row in batch.rows for batch in batches)]
    assert torch.equal(stack.weight[untouched], weight[untouched])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_updated_in_float32(dtype: torch.dtype) -> None:
    weight = torch.linspace(-1, 1, 12).view(4, 3).to(dtype)
    stack = Stack(weight.clone())
    rows, offsets, gradient = torch.tensor([1, 3, 1]), torch.tensor([0, 2, 3]), torch.ones(2, 3) / 3
    SGD(0.1)(stack, rows, offsets, gradient, None)
    dense = torch.tensor([0.0, 2.0, 0.0, 1.0])[:, None] / 3
    assert torch.equal(stack.weight, (weight.float() - 0.1 * dense).to(dtype))


def test_pooling_of_no_ids_is_zero() -> None:
    assert torch.equal(kernels.pool(torch.ones(2, 3), torch.tensor([]).int(), torch.zeros(5).int()), torch.zeros(4, 3))
