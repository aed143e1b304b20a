"""Captured calls under autocast: graphs have the casts of the traced call, and lookups those of their own."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import shardwise as sw
from shardwise._graph_capture.guards import cache_key
from shardwise._graph_capture.tracer import AUTOCAST_DEVICES
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

WEIGHT, TABLE, IDS = torch.randn(8, 8), torch.randn(6, 8), torch.tensor([[0, 5], [3, 3]])


def _without(x: Tensor, weight: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        inner = x @ weight
    return inner + x @ weight


def _within(x: Tensor, weight: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        inner = x @ weight
    return inner.float() + x @ weight


def _lookup(x: Tensor, weight: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    return (F.embedding_bag(ids, table, mode="sum") @ weight).float() + (x @ weight).float().sum()


@pytest.mark.parametrize("backward_under_autocast", [False, True])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("function", [_without, _within, _lookup])
@world(2)
def test_replays_equal_the_function(
    function: Callable[..., Tensor], around: bool, backward_under_autocast: bool
) -> None:
    mesh = sw.Mesh((2,))
    weight, table = (sw.distribute_tensor(t, mesh, [sw.Shard(0)]).requires_grad_() for t in (WEIGHT, TABLE))
    ids, step = sw.distribute_tensor(IDS, mesh, [sw.Replicate()]), sw.capture(function)
    for number in range(3):
        x, found = sw.distribute_tensor(torch.randn(2, 8), mesh, [sw.Replicate()]), []
        for run in (step, function):
            with torch.autocast("cpu", torch.bfloat16, enabled=around):
                out = run(x, weight, table, ids)
            with torch.autocast("cpu", torch.bfloat16, enabled=backward_under_autocast):
                out.sum().backward()
            found.append([as_dtensor(t).full_tensor() for t in (out.detach(), weight.grad) if t is not None])
            weight.grad = table.grad = None
        assert found[0][0].dtype == found[1][0].dtype, number
        assert_close(found[0], found[1], rtol=0, atol=0)
    assert len(step.graphs()) == 1


@pytest.mark.parametrize("device", AUTOCAST_DEVICES)
def test_autocast_of_each_device_is_a_kind_of_call(device: str) -> None:
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    keys = {cache_key([])}
    try:
        for dtype in (torch.bfloat16, torch.float16):
            torch.set_autocast_enabled(device, True)  # torch.autocast leaves off what this machine lacks
            torch.set_autocast_dtype(device, dtype)
            keys.add(cache_key([]))
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
    assert len(keys) == 3
