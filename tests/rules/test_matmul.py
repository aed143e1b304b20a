"""Products on sharded operands equal one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import Mesh, Partial, Replicate, Shard, count_comms, distribute_tensor
from shardwise.testing import world
from shardwise.testing.truth import MESHES, Sample, as_dtensor, assert_equals_one_process

GENERATOR = torch.Generator().manual_seed(1)
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


A, B, SQUARE = normal(5, 3), normal(3), normal(3, 3)
SAMPLES = [
    Sample(torch.matmul, (A, normal(3, 4))),
    Sample(torch.mm, (A, normal(3, 1))),
    Sample(torch.matmul, (B, normal(3, 4))),
    Sample(torch.matmul, (A, B)),
    Sample(torch.mv, (A, B)),
    Sample(torch.dot, (B, normal(3))),
    Sample(torch.bmm, (normal(3, 2, 4), normal(3, 4, 2))),
    Sample(torch.matmul, (normal(2, 5, 3), normal(3, 4))),
    Sample(torch.matmul, (normal(1, 5, 3), normal(4, 3, 2))),
    Sample(torch.matmul, (normal(1, 5, 3), normal(1, 3, 2))),
    Sample(torch.matmul, (normal(2, 1, 5, 3), normal(4, 3, 2))),
    Sample(torch.matmul, (normal(5, 0), normal(0, 4))),
    Sample(torch.matmul, (normal(0, 3), normal(3, 4))),
    Sample(F.linear, (A, normal(4, 3))),
    Sample(F.linear, (A, normal(4, 3), normal(4))),
    Sample(F.linear, (A, normal(1, 3), normal(1))),
    Sample(F.linear, (B, normal(4, 3), normal(4))),
    Sample(F.linear, (A, B)),
    Sample(F.linear, (normal(2, 5, 3), normal(4, 3), normal(4))),
    Sample(torch.addmm, (normal(4), A, normal(3, 4)), {"beta": 2, "alpha": 0.5}),
    Sample(torch.addmm, (normal(5, 4), A, normal(3, 4))),
    Sample(torch.addmm, (normal(5, 1), A, normal(3, 4))),
    Sample(torch.addmm, (normal(), A, normal(3, 4))),
    Sample(torch.einsum, ("ij,kj->ik", A, normal(4, 3))),
    Sample(torch.einsum, ("ij,k->k", A, B)),
    Sample(torch.einsum, ("ij,ij->", A, normal(5, 3))),
    Sample(torch.einsum, ("bij,bjk->ik", normal(2, 3, 4), normal(2, 4, 3))),
    Sample(torch.einsum, ("ij,kj->ik", (A, normal(4, 3)))),
    Sample(torch.einsum, ("ii->i", normal(3, 3))),
    Sample(torch.einsum, ("...ij,jk", normal(2, 4, 3), normal(3, 2))),
    Sample(torch.baddbmm, (normal(2, 5, 4), normal(2, 5, 3), normal(2, 3, 4))),  # no rule: on whole copies
    Sample(torch.outer, (B, normal(4))),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_products_equal_one_process(sample: Sample) -> None:
    tally = assert_equals_one_process([sample], MESHES, limit=6)
    assert tally.cases > 20


@world(2)
def test_column_then_row_cut_layers_communicate_once() -> None:
    mesh = Mesh((2,))
    first, second = (distribute_tensor(SQUARE, mesh, [p]) for p in (S0, S1))
    x = distribute_tensor(A, mesh, [R])
    with count_comms() as meter:
        hidden = F.linear(x, first)
        out = as_dtensor(F.linear(torch.relu(hidden), second))
        assert out.placements == (Partial(),)
        assert meter.total_calls == 0
        out.full_tensor()
    assert meter.total_calls == 1


@world(3)
def test_shapes_that_do_not_fit_are_refused_on_every_rank_alike() -> None:
    x = distribute_tensor(A, Mesh((3,)), [S0])
    with pytest.raises(RuntimeError):
        x @ distribute_tensor(A, Mesh((3,)), [R])
