"""Moves between all pairs of layouts, on simulated ranks: value, gradient and bytes equal one process.

The 1-D products are complete; of those on grids and between meshes a fixed sample runs.
"""

import random
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout import REDUCE_OPS, Boxes, Layout, Mesh, OnRanks, Partial, Placement
from tests.redistribute.one_process import Case, assert_equal_to_one_process
from tests.strategies import Written, laws, layouts, meshes, small_layouts

pytestmark = pytest.mark.slow


def dealt_rows(shape: tuple[int, ...], positions: int) -> Boxes:
    """The last rows, then some of the first for the last position; others for the first; none between."""
    rows, rest = shape[0], shape[1:]
    cuts = [(rows // 2, rows), (0, rows // 4), (rows // 4, rows // 2)]
    boxes = [((start, *[0] * len(rest)), (stop - start, *rest)) for start, stop in cuts]
    hands: list[list[tuple[Sequence[int], Sequence[int]]]] = [[] for _ in range(positions)]
    hands[-1] += boxes[:2]
    hands[0].append(boxes[2])
    return Boxes(hands)


def line_layouts(mesh: Mesh, shape: tuple[int, ...]) -> list[Layout]:
    more: list[Placement] = [OnRanks(0), *(Partial(op) for op in REDUCE_OPS if op != "sum")]
    more += [dealt_rows(shape, mesh.size())] if shape else []
    found = [written.layout for written in small_layouts(mesh, shape)]
    return list(dict.fromkeys([*found, *(Layout(mesh, [p], shape) for p in more)]))


def grid_layouts(mesh: Mesh, shape: tuple[int, ...]) -> list[Layout]:
    """All combinations of placements, with sums and maxima, in both orders; boxes on the last axis."""
    sums = [written.layout for written in small_layouts(mesh, shape)]
    maxima = [
        layout.replace([Partial("max") if p == Partial() else p for p in layout.placements])
        for layout in sums
        if layout.partial_axes
    ]
    boxes = dealt_rows(shape, mesh.shape[-1])
    full = [Layout(mesh, [*layout.placements[:-1], boxes], shape) for layout in sums if layout.is_replicated]
    return list(dict.fromkeys([*sums, *maxima, *full]))


LINES = [Mesh((1,)), Mesh((2,)), Mesh((3,), (2, 0, 1)), Mesh((5,))]


@pytest.mark.parametrize("shape", [(5, 3), (4,), (0, 2), ()], ids=str)
@pytest.mark.parametrize("mesh", LINES, ids=str)
def test_every_move_along_one_axis(mesh: Mesh, shape: tuple[int, ...]) -> None:
    pairs = list(product(line_layouts(mesh, shape), repeat=2))
    assert assert_equal_to_one_process([Case(a, b, i) for i, (a, b) in enumerate(pairs)]) == len(pairs)


@pytest.mark.parametrize("shape", [(5, 3), (3,), (2, 0)], ids=str)
@pytest.mark.parametrize("mesh", [Mesh((2, 2)), Mesh((2, 3), (5, 4, 3, 0, 1, 2))], ids=str)
def test_moves_on_a_grid(mesh: Mesh, shape: tuple[int, ...]) -> None:
    draw = random.Random(0)
    found = grid_layouts(mesh, shape)
    assert_equal_to_one_process([Case(draw.choice(found), draw.choice(found), i) for i in range(150)])


MESH_PAIRS = {
    "to other ranks in the same places": (Mesh((3,)), Mesh((3,), (2, 0, 1))),
    "from some ranks to all": (Mesh((2,), (2, 0)), Mesh((4,))),
    "from all ranks to some": (Mesh((4,)), Mesh((2,), (2, 1))),
    "to ranks that had nothing": (Mesh((2,), (0, 3)), Mesh((3,), (4, 2, 1))),
    "to another grid of the same ranks": (Mesh((2, 2)), Mesh((4,), (3, 1, 2, 0))),
    "from a grid to a larger one": (Mesh((1, 3), (0, 4, 1)), Mesh((2, 3))),
}


@pytest.mark.parametrize("case", MESH_PAIRS)
def test_moves_between_meshes(case: str) -> None:
    draw = random.Random(0)
    old, new = (
        {shape: (line_layouts if mesh.ndim == 1 else grid_layouts)(mesh, shape) for shape in [(5, 3), (4,)]}
        for mesh in MESH_PAIRS[case]
    )
    cases = [Case(draw.choice(old[s]), draw.choice(new[s]), i) for i in range(50) for s in old]
    assert assert_equal_to_one_process(cases) == 100


@laws
@given(layouts(), st.data())
def test_a_move_between_any_layouts_of_a_mesh(written: Written, data: st.DataObject) -> None:
    other = data.draw(layouts(mesh=written.mesh, shape=written.shape))
    assert_equal_to_one_process([Case(written.layout, other.layout)])


@laws
@given(meshes(world=7), meshes(world=7), st.data())
def test_a_move_between_any_layouts_of_two_meshes(old: Mesh, new: Mesh, data: st.DataObject) -> None:
    written = data.draw(layouts(mesh=old))
    other = data.draw(layouts(mesh=new, shape=written.shape))
    assert_equal_to_one_process([Case(written.layout, other.layout)])
