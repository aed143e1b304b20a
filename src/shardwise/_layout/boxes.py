"""Boxes of a tensor, and whether a set of them covers a shape exactly once."""

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, product, repeat
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
        """This box with offset `start` and size `length` along `dim`."""
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
    """The boxes of positions, ordered by their offsets, so that the boxes that touch a box are found fast.

    Args:
        rows: the boxes of each position; kept by reference: the index has two numbers for each box.
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


Labelled = tuple[object, Box]  # the text of the box's holder in errors, and the box


MOST_DIMS = 8  # along which boxes are divided: each has 2^8 corners there


def check_cover(labelled: Sequence[Labelled], shape: tuple[int, ...]) -> None:
    """Raise LayoutError, naming two boxes, unless the boxes cover `shape` exactly once.

    Empty boxes are allowed anywhere inside the shape. Cost: two dict operations for each box, four if the boxes are
    divided along two dims, and so on.
    """
    for where, box in labelled:
        _check_inside(where, box, shape)
    full = [(where, box) for where, box in labelled if box.numel]
    element = _first_wrong([box for _, box in full], shape)
    if element is None:
        return
    one = Box(element, (1,) * len(shape))
    holding = [(where, box) for where, box in full if box.intersect(one) is not None]
    if not holding:
        raise LayoutError(_describe_gap(full, one, shape))
    (where_a, a), (where_b, b) = holding[:2]
    raise LayoutError(
        f"Boxes overlap: {a} ({where_a}) and {b} ({where_b}) share {a.intersect(b)}. "
        f"Fix: move or shrink one of them; each element is in exactly one box."
    )


def _first_wrong(boxes: Sequence[Box], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The first element that is not in exactly one box; None if there is none.

    The number of boxes with an element is the sum of the signs of all corners that are nowhere behind it: the first
    corner of a box has +1, its neighbors along one dim -1, along two dims +1, and so on. Without the full shape, every
    element is in no box, so the signs at each corner add up to 0; the first corner where they do not is wrong itself.
    """
    if len(boxes) == 1 and boxes[0].sizes == shape:
        return None
    dims = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in boxes)]
    if len(dims) > MOST_DIMS:
        raise LayoutError(
            f"Boxes are divided along {len(dims)} dims of shape {shape}, {MOST_DIMS} at most. "
            f"Fix: divide them along fewer."
        )
    signs = [prod(ends) for ends in product((1, -1), repeat=len(dims))]
    total = Counter[tuple[int, ...]]()
    outer = Box((0,) * len(shape), shape)
    for box, sign in chain([(outer, -1)], zip(boxes, repeat(1))):
        ends = [(box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for dim in dims]
        for corner, one in zip(product(*ends), signs, strict=True):
            total[corner] += one * sign
    first = min((corner for corner, sign in total.items() if sign), default=None)
    if first is None or not outer.numel:
        return None
    return tuple(first[dims.index(dim)] if dim in dims else 0 for dim in range(len(shape)))


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


def _describe_gap(full: Sequence[Labelled], first: Box, shape: tuple[int, ...]) -> str:
    """The text for the gap that begins with the element `first`."""
    gap = first
    for dim in reversed(range(len(shape))):
        start = first.offsets[dim]
        room = gap.along(dim, start, shape[dim] - start)
        end = min((box.offsets[dim] for _, box in full if box.intersect(room) is not None), default=shape[dim])
        gap = gap.along(dim, start, end - start)
    order = sorted(full, key=lambda item: item[1].offsets)
    split = bisect_right([box.offsets for _, box in order], gap.offsets)
    near = [f"{box} ({where})" for where, box in order[max(0, split - 1) : split + 1]]
    return (
        f"Boxes leave a gap: nobody holds {gap}; the boxes around it are {' and '.join(near) or 'none'}. "
        f"Fix: add a box there, or enlarge one of these."
    )
