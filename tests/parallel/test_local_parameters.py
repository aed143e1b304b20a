"""Modules of plain parameters that hold a rank's part compute, and learn, as the modules of DTensors do."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import (
    DTensor,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    rank,
    shard_module,
)
from shardwise.errors import RuleError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, local_parameters, parallelize_module
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.parallel.one_process import full

R, S0, S1 = Replicate(), Shard(0), Shard(1)
X = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """A table that is also the output projection, an uneven layer, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 5)
        self.outer = nn.Linear(6, 5)
        self.outer.weight = self.inner.weight
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = F.gelu(self.inner(x)) * self.scale + self.outer(x)
        return found


PLANS: list[dict[str, Placement]] = [
    {},
    {"**.weight": S0, "inner.bias": S0},
    {"**.weight": S1},
    {"**.weight": Shard(0, [0, 4, 1]), "scale": Shard(0, [5, 0, 0])},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("sharded", [False, True])
@world(3)
def test_training_on_local_parameters_equals_one_process(plan: dict[str, Placement], sharded: bool) -> None:
    plain, mesh = Tied(), Mesh((3,))
    module = local_parameters(shard_module(Tied(), plan, mesh=mesh))
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert len(list(module.parameters())) == 4
    assert isinstance(module, Tied)
    assert module.inner.weight.shape == (5, 6)
    x = distribute_tensor(X, mesh, [S0 if sharded else R])
    ours, theirs = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (module, plain))
    for _ in range(3):
        for optimizer, m, given in ((ours, module, x), (theirs, plain, X)):
            optimizer.zero_grad()
            m(given).square().sum().backward()
            optimizer.step()
    assert_close(full(module(x)), plain(X))
    for name, want in plain.named_parameters():
        path, _, last = name.rpartition(".")
        assert_close(full(getattr(module.get_submodule(path), last)), want.detach().requires_grad_())


@world(3)
def test_the_state_holds_local_shards_and_a_copy_shares_nothing() -> None:
    module = local_parameters(shard_module(Tied(), {"**.weight": S0}, mesh=Mesh((3,))))
    held = [2, 2, 1][rank()]
    state = module.state_dict()
    assert [type(v) for v in state.values()] == [Tensor] * 5
    assert state["inner.weight"].shape == (held, 6)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    x = distribute_tensor(X, Mesh((3,)), [R])
    assert not full(module(x)).any()
    assert full(other(x)).any()
    module.load_state_dict(other.state_dict())
    assert_close(full(module(x)), full(other(x)))


@world(2)
def test_modules_without_distributed_parameters_stay_as_they_are() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    kinds = [type(m) for m in module.modules()]
    assert local_parameters(module) is module
    assert [type(m) for m in module.modules()] == kinds


@world(3)
def test_styles_and_local_parameters_compose() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    module = copy.deepcopy(plain)
    parallelize_module(module, Mesh((3,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    local_parameters(module)
    module(X).square().sum().backward()
    plain(X).square().sum().backward()
    assert_close(module(X), plain(X))
    mine = [p.grad for p in module.parameters()]
    theirs = [p.grad for p in plain.parameters()]
    parts = [t.split([4, 4, 2], dim)[rank()] for t, dim in zip(theirs[:3], (0, 0, 1), strict=True) if t is not None]
    assert_close(mine, [*parts, theirs[3]])


COLLECTIVES: list[Any] = [
    dist.all_reduce,
    lambda x: dist.broadcast(x, 0),
    lambda x: dist.all_gather([x, x], x),
    lambda x: dist.reduce(x, 0),
    lambda x: dist.send(x, 0),
]


@pytest.mark.parametrize("call", COLLECTIVES)
@world(2)
def test_a_collective_of_torch_refuses_a_dtensor(call: Any) -> None:
    """It used to work on a copy, so that nothing happened."""
    for placement in (R, S0, Partial()):
        x = as_dtensor(DTensor.from_local(torch.ones(2), Mesh((2,)), [placement]))
        with pytest.raises(RuleError, match=r"use the local tensor of a DTensor.*to_local\(\)"):
            call(x)
        assert x.to_local().tolist() == [1, 1]
