import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shardwise._layout import (
    Box,
    Boxes,
    Layout,
    Mesh,
    OnRanks,
    Partial,
    Placement,
    Replicate,
    Shard,
    contiguous_strides,
)
from shardwise.errors import LayoutError

LINE = Mesh((4,))
GRID = Mesh((2, 3), names=("dp", "tp"))
TABLE = Boxes([[((0, 0), (2, 3))], [], [((2, 0), (1, 3)), ((3, 2), (2, 1))], [((3, 0), (2, 2))]])


def spans(layout: Layout) -> list[str]:
    return [" ".join(map(str, layout.boxes(rank))) for rank in layout.mesh.ranks]


# ---- what a rank holds, by example ------------------------------------------------------------------------


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


def test_two_axes_cut_one_dim_in_either_order() -> None:
    both = [Shard(0), Shard(0)]
    assert spans(Layout(GRID, both, (8,))) == ["[0:2]", "[2:4]", "[4:4]", "[4:6]", "[6:8]", "[8:8]"]
    assert spans(Layout(GRID, both, (8,), (1, 0))) == ["[0:2]", "[3:5]", "[6:7]", "[2:3]", "[5:6]", "[7:8]"]


def test_an_inner_axis_cuts_unequal_pieces_by_one_row_of_sizes_each() -> None:
    layout = Layout(GRID, [Shard(0, [3, 5]), Shard(0, [[0, 1, 2], [5, 0, 0]])], (8,))
    assert spans(layout) == ["[0:0]", "[0:1]", "[1:3]", "[3:8]", "[8:8]", "[8:8]"]
    assert layout.shard_sizes(0) == (3, 5)
    assert layout.shard_sizes(1) == ((0, 1, 2), (5, 0, 0))


def test_the_order_of_ranks_is_that_of_the_mesh() -> None:
    layout = Layout(Mesh((3,), (7, 0, 4)), [Shard(0)], (5,))
    assert [str(layout.boxes(rank)[0]) for rank in (7, 0, 4)] == ["[0:2]", "[2:4]", "[4:5]"]
    assert layout.boxes(1) == ()
    assert layout.local_shape(1) == (0,)


@pytest.mark.parametrize(
    ("placement", "shape", "local_shapes"),
    [
        (TABLE, (5, 3), [(2, 3), (0, 3), (5,), (2, 2)]),
        (OnRanks(0), (5, 3), [(5, 3), (0, 3), (0, 3), (0, 3)]),
        (OnRanks(0), (), [(), (0,), (0,), (0,)]),
        (Shard(0), (5, 3), [(2, 3), (2, 3), (1, 3), (0, 3)]),
        (Boxes([[((), ())], [], [], []]), (), [(), (0,), (0,), (0,)]),
    ],
    ids=str,
)
def test_local_shapes(placement: Placement, shape: tuple[int, ...], local_shapes: Sequence[tuple[int, ...]]) -> None:
    layout = Layout(LINE, [placement], shape)
    assert [layout.local_shape(rank) for rank in range(4)] == local_shapes


def test_the_cut_of_an_axis_is_its_sizes() -> None:
    layout = Layout(GRID, [Replicate(), Shard(0)], (7, 2))
    assert layout.shard_sizes(0) is None
    assert layout.shard_sizes(1) == (3, 3, 1)


def test_ranks_on_partial_axes_hold_different_contributions() -> None:
    layout = Layout(GRID, [Partial(), Shard(0)], (7,))
    assert layout.partial_axes == (0,)
    assert [layout.partial_coordinate(rank) for rank in range(7)] == [(0,), (0,), (0,), (1,), (1,), (1,), ()]
    assert layout.partial_coordinates() == [(0,), (1,)]
    assert Layout(GRID, [Replicate(), Shard(0)], (7,)).partial_coordinates() == [()]


def test_a_layout_for_4096_ranks_says_what_each_holds() -> None:
    rows, columns = 100_003, 67
    mesh = Mesh((64, 64))
    for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)]):
        layout = Layout(mesh, placements, (rows, columns))
        assert sum(layout.local_numel(rank) for rank in range(4096)) == rows * columns
    line = Layout(Mesh((4096,)), [Shard(0)], (rows,))
    assert line.boxes(4000) == (Box((100_000,), (3,)),)
    assert line.boxes(4095) == (Box((rows,), (0,)),)


# ---- derived layouts --------------------------------------------------------------------------------------


def test_the_layout_of_a_gradient() -> None:
    layout = Layout(Mesh((2, 2, 2)), [Shard(1), Replicate(), Partial("avg")], (4, 6))
    assert layout.dual() == Layout(layout.mesh, [Shard(1), Partial("sum"), Replicate()], (4, 6))
    assert layout.dual().dual() == Layout(layout.mesh, [Shard(1), Replicate(), Partial("sum")], (4, 6))


def test_a_derived_layout_keeps_the_rest() -> None:
    layout = Layout(GRID, [Shard(0), Shard(0)], (8,), (1, 0))
    assert layout.replace(shape=(9,)) == Layout(GRID, [Shard(0), Shard(0)], (9,), (1, 0))
    assert layout.replace([Replicate(), Shard(0)]) == Layout(GRID, [Replicate(), Shard(0)], (8,))
    assert layout.with_axis(1, Partial()) == Layout(GRID, [Shard(0), Partial()], (8,))
    assert layout.replace() == layout


def test_only_replicate_everywhere_is_replicated() -> None:
    assert Layout(GRID, [Replicate(), Replicate()], (3,)).is_replicated
    assert not Layout(GRID, [Replicate(), Partial()], (3,)).is_replicated


def test_the_kind_of_a_layout_leaves_sizes_out() -> None:
    def kind(placement: Placement, shape: tuple[int, ...]) -> object:
        return Layout(LINE, [placement], shape).kind

    assert kind(Shard(0), (8, 3)) == kind(Shard(0), (5, 1)) == kind(Shard(-2, [1, 3, 0, 1]), (5, 3))
    different = [
        kind(p, s)
        for p, s in [
            (Shard(0), (8, 3)),
            (Shard(1), (8, 3)),
            (Shard(0), (8,)),
            (Partial(), (8, 3)),
            (OnRanks(1), (8, 3)),
            (Replicate(), (8, 3)),
        ]
    ]
    assert len(set(different)) == len(different)


def test_a_layout_prints_all_there_is_to_know() -> None:
    assert repr(Layout(GRID, [Shard(0), Shard(-1)], (8,), (1, 0))) == (
        "Layout((8,) as {'dp': Shard(0), 'tp': Shard(0)} on Mesh(dp=2, tp=3), shard_order=(1, 0))"
    )
    assert repr(Layout(LINE, [Partial("max")], ())) == "Layout(() as [Partial('max')] on Mesh(0=4))"


def test_strides_are_those_of_a_row_major_tensor() -> None:
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides((2, 0, 4)) == (4, 4, 1)
    assert contiguous_strides(()) == ()


# ---- values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Layout(LINE, [Shard(1)], (5, 3)), Layout(LINE, [Shard(-1)], (5, 3))),
        (Layout(LINE, [Shard(0)], (5, 3)), Layout(LINE, [Shard(0, [2, 2, 1, 0])], (5, 3))),
        (Layout(LINE, [Shard(0)], (5, 3)), Layout(LINE, [Shard(-2, [[2, 2, 1, 0]])], [5, 3])),
        (Layout(LINE, [Shard(0)], (5, 3)), Layout(Mesh((4,), (0, 1, 2, 3)), (Shard(0),), (5, 3), (0,))),
        (
            Layout(GRID, [Shard(0), Shard(1)], (5, 3), (0, 1)),
            Layout(GRID, [Shard(0), Shard(1)], (5, 3), (1, 0)),
        ),
        (
            Layout(GRID, [Shard(0), Shard(0)], (8,)),
            Layout(GRID, [Shard(0, [4, 4]), Shard(0, [[2, 2, 0], [2, 2, 0]])], (8,)),
        ),
        (
            Layout(GRID, [Shard(0), Shard(0, [1, 0, 3])], (8,)),
            Layout(GRID, [Shard(0), Shard(0, [[1, 0, 3], [1, 0, 3]])], (8,)),
        ),
        (
            Layout(Mesh((2, 2, 2)), [Shard(0), Shard(1), Shard(0)], (8, 8), (2, 1, 0)),
            Layout(Mesh((2, 2, 2)), [Shard(0), Shard(1), Shard(0)], (8, 8), (1, 2, 0)),
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


# ---- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Layout(GRID, [Shard(0)], (4,)),
            (
                "One placement per mesh axis: Mesh(dp=2, tp=3) has 2, got 1: [Shard(0)]. Fix: one placement for each "
                "axis, or a dict by axis name."
            ),
        ),
        (
            lambda: Layout(GRID, [Shard(0)], (4,), (1, 0)),
            (
                "One placement per mesh axis: Mesh(dp=2, tp=3) has 2, got 1: [Shard(0)]. Fix: one placement for each "
                "axis, or a dict by axis name."
            ),
        ),
        (
            lambda: Layout(LINE, [Shard(0)], (4, -1)),
            ("A global shape has no negative sizes, got (4, -1). Fix: the size of each dim; -1 is not inferred."),
        ),
        (
            lambda: Layout(LINE, [Shard(2)], (4, 4)),
            "Shard(2) on axis 0: a tensor of shape (4, 4) has no dim 2. Fix: Shard(0) to Shard(1).",
        ),
        (
            lambda: Layout(LINE, [Shard(-3)], (4, 4)),
            "Shard(-3) on axis 0: a tensor of shape (4, 4) has no dim -3. Fix: Shard(0) to Shard(1).",
        ),
        (
            lambda: Layout(LINE, [Shard(0)], ()),
            ("Shard(0) on axis 0: a tensor of shape () has no dim 0. Fix: Replicate(), as a number cannot be sharded."),
        ),
        (
            lambda: Layout(LINE, [Shard(0, [2, 3])], (5,)),
            (
                "Shard(0, sizes=(2, 3)) on axis 0: 4 positions need 4 sizes, got 2. "
                "Fix: one size for each, 0 where nothing is held."
            ),
        ),
        (
            lambda: Layout(LINE, [Shard(0, ())], (0,)),
            (
                "Shard(0, sizes=()) on axis 0: 4 positions need 4 sizes, got 0. "
                "Fix: one size for each, 0 where nothing is held."
            ),
        ),
        (
            lambda: Layout(LINE, [Shard(1, [2, 3, 0, 0])], (9, 6)),
            (
                "Shard(1, sizes=(2, 3, 0, 0)) on axis 0: sizes (2, 3, 0, 0) add up to 5, "
                "but dim 1 has 6 elements here (global shape (9, 6)). "
                "Fix: sizes that add up to 6, or Shard(1), which divides as torch.chunk does."
            ),
        ),
        (
            lambda: Layout(GRID, [Shard(0), Shard(0, [[1, 2, 1]] * 3)], (8,)),
            (
                "Shard(0, sizes=((1, 2, 1), (1, 2, 1), (1, 2, 1))) on axis 1: 2 outer shards of dim 0 need 2 "
                "tuples of sizes, got 3. Fix: one tuple for each, which add up to [4, 4]."
            ),
        ),
        (
            lambda: Layout(GRID, [Shard(0), Shard(0, [1, 2, 1])], (7,)),
            (
                "Shard(0, sizes=(1, 2, 1)) on axis 1: sizes (1, 2, 1) add up to 4, but dim 0 has 3 elements "
                "here (global shape (7,)). Fix: sizes that add up to 3, or Shard(0), which divides as torch.chunk does."
            ),
        ),
        (
            lambda: Layout(GRID, [Shard(0), Shard(1)], (4, 4), (0, 0)),
            (
                "shard_order must be a permutation of the mesh axes (0, 1), got (0, 0). "
                "Fix: each axis once, the one that divides first in front."
            ),
        ),
        (
            lambda: Layout(GRID, [Shard(0), Shard(1)], (4, 4), (0,)),
            (
                "shard_order must be a permutation of the mesh axes (0, 1), got (0,). "
                "Fix: each axis once, the one that divides first in front."
            ),
        ),
        (
            lambda: Layout(LINE, [OnRanks(4)], (4,)),
            (
                "OnRanks(4) on axis 0 of Mesh(0=4): positions are 0 to 3. "
                "Fix: OnRanks with a position on this axis, which is not the number of a rank."
            ),
        ),
        (
            lambda: Layout(LINE, [OnRanks(-1)], (4,)),
            (
                "OnRanks(-1) on axis 0 of Mesh(0=4): positions are 0 to 3. "
                "Fix: OnRanks with a position on this axis, which is not the number of a rank."
            ),
        ),
        (
            lambda: Layout(GRID, [Partial("max"), Partial("sum")], (4,)),
            (
                "Partial placements of one tensor must reduce alike, got {'dp': Partial('max'), 'tp': Partial('sum')}: "
                "a sum of maxima is not a maximum of sums, so the order of the axes would change the value. "
                "Fix: redistribute one of these axes to Replicate() or Shard(dim) first."
            ),
        ),
        (
            lambda: Layout(GRID, ["Shard(0)", Replicate()], (4,)),  # type: ignore[list-item]
            (
                "Axis 0 needs a placement such as Shard(0) or Replicate(), got 'Shard(0)'. Fix: an object, such as "
                "Shard(0), not a string."
            ),
        ),
        (
            lambda: Layout(GRID, [Shard(0), Boxes([[((0,), (4,))], [], []])], (4,)),
            (
                "Boxes on axis 1 allow only Replicate() and Partial sums on the other axes, got "
                "{'dp': Shard(0), 'tp': Boxes([0:4] | - | -)}. Fix: Replicate() there; boxes can divide every dim."
            ),
        ),
        (
            lambda: Layout(LINE, [Boxes([[((0,), (4,))]])], (4,)),
            (
                "Boxes on axis 0: 4 positions need as many lists of boxes, got 1. "
                "Fix: one list for each, [] where nothing is held."
            ),
        ),
        (
            lambda: Layout(LINE, [Boxes([[((0,), (2,))], [((1,), (3,))], [], []])], (4,)),
            (
                "Boxes overlap: [0:2] (position 0) and [1:4] (position 1) share [1:2]. "
                "Fix: move or shrink one of them; each element is in exactly one box."
            ),
        ),
        (
            lambda: Layout(LINE, [Boxes([[((0,), (2,))], [], [((3,), (1,))], []])], (4,)),
            (
                "Boxes leave a gap: nobody holds [2:3]; the boxes around it are [0:2] (position 0) and "
                "[3:4] (position 2). Fix: add a box there, or enlarge one of these."
            ),
        ),
        (
            lambda: Layout(LINE, [Boxes([[((0,), (2,)), ((2,), (3,))], [], [], []])], (4,)),
            (
                "Box [2:5] (position 0) is out of range: the tensor is [0:4]. "
                "Fix: no offset below 0, no offset + size above the size of its dim."
            ),
        ),
    ],
)
def test_placements_that_do_not_describe_the_tensor_are_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        make()
    assert str(caught.value) == text


def test_a_sum_and_an_average_may_stand_together() -> None:
    Layout(GRID, [Partial("sum"), Partial("avg")], (4,))
