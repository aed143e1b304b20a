"""Tensors and embedding tables that live on many ranks, behave as one, and are never silently wrong."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.launch import launch

if TYPE_CHECKING:
    from shardwise import debug, parallel
    from shardwise.captured import capture
    from shardwise.collectives import DeviceMesh, init_device_mesh, rank, world_size
    from shardwise.debug import no_implicit_comm
    from shardwise.embedding import embedding_bags
    from shardwise.errors import ShardwiseError
    from shardwise.layout import Layout
    from shardwise.mesh import Mesh
    from shardwise.meter import CommMeter, count_comms
    from shardwise.modules import distribute_module, shard_module
    from shardwise.parallel import parallelize_module
    from shardwise.placement import Boxes, OnRanks, Partial, Placement, Replicate, Shard
    from shardwise.report import picture, sharding_table
    from shardwise.spec import LocalShardsWrapper
    from shardwise.tensor import DTensor, distribute_tensor, strict
    from shardwise.tensor.factories import empty, full, ones, rand, randn, zeros
    from shardwise.tensor.reduction import gradient_buckets

# Where each public name lives. Torch is imported when the first of them is used, not by `import shardwise`.
_HOMES = {
    "shardwise.captured": ("capture",),
    "shardwise.collectives": ("DeviceMesh", "init_device_mesh", "rank", "world_size"),
    "shardwise.debug": ("no_implicit_comm",),
    "shardwise.embedding": ("embedding_bags",),
    "shardwise.errors": ("ShardwiseError",),
    "shardwise.layout": ("Layout",),
    "shardwise.mesh": ("Mesh",),
    "shardwise.meter": ("CommMeter", "count_comms"),
    "shardwise.modules": ("distribute_module", "shard_module"),
    "shardwise.parallel": ("parallelize_module",),
    "shardwise.placement": ("Boxes", "OnRanks", "Partial", "Placement", "Replicate", "Shard"),
    "shardwise.report": ("picture", "sharding_table"),
    "shardwise.spec": ("LocalShardsWrapper",),
    "shardwise.tensor": ("DTensor", "distribute_tensor", "strict"),
    "shardwise.tensor.reduction": ("gradient_buckets",),
    "shardwise.tensor.factories": ("empty", "full", "ones", "rand", "randn", "zeros"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Boxes", "CommMeter", "DTensor", "DeviceMesh", "Layout", "LocalShardsWrapper", "Mesh", "OnRanks", "Partial",
    "Placement", "Replicate", "Shard", "ShardwiseError", "capture", "count_comms", "debug", "distribute_module",
    "distribute_tensor", "embedding_bags", "empty", "full", "gradient_buckets", "init_device_mesh", "launch",
    "no_implicit_comm", "ones", "parallel", "parallelize_module", "picture", "rand", "randn", "rank", "shard_module",
    "sharding_table", "strict", "world_size", "zeros",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("debug", "parallel"):  # a package, not a name in one
        return import_module(f"shardwise.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    import_module("shardwise.report")  # layouts know how to show themselves; costs no torch
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
