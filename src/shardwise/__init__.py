"""Distributed tensors and sharded embedding tables for PyTorch, with checks between ranks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise._launch import launch
from shardwise._layout.layout import set_renderer
from shardwise._layout.mesh import set_rank
from shardwise._layout.owner import before_first_dtensor

if TYPE_CHECKING:
    from shardwise import collectives as collectives
    from shardwise import debug as debug
    from shardwise import parallel as parallel
    from shardwise._collectives import DeviceMesh, init_device_mesh, rank, world_size
    from shardwise._graph_capture import capture
    from shardwise._layout import Boxes, Layout, Mesh, OnRanks, Partial, Placement, Placements, Replicate, Shard
    from shardwise._lookups.rules import embedding_bags
    from shardwise._pictures import Picture, picture, sharding_table
    from shardwise._tensor import DTensor, distribute_tensor, strict
    from shardwise._tensor.autograd.buckets import gradient_buckets
    from shardwise._tensor.factories import empty, full, linspace, logspace, ones, rand, randn, zeros
    from shardwise._trace.comm_trace import CommCounts, count_comms
    from shardwise.debug import no_implicit_comm
    from shardwise.debug.explanation import explain
    from shardwise.errors import ShardwiseError
    from shardwise.parallel import parallelize_module
    from shardwise.parallel.shard_module import distribute_module, shard_module

    __version__: str

# Where each public name lives. Torch is imported when the first of them is used, not by `import shardwise`.
_HOMES = {
    "shardwise._graph_capture": ("capture",),
    "shardwise._collectives": ("DeviceMesh", "init_device_mesh", "rank", "world_size"),
    "shardwise.debug": ("explain", "no_implicit_comm"),
    "shardwise._lookups.rules": ("embedding_bags",),
    "shardwise.errors": ("ShardwiseError",),
    "shardwise._layout.layout": ("Layout",),
    "shardwise._layout.mesh": ("Mesh",),
    "shardwise._trace.comm_trace": ("CommCounts", "count_comms"),
    "shardwise.parallel.shard_module": ("distribute_module", "shard_module"),
    "shardwise.parallel": ("parallelize_module",),
    "shardwise._layout.placements": ("Placements",),
    "shardwise._layout.placement": ("Boxes", "OnRanks", "Partial", "Placement", "Replicate", "Shard"),
    "shardwise._pictures": ("picture", "sharding_table"),
    "shardwise._tensor": ("DTensor", "distribute_tensor", "strict"),
    "shardwise._tensor.autograd.buckets": ("gradient_buckets",),
    "shardwise._tensor.factories": ("empty", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Boxes", "CommCounts", "DTensor", "DeviceMesh", "Layout", "Mesh", "OnRanks", "Partial",
    "Placement", "Placements", "Replicate", "Shard", "ShardwiseError", "capture", "count_comms",
    "distribute_module", "distribute_tensor", "embedding_bags", "empty", "explain", "full", "gradient_buckets",
    "init_device_mesh", "launch", "linspace", "logspace", "no_implicit_comm", "ones", "parallelize_module",
    "picture", "rand", "randn", "rank", "shard_module", "sharding_table", "strict", "world_size", "zeros",
]  # fmt: skip


def _draw(layout: "Layout", header: str, itemsize: int | None) -> "Picture":
    from shardwise._pictures import Picture

    return Picture(layout, header, itemsize)


def _rank() -> int:
    from shardwise._collectives import rank

    return rank()


def _complete() -> None:
    """Import what gives `DTensor` methods, and what changes torch before the first DTensor."""
    import_module("shardwise._torch_bridge.torch_patches")
    import_module("shardwise.sharded_tensor")


set_renderer(_draw)
set_rank(_rank)
before_first_dtensor(_complete)


def __getattr__(name: str) -> Any:
    if name == "__version__":  # pyproject.toml has it, and so what is installed
        from importlib.metadata import version

        return version("shardwise")
    if name in ("collectives", "debug", "parallel"):  # a package, not a name in one
        return import_module(f"shardwise.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    if home.startswith("shardwise._tensor"):
        _complete()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
