"""Numbers and ranks as short text."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise._layout import Boxes, Layout, Mesh, Shard
from shardwise._pictures.holders import Holders
from shardwise._pictures.labels import bytes_text, holdings, ranks_text, title
from shardwise._pictures.scene import spread
from shardwise.errors import printable
from tests.pictures.reading import ranks_in
from tests.strategies import laws


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"), (12.6, "13 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (102_000, "99.6 KiB"), (102_399, "100 KiB"),
        (1_048_575, "1024 KiB"), (1_048_576, "1.0 MiB"), (5 << 30, "5.0 GiB"), (5 << 40, "5120 GiB"),
    ],
)  # fmt: skip
def test_bytes_are_short(number: float, text: str) -> None:
    assert bytes_text(number) == text


@laws
@given(st.sets(st.integers(0, 40), min_size=1))
def test_runs_of_ranks_leave_none_out_and_add_none(ranks: set[int]) -> None:
    assert ranks_in(f"rank {ranks_text(sorted(ranks))}") == ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "3"),
        ([0, 1, 2, 5], "0-2, 5"),
        ([0, 8, 16, 24], "0, 8 … 24"),
        ([0, 2, 4], "0, 2, 4"),
        ([0, 1, 8, 9], "0-1, 8-9"),
    ],
)
def test_runs_of_ranks_are_short(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


@laws
@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 20)), min_size=1, max_size=8), st.integers(1, 200))
def test_segments_have_their_least_size_and_fit(segments: list[tuple[int, int]], room: int) -> None:
    lengths, least = [n for n, _ in segments], [few for _, few in segments]
    sizes = spread(lengths, least, room)
    assert all(size >= few for size, few in zip(sizes, least, strict=True))
    assert sum(sizes) <= max(room, sum(least))
    by_length = sorted(zip(lengths, least, sizes, strict=True))
    assert all(b >= a or few_a > b for (_, few_a, a), (_, _, b) in pairwise(by_length))


def test_segments_are_in_proportion_if_there_is_room() -> None:
    assert spread([1, 3, 1, 3], [1, 1, 1, 1], 16) == [2, 6, 2, 6]
    assert spread([1, 3, 1, 3], [3, 3, 3, 3], 12) == [3, 3, 3, 3]


def test_a_title_stays_short() -> None:
    mesh = Mesh((128,), tuple(range(128, 0, -1)))
    assert title(Layout(mesh, [Shard(0)], (256, 3))) == "256 x 3 as [Shard(0)] on Mesh(0=128, 128 ranks from 1 to 128)"


def test_a_title_names_the_axes_of_a_named_mesh() -> None:
    layout = Layout(Mesh((2, 2), names=("dp", "tp")), {"tp": Shard(1, (5, 1))}, (10, 6))
    assert title(layout) == "10 x 6 as {'dp': Replicate(), 'tp': Shard(1, sizes=(5, 1))} on Mesh(dp=2, tp=2)"


def test_control_characters_are_written_out() -> None:
    assert printable("größe\x1b[2J\r\n\ud800") == "größe\\x1b[2J\\r\n\\ud800"


def test_many_boxes_are_shown_by_their_number() -> None:
    boxes = Boxes([[((i, 0), (1, 2)) for i in range(5)], []])
    assert title(Layout(Mesh((2,)), [boxes], (5, 2))) == "5 x 2 as [Boxes(5 of them)] on Mesh(0=2)"


def test_lines_of_what_ranks_hold_stay_short() -> None:
    lines = holdings(Holders(Layout(Mesh((64, 64)), [Shard(0), Shard(1)], (1000, 10000))), None)
    assert lines == [
        "3,906 ranks from 0 to 3966: 16 x 157 each",
        "rank 63, 127 … 3967: 16 x 109 each",
        "rank 3968-4030: 8 x 157 each",
        "rank 4031: 8 x 109",
        "rank 4032-4095: nothing",
    ]
