"""Which box of a global tensor each rank holds: meshes, placements, layouts. Pure integers; no torch, no processes."""

from shardwise.layout.arguments import Kind, as_integer, as_integers, checked, checked_init, describe, is_integer, shown
from shardwise.layout.boxes import Box, check_cover, split_by_boxes
from shardwise.layout.by_axis import Placements, as_placement, as_placements, axis_names, placements_text
from shardwise.layout.layout import Layout, ShardSizes, contiguous_strides
from shardwise.layout.mesh import Mesh, mesh_of, ring_elements
from shardwise.layout.parse import (
    ITEMSIZES,
    parse_integers,
    parse_itemsize,
    parse_mesh,
    parse_placement,
    parse_placements,
    read_toml,
)
from shardwise.layout.placement import (
    PARTIAL,
    REDUCE_OPS,
    REPLICATE,
    Boxes,
    OnRanks,
    Partial,
    Placement,
    Replicate,
    Shard,
    chunk,
    dual,
    placement_of,
)

__all__ = [
    "ITEMSIZES", "PARTIAL", "REDUCE_OPS", "REPLICATE", "Box", "Boxes", "Kind", "Layout", "Mesh", "OnRanks",
    "Partial", "Placement", "Placements", "Replicate", "Shard", "ShardSizes", "as_integer", "as_integers",
    "as_placement", "as_placements", "axis_names", "check_cover", "checked", "checked_init", "chunk",
    "contiguous_strides", "describe", "dual", "is_integer", "mesh_of", "parse_integers", "parse_itemsize",
    "parse_mesh", "parse_placement", "parse_placements", "placement_of", "placements_text", "read_toml",
    "ring_elements", "shown", "split_by_boxes",
]  # fmt: skip
