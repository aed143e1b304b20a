"""Row-sparse gradients of sharded tables, as programs read them outside of an optimizer."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise import DTensor, Mesh, OnRanks, Replicate, Shard, distribute_tensor
from shardwise.errors import RuleError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

TABLE, IDS = torch.arange(28.0).view(7, 4).sub(13), torch.tensor([[0, 3], [3, 6], [1, 1]])
PLACEMENTS = [Replicate(), Shard(0), Shard(1), Shard(1, (0, 4)), Shard(0, (7, 0)), OnRanks(1)]


def gradient(table: Tensor, ids: Tensor) -> Tensor:
    leaf = nn.Parameter(table)
    F.embedding_bag(ids, leaf, mode="sum", sparse=True).square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@world(2)
def test_the_dense_form_of_a_sparse_gradient_is_that_of_one_process() -> None:
    expected = gradient(TABLE, IDS).to_dense()
    for placement in PLACEMENTS:
        for ids in (IDS, distribute_tensor(IDS, placements=[Shard(0)])):
            found = gradient(distribute_tensor(TABLE, placements=[placement]), ids)
            dense = found.to_dense()
            assert isinstance(dense, DTensor)
            assert not dense.is_sparse
            assert torch.equal(as_dtensor(dense).full_tensor(), expected), placement
            assert torch.equal(found.coalesce().to_dense().norm(), expected.norm())


@world(4)
def test_a_rank_without_columns_takes_part_in_the_sum_of_sparse_gradients() -> None:
    mesh = Mesh((2, 2))
    expected = gradient(TABLE, IDS).to_dense()
    table = distribute_tensor(TABLE, mesh, [Shard(1, (4, 0)), Replicate()])
    found = gradient(table, distribute_tensor(IDS, mesh, [Replicate(), Shard(0)]))
    assert torch.equal(as_dtensor(found.to_dense()).full_tensor(), expected)


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "values": lambda grad: grad.coalesce().values().norm(),
    "indices": lambda grad: grad.coalesce().indices(),
    "full_tensor": lambda grad: grad.full_tensor() if isinstance(grad, DTensor) else None,
    "redistribute": lambda grad: grad.redistribute(placements=[Replicate()]) if isinstance(grad, DTensor) else None,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_show_only_local_rows_is_refused_on_all_ranks(name: str) -> None:
    def body() -> str:
        grad = gradient(distribute_tensor(TABLE, placements=[Shard(0)]), IDS)
        with pytest.raises(RuleError, match=r"sparse DTensor .* Fix: to_dense\(\)") as caught:
            REFUSED[name](grad)
        return str(caught.value)

    assert len(set(world(2).run(body))) == 1
