"""Metadata of tensors for `torch.distributed.checkpoint`, which takes long to import and is imported on first use."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.layout import Box

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem


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
