"""Sharded tables with another number of rows: the stacks of a new plan, with the rows of the old one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from shardwise import collectives
from shardwise.embedding.configs import EmbeddingConfig
from shardwise.embedding.exchange.moving import move, moves_of
from shardwise.embedding.exchange.stacks import Stack
from shardwise.embedding.new_rows import fill, new_rows
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.embedding.plan import Plan, Table, make_plan
from shardwise.errors import PlanError
from shardwise.layout import Boxes, Layout, Placements, Shard, as_placements


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
            f"Table {table.name} is {list(placements)}, which divides {old.shape[0]} rows and not "
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
            return Stack(key, stacks[before].weight, stacks[0].kernels, stacks[before].states)
    rows = int(new.stack_rows[new.ranks.index(rank), number])
    weight = torch.empty(rows, key.cols, dtype=getattr(torch, key.dtype), device=stacks[0].weight.device)
    return Stack(key, weight, stacks[0].kernels, optimizers[key.group].new_states(weight) if optimizers else {})


def refuse_old_rows(gradients: object) -> NoReturn:
    """What updates the rows of a plan that a collection no longer has."""
    raise PlanError(
        "The collection was resized between forward and backward, so these gradients are of rows that may be elsewhere "
        "now. Nothing was updated. Fix: backward() before resize_."
    )
