"""Objects of modules of torch that are slow to import, so they are imported on first use.

DTensors of `torch.distributed.tensor`, and metadata of `torch.distributed.checkpoint`.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise._layout import Box, Partial, Placement, Replicate, Shard

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem


# ---- DTensors ---------------------------------------------------------------------------------------------


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


# ---- checkpoints ------------------------------------------------------------------------------------------


def chunks(boxes: Sequence[Box]) -> "list[ChunkStorageMetadata]":
    """A `ChunkStorageMetadata` for each box."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]


def storage_metadata(like: Tensor, size: Sequence[int], boxes: Sequence[Box]) -> "TensorStorageMetadata":
    """The `TensorStorageMetadata` of a tensor of shape `size` with the properties of `like`, held in `boxes`."""
    from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

    return TensorStorageMetadata(TensorProperties.create_from_tensor(like), torch.Size(size), chunks(boxes))


def write_items(fqn: str, like: Tensor, size: Sequence[int], boxes: Sequence[Box]) -> "list[WriteItem]":
    """The `WriteItem`s by which a rank saves its boxes of a tensor of shape `size`; empty ones are not saved."""
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    found = storage_metadata(like, size, [box for box in boxes if box.numel])
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=found.properties, size=found.size),
        )
        for chunk in found.chunks
    ]
