"""Tensors of which each rank knows its own sub-mesh, such as `mesh["dp"]` of a mesh of dp and tp."""

import hashlib
from collections.abc import Mapping
from itertools import chain

from shardwise import collectives
from shardwise.checkpoint.collective_errors import all_ranks
from shardwise.layout import REPLICATE, Layout, Mesh


def with_replicas(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """The layouts by name, those on a sub-mesh as replicas on all sub-meshes that other ranks have for the same names.

    All ranks call it. Names on sub-meshes that overlap are left as they are.
    """
    on_mesh: dict[Mesh, list[str]] = {}
    for name, layout in layouts.items():
        if layout.mesh.size() < collectives.world_size():
            on_mesh.setdefault(layout.mesh, []).append(name)
    keys = {mesh: hashlib.sha256("\n".join(names).encode()).hexdigest() for mesh, names in on_mesh.items()}
    every = collectives.gather_json({key: mesh.ranks for mesh, key in keys.items()}, all_ranks())
    found = dict(layouts)
    for mesh, names in on_mesh.items():
        replicas = sorted({tuple(one[keys[mesh]]) for one in every if keys[mesh] in one})
        ranks = tuple(chain.from_iterable(replicas))
        if len(replicas) > 1 and len(set(ranks)) == len(ranks):
            joint = Mesh((len(replicas), *mesh.shape), ranks, None, mesh.device_type)
            found |= {name: _replicated(layouts[name], joint) for name in names}
    return found


def _replicated(layout: Layout, mesh: Mesh) -> Layout:
    """The layout on a mesh with one more axis, the first, on which it is replicated."""
    order = (0, *(axis + 1 for axis in layout.shard_order))
    return Layout(mesh, [REPLICATE, *layout.placements], layout.shape, order, layout.strides)
