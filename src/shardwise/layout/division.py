"""How a dim, or a shard of it, is divided among the positions of a mesh axis."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol


class Division(Protocol):
    """The shards of `size` elements, one per position."""

    def shard(self, position: int) -> tuple[int, int]:
        """Offset and size of a shard."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Those of all shards."""
        ...

    def touching(self, first: int, last: int) -> range:
        """The positions whose shards may have some of the elements from `first` to before `last`."""
        ...


@dataclass(frozen=True, slots=True)
class Chunks:
    """Division as by `torch.chunk`: ceil(size / count) elements each, the last shards smaller or empty."""

    size: int
    count: int

    @property
    def last(self) -> int:
        """The last position with elements, the only one whose shard may be smaller; 0 if there are none."""
        return (self.size - 1) // -(-self.size // self.count) if self.size else 0

    def shard(self, position: int) -> tuple[int, int]:
        step = -(-self.size // self.count)
        start = min(self.size, position * step)
        return start, min(self.size, start + step) - start

    @property
    def sizes(self) -> tuple[int, ...]:
        step = -(-self.size // self.count)
        full = self.size // step if step else 0
        rest = (self.size - full * step,) if full < self.count else ()
        return (step,) * full + rest + (0,) * (self.count - full - 1)

    def touching(self, first: int, last: int) -> range:
        first, last = max(first, 0), min(last, self.size)
        if first >= last:
            return range(0)
        step = -(-self.size // self.count)
        return range(first // step, (last - 1) // step + 1)


class GivenSizes:
    """Shards of given sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._starts = array("q", [0, *accumulate(sizes)])
        self._count = len(sizes)

    def shard(self, position: int) -> tuple[int, int]:
        start = self._starts[position]
        return start, self._starts[position + 1] - start

    def touching(self, first: int, last: int) -> range:
        return range(max(0, bisect_right(self._starts, first) - 1), bisect_left(self._starts, last, hi=self._count))


@lru_cache(maxsize=1024)
def given_sizes(sizes: tuple[int, ...]) -> Division:
    """`GivenSizes`, made once: for many ranks that takes as long as a plan."""
    return GivenSizes(sizes)
