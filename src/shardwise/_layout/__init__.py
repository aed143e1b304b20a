"""Which box of a global tensor each rank holds: meshes, placements, layouts. Pure integers; no torch, no processes."""

from shardwise._layout.arguments import (
    NAMED,
    SEQUENCE,
    Count,
    Kind,
    NumRanks,
    Timeout,
    as_integer,
    as_integers,
    checked,
    checked_init,
    describe,
    is_integer,
    is_listing,
    shown,
)
from shardwise._layout.boxes import Box, check_cover, split_by_boxes
from shardwise._layout.dim_shards import DimShards, ShardSizes, chunk, rows_of
from shardwise._layout.layout import Layout, contiguous_strides, dims_by_stride, sharded_last, strides_in_order
from shardwise._layout.mesh import Mesh, entered_mesh, mesh_of, ring_elements
from shardwise._layout.owner import LayoutKey, Owner, forget_calls, remember
from shardwise._layout.parse import (
    ITEMSIZES,
    parse_integers,
    parse_itemsize,
    parse_mesh,
    parse_placement,
    parse_placements,
    read_toml,
)
from shardwise._layout.placement import (
    PARTIAL,
    REDUCE_OPS,
    REPLICATE,
    Boxes,
    OnRanks,
    Partial,
    Placement,
    Replicate,
    Shard,
    dual,
    placement_of,
    without_sizes,
)
from shardwise._layout.placements import (
    PLACEMENTS,
    Placements,
    as_placement,
    as_placements,
    axis_names,
    placements_text,
)

__all__ = [
    "ITEMSIZES", "NAMED", "PARTIAL", "PLACEMENTS", "REDUCE_OPS", "REPLICATE", "SEQUENCE", "Box", "Boxes", "Count",
    "DimShards", "Kind", "Layout", "LayoutKey", "Mesh", "NumRanks", "OnRanks", "Owner", "Partial", "Placement",
    "Placements", "Replicate", "Shard", "ShardSizes", "Timeout", "as_integer", "as_integers",
    "as_placement", "as_placements", "axis_names", "check_cover", "checked", "checked_init", "chunk",
    "contiguous_strides", "describe", "dims_by_stride", "dual", "entered_mesh", "forget_calls", "is_integer",
    "is_listing", "mesh_of", "parse_integers", "parse_itemsize", "parse_mesh", "parse_placement",
    "parse_placements", "placement_of", "placements_text", "read_toml", "remember", "ring_elements", "rows_of",
    "sharded_last", "shown", "split_by_boxes", "strides_in_order", "without_sizes",
]  # fmt: skip
