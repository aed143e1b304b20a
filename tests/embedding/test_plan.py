"""Plans of embedding collections: blocks, stacks and requests."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise._layout import Boxes, Layout, Mesh, OnRanks, Partial, Placement, Replicate, Shard
from shardwise.embedding.exchange.routes import make_routes
from shardwise.embedding.kernels import Kernels
from shardwise.embedding.plan import Block, Plan, Table, make_plan
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
DRAWN = st.tuples(st.sampled_from(PLACEMENTS), st.integers(1, 9), st.integers(1, 8))


def all_blocks(plan: Plan) -> list[Block]:
    return [b for rank in plan.ranks for table in range(len(plan.tables)) for b in plan.blocks_of(rank, table)]


@given(st.lists(DRAWN, min_size=1, max_size=5))
def test_blocks_fill_stacks_and_cover_tables(tables: list[tuple[tuple[Placement, Placement], int, int]]) -> None:
    layouts = [Layout(MESH, placements, (rows, cols)) for placements, rows, cols in tables]
    plan = make_plan([Table(f"t{i}", layout, "float32", (f"f{i}",)) for i, layout in enumerate(layouts)])
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
        ([Partial()], one, "a table cannot be Partial"),
        ([widths], one, "rank 0 holds boxes of several widths"),
    ):
        with pytest.raises(PlanError, match=why):
            make_plan([good, Table("bad", Layout(mesh, placements, (4, 4)), "float32", ("g",))])


@pytest.mark.parametrize("sizes", [(3, 3, 1), (3, 3, 0), (2, 5, 0), (2, 2, 3), (0, 4, 3), (7, 0, 0)])
def test_intervals_found_by_division_are_those_of_the_ids(sizes: tuple[int, ...]) -> None:
    layout = Layout(Mesh((3,)), [Shard(0, sizes=sizes)], (sum(sizes), 4))
    plan = make_plan([Table(f"t{i}", layout, "float32", (f"f{i}",)) for i in range(2)])
    requests = make_routes(plan, 0, torch.device("cpu"), Kernels())
    assert (requests.sizes is not None) == (sizes in [(3, 3, 1), (3, 3, 0), (0, 4, 3), (7, 0, 0)])
    if requests.sizes is not None:
        for feature, size in enumerate(requests.sizes):
            first = requests.feature_of.tolist().index(feature)
            for row in range(sum(sizes)):
                interval = int(torch.searchsorted(requests.starts, requests.base[feature] + row, right=True)) - 1
                assert first + row // size == interval
