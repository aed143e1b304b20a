"""What a tensor says about itself is what one process says: shapes, requires_grad, aliases, meshes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise import DTensor, Mesh, Partial, Replicate, Shard, distribute_tensor, embedding_bags
from shardwise.collectives import barrier
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


# ---- tensors without values ---------------------------------------------------------------------------------------


def test_a_meta_tensor_is_distributed_without_its_values() -> None:
    def body() -> None:
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

    world(2).run(body)


@pytest.mark.parametrize("make", [distribute_tensor, DTensor.from_local])
def test_ranks_that_differ_in_device_or_requires_grad_are_named(make: object) -> None:
    def devices() -> None:
        make(torch.ones(2, device="meta" if sw.rank() else "cpu"), MESH, [Replicate()])  # type: ignore[operator]

    def gradients() -> None:
        make(torch.ones(2, requires_grad=sw.rank() == 1), MESH, [Replicate()])  # type: ignore[operator]

    with pytest.raises(MismatchError, match="meta"):
        world(2).run(devices)
    with pytest.raises(MismatchError, match="requires_grad"):
        world(2).run(gradients)


def test_a_rank_without_shards_takes_part_in_backward() -> None:
    def body() -> None:
        shards = [torch.ones(2, 3, requires_grad=True)] if sw.rank() else []
        wrapper = LocalShardsWrapper(shards, [(0, 0)] * len(shards))
        x = DTensor.from_local(wrapper, MESH, [Shard(0)])
        (x.sum() * 2).backward()
        assert all(torch.equal(s.grad, torch.full((2, 3), 2.0)) for s in shards if s.grad is not None)

    world(2).run(body)


# ---- requires_grad ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()])
def test_new_tensors_require_grad_if_they_are_told_to(placement: object) -> None:
    def body() -> None:
        x = distribute_tensor(FULL, MESH, [placement])  # type: ignore[list-item]
        made = [getattr(x, name)(*args, requires_grad=True) for name, args in NEW.items()]
        made += [getattr(torch, name)(x, requires_grad=True) for name in LIKE]
        made += [torch.full_like(x, 2.0, requires_grad=True), torch.randint_like(x, 0, 5, requires_grad=True)]
        for y in made:
            assert y.requires_grad
            assert y.is_leaf
        assert not x.new_zeros(2).requires_grad
        y = x.new_zeros(4, 3, requires_grad=True)
        (y * x).sum().backward()
        assert isinstance(y.grad, DTensor)
        assert torch.equal(y.grad.full_tensor(), FULL)

    world(2).run(body)


# ---- shapes and dtypes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_a_cross_entropy_of_one_example_with_probabilities_is_one_number(placement: object, reduction: str) -> None:
    scores, chances = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    want = F.cross_entropy(scores, chances, reduction=reduction)

    def body() -> None:
        loss = F.cross_entropy(distribute_tensor(scores, MESH, [placement]), chances, reduction=reduction)  # type: ignore[list-item]
        assert loss.shape == want.shape
        torch.testing.assert_close(loss.full_tensor(), want)  # type: ignore[attr-defined]

    world(2).run(body)


@pytest.mark.parametrize("offsets", [torch.tensor([0.0, 2.7]), torch.tensor([False, True])])
def test_offsets_that_are_no_integers_are_refused(offsets: Tensor) -> None:
    ids, weight = torch.tensor([0, 1, 2, 3]), torch.randn(5, 3)

    def body() -> None:
        table = distribute_tensor(weight, MESH, [Shard(0)])
        for call in (
            lambda: F.embedding_bag(ids, table, offsets),
            lambda: nn.functional.embedding_bag(ids, weight=table, offsets=offsets, mode="sum"),
            lambda: embedding_bags([ids], [table], [offsets]),
        ):
            with pytest.raises(IdTypeError, match="takes offsets of dtype int32 or int64, got"):
                call()

    world(2).run(body)


# ---- aliases --------------------------------------------------------------------------------------------------------


def test_a_tensor_made_from_a_local_one_is_changed_in_place() -> None:
    """As in torch: the local tensor shares the memory, and autograd knows of the change."""

    def body() -> None:
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

    world(2).run(body)


def test_a_local_tensor_of_a_distributed_one_is_changed_in_place() -> None:
    def body() -> None:
        leaf = distribute_tensor(FULL, MESH, [Shard(0)]).requires_grad_()
        x = leaf * 1
        assert isinstance(x, DTensor)
        local = x.to_local()
        local.mul_(2)
        local.square().sum().backward()
        assert torch.equal(x.full_tensor(), 2 * FULL)
        assert isinstance(leaf.grad, DTensor)
        assert torch.equal(leaf.grad.full_tensor(), 8 * FULL)

    world(2).run(body)


# ---- the mesh ---------------------------------------------------------------------------------------------------


def test_functions_without_a_mesh_use_that_of_the_context() -> None:
    grid = Mesh((2, 2), names=("dp", "tp"))
    torch_mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)

    def body() -> None:
        line = Mesh((4,))
        with grid:
            assert sw.zeros(4, 3).device_mesh == grid
            assert distribute_tensor(FULL, None, {"tp": Shard(0)}).device_mesh == grid
            assert DTensor.from_local(FULL).device_mesh == grid
            weight = sw.shard_module(nn.Linear(3, 4), {"weight": {"tp": Shard(0)}}).weight
            assert isinstance(weight, DTensor)
            assert weight.device_mesh == grid
            with Mesh((1,), (0,)):
                assert sw.zeros(4).device_mesh == Mesh((1,), (0,))
            assert sw.zeros(4, device_mesh=line).device_mesh == line
        assert sw.zeros(4).device_mesh == line
        with torch_mesh:
            assert sw.zeros(4).device_mesh == Mesh((2,))
        assert sw.zeros(4).device_mesh == line

    world(4).run(body)


# ---- specs ------------------------------------------------------------------------------------------------------


class Torchlike(ShardingSpec):
    """A spec with the signature of torch's."""

    def build_metadata(self, tensor_sizes, tensor_properties) -> ShardedTensorMetadata:  # type: ignore[no-untyped-def, override]
        assert tensor_sizes.numel() == 12
        assert tensor_properties.dtype == torch.float32
        return ChunkShardingSpec(0, ["rank:0", "rank:1"]).build_metadata(tensor_sizes, tensor_properties)


def test_a_spec_with_the_signature_of_torch_shards() -> None:
    def body() -> None:
        x = Torchlike().shard(FULL)
        assert torch.equal(x.full_tensor(), FULL)
        assert x.metadata().size == (4, 3)

    world(2).run(body)
