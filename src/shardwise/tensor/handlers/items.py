"""x[i, j] = number: every rank writes to the elements of its local shard."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import collectives
from shardwise.layout import Box, split_by_boxes
from shardwise.tensor.dtensor import DTensor, plain
from shardwise.tensor.handlers.copies import before_change, invalidate


def write_number(x: DTensor, index: object, value: float) -> bool:
    """x[index] = value where the index names single elements; False, and nothing done, where it does not."""
    indices = _indices(x, index)
    if indices is None:
        return False
    copies = before_change("x[i] = number", x)
    with DisableTorchFunctionSubclass():
        rank = collectives.rank()
        neutral = x._layout.identity_element(rank)
        _write(plain(x), x._layout.boxes(rank), indices, value if neutral is None else neutral)
    invalidate(copies)
    return True


def _indices(x: DTensor, index: object) -> list[Tensor] | None:
    """A plain tensor for each dim, with the index of every element in it; None for slices and masks.

    Raises:
        IndexError: an index out of bounds.
    """
    shape = x._layout.shape
    parts = index if isinstance(index, tuple) else (index,)
    if not shape or len(parts) != len(shape) or not all(map(_is_index, parts)):
        return None
    found = []
    for dim, (part, size) in enumerate(zip(parts, shape, strict=True)):
        at = torch.as_tensor(part, dtype=torch.int64, device=x.device)
        bad = at[(at < -size) | (at >= size)]
        if bad.numel():
            raise IndexError(f"index {bad[0].item()} is out of bounds for dimension {dim} with size {size}")
        found.append(at % size)
    return list(torch.broadcast_tensors(*found))


def _is_index(part: object) -> bool:
    if isinstance(part, Tensor):
        return type(part) is not DTensor and part.dtype in (torch.int64, torch.int32)
    return isinstance(part, int) and not isinstance(part, bool)


def _write(local: Tensor, boxes: Sequence[Box], indices: Sequence[Tensor], value: float) -> None:
    if not boxes:  # saves indices for backward, as other ranks do
        local[tuple(at.reshape(-1)[:0] for at in indices)] = value
    for box, view in zip(boxes, split_by_boxes(local, boxes), strict=True):
        own = [at - offset for at, offset in zip(indices, box.offsets, strict=True)]
        here = torch.stack([(at >= 0) & (at < size) for at, size in zip(own, box.sizes, strict=True)]).all(0)
        view[tuple(at[here] for at in own)] = value
