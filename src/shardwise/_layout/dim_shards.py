"""The division of a dim by mesh axes: one table of the offsets of its shards.

Layout(Mesh((2, 2)), [Shard(0), Shard(0)], (5,)): shards begin at 0, 2, 3 and 4, and the last one ends at 5. A rank
finds its shard by number, and the shards that touch a range by bisection.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from math import prod
from operator import sub
from typing import NamedTuple

from shardwise._layout.mesh import Mesh

ShardSizes = tuple[int, ...] | tuple[tuple[int, ...], ...]
Division = Sequence[tuple[int, ShardSizes | None]]  # positions and given sizes of each axis, the outermost first


def chunk(size: int, positions: int) -> tuple[int, ...]:
    """The default shard sizes of a dim, as by `torch.chunk`: ceil(size / positions), the last ones less."""
    step = -(-size // positions)
    full = size // step if step else 0
    rest = (size - full * step,) if full < positions else ()
    return (step,) * full + rest + (0,) * (positions - full - 1)


def shard_sizes(length: int, divided_by: Division) -> tuple[int, ...]:
    """The sizes of the shards of a dim, side by side for all outer shards."""
    sizes: tuple[int, ...] = (length,)
    for count, given in divided_by:
        if given is None:
            chunks = {size: chunk(size, count) for size in set(sizes)}
            rows: Sequence[tuple[int, ...]] = [chunks[size] for size in sizes]
        else:
            rows = rows_of(given, len(sizes))
        sizes = rows[0] if len(rows) == 1 else tuple(chain.from_iterable(rows))
    return sizes


def rows_of(sizes: ShardSizes, count: int) -> tuple[tuple[int, ...], ...]:
    """One row of sizes for each outer shard: the given ones, or equal for all `count`."""
    nested = bool(sizes) and isinstance(sizes[0], tuple)  # then all are: Shard refuses a mixture
    return sizes if nested else (sizes,) * count  # type: ignore[return-value]


def starts_of(sizes: Sequence[int]) -> "array[int]":
    """Offsets of shards of these sizes, and the end of the last one."""
    return array("q" if sum(sizes) >> 31 else "i", accumulate(sizes, initial=0))  # small numbers take half the memory


def sizes_between(starts: "array[int]") -> tuple[int, ...]:
    """The sizes of the shards with these offsets."""
    return tuple(map(sub, starts[1:], starts))


class DimShard(NamedTuple):
    """One shard of a dim, in elements.

    Attributes:
        at: the indices of its ranks in `Mesh.ranks`, by their positions on the axes that divide the dim.
    """

    start: int
    stop: int
    at: int


class DimShards:
    """The shards of a dim, numbered in their order along it.

    Args:
        mesh: the ranks.
        axes: axes that divide the dim, the outermost first: the digits of a number are positions on them.
        starts: offsets of shards, and the end of the last one.
    """

    def __init__(self, mesh: Mesh, axes: tuple[int, ...], starts: "array[int]") -> None:
        self.mesh = mesh
        self.axes = axes
        self.starts = starts

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all shards."""
        return sizes_between(self.starts)

    @cached_property
    def lengths(self) -> frozenset[int]:
        """The different sizes of shards."""
        return frozenset(map(sub, self.starts[1:], self.starts))

    def shard(self, coordinate: Sequence[int]) -> tuple[int, int]:
        """Offset and size of the shard of the rank at `coordinate`."""
        number = 0
        for axis in self.axes:
            number = number * self.mesh.shape[axis] + coordinate[axis]
        return self.starts[number], self.starts[number + 1] - self.starts[number]

    def along(self, axis: int, coordinate: Sequence[int]) -> "array[int]":
        """The offsets of the shards by the axes up to `axis`, at each position on it through `coordinate`."""
        if len(self.axes) == 1:
            return self.starts  # no copy, which for thousands of ranks takes more memory than a plan
        outer, count, inner = self._split(axis)
        number = 0
        for other in outer:
            number = number * self.mesh.shape[other] + coordinate[other]
        first = number * count * inner
        return self.starts[first : first + count * inner + 1 : inner]

    def rows(self, axis: int) -> ShardSizes:
        """The sizes of the shards by the axes up to `axis`: one tuple per shard of the axes before it."""
        _, count, inner = self._split(axis)
        sizes = sizes_between(self.starts[::inner])
        rows = tuple([sizes[i : i + count] for i in range(0, len(sizes), count)])
        return rows if len(rows) > 1 else rows[0]

    def _split(self, axis: int) -> tuple[tuple[int, ...], int, int]:
        """The axes before `axis`, its positions, and the number of shards that later axes make."""
        depth = self.axes.index(axis)
        return self.axes[:depth], self.mesh.shape[axis], prod(self.mesh.shape[a] for a in self.axes[depth + 1 :])

    def between(self, first: int, last: int, fixed: Mapping[int, int] | None = None) -> list[DimShard]:
        """The shards that have elements from `first` to before `last`.

        Args:
            fixed: only shards at these positions on these axes; the axes are not part of the shards' numbers.
        """
        starts, fixed = self.starts, fixed or {}
        near: Sequence[int] = range(
            max(bisect_right(starts, first) - 1, 0), bisect_left(starts, last, hi=len(starts) - 1)
        )
        if not fixed.keys().isdisjoint(self.axes):
            near = [number for number in self._numbers(fixed) if number in near]
        full = [number for number in near if starts[number] < starts[number + 1]]
        return [DimShard(starts[number], starts[number + 1], self._place(number, fixed)) for number in full]

    def _numbers(self, fixed: Mapping[int, int]) -> Sequence[int]:
        """The shards at these positions."""
        numbers = [0]
        for axis in self.axes:
            count = self.mesh.shape[axis]
            positions = range(fixed[axis], fixed[axis] + 1) if axis in fixed else range(count)
            numbers = [number * count + position for number in numbers for position in positions]
        return numbers

    def _place(self, number: int, fixed: Mapping[int, int]) -> int:
        at = 0
        for axis in reversed(self.axes):
            number, position = divmod(number, self.mesh.shape[axis])
            at += 0 if axis in fixed else position * self.mesh.strides[axis]
        return at

    @cached_property
    def places(self) -> Sequence[int]:
        """`DimShard.at` of all shards."""
        return self.mesh.places(self.axes)


@lru_cache(maxsize=1024)
def dim_shards(length: int, mesh: Mesh, divided_by: tuple[tuple[int, ShardSizes | None], ...]) -> DimShards:
    """The shards of a dim of `length` elements, made once: layouts that differ in other dims share them.

    Args:
        divided_by: the axes that divide it, the outermost first, with their sizes if given.
    """
    sizes = shard_sizes(length, [(mesh.shape[axis], given) for axis, given in divided_by])
    return DimShards(mesh, tuple([axis for axis, _ in divided_by]), starts_of(sizes))


def sizes_by_axis(
    mesh: Mesh, axes: Sequence[int], order: tuple[int, ...], sizes_of_ranks: dict[int, int]
) -> dict[int, ShardSizes]:
    """The shard sizes, by axis, of a dim sharded by `axes`, from the size on each rank along them."""
    found = tuple([axis for axis in order if axis in axes])
    here = {tuple(at[axis] for axis in found): n for rank, n in sizes_of_ranks.items() if (at := mesh.coordinate(rank))}
    shards = DimShards(mesh, found, starts_of([n for _, n in sorted(here.items())]))
    return {axis: shards.rows(axis) for axis in found}
