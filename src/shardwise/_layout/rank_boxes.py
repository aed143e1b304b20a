"""The boxes of all ranks of a layout as arrays: for thousands of layouts on thousands of ranks, objects take seconds.

Layout(Mesh((2,)), [Shard(0)], (5, 4)): rank 0 has rows 0 to 2, rank 1 rows 3 and 4

    position    (0, 1)
    offsets     (0, 3), (0, 0)      of each dim
    sizes       (3, 2), (4, 4)
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise._layout.layout import Layout
from shardwise._layout.mesh import Mesh
from shardwise._layout.placement import Boxes, OnRanks

Ints = NDArray[np.int64]


class RankBoxes(NamedTuple):
    """Boxes in the order of ranks; empty shards are empty boxes, as in `Layout.boxes`.

    Attributes:
        position: of the rank of each box among the ascending ranks of the mesh, [boxes].
        offsets, sizes: [dims, boxes].
    """

    position: Ints
    offsets: Ints
    sizes: Ints


@lru_cache(maxsize=64)
def coordinates_of(mesh: Mesh) -> Ints:
    """The positions of the ascending ranks of a mesh on its axes, [ranks, axes]."""
    found = np.array([mesh.coordinate(rank) for rank in sorted(mesh.ranks)], dtype=np.int64)
    return found.reshape(mesh.size(), mesh.ndim)


def rank_boxes(layout: Layout) -> RankBoxes:
    """The boxes of all ranks."""
    if any(isinstance(placement, Boxes) for placement in layout.placements):
        listed = [(i, box) for i, rank in enumerate(sorted(layout.mesh.ranks)) for box in layout.boxes(rank)]
        fields = np.array([(box.offsets, box.sizes) for _, box in listed], dtype=np.int64)
        offsets, sizes = fields.reshape(-1, 2, len(layout.shape)).transpose(1, 2, 0)
        return RankBoxes(np.array([i for i, _ in listed], dtype=np.int64), offsets, sizes)
    coordinates = coordinates_of(layout.mesh)
    holds = np.ones(len(coordinates), dtype=bool)
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, OnRanks):
            holds &= coordinates[:, axis] == placement.position
    position = holds.nonzero()[0]
    offsets, sizes = np.empty((2, len(layout.shape), len(position)), dtype=np.int64)
    for number, dim in enumerate(layout.dims):
        shard = np.zeros_like(position)
        for axis in dim.axes:
            shard = shard * layout.mesh.shape[axis] + coordinates[position, axis]
        starts = np.array(dim.starts, dtype=np.int64)
        offsets[number] = starts[shard]
        sizes[number] = starts[shard + 1] - offsets[number]
    return RankBoxes(position, offsets, sizes)
