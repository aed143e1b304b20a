"""Plans of embedding collections: blocks, stacks and requests."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise._layout import Boxes, Layout, Mesh, OnRanks, Partial, Placement, Replicate, Shard
from shardwise.embedding.plan import Block, Plan, Table, make_plan, requests_of
from shardwise.errors import PlanError

MESH = Mesh((2, 3))
PLACEMENTS: tuple[tuple[Placement, Placement], ...] = (
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
    (OnRanks(1), Shard(0)),
    (OnRanks(0), Shard(1)),
    (Replicate(), Shard(0)),
    (Replicate(), Replicate()),
    (Shard(0), OnRanks(2)),
    (Shard(1), Shard(1)),
)
TABLES = st.lists(
    st.tuples(st.sampled_from(PLACEMENTS), st.integers(1, 9), st.integers(1, 8), st.integers(1, 2)),
    min_size=1,
    max_size=5,
)


def plan_of(tables: list[tuple[tuple[Placement, Placement], int, int, int]]) -> Plan:
    return make_plan(
        [
            Table(
                f"t{i}", Layout(MESH, placements, (rows, cols)), "float32", tuple(f"f{i}{j}" for j in range(features))
            )
            for i, (placements, rows, cols, features) in enumerate(tables)
        ]
    )


def all_blocks(plan: Plan) -> list[Block]:
    return [b for rank in plan.ranks for table in range(len(plan.tables)) for b in plan.blocks_of(rank, table)]


class Request(NamedTuple):
    owner: int
    stack: int
    feature: int
    interval: int
    shift: int
    column: int
    width: int
    replies: int


@given(TABLES)
def test_blocks_fill_stacks_and_cover_tables(tables: list[tuple[tuple[Placement, Placement], int, int, int]]) -> None:
    plan = plan_of(tables)
    for position, rank in enumerate(plan.ranks):
        for stack, rows in enumerate(plan.stack_rows[position]):
            own = [b for b in all_blocks(plan) if b.rank == rank and b.stack == stack]
            assert sorted(row for b in own for row in range(b.first, b.first + len(b.rows))) == list(range(rows))
            assert {len(b.cols) for b in own} <= {plan.keys[stack].cols}
    for number, table in enumerate(plan.tables):
        held = sum(len(b.rows) * len(b.cols) for b in all_blocks(plan) if b.table == number)
        copies = 1
        for axis in table.replicated:
            copies *= MESH.shape[axis]
        assert held == copies * table.layout.shape[0] * table.layout.shape[1]


@given(TABLES, st.sampled_from(range(6)))
def test_each_element_of_a_row_is_answered_once_and_all_its_copies_get_gradients(
    tables: list[tuple[tuple[Placement, Placement], int, int, int]], rank: int
) -> None:
    plan = plan_of(tables)
    requests = requests_of(plan, rank)
    sent = [Request(*fields) for fields in zip(*(column.tolist() for column in requests.sent), strict=True)]
    assert sent == sorted(sent)
    ends = [*requests.starts.tolist()[1:], int(requests.rows.sum())]
    for feature, number in enumerate(plan.table_of):
        table = plan.tables[number]
        copies = 1
        for axis in table.replicated:
            copies *= MESH.shape[axis]
        for row in range(table.layout.shape[0]):
            g = int(requests.base[feature]) + row
            found = [r for r in sent if requests.starts[r.interval] <= g < ends[r.interval] and r.feature == feature]
            replied = [c for r in found if r.replies for c in range(r.column, r.column + r.width)]
            assert sorted(replied) == list(range(table.layout.shape[1]))
            assert sum(r.width for r in found) == copies * table.layout.shape[1]
            for r in found:
                block = next(
                    b
                    for b in plan.blocks_of(plan.ranks[r.owner], number)
                    if row in b.rows and r.column in b.cols and b.stack == r.stack
                )
                assert g + r.shift == block.first + row - block.rows.start


@pytest.mark.parametrize("sizes", [(3, 3, 1), (3, 3, 0), (2, 5, 0), (2, 2, 3), (0, 4, 3), (7, 0, 0)])
def test_intervals_found_by_division_are_those_of_the_ids(sizes: tuple[int, ...]) -> None:
    rows = sum(sizes)
    placement = Shard(0, sizes=sizes)
    tables = [Table(f"t{i}", Layout(Mesh((3,)), [placement], (rows, 4)), "float32", (f"f{i}",)) for i in range(2)]
    requests = requests_of(make_plan(tables), 0)
    for feature in range(2):
        of_feature = [i for i, f in enumerate(requests.feature_of) if f == feature]
        for row in range(rows):
            interval = int(np.searchsorted(requests.starts, requests.base[feature] + row, side="right")) - 1
            if requests.sizes is not None:
                assert of_feature[0] + row // requests.sizes[feature] == interval
    assert (requests.sizes is not None) == (sizes in [(3, 3, 1), (3, 3, 0), (0, 4, 3), (7, 0, 0)])


def test_the_unit_divides_widths_and_offsets_of_all_blocks() -> None:
    tables = [
        Table(f"t{i}", Layout(Mesh((2,)), [Shard(1)], (3, n)), "float32", (f"f{i}",)) for i, n in enumerate((64, 48))
    ]
    assert make_plan(tables).unit == 8  # 32 and 24 columns


def test_tables_that_cannot_be_looked_up_are_refused() -> None:
    one, two = Mesh((2,)), Mesh((1, 2))
    good = Table("good", Layout(one, [Shard(0)], (4, 4)), "float32", ("f",))
    widths = Boxes([[((0, 0), (4, 1)), ((0, 1), (4, 3))], []])
    for placements, mesh, why in (
        ([Shard(0), Shard(0)], two, "different meshes"),
        ([Partial()], one, "a pending sum has no rows"),
        ([widths], one, "rank 0 holds boxes of several widths"),
    ):
        with pytest.raises(PlanError, match=why):
            make_plan([good, Table("bad", Layout(mesh, placements, (4, 4)), "float32", ("g",))])
