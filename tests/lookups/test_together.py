"""Lookups that share an exchange give what single ones give, with the collectives of one."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Mesh, OnRanks, Partial, Placement, Replicate, Shard, distribute_tensor
from shardwise import _collectives as collectives
from shardwise._lookups.rules import embedding_bags
from shardwise.debug import explain, no_implicit_comm, shadow
from shardwise.errors import IdError, LayoutError, RuleError
from shardwise.testing import world
from tests.tensor.test_conversion import same_error

PLACEMENTS: list[Placement] = [Shard(0), Shard(1), OnRanks(2), Replicate(), Shard(0, [5, 0, 4]), OnRanks(0)]


def tables() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(9, 3 + i, dtype=torch.float64, generator=generator) for i in range(len(PLACEMENTS))]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@world(3)
def test_tables_of_all_kinds_equal_one_process_in_three_collectives(mode: str) -> None:
    """Maxima need full rows, so each lookup has its own exchange."""
    full, ids = tables(), torch.randint(0, 9, (7, 2), generator=torch.Generator().manual_seed(1))
    leaves = [t.clone().requires_grad_() for t in full]
    expected = [F.embedding_bag(ids, t, mode=mode) for t in leaves]
    torch.stack([(out**2).sum() for out in expected]).sum().backward()
    mesh = Mesh((3,))
    weights = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(full, PLACEMENTS, strict=True)]
    here = distribute_tensor(ids, mesh, [Shard(0)])
    replicated = sum(p == Replicate() for p in PLACEMENTS)
    with collectives.count_comms() as forward:
        outs = embedding_bags([here] * len(weights), weights, mode=mode)
    assert mode == "max" or forward.calls == {"all_to_all": 2 + replicated}
    with collectives.count_comms() as backward:
        torch.autograd.backward([(out**2).sum() for out in outs])
    assert mode == "max" or backward.calls == {"all_to_all": 1}
    for out, weight, want, leaf in zip(outs, weights, expected, leaves, strict=True):
        assert isinstance(out, DTensor)
        torch.testing.assert_close(out.full_tensor(), want)
        grad = weight.grad
        assert isinstance(grad, DTensor)
        torch.testing.assert_close(grad.full_tensor(), leaf.grad)


def test_a_bad_id_in_one_table_names_it_on_every_rank() -> None:
    def body() -> None:
        weights = [distribute_tensor(t, Mesh((3,)), [Shard(0)]) for t in tables()[:2]]
        for name, weight in zip(("users", "items"), weights, strict=True):
            weight._name = name
        good, bad = torch.zeros(4, 1, dtype=torch.long), torch.tensor([[0], [1], [2], [9]])
        embedding_bags([distribute_tensor(ids, Mesh((3,)), [Shard(0)]) for ids in (good, bad)], weights)

    assert same_error(3, IdError, body).startswith("items: id 9 at position (3, 0)")


@world(3)
def test_tools_see_the_op_and_what_it_sends() -> None:
    mesh = Mesh((3,))
    weights = [distribute_tensor(t, mesh, [Shard(0)]) for t in tables()[:2]]
    here = distribute_tensor(torch.arange(6).view(6, 1), mesh, [Shard(0)])
    with explain() as report, shadow() as shadowed:
        embedding_bags([here, here], weights)
    assert shadowed.compared["embedding_bags"] == 1
    assert [event.cause.op for event in report.events] == ["embedding_bag", "embedding_bag"]
    assert report.sent_bytes == sum(event.sent_bytes for event in report.events) > 0
    with no_implicit_comm():
        embedding_bags([here, here], weights)
    partial = distribute_tensor(tables()[0], mesh, [Partial()])
    with pytest.raises(RuleError, match="Implicit communication"), no_implicit_comm():
        embedding_bags([here, here], [partial, partial])


@world(2)
def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(LayoutError, match="1 inputs, 2 weights"):
        embedding_bags([torch.zeros(1, 1, dtype=torch.long)], tables()[:2])


@world(4)
def test_grids_and_tables_smaller_than_a_mesh_of_two_axes_equal_one_process() -> None:
    full, ids = tables()[:3], torch.randint(0, 9, (5, 2), generator=torch.Generator().manual_seed(2))
    placements: list[list[Placement]] = [[Shard(0), Shard(1)], [Shard(0), Shard(0)], [OnRanks(1), Shard(1)]]
    expected = [F.embedding_bag(ids % 3, t[:3], mode="sum") for t in full]  # 3 rows on 2 x 2 ranks
    mesh = Mesh((2, 2))
    weights = [distribute_tensor(t[:3], mesh, p) for t, p in zip(full, placements, strict=True)]
    here = distribute_tensor(ids % 3, mesh, [Shard(0), Shard(0)])
    for out, want in zip(embedding_bags([here] * 3, weights, mode="sum"), expected, strict=True):
        assert isinstance(out, DTensor)
        torch.testing.assert_close(out.full_tensor(), want)
