"""Tensors and modules cut by specs: who sends what, what becomes of parameters, what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Shard, count_comms, rank
from shardwise import shard_module as sw_shard_module
from shardwise.boxes import Box
from shardwise.errors import GroupError, LayoutError, MismatchError, PlanError
from shardwise.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    Sharder,
    ShardingPlan,
    ShardingPlanner,
    ShardingSpec,
    ShardMetadata,
    load_with_process_group,
    shard_module,
    shard_parameter,
)
from shardwise.testing import world
from shardwise.testing.failures import DeadlockError
from shardwise.testing.truth import as_dtensor

VALUE = torch.arange(40.0).reshape(10, 4)


def chunks(dim: int, *ranks: int) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, [f"rank:{r}/cpu" for r in ranks])


def boxes(*rows: tuple[tuple[int, ...], tuple[int, ...], int]) -> EnumerableShardingSpec:
    return EnumerableShardingSpec([ShardMetadata(o, s, f"rank:{r}") for o, s, r in rows])


SPECS: dict[str, ShardingSpec] = {
    "rows": chunks(0, 0, 1, 2, 3),
    "rows in another order": chunks(0, 2, 0, 3, 1),
    "columns": chunks(-1, 3, 2, 1, 0),
    "few ranks": chunks(0, 2, 1),
    "a rank twice": chunks(0, 1, 0, 1),
    "one rank": chunks(1, 3),
    "uneven": boxes(((0, 0), (1, 4), 1), ((1, 0), (7, 4), 0), ((8, 0), (2, 4), 3)),
    "grid": boxes(((0, 0), (3, 1), 0), ((0, 1), (3, 3), 1), ((3, 0), (7, 1), 2), ((3, 1), (7, 3), 3)),
    "boxes": boxes(((0, 0), (10, 1), 2), ((0, 1), (4, 3), 0), ((4, 1), (6, 2), 2), ((4, 3), (6, 1), 1)),
}


# ---- one tensor ----


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("src", [0, 3])
def test_the_values_of_the_source_arrive_and_nobody_else_needs_them(name: str, src: int) -> None:
    @world(4)
    def body() -> None:
        given = VALUE if rank() == src else torch.empty(10, 4, device="meta")
        with count_comms() as meter:
            x = SPECS[name].shard(given, src_rank=src)
        held = sum(box.numel for box in x.layout_.boxes(src))
        assert meter.total_bytes <= (40 - held) * 4 + 4 * 4 * 8  # what the source does not keep, and the agreement
        assert_close(x.full_tensor(), VALUE)
        assert x.sharding_spec() is SPECS[name]
        for mine in x.local_shards():
            assert_close(mine.tensor, VALUE[mine.metadata.box.relative_to(Box((0, 0), (10, 4)))])

    body()


@world(4)
def test_the_source_is_not_connected_to_what_is_made_of_it() -> None:
    given = VALUE.clone()
    x = chunks(0, 0).shard(given)
    x.fill_(7)
    assert_close(given, VALUE)


@world(2)
def test_no_rank_waits_for_one_that_lacks_the_device() -> None:
    with pytest.raises(RuntimeError) as error:
        ChunkShardingSpec(0, ["rank:0/mps", "rank:1/mps"]).shard(VALUE)
    assert not isinstance(error.value, DeadlockError)


@world(4)
def test_a_source_outside_the_group_is_refused() -> None:
    with pytest.raises(LayoutError, match="0 to 3, got 4"):
        chunks(0, 0, 1).shard(VALUE, src_rank=4)


def test_ranks_that_disagree_are_named() -> None:
    def different_source() -> None:
        chunks(0, 0, 1, 2).shard(VALUE, src_rank=1 if rank() == 2 else 0)

    def different_spec() -> None:
        chunks(rank() // 2, 0, 1, 2).shard(VALUE)

    def different_shape() -> None:
        chunks(0, 0, 1, 2).shard(VALUE if rank() else VALUE[:3])

    def another_wish_for_gradients() -> None:
        chunks(0, 0, 1, 2).shard(VALUE.clone().requires_grad_(rank() == 0))

    def no_values_on_the_source() -> None:
        chunks(0, 0, 1, 2).shard(torch.empty(10, 4, device="meta"), src_rank=1)

    def sparse_on_one_rank() -> None:
        chunks(0, 0, 1, 2).shard(VALUE if rank() else VALUE.to_sparse())

    def no_tensor() -> None:
        chunks(0, 0, 1, 2).shard(VALUE if rank() else VALUE.tolist())  # type: ignore[arg-type]

    for wrong, said in (
        (different_source, "rank 2: .*src_rank"),
        (different_spec, "rank 0, 1: "),
        (different_shape, "shape"),
        (another_wish_for_gradients, "rank 0: .*requires_grad"),
        (no_values_on_the_source, "rank 1: .*has no values"),
        (sparse_on_one_rank, "rank 0: .*only a dense tensor"),
        (no_tensor, "rank 0: .*only a Tensor can be sharded, got list"),
    ):
        with pytest.raises(MismatchError, match=said):
            world(3).run(wrong)


# ---- groups ----


@world(4)
def test_a_group_of_some_ranks_works_for_itself() -> None:
    mine = (1, 3) if rank() % 2 else (0, 2)
    x = ChunkShardingSpec(0, [f"rank:{r}" for r in reversed(mine)]).shard(
        VALUE + rank(), src_rank=1, process_group=mine
    )
    assert_close(x.full_tensor(), VALUE + mine[1])
    with pytest.raises(LayoutError, match="not of the group"):
        chunks(0, 0, 1).shard(VALUE, process_group=mine)
    with pytest.raises(GroupError, match="of 4 cannot use"):
        chunks(0, 0, 1).shard(VALUE, process_group=tuple({0, 1, 2, 3} - set(mine)))


@world(3)
def test_the_order_of_a_group_does_not_change_what_a_spec_makes() -> None:
    for spec in (boxes(((0, 0), (10, 4), 1)), boxes(((0, 0), (10, 1), 2), ((0, 1), (4, 3), 0), ((4, 1), (6, 3), 2))):
        x = spec.shard(VALUE + rank(), src_rank=0, process_group=(2, 0, 1))
        assert x.sharding_spec() is spec
        assert x.layout_ == spec.layout((10, 4), (0, 1, 2))
        assert_close(x.full_tensor(), VALUE + 2)


@world(3)
def test_what_is_no_group_is_refused_in_words() -> None:
    for group, said in (
        ((0, 0, 1, 2), "each once"),
        ((-1, 0, 1, 2), "each once"),
        ((0, 1, 2, 3), "each once"),
        ((), "cannot use a process group of the ranks"),
        (2, "is one of torch's, a mesh, or ranks"),
    ):
        with pytest.raises(GroupError, match=said):
            chunks(0, 0, 1).shard(VALUE, process_group=group)


@world(2, real=True)
def test_a_mesh_of_torch_is_a_group() -> None:
    mesh = init_device_mesh("cpu", (2,))
    assert_close(chunks(0, 1, 0).shard(VALUE + rank(), 1, mesh).full_tensor(), VALUE + 1)


@world(4)
def test_a_group_may_be_set_for_a_while_but_not_inside_another() -> None:
    mine = Mesh((2,), (1, 3) if rank() % 2 else (0, 2))
    spec = ChunkShardingSpec(1, [f"rank:{r}" for r in mine.ranks])
    with load_with_process_group(mine):
        with pytest.raises(GroupError, match="already"), load_with_process_group(mine):
            pass
        assert_close(spec.shard(VALUE + rank()).full_tensor(), VALUE + mine.ranks[0])
    with pytest.raises(ZeroDivisionError), load_with_process_group(mine):
        raise ZeroDivisionError
    with load_with_process_group(mine):
        pass
    with pytest.raises(MismatchError):  # everybody again, and everybody says another spec
        spec.shard(VALUE)


@world(4, real=True)
def test_torchs_own_groups_are_used() -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank() % 2]
    ranks = dist.get_process_group_ranks(group)
    x = ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in ranks]).shard(VALUE + rank(), 1, group)
    assert_close(x.full_tensor(), VALUE + ranks[1])


# ---- parameters ----


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 4)
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.head = nn.Linear(6, 4)
        self.register_buffer("scale", torch.arange(1.0, 5.0))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.inner(self.table(ids))) * self.scale
        return found


@world(4)
def test_a_parameter_becomes_one_that_trains_as_before() -> None:
    mine, reference = Model(), Model()
    if rank() != 2:
        nn.init.zeros_(mine.table.weight)  # only the source's values count
    shard_parameter(mine.table, "weight", SPECS["uneven"], src_rank=2)
    weight = mine.table.weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, DTensor)
    assert "table.weight" in dict(mine.named_parameters())
    ids = torch.tensor([1, 9, 9, 0])
    for model in (mine, reference):
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(ids).square().sum().backward()
            optimizer.step()
    assert_close(as_dtensor(weight.detach()).full_tensor(), reference.table.weight.detach())


@world(4)
def test_a_buffer_stays_a_buffer_and_a_frozen_parameter_stays_frozen() -> None:
    model = Model()
    model.head.bias.requires_grad_(False)
    shard_parameter(model, "scale", chunks(0, 0, 1, 2, 3))
    shard_parameter(model.head, "bias", chunks(0, 0, 1, 2, 3))
    assert isinstance(dict(model.named_buffers())["scale"], DTensor)
    assert isinstance(model.head.bias, DTensor)
    assert not model.head.bias.requires_grad


@world(2)
def test_a_plain_attribute_stays_one() -> None:
    model = Model()
    model.extra = VALUE.clone()
    shard_parameter(model, "extra", chunks(0, 0, 1))
    assert isinstance(model.extra, DTensor)
    assert "extra" not in model.state_dict()


def test_what_cannot_be_sharded_on_one_rank_is_the_same_error_on_all() -> None:
    def missing() -> None:
        shard_parameter(nn.Linear(4, 4, bias=rank() != 1), "bias", chunks(0, 0, 1))

    def strided() -> None:
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(torch.ones(4, 4).t() if rank() == 1 else torch.ones(4, 4))
        shard_parameter(layer, "weight", chunks(0, 0, 1))

    def sharded() -> None:
        layer = nn.Linear(4, 4)
        if rank() < 2:
            shard_parameter(layer, "weight", chunks(0, 0, 1), process_group=(0, 1))
            shard_parameter(layer, "weight", chunks(0, 1, 0))  # among its own ranks
        shard_parameter(layer, "weight", chunks(0, 0, 1), process_group=(0, 1, 2))

    for wrong, said in (
        (missing, "rank 1: .*must be a Tensor, got NoneType"),
        (strided, "rank 1: .*weight is not contiguous"),
        (sharded, "rank 2: .*is sharded"),
    ):
        with pytest.raises(MismatchError, match=said) as error:
            world(3).run(wrong)
        assert "ranks 0, 1, 2 raised the same" in error.value.__notes__


@world(2)
def test_what_cannot_be_sharded_is_refused() -> None:
    model = Model()
    spec = chunks(0, 0, 1)
    with pytest.raises(AttributeError, match="Embedding has no attribute 'wait'"):
        shard_parameter(model.table, "wait", spec)
    with pytest.raises(PlanError, match="must be a Tensor, got int"):
        shard_parameter(model.table, "num_embeddings", spec)
    model.head.weight = nn.Parameter(model.head.weight.detach().t())
    with pytest.raises(PlanError, match="not contiguous"):
        shard_parameter(model.head, "weight", spec)


# ---- plans ----


class Doubled(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return nn.Sequential(module, nn.Linear(6, 6, bias=False))


@world(4)
def test_a_plan_is_carried_out() -> None:
    model, reference = Model(), Model()
    plan = ShardingPlan(
        plan={"table.weight": SPECS["rows in another order"], "head.weight": chunks(1, 0, 1, 2, 3), "inner": Doubled()},
        output_plan={"head": chunks(0, 3, 2, 1, 0)},
        return_local_tensor=["head"],
    )
    before = model.inner
    assert shard_module(model, plan, src_rank=1) is model
    assert type(model.inner[0]) is nn.Sequential
    assert model.inner[0] is before
    assert not isinstance(model.head.bias, DTensor)  # not of the plan
    with torch.no_grad():
        nn.init.eye_(model.inner[1].weight)  # type: ignore[arg-type]
    ids = torch.tensor([3, 1, 4, 1])
    got = model.head(model.inner(model.table(ids)))
    assert type(got) is Tensor
    assert got.shape == (4,)
    want = reference.head(reference.inner(reference.table(ids)))
    assert_close(got, want[3 - rank()])
    got.sum().backward()
    want.sum().backward()
    assert_close(as_dtensor(model.table.weight.grad).full_tensor(), reference.table.weight.grad)


@world(4)
def test_a_cut_dim_is_dropped_only_where_every_rank_has_one_of_it() -> None:
    model = nn.Sequential(nn.Identity())
    shard_module(model, ShardingPlan({}, return_local_tensor=[""]))
    uneven = DTensor.from_local(torch.ones(1 if rank() else 2, 3), Mesh((4,)), [Shard(0)])
    assert model(uneven).shape == (1 if rank() else 2, 3)
    assert model(DTensor.from_local(torch.ones(1, 3), Mesh((4,)), [Shard(0)])).shape == (3,)
    plain = torch.ones(1, 3)
    assert model(plain) is plain


@world(2)
def test_outputs_in_tuples_and_dicts_are_resharded() -> None:
    class Several(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"a": (x, 3), "b": [x * 2]}

    model = Several()
    shard_module(model, ShardingPlan({}, {"": chunks(1, 0, 1)}))
    out = model(DTensor.from_local(VALUE, Mesh((2,)), None))
    assert out["a"][0].placements == (Shard(1),)
    assert out["a"][1] == 3
    assert out["b"][0].placements == (Shard(1),)


@world(2)
def test_a_tied_parameter_stays_one() -> None:
    model = Model()
    model.inner[0].bias = model.head.bias = nn.Parameter(torch.arange(6.0))
    shard_module(model, ShardingPlan({"inner.0.bias": chunks(0, 0, 1), "head.bias": chunks(0, 0, 1)}))
    assert model.inner[0].bias is model.head.bias
    assert isinstance(model.head.bias, DTensor)


@world(2)
def test_a_parameter_tied_to_one_inside_a_replaced_module_is_cut_in_both() -> None:
    tied = nn.Linear(6, 6, bias=False)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), tied)
    model[0].weight = tied.weight
    shard_module(model, ShardingPlan({"1": Doubled(), "0.weight": chunks(1, 0, 1)}))
    assert tied.weight is model[0].weight
    assert isinstance(tied.weight, DTensor)
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == [
        "0.weight",
        "1.0.weight",
        "1.1.weight",
    ]


@world(2)
def test_a_module_with_two_names_is_replaced_under_both() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, shared)
    shard_module(model, ShardingPlan({"0": Doubled()}))
    assert isinstance(model[0], nn.Sequential)
    assert model[1] is model[0]
    with pytest.raises(PlanError, match="'0' has a Sharder, and so has '1'"):
        shard_module(nn.Sequential(shared, shared), ShardingPlan({"0": Doubled(), "1": Doubled()}))
    with pytest.raises(PlanError, match=r"'1\.weight' has a spec, but it belongs to '0'"):
        shard_module(nn.Sequential(shared, shared), ShardingPlan({"0": Doubled(), "1.weight": chunks(0, 0, 1)}))


@world(2)
def test_a_tied_parameter_has_one_spec() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    plan = ShardingPlan({"0.weight": chunks(0, 0, 1), "1.weight": chunks(1, 0, 1)})
    with pytest.raises(PlanError, match=r"'0\.weight' and '1\.weight' are one tensor, but have different specs"):
        shard_module(model, plan)
    assert not isinstance(model[0].weight, DTensor)


class Forgetful(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return None  # type: ignore[return-value]


@world(2)
def test_a_sharder_that_returns_no_module_is_told_so() -> None:
    model = Model()
    with pytest.raises(
        PlanError, match=r"Forgetful\.shard returns the module that takes the place of 'head', got NoneT"
    ):
        shard_module(model, ShardingPlan({"head": Forgetful()}))
    assert isinstance(model.head, nn.Linear)
    with pytest.raises(PlanError, match="needs a ShardingPlan, got dict"):
        shard_module(model, {"head": Forgetful()})  # type: ignore[arg-type]


def test_everything_wrong_with_a_plan_is_told_at_once_and_nothing_is_done() -> None:
    @world(2)
    def body() -> None:
        model = Model()
        rows = chunks(0, 0, 1)
        plan = ShardingPlan(
            plan={
                "inner": Doubled(),
                "inner.0.weight": rows,
                "inner.0": Doubled(),
                "": Doubled(),
                "tabel.weight": rows,
                "head.weight": "rows",  # type: ignore[dict-item]
                "attic": Doubled(),
                "table.weight": rows,
            },
            output_plan={"head": 3, "cellar": rows},  # type: ignore[dict-item]
            return_local_tensor=["roof"],
        )
        with pytest.raises(PlanError) as error:
            shard_module(model, plan)
        for said in (
            "'inner.0.weight' has a spec, but it belongs to 'inner', which a Sharder replaces",
            "'inner' has a Sharder, and so has 'inner.0', which is inside it",
            "no parent to be replaced in",
            "'tabel.weight' has a spec, but is no parameter",
            "'head.weight' needs a ShardingSpec or a Sharder, got str",
            "'attic' has a Sharder, but is no submodule",
            "the output of 'head' needs a ShardingSpec, got int",
            "'cellar' has a plan for its output",
            "'roof' has a plan for its output",
        ):
            assert said in str(error.value)
        assert not isinstance(model.table.weight, DTensor)
        assert type(model.inner) is nn.Sequential

    body()


@world(2)
def test_a_sharder_for_a_module_whose_name_begins_like_anothers_does_not_meet_it() -> None:
    model = Model()
    model.inner2 = nn.Linear(4, 4)
    shard_module(model, ShardingPlan({"inner": Doubled(), "inner2.weight": chunks(0, 0, 1)}))
    assert isinstance(model.inner2.weight, DTensor)


def test_a_plan_that_fits_the_module_of_some_ranks_only_is_the_same_error_on_all() -> None:
    def body() -> None:
        shard_module(nn.Linear(4, 4, bias=rank() != 2), ShardingPlan({"bias": chunks(0, 0, 1)}))

    with pytest.raises(MismatchError, match=r"rank 2: .*'bias' has a spec, but is no parameter") as error:
        world(3).run(body)
    assert "ranks 0, 1, 2 raised the same" in error.value.__notes__


def test_ranks_with_other_plans_are_named() -> None:
    def body() -> None:
        name = "table.weight" if rank() else "head.weight"
        shard_module(Model(), ShardingPlan({name: chunks(0, 0, 1, 2)}))

    with pytest.raises(MismatchError, match=r"rank 0: .*head\.weight"):
        world(3).run(body)


class LargestByRows(ShardingPlanner):
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        name, _ = max(module.named_parameters(), key=lambda item: item[1].numel())
        return ShardingPlan({name: chunks(0, 0, 1)})


@world(2)
def test_a_planner_of_ones_own_makes_plans() -> None:
    model = Model()
    shard_module(model, LargestByRows().build_plan(model))
    assert isinstance(model.table.weight, DTensor)
    assert not isinstance(model.head.weight, DTensor)


def test_the_bases_are_abstract() -> None:
    for base in (Sharder, ShardingPlanner, ShardingSpec):
        with pytest.raises(TypeError, match="abstract"):
            base()  # type: ignore[abstract]


@world(4)
def test_the_plan_of_placements_takes_specs_too() -> None:
    mine, reference = Model(), Model()
    sw_shard_module(mine, {"table.weight": SPECS["uneven"], "*.bias": Shard(0)})
    cut = as_dtensor(mine.table.weight)
    assert cut.sharding_spec().layout((10, 4), (0, 1, 2, 3)) == cut.layout_
    ids = torch.tensor([3, 1, 4, 1])
    assert_close(as_dtensor(mine(ids)).full_tensor(), reference(ids))
    with pytest.raises(PlanError, match=r"table\.weight: .*out of range"):
        sw_shard_module(Model(), {"table.weight": boxes(((0, 0), (99, 4), 0))})
