"""Parameters that are sharded at rest and all-gathered for use, as by `fully_shard`."""

from shardwise.layout.layout import Layout
from shardwise.layout.placement import Shard


def sharded_last(layout: Layout, axis: int, placement: Shard) -> Layout:
    """`layout` at rest: sharded on `axis`, too, where it is replicated, after all other axes."""
    placements = [placement if at == axis else other for at, other in enumerate(layout.placements)]
    order = [other for other in layout.shard_order if other != axis]
    return Layout(layout.mesh, placements, layout.shape, [*order, axis])
