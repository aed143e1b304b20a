"""Boxes of a tensor, and whether a set of them covers a shape exactly once."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from shardwise.errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor


class Box(NamedTuple):
    """A rectangular block of a tensor: offsets and sizes, one integer per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        count = 1
        for size in self.sizes:
            count *= size
        return count

    def intersect(self, other: "Box") -> "Box | None":
        """The intersection, or None if it has no element."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if stop <= start:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Box(tuple(offsets), tuple(sizes))

    def along(self, dim: int, start: int, length: int) -> "Box":
        """This box, but with offset `start` and size `length` along `dim`."""
        offsets = (*self.offsets[:dim], start, *self.offsets[dim + 1 :])
        return Box(offsets, (*self.sizes[:dim], length, *self.sizes[dim + 1 :]))

    def relative_to(self, outer: "Box") -> tuple[slice, ...]:
        """The slices of this box in a local tensor that holds `outer`."""
        pairs = zip(self.offsets, self.sizes, outer.offsets, strict=True)
        return tuple(slice(a - b, a - b + n) for a, n, b in pairs)

    def __str__(self) -> str:
        if len(self.offsets) != len(self.sizes):
            return f"offsets {self.offsets}, sizes {self.sizes}"
        return "[" + ", ".join([f"{a}:{a + n}" for a, n in zip(self.offsets, self.sizes, strict=True)]) + "]"


def split_by_boxes(local: "Tensor", boxes: Sequence[Box]) -> "list[Tensor]":
    """A view of a rank's local tensor for each of its boxes, in the box's shape; see `Layout.local_shape`."""
    if len(boxes) == 1:
        (box,) = boxes
        return [local if local.shape == box.sizes else local.view(box.sizes)]
    flat, views, start = local.reshape(-1), [], 0
    for box in boxes:  # slices, because autograd refuses in-place ops on the views that `split` returns
        views.append(flat[start : start + box.numel].view(box.sizes))
        start += box.numel
    return views


class BoxIndex:
    """The boxes of positions, in the order of their offsets, so that those that touch a box are found fast.

    Args:
        rows: the boxes of each position; kept, so that the index has two numbers for each box.
    """

    def __init__(self, rows: Sequence[Sequence[Box]]) -> None:
        self._rows = rows
        full = [(box.offsets, at, i) for at, row in enumerate(rows) for i, box in enumerate(row) if prod(box.sizes)]
        ndim = len(full[0][0]) if full else 0
        # The dim with most offsets; without dims there is one box at most.
        self._dim = max(range(ndim), key=lambda dim: len({offsets[dim] for offsets, _, _ in full}), default=None)
        if (dim := self._dim) is not None:
            full.sort(key=lambda item: item[0][dim])
        self._positions = array("i", [at for _, at, _ in full])
        self._numbers = array("i", [i for _, _, i in full])
        self._longest = 0 if dim is None else max(rows[at][i].sizes[dim] for _, at, i in full)

    def touching(self, box: Box) -> Iterator[tuple[int, Box]]:
        """The boxes that have elements in `box`, each with its position."""
        near = range(len(self._positions))
        if (dim := self._dim) is not None:

            def start_of(i: int) -> int:
                return self._rows[self._positions[i]][self._numbers[i]].offsets[dim]

            first, last = box.offsets[dim] - self._longest, box.offsets[dim] + box.sizes[dim]
            near = near[bisect_right(near, first, key=start_of) : bisect_left(near, last, key=start_of)]
        for i in near:
            at = self._positions[i]
            own = self._rows[at][self._numbers[i]]
            if own.intersect(box) is not None:
                yield at, own


Labelled = tuple[object, Box]  # where the box is, as `str` says in errors, and the box


def check_cover(labelled: Sequence[Labelled], shape: tuple[int, ...]) -> None:
    """Raise LayoutError, naming two boxes, unless the boxes cover `shape` exactly once.

    Empty boxes are allowed anywhere inside the shape. Cost: a few sorts where boundaries through the full tensor,
    then through its parts, and so on, separate all boxes, as in every grid. A sweep compares what they leave together.
    """
    for where, box in labelled:
        _check_inside(where, box, shape)
    full = [(where, box) for where, box in labelled if box.numel]
    clash = _overlap(full)
    if clash is not None:
        (where_a, a), (where_b, b) = clash
        raise LayoutError(
            f"Boxes overlap: {a} ({where_a}) and {b} ({where_b}) share {a.intersect(b)}. "
            f"Fix: move or shrink one of them; each element is in exactly one box."
        )
    if sum(box.numel for _, box in full) != prod(shape):
        raise LayoutError(_describe_gap(full, shape))


def _check_inside(where: object, box: Box, shape: tuple[int, ...]) -> None:
    if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
        raise LayoutError(
            f"Box {box} ({where}) needs {len(shape)} offsets and sizes for shape {shape}. "
            f"Fix: one of each for each dim."
        )
    for start, size, end in zip(*box, shape, strict=True):
        if start < 0 or size < 0 or start + size > end:
            full = Box((0,) * len(shape), shape)
            raise LayoutError(
                f"Box {box} ({where}) is out of range: the tensor is {full}. "
                f"Fix: no offset below 0, no offset + size above the size of its dim."
            )


def _overlap(full: Sequence[Labelled]) -> tuple[Labelled, Labelled] | None:
    groups = [full]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        parts = _parts(group)
        if len(parts) > 1:
            groups += reversed(parts)
        elif (clash := _overlap_by_sweep(group)) is not None:
            return clash
    return None


def _parts(group: Sequence[Labelled]) -> list[Sequence[Labelled]]:
    """The parts between all boundaries along the first dim that has some which cross no box; else one part."""
    for dim in range(len(group[0][1].sizes)):
        order = sorted(group, key=lambda item: item[1].offsets[dim])
        first = order[0][1]
        starts, end = [0], first.offsets[dim] + first.sizes[dim]
        for number, (_, box) in enumerate(order):
            offset = box.offsets[dim]
            if offset >= end and number:
                starts.append(number)
            end = max(end, offset + box.sizes[dim])
        if len(starts) > 1:
            return [order[i:j] for i, j in zip(starts, [*starts[1:], len(order)], strict=True)]
    return [group]


def _overlap_by_sweep(full: Sequence[Labelled]) -> tuple[Labelled, Labelled] | None:
    ndim = len(full[0][1].sizes)
    if not ndim:  # every box is the one element
        return full[0], full[1]
    dim = max(range(ndim), key=lambda dim: len({box.offsets[dim] for _, box in full}))
    live: list[Labelled] = []
    for item in sorted(full, key=lambda item: (item[1].offsets[dim], item[1].offsets)):
        start = item[1].offsets[dim]
        live = [other for other in live if other[1].offsets[dim] + other[1].sizes[dim] > start]
        for other in live:
            if other[1].intersect(item[1]) is not None:
                return other, item
        live.append(item)
    return None


def _describe_gap(full: Sequence[Labelled], shape: tuple[int, ...]) -> str:
    gap = _first_gap(full, shape)
    order = sorted(full, key=lambda item: item[1].offsets)
    split = bisect_right([box.offsets for _, box in order], gap.offsets)
    near = [f"{box} ({where})" for where, box in order[max(0, split - 1) : split + 1]]
    return (
        f"Boxes leave a gap: nobody holds {gap}; the boxes around it are {' and '.join(near) or 'none'}. "
        f"Fix: add a box there, or enlarge one of these."
    )


def _first_gap(full: Sequence[Labelled], shape: tuple[int, ...]) -> Box:
    """The first uncovered box of `shape`."""
    left = [Box((0,) * len(shape), shape)]
    for _, box in sorted(full, key=lambda item: item[1].offsets):
        left = [gap for rest in left for gap in _without(rest, box)]
    return min(left)


def _without(outer: Box, hole: Box) -> list[Box]:
    """Boxes that cover `outer` without `hole`: along each dim in turn, what is before and after the hole."""
    common = outer.intersect(hole)
    if common is None:
        return [outer]
    boxes = []
    for dim, (start, size) in enumerate(zip(*common, strict=True)):
        for first, last in ((outer.offsets[dim], start), (start + size, outer.offsets[dim] + outer.sizes[dim])):
            if first < last:
                boxes.append(outer.along(dim, first, last - first))
        outer = outer.along(dim, start, size)
    return boxes
