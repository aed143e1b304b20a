"""A step of an optimizer that was made before its module was sharded is an error."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import DTensor, Mesh, Shard, distribute_module, distribute_tensor, shard_module
from shardwise.errors import OptimizerError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, local_parameters, parallelize_module
from shardwise.parallel.fully_sharded import fully_shard
from shardwise.sharded_tensor import ChunkShardingSpec, ShardingPlan
from shardwise.sharded_tensor import shard_module as shard_by_plan
from shardwise.tensor import module_sharding
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
    "fully_shard": fully_shard,
    "distribute_module": by_function,
    "sharded_tensor.shard_module": lambda module: shard_by_plan(
        module,
        ShardingPlan(
            {name: ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]) for name, _ in module.named_parameters()}
        ),
    ),
}


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        module(X).sum().backward()
        optimizer.step()


def refusal(step: Callable[[], object]) -> str:
    with pytest.raises(OptimizerError) as caught:
        step()
    return str(caught.value)


@pytest.mark.parametrize("made", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize("sharded", SHARDED)
def test_every_step_names_parameters_that_were_replaced(sharded: str, made: Any) -> None:
    def body() -> str:
        module = layers()
        early = made(module.parameters(), lr=0.1)
        SHARDED[sharded](module)
        texts = {refusal(lambda: trained(module, early)) for _ in range(2)}
        (text,) = texts
        return text

    (text,) = set(world(2).run(body))
    assert text.startswith(f"{made.__name__}.step() would not change 4 of its 4 parameters in their module: ")
    assert text.endswith("Fix: make the optimizer after the module is sharded.")
    assert all(name in text for name in ("weight", "bias"))


def test_parameters_that_are_sharded_again_or_made_local_are_named() -> None:
    def body() -> tuple[str, str]:
        module = shard_module(layers(), {"**": S0})
        early = torch.optim.SGD(module.parameters(), lr=0.1)
        shard_module(module, {"1.weight": Shard(1)})
        again = refusal(lambda: trained(module, early))
        late = torch.optim.SGD(module.parameters(), lr=0.1)
        local_parameters(module)
        return again, refusal(lambda: trained(module, late))

    ((again, local),) = world(1).run(body)
    assert "would not change 1 of its 4 parameters in their module: 1.weight." in again
    assert "would not change 4 of its 4 parameters in their module: 0.weight, 0.bias, 1.weight, 1.bias." in local


def test_nothing_of_a_refused_step_was_done() -> None:
    def body() -> None:
        module = layers()
        early = torch.optim.SGD(module.parameters(), lr=0.1)
        kept, old = module[1].get_parameter("weight"), module[0].get_parameter("weight").detach().clone()
        shard_module(module[0], {"weight": S0})
        before = kept.detach().clone()
        refusal(lambda: trained(module, early))
        assert torch.equal(kept, before)
        weight = module[0].get_parameter("weight")
        assert isinstance(weight, DTensor)
        assert torch.equal(weight.full_tensor(), old)

    world(2).run(body)


def test_a_gradient_from_before_is_none_of_the_module() -> None:
    def body() -> None:
        module = layers()
        early = torch.optim.SGD(module.parameters(), lr=0.1)
        module(X).sum().backward()
        shard_module(module, {"0.weight": S0})
        refusal(early.step)

    world(2).run(body)


def test_a_closure_computes_the_gradients_first() -> None:
    def body() -> None:
        shared, other = layers(), layers()
        other[0].weight = shared[0].weight
        of_other = torch.optim.LBFGS(other.parameters(), lr=0.1)
        early = torch.optim.LBFGS(shared[1].parameters(), lr=0.1)
        shard_module(shared, {"**": S0})

        def closure_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
            def closure() -> Any:
                optimizer.zero_grad()
                loss = module(X).square().sum()
                loss.backward()
                return loss

            return closure

        before = other[0].get_parameter("weight").detach().clone()
        of_other.step(closure_of(other, of_other))
        assert not torch.equal(other[0].get_parameter("weight"), before)
        refusal(lambda: early.step(closure_of(shared, early)))
        refusal(lambda: early.step(closure=closure_of(shared, early)))

    world(2).run(body)


def test_what_still_trains_is_not_refused() -> None:
    """An optimizer made afterwards, copies, a parameter that another module still trains, old modules, frozen ones."""

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
        adapted = layers()
        adapted[0].requires_grad_(False)
        of_adapted = torch.optim.SGD(adapted.parameters(), lr=0.1)
        shard_module(adapted[0], {"weight": S0})
        trained(adapted, of_adapted)

    world(2).run(body)


def test_nothing_is_remembered_of_parameters_that_nothing_holds() -> None:
    shard_module(layers(), {"0.weight": S0})
    gc.collect()
    assert not any(found.parameter() is None for found in module_sharding._replaced.values())
    before = len(module_sharding._replaced)
    module = layers()
    held = module[0].weight
    shard_module(module, {"0.weight": S0})
    assert isinstance(module[0].weight, DTensor)
    assert len(module_sharding._replaced) == before + 1
    del held
    assert len(module_sharding._replaced) == before
