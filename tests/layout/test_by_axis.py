"""Placements by axis name mean what the sequence means; wrong names are an error with the names that exist."""

from collections.abc import Sequence

import pytest

from shardwise._layout import Layout, Mesh, Partial, Placement, Replicate, Shard, as_placements
from shardwise.errors import LayoutError

LINE = Mesh((2,), names=("tp",))
GRID = Mesh((2, 2), names=("dp", "tp"))
UNNAMED = Mesh((2, 2))


def test_names_give_one_placement_per_axis_in_mesh_order() -> None:
    assert as_placements(GRID, {"tp": Shard(0), "dp": Partial()}) == (Partial(), Shard(0))
    assert as_placements(LINE, {"tp": Shard(1)}) == (Shard(1),)


def test_axes_without_a_name_in_the_mapping_are_replicated() -> None:
    assert as_placements(GRID, {"tp": Shard(0)}) == (Replicate(), Shard(0))
    assert as_placements(GRID, {}) == as_placements(GRID, None) == (Replicate(), Replicate())


def test_layouts_by_name_and_by_sequence_are_the_same_object() -> None:
    by_name = Layout(GRID, {"tp": Shard(0), "dp": Shard(1)}, (4, 6))
    assert by_name is Layout(GRID, [Shard(1), Shard(0)], (4, 6))
    assert by_name.replace({"tp": Shard(1)}) is Layout(GRID, [Replicate(), Shard(1)], (4, 6))


def test_unknown_axis_names_are_named_with_those_of_the_mesh() -> None:
    with pytest.raises(LayoutError) as info:
        Layout(GRID, {"tq": Shard(0), "dp": Shard(1)}, (4, 6))
    assert str(info.value) == (
        "Mesh(dp=2, tp=2) has no axis 'tq', got placements {'tq': Shard(0), 'dp': Shard(1)}. "
        "Fix: use its axis names 'dp', 'tp'."
    )


def test_names_need_a_mesh_with_axis_names() -> None:
    with pytest.raises(LayoutError) as info:
        Layout(UNNAMED, {"tp": Shard(0)}, (4, 6))
    assert str(info.value) == (
        "Mesh(0=2, 1=2) has no axis names, got placements by name: {'tp': Shard(0)}. Fix: name its axes (names= of "
        "Mesh, mesh_dim_names= of a DeviceMesh), or pass a list of one placement per axis."
    )


@pytest.mark.parametrize("placements", [[], [Shard(0)], (Shard(0),) * 3], ids=str)
def test_a_sequence_has_one_placement_per_axis(placements: Sequence[Placement]) -> None:
    with pytest.raises(LayoutError) as info:
        as_placements(GRID, placements)
    assert str(info.value) == (
        f"One placement per mesh axis: Mesh(dp=2, tp=2) has 2, got {len(placements)}: {list(placements)}. "
        f"Fix: one placement for each axis, or a dict by axis name."
    )


def test_values_must_be_placements() -> None:
    with pytest.raises(LayoutError, match="Axis 1 needs a placement"):
        Layout(GRID, {"tp": 0}, (4,))  # type: ignore[dict-item]


def test_repr_and_errors_show_names_if_the_mesh_has_them() -> None:
    assert repr(Layout(GRID, [Partial(), Shard(0)], (4,))) == (
        "Layout((4,) as {'dp': Partial('sum'), 'tp': Shard(0)} on Mesh(dp=2, tp=2))"
    )
    assert repr(Layout(UNNAMED, [Replicate(), Shard(0)], (4,))) == (
        "Layout((4,) as [Replicate(), Shard(0)] on Mesh(0=2, 1=2))"
    )
    with pytest.raises(LayoutError, match=r"got \{'dp': Partial\('max'\), 'tp': Partial\('sum'\)\}"):
        Layout(GRID, {"dp": Partial("max"), "tp": Partial()}, (4,))
