"""Plans: what becomes of the parameters, submodules and outputs that they name, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Shard, rank
from shardwise import shard_module as sw_shard_module
from shardwise.errors import MismatchError, PlanError
from shardwise.sharded_tensor import Sharder, ShardingPlan, ShardingPlanner, ShardingSpec, shard_module
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.sharded_tensor.test_sharding import SPECS, VALUE, Model, boxes, chunks


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
def test_a_sharded_dim_is_dropped_only_if_every_rank_has_size_one_there() -> None:
    model = nn.Sequential(nn.Identity())
    shard_module(model, ShardingPlan({}, return_local_tensor=[""]))
    uneven = DTensor.from_local(torch.ones(1 if rank() else 2, 3), Mesh((4,)), [Shard(0)])
    assert model(uneven).shape == (1 if rank() else 2, 3)
    rows = (2, 1, 1, 0)[rank()]  # as many rows as ranks
    assert model(DTensor.from_local(torch.ones(rows, 3), Mesh((4,)), [Shard(0)])).shape == (rows, 3)
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
def test_a_tied_parameter_stays_one_and_has_one_spec() -> None:
    model = Model()
    model.inner[0].bias = model.head.bias = nn.Parameter(torch.arange(6.0))
    shard_module(model, ShardingPlan({"inner.0.bias": chunks(0, 0, 1), "head.bias": chunks(0, 0, 1)}))
    assert model.inner[0].bias is model.head.bias
    assert isinstance(model.head.bias, DTensor)
    pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pair[1].weight = pair[0].weight
    plan = ShardingPlan({"0.weight": chunks(0, 0, 1), "1.weight": chunks(1, 0, 1)})
    with pytest.raises(PlanError, match=r"0\.weight and 1\.weight are tied, but the plan gives them different layouts"):
        shard_module(pair, plan)
    assert not isinstance(pair[0].weight, DTensor)


@world(2)
def test_a_parameter_tied_to_one_inside_a_replaced_module_is_sharded_in_both() -> None:
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
    with pytest.raises(PlanError, match="'1' has a Sharder, but it belongs to '0'"):
        shard_module(nn.Sequential(shared, shared), ShardingPlan({"0": Doubled(), "1": Doubled()}))
    with pytest.raises(PlanError, match=r"'1\.weight' has a spec, but it belongs to '0'"):
        shard_module(nn.Sequential(shared, shared), ShardingPlan({"0": Doubled(), "1.weight": chunks(0, 0, 1)}))


class Forgetful(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return None  # type: ignore[return-value]


@world(2)
def test_a_sharder_that_returns_no_module_raises() -> None:
    model = Model()
    with pytest.raises(PlanError, match=r"Forgetful\.shard must return the module that replaces 'head', got NoneT"):
        shard_module(model, ShardingPlan({"head": Forgetful()}))
    assert isinstance(model.head, nn.Linear)
    with pytest.raises(PlanError, match="plan must be a ShardingPlan, got"):
        shard_module(model, {"head": Forgetful()})  # type: ignore[arg-type]


@world(2)
def test_all_errors_of_a_sharding_plan_are_reported_at_once_and_nothing_changes() -> None:
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
        "'inner.0' has a Sharder, but it belongs to 'inner', which a Sharder replaces",
        "no parent to be replaced in",
        "'tabel.weight' matches no parameter or buffer. Did you mean 'table.weight'?",
        "'head.weight' needs a ShardingSpec or a Sharder, got str",
        "'attic' matches no module",
        "the output of 'head' needs a ShardingSpec, got int",
        "the plan for the output: 'cellar' matches no module",
        "the plan for the output: 'roof' matches no module",
    ):
        assert said in str(error.value)
    assert not isinstance(model.table.weight, DTensor)
    assert type(model.inner) is nn.Sequential


@world(2)
def test_a_sharder_for_a_module_whose_name_begins_like_anothers_does_not_meet_it() -> None:
    model = Model()
    model.inner2 = nn.Linear(4, 4)
    shard_module(model, ShardingPlan({"inner": Doubled(), "inner2.weight": chunks(0, 0, 1)}))
    assert isinstance(model.inner2.weight, DTensor)


def test_a_plan_that_fits_the_module_of_some_ranks_only_is_the_same_error_on_all() -> None:
    def body() -> None:
        shard_module(nn.Linear(4, 4, bias=rank() != 2), ShardingPlan({"bias": chunks(0, 0, 1)}))

    with pytest.raises(MismatchError, match=r"rank 2: .*'bias' matches no parameter") as error:
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
def test_a_user_defined_planner_makes_plans() -> None:
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
    sw_shard_module(mine, {"table.weight": SPECS["uneven"], "**.bias": Shard(0)})
    sharded = as_dtensor(mine.table.weight)
    assert sharded.sharding_spec().layout((10, 4), (0, 1, 2, 3)) == sharded.layout_
    ids = torch.tensor([3, 1, 4, 1])
    assert_close(as_dtensor(mine(ids)).full_tensor(), reference(ids))
    with pytest.raises(PlanError, match=r"table\.weight: .*out of range"):
        sw_shard_module(Model(), {"table.weight": boxes(((0, 0), (99, 4), 0))})
