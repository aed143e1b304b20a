"""The placement of a tensor along one mesh axis. Frozen values, independent of a mesh."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise._layout.arguments import as_integer, as_integers, is_integer, is_listing, shown
from shardwise._layout.boxes import Box, BoxIndex, check_cover
from shardwise._layout.dim_shards import chunk
from shardwise.errors import LayoutError

REDUCE_OPS = ("sum", "avg", "max", "min", "product")
_OTHER_NAMES = {
    "mean": "avg",
    "prod": "product",
    "mul": "product",
    "amax": "max",
    "amin": "min",
}  # torch's functions


class Placement:
    """Base class of the placements."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is a Shard; of `dim`, if given."""
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_replicate(self) -> bool:
        """Whether this is Replicate."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether this is a Partial; of `reduce_op`, if given."""
        return isinstance(self, Partial) and (reduce_op is None or self.reduce_op == reduce_op)

    def __repr__(self) -> str:
        return str(self)


class Replicate(Placement):
    """Every rank along the axis holds the full value. There is one object, so comparisons are cheap."""

    __slots__ = ()

    def __new__(cls) -> "Replicate":  # noqa: PYI034 (not a new object)
        return REPLICATE

    def __reduce__(self) -> tuple[type["Replicate"], tuple[()]]:
        return Replicate, ()

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Shard(Placement):
    """Each rank along the axis holds one contiguous shard of `dim`.

    Args:
        dim: the sharded tensor dim; negative counts from the end.
        sizes: the size of each rank's shard, in rank order. None is as `torch.chunk`: ceil(size / ranks) each, the last
            ones smaller or empty. If an axis before this one in the layout's shard order shards the dim unevenly, give
            one tuple per outer shard.
    """

    dim: int
    sizes: tuple[int, ...] | tuple[tuple[int, ...], ...] | None

    def __init__(self, dim: int, sizes: Sequence[int] | Sequence[Sequence[int]] | None = None) -> None:
        if not is_integer(dim):
            raise LayoutError(
                f"Shard(dim) takes an integer dim, got {shown(dim)}. Named dims are not supported. "
                f"Fix: the number of the dim, such as Shard(0)."
            )
        object.__setattr__(self, "dim", as_integer(dim, "dim", LayoutError, "such as Shard(0)"))
        object.__setattr__(self, "sizes", None if sizes is None else _frozen_sizes(sizes))

    @staticmethod
    def local_shard_size_and_offset(curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        """Size and offset of shard `rank` of a dim of `curr_local_size` elements, by default as `torch.chunk`."""
        sizes = chunk(curr_local_size, num_chunks)
        return sizes[rank], sum(sizes[:rank])

    def __str__(self) -> str:
        return f"Shard({self.dim})" if self.sizes is None else f"Shard({self.dim}, sizes={self.sizes})"


def _frozen_sizes(
    sizes: Sequence[int] | Sequence[Sequence[int]],
) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
    if isinstance(sizes, tuple | list) and set(map(type, sizes)) == {int} and min(sizes) >= 0:
        return tuple(sizes)
    mixed = (
        f"Shard sizes must be all integers or all tuples of integers, got {shown(sizes)}. Fix: such as (3, 1), "
        f"the sizes of two ranks; or ((2, 1), (1, 0)), for each outer shard such a tuple."
    )
    if not is_listing(sizes) or len({is_integer(row) for row in sizes}) > 1:
        raise LayoutError(mixed)
    if not all(is_integer(n) for row in sizes for n in (row if is_listing(row) else (row,))):
        raise LayoutError(mixed)
    rows = [tuple(map(int, row)) if is_listing(row) else int(row) for row in sizes]
    if any(n < 0 for row in rows for n in (row if isinstance(row, tuple) else (row,))):
        raise LayoutError(f"Shard sizes must not be negative, got {shown(sizes)}. Fix: 0 where nothing is held.")
    return tuple(rows)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, repr=False)
class Partial(Placement):
    """Pending reduction: the value is the sum (avg, max, min, product) of the ranks' tensors of full size."""

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if not isinstance(self.reduce_op, str) or self.reduce_op not in REDUCE_OPS:
            raise LayoutError(
                f"Partial reduce_op must be one of {', '.join(REDUCE_OPS)}, got {shown(self.reduce_op)}. "
                f"Fix: Partial({_OTHER_NAMES.get(str(self.reduce_op), 'sum')!r})."
            )

    def __str__(self) -> str:
        return f"Partial({self.reduce_op!r})"


@dataclass(frozen=True, slots=True, repr=False)
class OnRanks(Placement):
    """One rank along the axis, at `position`, holds the full tensor; others hold nothing (table-wise sharding).

    For replicas on some ranks, create the tensor on a sub-mesh of those ranks.
    """

    position: int

    def __post_init__(self) -> None:
        fix = "such as OnRanks(0); for replicas on some ranks, a mesh of these ranks"
        object.__setattr__(self, "position", as_integer(self.position, "The position of OnRanks", LayoutError, fix))

    def __str__(self) -> str:
        return f"OnRanks({self.position})"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Boxes(Placement):
    """Explicit boxes, any number per rank along the axis (also none); together they cover the tensor exactly once.

    Allowed on one mesh axis, with Replicate or Partial sums on the others. The local tensor of a rank with one box has
    the box's shape; with several boxes it is 1-D, with their elements in order.
    """

    boxes: tuple[tuple[Box, ...], ...]
    _index: BoxIndex | None = field(init=False, repr=False, compare=False, default=None)
    _covers: tuple[int, ...] | None = field(init=False, repr=False, compare=False, default=None)

    def __init__(self, boxes: Sequence[Sequence[Box | tuple[Sequence[int], Sequence[int]]]]) -> None:
        rows = _listing(boxes, "Boxes() takes one list of boxes per rank")
        frozen = [tuple(map(_box, _listing(row, "Boxes() takes one list of boxes per rank"))) for row in rows]
        object.__setattr__(self, "boxes", tuple(frozen))
        object.__setattr__(self, "_index", None)
        object.__setattr__(self, "_covers", None)

    def __reduce__(self) -> tuple[type["Boxes"], tuple[object, ...]]:
        return Boxes, (self.boxes,)

    def check_cover(self, shape: tuple[int, ...]) -> None:
        """Raise LayoutError unless the boxes cover `shape` exactly once."""
        if self._covers != shape:  # thousands of boxes take a tenth of a second, and many layouts have the same
            check_cover([(f"position {i}", box) for i, row in enumerate(self.boxes) for box in row], shape)
            object.__setattr__(self, "_covers", shape)

    def touching(self, box: Box, position: int | None = None) -> Iterator[tuple[int, Box]]:
        """The boxes, of one position or of all, that have elements in `box`, each with its position."""
        if position is not None:
            yield from ((position, own) for own in self.boxes[position] if own.intersect(box) is not None)
            return
        if self._index is None:
            object.__setattr__(self, "_index", BoxIndex(self.boxes))
        assert self._index is not None
        yield from self._index.touching(box)

    def __str__(self) -> str:
        return "Boxes(" + " | ".join(" ".join(map(str, row)) or "-" for row in self.boxes) + ")"


_BOXES = "such as Boxes([[((0, 0), (2, 4))], [((2, 0), (2, 4))]]), offsets and sizes of each box"


def _listing(value: object, what: str) -> list[Any]:
    if not is_listing(value):
        raise LayoutError(f"{what}, got {shown(value)}. Fix: {_BOXES}.")
    return list(value)


def _box(value: object) -> Box:
    pair = _listing(value, "A box is a pair of offsets and sizes")
    if len(pair) != 2:
        raise LayoutError(f"A box is a pair of offsets and sizes, got {shown(value)}. Fix: {_BOXES}.")
    return Box(
        *(
            as_integers(x, f"The {what} of a box", LayoutError, _BOXES)
            for what, x in zip(Box._fields, pair, strict=True)
        )
    )


REPLICATE: Replicate = object.__new__(Replicate)
PARTIAL = Partial()


def placement_of(value: Any) -> Placement | None:
    """`value` as a placement: itself, or the equivalent of torch's placement; None for other values."""
    if isinstance(value, Placement):
        return value
    if not type(value).__module__.startswith("torch.distributed."):
        return None
    match type(value).__name__:
        case "Shard":
            return Shard(value.dim)
        case "Replicate":
            return REPLICATE
        case "Partial" if value.reduce_op in REDUCE_OPS:
            return Partial(value.reduce_op)
    return None


def without_sizes(placement: Placement) -> Placement:
    """Shard along this dim, with any sizes."""
    return Shard(placement.dim) if isinstance(placement, Shard) and placement.sizes is not None else placement


def dual(placement: Placement) -> Placement:
    """The placement of the gradient: Shard of Shard, Partial of Replicate, Replicate of Partial."""
    if isinstance(placement, Replicate):
        return PARTIAL
    if isinstance(placement, Partial):
        return REPLICATE
    return placement
