"""Objects of modules of torch that take long to import, so they are imported on first use.

DTensors of `torch.distributed.tensor`, metadata of `torch.distributed.checkpoint`, and functional collectives, which
are also the names by which torch's tools count collectives.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh

from shardwise._layout import Box, Partial, Placement, Replicate, Shard, ring_elements

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


# ---- functional collectives -------------------------------------------------------------------------------

_NAMES = {
    "all_to_all": "all_to_all_single",
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
}
_COLLECTIVES = {"all_reduce", "broadcast", *_NAMES.values()}


@cache
def torch_op(kind: str) -> Any:
    """The op of `torch.ops.c10d_functional` that torch's tools count a collective of this kind as."""
    import_module("torch.distributed._functional_collectives")  # registers the ops
    return getattr(torch.ops.c10d_functional, _NAMES.get(kind, kind))


def functional_collective(func: object, args: Sequence[Any]) -> tuple[Any, int] | None:
    """The `torch_op` of a call of a functional collective, and what this rank sends in it; None for other ops.

    An all-reduce counts as a ring, as ours do.
    """
    if not isinstance(func, OpOverload) or not func.namespace.startswith("_c10d_functional"):
        return None
    name = func._schema.name.partition("::")[2].removesuffix("_").removesuffix("_out")
    kind = name.removesuffix("_coalesced")
    if kind not in _COLLECTIVES:
        return None
    group = next(arg for schema, arg in zip(func._schema.arguments, args, strict=False) if schema.name == "group_name")
    sent = sum(_sent(kind, x, args, group) for x in (args[0] if isinstance(args[0], list) else [args[0]]))
    return torch_op(name), sent


def _sent(kind: str, x: Tensor, args: Sequence[Any], group_name: str) -> int:
    group = import_module("torch.distributed.distributed_c10d")._resolve_process_group(group_name)
    size, here = dist.get_world_size(group), dist.get_rank(group)
    total = x.numel()
    match kind:
        case "all_reduce":
            total = ring_elements(total, size, here)
        case "all_gather_into_tensor":
            total *= size - 1
        case "reduce_scatter_tensor":
            total -= total // size
        case "all_to_all_single":
            rows = args[2] or [x.shape[0] // size] * size
            total -= rows[here] * (total // max(x.shape[0], 1))
        case "broadcast":
            last = (args[1] - 1) % size
            total = 0 if here == last and size > 1 else total * (size > 1)
    return total * x.element_size()
