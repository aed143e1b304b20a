"""Wrappers that take parameters for copies of one tensor are refused where ranks hold different shards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Replicate, Shard, collectives, distribute_tensor, shard_module
from shardwise.errors import MismatchError, RuleError
from shardwise.tensor.handlers.replicas import check_replicas
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

R, S0 = Replicate(), Shard(0)
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2))


def sync_states(module: nn.Module) -> None:
    assert dist.group.WORLD is not None
    _sync_module_states(module, dist.group.WORLD, 1 << 20, 0, set())


WRAPPERS: dict[str, Callable[[nn.Module], object]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "without a first broadcast": lambda module: DistributedDataParallel(module, init_sync=False),
    "replicate, which wraps at the first call": lambda module: replicate(module)(X),
    "_sync_module_states": sync_states,
}


def wrapped() -> None:
    """Refused on both ranks with the same text, and nothing changes; replicated parameters train as one process."""
    for wrap in WRAPPERS.values():
        module = shard_module(layers(), {"**": S0})
        with pytest.raises(RuleError, match=r"ranks 0, 1 hold different shards of 4 of them: .* Fix: do not wrap"):
            wrap(module)
        for mine, theirs in zip(module.parameters(), layers().parameters(), strict=True):
            assert_close(as_dtensor(mine).full_tensor(), theirs.detach())
    plain, module = layers(), layers()
    ours = DistributedDataParallel(shard_module(module, {"**": R}))
    for model in (plain, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert_close(as_dtensor(mine).full_tensor(), theirs.detach())


@pytest.mark.processes
def test_wrappers_of_data_parallelism_refuse_different_shards_and_take_copies() -> None:
    world(2, real=True).run(wrapped)


def test_boxes_are_compared_on_one_mesh_and_over_several() -> None:
    def body() -> list[str]:
        rank, grid, texts = collectives.rank(), Mesh((2, 2), names=("dp", "tp")), []
        on_grid = distribute_tensor(torch.ones(5, 2), grid, {"tp": S0})
        check_replicas([on_grid, torch.ones(2)], (rank % 2, rank % 2 + 2))
        pair = Mesh((2,), ranks=(0, 1) if rank < 2 else (2, 3))
        on_pair = DTensor.from_local(torch.ones(3 - rank % 2, 2), pair, [S0])
        check_replicas([on_pair], (rank % 2, rank % 2 + 2))
        for tensor, group, error in [
            (on_grid, (rank // 2 * 2, rank // 2 * 2 + 1), RuleError),
            (on_grid, range(4), RuleError),
            (on_pair, (0, 3) if rank in (0, 3) else (1, 2), MismatchError),
            (on_pair, range(4), RuleError),
        ]:
            with pytest.raises(error) as caught:
                check_replicas([tensor], group)
            texts.append(str(caught.value))
        return texts

    found: list[Any] = world(4).run(body)
    assert found[0][1] == found[1][1] == found[3][1]
    assert found[0][0] == found[1][0] != found[2][0] == found[3][0]
    assert found[0][2] == found[3][2]


@world(2)
def test_functional_collectives_refuse_a_dtensor() -> None:
    x = distribute_tensor(torch.ones(4), placements=[S0])
    for op in (torch.ops._c10d_functional.all_reduce, torch.ops._c10d_functional.all_reduce.default):
        with pytest.raises(RuleError, match=r"all_reduce.* would use the local tensor of a DTensor"):
            op(x, "sum", "group")


@world(2)
def test_averages_of_models_are_those_of_one_process() -> None:
    plain, module = layers(), shard_module(layers(), {"**": S0})
    averages = [AveragedModel(model) for model in (plain, module)]
    for factor in (2.0, 3.0):
        for model, average in zip((plain, module), averages, strict=True):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(factor)
            average.update_parameters(model)
    assert_close(as_dtensor(averages[1](X)).full_tensor(), averages[0](X))
