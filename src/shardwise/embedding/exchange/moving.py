"""Rows of a table that change their owners: from the blocks of one plan to those of another.

    old plan: rank 0 has rows 0 to 4, rank 1 rows 5 to 9      new plan, of 14 rows: 0 to 6, and 7 to 13
    moves: rows 0 to 4 stay on rank 0, 5 and 6 go from rank 1 to rank 0, 7 to 9 stay on rank 1

A rank that holds rows already copies them; of several replicas, one sends. Messages are of some rows at a time, so a
rank needs little memory beside its old and new blocks.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise import collectives
from shardwise.embedding.plan import Blocks, Ints, Plan

MOST_BYTES = 1 << 24  # that a rank sends, or receives, at a time


class Moves(NamedTuple):
    """For each box that moves: from where to where in the stacks of two ranks, given by position."""

    source: Ints
    source_stack: Ints
    source_row: Ints
    source_col: Ints
    target: Ints
    target_stack: Ints
    target_row: Ints
    target_col: Ints
    rows: Ints
    cols: Ints

    def where(self, chosen: Ints) -> "Moves":
        """Some of them, by a mask or by index."""
        return Moves(*(column[chosen] for column in self))

    def of_rows(self) -> "Moves":
        """The same of states with one number for each row, where no columns change."""
        nothing, ones = np.zeros_like(self.rows), np.ones_like(self.rows)
        return self._replace(source_col=nothing, target_col=nothing, cols=ones)

    def each(self) -> Iterator["Move"]:
        """One after the other."""
        return (Move(*row) for row in zip(*(column.tolist() for column in self), strict=True))


class Move(NamedTuple):
    """One of `Moves`."""

    source: int
    source_stack: int
    source_row: int
    source_col: int
    target: int
    target_stack: int
    target_row: int
    target_col: int
    rows: int
    cols: int

    def sent(self, stacks: Sequence[Tensor], first: int, stop: int) -> Tensor:
        """Rows of the box, from `first` on, on its old owner."""
        rows = slice(self.source_row + first, self.source_row + min(stop, self.rows))
        return stacks[self.source_stack][rows, self.source_col : self.source_col + self.cols]

    def received(self, stacks: Sequence[Tensor], first: int, stop: int) -> Tensor:
        """The same on its new owner."""
        rows = slice(self.target_row + first, self.target_row + min(stop, self.rows))
        return stacks[self.target_stack][rows, self.target_col : self.target_col + self.cols]


def moves_of(old: Plan, new: Plan, table: int) -> Moves:
    """How the rows that both plans have reach their new owners; the same on all ranks."""
    have, want = _of_table(old.blocks, table), _of_table(new.blocks, table)
    boxes = np.stack([have.row, have.rows, have.col, have.cols], 1)
    distinct, box_of = np.unique(boxes, axis=0, return_inverse=True)
    found = []
    for number, (row, rows, col, cols) in enumerate(distinct.tolist()):
        top, left = np.maximum(want.row, row), np.maximum(want.col, col)
        height = np.minimum(want.row + want.rows, row + rows) - top
        width = np.minimum(want.col + want.cols, col + cols) - left
        hit = np.flatnonzero((height > 0) & (width > 0))
        holders = np.flatnonzero(box_of.reshape(-1) == number)
        own = dict(zip(have.position[holders].tolist(), holders.tolist(), strict=True))
        targets = want.position[hit].tolist()
        of = np.array([own.get(target, int(holders[target % len(holders)])) for target in targets], dtype=np.int64)
        found.append((
            have.position[of], have.stack[of], have.first[of] + top[hit] - row, left[hit] - col,
            want.position[hit], want.stack[hit], want.first[hit] + (top - want.row)[hit], (left - want.col)[hit],
            height[hit], width[hit],
        ))  # fmt: skip
    return Moves(*(np.concatenate(column).astype(np.int64) for column in zip(*found, strict=True)))


def _of_table(blocks: Blocks, table: int) -> Blocks:
    return Blocks(*(column[blocks.table == table] for column in blocks))


def move(moves: Moves, sources: Sequence[Tensor], targets: Sequence[Tensor], ranks: tuple[int, ...]) -> None:
    """Copy rows from old stacks to new ones, of this rank and of others. All ranks have to call it.

    Args:
        sources, targets: of each stack, [rows, columns]; those of the moves have one dtype.
        ranks: of the plans, in order.
    """
    here = ranks.index(collectives.rank())
    stays = moves.source == moves.target
    for one in moves.where(stays & (moves.source == here)).each():
        one.received(targets, 0, one.rows).copy_(one.sent(sources, 0, one.rows))
    moves = moves.where(~stays)
    if not len(moves.rows):
        return
    sent = moves.where(moves.source == here)
    sent = sent.where(np.argsort(sent.target, kind="stable"))
    received = moves.where(moves.target == here)
    received = received.where(np.argsort(received.source, kind="stable"))
    like = targets[int(moves.target_stack[0])]
    most = max(np.bincount(moves.source).max(), np.bincount(moves.target).max())  # boxes of a rank
    step = max(1, int(MOST_BYTES // (most * moves.cols.max() * like.element_size())))
    for first in range(0, int(moves.rows.max()), step):
        stop = first + step
        parts = [one.sent(sources, first, stop).reshape(-1) for one in sent.each() if first < one.rows]
        message = collectives.all_to_all(
            torch.cat([like.new_empty(0), *parts]),
            _elements(sent, sent.target, len(ranks), first, step),
            _elements(received, received.source, len(ranks), first, step),
            ranks,
        )
        done = 0
        for into in (one.received(targets, first, stop) for one in received.each() if first < one.rows):
            into.copy_(message[done : done + into.numel()].view(into.shape))
            done += into.numel()


def _elements(moves: Moves, others: Ints, count: int, first: int, step: int) -> list[int]:
    """How many elements of a step are exchanged with each rank."""
    elements = (moves.rows - first).clip(0, step) * moves.cols
    return [int(n) for n in np.bincount(others, elements, count)]
