"""Sums of rows, and of gradients by row, in plain torch.

    weight [100, 4], rows (7, 9, 7), offsets (0, 2, 3): two bags, (7, 9) and (7)
    pool(weight, rows, offsets)            [2, 4]: weight[7] + weight[9], weight[7]
    sums_by_row(rows, offsets, gradient)   rows (7, 9), [2, 4]: gradient[0] + gradient[1], gradient[0]

A gradient is summed by sorting the rows, and `torch.embedding_bag` of the gradients, whose indices are the bags of each
row: several times as fast as `index_add_` (benchmarks/embedding_kernels.py).
"""

import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

CHUNK = 8192  # distinct rows summed at once: their sums stay in the cache until they are used
MOST_PACKED = 100_000  # numpy sorts up to as many 64-bit integers faster than torch 32-bit ones with their order
LARGEST_INT32 = (1 << 31) - 1


def pool(weight: Tensor, rows: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor:
    """The sum of the rows of each bag, in float32.

    Args:
        weight: [rows, columns].
        rows: int32 or int64, [ids].
        offsets: where each bag starts, and the number of ids; [bags + 1], of the dtype of `rows`.
        scale: of each id, or None.
    """
    if not rows.numel():
        return weight.new_zeros(len(offsets) - 1, weight.shape[1], dtype=torch.float32)
    scale = None if scale is None else scale.to(weight.dtype)
    return _bags(weight, rows, offsets, scale).float()


def sums_by_row(
    rows: Tensor, offsets: Tensor, gradient: Tensor, scale: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Distinct rows, in order, and the sum of the gradients of each, `CHUNK` rows at a time.

    The gradients of a row are added in the order of bags, so the sums have the same bits on all replicas.

    Args:
        gradient: of the sums of bags, [bags, columns], float32.
        rows, offsets, scale: as in `pool`.

    Yields:
        int64 [rows], float32 [rows, columns].
    """
    if not rows.numel():
        return
    rows, bags, scale = _by_row(rows, offsets, scale)
    first = torch.ones(len(rows) + 1, dtype=torch.bool, device=rows.device)
    torch.ne(rows[1:], rows[:-1], out=first[1:-1])
    starts = first.nonzero().squeeze(1)
    distinct, starts = rows.index_select(0, starts[:-1]).long(), starts.to(bags.dtype)
    for begin in range(0, len(distinct), CHUNK):
        ends = starts[begin : begin + CHUNK + 1]
        low, high = int(ends[0]), int(ends[-1])
        of_ids = None if scale is None else scale[low:high]
        yield distinct[begin : begin + CHUNK], _bags(gradient, bags[low:high], ends - low, of_ids)


def _by_row(rows: Tensor, offsets: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows in order, and the bag and scale of each."""
    bags = torch.repeat_interleave(offsets.diff().long())
    packs = rows.device.type == "cpu" and len(rows) <= MOST_PACKED
    if packs and scale is None and (rows.dtype == torch.int32 or int(rows.max()) <= LARGEST_INT32):
        keys = (rows.long() << 32).bitwise_or_(bags).numpy()
        halves = torch.from_numpy(np.sort(keys)).view(torch.int32).view(-1, 2)
        low = int(sys.byteorder == "big")
        return halves[:, 1 - low].contiguous(), halves[:, low].contiguous(), None
    ordered, order = rows.sort(stable=True)
    dtype = torch.int32 if len(offsets) <= LARGEST_INT32 and len(rows) <= LARGEST_INT32 else torch.int64
    return ordered, bags.index_select(0, order).to(dtype), None if scale is None else scale.index_select(0, order)


def _bags(weight: Tensor, rows: Tensor, offsets: Tensor, scale: Tensor | None) -> Tensor:
    found: tuple[Tensor, ...] = torch.embedding_bag(
        weight, rows, offsets, per_sample_weights=scale, include_last_offset=True
    )
    return found[0]
