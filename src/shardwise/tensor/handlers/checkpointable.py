"""The protocol of `torch.distributed.checkpoint`: torch's own tools save and load DTensors."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise import collectives
from shardwise.errors import LayoutError
from shardwise.layout import Box, split_by_boxes
from shardwise.tensor.dtensor import DTensor, plain, register_method


def local_boxes(x: DTensor) -> list[tuple[Box, Tensor]]:
    """The boxes of this rank that are not empty, with views of their elements, detached.

    Raises:
        LayoutError: the tensor is Partial.
    """
    if x._layout.partial_axes:
        raise LayoutError(
            f"{x._layout} is Partial; checkpoints store reduced values only. "
            f"Fix: redistribute it to Shard or Replicate first."
        )
    local = plain(x.detach())
    if x._tiling is not None:
        found = list(zip(x._tiling.boxes, x._tiling.shards(local), strict=True))
    else:
        boxes = x._layout.boxes(collectives.rank())
        found = list(zip(boxes, split_by_boxes(local, boxes), strict=True))
    return [(box, shard) for box, shard in found if box.numel]


def create_write_items(x: DTensor, fqn: str, object: DTensor) -> list[Any]:
    """One item a box. Replicas write the same items, of which torch keeps one."""
    return collectives.write_items(fqn, plain(x.detach()), x._layout.shape, [box for box, _ in local_boxes(x)])


def create_chunk_list(x: DTensor) -> list[Any]:
    return collectives.chunks([box for box, _ in local_boxes(x)])


def get_tensor_shard(x: DTensor, index: object) -> Tensor:
    held = local_boxes(x)
    return shard_at(index, [box for box, _ in held], [shard for _, shard in held])


def shard_at(index: Any, boxes: Sequence[Box], shards: Sequence[Tensor]) -> Tensor:
    """The shard that torch's `MetadataIndex` refers to, outside of autograd.

    Raises:
        LayoutError: no shard has this offset.
    """
    for box, shard in zip(boxes, shards, strict=True):
        if tuple(index.offset) == box.offsets and box.numel:
            return shard.detach()
    raise LayoutError(
        f"{index.fqn}: no shard of this rank begins at {index.offset}, only {', '.join(map(str, boxes)) or 'none'}. "
        f"Fix: plan the load for the tensor as it is sharded now, with torch's DefaultLoadPlanner."
    )


register_method("__create_write_items__", create_write_items)
register_method("__create_chunk_list__", create_chunk_list)
register_method("__get_tensor_shard__", get_tensor_shard)
