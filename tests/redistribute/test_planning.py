"""A rank plans for itself: what is found by division and by formula is what enumerating all ranks would find."""

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

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
    picture,
    shard_module,
)
from shardwise._layout import Box, mesh
from shardwise._layout.boxes import BoxIndex
from shardwise._layout.dim_shards import DimShards, chunk, dim_shards, starts_of
from shardwise._models import MLPModule
from shardwise._redistribute import volume
from shardwise._redistribute.plan import plan_redistribute, planned
from shardwise._redistribute.program import program_of
from shardwise._redistribute.volume import growth, held, largest
from shardwise.testing import world
from tests.strategies import Written, laws, layouts

MANY = 4096


@laws
@given(st.integers(0, 40), st.integers(1, 9), st.integers(-3, 45), st.integers(1, 45))
def test_chunks_are_those_of_torch_and_those_that_touch_a_range_are_found(size: int, n: int, a: int, more: int) -> None:
    sizes = chunk(size, n)
    assert [len(x) for x in torch.empty(size).chunk(n)] == [s for s in sizes if s] or not size
    shards = DimShards(Mesh((n,)), (0,), starts_of(sizes))
    found = [shards.shard((i,)) for i in range(n)]
    assert [length for _, length in found] == list(sizes) == list(shards.sizes)
    assert [start for start, _ in found] == [0, *accumulate(sizes)][:n]
    touching = [i for i, (start, length) in enumerate(found) if max(a, start) < min(a + more, start + length)]
    assert [shard.at for shard in shards.between(a, a + more)] == touching


@laws
@given(st.lists(st.tuples(*[st.integers(0, 6)] * 4), max_size=12), st.tuples(*[st.integers(0, 6)] * 4))
def test_boxes_that_touch_a_box_are_found(corners: list[tuple[int, ...]], corner: tuple[int, ...]) -> None:
    boxes = list(enumerate(Box((a, b), (c, d)) for a, b, c, d in corners))
    target = Box(corner[:2], corner[2:])
    expected = [item for item in boxes if item[1].intersect(target) is not None]
    assert sorted(BoxIndex([[box] for _, box in boxes]).touching(target)) == sorted(expected)


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
    assert growth(src, dst) == expected


def in_boxes(mesh: Mesh) -> Boxes:
    return Boxes([[((i, 0), (1, 4)), ((mesh.size() - 1 - i, 4), (1, 4))] for i in range(mesh.size())])


def test_of_many_boxes_of_a_rank_only_those_near_each_other_are_compared() -> None:
    def rows(rank_of: Callable[[int], int]) -> Layout:
        boxes: list[list[Box]] = [[] for _ in range(4)]
        for row in range(400):
            boxes[rank_of(row)].append(Box((row, 0), (1, 2)))
        return Layout(Mesh((4,)), [Boxes(boxes)], (400, 2))

    src, dst = rows(lambda row: row % 4), rows(lambda row: row // 100)
    pairs, _ = volume._near(volume._boxes(dst), volume._boxes(src))
    assert len(pairs) == 100
    assert volume.volume(src, dst) == (600, 150)


def line(n: int) -> Mesh:
    return Mesh((n,))


def grid(n: int) -> Mesh:
    return Mesh((n // 8, 8))


def cube(n: int) -> Mesh:
    return Mesh((n // 4, 2, 2))


def uneven(n: int) -> Shard:
    return Shard(0, [2 + (-1) ** i for i in range(n)])


ONE, ALL, SUM = Shard(0), Replicate(), Partial()
Ends = tuple[Mesh, Sequence[Placement], Mesh, Sequence[Placement], tuple[int, int]]
PAIRS: dict[str, Callable[[int], Ends]] = {
    "all-gather": lambda n: (line(n), [ONE], line(n), [ALL], (2 * n, 8)),
    "uneven all-gather": lambda n: (line(n), [ONE], line(n), [ALL], (3 * n + 5, 8)),
    "all-reduce": lambda n: (line(n), [SUM], line(n), [ALL], (n, 8)),
    "reduce-scatter": lambda n: (line(n), [SUM], line(n), [ONE], (2 * n, 8)),
    "slice": lambda n: (line(n), [ALL], line(n), [ONE], (2 * n, 8)),
    "all-to-all": lambda n: (line(n), [ONE], line(n), [Shard(1)], (2 * n, 2 * n)),
    "given sizes": lambda n: (line(n), [uneven(n)], line(n), [ONE], (2 * n, 8)),
    "broadcast": lambda n: (line(n), [OnRanks(1)], line(n), [ALL], (2 * n, 8)),
    "one of two axes": lambda n: (grid(n), [ONE, Shard(1)], grid(n), [ONE, ALL], (2 * n, 64)),
    "swap of axes": lambda n: (grid(n), [ONE, Shard(1)], grid(n), [Shard(1), ONE], (2 * n, 2 * n)),
    "partial to shard": lambda n: (grid(n), [ONE, SUM], grid(n), [ONE, ONE], (2 * n, 8)),
    "three axes": lambda n: (cube(n), [ONE] * 3, cube(n), [ALL] * 3, (2 * n, 8)),
    "half of the ranks": lambda n: (line(n), [ONE], line(n // 2), [ONE], (2 * n, 8)),
    "boxes": lambda n: (line(n), [in_boxes(line(n))], line(n), [ONE], (n, 8)),
}
GROWTH = 1.3  # of what is proportional to the ranks: Python shares integers up to 256


def layouts_of(ends: Ends) -> tuple[Layout, Layout]:
    src_mesh, src, dst_mesh, dst, shape = ends
    return Layout(src_mesh, src, shape), Layout(dst_mesh, dst, shape)


def plan_of_one_rank(pair: tuple[Layout, Layout]) -> list[object]:
    """The plan, its cost, and what one rank does."""
    found = plan_redistribute(*pair)
    assert found.cost >= 0
    rank = found.ranks[len(found.ranks) // 3]
    exchanges = [step for step in found.comm_steps if step.collective != "all_reduce"]
    assert all(step.sent_elements(rank) >= 0 for step in found.comm_steps)
    return [found, *(program_of(step, rank) for step in exchanges)]


class Memory(NamedTuple):
    """In bytes."""

    kept: int
    peak: int


def memory_of(work: Callable[[], object]) -> Memory:
    gc.collect()
    tracemalloc.start()
    _kept = work()
    peak = tracemalloc.get_traced_memory()[1]
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return Memory(size, peak)


def forget() -> None:
    """What shares memory with plans and layouts made before."""
    for cache in (planned, dim_shards, mesh._first_ranks):
        cache.cache_clear()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "boxes")) for name in PAIRS])
def test_memory_grows_no_faster_than_the_number_of_ranks(name: str) -> None:
    """Of making, comparing, hashing and picturing a layout, and of planning: nothing for each pair of ranks."""
    plan_of_one_rank(layouts_of(PAIRS[name](64)))  # imports, and what Python keeps

    def make(ranks: int) -> object:
        pair, again = layouts_of(PAIRS[name](ranks)), layouts_of(PAIRS[name](ranks))
        assert pair == again
        assert list(map(hash, pair)) == list(map(hash, again))
        return pair

    def measured(ranks: int) -> list[Memory]:
        forget()
        made = memory_of(lambda: make(ranks))
        pair = layouts_of(PAIRS[name](ranks))
        pictured = memory_of(lambda: list(map(str, map(picture, pair))))
        return [made, pictured, memory_of(lambda: plan_of_one_rank(pair))]

    def least(ranks: int) -> list[Memory]:
        """Without what else the process happens to keep."""
        return [Memory(*map(min, *several)) for several in zip(measured(ranks), measured(ranks), strict=True)]

    for few, many in zip(least(MANY // 4), least(MANY), strict=True):
        assert many.peak <= 4 * GROWTH * few.peak + 20_000
        assert many.kept <= 4 * GROWTH * few.kept + 2_000


@pytest.mark.parametrize("name", PAIRS)
def test_a_plan_for_thousands_of_ranks_is_small(name: str) -> None:
    """A number for each rank, of its transfers and not of those of others, which would be millions."""
    forget()
    pair = layouts_of(PAIRS[name](MANY))
    found = memory_of(lambda: plan_of_one_rank(pair))
    assert found.kept < 100e3
    assert found.peak < 3e6


@world(2)
def test_collectives_do_not_depend_on_the_default_device() -> None:
    torch.manual_seed(0)
    model = MLPModule("cpu")
    x = distribute_tensor(torch.arange(6.0).view(3, 2), placements=[Shard(0)])
    with torch.device("meta"):
        shard_module(model, {"**": Replicate()})
        full = x.redistribute(placements=[Replicate()])
    assert full.full_tensor().tolist() == [[0, 1], [2, 3], [4, 5]]
