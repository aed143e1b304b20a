"""Names that tests use beside what they are about, by what shardwise has for them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from shardwise import DTensor, Layout, Partial, Placement, rank
from shardwise._collectives import RemoteDevice, as_mesh
from shardwise.sharded_tensor import EnumerableShardingSpec, LocalShard, ShardingSpec, ShardMetadata
from shardwise.sharded_tensor import collect_local_shard as _collect_local_shard
from shardwise.sharded_tensor import reshard_output as _reshard_output

Shard = LocalShard  # of `torch.distributed._shard`
_Partial = Partial
_remote_device = RemoteDevice

__all__ = [
    "Shard", "_Partial", "_collect_local_shard", "_remote_device", "_reshard_output", "_shard_tensor",
    "check_tensor", "compute_local_shape_and_global_offset", "is_tensor_partial", "normalize_dim", "spec_of",
]  # fmt: skip


def _shard_tensor(tensor: Tensor, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: Any = None) -> Any:
    return sharding_spec.shard(tensor, src_rank, process_group)


def check_tensor(shards: Sequence[ShardMetadata], shape: Sequence[int]) -> None:
    EnumerableShardingSpec(shards).build_metadata(shape)


def compute_local_shape_and_global_offset(
    shape: Sequence[int], mesh: Any, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of this rank."""
    box = Layout(as_mesh(mesh), placements, shape).box(rank())
    return tuple(box.sizes), tuple(box.offsets)


def spec_of(x: DTensor) -> SimpleNamespace:
    """What tests read of `x._spec`."""
    dims = [getattr(placement, "dim", None) for placement in x.placements]
    meta = SimpleNamespace(shape=x.shape, stride=x.stride(), dtype=x.dtype)
    dim_map = [dims.index(dim) if dim in dims else -1 for dim in range(x.ndim)]
    return SimpleNamespace(
        placements=x.placements, mesh=x.device_mesh, shape=x.shape, ndim=x.ndim, tensor_meta=meta, dim_map=dim_map
    )


def normalize_dim(dim: int, ndim: int) -> int:
    return dim % ndim


def is_tensor_partial(spec: Any) -> bool:
    return any(placement.is_partial() for placement in spec.placements)
