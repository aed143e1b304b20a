"""Ids that no table has: found by the rank that has them, raised on every rank before anything is looked up."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwise.embedding.ids import Bags
from shardwise.errors import IdError, IdTypeError, LayoutError
from shardwise.layout import Layout, Shard, contiguous_strides
from shardwise.rules.row import LocalContext
from shardwise.trace.capture_hooks import allow_in_graph

Verdict = tuple[int, int, int]  # position in the global ids, id, rank; or one of these for the position
FINE, BAD_BAGS = -1, -2


def first_bad(ctx: LocalContext, ids: Tensor, bags: Bags | None) -> tuple[int, int]:
    """Position in the global ids and value of this rank's first id outside the table; (FINE, 0) for none."""
    if bags is not None and not bags.fit(ids.numel()):
        return BAD_BAGS, 0
    num_rows = ctx.layouts[1].shape[0]
    if ids.numel() == 0:
        return FINE, 0
    low, high = torch.aminmax(ids)
    if int(low) >= 0 and int(high) < num_rows:
        return FINE, 0
    local = int(((ids < 0) | (ids >= num_rows)).nonzero()[0])
    return _global_position(ctx.layouts[0], ctx.rank, local), int(ids[local])


def _global_position(layout: Layout, rank: int, local: int) -> int:
    """Row-major position in the global tensor of a rank's element number `local`."""
    (box,) = layout.boxes(rank)
    index = np.unravel_index(local, box.sizes)
    strides = contiguous_strides(layout.shape)
    return sum((int(i) + offset) * n for i, offset, n in zip(index, box.offsets, strides, strict=True))


class StraddlingError(LayoutError):
    """Offsets that do not describe bags of the ids of the same rank."""


def worst(headers: Sequence[Sequence[int]], ranks: Sequence[int]) -> Verdict:
    bad = [(head[-2], head[-1], rank) for head, rank in zip(headers, ranks, strict=True) if head[-2] != FINE]
    return min(bad, default=(FINE, 0, -1))


@allow_in_graph
def refuse_bad_ids(ctx: LocalContext, ids: Tensor, bags: Bags | None) -> None:
    """The same error on every rank if any has an id that is not in the table, or bags that are not made of its ids."""
    raise_bad_ids(ctx, _verdict_everywhere(ctx, ids, bags))


def _verdict_everywhere(ctx: LocalContext, ids: Tensor, bags: Bags | None) -> Verdict:
    """The first bad id of all ranks; asks the others only where they have ids that this rank has not."""
    position, bad = first_bad(ctx, ids.reshape(-1), bags)
    if not (axes := asked_axes(ctx)):
        return position, bad, ctx.rank
    ranks = ctx.ranks(axes)
    own = torch.tensor([position, bad], dtype=torch.int64, device=ids.device)
    return worst(ctx.all_gather(own, ranks).tolist(), ranks)


def asked_axes(ctx: LocalContext) -> tuple[int, ...]:
    """The mesh axes along which other ranks have other ids."""
    ids = ctx.layouts[0]
    return tuple(a for a, p in enumerate(ids.placements) if isinstance(p, Shard) and ids.mesh.shape[a] > 1)


def raise_bad_ids(ctx: LocalContext, verdict: Verdict) -> None:
    """Raise IdError, the same on every rank, unless the verdict is that all ids are in the table."""
    position, bad, rank = verdict
    if position == FINE:
        return
    if position == BAD_BAGS:
        raise StraddlingError(
            f"{ctx.name_of(1)}: the offsets describe no bags of the ids: they must rise from 0 to at most the "
            f"number of ids."
        )
    index = tuple(map(int, np.unravel_index(position, ctx.layouts[0].shape)))
    where = index[0] if len(index) == 1 else index
    asked, mesh = asked_axes(ctx), ctx.layouts[0].mesh
    copies = tuple(axis for axis in range(mesh.ndim) if axis not in asked)
    held = f" (held by rank {min(mesh.submesh(copies, rank).ranks) if copies else rank})" if asked else ""
    raise IdError(
        f"{ctx.name_of(1)}: id {bad} at position {where} of the ids{held} is not in the table, whose valid ids are "
        f"0 to {ctx.layouts[1].shape[0] - 1}. Nothing was looked up."
    )


def check_devices(ctx: LocalContext, ids: Tensor, weight: Tensor) -> None:
    if ids.dtype not in (torch.int32, torch.int64):  # the rule says so too, but is not asked at every call
        raise IdTypeError(f"A lookup takes ids of dtype int32 or int64, got {ids.dtype}. Fix: ids.long().")
    if ids.device != weight.device:
        raise IdTypeError(
            f"{ctx.name_of(1)} is on {weight.device}, but its ids are on {ids.device}. "
            f"Fix: ids.to({str(weight.device)!r})."
        )
