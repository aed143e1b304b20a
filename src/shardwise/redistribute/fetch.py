"""Fetches boxes of sharded tensors that other ranks hold: halos, windows, rows at other indices."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shardwise.layout import Box
from shardwise.redistribute.transfers import Ranks, Region, Schedule, all_to_all, pack, schedule, unpack
from shardwise.rules.local_tensors import flat_cat
from shardwise.trace.comm_trace import Cause

Boxes = tuple[Box, ...]
Wanted = tuple[tuple[int, Box], ...]  # (index of a tensor, box of it)


def fetch(
    xs: Sequence[Tensor],
    ranks: Ranks,
    rank: int,
    held: tuple[Boxes, ...],
    wanted: tuple[Wanted, ...],
    cause: Cause,
) -> list[Tensor]:
    """The boxes that this rank wants. Differentiable.

    Args:
        xs: the local tensors of this rank, of one dtype.
        ranks: the ranks that take part.
        rank: this rank.
        held: for every tensor, its box on each of `ranks`; equal boxes are replicas, others do not overlap.
        wanted: for each of `ranks`, the boxes that it wants.

    Returns:
        One tensor for each box wanted; views of `xs` if no rank wants what another one holds.
    """
    me = ranks.index(rank)
    own, goals = [boxes[me] for boxes in held], wanted[me]
    plan = _schedule(ranks, rank, held, wanted)
    if plan is None:
        return [_own_box(xs[i], own[i], goal) for i, goal in goals]
    # A rank that sends nothing of a tensor still depends on it, so that its backward has the same collectives.
    unsent = set(range(len(xs))) - {region.index for region in plan.sends}
    send = flat_cat([*pack(xs, plan), *(xs[i].reshape(-1)[:0] for i in sorted(unsent))])
    received = all_to_all(send, plan.send_counts, plan.recv_counts, ranks, cause)
    by_goal: list[list[tuple[Region, Tensor]]] = [[] for _ in goals]
    for region, x in zip(plan.recvs, unpack(received, plan), strict=True):
        by_goal[region.index].append((region, x))
    return [_assembled(parts, goal, received) for parts, (_, goal) in zip(by_goal, goals, strict=True)]


def _own_box(x: Tensor, own: Box, goal: Box) -> Tensor:
    if own == goal:
        return x
    return x[goal.relative_to(own)] if goal.numel else x.reshape(-1)[:0].view(goal.sizes)


def _assembled(parts: list[tuple[Region, Tensor]], goal: Box, received: Tensor) -> Tensor:
    if not parts:
        return received[:0].view(goal.sizes)
    if len(parts) == 1:
        return parts[0][1]
    starts = [[s.start for s in region.slices] for region, _ in parts]
    dims = [dim for dim, column in enumerate(zip(*starts, strict=True)) if len(set(column)) > 1]
    if len(dims) == 1:  # the regions differ in one dim only
        parts = sorted(parts, key=lambda item: item[0].slices[dims[0]].start)
        return torch.cat([x for _, x in parts], dims[0])
    out = received.new_empty(goal.sizes)
    for region, x in parts:
        out[region.slices] = x
    return out


@lru_cache(maxsize=4096)
def _schedule(ranks: Ranks, rank: int, held: tuple[Boxes, ...], wanted: tuple[Wanted, ...]) -> Schedule | None:
    """What `rank` sends and receives; None if no rank wants what another one holds."""
    sends: list[tuple[int, Region]] = []
    recvs: list[tuple[int, Region]] = []
    anything_sent, me = False, ranks.index(rank)
    holders: list[dict[Box, list[int]]] = []
    for boxes in held:
        holders.append({})
        for index, box in enumerate(boxes):
            holders[-1].setdefault(box, []).append(index)
    for receiver, goals in enumerate(wanted):
        for number, (i, goal) in enumerate(goals):
            for box, owners in holders[i].items():
                common = box.intersect(goal)
                if common is None:
                    continue
                sender = receiver if receiver in owners else owners[receiver % len(owners)]
                anything_sent = anything_sent or sender != receiver
                if sender == me:
                    sends.append((ranks[receiver], Region(i, common.relative_to(box), common.sizes)))
                if receiver == me:
                    recvs.append((ranks[sender], Region(number, common.relative_to(goal), common.sizes)))
    recvs.sort(key=lambda item: ranks.index(item[0]))
    return schedule(ranks, sends, recvs) if anything_sent else None
