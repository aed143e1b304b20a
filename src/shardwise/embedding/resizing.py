"""Sharded tables with another number of rows: a new plan, new stacks, and the rows that change their owners.

    old plan: rank 0 has rows 0 to 4, rank 1 rows 5 to 9      new plan, of 14 rows: 0 to 6, and 7 to 13
    rows 0 to 4 stay on rank 0, 5 and 6 go from rank 1 to rank 0, 7 to 9 stay on rank 1

A rank that holds rows already copies them; of several replicas, one sends. Messages are of some rows at a time, so a
rank needs little memory beside its old and new blocks.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Box, Boxes, Layout, Placements, Shard, as_placements
from shardwise._redistribute.transfers import fetch
from shardwise._trace.comm_trace import Cause
from shardwise.embedding.configs import EmbeddingConfig
from shardwise.embedding.exchange.owner import new_stack
from shardwise.embedding.kernels import Stack
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.embedding.plan import Plan, Table, make_plan
from shardwise.embedding.tables import fill, new_rows
from shardwise.errors import PlanError

MOST_BYTES = 1 << 24  # the most bytes that a rank sends, or receives, at a time
NO_ROWS = Box((0, 0), (0, 0))
CAUSE = Cause("internal", "resize_ of an embedding collection")


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
            raise PlanError(f"The plan has {name!r}, but sizes does not. Fix: sizes={{{name!r}: …}}.")
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
            _move(old, new, table, [stack.weight for stack in stacks], [stack.weight for stack in made])
            group = new.tables[table].group
            for name in sorted(names):
                if optimizers and name in (*optimizers[group].of_elements, *optimizers[group].of_rows):
                    of_rows = name in optimizers[group].of_rows
                    _move(old, new, table, _states(stacks, name), _states(made, name), of_rows)
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
    nothing = torch.zeros(0, 0)  # stacks of other groups have no such state
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
    return new_stack(new, rank, number, stacks[0].weight.device, stacks[0].kernels, optimizers)


# ---- rows that change their owners --------------------------------------------------------------------------------


def _move(
    old: Plan, new: Plan, table: int, sources: Sequence[Tensor], targets: Sequence[Tensor], of_rows: bool = False
) -> None:
    """Copy the rows that both plans have from old stacks to new ones, of this rank and others. All ranks call it.

    Args:
        sources, targets: of each stack of this rank, [rows, columns]; those of the table have one dtype.
        of_rows: whether they have one number for each row. Then ranks hold the same columns in both plans.
    """
    ranks, rank = new.ranks, collectives.rank()
    held, wanted = (_boxes(plan, table, of_rows) for plan in (old, new))
    xs, own = (
        [stacks[block.stack][block.first : block.first + len(block.rows)] for block in plan.blocks_of(rank, table)]
        for plan, stacks in ((old, sources), (new, targets))
    )
    dtype = torch.float32 if of_rows else getattr(torch, old.tables[table].dtype)
    most = max(map(len, held))  # boxes of a rank
    xs += [torch.empty(0, dtype=dtype, device=targets[0].device)] * (most - len(xs))
    by_number = tuple(tuple(boxes[k] if k < len(boxes) else NO_ROWS for boxes in held) for k in range(most))
    full = Box((0, 0), old.tables[table].layout.shape)
    divided = [[full]] if most == 1 else [list(dict.fromkeys(boxes)) for boxes in by_number]
    step = _rows_of_message(held, wanted, dtype.itemsize)
    for first in range(0, max(box.sizes[0] for boxes in wanted for box in boxes), step):
        parts = [
            [
                (index, (k, part))
                for index, box in enumerate(boxes)
                for k, others in enumerate(divided)
                for other in others
                if (part := other.intersect(box.along(0, box.offsets[0] + first, min(step, box.sizes[0] - first))))
            ]
            for boxes in wanted
        ]
        goals = tuple(tuple(goal for _, goal in of_rank) for of_rank in parts)
        mine = ranks.index(rank)
        for (index, (_, part)), found in zip(parts[mine], fetch(xs, ranks, rank, by_number, goals, CAUSE), strict=True):
            own[index][part.relative_to(wanted[mine][index])] = found


def _boxes(plan: Plan, table: int, of_rows: bool) -> list[list[Box]]:
    """The boxes of a table on each rank, or those of a state with one number for each row."""
    layout = plan.tables[table].layout
    boxes = [[box for box in layout.boxes(rank) if box.numel] for rank in plan.ranks]
    return [[box.along(1, box.offsets[1], 1) for box in of_rank] for of_rank in boxes] if of_rows else boxes


def _rows_of_message(held: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]], element_size: int) -> int:
    """How many rows of each box are sent at a time, so that a rank sends and receives at most `MOST_BYTES`."""
    first = np.sort([box.offsets[0] for boxes in wanted for box in boxes])
    stop = np.sort([box.offsets[0] + box.sizes[0] for boxes in wanted for box in boxes])
    most = max(
        int(np.searchsorted(first, box.offsets[0] + box.sizes[0]) - np.searchsorted(stop, box.offsets[0], "right"))
        for boxes in held
        for box in boxes
    )  # boxes that want rows of one that is held
    columns = max(box.sizes[1] for boxes in wanted for box in boxes)
    return max(1, MOST_BYTES // (max(most, *map(len, wanted)) * columns * element_size))
