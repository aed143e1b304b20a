"""Ids that are not in the table: found by the rank that has them, raised on every rank before anything is looked up.

A rank's verdict on its ids is sent with the headers of an exchange, or exchanged on its own (`refuse_bad_ids`).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwise._layout import Layout, Shard, contiguous_strides
from shardwise._lookups.ids import Bags
from shardwise._rules.local_context import LocalContext
from shardwise._trace.capture_hooks import allow_in_graph
from shardwise.errors import IdError, IdTypeError, LayoutError

Verdict = tuple[int, int]  # position in the global ids of a rank's first bad id, and that id
VALID, BAD_BAGS, BAGS_OF_EACH_RANK = -1, -2, -3  # in place of a position


class StraddlingError(LayoutError):
    """Offsets that do not describe bags of the ids of the same rank."""


def verdict_on(ctx: LocalContext, ids: Tensor, bags: Bags | None) -> Verdict:
    """This rank's verdict on its own ids, and on whether its bags are made of them."""
    if bags is not None and not bags.fit(ids.numel()):
        return BAD_BAGS, 0
    num_rows = ctx.layouts[1].shape[0]
    if ids.numel() == 0:
        return VALID, 0
    low, high = torch.aminmax(ids)
    if int(low) >= 0 and int(high) < num_rows:
        return VALID, 0
    ids = ids.reshape(-1)
    local = int(((ids < 0) | (ids >= num_rows)).nonzero()[0])
    return _global_position(ctx.layouts[0], ctx.rank, local), int(ids[local])


def _global_position(layout: Layout, rank: int, local: int) -> int:
    """Row-major position in the global tensor of a rank's element number `local`."""
    (box,) = layout.boxes(rank)
    index = np.unravel_index(local, box.sizes)
    strides = contiguous_strides(layout.shape)
    return sum((int(i) + offset) * n for i, offset, n in zip(index, box.offsets, strides, strict=True))


@allow_in_graph
def refuse_bad_ids(ctx: LocalContext, ids: Tensor, bags: Bags | None) -> None:
    """Exchange verdicts if ranks have different ids, and raise the same error on every rank if one is bad."""
    verdict, axes = verdict_on(ctx, ids, bags), id_axes(ctx)
    if not axes:
        raise_bad_ids(ctx, [verdict], [ctx.rank])
        return
    ranks = ctx.ranks(axes)
    own = torch.tensor(verdict, dtype=torch.int64, device=ids.device)
    raise_bad_ids(ctx, ctx.all_gather(own, ranks).tolist(), ranks)


def id_axes(ctx: LocalContext) -> tuple[int, ...]:
    """The mesh axes along which ranks have different ids."""
    ids = ctx.layouts[0]
    return tuple(a for a, p in enumerate(ids.placements) if isinstance(p, Shard) and ids.mesh.shape[a] > 1)


def raise_bad_ids(ctx: LocalContext, verdicts: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
    """Raise for the first bad id of `ranks`, whose `verdicts` these are; nothing if all are valid.

    Raises:
        IdError: an id outside the table.
        StraddlingError: offsets that are not those of a rank's ids.
    """
    bad = [(*verdict, rank) for verdict, rank in zip(verdicts, ranks, strict=True) if verdict[0] != VALID]
    if not bad:
        return
    position, value, rank = min(bad)
    if position == BAD_BAGS:
        raise StraddlingError(
            f"{ctx.name_of(1)}: the offsets describe no bags of the ids: they must rise from 0 to at most the "
            f"number of ids. Fix: lengths.cumsum(0) - lengths."
        )
    if position == BAGS_OF_EACH_RANK:
        raise StraddlingError(
            f"{ctx.name_of(1)}: the offsets start at 0 on each rank, but they are global: positions among the ids of "
            f"all ranks.\n  Fix: shardwise.embedding.from_lengths(lengths), where lengths is a DTensor of how many ids "
            f"each bag has, DTensor.from_local(lengths, mesh, [Shard(0)])."
        )
    index = tuple(map(int, np.unravel_index(position, ctx.layouts[0].shape)))
    where = index[0] if len(index) == 1 else index
    sharded, mesh = id_axes(ctx), ctx.layouts[0].mesh
    replicas = tuple(axis for axis in range(mesh.ndim) if axis not in sharded)
    held = f" (held by rank {min(mesh.submesh(replicas, rank).ranks) if replicas else rank})" if sharded else ""
    raise IdError(
        f"{ctx.name_of(1)}: id {value} at position {where} of the ids{held} is not in the table, whose valid ids are "
        f"0 to {ctx.layouts[1].shape[0] - 1}. Nothing was looked up. Fix: correct the id, or give the table more rows."
    )


def check_devices(ctx: LocalContext, ids: Tensor, weight: Tensor) -> None:
    if ids.dtype not in (torch.int32, torch.int64):  # the rule checks it too, but does not run at every call
        raise IdTypeError(f"A lookup takes ids of dtype int32 or int64, got {ids.dtype}. Fix: ids.long().")
    if ids.device != weight.device:
        raise IdTypeError(
            f"{ctx.name_of(1)} is on {weight.device}, but its ids are on {ids.device}. "
            f"Fix: ids.to({str(weight.device)!r})."
        )
