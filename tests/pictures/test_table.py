"""Tables tell what each rank holds, as it is or by a plan; a plan in TOML is that of Python, or is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import DTensor, distribute_tensor, shard_module, sharded_tensor, sharding_table
from shardwise import _collectives as collectives
from shardwise._layout import Layout, Mesh, OnRanks, Partial, Placement, Replicate, Shard
from shardwise._pictures import Table
from shardwise._pictures.plan_file import PlanFile, read_plan
from shardwise.errors import PlanError
from shardwise.parallel import fully_shard
from shardwise.sharded_tensor import ChunkShardingSpec, EnumerableShardingSpec, Sharder, ShardingPlan, ShardMetadata
from shardwise.testing import world

MESH = Mesh((2,))


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3, dtype=torch.float64))


PLAN: dict[str, Any] = {"0.weight": Shard(0, (5, 2)), "1.weight": Shard(1), "1.bias": OnRanks(1)}


def test_a_sharded_module_is_shown_as_its_plan_was() -> None:
    with torch.device("meta"):
        planned = sharding_table(model(), PLAN, MESH)
    assert [one.rank_bytes for one in planned.placed] == [(80, 32), (48, 48), (0, 24)]

    def body() -> tuple[Table, list[int]]:
        module = shard_module(model(), PLAN)
        held = [p.to_local().numel() * p.element_size() for p in module.parameters() if isinstance(p, DTensor)]
        return sharding_table(module), held

    for rank, (table, held) in enumerate(world(2).run(body)):
        assert table == planned
        assert [one.rank_bytes[rank] for one in table.placed] == held


def test_of_sub_meshes_the_ranks_that_all_have_are_shown() -> None:
    def body() -> tuple[tuple[int, ...], int, int]:
        mesh = Mesh((2, 2), names=("dp", "tp"))
        module = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))
        module[0] = shard_module(module[0], {"weight": Shard(0)}, mesh=mesh["tp"])
        module[1] = shard_module(module[1], {"weight": Shard(1)}, mesh=mesh["dp"])
        table = sharding_table(module)
        held = sum(p.to_local().nbytes for p in module.parameters() if isinstance(p, DTensor))
        return table.ranks, sum(one.rank_bytes[0] for one in table.placed), held

    for rank, (ranks, shown, held) in enumerate(world(4).run(body)):
        assert (ranks, shown) == ((rank,), held)


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


def test_a_plan_of_specs_is_what_sharding_by_it_gives_and_leaves_what_it_does_not_name() -> None:
    plan = ShardingPlan({"0.weight": ChunkShardingSpec(1, ["rank:1/cpu", "rank:0/cpu"])})

    def body() -> tuple[Table, Table]:
        by_plan = sharding_table(sharded_tensor.shard_module(model(), plan))
        return by_plan, sharding_table(shard_module(model(), PLAN), plan)

    (by_plan, of_sharded), before = world(2).run(body)[0], sharding_table(model(), PLAN, MESH)
    assert by_plan == sharding_table(model(), plan, MESH)
    assert of_sharded.placed[1:] == before.placed[1:]
    assert of_sharded.placed[0].rank_bytes == (56, 56)


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


ALL = """
mesh = { dp = 2, tp = 2 }
ranks = [3, 1, 0, 2]
dtype = "float64"

[parameters."items.weight"]
shape = [10, 4]
placements = "Shard(0), Shard(0)"
shard_order = [1, 0]
dtype = "bfloat16"

[parameters.users.weight]
shape = [10, 4]
chunk = { dim = -2, ranks = [3, 1, 3] }

[parameters.users.bias]
shape = [4, 4]
shards = [
    { offsets = [0, 0], sizes = [4, 1], rank = "rank:0/cuda:1" },
    { offsets = [0, 1], sizes = [2, 3], rank = 1 },
    { offsets = [2, 1], sizes = [2, 3], rank = 0 },
]

[parameters.scale]
shape = []
placements = ["R", "P(max)"]
"""


class Holder(nn.Module):
    """Of one parameter."""

    def __init__(self, w: DTensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)


def read(folder: Path, content: str) -> PlanFile:
    file = folder / "plan.toml"
    file.write_text(content)
    return read_plan(file)


def test_placements_are_those_of_python(tmp_path: Path) -> None:
    plan = read(tmp_path, ALL)
    mesh = Mesh((2, 2), (3, 1, 0, 2), ("dp", "tp"))
    assert plan.mesh == mesh
    assert [p.header for p in plan.pictures] == ["items.weight", "users.weight", "users.bias", "scale"]
    assert plan.pictures[0].layout == Layout(mesh, [Shard(0), Shard(0)], (10, 4), (1, 0))
    assert plan.pictures[3].layout.placements[1] == Partial("max")
    assert [p.itemsize for p in plan.pictures] == [2, 8, 8, 8]


def test_a_fully_sharded_tensor_is_drawn_as_it_is_held_between_steps(tmp_path: Path) -> None:
    content = 'mesh = { dp = 2, tp = 3 }\n[parameters.w]\nshape = [10, 7]\nfully_shard = "dp"\nplacements = '
    mesh = Mesh((2, 3), names=("dp", "tp"))
    for placements, tp in (('"R, S(0)"', Shard(0)), ('{ tp = "S(1)" }', Shard(1)), ('"R, R"', Replicate())):
        plan = read(tmp_path, content + placements)
        assert plan.pictures[0].header == "w, all-gathered along dp for use"

        def held(tp: Placement = tp) -> Layout:
            w = distribute_tensor(torch.zeros(10, 7), mesh, [Replicate(), tp])
            stored = fully_shard(Holder(w), mesh=mesh.submesh("dp", collectives.rank())).w
            assert isinstance(stored, DTensor)
            return stored._layout.unowned

        assert set(world(6).run(held)) == {plan.pictures[0].layout}
    assert "all-gathered along dp for use" in str(plan.table)


def test_specs_are_those_of_python(tmp_path: Path) -> None:
    plan, ranks = read(tmp_path, ALL), (0, 1, 2, 3)
    chunks = ChunkShardingSpec(0, ["rank:3/cpu", "rank:1/cpu", "rank:3/cpu"]).layout((10, 4), ranks)
    shards = [
        ShardMetadata((0, 0), (4, 1), "rank:0/cpu"),
        ShardMetadata((0, 1), (2, 3), "rank:1/cpu"),
        ShardMetadata((2, 1), (2, 3), "rank:0/cpu"),
    ]
    boxes = EnumerableShardingSpec(shards).layout((4, 4), ranks)
    for rank in ranks:
        assert plan.pictures[1].layout.boxes(rank) == chunks.boxes(rank)
        assert plan.pictures[2].layout.boxes(rank) == boxes.boxes(rank)


@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_dims_are_counted_from_the_end_as_in_python(dim: int, tmp_path: Path) -> None:
    plan = read(tmp_path, f"{HEAD}shape = [3, 4, 5]\nchunk = {{ dim = {dim}, ranks = [1, 0] }}")
    expected = ChunkShardingSpec(dim, ["rank:1/cpu", "rank:0/cpu"]).layout((3, 4, 5), (0, 1))
    assert [plan.pictures[0].layout.boxes(rank) for rank in (0, 1)] == [expected.boxes(rank) for rank in (0, 1)]


def test_the_table_adds_up(tmp_path: Path) -> None:
    assert str(read(tmp_path, ALL).table).splitlines()[-1].split() == ["all", *"104 B 208 B 24 B 224 B".split()]


HEAD = "mesh = [2]\n[parameters.w]\n"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("mesh = ", "is not TOML"),
        ("", "the mesh is missing"),
        ("mesh = [2]", "there is no tensor"),
        ("mesh = [2]\nparameters = 3", "parameters is not a table"),
        ("mesh = [2]\nrank = [0, 1]\n", "'rank' is not a key of a plan file. Did you mean 'ranks'?"),
        ("mesh = [2]\nranks = [0, true]\n", "True is not a rank"),
        ("mesh = [2]\nranks = [0, 0]\n", "is not a mesh"),
        ('mesh = "two"', "'two' is not a mesh"),
        ('mesh = [2]\ndtype = "float"', "'float' is not a dtype"),
        (f"{HEAD}placements = 'S(0)'", "w: the shape is missing"),
        (f"{HEAD}shape = [4]", "w: one of placements, chunk, shards says how it is sharded, got none"),
        (f"{HEAD}shape = [4]\nplacements = 'S(0)'\nchunk = {{}}", "got placements and chunk"),
        (f"{HEAD}shape = [4]\nplacements = 'S(1)'", "w: Shard(1) on axis 0: a tensor of shape (4,) has no dim 1"),
        (f"{HEAD}shape = [4.5]\nplacements = 'S(0)'", "w: [4.5] is not a shape"),
        (f"{HEAD}shape = [4]\nplacements = 'exit()'", "w: 'exit()' is not a placement"),
        (f"{HEAD}shape = [4]\nchunk = {{ dim = 1, ranks = [0] }}", "w: chunk shards one of 1 dims"),
        (f"{HEAD}shape = [4]\nchunk = {{ dim = 0, ranks = [] }}",
            "w: chunk shards one of 1 dims over one rank or more"),
        (f"{HEAD}shape = [4]\nchunk = {{ dim = 0, ranks = [5] }}", "w: rank 5 is not of Mesh(0=2)"),
        (f"{HEAD}shape = [4]\nchunk = {{ dim = 0, ranks = [0] }}\nshard_order = [0]",
            "w: shard_order is for placements"),
        (f"{HEAD}shape = [4]\nfully_shard = 0\nplacements = 'S(0)'",
            "w: fully_shard shards a tensor that is replicated"),
        (f"{HEAD}shape = [4]\nfully_shard = 3\nplacements = 'R'", "w: The mesh has axes 0 to 0, got 3"),
        (f"{HEAD}shape = [4]\nfully_shard = [0]\nplacements = 'R'", "w: fully_shard is an axis of the mesh, got [0]"),
        (f"{HEAD}shape = []\nfully_shard = 0\nplacements = 'R'", "w: Shard(0)"),
        (f"{HEAD}shape = [4]\nshards = 4", "w: a shard is offsets, sizes and a rank"),
        (f"{HEAD}shape = [4]\nshards = [{{ offsets = [0], sizes = [3], rank = 0 }}]", "w: Boxes leave a gap"),
        (f"{HEAD}shape = [4]\nshards = [{{ offsets = [0], sizes = [4], rank = 'cpu' }}]", "w: 'cpu' is not a rank"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_the_place_and_the_reason(content: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as refused:
        read(tmp_path, content)
    assert why in str(refused.value)
    assert str(refused.value).startswith(f"{tmp_path / 'plan.toml'}: ")
