"""The `.metadata` of `torch.distributed.checkpoint`, pickled with its classes: which box of which tensor is where."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.layout import Box


@dataclass(frozen=True)
class StoredItem:
    """One item of a file: a box of a tensor, or a value if `box` is None."""

    name: str
    box: Box | None
    file: str
    offset: int
    length: int


def flat_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values under the names that `torch.distributed.checkpoint` gives them: nested mappings and lists have names."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat, _ = flatten_state_dict(dict(values))
    return dict(flat)


def pickled_metadata(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], items: Sequence[StoredItem]) -> bytes:
    """The content of `.metadata`.

    Args:
        tensors: dtype and shape by name.
        items: of all tensors and values.
    """
    from torch.distributed.checkpoint import metadata as classes
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    chunks: dict[str, list[classes.ChunkStorageMetadata]] = {name: [] for name in tensors}
    storage: dict[classes.MetadataIndex, _StorageInfo] = {}
    described: dict[str, classes.TensorStorageMetadata | classes.BytesStorageMetadata] = {}
    for item in items:
        if item.box is None:
            index = classes.MetadataIndex(item.name)
            described[item.name] = classes.BytesStorageMetadata()
        else:
            offsets, sizes = torch.Size(item.box.offsets), torch.Size(item.box.sizes)
            index = classes.MetadataIndex(item.name, offsets, len(chunks[item.name]))
            chunks[item.name].append(classes.ChunkStorageMetadata(offsets, sizes))
        storage[index] = _StorageInfo(item.file, item.offset, item.length)
    for name, (dtype, shape) in tensors.items():
        properties = classes.TensorProperties(dtype=dtype)
        described[name] = classes.TensorStorageMetadata(properties, torch.Size(shape), chunks[name])
    paths = {name: (name,) for name in described}
    return pickle.dumps(classes.Metadata(described, paths, storage), protocol=4)
