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


def test_numel_is_the_product_of_the_sizes() -> None:
    assert Box((1, 2), (3, 4)).numel == 12
    assert Box((1, 2), (3, 0)).numel == 0
    assert Box((), ()).numel == 1


def test_a_box_along_a_dim_is_as_before_along_the_others() -> None:
    box = Box((1, 2, 3), (4, 5, 6))
    assert box.along(0, 7, 8) == Box((7, 2, 3), (8, 5, 6))
    assert box.along(1, 7, 0) == Box((1, 7, 3), (4, 0, 6))
    assert box.along(2, 7, 8) == Box((1, 2, 7), (4, 5, 8))


def test_a_box_prints_as_half_open_ranges() -> None:
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


def test_an_overlap_names_both_boxes_and_what_they_share() -> None:
    boxes = [("rank 0", Box((0, 0), (2, 3))), ("rank 1", Box((0, 2), (3, 2)))]
    assert complaint(boxes, (3, 4)) == (
        "Boxes overlap: [0:2, 0:3] (rank 0) and [0:3, 2:4] (rank 1) share [0:2, 2:3]. "
        "Fix: move or shrink one of them; each element is in exactly one box."
    )


def test_a_gap_names_what_is_missing_and_the_boxes_around_it() -> None:
    boxes = [("rank 0", Box((0, 0), (2, 3))), ("rank 1", Box((3, 0), (2, 3)))]
    assert complaint(boxes, (5, 3)) == (
        "Boxes leave a gap: nobody holds [2:3, 0:3]; "
        "the boxes around it are [0:2, 0:3] (rank 0) and [3:5, 0:3] (rank 1). "
        "Fix: add a box there, or enlarge one of these."
    )


def test_a_gap_at_an_end_names_the_one_box_beside_it() -> None:
    assert complaint([("rank 0", Box((0,), (4,)))], (5,)) == (
        "Boxes leave a gap: nobody holds [4:5]; the boxes around it are [0:4] (rank 0). "
        "Fix: add a box there, or enlarge one of these."
    )
    assert complaint([("rank 0", Box((1,), (4,)))], (5,)) == (
        "Boxes leave a gap: nobody holds [0:1]; the boxes around it are [1:5] (rank 0). "
        "Fix: add a box there, or enlarge one of these."
    )


def test_no_boxes_at_all_leave_everything_uncovered() -> None:
    assert complaint([], (2, 3)) == (
        "Boxes leave a gap: nobody holds [0:2, 0:3]; the boxes around it are none. "
        "Fix: add a box there, or enlarge one of these."
    )
    assert complaint([], ()) == (
        "Boxes leave a gap: nobody holds []; the boxes around it are none. "
        "Fix: add a box there, or enlarge one of these."
    )


@pytest.mark.parametrize("box", [Box((4,), (2,)), Box((-1,), (2,)), Box((6,), (0,)), Box((3,), (-1,))], ids=str)
def test_a_box_out_of_range_is_refused_even_if_empty(box: Box) -> None:
    assert complaint([("rank 2", box)], (5,)) == (
        f"Box {box} (rank 2) is out of range: the tensor is [0:5]. "
        "Fix: no offset below 0, no offset + size above the size of its dim."
    )


@pytest.mark.parametrize(
    ("box", "text"),
    [
        (Box((0,), (5,)), "[0:5]"),
        (Box((0, 0), (5,)), "offsets (0, 0), sizes (5,)"),
        (Box((0,), (5, 2)), "offsets (0,), sizes (5, 2)"),
    ],
)
def test_a_box_of_another_number_of_dims_is_refused(box: Box, text: str) -> None:
    assert complaint([("rank 0", box)], (5, 2)) == (
        f"Box {text} (rank 0) needs 2 offsets and sizes for shape (5, 2). Fix: one of each for each dim."
    )


def test_a_scalar_is_one_element() -> None:
    check_cover([("rank 0", Box((), ()))], ())
    assert complaint(labelled([Box((), ()), Box((), ())]), ()) == (
        "Boxes overlap: [] (rank 0) and [] (rank 1) share []. "
        "Fix: move or shrink one of them; each element is in exactly one box."
    )


PINWHEEL = [
    Box(*box) for box in (((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1)))
]


def test_boxes_that_no_straight_cut_separates_are_compared() -> None:
    rows = [Box((3 + i, 0), (1, 3)) for i in range(3)]
    check_cover(labelled([*PINWHEEL, *rows]), (6, 3))
    wider = Box((1, 1), (1, 2))  # it takes what is to the right of the centre as well
    assert complaint(labelled([*PINWHEEL[:4], wider, *rows]), (6, 3)) == (
        "Boxes overlap: [0:2, 2:3] (rank 1) and [1:2, 1:3] (rank 4) share [1:2, 2:3]. "
        "Fix: move or shrink one of them; each element is in exactly one box."
    )
    assert complaint(labelled([*rows, *PINWHEEL[:4]]), (6, 3)).startswith(
        "Boxes leave a gap: nobody holds [1:2, 1:2]; the boxes around it are "
    )


def test_a_stair_of_thousands_of_boxes_is_checked_as_fast_as_a_grid() -> None:
    """Row i up to the diagonal, column j above it: no straight line separates them. Comparing all pairs takes hours."""
    count = 50_000
    boxes = [Box((i, 0), (1, i + 1)) for i in range(count)] + [Box((0, j), (j, 1)) for j in range(1, count)]
    check_cover(labelled(boxes), (count, count))
    longer = [*boxes[:7], Box((7, 0), (1, 9)), *boxes[8:]]
    assert "(rank 7) and [0:8, 8:9] (rank 50007) share [7:8, 8:9]" in complaint(labelled(longer), (count, count))
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
        assert complaint(labelled(boxes[:-1]), shape) == (
            f"Boxes leave a gap: nobody holds {boxes[-1]}; the boxes around it are {boxes[-2]} (rank {count - 2}). "
            "Fix: add a box there, or enlarge one of these."
        )
