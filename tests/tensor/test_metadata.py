"""What a tensor says about itself is what one process says: shapes, requires_grad, aliases, meshes."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise import DTensor, Mesh, Partial, Replicate, Shard, distribute_tensor, embedding_bags
from shardwise._collectives import barrier
from shardwise.errors import IdTypeError, MismatchError
from shardwise.sharded_tensor import ChunkShardingSpec, LocalShardsWrapper, ShardedTensorMetadata, ShardingSpec
from shardwise.testing import world

MESH = Mesh((2,))
FULL = torch.arange(12.0).view(4, 3)
NEW = {
    "new_empty": ((2, 3),),
    "new_zeros": ((2, 3),),
    "new_ones": ((2, 3),),
    "new_full": ((2, 3), 1.5),
    "new_empty_strided": ((2, 3), (3, 1)),
    "new_tensor": ([1.0],),
}
LIKE = ("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like")


@world(2)
def test_a_meta_tensor_is_distributed_without_its_values() -> None:
    for x in (
        distribute_tensor(torch.empty(5, 3, device="meta"), MESH, [Shard(0)]),
        distribute_tensor(nn.Parameter(torch.empty(5, 3, device="meta"))),
        DTensor.from_local(torch.empty(4, 3, device="meta"), MESH, [Shard(0)]),
    ):
        assert x.is_meta
        assert x.to_local().shape == x.layout_.local_shape(sw.rank())
        filled = torch.empty_like(x, device="cpu").fill_(2.0)
        assert not filled.is_meta
        assert float(filled.sum()) == 2 * x.numel()
    barrier((0, 1))


@pytest.mark.parametrize("make", [distribute_tensor, DTensor.from_local])
def test_ranks_that_differ_in_device_or_requires_grad_are_named(make: Any) -> None:
    with pytest.raises(MismatchError, match="meta"):
        world(2).run(lambda: make(torch.ones(2, device="meta" if sw.rank() else "cpu"), MESH, [Replicate()]))
    with pytest.raises(MismatchError, match="requires_grad"):
        world(2).run(lambda: make(torch.ones(2, requires_grad=sw.rank() == 1), MESH, [Replicate()]))


@world(2)
def test_a_rank_without_shards_takes_part_in_backward() -> None:
    shards = [torch.ones(2, 3, requires_grad=True)] if sw.rank() else []
    wrapper = LocalShardsWrapper(shards, [(0, 0)] * len(shards))
    (DTensor.from_local(wrapper, MESH, [Shard(0)]).sum() * 2).backward()
    assert all(torch.equal(s.grad, torch.full((2, 3), 2.0)) for s in shards if s.grad is not None)


@world(2)
def test_new_tensors_require_grad_if_they_are_told_to() -> None:
    for placement in (Shard(0), Replicate(), Partial()):
        x: Any = distribute_tensor(FULL, MESH, [placement])
        made = [getattr(x, name)(*args, requires_grad=True) for name, args in NEW.items()]
        made += [getattr(torch, name)(x, requires_grad=True) for name in LIKE]
        made += [torch.full_like(x, 2.0, requires_grad=True), torch.randint_like(x, 0, 5, requires_grad=True)]
        assert all(y.requires_grad and y.is_leaf for y in made)
        assert not x.new_zeros(2).requires_grad
        y = x.new_zeros(4, 3, requires_grad=True)
        (y * x).sum().backward()
        assert torch.equal(y.grad.full_tensor(), FULL)


@world(2)
def test_a_cross_entropy_of_one_example_with_probabilities_is_one_number() -> None:
    scores, chances = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    for reduction, placement in product(("none", "mean", "sum"), (Shard(0), Replicate())):
        want = F.cross_entropy(scores, chances, reduction=reduction)
        loss: Any = F.cross_entropy(distribute_tensor(scores, MESH, [placement]), chances, reduction=reduction)
        assert loss.shape == want.shape
        torch.testing.assert_close(loss.full_tensor(), want)


@world(2)
def test_offsets_that_are_no_integers_are_refused() -> None:
    ids, table = torch.tensor([0, 1, 2, 3]), distribute_tensor(torch.randn(5, 3), MESH, [Shard(0)])
    calls: list[Callable[[Tensor], object]] = [
        lambda offsets: F.embedding_bag(ids, table, offsets),
        lambda offsets: nn.functional.embedding_bag(ids, weight=table, offsets=offsets, mode="sum"),
        lambda offsets: embedding_bags([ids], [table], [offsets]),
    ]
    for call, offsets in product(calls, (torch.tensor([0.0, 2.7]), torch.tensor([False, True]))):
        with pytest.raises(IdTypeError, match="takes offsets of dtype int32 or int64, got"):
            call(offsets)


@world(2)
def test_local_and_distributed_tensors_that_share_memory_are_changed_in_place() -> None:
    """As in torch: autograd knows of the change."""
    leaf = torch.ones(2, 3, requires_grad=True)
    x = DTensor.from_local(leaf, MESH, [Shard(0)])
    x.mul_(3).add_(1)
    x.square().sum().backward()
    assert torch.equal(leaf, torch.full((2, 3), 4.0))
    assert torch.equal(leaf.grad, torch.full((2, 3), 24.0))  # type: ignore[arg-type]
    local = torch.ones(2, 3, requires_grad=True) * 1
    saved = local * local
    DTensor.from_local(local, MESH, [Shard(0)]).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
    of_all = distribute_tensor(FULL, MESH, [Shard(0)]).requires_grad_()
    doubled: Any = of_all * 1
    local = doubled.to_local()
    local.mul_(2)
    local.square().sum().backward()
    assert torch.equal(doubled.full_tensor(), 2 * FULL)
    assert of_all.grad is not None
    assert torch.equal(of_all.grad.full_tensor(), 8 * FULL)


@world(4)
def test_functions_without_a_mesh_use_that_of_the_context() -> None:
    grid, line = Mesh((2, 2), names=("dp", "tp")), Mesh((4,))
    with grid:
        assert sw.zeros(4, 3).device_mesh == grid
        assert distribute_tensor(FULL, None, {"tp": Shard(0)}).device_mesh == grid
        assert DTensor.from_local(FULL).device_mesh == grid
        weight: Any = sw.shard_module(nn.Linear(3, 4), {"weight": {"tp": Shard(0)}}).weight
        assert weight.device_mesh == grid
        with Mesh((1,), (0,)):
            assert sw.zeros(4).device_mesh == Mesh((1,), (0,))
        assert sw.zeros(4, device_mesh=line).device_mesh == line
    assert sw.zeros(4).device_mesh == line
    with DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0):
        assert sw.zeros(4).device_mesh == Mesh((2,))
    assert sw.zeros(4).device_mesh == line


class Torchlike(ShardingSpec):
    """A spec with the signature of torch's."""

    def build_metadata(self, tensor_sizes, tensor_properties) -> ShardedTensorMetadata:  # type: ignore[no-untyped-def, override]
        assert tensor_sizes.numel() == 12
        assert tensor_properties.dtype == torch.float32
        return ChunkShardingSpec(0, ["rank:0", "rank:1"]).build_metadata(tensor_sizes, tensor_properties)


@world(2)
def test_a_spec_with_the_signature_of_torch_shards() -> None:
    x = Torchlike().shard(FULL)
    assert torch.equal(x.full_tensor(), FULL)
    assert x.metadata().size == (4, 3)
