"""Lookups that need no other rank: in each rank's own boxes of the table."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import RuleError
from shardwise.layout import Box, Boxes, split_by_boxes
from shardwise.lookups.ids import Bags, plain_lookup
from shardwise.rules.local_context import LocalContext
from shardwise.trace.capture_hooks import is_capturing

EMPTY_BOX = Box((0, 0), (0, 0))


def table_boxes(ctx: LocalContext, weight: Tensor, sparse: bool = False) -> list[tuple[Box, Tensor]]:
    """This rank's boxes of the table with their elements; empty ones up to the largest number that any rank has."""
    own, placements = ctx.layouts[1].boxes(ctx.rank), ctx.layouts[1].placements
    count = max(len(boxes) for p in placements for boxes in (p.boxes if isinstance(p, Boxes) else ((),)))
    if count <= 1:
        return [(own[0] if own else EMPTY_BOX, weight)]
    if sparse and weight.requires_grad and torch.is_grad_enabled():
        raise RuleError(
            f"{ctx.name_of(1)}: a table of which a rank holds several boxes has no sparse gradient. "
            f"Fix: sparse=False, or one box a rank."
        )
    own += (Box((0, 0), (0, ctx.layouts[1].shape[1])),) * (count - len(own))
    return list(zip(own, split_by_boxes(weight, own), strict=True))


def local_lookup(ctx: LocalContext, ids: Tensor, box: Box, weight: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
    """The lookup in one box: ids of other rows add zero, and so do other columns."""
    (wanted,) = ctx.output.boxes(ctx.rank)
    num_rows, width = ctx.layouts[1].shape[0], wanted.sizes[-1]
    if not box.numel:  # zeros, yet connected to the table, so that every rank has a gradient
        shape = ids.shape if bags is None else bags.lengths(ids).shape
        nothing = F.embedding(torch.empty(0, dtype=torch.int64, device=weight.device), weight, sparse=sparse)
        return weight.new_zeros(*shape, width) + nothing.sum(dtype=weight.dtype)
    left = box.offsets[1] - wanted.offsets[-1]
    pad = (left, width - left - box.sizes[1])
    if box.sizes[0] == num_rows:
        return _padded(plain_lookup(ids, weight, bags, sparse), pad)
    flat = ids.reshape(-1)
    mine = (flat >= box.offsets[0]) & (flat < box.offsets[0] + box.sizes[0])
    own = flat[mine] - box.offsets[0]
    if bags is None:
        rows = _padded(F.embedding(own, weight, sparse=sparse), pad)
        out = rows.new_zeros(flat.numel(), width).index_copy(0, mine.nonzero().squeeze(1), rows)
        return out.view(*ids.shape, width)
    lengths, bag_of = bags.lengths(ids), bags.bag_of(ids)[mine]
    kept = torch.bincount(bag_of, minlength=lengths.numel())
    sums = _padded(F.embedding_bag(own, weight, kept.cumsum(0) - kept, mode="sum", sparse=sparse), pad)
    return sums / lengths.clamp(min=1).unsqueeze(1) if bags.mode == "mean" else sums


def local_rows(ctx: LocalContext, ids: Tensor, box: Box, weight: Tensor) -> Tensor:
    """`local_lookup` without bags. While a graph is captured, shapes must not depend on ids: all ids look up a row."""
    if not is_capturing() or not box.numel or box.sizes[0] == ctx.layouts[1].shape[0]:
        return local_lookup(ctx, ids, box, weight, None, False)
    (wanted,) = ctx.output.boxes(ctx.rank)
    mine = (ids >= box.offsets[0]) & (ids < box.offsets[0] + box.sizes[0])
    rows = F.embedding(torch.where(mine, ids - box.offsets[0], 0), weight).masked_fill(~mine.unsqueeze(-1), 0)
    left = box.offsets[1] - wanted.offsets[-1]
    return _padded(rows, (left, wanted.sizes[-1] - left - box.sizes[1]))


def _padded(x: Tensor, columns: tuple[int, int]) -> Tensor:
    return F.pad(x, columns) if any(columns) else x
