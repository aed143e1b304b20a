"""What is true of every layout: properties on random ones, and on all small ones."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise._layout import Boxes, Layout, Mesh, Partial, Placement, Replicate, Shard
from shardwise.testing.local_shards import as_local_tensor, local_shards, mesh_position, slice_box
from tests.exact_values import numbered
from tests.strategies import (
    SMALL_MESHES,
    SMALL_SHAPES,
    Uneven,
    Written,
    divisions,
    laws,
    layouts,
    small_layouts,
    write,
)


def copies(mesh: Mesh, placements: tuple[Placement, ...]) -> int:
    """How many ranks hold each element."""
    plain = [isinstance(p, Replicate | Partial) for p in placements]
    return prod(size for size, is_whole in zip(mesh.shape, plain, strict=True) if is_whole)


def assert_is_what_was_written(written: Written) -> None:
    """Every rank holds what torch cuts for it, in that shape, and each element lies on as many ranks."""
    layout, full = written.layout, numbered(written.shape)
    counts = torch.zeros(full.numel(), dtype=torch.int64)
    for rank in written.mesh.ranks:
        shards = local_shards(full, written.mesh, written.placements, rank, written.order)
        boxes = layout.boxes(rank)
        assert len(boxes) == len(shards), (layout, rank)
        for box, shard in zip(boxes, shards, strict=True):
            assert torch.equal(slice_box(full, box), shard), (layout, rank)
        local = as_local_tensor(shards, full)
        assert layout.local_shape(rank) == tuple(local.shape), (layout, rank)
        assert layout.local_numel(rank) == sum(map(torch.numel, shards)), (layout, rank)
        counts[local.flatten()] += 1
    assert (counts == copies(written.mesh, written.placements)).all(), layout


def assert_cuts_agree_with_boxes(layout: Layout) -> None:
    """The axes' cuts, applied one after the other, leave the spans that the boxes have."""
    for dim, size in enumerate(layout.shape):
        axes = [a for a in layout.shard_order if layout.placements[a].is_shard(dim)]
        spans = [torch.arange(size)]
        for axis in axes:
            sharded = layout.shard_sizes(axis)
            assert sharded is not None
            rows = [sharded] if isinstance(sharded[0], int) else list(sharded)
            assert len(rows) == len(spans), (layout, axis)
            spans = [part for span, row in zip(spans, rows, strict=True) for part in span.split(list(row))]
        for rank in layout.mesh.ranks:
            here = mesh_position(layout.mesh, rank)
            assert here is not None
            index = 0
            for axis in axes:
                index = index * layout.mesh.shape[axis] + here[axis]
            for box in layout.boxes(rank):
                assert len(spans[index]) == box.sizes[dim], (layout, rank)
                assert spans[index].tolist() == list(range(box.offsets[dim], box.offsets[dim] + box.sizes[dim]))


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", SMALL_MESHES, ids=str)
def test_every_small_layout_holds_everything_as_written(mesh_shape: tuple[int, ...]) -> None:
    mesh = Mesh(mesh_shape)
    for shape in SMALL_SHAPES:
        for written in small_layouts(mesh, shape):
            assert_is_what_was_written(written)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", SMALL_MESHES, ids=str)
def test_the_cuts_of_every_small_layout_agree_with_its_boxes(mesh_shape: tuple[int, ...]) -> None:
    mesh = Mesh(mesh_shape)
    for shape in [(), *SMALL_SHAPES[:5], (4, 3), (3, 0)]:
        for written in small_layouts(mesh, shape):
            assert_cuts_agree_with_boxes(written.layout)


@laws
@given(layouts())
def test_every_rank_holds_what_was_written(written: Written) -> None:
    assert_is_what_was_written(written)


@laws
@given(st.sampled_from([Mesh((2, 2, 2)), Mesh((3, 2, 2)), Mesh((2, 3))]), st.integers(0, 20), st.data())
def test_axes_may_cut_one_dim_into_pieces_of_any_sizes(mesh: Mesh, length: int, data: st.DataObject) -> None:
    """Two or three axes, in any order: each has a row of sizes for every piece that those before it made."""
    order = data.draw(st.permutations(range(mesh.ndim)))
    written = write(mesh, [Uneven(0)] * mesh.ndim, (length,), order, lambda *of: data.draw(divisions(*of)))
    assert_is_what_was_written(written)
    assert_cuts_agree_with_boxes(written.layout)


@laws
@given(layouts())
def test_cuts_agree_with_boxes(written: Written) -> None:
    if not any(isinstance(p, Boxes) for p in written.placements):
        assert_cuts_agree_with_boxes(written.layout)


@laws
@given(layouts())
def test_a_rank_outside_the_mesh_holds_nothing(written: Written) -> None:
    outsider = max(written.mesh.ranks) + 1
    layout = written.layout
    assert layout.boxes(outsider) == ()
    assert layout.local_numel(outsider) == 0
    assert prod(layout.local_shape(outsider)) == 0
    assert len(layout.local_shape(outsider)) == max(1, len(written.shape))
    assert layout.partial_coordinate(outsider) == ()


@laws
@given(layouts())
def test_explicit_sizes_that_say_what_is_so_make_an_equal_layout(written: Written) -> None:
    layout = written.layout
    said = [
        Shard(p.dim - len(layout.shape), layout.shard_sizes(axis)) if isinstance(p, Shard) else p
        for axis, p in enumerate(layout.placements)
    ]
    again = Layout(layout.mesh, said, layout.shape, layout.shard_order)
    assert again == layout
    assert hash(again) == hash(layout)
    assert again.kind == layout.kind


@laws
@given(layouts(), st.data())
def test_only_the_order_of_axes_that_cut_one_dim_matters(written: Written, data: st.DataObject) -> None:
    """Any order that keeps those in sequence makes an equal layout."""
    order = data.draw(st.permutations(range(written.mesh.ndim)))
    layout = written.layout
    for dim in range(len(written.shape)):
        slots = [i for i, axis in enumerate(order) if layout.placements[axis].is_shard(dim)]
        axes = [axis for axis in written.order if layout.placements[axis].is_shard(dim)]
        for slot, axis in zip(slots, axes, strict=True):
            order[slot] = axis
    again = Layout(written.mesh, written.placements, written.shape, order)
    assert again == layout
    assert hash(again) == hash(layout)


@laws
@given(layouts(), st.data())
def test_layouts_that_hold_different_boxes_are_unequal(written: Written, data: st.DataObject) -> None:
    other = data.draw(layouts(mesh=written.mesh, shape=written.shape)).layout
    if other == written.layout:
        assert hash(other) == hash(written.layout)
        assert all(other.boxes(rank) == written.layout.boxes(rank) for rank in written.mesh.ranks)
    else:
        assert repr(other) != repr(written.layout)


@laws
@given(layouts())
def test_a_gradient_lies_where_its_tensor_does(written: Written) -> None:
    layout, gradient = written.layout, written.layout.dual()
    assert gradient.shape == layout.shape
    assert all(gradient.boxes(rank) == layout.boxes(rank) for rank in layout.mesh.ranks)
    assert gradient.dual().dual() == gradient
    for p, d in zip(layout.placements, gradient.placements, strict=True):
        match p:
            case Replicate():
                assert d == Partial("sum")
            case Partial():
                assert d == Replicate()
            case _:
                assert d == p
