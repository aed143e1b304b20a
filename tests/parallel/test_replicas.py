"""Wrappers that take parameters for copies of one tensor are refused where ranks hold different shards."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Replicate, Shard, distribute_tensor, init_device_mesh, rank, shard_module
from shardwise import _collectives as collectives
from shardwise._torch_bridge.replicas import FULL, check_fully_shard, check_replicas
from shardwise.errors import MismatchError, RuleError
from shardwise.parallel import local_parameters
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.parallel.one_process import full

R, S0 = Replicate(), Shard(0)
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2))


def sync_states(module: nn.Module) -> None:
    assert dist.group.WORLD is not None
    _sync_module_states(module, dist.group.WORLD, 1 << 20, 0, set())


def zero(module: nn.Module) -> object:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of something in it when it is imported

    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1).step()


def fully_sharded(module: nn.Module) -> object:
    return fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


WRAPPERS: dict[str, Callable[[nn.Module], object]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "without a first broadcast": lambda module: DistributedDataParallel(module, init_sync=False),
    "replicate, which wraps at the first call": lambda module: replicate(module)(X),
    "_sync_module_states": sync_states,
    "fully_shard": fully_sharded,
    "ZeroRedundancyOptimizer": zero,
}


def wrapped() -> None:
    """Refused on both ranks with the same text, and nothing changes; replicated parameters train as one process."""
    refused = r"ranks 0, 1 hold different shards of 4 of them: (0.weight|number 0) as .* Fix: do not wrap"
    for wrap in WRAPPERS.values():
        module = shard_module(layers(), {"**": S0})
        with pytest.raises(RuleError, match=refused):
            wrap(module)
        for mine, theirs in zip(module.parameters(), layers().parameters(), strict=True):
            assert_close(as_dtensor(mine).full_tensor(), theirs.detach())
        if wrap is sync_states:  # passes detached parameters, of which plain ones no longer say what they were
            continue
        local = local_parameters(shard_module(layers(), {"**": S0}))
        before = [p.detach().clone() for p in local.parameters()]
        with pytest.raises(RuleError, match=refused):
            wrap(local)
        assert_close([p.detach() for p in local.parameters()], before, rtol=0, atol=0)
    with pytest.raises(RuleError, match="would use the local tensor of a DTensor"):
        FullyShardedDataParallel(shard_module(layers(), {"**": S0}), device_id=torch.device("cpu"))
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


def test_fully_shard_of_torch_warns_where_it_undoes_tensor_parallelism_and_names_this_library() -> None:
    def body(which: int) -> None:
        mesh = Mesh((2, 2), names=("dp", "tp"))
        sharded, replicated = (DTensor.from_local(torch.ones(2, 4), mesh["tp"], [p]) for p in (S0, R))
        group = (rank() % 2, rank() % 2 + 2)
        for _ in range(3):  # as in a loop over blocks: one warning for the line
            check_fully_shard(iter([[replicated, torch.ones(3)], [torch.ones(3), sharded]][which]), group)

    for which in range(2):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("default")
            world(4).run(body, which)
        assert [(str(warning.message), warning.filename) for warning in found] == [(FULL, __file__)] * which
    assert "Fix: import fully_shard from shardwise.parallel; or" in FULL
    assert "local_parameters(module)" in FULL


@world(2)
def test_functional_collectives_averagers_and_scalers_refuse_dtensors() -> None:
    x = distribute_tensor(torch.ones(4), placements=[S0])
    for op in (torch.ops._c10d_functional.all_reduce, torch.ops._c10d_functional.all_reduce.default):
        with pytest.raises(RuleError, match=r"all_reduce.* would use the local tensor of a DTensor"):
            op(x, "sum", "group")
    calls: list[Callable[[], object]] = [
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather([x, x], x),
        lambda: dist.reduce(x, 0),
        lambda: dist.send(x, 0),
    ]
    for call in calls:
        with pytest.raises(RuleError, match=r"use the local tensor of a DTensor.*to_local\(\)"):
            call()
    # What PeriodicModelAverager does to parameters with gradients: it all-reduces a concatenation.
    module = shard_module(layers(), {"**": S0})
    module(X).sum().backward()
    with pytest.raises(RuleError, match=r"all_reduce\(\) would use the local tensor of a DTensor"):
        dist.all_reduce(torch.cat([p.data.reshape(-1) for p in module.parameters()]))
    module = layers()
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=0.1), GradScaler("cpu")
    scaler.scale(shard_module(module, {"**": S0})(X).sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)


@world(2)
def test_averages_of_models_are_those_of_one_process_and_lists_of_plain_ones_are_refused() -> None:
    found = []
    for sharded in ("never", "before", "after"):
        module = layers()
        if sharded == "before":
            shard_module(module, {"**": S0})
        average, by_lists = AveragedModel(module), AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if sharded == "after":
            shard_module(module, {"**": S0})
        for factor in (2.0, 3.0):
            with torch.no_grad():
                for p in module.parameters():
                    p.mul_(factor)
            average.update_parameters(module)
        found.append([full(p.detach()) for p in average.parameters()])
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])
    by_lists.update_parameters(module)  # the first update is a copy
    with pytest.raises(RuleError, match="would change plain tensor 0 in place with a DTensor"):
        by_lists.update_parameters(module)


@pytest.mark.parametrize("on_meta", [False, True])
@world(2)
def test_loading_full_tensors_by_assignment_keeps_the_sharding(on_meta: bool) -> None:
    def layers_with_buffers() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).double()

    plain = layers_with_buffers()
    saved = {name: value + 1 for name, value in plain.state_dict().items()}
    plain.load_state_dict(saved)
    with torch.device("meta" if on_meta else "cpu"):
        module = layers_with_buffers()
    shard_module(module, {"0.*": S0, "1.weight": S0})
    module[0].bias.requires_grad_(False)
    before = {name: (as_dtensor(p).placements, p.requires_grad) for name, p in module.named_parameters()}
    module.load_state_dict(saved, assign=True)
    assert {name: (as_dtensor(p).placements, p.requires_grad) for name, p in module.named_parameters()} == before
    x = torch.ones(2, 3, dtype=torch.float64)
    assert_close(as_dtensor(module.eval()(x)).full_tensor(), plain.eval()(x))
    module.load_state_dict(module.state_dict(), assign=True)
    assert_close(as_dtensor(module(x)).full_tensor(), plain(x))


@world(2)
def test_different_values_that_are_loaded_by_assignment_are_an_error() -> None:
    module = shard_module(layers(), {"**": S0})
    module.load_state_dict({name: value + rank() for name, value in layers().state_dict().items()}, assign=True)
    with pytest.raises(MismatchError, match=r"^load_state_dict: 0.weight of shape"):
        as_dtensor(module(X)).full_tensor()


@world(2)
def test_synchronized_batch_norm_on_simulated_ranks_takes_the_batch_of_all_of_them() -> None:
    plain, x = nn.BatchNorm1d(3), torch.arange(15.0).view(5, 3).square()
    module: Any = shard_module(nn.SyncBatchNorm(3), {})
    assert_close(as_dtensor(module(distribute_tensor(x, placements=[Shard(0)]))).full_tensor(), plain(x))
    assert_close(module.running_var, plain.running_var)
    module.eval()(x)
