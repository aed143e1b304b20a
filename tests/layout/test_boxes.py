import re
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise._layout import Box, check_cover
from shardwise.errors import LayoutError
from shardwise.testing.local_shards import slice_box
from tests.exact_values import numbered
from tests.strategies import laws, shapes, tilings


def complaint(boxes: Sequence[tuple[str, Box]], shape: tuple[int, ...]) -> str:
    with pytest.raises(LayoutError) as caught:
        check_cover(boxes, shape)
    return str(caught.value)


def box_of(text: str) -> Box:
    spans = [(int(start), int(stop)) for start, stop in re.findall(r"(\d+):(\d+)", text)]
    return Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))


def labelled(boxes: Sequence[Box]) -> list[tuple[str, Box]]:
    return [(f"rank {i}", box) for i, box in enumerate(boxes)]


def test_a_box_has_a_number_of_elements_a_copy_along_a_dim_and_a_text() -> None:
    assert Box((1, 2), (3, 4)).numel == 12
    assert Box((1, 2), (3, 0)).numel == 0
    assert Box((), ()).numel == 1
    box = Box((1, 2, 3), (4, 5, 6))
    assert box.along(0, 7, 8) == Box((7, 2, 3), (8, 5, 6))
    assert box.along(1, 7, 0) == Box((1, 7, 3), (4, 0, 6))
    assert box.along(2, 7, 8) == Box((1, 2, 7), (4, 5, 8))
    assert str(Box((1, 0), (2, 0))) == "[1:3, 0:0]"
    assert str(Box((), ())) == "[]"


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    spans = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


@laws
@given(st.data(), shapes)
def test_the_common_part_of_two_boxes_holds_the_elements_of_both(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    full = numbered(shape)
    shared = set(slice_box(full, a).flatten().tolist()) & set(slice_box(full, b).flatten().tolist())
    common = a.intersect(b)
    assert (set() if common is None else set(slice_box(full, common).flatten().tolist())) == shared
    assert common == b.intersect(a)
    if common is not None:
        assert torch.equal(slice_box(full, a)[common.relative_to(a)], slice_box(full, common))


@laws
@given(st.data(), shapes)
def test_a_tiling_covers_its_shape(data: st.DataObject, shape: tuple[int, ...]) -> None:
    check_cover(labelled(data.draw(tilings(shape))), shape)


@laws
@given(st.data(), shapes)
def test_a_tiling_without_one_box_has_a_gap_there(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(tilings(shape))
    full = [i for i, box in enumerate(boxes) if box.numel]
    assume(full)
    missing = boxes.pop(data.draw(st.sampled_from(full)))
    message = complaint(labelled(boxes), shape)
    assert message.startswith("Boxes leave a gap: nobody holds ")
    gap = slice_box(numbered(shape), box_of(message.split(";")[0]))
    inside = set(slice_box(numbered(shape), missing).flatten().tolist())
    assert gap.numel()
    assert set(gap.flatten().tolist()) <= inside


@laws
@given(st.data(), shapes)
def test_boxes_that_share_an_element_are_named(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(tilings(shape))
    extra = data.draw(boxes_in(shape))
    assume(extra.numel)
    message = complaint([*labelled(boxes), ("the intruder", extra)], shape)
    assert message.startswith("Boxes overlap: ")
    assert f"{extra} (the intruder)" in message
    assert any(f"{box} (rank {i})" in message for i, box in enumerate(boxes) if box.intersect(extra))


OUT_OF_RANGE = [Box((4,), (2,)), Box((-1,), (2,)), Box((6,), (0,)), Box((3,), (-1,))]  # also empty ones
GAP, OVERLAP = "Boxes leave a gap: nobody holds ", "Boxes overlap: "


@pytest.mark.parametrize(
    ("boxes", "shape", "text"),
    [
        (
            [Box((0, 0), (2, 3)), Box((0, 2), (3, 2))],
            (3, 4),
            f"{OVERLAP}[0:2, 0:3] (rank 0) and [0:3, 2:4] (rank 1) share [0:2, 2:3]. Fix: ",
        ),
        ([Box((), ()), Box((), ())], (), f"{OVERLAP}[] (rank 0) and [] (rank 1) share []. Fix: "),
        (
            [Box((0, 0), (2, 3)), Box((3, 0), (2, 3))],
            (5, 3),
            f"{GAP}[2:3, 0:3]; the boxes around it are [0:2, 0:3] (rank 0) and [3:5, 0:3] (rank 1). Fix: ",
        ),
        ([Box((0,), (4,))], (5,), f"{GAP}[4:5]; the boxes around it are [0:4] (rank 0). Fix: "),
        ([Box((1,), (4,))], (5,), f"{GAP}[0:1]; the boxes around it are [1:5] (rank 0). Fix: "),
        ([], (2, 3), f"{GAP}[0:2, 0:3]; the boxes around it are none. Fix: "),
        ([], (), f"{GAP}[]; the boxes around it are none. Fix: "),
        *(([box], (5,), f"Box {box} (rank 0) is out of range: the tensor is [0:5]. Fix: ") for box in OUT_OF_RANGE),
        ([Box((0,), (5,))], (5, 2), "Box [0:5] (rank 0) needs 2 offsets and sizes for shape (5, 2). Fix: "),
        ([Box((0, 0), (5,))], (5, 2), "Box offsets (0, 0), sizes (5,) (rank 0) needs 2 offsets and sizes"),
        ([Box((0,), (5, 2))], (5, 2), "Box offsets (0,), sizes (5, 2) (rank 0) needs 2 offsets and sizes"),
    ],
)
def test_what_is_wrong_names_the_boxes_and_where(boxes: list[Box], shape: tuple[int, ...], text: str) -> None:
    assert complaint(labelled(boxes), shape).startswith(text)


def test_a_scalar_is_one_element() -> None:
    check_cover([("rank 0", Box((), ()))], ())


PINWHEEL = [
    Box(*box) for box in (((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1)))
]


def test_boxes_that_no_straight_cut_separates_are_compared() -> None:
    rows = [Box((3 + i, 0), (1, 3)) for i in range(3)]
    check_cover(labelled([*PINWHEEL, *rows]), (6, 3))
    wider = Box((1, 1), (1, 2))  # it takes what is to the right of the centre as well
    shared = f"{OVERLAP}[0:2, 2:3] (rank 1) and [1:2, 1:3] (rank 4) share [1:2, 2:3]. "
    assert complaint(labelled([*PINWHEEL[:4], wider, *rows]), (6, 3)).startswith(shared)
    assert complaint(labelled([*rows, *PINWHEEL[:4]]), (6, 3)).startswith(f"{GAP}[1:2, 1:2]; the boxes around it are ")


def test_a_stair_of_thousands_of_boxes_is_checked_as_fast_as_a_grid() -> None:
    """Row i up to the diagonal, column j above it: no straight line separates them. Comparing all pairs takes hours."""
    count = 20_000
    boxes = [Box((i, 0), (1, i + 1)) for i in range(count)] + [Box((0, j), (j, 1)) for j in range(1, count)]
    check_cover(labelled(boxes), (count, count))
    longer = [*boxes[:7], Box((7, 0), (1, 9)), *boxes[8:]]
    assert "(rank 7) and [0:8, 8:9] (rank 20007) share [7:8, 8:9]" in complaint(labelled(longer), (count, count))
    assert "nobody holds [7:8, 0:8]" in complaint(labelled([*boxes[:7], *boxes[8:]]), (count, count))


def test_boxes_that_are_divided_along_many_dims_are_refused() -> None:
    halves = [Box((*(0,) * 10,), (1,) * 10), Box((1,) * 10, (1,) * 10)]
    assert "Boxes are divided along 10 dims" in complaint(labelled(halves), (2,) * 10)


def test_thousands_of_boxes_side_by_side_are_checked_along_any_dim() -> None:
    count = 4096
    rows = [Box((i, 0), (1, 3)) for i in range(count)]
    columns = [Box((0, i), (3, 1)) for i in range(count)]
    cells = [Box((i // 64, i % 64), (1, 1)) for i in range(count)]
    for boxes, shape in [(rows, (count, 3)), (columns, (3, count)), (cells, (64, 64))]:
        check_cover(labelled(boxes), shape)
        beside = f"{GAP}{boxes[-1]}; the boxes around it are {boxes[-2]} (rank {count - 2}). Fix: "
        assert complaint(labelled(boxes[:-1]), shape).startswith(beside)
