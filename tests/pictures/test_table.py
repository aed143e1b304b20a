"""Tables tell what each rank holds of each parameter, as it is or as a plan would have it."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwise import Layout, Mesh, OnRanks, Replicate, Shard, shard_module, sharded_tensor, sharding_table
from shardwise._pictures import Table
from shardwise._tensor import DTensor
from shardwise.errors import PlanError
from shardwise.sharded_tensor import ChunkShardingSpec, Sharder, ShardingPlan
from shardwise.testing import world

MESH = Mesh((2,))


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3, dtype=torch.float64))


PLAN: dict[str, Any] = {"0.weight": Shard(0, (5, 2)), "1.weight": Shard(1), "1.bias": OnRanks(1)}


def test_a_plan_is_shown_before_it_is_applied() -> None:
    with torch.device("meta"):
        module = model()
    assert str(sharding_table(module, PLAN, MESH)) == (
        "parameter  shape  placement               rank 0  rank 1\n"
        "0.weight   7 x 4  Shard(0, sizes=(5, 2))    80 B    32 B\n"
        "1.weight   3 x 4  Shard(1)                  48 B    48 B\n"
        "1.bias     3      OnRanks(1)                 0 B    24 B\n"
        "all                                        128 B   104 B"
    )


def test_a_sharded_module_is_shown_as_its_plan_was() -> None:
    planned = sharding_table(model(), PLAN, MESH)

    def body() -> tuple[Table, list[int]]:
        module = shard_module(model(), PLAN)
        held = [p.to_local().numel() * p.element_size() for p in module.parameters() if isinstance(p, DTensor)]
        return sharding_table(module), held

    for rank, (table, held) in enumerate(world(2).run(body)):
        assert table == planned
        assert [one.rank_bytes[rank] for one in table.placed] == held


def test_plain_parameters_are_on_every_rank_and_tied_ones_are_one() -> None:
    module = model()
    assert [one.placement for one in sharding_table(module).placed] == ["plain"] * 3
    assert sharding_table(module).ranks == (0,)
    plan = {"0.weight": Replicate()}
    assert [one.rank_bytes for one in sharding_table(module, plan, Mesh((2,), (5, 3))).placed] == [
        (112, 112), (96, 96), (24, 24),
    ]  # fmt: skip
    tied = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    tied[1].weight = tied[0].weight
    assert [one.name for one in sharding_table(tied).placed] == ["0.weight"]


def test_a_plan_of_specs_is_shown_and_what_sharders_do_is_not_known() -> None:
    class Mine(Sharder):
        def shard(self, module: nn.Module) -> nn.Module:
            return module

    plan = ShardingPlan({"0.weight": ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"]), "1": Mine()})
    assert str(sharding_table(model(), plan, MESH)) == (
        "parameter          shape  placement  rank 0  rank 1\n"
        "0.weight           7 x 4  Shard(0)     48 B    64 B\n"
        "1.weight           3 x 4  by Mine         ?       ?\n"
        "1.bias             3      by Mine         ?       ?\n"
        "all that is known                      48 B    64 B"
    )


def test_a_plan_of_specs_is_what_sharding_by_it_gives() -> None:
    plan = ShardingPlan({"0.weight": ChunkShardingSpec(1, ["rank:1/cpu", "rank:0/cpu"])})

    def body() -> Table:
        return sharding_table(sharded_tensor.shard_module(model(), plan))

    planned = sharding_table(model(), plan, MESH)
    assert world(2).run(body)[0] == planned


def test_what_a_plan_of_specs_does_not_name_stays_as_it_is() -> None:
    plan = ShardingPlan({"0.weight": ChunkShardingSpec(1, ["rank:1/cpu", "rank:0/cpu"])})

    def body() -> Table:
        return sharding_table(shard_module(model(), PLAN), plan)

    table, before = world(2).run(body)[0], sharding_table(model(), PLAN, MESH)
    assert table.placed[1:] == before.placed[1:]
    assert table.placed[0].rank_bytes == (56, 56)


def test_of_many_ranks_the_fullest_and_the_emptiest_are_shown() -> None:
    table = sharding_table(nn.Embedding(7, 4), {"weight": Shard(0)}, Mesh((5,)))
    assert [line.split()[-4:] for line in str(table).splitlines()[1:]] == [["32", "B", "0", "B"]] * 2


def test_a_layout_of_several_axes_is_shown_in_full() -> None:
    layout = Layout(Mesh((2, 2)), [Shard(0), Shard(1)], (7, 4))
    table = sharding_table(nn.Embedding(7, 4), {"weight": layout}, Mesh((2, 2)))
    assert table.placed[0].placement == "Shard(0), Shard(1)"
    assert table.placed[0].rank_bytes == (32, 32, 24, 24)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="matches no parameter"):
        sharding_table(model(), {"0.wieght": Shard(0)}, MESH)
