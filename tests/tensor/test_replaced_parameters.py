"""An optimizer that was made before its module was sharded warns at its first step."""

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import DTensor, Mesh, Shard, distribute_module, distribute_tensor, shard_module
from shardwise.parallel import ColwiseParallel, RowwiseParallel, local_parameters, parallelize_module
from shardwise.sharded_tensor import ChunkShardingSpec, ShardingPlan
from shardwise.sharded_tensor import shard_module as shard_by_plan
from shardwise.tensor import replaced_parameters
from shardwise.testing import world

S0 = Shard(0)
X = torch.ones(2, 4)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def by_function(module: nn.Module) -> nn.Module:
    def partition(name: str, child: nn.Module, mesh: Any) -> None:
        if name == "0":
            child.register_parameter(
                "weight", nn.Parameter(distribute_tensor(child.get_parameter("weight"), mesh, [S0]))
            )

    return distribute_module(module, Mesh((2,)), partition)


SHARDED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "shard_module": lambda module: shard_module(module, {"0.weight": S0}),
    "parallelize_module": lambda module: parallelize_module(
        module, None, {"0": ColwiseParallel(), "1": RowwiseParallel()}
    ),
    "distribute_module": by_function,
    "sharded_tensor.shard_module": lambda module: shard_by_plan(
        module,
        ShardingPlan(
            {name: ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]) for name, _ in module.named_parameters()}
        ),
    ),
}


def told(body: Callable[[], object], ranks: int = 2) -> list[str]:
    """The warnings of all ranks while they run `body`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world(ranks).run(body)
    return [str(one.message) for one in caught]


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        module(X).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("made", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize("sharded", SHARDED)
def test_the_first_step_names_parameters_that_were_replaced(sharded: str, made: Any) -> None:
    def body() -> None:
        module = layers()
        early = made(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(early, 1)
        SHARDED[sharded](module)
        trained(module, early)
        scheduler.step()

    texts = told(body)
    assert len(texts) == 2  # one a rank
    assert texts[0].startswith(f"This step of {made.__name__} does not change 4 of its 4 parameters in their module: ")
    assert texts[0].endswith("Fix: make the optimizer after the module is sharded.")
    assert all(name in texts[0] for name in ("weight", "bias"))


def test_parameters_that_are_sharded_again_or_made_local_are_named() -> None:
    def body() -> None:
        module = shard_module(layers(), {"**": S0})
        early = torch.optim.SGD(module.parameters(), lr=0.1)
        shard_module(module, {"1.weight": Shard(1)})
        trained(module, early)
        late = torch.optim.SGD(module.parameters(), lr=0.1)
        local_parameters(module)
        trained(module, late)

    texts = told(body, 1)
    assert "does not change 1 of its 4 parameters in their module: 1.weight." in texts[0]
    assert "does not change 4 of its 4 parameters in their module: 0.weight, 0.bias, 1.weight, 1.bias." in texts[1]
    assert len(texts) == 2


def test_a_gradient_from_before_is_none_of_the_module() -> None:
    def body() -> None:
        module = layers()
        early = torch.optim.SGD(module.parameters(), lr=0.1)
        module(X).sum().backward()
        shard_module(module, {"0.weight": S0})
        early.step()

    assert len(told(body)) == 2


def test_there_is_no_false_alarm() -> None:
    """An optimizer made afterwards, copies, a parameter that another module still trains, and old modules."""

    def body() -> None:
        plain = layers()
        of_plain = torch.optim.SGD(plain.parameters(), lr=0.1)
        module = shard_module(copy.deepcopy(plain), {"0.weight": S0})
        trained(module, torch.optim.SGD(module.parameters(), lr=0.1))
        trained(plain, of_plain)
        shared, other = layers(), layers()
        other[0].weight = shared[0].weight
        of_other = torch.optim.SGD(other.parameters(), lr=0.1)
        shard_module(shared, {"0.weight": S0})
        trained(other, of_other)
        shard_module(module, {})  # nothing is replaced
        trained(module, torch.optim.SGD(module.parameters(), lr=0.1))

    assert told(body) == []


def test_nothing_is_remembered_of_parameters_that_nothing_holds() -> None:
    shard_module(layers(), {"0.weight": S0})
    gc.collect()
    assert not any(found.parameter() is None for found in replaced_parameters._replaced.values())
    before = len(replaced_parameters._replaced)
    module = layers()
    held = module[0].weight
    shard_module(module, {"0.weight": S0})
    assert isinstance(module[0].weight, DTensor)
    assert len(replaced_parameters._replaced) == before + 1
    del held
    assert len(replaced_parameters._replaced) == before
