import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shardwise._layout import (
    Boxes,
    Layout,
    Mesh,
    OnRanks,
    Partial,
    Placement,
    Replicate,
    Shard,
    as_placements,
    contiguous_strides,
)
from shardwise.errors import LayoutError

LINE = Mesh((4,))
GRID = Mesh((2, 3), names=("dp", "tp"))
TABLE = Boxes([[((0, 0), (2, 3))], [], [((2, 0), (1, 3)), ((3, 2), (2, 1))], [((3, 0), (2, 2))]])


def spans(layout: Layout) -> list[str]:
    return [" ".join(map(str, layout.boxes(rank))) for rank in layout.mesh.ranks]


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (Replicate(), ["[0:5, 0:3]"] * 4),
        (Partial(), ["[0:5, 0:3]"] * 4),
        (Shard(0), ["[0:2, 0:3]", "[2:4, 0:3]", "[4:5, 0:3]", "[5:5, 0:3]"]),
        (Shard(-1), ["[0:5, 0:1]", "[0:5, 1:2]", "[0:5, 2:3]", "[0:5, 3:3]"]),
        (Shard(0, [1, 3, 0, 1]), ["[0:1, 0:3]", "[1:4, 0:3]", "[4:4, 0:3]", "[4:5, 0:3]"]),
        (OnRanks(2), ["", "", "[0:5, 0:3]", ""]),
        (TABLE, ["[0:2, 0:3]", "", "[2:3, 0:3] [3:5, 2:3]", "[3:5, 0:2]"]),
    ],
    ids=str,
)
def test_one_axis_divides_a_tensor(placement: Placement, expected: Sequence[str]) -> None:
    assert spans(Layout(LINE, [placement], (5, 3))) == expected


def test_an_inner_axis_cuts_unequal_pieces_by_one_row_of_sizes_each() -> None:
    layout = Layout(GRID, [Shard(0, [3, 5]), Shard(0, [[0, 1, 2], [5, 0, 0]])], (8,))
    assert spans(layout) == ["[0:0]", "[0:1]", "[1:3]", "[3:8]", "[8:8]", "[8:8]"]
    assert layout.shard_sizes(0) == (3, 5)
    assert layout.shard_sizes(1) == ((0, 1, 2), (5, 0, 0))


def test_ranks_on_partial_axes_hold_different_contributions() -> None:
    layout = Layout(GRID, [Partial(), Shard(0)], (7,))
    assert layout.partial_axes == (0,)
    assert [layout.partial_coordinate(rank) for rank in range(7)] == [(0,), (0,), (0,), (1,), (1,), (1,), ()]


def test_a_derived_layout_keeps_the_rest() -> None:
    layout = Layout(GRID, [Shard(0), Shard(0)], (8,), (1, 0))
    assert layout.replace(shape=(9,)) == Layout(GRID, [Shard(0), Shard(0)], (9,), (1, 0))
    assert layout.replace([Replicate(), Shard(0)]) == Layout(GRID, [Replicate(), Shard(0)], (8,))
    assert layout.with_axis(1, Partial()) == Layout(GRID, [Shard(0), Partial()], (8,))
    assert layout.replace() == layout


def test_a_layout_knows_whether_it_is_replicated_its_strides_and_its_text() -> None:
    assert Layout(GRID, [Replicate(), Replicate()], (3,)).is_replicated
    assert not Layout(GRID, [Replicate(), Partial()], (3,)).is_replicated
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides((2, 0, 4)) == (4, 4, 1)
    assert contiguous_strides(()) == ()
    Layout(GRID, [Partial("sum"), Partial("avg")], (4,))
    assert repr(Layout(GRID, [Shard(0), Shard(-1)], (8,), (1, 0))) == (
        "Layout((8,) as {'dp': Shard(0), 'tp': Shard(0)} on Mesh(dp=2, tp=3), shard_order=(1, 0))"
    )
    assert repr(Layout(LINE, [Partial("max")], ())) == "Layout(() as [Partial('max')] on Mesh(0=4))"


def test_placements_by_axis_name_are_those_of_a_sequence() -> None:
    assert as_placements(GRID, {"tp": Shard(0), "dp": Partial()}) == (Partial(), Shard(0))
    assert as_placements(GRID, {"tp": Shard(0)}) == (Replicate(), Shard(0))
    assert as_placements(GRID, {}) == as_placements(GRID, None) == (Replicate(), Replicate())
    by_name = Layout(GRID, {"tp": Shard(0), "dp": Shard(1)}, (4, 6))
    assert by_name is Layout(GRID, [Shard(1), Shard(0)], (4, 6))
    assert by_name.replace({"tp": Shard(1)}) is Layout(GRID, [Replicate(), Shard(1)], (4, 6))


def test_the_kind_of_a_layout_leaves_sizes_out() -> None:
    def kind(placement: Placement, *shape: int) -> object:
        return Layout(LINE, [placement], shape).kind

    assert kind(Shard(0), 8, 3) == kind(Shard(0), 5, 1) == kind(Shard(-2, [1, 3, 0, 1]), 5, 3)
    different = {kind(p, 8, 3) for p in (Shard(0), Shard(1), Partial(), OnRanks(1), Replicate())}
    assert len(different | {kind(Shard(0), 8)}) == 6


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Layout(LINE, [Shard(0)], (5, 3)), Layout(LINE, [Shard(-2, [[2, 2, 1, 0]])], [5, 3])),
        (Layout(LINE, [Shard(0)], (5, 3)), Layout(Mesh((4,), (0, 1, 2, 3)), (Shard(0),), (5, 3), (0,))),
        (
            Layout(GRID, [Shard(0), Shard(0, [1, 0, 3])], (8,)),
            Layout(GRID, [Shard(0), Shard(0, [[1, 0, 3], [1, 0, 3]])], (8,)),
        ),
    ],
)
def test_layouts_written_differently_are_equal(one: Layout, other: Layout) -> None:
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == repr(other)


def test_layouts_that_differ_in_anything_are_unequal() -> None:
    layouts = [
        Layout(LINE, [Shard(0)], (5, 3)),
        Layout(LINE, [Shard(1)], (5, 3)),
        Layout(LINE, [Shard(0, [1, 2, 2, 0])], (5, 3)),
        Layout(LINE, [Shard(0)], (5, 4)),
        Layout(LINE, [Replicate()], (5, 3)),
        Layout(Mesh((4,), (3, 2, 1, 0)), [Shard(0)], (5, 3)),
        Layout(Mesh((4,), names=("dp",)), [Shard(0)], (5, 3)),
        Layout(Mesh((4,), device_type="cuda"), [Shard(0)], (5, 3)),
        Layout(GRID, [Shard(0), Shard(0)], (5, 3)),
        Layout(GRID, [Shard(0), Shard(0)], (5, 3), (1, 0)),
    ]
    assert len(set(layouts)) == len(layouts)
    assert layouts[0] != "a layout"


@pytest.mark.parametrize("name", ["mesh", "placements", "shape", "shard_order", "kind", "new"])
def test_a_layout_is_frozen(name: str) -> None:
    layout = Layout(LINE, [Shard(0)], (5, 3))
    with pytest.raises(AttributeError) as caught:
        setattr(layout, name, ())
    fix = "make a new one, such as by replace()"
    assert str(caught.value) == f"A Layout is frozen, so {name} cannot be set. Fix: {fix}."


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])  # noqa: S301
def test_a_copied_or_pickled_layout_is_the_same_value(again: Callable[[Layout], Layout]) -> None:
    for layout in [
        Layout(GRID, [Shard(0), Shard(0, [[0, 1, 3], [1, 1, 2]])], (8,)),
        Layout(GRID, [Shard(0), Shard(0)], (8,), (1, 0)),
        Layout(LINE, [TABLE], (5, 3)),
    ]:
        assert again(layout) == layout
        assert hash(again(layout)) == hash(layout)
        assert again(layout).boxes(1) == layout.boxes(1)


@pytest.mark.parametrize(
    ("mesh", "placements", "shape", "text"),
    [
        (GRID, [Shard(0)], (4,), "Mesh(dp=2, tp=3) has 2, got 1: [Shard(0)]. Fix: one placement for each axis"),
        (LINE, [Shard(0)], (4, -1), "no negative sizes, got (4, -1). Fix: the size of each dim;"),
        (LINE, [Shard(2)], (4, 4), "on axis 0: a tensor of shape (4, 4) has no dim 2. Fix: Shard(0) to Shard(1)."),
        (LINE, [Shard(-3)], (4, 4), "on axis 0: a tensor of shape (4, 4) has no dim -3. Fix: Shard(0) to Shard(1)."),
        (LINE, [Shard(0)], (), "a tensor of shape () has no dim 0. Fix: Replicate(), as a number cannot be sharded."),
        (LINE, [Shard(0, [2, 3])], (5,), "on axis 0: 4 positions need 4 sizes, got 2. Fix: one size for each, 0 where"),
        (LINE, [Shard(0, ())], (0,), "on axis 0: 4 positions need 4 sizes, got 0. Fix: one size for each, 0 where"),
        (LINE, [Shard(1, [2, 3, 0, 0])], (9, 6), "add up to 5, but dim 1 has 6 elements here (global shape (9, 6))"),
        (GRID, [Shard(0), Shard(0, [[1, 2, 1]] * 3)], (8,), "2 outer shards of dim 0 need 2 tuples of sizes, got 3."),
        (GRID, [Shard(0), Shard(0, [1, 2, 1])], (7,), "sizes (1, 2, 1) add up to 4, but dim 0 has 3 elements here"),
        (LINE, [OnRanks(4)], (4,), "OnRanks(4) on axis 0 of Mesh(0=4): positions are 0 to 3. Fix: "),
        (LINE, [OnRanks(-1)], (4,), "OnRanks(-1) on axis 0 of Mesh(0=4): positions are 0 to 3. Fix: "),
        (GRID, [Partial("max"), Partial()], (4,), "got {'dp': Partial('max'), 'tp': Partial('sum')}: a sum of maxima"),
        (
            GRID,
            ["Shard(0)", Replicate()],
            (4,),
            "Axis 0 needs a placement such as Shard(0) or Replicate(), got 'Shard(0)'",
        ),
        (GRID, {"tp": 0}, (4,), "Axis 1 needs a placement"),
        (GRID, [Shard(0), Boxes([[((0,), (4,))], [], []])], (4,), "Boxes on axis 1 allow only Replicate() and Partial"),
        (LINE, [Boxes([[((0,), (4,))]])], (4,), "Boxes on axis 0: 4 positions need as many lists of boxes, got 1."),
        (LINE, [Boxes([[((0,), (2,))], [((1,), (3,))], [], []])], (4,), "[1:4] (position 1) share [1:2]. Fix: "),
        (GRID, {"tq": Shard(0)}, (4,), "no axis 'tq', got placements {'tq': Shard(0)}. Fix: use its axis names 'dp', "),
        (LINE, {"tp": Shard(0)}, (4,), "no axis names, got placements by name: {'tp': Shard(0)}. Fix: name its axes"),
    ],
)
def test_placements_that_do_not_describe_the_tensor_are_refused(
    mesh: Mesh, placements: Any, shape: tuple[int, ...], text: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout(mesh, placements, shape)
    assert text in str(caught.value)


def test_an_order_of_cutting_names_each_axis_once() -> None:
    with pytest.raises(LayoutError, match=r"permutation of the mesh axes \(0, 1\), got \(0, 0\). Fix: each axis once"):
        Layout(GRID, [Shard(0), Shard(1)], (4, 4), (0, 0))
