"""Sharded tables with another number of rows: a new plan, new stacks, and the rows that change their owners.

    old plan: rank 0 has rows 0 to 4, rank 1 rows 5 to 9      new plan, of 14 rows: 0 to 6, and 7 to 13
    moves: rows 0 to 4 stay on rank 0, 5 and 6 go from rank 1 to rank 0, 7 to 9 stay on rank 1

A rank that holds rows already copies them; of several replicas, one sends. Messages are of some rows at a time, so a
rank needs little memory beside its old and new blocks.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Boxes, Layout, Placements, Shard, as_placements
from shardwise.embedding.configs import EmbeddingConfig
from shardwise.embedding.kernels import Stack
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.embedding.plan import Blocks, Ints, Plan, Table, make_plan
from shardwise.embedding.tables import fill, new_rows
from shardwise.errors import PlanError

MOST_BYTES = 1 << 24  # that a rank sends, or receives, at a time


def resized_plan(
    old: Plan,
    configs: Sequence[EmbeddingConfig],
    changed: Sequence[int],
    placements: Mapping[str, Placements],
    optimizers: Sequence[RowOptimizer],
) -> Plan:
    """The plan of the tables of `configs`, of which the `changed` ones have other rows.

    Args:
        placements: of some of these, by name; others keep theirs.
        optimizers: of each group, or none.

    Raises:
        PlanError: placements of no changed table, or that do not fit.
    """
    tables = list(old.tables)
    for name in placements:
        if name not in {configs[number].name for number in changed}:
            raise PlanError(f"The plan has {name!r}, which is not resized. Fix: sizes={{{name!r}: …}}.")
    for number in changed:
        table = tables[number]
        layout = _layout(table, configs[number], placements.get(table.name))
        tables[number] = replace(table, layout=layout)
    new = make_plan(tables)
    for number in changed:
        if optimizers and optimizers[tables[number].group].of_rows:
            _check_columns(old, new, number)
    return new


def _layout(table: Table, config: EmbeddingConfig, given: Placements | None) -> Layout:
    """The layout of a table with the rows of `config`: of new placements, or of those that it has."""
    old = table.layout
    placements = old.placements if given is None else as_placements(old.mesh, given)
    if given is None and any(
        isinstance(p, Boxes) or (isinstance(p, Shard) and p.dim == 0 and p.sizes is not None) for p in placements
    ):
        raise PlanError(
            f"Table {table.name} is {list(placements)}, which fits {old.shape[0]} rows; the new table has "
            f"{config.num_embeddings}. Fix: plan={{{table.name!r}: …}} with the placements of the new table."
        )
    return Layout(old.mesh, placements, (config.num_embeddings, config.embedding_dim))


def _check_columns(old: Plan, new: Plan, table: int) -> None:
    """Whether ranks hold the same columns of a table in both plans, as its states of rows need."""
    columns = [
        np.unique(np.stack([plan.blocks.col, plan.blocks.cols], 1)[plan.blocks.table == table], axis=0).tolist()
        for plan in (old, new)
    ]
    if columns[0] != columns[1]:
        raise PlanError(
            f"Table {old.tables[table].name} has a state for each row and shard of columns, and the plan changes these "
            f"shards. Fix: shard its columns as they are."
        )


def resized_stacks(
    old: Plan,
    new: Plan,
    stacks: Sequence[Stack],
    changed: Collection[int],
    configs: Sequence[EmbeddingConfig],
    optimizers: Sequence[RowOptimizer],
    seed: int,
) -> list[Stack]:
    """The stacks of `new`, with the rows and states of those of `old`. All ranks have to call it.

    A stack without rows of changed tables stays as it is; others are new memory.

    Args:
        changed: the tables whose layouts differ.
        optimizers: of each group, or none.
        seed: of new rows.
    """
    rank = collectives.rank()
    made = [_new_stack(old, new, number, stacks, changed, optimizers) for number in range(len(new.keys))]
    names = {name for stack in made for name in stack.states}
    for table, config in enumerate(configs):
        if table in changed:
            moves = moves_of(old, new, table)
            move(moves, [stack.weight for stack in stacks], [stack.weight for stack in made], new.ranks)
            group = new.tables[table].group
            for name in sorted(names):
                if optimizers and name in (*optimizers[group].of_elements, *optimizers[group].of_rows):
                    of_state = moves if name in optimizers[group].of_elements else moves.of_rows()
                    move(of_state, _states(stacks, name), _states(made, name), new.ranks)
            before = old.tables[table].layout.shape[0]
            for block in new.blocks_of(rank, table):
                first, stop = max(block.rows.start, before), block.rows.stop
                if first < stop:
                    at = block.first + first - block.rows.start
                    into = made[block.stack].weight[at : at + stop - first]
                    fill(into, replace(block, rows=range(first, stop)), new_rows(config, seed + table))
            continue
        for have, want in zip(old.blocks_of(rank, table), new.blocks_of(rank, table), strict=True):
            source, target, size = stacks[have.stack], made[want.stack], len(want.rows)
            if source.weight is not target.weight:
                pairs = [(source.weight, target.weight), *((source.states[n], x) for n, x in target.states.items())]
                for found, into in pairs:
                    into[want.first : want.first + size] = found[have.first : have.first + size]
    return made


def _states(stacks: Sequence[Stack], name: str) -> list[Tensor]:
    nothing = torch.zeros(0, 0)  # of stacks of other groups
    return [stack.states.get(name, nothing) for stack in stacks]


def _new_stack(
    old: Plan,
    new: Plan,
    number: int,
    stacks: Sequence[Stack],
    changed: Collection[int],
    optimizers: Sequence[RowOptimizer],
) -> Stack:
    """A stack of `new`: the memory of the old one if it has no rows of changed tables, else new memory."""
    rank, key = collectives.rank(), new.keys[number]
    if key in old.keys:
        before = old.keys.index(key)
        in_both = ((old, before), (new, number))
        if not any(b.stack == n for plan, n in in_both for t in changed for b in plan.blocks_of(rank, t)):
            return Stack(stacks[before].weight, stacks[0].kernels, stacks[before].states, key.group)
    rows = int(new.stack_rows[new.ranks.index(rank), number])
    weight = torch.empty(rows, key.cols, dtype=getattr(torch, key.dtype), device=stacks[0].weight.device)
    states = optimizers[key.group].new_states(weight) if optimizers else {}
    return Stack(weight, stacks[0].kernels, states, key.group)


def refuse_old_rows(gradients: object) -> NoReturn:
    """What updates the rows of a plan that a collection no longer has."""
    raise PlanError(
        "The collection was resized between forward and backward, so these gradients are of rows that may be elsewhere "
        "now. Nothing was updated. Fix: backward() before resize_."
    )


# ---- moving rows ----------------------------------------------------------------------------------------------


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
