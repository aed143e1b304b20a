"""What `fully_shard` keeps from forward to backward, where, and what it sends for that."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwise import Mesh, Shard, count_comms, distribute_tensor
from shardwise._models import Transformer
from shardwise.errors import PlanError
from shardwise.parallel import CPUOffloadPolicy, fully_shard
from shardwise.simulation import simulate
from shardwise.testing import world
from tests.parallel.units import (
    ARGS,
    assert_trained_alike,
    batches_of_all,
    each_switch,
    model_args,
    sharded,
    train,
    train_parts,
    transformer,
)


@each_switch()
@world(4)
def test_parameters_are_resharded_to_fewer_ranks(tying: bool, recompute: bool, experts: int) -> None:
    args, mesh = model_args(tying, recompute, experts), Mesh((4,))
    found = sharded(transformer(args), mesh, reshard_after_forward=2)
    assert_trained_alike(train(found, batches_of_all(5, mesh)), args, 5)


@pytest.mark.parametrize(
    ("shape", "fewer"), [((1, 6), 3), pytest.param((1, 6), 2, marks=pytest.mark.slow), ((2, 4), 2)]
)
def test_a_factor_of_the_axis_beside_replicas_and_prefetching(shape: tuple[int, int], fewer: int) -> None:
    def run() -> None:
        mesh = Mesh(shape, names=("replicate", "shard"))
        found = sharded(transformer(ARGS), mesh, reshard_after_forward=fewer, prefetch=2)
        assert_trained_alike(train(found, batches_of_all(5, mesh)), ARGS, 5)

    world(shape[0] * shape[1]).run(run)


@world(8)
def test_fewer_ranks_beside_tensor_parallelism() -> None:
    mesh = Mesh((4, 2), names=("dp", "tp"))
    found = Transformer.parallelize(transformer(ARGS), mesh, False)
    sharded(found, mesh["dp"], reshard_after_forward=2)
    assert_trained_alike(train_parts(found, 4, mesh, mean=False), ARGS, 4)


@world(4)
def test_backward_gathers_from_fewer_ranks_what_forward_kept() -> None:
    """Of 5 x 3 and 5 elements, each of two ranks keeps the larger half, 8 and 3."""

    mesh, model = Mesh((4,)), nn.Linear(3, 5)
    shown: list[Any] = []
    fully_shard(model, mesh=mesh, reshard_after_forward=2)
    model.register_forward_pre_hook(lambda m, args: shown.append(m.weight.to_local().untyped_storage()))
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    with count_comms() as forward:
        out = model(x).square().sum()
    assert forward.calls["all_gather"] == 1
    assert shown[0].nbytes() == 0
    for retain, elements in ((True, 8 + 3), (False, 3 * (2 * 3 + 2))):  # after a backward, stored shards are left
        with count_comms() as backward:
            torch.autograd.grad(out, list(model.parameters()), retain_graph=retain)
        assert backward.calls["all_gather"] == 1
        assert backward.sent_bytes["all_gather"] == 4 * elements
        assert shown[0].nbytes() == 0


def test_memory_of_what_fewer_ranks_keep() -> None:
    layers, width = 8, 64

    def peak(reshard: bool | int) -> int:
        def build(mesh: Mesh) -> Any:
            model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
            for layer in model:
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(model, mesh=mesh)
            x = distribute_tensor(torch.ones(4, width), mesh, [Shard(0)], src_data_rank=None)
            return lambda: model(x).sum().backward()

        return simulate(build, mesh=Mesh((4,))).classes[0].peak_bytes

    freed, on_two, kept = peak(True), peak(2), peak(False)
    layer_bytes = 4 * width * width
    assert (layers - 2) * layer_bytes / 2 < on_two - freed < (layers + 1) * layer_bytes / 2
    assert (layers - 2) * layer_bytes < kept - freed < (layers + 1) * layer_bytes


@world(4)
def test_numbers_of_ranks_that_are_refused_and_all_of_them() -> None:
    mesh = Mesh((4,))
    for wrong in (1, 0, -2, 3, 8):
        with pytest.raises(PlanError, match=rf"reshard_after_forward={wrong} is not a factor above 1 of the 4 ranks"):
            fully_shard(nn.Linear(4, 4), mesh=mesh, reshard_after_forward=wrong)
    calls = []
    for every in (4, True):
        model = fully_shard(nn.Linear(4, 4), mesh=mesh, reshard_after_forward=every)
        with count_comms() as comms:
            model(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])).sum().backward()
        calls.append((comms.calls, comms.total_bytes))
    assert calls[0] == calls[1]


@world(3)
def test_offloading_changes_nothing_on_cpus() -> None:
    mesh = Mesh((3,))
    found = sharded(transformer(ARGS), mesh, offload_policy=CPUOffloadPolicy())
    assert not any(p.to_local().is_pinned() for p in found.parameters())
    assert_trained_alike(train(found, batches_of_all(5, mesh)), ARGS, 5)
