"""A rank plans for itself: what is found by division and by formula is what enumerating all ranks would find."""

import tracemalloc
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise import (
    Boxes,
    Layout,
    Mesh,
    OnRanks,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    shard_module,
)
from shardwise.layout import Box
from shardwise.layout.boxes import BoxIndex
from shardwise.layout.division import Chunks, GivenSizes
from shardwise.layout.placement import chunk
from shardwise.models import MLPModule
from shardwise.redistribute import volume
from shardwise.redistribute.native import native_program
from shardwise.redistribute.plan import plan_redistribute
from shardwise.redistribute.steps import Exchange
from shardwise.redistribute.volume import growth, held, largest
from shardwise.testing import world
from tests.strategies import Written, laws, layouts

MANY = 4096


@laws
@given(st.integers(0, 40), st.integers(1, 9), st.integers(-3, 45), st.integers(-3, 45))
def test_chunks_are_those_of_torch_and_those_that_touch_a_range_are_found(size: int, n: int, a: int, b: int) -> None:
    sizes = chunk(size, n)
    assert [len(x) for x in torch.empty(size).chunk(n)] == [s for s in sizes if s] or not size
    for division in (Chunks(size, n), GivenSizes(sizes)):
        found = [division.shard(i) for i in range(n)]
        assert [length for _, length in found] == list(sizes) == list(division.sizes)
        assert [start for start, _ in found] == [0, *accumulate(sizes)][:n]
        touching = {i for i, (start, length) in enumerate(found) if max(a, start) < min(b, start + length)}
        assert touching <= set(division.touching(a, b)) <= set(range(n))


@laws
@given(st.lists(st.tuples(*[st.integers(0, 6)] * 4), max_size=12), st.tuples(*[st.integers(0, 6)] * 4))
def test_boxes_that_touch_a_box_are_found(corners: list[tuple[int, ...]], corner: tuple[int, ...]) -> None:
    boxes = list(enumerate(Box((a, b), (c, d)) for a, b, c, d in corners))
    target = Box(corner[:2], corner[2:])
    expected = [item for item in boxes if item[1].intersect(target) is not None]
    assert sorted(BoxIndex(boxes).touching(target)) == sorted(expected)


@laws
@given(layouts())
def test_what_all_ranks_hold_is_known_without_asking_them(written: Written) -> None:
    layout = written.layout
    assert held(layout) == sum(map(layout.local_numel, layout.mesh.ranks))
    assert largest(layout) == max(map(layout.local_numel, layout.mesh.ranks))
    assert layout.has_empty_shards == (not all(map(layout.local_numel, layout.mesh.ranks)))


@laws
@given(layouts(), st.data())
def test_by_how_much_a_local_tensor_grows_is_known_without_asking_all_ranks(
    written: Written, data: st.DataObject
) -> None:
    src, dst = written.layout, data.draw(layouts(mesh=written.mesh, shape=written.shape)).layout
    expected = max(dst.local_numel(rank) - src.local_numel(rank) for rank in src.mesh.ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(volume, "FEW", 0)
        assert growth(src, dst) == expected
    assert growth(src, dst) == expected


def in_boxes(mesh: Mesh) -> Boxes:
    return Boxes([[((i, 0), (1, 4)), ((mesh.size() - 1 - i, 4), (1, 4))] for i in range(mesh.size())])


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (Shard(0), Replicate()),
        (Partial(), Shard(0)),
        (Shard(0), Shard(1)),
        (OnRanks(3), Replicate()),
        (in_boxes(Mesh((MANY,))), Shard(0)),
    ],
    ids=["all-gather", "reduce-scatter", "all-to-all", "broadcast", "boxes"],
)
def test_a_plan_for_thousands_of_ranks_is_small(src: Shard, dst: Shard) -> None:
    """The transfers of all ranks would be millions."""
    mesh = Mesh((MANY,))
    pair = Layout(mesh, [src], (MANY, 8)), Layout(mesh, [dst], (MANY, 8))
    tracemalloc.start()
    plan = plan_redistribute(*pair)
    assert plan.cost > 0
    for step in plan.comm_steps:
        assert step.sent_elements(3) >= 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6


@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Partial(), Shard(0)), (Shard(0), Shard(1))])
@pytest.mark.parametrize("rows", [MANY, MANY * 3 + 5])
def test_what_one_of_thousands_of_ranks_does_along_an_axis_is_small(
    placements: tuple[Placement, Placement], rows: int
) -> None:
    """A number for each rank, no box."""
    src, dst = (Layout(Mesh((MANY,)), [p], (rows, MANY)) for p in placements)
    (step,) = plan_redistribute(src, dst).comm_steps
    assert isinstance(step, Exchange)
    tracemalloc.start()
    program = native_program(step, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert program is not None
    assert peak < 1e6


@world(2)
def test_collectives_do_not_depend_on_the_default_device() -> None:
    torch.manual_seed(0)
    model = MLPModule("cpu")
    x = distribute_tensor(torch.arange(6.0).view(3, 2), placements=[Shard(0)])
    with torch.device("meta"):
        shard_module(model, {"**": Replicate()})
        full = x.redistribute(placements=[Replicate()])
    assert full.full_tensor().tolist() == [[0, 1], [2, 3], [4, 5]]
