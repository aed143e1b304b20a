"""Modules of plain parameters that hold a rank's part compute, and learn, as the modules of DTensors do."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import Mesh, Placement, Replicate, Shard, distribute_tensor, rank, shard_module
from shardwise.parallel import local_parameters
from shardwise.testing import world
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
