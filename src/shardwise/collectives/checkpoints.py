"""Metadata of tensors for `torch.distributed.checkpoint`, which takes long to import and is imported on first use."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


# ---- the file `.metadata` ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredItem:
    """One item of a file: a box of a tensor, or a value if `box` is None."""

    name: str
    box: Box | None
    file: str
    offset: int
    length: int


def flat_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Values under the names that `torch.distributed.checkpoint` gives them, and the path of each in `values`.

    Lists of mappings are divided: {"groups": [{"lr": 0.1}]} has "groups.0.lr", at the path ("groups", 0, "lr").
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat, paths = flatten_state_dict(dict(values))
    return dict(flat), dict(paths)


def pickled_metadata(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    items: Sequence[StoredItem],
    paths: Mapping[str, tuple[str | int, ...]],
) -> bytes:
    """The content of `.metadata`.

    Args:
        tensors: dtype and shape by name.
        items: of all tensors and values.
        paths: of values, as `flat_values` gives them.
    """
    from torch.distributed.checkpoint import metadata as classes
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    storage: dict[classes.MetadataIndex, _StorageInfo] = {}
    described: dict[str, classes.TensorStorageMetadata | classes.BytesStorageMetadata] = {}
    for item in items:
        if item.box is None:
            index = classes.MetadataIndex(item.name)
            described[item.name] = classes.BytesStorageMetadata()
        else:
            index = classes.MetadataIndex(item.name, item.box.offsets, len(boxes[item.name]))
            boxes[item.name].append(item.box)
        storage[index] = _StorageInfo(item.file, item.offset, item.length)
    for name, (dtype, shape) in tensors.items():
        properties = classes.TensorProperties(dtype=dtype)
        described[name] = classes.TensorStorageMetadata(properties, torch.Size(shape), chunks(boxes[name]))
    all_paths = {name: paths.get(name, (name,)) for name in described}
    return pickle.dumps(classes.Metadata(described, all_paths, storage), protocol=4)
