"""The ranks that hold each shard, found by dividing dims instead of asking each rank.

Ranks are given by indices in `Mesh.ranks`, which add up: of a shard of each dim, and of its copies.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import compress, product
from math import prod

from shardwise._layout import Boxes, DimShards, Layout, OnRanks, Partial

Places = Sequence[int]


class Holders:
    """The ranks of a layout; either its dims are divided, or it has explicit boxes."""

    def __init__(self, layout: Layout) -> None:
        self.layout, mesh = layout, layout.mesh
        axes = list(zip(layout.placements, mesh.strides, strict=True))
        boxes = next(((p.boxes, stride) for p, stride in axes if isinstance(p, Boxes)), ((), 0))
        self.boxes = [(position * boxes[1], row) for position, row in enumerate(boxes[0])]  # the box of each place
        self.dims: Sequence[DimShards] = () if self.boxes else layout.dims
        on_ranks = sum(p.position * stride for p, stride in axes if isinstance(p, OnRanks))
        replicas = mesh.places([axis for axis, p in enumerate(layout.placements) if p.is_replicate()])
        self.replicas = [at + on_ranks for at in replicas] if on_ranks else replicas  # ranks that hold the same
        self.partials = mesh.places(layout.partial_axes)  # partial values of a shard; one without Partial
        self.reduction = " of ".join({p.reduce_op: None for p in layout.placements if isinstance(p, Partial)})

    def ranks(self, *places: Places) -> list[int]:
        """The rising ranks of all copies of the shards at sums of one index of each list."""
        return self.layout.mesh.ranks_at([self.partials, self.replicas, *places])

    def shards(self) -> Iterator[tuple[int, Callable[[], list[int]]]]:
        """The elements of each different local shard, and its rising ranks; 0 elements for ranks that hold nothing.

        Local shards differ by their sizes; several boxes of a rank by their number and elements.
        """
        if self.boxes:
            found: dict[tuple[int, Hashable], list[int]] = {}
            for at, boxes in self.boxes:
                sizes = [box.sizes for box in boxes if box.numel]
                key = sum(map(prod, sizes)), sizes[0] if len(sizes) == 1 else len(sizes)
                found.setdefault(key, []).append(at)
            yield from ((numel, partial(self.ranks, places)) for (numel, _), places in found.items())
            return
        dims, mesh = self.dims, self.layout.mesh
        copies = len(self.partials) * len(self.replicas)
        holding = copies * prod(len(dim.sizes) - dim.sizes.count(0) for dim in dims)
        shapes = list(product(*(sorted({*dim.sizes} - {0}) for dim in dims)))

        def ranks(shape: Sequence[int]) -> list[int]:
            if holding == mesh.size() and len(shapes) == 1:
                return list(mesh.sorted_ranks)
            pairs = zip(dims, shape, strict=True)
            return self.ranks(*(list(compress(dim.places, (n == size for n in dim.sizes))) for dim, size in pairs))

        yield from ((prod(shape), partial(ranks, shape)) for shape in shapes)
        if holding < mesh.size():
            having = self.ranks(*(list(compress(dim.places, dim.sizes)) for dim in dims))
            yield 0, partial(sorted, {*mesh.ranks}.difference(having))
