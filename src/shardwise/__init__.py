"""Tensors and embedding tables that live on many ranks, behave as one, and are never silently wrong."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.launch import launch
from shardwise.layout.layout import set_renderer
from shardwise.layout.mesh import set_rank

if TYPE_CHECKING:
    from shardwise import debug, parallel
    from shardwise.collectives import DeviceMesh, init_device_mesh, rank, world_size
    from shardwise.debug import no_implicit_comm
    from shardwise.debug.explanation import explain
    from shardwise.errors import ShardwiseError
    from shardwise.graph_capture import capture
    from shardwise.layout import Boxes, Layout, Mesh, OnRanks, Partial, Placement, Placements, Replicate, Shard
    from shardwise.lookups.rules import embedding_bags
    from shardwise.parallel import parallelize_module
    from shardwise.parallel.shard_module import distribute_module, shard_module
    from shardwise.pictures import Picture, picture, sharding_table
    from shardwise.sharded_tensor import LocalShardsWrapper
    from shardwise.tensor import DTensor, distribute_tensor, strict
    from shardwise.tensor.autograd.buckets import gradient_buckets
    from shardwise.tensor.factories import empty, full, linspace, logspace, ones, rand, randn, zeros
    from shardwise.trace.comm_trace import CommCounts, count_comms

    __version__: str

# Where each public name lives. Torch is imported when the first of them is used, not by `import shardwise`.
_HOMES = {
    "shardwise.graph_capture": ("capture",),
    "shardwise.collectives": ("DeviceMesh", "init_device_mesh", "rank", "world_size"),
    "shardwise.debug": ("explain", "no_implicit_comm"),
    "shardwise.lookups.rules": ("embedding_bags",),
    "shardwise.errors": ("ShardwiseError",),
    "shardwise.layout.layout": ("Layout",),
    "shardwise.layout.mesh": ("Mesh",),
    "shardwise.trace.comm_trace": ("CommCounts", "count_comms"),
    "shardwise.parallel.shard_module": ("distribute_module", "shard_module"),
    "shardwise.parallel": ("parallelize_module",),
    "shardwise.layout.placements": ("Placements",),
    "shardwise.layout.placement": ("Boxes", "OnRanks", "Partial", "Placement", "Replicate", "Shard"),
    "shardwise.pictures": ("picture", "sharding_table"),
    "shardwise.sharded_tensor": ("LocalShardsWrapper",),
    "shardwise.tensor": ("DTensor", "distribute_tensor", "strict"),
    "shardwise.tensor.autograd.buckets": ("gradient_buckets",),
    "shardwise.tensor.factories": ("empty", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Boxes", "CommCounts", "DTensor", "DeviceMesh", "Layout", "LocalShardsWrapper", "Mesh", "OnRanks", "Partial",
    "Placement", "Placements", "Replicate", "Shard", "ShardwiseError", "capture", "count_comms", "debug",
    "distribute_module", "distribute_tensor", "embedding_bags", "empty", "explain", "full", "gradient_buckets",
    "init_device_mesh", "launch", "linspace", "logspace", "no_implicit_comm", "ones", "parallel", "parallelize_module",
    "picture", "rand", "randn", "rank", "shard_module", "sharding_table", "strict", "world_size", "zeros",
]  # fmt: skip


def _draw(layout: "Layout", header: str, itemsize: int | None) -> "Picture":
    from shardwise.pictures import Picture

    return Picture(layout, header, itemsize)


def _rank() -> int:
    from shardwise.collectives import rank

    return rank()


set_renderer(_draw)
set_rank(_rank)


def __getattr__(name: str) -> Any:
    if name == "__version__":  # pyproject.toml has it, and so what is installed
        from importlib.metadata import version

        return version("shardwise")
    if name in ("debug", "parallel"):  # a package, not a name in one
        return import_module(f"shardwise.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    if home.startswith("shardwise.tensor"):
        import_module("shardwise.sharded_tensor")  # DTensors answer as sharded tensors, too
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
