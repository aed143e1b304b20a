"""Boxes of cut tensors that other ranks hold: halos, windows, rows that change their place."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from shardwise.layout import Box
from shardwise.redistribute import run
from shardwise.trace.comm_trace import Cause

Ranks = tuple[int, ...]
Boxes = tuple[Box, ...]
Wanted = tuple[tuple[int, Box], ...]  # numbers of tensors, and boxes of them


@dataclass(frozen=True)
class _Program:
    """What one rank sends and receives: parts of the boxes it holds, parts of the boxes it wants."""

    sends: tuple[Wanted, ...]  # by receiver; with the number of the tensor
    recvs: tuple[Wanted, ...]  # by sender; with the number of the wanted box
    travels: bool  # whether any rank of the group needs what another one holds


def fetch(
    xs: Sequence[Tensor],
    ranks: Ranks,
    rank: int,
    held: tuple[Boxes, ...],
    wanted: tuple[Wanted, ...],
    cause: Cause,
) -> list[Tensor]:
    """The boxes that `rank` wants of tensors of which each of `ranks` holds one box.

    Args:
        xs: what this rank holds, of one dtype.
        held: for every tensor a box for each of `ranks`; equal boxes are copies, others do not overlap.
        wanted: for each of `ranks` the boxes it wants.

    Returns:
        One tensor a box. Parts of `xs` where no rank of the group wants what another one holds.
    """
    me = ranks.index(rank)
    own, goals = [boxes[me] for boxes in held], wanted[me]
    program = _program(ranks, rank, held, wanted)
    if not program.travels:
        return [_part(xs[i], own[i], goal) for i, goal in goals]
    pieces = [xs[i][box.relative_to(own[i])].reshape(-1) for parts in program.sends for i, box in parts]
    # A rank that sends nothing of a tensor still depends on it, so that backward meets its peers.
    unsent = set(range(len(xs))) - {i for parts in program.sends for i, _ in parts}
    send = torch.cat([*pieces, *(xs[i].reshape(-1)[:0] for i in sorted(unsent))])
    send_counts = [sum(box.numel for _, box in parts) for parts in program.sends]
    parts = [part for row in program.recvs for part in row]
    recv_counts = [sum(box.numel for _, box in row) for row in program.recvs]
    received = run.exchange(send, send_counts, recv_counts, ranks, cause)
    found = received.split([box.numel for _, box in parts]) if parts else ()
    by_goal: list[list[tuple[Box, Tensor]]] = [[] for _ in goals]
    for (number, box), piece in zip(parts, found, strict=True):
        by_goal[number].append((box, piece.view(box.sizes)))
    return [_assembled(p, goal, received) for p, (_, goal) in zip(by_goal, goals, strict=True)]


def _part(x: Tensor, own: Box, goal: Box) -> Tensor:
    if own == goal:
        return x
    return x[goal.relative_to(own)] if goal.numel else x.reshape(-1)[:0].view(goal.sizes)


def _assembled(pieces: list[tuple[Box, Tensor]], goal: Box, received: Tensor) -> Tensor:
    if not pieces:
        return received[:0].view(goal.sizes)
    dim = _only_varying([box for box, _ in pieces])
    if dim is not None:
        pieces = sorted(pieces, key=lambda piece: piece[0].offsets[dim])
        return torch.cat([x for _, x in pieces], dim) if len(pieces) > 1 else pieces[0][1]
    out = received.new_empty(goal.sizes)
    for box, piece in pieces:
        out[box.relative_to(goal)] = piece
    return out


def _only_varying(boxes: list[Box]) -> int | None:
    """The one dim along which the boxes lie, if there is one."""
    if len(boxes) == 1:
        return 0
    dims = {d for box in boxes for d, at in enumerate(box.offsets) if at != boxes[0].offsets[d]}
    return dims.pop() if len(dims) == 1 else None


@lru_cache(maxsize=4096)
def _program(ranks: Ranks, rank: int, held: tuple[Boxes, ...], wanted: tuple[Wanted, ...]) -> _Program:
    travels = False
    sends: list[list[tuple[int, Box]]] = [[] for _ in ranks]
    recvs: list[list[tuple[int, Box]]] = [[] for _ in ranks]
    holders: list[dict[Box, list[int]]] = []
    for boxes in held:
        holders.append({})
        for index, box in enumerate(boxes):
            holders[-1].setdefault(box, []).append(index)
    for receiver, goals in enumerate(wanted):
        for number, (i, goal) in enumerate(goals):
            for box, owners in holders[i].items():
                part = box.intersect(goal)
                if part is None:
                    continue
                sender = receiver if receiver in owners else owners[receiver % len(owners)]
                travels = travels or sender != receiver
                if ranks[sender] == rank:
                    sends[receiver].append((i, part))
                if ranks[receiver] == rank:
                    recvs[sender].append((number, part))
    return _Program(tuple(map(tuple, sends)), tuple(map(tuple, recvs)), travels)
