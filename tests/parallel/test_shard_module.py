"""`shard_module`: plans of names and globs, wrong plans, tied and meta parameters, grids."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import (
    DTensor,
    Layout,
    Mesh,
    OnRanks,
    Placement,
    Replicate,
    Shard,
    count_comms,
    distribute_module,
    distribute_tensor,
    shard_module,
)
from shardwise import _collectives as collectives
from shardwise.errors import LayoutError, MismatchError, PlanError, RuleError
from shardwise.parallel import ColwiseParallel, fully_shard, parallelize_module
from shardwise.parallel.shard_module import layouts_of
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.parallel.one_process import Tied, full, raised

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Recommender(nn.Module):
    """A table, a hidden layer with a norm's buffer, an output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(9, 4, mode="sum")
        self.hidden = nn.Linear(4, 6)
        self.out = nn.Linear(6, 1)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, ids: Tensor) -> Tensor:
        assert isinstance(self.scale, Tensor)
        result: Tensor = self.out(torch.relu(self.hidden(self.table(ids))) * self.scale)
        return result


torch.manual_seed(0)
MODEL = Recommender().double()
IDS = torch.randint(0, 9, (5, 3))
LINE, GRID, UNEVEN = Mesh((3,)), Mesh((2, 2), (), ("dp", "tp")), Shard(0, [1, 0, 5])
PLANS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "nothing": (LINE, {}),
    "rows": (LINE, {"table.weight": S0, "hidden.*": S0, "out.weight": S1}),
    "uneven": (LINE, {"table.weight": Shard(0, [0, 8, 1]), "hidden.*": UNEVEN, "out.weight": Shard(1, [1, 0, 5])}),
    "on ranks": (LINE, {"**": OnRanks(2), "table.weight": OnRanks(0)}),
    "everything by rows": (LINE, {"**": S0}),
    "lists and layouts": (LINE, {"table.weight": [S1], "hidden.weight": Layout(LINE, [S1], (6, 4))}),
    "grid": (GRID, {"table.weight": [S0, S1], "hidden.*": [R, S0], "out.weight": [R, S1]}),
    "rows cut twice": (GRID, {"table.weight": [S0, S0], "hidden.weight": [S1, S0]}),
    "on ranks of a grid": (GRID, {"table.weight": [OnRanks(1), S0], "out.*": [R, OnRanks(0)]}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_sharded_module_computes_and_learns_what_the_plain_one_does(plan: str) -> None:
    mesh, entries = PLANS[plan]
    expected = copy.deepcopy(MODEL)
    loss = expected(IDS).square().mean()
    loss.backward()

    def body() -> None:
        module = copy.deepcopy(MODEL)
        assert shard_module(module, entries, mesh=mesh) is module
        got = module(distribute_tensor(IDS, mesh, [S0, R][: mesh.ndim])).square().mean()
        assert_close(as_dtensor(got).full_tensor(), loss)
        got.backward()
        for (name, p), want in zip(module.named_parameters(), expected.parameters(), strict=True):
            assert isinstance(p, DTensor)
            assert isinstance(p, nn.Parameter)
            assert as_dtensor(p)._name == name
            assert_close(as_dtensor(p.grad).full_tensor(), want.grad)
        assert type(module.scale) is Tensor

    world(mesh.size()).run(body)


def test_a_name_beats_a_glob_and_a_later_glob_an_earlier_one() -> None:
    plan = {"hidden.weight": S0, "**.weight": S1, "hidden.*": OnRanks(1)}
    layouts = layouts_of(MODEL, plan, Mesh((2,)))
    assert layouts["hidden.weight"].placements == (S0,)
    assert layouts["hidden.bias"].placements == (OnRanks(1),)
    assert layouts["table.weight"].placements == (S1,)
    assert layouts["out.bias"].placements == (R,)
    assert layouts_of(MODEL, {"hidden.*": OnRanks(1), "**.weight": S1}, Mesh((2,)))["hidden.weight"].placements == (S1,)


def test_all_that_is_wrong_with_a_plan_is_said_at_once_and_on_every_rank() -> None:
    plan: dict[str, Any] = {
        "table.wieght": S0,
        "zzz*": S0,
        "hidden.weight": Shard(2),
        "hidden.bias": Shard(0, [1, 2]),
        "out.weight": OnRanks(2),
        "out.bias": [S0, S0],
        "table.weight": Layout(Mesh((2,)), [S0], (3, 3)),
    }

    def body() -> str:
        module = copy.deepcopy(MODEL)
        with pytest.raises(PlanError) as caught:
            shard_module(module, plan)
        assert not any(isinstance(p, DTensor) for p in module.parameters()), "nothing was changed"
        return str(caught.value)

    (text,) = set(world(2).run(body))
    assert text == (
        "The plan does not fit the module:\n"
        "  'table.wieght' matches no parameter. Did you mean 'table.weight'? Fix: use its name.\n"
        "  'zzz*' matches no parameter. Known names: "
        "table.weight, hidden.weight, hidden.bias, out.weight, out.bias. Fix: use these, or leave it out.\n"
        "  table.weight: the layout is for shape (3, 3), the parameter has (9, 4). "
        "Fix: pass placements alone, or layout.replace(shape=(9, 4)).\n"
        "  hidden.weight: Shard(2) on axis 0: a tensor of shape (6, 4) has no dim 2. Fix: Shard(0) to Shard(1).\n"
        "  hidden.bias: Shard(0, sizes=(1, 2)) on axis 0: sizes (1, 2) add up to 3, but dim 0 has 6 elements here "
        "(global shape (6,)). Fix: sizes that add up to 6, or Shard(0), which divides as torch.chunk does.\n"
        "  out.weight: OnRanks(2) on axis 0 of Mesh(0=2): positions are 0 to 1. "
        "Fix: OnRanks with a position on this axis, which is not the number of a rank.\n"
        "  out.bias: One placement per mesh axis: Mesh(0=2) has 1, got 2: [Shard(0), Shard(0)]. "
        "Fix: one placement for each axis, or a dict by axis name."
    )


def test_one_placement_for_a_grid_is_refused() -> None:
    with pytest.raises(PlanError, match=r"is one placement for 2 axes. Fix: one placement per axis"):
        layouts_of(MODEL, {"table.weight": S0}, Mesh((2, 2)))


DIFFERENT: dict[str, Callable[[], dict[str, Any]]] = {
    "placement": lambda: {"hidden.*": S0, "table.weight": Shard(collectives.rank() % 2)},
    "a wrong one on one rank": lambda: {"hidden.*": S0, "table.weight": Shard(5 if collectives.rank() == 1 else 0)},
    "missing on one rank": lambda: {"table.weight": S0} if collectives.rank() else {},
    "order": lambda: dict(sorted({"**.weight": S0, "table.*": S1}.items(), reverse=collectives.rank() == 2)),
}


def test_plans_that_differ_are_refused_with_the_differences_only() -> None:
    texts = {}
    for name, plan in DIFFERENT.items():
        text = texts[name] = raised(MismatchError, lambda plan=plan: shard_module(copy.deepcopy(MODEL), plan()), 3)  # type: ignore[misc]
        assert text.startswith("Ranks disagree on the sharding plan:\n  rank 0"), name
        assert text.endswith("\n  Fix: pass the same module, plan and source rank on every rank.")
        assert "plan for hidden" not in text
        assert "parameter" not in text
    assert texts["placement"].split("\n")[1:3] == [
        '  rank 0, 2: {"plan for table.weight": "Shard(0)"}',
        '  rank 1: {"plan for table.weight": "Shard(1)"}',
    ]


def test_modules_sources_and_devices_that_differ_are_refused() -> None:
    def on_meta() -> None:
        device = "meta" if collectives.rank() else "cpu"
        shard_module(nn.Linear(2, 3, bias=False, device=device), {"weight": S0})

    text = raised(MismatchError, lambda: shard_module(nn.Linear(3, 2 + collectives.rank()), {}))
    assert '"parameter weight": "torch.float32 (2, 3)"' in text
    assert '"parameter weight": "torch.float32 (3, 3)"' in text
    text = raised(MismatchError, lambda: shard_module(nn.Linear(2, 3), {}, src_rank=collectives.rank() or None))
    assert text.split("\n")[1:3] == ['  rank 0: {"src_rank": null}', '  rank 1: {"src_rank": 1}']
    assert raised(MismatchError, on_meta).split("\n")[1:3] == [
        '  rank 0: {"parameter weight": "torch.float32 (3, 2)"}',
        '  rank 1: {"parameter weight": "torch.float32 (3, 2) on the meta device"}',
    ]


Door = Callable[[nn.Module, int | None], object]
DOORS: list[Door] = [
    lambda module, source: shard_module(module, {"weight": S0}, src_rank=source),
    lambda module, source: parallelize_module(module, None, ColwiseParallel(), src_data_rank=source),
]


@pytest.mark.parametrize("shard", DOORS, ids=["shard_module", "parallelize_module"])
@pytest.mark.parametrize("source", [0, 2, None])
@world(3)
def test_the_values_of_the_source_rank_count(source: int | None, shard: Door) -> None:
    module = nn.Linear(2, 7)
    nn.init.constant_(module.weight, collectives.rank())
    shard(module, source)
    own = [0.0] * 3 + [1.0] * 3 + [2.0]
    assert full(module.weight)[:, 0].tolist() == (own if source is None else [float(source)] * 7)


@pytest.mark.parametrize(
    "plan",
    [
        {"**.weight": S0},
        {"table.weight": S0},
        {"out.weight": S0},
        {"out.*": S0, "table.weight": S0},
        {"table.*": S0},
        {"**": S1, "out.*": S0},
        {"table.weight": S0, "**": S1},
    ],
    ids=repr,
)
@world(3)
def test_tied_parameters_stay_tied_and_one_of_their_names_is_enough(plan: dict[str, Placement]) -> None:
    plain = Tied().double()
    ids = torch.tensor([0, 5, 2])
    plain(ids).square().sum().backward()
    expected = plain.table.weight.grad
    assert expected is not None
    module = copy.deepcopy(plain)
    module.zero_grad()
    with pytest.raises(PlanError, match=r"table.weight and out.weight are tied, but the plan gives"):
        shard_module(module, {"table.weight": S0, "out.weight": S1})
    shard_module(module, plan)
    assert module.table.weight is module.out.weight
    assert as_dtensor(module.table.weight).placements == (S0,)
    assert len(list(module.parameters())) == 2
    module(distribute_tensor(ids, Mesh((3,)), [R])).square().sum().backward()
    assert_close(as_dtensor(module.table.weight.grad).full_tensor(), expected)


@world(4)
def test_a_table_larger_than_one_rank_may_hold_is_built_from_the_meta_device() -> None:
    """A billion rows: 256 GB. Each rank is to hold its own, and this one holds none of them."""
    with torch.device("meta"):
        table = nn.Embedding(1_000_000_000, 64)
        small = nn.Embedding(1_000, 64)
    layouts = layouts_of(table, {"weight": Shard(0, [10**9 - 6, 1, 2, 3])}, Mesh((4,)))
    assert layouts["weight"].local_shape(3) == (3, 64)
    shard_module(small, {"weight": S0})
    assert as_dtensor(small.weight).to_local().untyped_storage().nbytes() == 250 * 64 * 4
    assert as_dtensor(small.weight.detach()).full_tensor().std().item() == pytest.approx(1, abs=0.02)


def test_meta_modules_are_filled_alike_for_any_world() -> None:
    def body() -> dict[str, Tensor]:
        torch.manual_seed(1)
        with torch.device("meta"):
            module = Recommender()
        shard_module(module, {"**": S0})
        with pytest.raises((RuntimeError, RuleError), match="meta"):
            module(distribute_tensor(IDS))
        return {name: as_dtensor(p.detach()).full_tensor() for name, p in module.named_parameters()}

    (expected,) = world(1).run(body)
    for size in (2, 3):
        for got in world(size).run(body):
            assert all(torch.equal(got[name], value) for name, value in expected.items())


class HalfReset(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.ones(2))


@pytest.mark.parametrize("placement", [R, S0, S1, Shard(0, (0, 9)), OnRanks(1)], ids=str)
@world(2)
def test_the_row_of_the_padding_of_a_meta_table_is_zero(placement: Placement) -> None:
    """It was filled through a view, which of a table cut by rows is a copy."""
    for kind in (nn.Embedding, nn.EmbeddingBag):
        with torch.device("meta"):
            module = nn.Sequential(kind(9, 4, padding_idx=5))
        with count_comms() as comms:
            shard_module(module, {"0.weight": placement})
        rows = as_dtensor(module.get_parameter("0.weight")).full_tensor().detach()
        assert (rows == 0).all(1).tolist() == [row == 5 for row in range(9)]
        assert comms.implicit == []
        assert module[0].padding_idx == 5


def test_buffers_of_the_meta_device_are_filled_or_refused() -> None:
    """They stayed on the meta device, or held whatever the memory did."""
    with torch.device("meta"):
        norm, bare, half = nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False), HalfReset()
    shard_module(norm, {"**": S0})
    shard_module(bare, {})
    for module in (norm, bare):
        assert isinstance(module.running_var, Tensor)
        assert module.running_var.tolist() == [1.0] * 3
        assert module.num_batches_tracked.item() == 0  # type: ignore[union-attr]
    with pytest.raises(PlanError, match=r"its reset_parameters\(\) does not fill scale. Fix: let it do so"):
        shard_module(half, {"**": S0})


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("fill", [shard_module, fully_shard], ids=["shard_module", "fully_shard"])
def test_a_meta_module_that_cannot_fill_itself_is_refused_at_its_first_forward_until_it_is_filled(fill: Any) -> None:
    def body() -> str:
        with torch.device("meta"):
            made: Any = nn.Sequential(nn.Linear(3, 3), NoReset())
        module = shard_module(made, {"**": S0}) if fill is shard_module else fully_shard(made)
        x = distribute_tensor(torch.ones(2, 3), placements=[S0])
        with pytest.raises(PlanError) as caught:
            module(x)
        for one in (module, copy.deepcopy(module)):
            nn.init.constant_(one[1].weight, 2.0)
            want = one[0](x) * 2
            assert_close(as_dtensor(one(x)).full_tensor(), as_dtensor(want).full_tensor())
            one[1].weight.data[:] = torch.nan  # of training: it is not looked for again
            assert as_dtensor(one(x)).full_tensor().isnan().all()
        return str(caught.value)

    (text,) = set(world(2).run(body))
    assert text == (
        "NoReset at '1' was built on the meta device, and NaN is in weight, as if they had not been filled. "
        "Fix: load_safetensors, restore or torch.nn.init first."
    )


@world(2)
def test_what_is_frozen_stays_frozen_and_what_is_no_placement_is_refused() -> None:
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    shard_module(module, {"**": S0})
    assert module.weight.requires_grad
    assert not module.bias.requires_grad
    wrong: Any = {"weight": ["rows"]}
    with pytest.raises((PlanError, LayoutError), match=r"needs a placement such as Shard\(0\)"):
        shard_module(nn.Linear(3, 2), wrong)


@world(3)
def test_a_sharded_module_can_be_sharded_again() -> None:
    """What the second plan names is moved; what it omits stays as it is."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5))
    before = [p.detach().clone() for p in module.parameters()]
    shard_module(module, {"**.weight": Shard(0)})
    shard_module(module, {"0.weight": Shard(1)})
    parameters = [as_dtensor(p) for p in module.parameters()]
    assert [p.placements for p in parameters] == [(Shard(1),), (Shard(0),), (Replicate(),)]
    for parameter, want in zip(parameters, before, strict=True):
        assert isinstance(parameter, nn.Parameter)
        assert torch.equal(as_dtensor(parameter.detach()).full_tensor(), want)


@world(3)
def test_distribute_module_partitions_by_a_function_and_replicates_the_rest() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)).eval()
    x = torch.randn(5, 4)
    want = model(x)

    def shard_first(name: str, module: nn.Module, mesh: Any) -> None:
        if name == "0":
            for key, parameter in list(module.named_parameters()):
                module.register_parameter(key, distribute_tensor(parameter, mesh, [Shard(0)]))  # type: ignore[arg-type]

    mesh = Mesh((3,))
    distribute_module(
        model,
        mesh,
        shard_first,
        lambda m, inputs, where: tuple(distribute_tensor(t, where, [Replicate()]) for t in inputs),
        lambda m, out, where: out.full_tensor(),
    )
    assert as_dtensor(model[0].weight).placements == (Shard(0),)
    assert as_dtensor(model[2].weight).placements == (Replicate(),)
    assert isinstance(model[1].running_mean, DTensor)
    torch.testing.assert_close(model(x), want)
    with pytest.raises(PlanError, match="called on this module before"):
        distribute_module(model, mesh)
