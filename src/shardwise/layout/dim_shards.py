"""The shards of one dim by all mesh axes that divide it, found by dividing instead of asking each rank."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

from shardwise.layout.mesh import Mesh
from shardwise.layout.placement import Shard, chunk

ShardSizes = tuple[int, ...] | tuple[tuple[int, ...], ...]


class DimShard(NamedTuple):
    """One shard of a dim, in elements.

    Attributes:
        at: where in `Mesh.ranks` its ranks are, by their positions on the axes that divide the dim.
    """

    start: int
    size: int
    at: int


class DimShards:
    """The shards of a dim of `length` elements.

    Args:
        divided_by: the axes of `mesh` that divide it, the outermost first, with their placements.

    Attributes:
        sizes: of all shards, those of each outer shard side by side.
    """

    def __init__(self, length: int, mesh: Mesh, divided_by: Sequence[tuple[int, Shard]]) -> None:
        self._length = length
        self._mesh = mesh
        self._by = divided_by
        self.sizes = shard_sizes(length, [(placement, mesh.shape[axis]) for axis, placement in divided_by])

    def having(self, index: int) -> DimShard:
        """The shard that has element `index`."""
        start, size, number, at = 0, self._length, 0, 0
        for axis, placement in self._by:
            count = self._mesh.shape[axis]
            division = placement.division(size, count, number)
            (position,) = division.touching(index - start, index - start + 1)
            offset, size = division.shard(position)
            start, number, at = start + offset, number * count + position, at + position * self._mesh.strides[axis]
        return DimShard(start, size, at)

    @cached_property
    def places(self) -> Sequence[int]:
        """`DimShard.at` of all shards."""
        return self._mesh.places([axis for axis, _ in self._by])

    def places_between(self, first: int, last: int) -> list[int]:
        """`DimShard.at` of the shards that have the elements from `first` to before `last`."""
        ends = accumulate(self.sizes)
        return [at for at, size, end in zip(self.places, self.sizes, ends, strict=True) if size and first < end <= last]


def shard_sizes(length: int, divided_by: Sequence[tuple[Shard, int]]) -> tuple[int, ...]:
    """The sizes of the shards of a dim, those of each outer shard side by side.

    Args:
        divided_by: the placement and the positions of each axis, the outermost first.
    """
    sizes: tuple[int, ...] = (length,)
    for placement, count in divided_by:
        if placement.sizes is None:
            divided = {size: chunk(size, count) for size in set(sizes)}
            if len(divided) == 1:
                sizes = divided[sizes[0]] * len(sizes)
                continue
            rows: Sequence[tuple[int, ...]] = [divided[size] for size in sizes]
        else:
            rows = rows_of(placement.sizes, len(sizes))
        sizes = rows[0] if len(rows) == 1 else tuple(chain.from_iterable(rows))
    return sizes


def rows_of(sizes: ShardSizes, count: int) -> tuple[tuple[int, ...], ...]:
    """One row of sizes for each outer shard: those given, or the same for all `count`."""
    nested = bool(sizes) and isinstance(sizes[0], tuple)  # then all are: Shard refuses a mixture
    return sizes if nested else (sizes,) * count  # type: ignore[return-value]
