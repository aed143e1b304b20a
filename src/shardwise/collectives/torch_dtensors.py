"""DTensors of `torch.distributed.tensor`, which takes a second to import."""

from collections.abc import Sequence
from importlib import import_module

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.layout import Partial, Placement, Replicate, Shard


def torch_dtensor(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    split_factors: Sequence[int],
    shape: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """A DTensor of torch that shares the storage of `local`; gradients flow back to it.

    Args:
        placements: Shard without sizes, Replicate or Partial.
        split_factors: above 1 for the Shards that are `_StridedShard`s of torch.
        shape, stride: of the global tensor.
    """
    theirs = import_module("torch.distributed.tensor")

    def converted(placement: Placement, split_factor: int) -> object:
        match placement:
            case Shard(dim=dim) if split_factor > 1:
                return theirs.placement_types._StridedShard(dim, split_factor=split_factor)
            case Shard(dim=dim):
                return theirs.Shard(dim)
            case Partial(reduce_op=reduce_op):
                return theirs.Partial(reduce_op)
        assert isinstance(placement, Replicate)
        return theirs.Replicate()

    wanted = [converted(p, factor) for p, factor in zip(placements, split_factors, strict=True)]
    made: Tensor = theirs.DTensor.from_local(
        local, mesh, wanted, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )
    return made
