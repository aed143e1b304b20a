"""Which ranks hold what, found by dividing dims instead of asking each rank.

Ranks are given by places in `Mesh.ranks`, which add up: those of a shard of each dim, and those of its copies.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import compress, product
from math import prod
from typing import Any, NamedTuple

from shardwise._layout import Box, Boxes, DimShards, Layout, OnRanks, Partial

Places = Sequence[int]


class Holders:
    """The ranks of a layout.

    Attributes:
        layout: either its dims are divided, or it has explicit boxes.
        dims: the shards of each dim; none if there are explicit boxes.
        boxes: the explicit boxes of each position, with its place.
        partials: the places of the partial values of a shard; one without Partial.
        replicas: those of the ranks that hold the same one.
        reduction: of partial values, such as "sum"; empty without Partial.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.dims: Sequence[DimShards] = ()
        self.boxes: list[tuple[int, tuple[Box, ...]]] = []
        mesh, replicated, on_ranks = layout.mesh, [], 0
        for axis, placement in enumerate(layout.placements):
            stride = mesh.strides[axis]
            if isinstance(placement, Boxes):
                self.boxes = [(position * stride, row) for position, row in enumerate(placement.boxes)]
            elif isinstance(placement, OnRanks):
                on_ranks += placement.position * stride
            elif placement.is_replicate():
                replicated.append(axis)
        if not self.boxes:
            self.dims = layout.dims
        replicas = mesh.places(replicated)
        self.replicas = [at + on_ranks for at in replicas] if on_ranks else replicas
        self.partials = mesh.places(layout.partial_axes)
        self.reduction = " of ".join({p.reduce_op: None for p in layout.placements if isinstance(p, Partial)})

    def ranks(self, *places: Places) -> list[int]:
        """The rising ranks of all copies of what is at sums of one of each of these places."""
        return self.layout.mesh.ranks_at([self.partials, self.replicas, *places])

    def held(self) -> "Held":
        """What each rank holds."""
        return _held_boxes(self) if self.boxes else _held_shards(self)


class Held(NamedTuple):
    """What ranks hold.

    Attributes:
        numels: the elements of each different local shard.
        ranks: the rising ranks that have it.
        nothing: the ranks without elements.
    """

    numels: Mapping[Any, int]
    ranks: Callable[[Any], list[int]]
    nothing: Sequence[int]


def _held_shards(holders: Holders) -> Held:
    """Local shards differ by their sizes."""
    dims, mesh = holders.dims, holders.layout.mesh
    copies = len(holders.partials) * len(holders.replicas)
    holding = copies * prod(len(dim.sizes) - dim.sizes.count(0) for dim in dims)
    shapes = list(product(*(sorted({*dim.sizes} - {0}) for dim in dims)))

    def ranks(shape: Sequence[int]) -> list[int]:
        if holding == mesh.size() and len(shapes) == 1:
            return list(mesh.sorted_ranks)
        pairs = zip(dims, shape, strict=True)
        places = ([at for at, n in zip(dim.places, dim.sizes, strict=True) if n == size] for dim, size in pairs)
        return holders.ranks(*places)

    nothing: Sequence[int] = ()
    if holding < mesh.size():
        having = holders.ranks(*(list(compress(dim.places, dim.sizes)) for dim in dims))
        nothing = sorted({*mesh.ranks}.difference(having))
    return Held({shape: prod(shape) for shape in shapes}, ranks, nothing)


def _held_boxes(holders: Holders) -> Held:
    """Local shards differ by the sizes of the box, or by the number of boxes and their elements."""
    found: dict[Hashable, list[int]] = {}
    numels = {}
    for at, boxes in holders.boxes:
        sizes = [box.sizes for box in boxes if box.numel]
        numel = sum(map(prod, sizes))
        what = sizes[0] if len(sizes) == 1 else (len(sizes), numel)
        found.setdefault(what, []).append(at)
        numels[what] = numel
    numels.pop((0, 0), None)
    return Held(numels, lambda what: holders.ranks(found[what]), holders.ranks(found.get((0, 0), ())))
