"""Ordinary optimizers on sharded parameters take the steps that they take in one process, with shard-sized state."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DTensor, Mesh, OnRanks, Placement, Replicate, Shard, collectives, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

R, S0, S1 = Replicate(), Shard(0), Shard(1)
GENERATOR = torch.Generator().manual_seed(0)
Make = Callable[..., torch.optim.Optimizer]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


FIRST, BIAS, SECOND, X, Y = normal(5, 3), normal(5), normal(1, 5), normal(7, 3), normal(7, 1)
VALUES = (FIRST, BIAS, SECOND)
LAYOUTS: dict[str, tuple[Placement, Placement, Placement]] = {
    "copies": (R, R, R),
    "rows": (S0, S0, S0),  # the second weight has one row: two ranks hold nothing of it
    "columns then rows": (S0, S0, S1),
    "uneven": (Shard(0, [1, 4, 0]), Shard(0, [1, 4, 0]), Shard(1, [1, 4, 0])),
    "on ranks": (OnRanks(0), OnRanks(1), OnRanks(2)),
    "mixed": (S1, R, OnRanks(1)),
}
OPTIMIZERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.05}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "maximize": (torch.optim.Adam, {"lr": 0.05, "maximize": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.05, "centered": True, "momentum": 0.9}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.05}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.05, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.05}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.05}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05, "t0": 1}),
}
FUSED = ("SGD", "momentum", "Adagrad", "Adam", "amsgrad", "AdamW", "maximize")  # what torch has fused
WAYS: dict[str, dict[str, bool]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def loss_of(weights: list[Any], x: Tensor, y: Tensor) -> Tensor:
    first, bias, second = weights
    return F.mse_loss(F.linear(torch.relu(F.linear(x, first, bias)), second), y)


def train(weights: list[Any], make: Make, settings: dict[str, Any], x: Tensor, y: Tensor, *, steps: int = 3) -> Any:
    optimizer = make(weights, **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(weights, x, y).backward()
        optimizer.step()
    return optimizer


def sharded(layout: str, mesh: Mesh) -> list[nn.Parameter]:
    return [
        nn.Parameter(distribute_tensor(value, mesh, [place]))
        for value, place in zip(VALUES, LAYOUTS[layout], strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in OPTIMIZERS for way in WAYS if way != "fused" or name in FUSED]
)
def test_steps_equal_one_process_for_every_layout(name: str, way: str) -> None:
    make, settings = OPTIMIZERS[name]
    settings = settings | WAYS[way]
    expected = [nn.Parameter(value.clone()) for value in VALUES]
    train(expected, make, settings, X, Y)

    def body() -> None:
        mesh = Mesh((3,))
        for layout, data in product(LAYOUTS, (R, S0)):
            weights = sharded(layout, mesh)
            inputs = [distribute_tensor(t, mesh, [data]) for t in (X, Y)]
            optimizer = train(weights, make, settings, *inputs)
            for weight, want in zip(weights, expected, strict=True):
                assert_close(as_dtensor(weight.detach()).full_tensor(), want.detach())
                shard = as_dtensor(weight).to_local()
                assert as_dtensor(weight.grad).to_local().shape == shard.shape
                assert_state_fits(optimizer.state[weight], shard)

    world(3).run(body)


@pytest.mark.parametrize("foreach", [False, True])
def test_adafactor_whose_factors_have_other_shapes_equals_one_process(foreach: bool) -> None:
    settings = {"lr": 0.05, "weight_decay": 0.1, "foreach": foreach}
    expected = [nn.Parameter(value.clone()) for value in VALUES]
    train(expected, torch.optim.Adafactor, settings, X, Y)

    def body() -> None:
        for layout, places in LAYOUTS.items():
            weights = sharded(layout, Mesh((3,)))
            train(weights, torch.optim.Adafactor, settings, *(distribute_tensor(t, Mesh((3,)), [S0]) for t in (X, Y)))
            for weight, want, place in zip(weights, expected, places, strict=True):
                assert as_dtensor(weight).placements == (place,)
                assert_close(as_dtensor(weight.detach()).full_tensor(), want.detach())

    world(3).run(body)


def assert_state_fits(state: dict[str, Any], shard: Tensor) -> None:
    """No state is larger than the shard it belongs to; numbers (step counts) aside."""
    for key, value in state.items():
        if isinstance(value, DTensor):
            local = value.to_local()
            assert local.shape == shard.shape, key
            assert local.untyped_storage().nbytes() <= max(shard.numel(), 1) * 8, key
        elif isinstance(value, Tensor):
            assert value.ndim == 0, key


@pytest.mark.slow
@world(4)
def test_steps_on_a_grid_equal_one_process() -> None:
    mesh = Mesh((2, 2))
    expected = [nn.Parameter(value.clone()) for value in VALUES]
    train(expected, torch.optim.AdamW, {"lr": 0.05}, X, Y)
    for places in ([R, S0], [S0, S1], [S1, S0], [R, R]):
        weights = [
            nn.Parameter(distribute_tensor(FIRST, mesh, places)),
            nn.Parameter(distribute_tensor(BIAS, mesh, [R, S0])),
            nn.Parameter(distribute_tensor(SECOND, mesh, [R, S1])),
        ]
        train(weights, torch.optim.AdamW, {"lr": 0.05}, *(distribute_tensor(t, mesh, [S0, R]) for t in (X, Y)))
        for weight, want in zip(weights, expected, strict=True):
            assert_close(as_dtensor(weight.detach()).full_tensor(), want.detach())


TABLE = normal(7, 5)
IDS = [torch.tensor([[0, 3], [3, 6], [1, 1]]), torch.tensor([[2, 2], [0, 0], [5, 5]]), torch.tensor([[0, 3]] * 3)]
TABLES: list[Placement] = [R, S0, S1, OnRanks(2), Shard(0, [0, 2, 5])]


def train_table(table: nn.Parameter, ids: list[Any], name: str) -> list[float]:
    optimizer = getattr(torch.optim, name)([table], lr=0.1)
    losses = []
    for batch in ids:
        optimizer.zero_grad()
        loss = F.embedding_bag(batch, table, mode="sum", sparse=True).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's optimizers build sparse tensors themselves
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "SparseAdam"])
def test_sparse_steps_equal_one_process_for_every_layout(name: str) -> None:
    plain = nn.Parameter(TABLE.clone())
    expected = train_table(plain, IDS, name)

    def body() -> None:
        mesh = Mesh((3,))
        for place, data in product(TABLES, (R, S0)):
            table = nn.Parameter(distribute_tensor(TABLE, mesh, [place]))
            losses = train_table(table, [distribute_tensor(batch, mesh, [data]) for batch in IDS], name)
            assert losses == pytest.approx(expected)
            assert_close(as_dtensor(table.detach()).full_tensor(), plain.detach())

    world(3).run(body)


@pytest.mark.parametrize("way", WAYS)
@world(3)
def test_a_loaded_optimizer_goes_on_as_if_it_had_never_stopped(way: str) -> None:
    mesh, settings = Mesh((3,)), {"lr": 0.05, **WAYS[way]}
    for layout in LAYOUTS:
        straight = sharded(layout, mesh)
        x, y = (distribute_tensor(t, mesh, [S0]) for t in (X, Y))
        train(straight, torch.optim.AdamW, settings, x, y, steps=4)
        weights = sharded(layout, mesh)
        saved = copy.deepcopy(train(weights, torch.optim.AdamW, settings, x, y, steps=2).state_dict())
        resumed = torch.optim.AdamW(weights, **settings)  # type: ignore[arg-type]
        resumed.load_state_dict(saved)
        for _ in range(2):
            resumed.zero_grad()
            loss_of(weights, x, y).backward()
            resumed.step()
        for got, want in zip(weights, straight, strict=True):
            assert_close(as_dtensor(got.detach()).to_local(), as_dtensor(want.detach()).to_local())


@world(2)
def test_plain_values_load_into_a_sharded_module() -> None:
    """E8: it was an error."""
    linear = nn.Linear(3, 5).double()
    linear.weight, linear.bias = (nn.Parameter(distribute_tensor(v, Mesh((2,)), [S0])) for v in (FIRST, BIAS))
    linear.load_state_dict({"weight": FIRST * 2, "bias": BIAS * 2})
    assert torch.equal(as_dtensor(linear.weight.detach()).full_tensor(), FIRST * 2)
    state = linear.state_dict()
    assert isinstance(state["weight"], DTensor)
    with pytest.raises(RuntimeError, match="size mismatch"):
        linear.load_state_dict({"weight": FIRST.t(), "bias": BIAS})


@pytest.mark.processes
@world(2, real=True)
def test_real_processes_take_the_steps_of_one() -> None:
    expected = [nn.Parameter(value.clone()) for value in VALUES]
    train(expected, torch.optim.AdamW, {"lr": 0.05, "fused": True}, X, Y)
    mesh = Mesh((2,))
    places: list[Placement] = [Shard(0, [5, 0]), R, S0]
    weights = [nn.Parameter(distribute_tensor(v, mesh, [p])) for v, p in zip(VALUES, places, strict=True)]
    inputs = [distribute_tensor(t, mesh, [S0]) for t in (X, Y)]
    train(weights, torch.optim.AdamW, {"lr": 0.05, "fused": True}, *inputs)
    for weight, want in zip(weights, expected, strict=True):
        assert_close(as_dtensor(weight.detach()).full_tensor(), want.detach())
    assert collectives.world_size() == 2
