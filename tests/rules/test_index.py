"""Reading and writing at places equals one process; rows travel, tables stay."""


import pytest
import torch
from torch import Tensor

from shardwise.testing.truth import MESHES, Sample, assert_equals_one_process

GENERATOR = torch.Generator().manual_seed(11)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=GENERATOR)


A, B, C = normal(7, 3), normal(4, 5, 3), normal(9)
PERMUTED = torch.tensor([5, 0, 3, 6])
aten = torch.ops.aten
READS = [
    Sample(torch.index_select, (A, 0, ids(7, 5))),
    Sample(torch.index_select, (A, 1, ids(3, 4))),
    Sample(Tensor.index_select, (B, 1, ids(5, 3))),
    Sample(torch.index_select, (normal(0, 3), 0, ids(1, 0))),
    Sample(torch.index_select, (torch.arange(9) % 2 == 0, 0, ids(9, 4))),
    Sample(torch.gather, (A, 0, ids(7, 4, 3))),
    Sample(torch.gather, (A, 1, ids(3, 7, 2))),
    Sample(torch.gather, (A, 1, ids(3, 4, 5))),
    Sample(torch.gather, (B, 1, ids(5, 4, 2, 3))),
    Sample(torch.gather, (C, 0, ids(9, 12))),
    Sample(torch.take, (A, ids(21, 2, 4) - 3)),
    Sample(torch.take, (C, ids(9, 5))),
    Sample(torch.take_along_dim, (A, ids(7, 2, 3), 0)),
    Sample(torch.take_along_dim, (A, ids(21, 4))),
    Sample(aten.index.Tensor, (A, [ids(7, 4) - 7])),
    Sample(aten.index.Tensor, (A, [None, ids(3, 2, 2)])),
    Sample(aten.index.Tensor, (A, [ids(7, 4), ids(3, 4)])),
    Sample(aten.index.Tensor, (B, [ids(4, 3, 1), None, ids(3, 2)])),
    Sample(aten.index.Tensor, (B, [None, ids(5, 2), ids(3, 1)])),
]
WRITES = [
    Sample(torch.index_put, (A, (PERMUTED,), normal(4, 3))),
    Sample(torch.index_put, (A, (PERMUTED,), normal(3))),
    Sample(torch.index_put, (A, (ids(7, 5), ids(3, 5)), normal(5)), {"accumulate": True}),
    Sample(torch.index_put, (B, (ids(4, 6),), normal(6, 5, 1)), {"accumulate": True}),
    Sample(aten.index_put.default, (B, [None, ids(5, 2, 2)], normal(4, 2, 2, 3), True)),
    Sample(aten.index_put.default, (B, [ids(4, 6), None, ids(3, 6)], normal(6, 5), True)),
    Sample(Tensor.index_put_, (A, (PERMUTED,), normal(4, 3))),
    Sample(Tensor.index_put_, (A, (ids(7, 9),), normal(9, 3), True)),
    Sample(torch.index_add, (A, 0, ids(7, 6), normal(6, 3))),
    Sample(torch.index_add, (A, 1, ids(3, 6), normal(7, 6)), {"alpha": 2}),
    Sample(Tensor.index_add_, (A, 0, ids(7, 6), normal(6, 3))),
    Sample(torch.index_copy, (A, 0, PERMUTED, normal(4, 3))),
    Sample(Tensor.index_copy_, (B, 1, torch.tensor([4, 0]), normal(4, 2, 3))),
    Sample(torch.index_fill, (A, 0, PERMUTED, 2.5)),
    Sample(torch.index_fill, (A, 1, torch.tensor([2]), normal())),
    Sample(Tensor.index_fill_, (A, 0, PERMUTED - 7, 2.5)),
    Sample(torch.scatter, (A, 0, torch.tensor([[3, 2, 1], [0, 0, 6]]), normal(2, 3))),
    Sample(torch.scatter, (A, 0, torch.tensor([[3, 2], [0, 6]]), normal(4, 3)), gradients=False),
    Sample(torch.scatter, (A, 1, torch.tensor([[2], [0], [1]]), 1.5)),
    Sample(Tensor.scatter_, (A, 0, torch.tensor([[3, 2, 1]]), normal(1, 3))),
    Sample(torch.scatter_add, (A, 0, ids(7, 9, 3), normal(9, 3))),
    Sample(torch.scatter_add, (A, 1, ids(3, 7, 4), normal(7, 4))),
    Sample(torch.scatter_add, (A, 1, ids(3, 5, 2), normal(7, 4)), gradients=False),
    Sample(Tensor.scatter_add_, (B, 1, ids(5, 4, 7, 3), normal(4, 7, 3))),
    Sample(torch.scatter_reduce, (A, 0, ids(7, 9, 3), normal(9, 3), "amax")),
    Sample(torch.scatter_reduce, (A, 0, ids(7, 9, 3), normal(9, 3), "mean"), {"include_self": False}),
    Sample(Tensor.scatter_reduce_, (A, 0, ids(7, 9, 3), normal(9, 3), "sum")),
    Sample(torch.put, (A, torch.tensor([20, 3, -21]), normal(3))),
    Sample(Tensor.put_, (A, ids(21, 2, 3), normal(2, 3), True)),
    Sample(torch.masked_scatter, (A, A > 0, normal(21))),
    Sample(Tensor.masked_scatter_, (A, A > 0, normal(7, 3))),
    Sample(torch.masked_fill, (A, A > 0, 2.5)),
]


@pytest.mark.parametrize("sample", [*READS, *WRITES], ids=str)
def test_reads_and_writes_equal_one_process(sample: Sample) -> None:
    assert assert_equals_one_process([sample], MESHES, limit=6).cases > 10
