"""Views of sharded tensors equal one process, and stay views where nothing has to move."""

import pytest
import torch
from torch import Tensor

from shardwise import Mesh, Replicate, Shard, collectives, count_comms, distribute_tensor
from shardwise.errors import RuleError
from shardwise.testing import world
from shardwise.testing.truth import MESHES, Sample, as_dtensor, assert_equals_one_process

GENERATOR = torch.Generator().manual_seed(3)
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


A = normal(5, 3)
SAMPLES = [
    Sample(Tensor.t, (A,)),
    Sample(Tensor.t, (normal(3),)),
    Sample(torch.transpose, (normal(2, 3, 4), 0, -1)),
    Sample(torch.transpose, (normal(), 0, -1)),
    Sample(torch.swapaxes, (A, 0, 1)),
    Sample(torch.permute, (normal(2, 3, 4), (2, 0, 1))),
    Sample(Tensor.permute, (normal(2, 3, 4), -1, 0, 1)),
    Sample(Tensor.view, (normal(4, 6), -1)),
    Sample(Tensor.view, (normal(4, 6), 2, 2, 6)),
    Sample(Tensor.view, (normal(6, 4), 6, 2, 2)),
    Sample(torch.reshape, (normal(4, 6), (8, 3))),
    Sample(torch.reshape, (normal(12), (3, 4))),
    Sample(torch.reshape, (normal(3, 4), (2, 6))),
    Sample(torch.reshape, (normal(1, 6), (6, 1))),
    Sample(torch.reshape, (normal(0, 4), (2, 0))),
    Sample(torch.reshape, (normal(2, 0, 3), (6, 0))),
    Sample(torch.reshape, (normal(), (1, 1))),
    Sample(torch.reshape, (normal(1, 1), ())),
    Sample(torch.reshape, (normal(5, 1, 3), (5, 3))),
    Sample(torch.reshape, (A, (1, 5, 3, 1))),
    Sample(torch.flatten, (normal(2, 3, 4), 1)),
    Sample(torch.flatten, (normal(5, 2, 2),)),
    Sample(torch.flatten, (normal(),)),
    Sample(torch.unsqueeze, (A, -1)),
    Sample(torch.unsqueeze, (A, 0)),
    Sample(torch.squeeze, (normal(1, 5, 1),)),
    Sample(torch.squeeze, (normal(1, 5, 1), -1)),
    Sample(torch.squeeze, (A, 0)),
    Sample(torch.squeeze, (normal(), 0)),
    Sample(Tensor.expand, (normal(1, 3), 4, -1)),
    Sample(Tensor.expand, (normal(3), 2, 3)),
    Sample(Tensor.expand, (normal(), 3)),
    Sample(Tensor.expand, (normal(5, 1), 5, 2)),
    Sample(Tensor.__getitem__, (A, 1)),
    Sample(Tensor.__getitem__, (A, slice(1, 4))),
    Sample(torch.narrow, (A, 0, 2, 2)),
    Sample(torch.cat, ([A, normal(2, 3)],)),
    Sample(torch.stack, ([A, A],), {"dim": 1}),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_views_equal_one_process(sample: Sample) -> None:
    tally = assert_equals_one_process([sample], MESHES, limit=6)
    assert tally.cases > 20


@world(3)
def test_a_view_that_moves_nothing_shares_its_memory() -> None:
    x = distribute_tensor(torch.zeros(6, 4), Mesh((3,)), [S0])
    with count_comms() as meter:
        x.view(6, 2, 2).add_(1)
        x.t().add_(1)
        x.view(-1).add_(1)
        x.unsqueeze(0).mul_(2)
    assert meter.total_calls == 0
    assert torch.equal(x.full_tensor(), torch.full((6, 4), 6.0))


@world(2)
def test_views_of_a_whole_tensor_share_its_memory() -> None:
    x = distribute_tensor(torch.zeros(4, 2), Mesh((2,)), [R])
    x[1].add_(1)
    x[:, 1:].mul_(3)
    assert x.full_tensor().tolist() == [[0.0, 0.0], [1.0, 3.0], [0.0, 0.0], [0.0, 0.0]]


@world(2)
def test_changing_a_view_that_had_to_be_moved_is_refused() -> None:
    """The copy would change, and the tensor not."""
    x = distribute_tensor(torch.zeros(4, 2), Mesh((2,)), [S0])
    for view in (x[0], x[1:3], x[0][1:], x.select(0, 1), x.narrow(0, 1, 2), x.diagonal(), x[0].view(-1, 1)):
        with pytest.raises(RuleError, match=r"view .* that had to be moved"):
            view.add_(1)
    for rows in x.unbind(), x.chunk(3):
        with pytest.raises(RuleError, match="Fix: change the original, or clone"):
            rows[0].mul_(2)
    changed = x[0].clone().add_(1)
    assert as_dtensor(changed).full_tensor().tolist() == [1.0, 1.0]
    assert not x.full_tensor().any()


@world(2)
def test_sizes_that_do_not_fit_are_refused_as_torch_does() -> None:
    x = distribute_tensor(torch.zeros(4, 2), Mesh((2,)), [S0])
    with pytest.raises(RuntimeError, match="invalid for input of size 8"):
        x.view(3, 3)
    with pytest.raises(IndexError):
        x.transpose(0, 5)


@world(3)
def test_pieces_that_a_split_dim_cannot_hold_are_moved() -> None:
    full = torch.arange(12.0)
    x = distribute_tensor(full, Mesh((3,)), [Shard(0, [5, 7, 0])])
    assert torch.equal(as_dtensor(x.view(3, 4)).full_tensor(), full.view(3, 4))
    kept = as_dtensor(distribute_tensor(full, Mesh((3,)), [Shard(0, [4, 8, 0])]).view(3, 4))
    assert kept.placements == (Shard(0, (1, 2, 0)),)
    assert kept.to_local().shape == ((1, 2, 0)[collectives.rank()], 4)
