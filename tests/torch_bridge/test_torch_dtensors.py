"""DTensors of `torch.distributed.tensor` become DTensors of shardwise and back: same values, storage and gradients."""

from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
from torch import nn
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing import assert_close

import shardwise as sw
from shardwise import DTensor, Mesh, Replicate, Shard, distribute_tensor, init_device_mesh, parallelize_module
from shardwise.errors import LayoutError, MeshError
from shardwise.parallel import ColwiseParallel
from shardwise.testing import world

FULL = torch.arange(21, dtype=torch.float64).view(7, 3)  # uneven over four ranks, and over two
LINES: list[Any] = [theirs.Shard(0), theirs.Shard(1), theirs.Replicate()]
GRIDS: list[list[Any]] = [
    [theirs.Shard(0), theirs.Shard(1)],
    [theirs.Shard(0), theirs.Shard(0)],
    [theirs.Replicate(), theirs.Shard(0)],
]


def agrees(mesh: Any, placements: list[Any]) -> None:
    """Both ways, with storage and gradients."""
    source: Any = theirs.distribute_tensor(FULL, mesh, placements).requires_grad_()
    x = DTensor.from_torch_dtensor(source)
    assert x.to_local().data_ptr() == source.to_local().data_ptr()
    assert_close(x.full_tensor(), FULL)
    (x * x).sum().backward()
    assert_close(source.grad.full_tensor(), 2 * FULL)
    assert source.grad.placements == tuple(placements)

    y = distribute_tensor(FULL, mesh, placements).requires_grad_()
    back: Any = y.to_torch_dtensor()
    assert type(back) is theirs.DTensor
    assert back.placements == tuple(placements)
    assert (back.shape, back.stride(), back.device_mesh) == (FULL.shape, FULL.stride(), mesh)
    assert back.to_local().data_ptr() == y.to_local().data_ptr()
    loss: Any = (back * back).sum()
    loss.full_tensor().backward()
    assert y.grad is not None
    assert_close(y.grad.full_tensor(), 2 * FULL)


def agree_on_a_line() -> None:
    mesh = init_device_mesh("cpu", (4,))
    for placement in LINES:
        agrees(mesh, [placement])
    partial: Any = theirs.DTensor.from_local(FULL.clone(), mesh, [theirs.Partial()])
    x = DTensor.from_torch_dtensor(partial)
    assert x.placements == (sw.Partial(),)
    assert_close(x.full_tensor(), 4 * FULL)
    back: Any = x.to_torch_dtensor()
    assert_close(back.full_tensor(), 4 * FULL)


def agree_on_a_grid() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placements in GRIDS:
        agrees(mesh, placements)
    even = torch.arange(24.0).view(8, 3)
    strided = [_StridedShard(0, split_factor=2), theirs.Shard(0)]  # as `fully_shard` shards the rows of a tp shard
    ours = distribute_tensor(even, mesh, [Shard(0), Shard(0)], shard_order=(1, 0))
    back: Any = ours.to_torch_dtensor()
    assert back.placements == tuple(strided)
    assert_close(back.full_tensor(), even)
    assert DTensor.from_torch_dtensor(back).layout_ == ours.layout_
    uneven = distribute_tensor(FULL, mesh, [Shard(0), Shard(0)], shard_order=(1, 0))
    with pytest.raises(LayoutError, match=r"dim 0 of .* is divided unevenly.*shard_order=\(0, 1\)"):
        uneven.to_torch_dtensor()


def beside_ours() -> None:
    mesh = init_device_mesh("cpu", (4,))
    source: Any = theirs.distribute_tensor(FULL, mesh, [theirs.Shard(0)]).requires_grad_()
    for product in (distribute_tensor(FULL, mesh, [Shard(1)]) * source, source * distribute_tensor(FULL, mesh)):
        assert_close(product.full_tensor(), FULL * FULL)
        source.grad = None
        product.sum().backward()
        assert_close(source.grad.full_tensor(), FULL)
    torch.manual_seed(0)
    layer = nn.Linear(3, 5, dtype=torch.float64)
    expected = layer(FULL)
    out: Any = parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Replicate()))(source)
    assert_close(out, expected)


@pytest.mark.processes
def test_values_storage_and_gradients_are_shared() -> None:
    for body in (agree_on_a_line, agree_on_a_grid, beside_ours):
        world(4, real=True).run(body)


@world(4)
def test_layouts_and_meshes_that_torch_has_not_are_refused() -> None:
    mesh = sw.DeviceMesh("cpu", torch.arange(4), _init_backend=False, _rank=0)
    for placement in (Shard(0, (2, 1, 3, 1)), sw.OnRanks(1), sw.Boxes([[((0, 0), (7, 3))], [], [], []])):
        with pytest.raises(LayoutError, match=r"torch's DTensor has no .*Fix: redistribute it before"):
            distribute_tensor(FULL, Mesh((4,)), [placement]).to_torch_dtensor(mesh)
    with pytest.raises(MeshError, match=r"needs torch's DeviceMesh of Mesh\(0=4\), got Mesh\(0=4\)"):
        distribute_tensor(FULL, Mesh((4,)), [Shard(0)]).to_torch_dtensor()
    for value in (FULL, None, [FULL]):
        with pytest.raises(LayoutError, match="from_torch_dtensor"):
            DTensor.from_torch_dtensor(value)
