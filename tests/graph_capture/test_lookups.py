"""Replays of lookups: opaque calls get local tensors, so ranks without ids and without rows replay like the others."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from shardwise import Mesh, OnRanks, Placement, Replicate, Shard, capture, distribute_tensor
from shardwise.errors import IdError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.parallel.one_process import raised
from tools.captures import tried
from tools.rows import written

MESH = Mesh((3,))
TABLE, WEIGHTS = (
    torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    for n, shape in enumerate([(5, 4), (3, 3)])
)
IDS = [torch.tensor([[0, 1, 2], [3, 4, 0], [2, 2, 1]]), torch.tensor([[4, 4, 4], [0, 2, 1], [3, 3, 0]])]
SOME_RANKS: list[Placement] = [Shard(0, (3, 0, 0)), Shard(0, (0, 1, 2)), Shard(0), Replicate()]


def bags(ids: Tensor, table: Tensor, weights: Tensor) -> Tensor:
    return F.embedding_bag(ids, table, per_sample_weights=weights, mode="sum", padding_idx=2)


def rows(ids: Tensor, table: Tensor, weights: Tensor) -> Tensor:
    return F.embedding(ids, table) * weights.unsqueeze(-1)


@pytest.mark.parametrize("table_at", [OnRanks(2), Shard(0), Shard(0, (0, 5, 0)), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("ids_at", SOME_RANKS, ids=str)
@pytest.mark.parametrize("lookup", [bags, rows])
def test_replayed_lookups_equal_one_process(lookup: Any, ids_at: Placement, table_at: Placement) -> None:
    expected = []
    for ids in IDS * 2:
        leaves = TABLE.clone().requires_grad_(), WEIGHTS.clone().requires_grad_()
        out = lookup(ids, *leaves)
        out.sin().sum().backward()
        expected.append([out.detach(), *(x.grad for x in leaves)])

    def body() -> list[list[Tensor]]:
        step, found = capture(lookup), []
        for ids in IDS * 2:
            table, weights = (
                distribute_tensor(x, MESH, [p]).requires_grad_() for x, p in ((TABLE, table_at), (WEIGHTS, Replicate()))
            )
            out: Any = step(distribute_tensor(ids, MESH, [ids_at]), table, weights)
            out.sin().sum().backward()
            found.append([as_dtensor(x).full_tensor().detach() for x in (out, table.grad, weights.grad)])
        return found

    for found in world(3).run(body):
        assert_close(found, expected)


@pytest.mark.parametrize("table_at", [OnRanks(2), Shard(0), Replicate()], ids=str)
def test_a_replay_refuses_an_id_that_only_one_rank_has(table_at: Placement) -> None:
    bad = IDS[0].clone()
    bad[2, 1] = 5

    def act() -> None:
        step, table = capture(F.embedding), distribute_tensor(TABLE, MESH, [table_at])
        for ids in (IDS[0], IDS[0], bad):
            step(distribute_tensor(ids, MESH, [Shard(0, (0, 1, 2))]), table)

    assert "5" in raised(IdError, act, 3)


@pytest.mark.slow
def test_replays_of_ops_in_many_layouts_equal_the_ops_or_are_refused() -> None:
    """`tools/captures.py` tries all samples of tests/rules, this test every 41st."""
    tally, wrong = tried(list(written())[::41])
    assert not wrong, "\n".join(wrong)
    assert tally["ok"] > 2 * tally["refused"] > 0
