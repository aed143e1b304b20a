"""Ids that are not in the table: found by their rank, raised on every rank before any lookup.

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

# Where a rank's first bad id is, and that id; a code in place of the first number says why there is none. The place is
# the position in the global ids, or, in a collection, the feature, the bag and the position in the bag.
Verdict = list[int]
VALID, BAD_BAGS, BAGS_OF_EACH_RANK, NO_BATCH, LOADER_ENDED, LOADER_FAILED = range(-1, -7, -1)


class StraddlingError(LayoutError):
    """Offsets that do not describe bags of the ids of the same rank."""


def first_bad(verdicts: Sequence[Verdict], ranks: Sequence[int]) -> tuple[Verdict, int] | None:
    """The first verdict of `ranks` that is not valid, and its rank: codes come first, then positions in order."""
    first = None
    for verdict, rank in zip(verdicts, ranks, strict=True):
        if verdict[0] != VALID and (first is None or verdict[:-1] < first[0][:-1]):
            first = verdict, rank
    return first


def not_in_table(what: str, where: str, value: int, num_rows: int, fix: str) -> IdError:
    """The error of a bad id."""
    return IdError(
        f"{what}: id {value}{where} is not in the table, whose valid ids are 0 to {num_rows - 1}. "
        f"Nothing was looked up. Fix: {fix}"
    )


def verdict_on(ctx: LocalContext, ids: Tensor, bags: Bags | None) -> Verdict:
    """This rank's verdict on its ids, and on whether its bags consist of them."""
    if bags is not None and not bags.fit(ids.numel()):
        return [BAD_BAGS, 0]
    num_rows = ctx.layouts[1].shape[0]
    if ids.numel() == 0:
        return [VALID, 0]
    low, high = torch.aminmax(ids)
    if int(low) >= 0 and int(high) < num_rows:
        return [VALID, 0]
    ids = ids.reshape(-1)
    local = int(((ids < 0) | (ids >= num_rows)).nonzero()[0])
    return [_global_position(ctx.layouts[0], ctx.rank, local), int(ids[local])]


def _global_position(layout: Layout, rank: int, local: int) -> int:
    """Row-major position in the global tensor of a rank's element number `local`."""
    (box,) = layout.boxes(rank)
    index = np.unravel_index(local, box.sizes)
    strides = contiguous_strides(layout.shape)
    return sum((int(i) + offset) * n for i, offset, n in zip(index, box.offsets, strides, strict=True))


@allow_in_graph
def refuse_bad_ids(ctx: LocalContext, ids: Tensor, bags: Bags | None) -> None:
    """Exchange verdicts if ranks have different ids, and raise one error on every rank if one is bad."""
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


def raise_bad_ids(ctx: LocalContext, verdicts: Sequence[Verdict], ranks: Sequence[int]) -> None:
    """Raise for the first bad id of `ranks`, with these `verdicts`; nothing if all are valid.

    Raises:
        IdError: an id outside the table.
        StraddlingError: offsets that are not those of a rank's ids.
    """
    bad = first_bad(verdicts, ranks)
    if bad is None:
        return
    (position, value), rank = bad
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
    place, fix = f" at position {where} of the ids{held}", "correct the id, or give the table more rows."
    raise not_in_table(ctx.name_of(1), place, value, ctx.layouts[1].shape[0], fix)


def check_devices(ctx: LocalContext, ids: Tensor, weight: Tensor) -> None:
    if ids.dtype not in (torch.int32, torch.int64):  # the rule checks it too, but does not run at every call
        raise IdTypeError(f"A lookup takes ids of dtype int32 or int64, got {ids.dtype}. Fix: ids.long().")
    if ids.device != weight.device:
        raise IdTypeError(
            f"{ctx.name_of(1)} is on {weight.device}, but its ids are on {ids.device}. "
            f"Fix: ids.to({str(weight.device)!r})."
        )
