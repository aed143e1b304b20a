"""`torch.compile` around sharded modules: one error that names `capture`; units of `fully_shard` can be compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import CaptureError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.parallel.fully_sharded import fully_shard
from shardwise.testing import world

MESSAGE = (
    r"^torch.compile cannot trace a DTensor. Fix: shardwise.capture\(module, backend='inductor'\), which captures the "
    r"step and compiles its local ops."
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        return out


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def parallelized(model: nn.Sequential) -> nn.Sequential:
    return parallelize_module(model, None, {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})


def sharded(model: nn.Sequential) -> nn.Sequential:
    return sw.shard_module(model, {"*.*.weight": sw.Shard(0)})


def fully_sharded(model: nn.Sequential) -> nn.Sequential:
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def compiled(model: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="eager", **options)


def in_place(model: nn.Module) -> Callable[[Tensor], Tensor]:
    model.compile(backend="eager")
    return model


def compiled_blocks(model: nn.Module) -> Callable[[Tensor], Tensor]:
    for name, block in list(model.named_children()):
        setattr(model, name, torch.compile(block, backend="eager"))
    return model


SHARD = (parallelized, sharded, fully_sharded)
COMPILE: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "torch.compile": compiled,
    "fullgraph": lambda model: compiled(model, fullgraph=True),
    "module.compile": in_place,
    "blocks": compiled_blocks,
}


def refused(call: Callable[[], object]) -> str:
    torch._dynamo.reset()
    with pytest.raises(CaptureError, match=MESSAGE) as caught:
        call()
    return str(caught.value).split("\n")[0]


@pytest.mark.parametrize("how", COMPILE)
@pytest.mark.parametrize("shard", SHARD)
def test_a_compiled_sharded_module_is_one_error(shard: Callable[[nn.Sequential], nn.Sequential], how: str) -> None:
    def body() -> str:
        run = COMPILE[how](shard(blocks()))
        return refused(lambda: run(torch.ones(2, 4)))

    assert len(set(world(2).run(body))) == 1


@pytest.mark.parametrize("shard", SHARD)
@world(2)
def test_a_module_that_is_sharded_after_it_was_compiled_is_the_same_error(
    shard: Callable[[nn.Sequential], nn.Sequential],
) -> None:
    model = blocks()
    model.compile(backend="eager")
    shard(model)
    refused(lambda: model(torch.ones(2, 4)))


MESH = sw.Mesh((2,))
MAKING: list[Callable[[Tensor], Tensor]] = [
    lambda x: sw.DTensor.from_local(x, MESH, [sw.Shard(0)]) * 2,
    lambda x: sw.distribute_tensor(x, MESH, [sw.Shard(0)]) * 2,
]


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("make", MAKING)
@world(2)
def test_a_compiled_function_that_makes_or_takes_a_dtensor_is_the_same_error(
    make: Callable[[Tensor], Tensor], fullgraph: bool
) -> None:
    run = torch.compile(make, backend="eager", fullgraph=fullgraph)
    refused(lambda: run(torch.ones(2, 4)))
    double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=fullgraph)
    refused(lambda: double(make(torch.ones(2, 4))))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by the compiler
def test_units_of_fully_shard_that_are_compiled_train_as_others() -> None:
    def losses(compile_blocks: bool) -> list[float]:
        torch._dynamo.reset()
        model = fully_sharded(blocks())
        for block in model:
            if compile_blocks:
                block.compile(backend="aot_eager")
        optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
        for step in range(3):
            loss = model(torch.full((2, 4), step + sw.rank() + 1.0)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    wanted = world(2).run(losses, False)
    assert wanted[0] != wanted[1]
    torch.testing.assert_close(world(2).run(losses, True), wanted)
