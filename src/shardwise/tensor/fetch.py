"""Boxes of a cut tensor that other ranks hold: halos, windows, rows that change their place."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from shardwise import movement
from shardwise.boxes import Box
from shardwise.meter import Cause

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class _Program:
    """What one rank sends and receives: parts of its own box, parts of the box it wants."""

    sends: tuple[tuple[Box, ...], ...]  # by receiver
    recvs: tuple[tuple[Box, ...], ...]  # by sender
    travels: bool  # whether any rank of the group needs what another one holds


def fetch(x: Tensor, ranks: Ranks, rank: int, held: tuple[Box, ...], wanted: tuple[Box, ...], cause: Cause) -> Tensor:
    """The box that `rank` wants of a tensor of which each of `ranks` holds one box.

    Args:
        x: what this rank holds.
        held, wanted: a box for each of `ranks`; equal boxes are copies, others do not overlap.
    """
    own, goal = held[ranks.index(rank)], wanted[ranks.index(rank)]
    program = _program(ranks, rank, held, wanted)
    if not program.travels:
        if not goal.numel:
            return x if own == goal else x.reshape(-1)[:0].view(goal.sizes)
        return x if own == goal else x[goal.relative_to(own)]
    pieces = [x[box.relative_to(own)].reshape(-1) for boxes in program.sends for box in boxes]
    # A rank that sends nothing still depends on x, so that backward meets its peers.
    send = torch.cat(pieces) if pieces else x.reshape(-1)[:0]
    send_counts = [sum(box.numel for box in boxes) for boxes in program.sends]
    recv_counts = [sum(box.numel for box in boxes) for boxes in program.recvs]
    received = movement.exchange(send, send_counts, recv_counts, ranks, cause)
    boxes = [box for row in program.recvs for box in row]
    return _assembled(received.split([box.numel for box in boxes]) if boxes else (), boxes, goal, received)


def _assembled(pieces: tuple[Tensor, ...], boxes: list[Box], goal: Box, received: Tensor) -> Tensor:
    if not pieces:
        return received.view(goal.sizes)
    shaped = [piece.view(box.sizes) for piece, box in zip(pieces, boxes, strict=True)]
    dim = _only_varying(boxes)
    if dim is not None:
        order = sorted(range(len(boxes)), key=lambda i: boxes[i].offsets[dim])
        return torch.cat([shaped[i] for i in order], dim) if len(order) > 1 else shaped[0]
    out = received.new_empty(goal.sizes)
    for piece, box in zip(shaped, boxes, strict=True):
        out[box.relative_to(goal)] = piece
    return out


def _only_varying(boxes: list[Box]) -> int | None:
    """The one dim along which the boxes lie, if there is one."""
    if len(boxes) == 1:
        return 0 if boxes[0].sizes else None
    dims = {d for box in boxes for d, at in enumerate(box.offsets) if at != boxes[0].offsets[d]}
    return dims.pop() if len(dims) == 1 else None


@lru_cache(maxsize=4096)
def _program(ranks: Ranks, rank: int, held: tuple[Box, ...], wanted: tuple[Box, ...]) -> _Program:
    travels = False
    sends: list[list[Box]] = [[] for _ in ranks]
    recvs: list[list[Box]] = [[] for _ in ranks]
    holders: dict[Box, list[int]] = {}
    for index, box in enumerate(held):
        holders.setdefault(box, []).append(index)
    for receiver, goal in enumerate(wanted):
        for box, owners in holders.items():
            part = box.intersect(goal)
            if part is None:
                continue
            sender = receiver if receiver in owners else owners[receiver % len(owners)]
            travels = travels or sender != receiver
            if ranks[sender] == rank:
                sends[receiver].append(part)
            if ranks[receiver] == rank:
                recvs[sender].append(part)
    return _Program(tuple(map(tuple, sends)), tuple(map(tuple, recvs)), travels)
