"""Boxes of a few MiB that follow each other in a file, so that no operation needs memory for a full tensor."""

from collections.abc import Iterator
from math import prod

from shardwise.layout import Box

WINDOW_BYTES = 1 << 22


def windows(box: Box, itemsize: int) -> Iterator[Box]:
    """`box` in parts of at most WINDOW_BYTES, or one element; each is contiguous in `box`, in row-major order."""
    if not box.numel:
        return
    dim, inner = 0, itemsize * prod(box.sizes[1:])
    while dim + 1 < len(box.sizes) and (inner > WINDOW_BYTES or box.sizes[dim] == 1):
        dim += 1
        inner = itemsize * prod(box.sizes[dim + 1 :])
    yield from _along(box, dim, max(1, WINDOW_BYTES // inner))


def _along(box: Box, last: int, step: int) -> Iterator[Box]:
    """One index of each dim before `last`, and `step` indices of that."""
    dim = next((dim for dim in range(last) if box.sizes[dim] > 1), last)
    if not box.sizes:
        yield box
        return
    length = step if dim == last else 1
    for start in range(0, box.sizes[dim], length):
        part = box.along(dim, box.offsets[dim] + start, min(length, box.sizes[dim] - start))
        if dim == last:
            yield part
        else:
            yield from _along(part, last, step)
