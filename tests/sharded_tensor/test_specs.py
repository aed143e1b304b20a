"""Sharding specs: what they refuse, the layouts they mean, and that both words say the same."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.remote_device import _remote_device

from shardwise import Boxes, Layout, Mesh, OnRanks, Shard
from shardwise.errors import ArgumentError, LayoutError
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)
from shardwise.sharded_tensor.specs import placement_of, spec_of

EVERYBODY = (0, 1, 2, 3)


def shard(offsets: tuple[int, ...], sizes: tuple[int, ...], rank: int) -> ShardMetadata:
    return ShardMetadata(offsets, sizes, f"rank:{rank}/cpu")


# ---- words ----


def test_a_placement_names_a_rank_and_a_device() -> None:
    place = placement_of("rank:3/cuda:1")
    assert (place.rank(), place.device(), str(place)) == (3, torch.device("cuda:1"), "rank:3/cuda:1")
    assert placement_of("rank:0") == placement_of("rank:0/cpu")
    assert placement_of(_remote_device("rank:2/cpu")) == placement_of("rank:2")


@pytest.mark.parametrize(
    "text",
    ["worker", "worker/cpu", "rank:/cpu", "rank:-1/cpu", "rank:x", "", "rank:²", "cuda:foo", "foo:0"],
)
def test_a_placement_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="A placement is written"):
        placement_of(text)


def test_specs_and_properties_are_values() -> None:
    assert ChunkShardingSpec(0, ["rank:0"]) == ChunkShardingSpec(0, ["rank:0/cpu"])
    assert len({ChunkShardingSpec(0, [f"rank:{r}"]) for r in (0, 0, 1)}) == 2
    assert EnumerableShardingSpec([shard((0,), (3,), 0)]) == EnumerableShardingSpec([shard((0,), (3,), 0)])
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    assert TensorProperties.create_from_tensor(x) == TensorProperties(torch.float64, requires_grad=True)


class Told(ShardingSpec):
    def __init__(self, told: Any) -> None:
        self.told = told

    def build_metadata(self, tensor_sizes: Sequence[int], tensor_properties: Any = None) -> ShardedTensorMetadata:
        return self.told  # type: ignore[no-any-return]


def test_what_is_no_metadata_is_refused_in_words() -> None:
    with pytest.raises(LayoutError, match="lists ShardMetadata, got tuple"):
        EnumerableShardingSpec([((0, 0), (6, 4))])  # type: ignore[list-item]
    with pytest.raises(LayoutError, match=r"Told\.build_metadata returns ShardedTensorMetadata, got list"):
        Told([]).layout((6, 4), (0, 1))
    nobody = Told(ShardedTensorMetadata([], (0, 4)))
    assert nobody.layout((0, 4), (0, 1)).boxes(1) == ()
    with pytest.raises(LayoutError, match="nobody holds"):
        nobody.layout((6, 4), (0, 1))


def pair(first: int, second: int) -> EnumerableShardingSpec:
    """Rows up to `first` on rank 0, and two rows from `second` on."""
    return EnumerableShardingSpec([shard((0, 0), (first, 4), 0), shard((second, 0), (2, 4), 1)])


WRONG: dict[str, Callable[[], object]] = {
    "as many offsets as sizes": lambda: ShardMetadata([0, 0], [3]),
    "not negative": lambda: ShardMetadata([0, -1], [3, 3]),
    "has no placement": lambda: EnumerableShardingSpec([ShardMetadata([0], [3])]),
    "at least one": lambda: ChunkShardingSpec(0, []),
    "no dim 2": lambda: ChunkShardingSpec(2, ["rank:0"]).layout((3, 4), (0,)),
    r"\[0:3, 0:4\] \(rank 0\) and \[2:4, 0:4\] \(rank 1\) share \[2:3, 0:4\]": lambda: pair(3, 2),
    r"nobody holds \[2:3, 0:4\].*rank 0.*rank 1": lambda: pair(2, 3),
    "nobody holds": lambda: pair(2, 2).layout((5, 4), (0, 1)),
    "out of range": lambda: pair(2, 2).layout((3, 4), (0, 1)),
    "needs 3": lambda: pair(2, 2).layout((4, 4, 1), (0, 1)),
    r"one number of dims, got \[1, 2\]": lambda: EnumerableShardingSpec(
        [shard((0,), (2,), 0), shard((2, 0), (2, 4), 1)]
    ),
    r"rank:7/cpu.*\(0, 1, 2, 3\)": lambda: ChunkShardingSpec(0, ["rank:0", "rank:7"]).layout((4, 4), EVERYBODY),
    "one kind of device": lambda: ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cuda:0"]).layout((4, 4), EVERYBODY),
}


def test_shards_and_specs_that_do_not_fit_are_refused() -> None:
    for text, make in WRONG.items():
        with pytest.raises(LayoutError, match=text):
            make()
    with pytest.raises(NotImplementedError, match="'rows'"):
        ChunkShardingSpec("rows", ["rank:0"])
    with pytest.raises(ArgumentError, match="dim must be an integer"):
        ChunkShardingSpec(1.0, ["rank:0"])  # type: ignore[arg-type]


# ---- the layouts they mean ----


@pytest.mark.parametrize("size", range(10))
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 0)])
def test_chunks_are_those_of_torch_in_the_order_of_the_placements(size: int, order: tuple[int, ...]) -> None:
    spec = ChunkShardingSpec(-1, [f"rank:{r}" for r in order])
    layout = spec.layout((2, size), EVERYBODY)
    pieces = torch.arange(size).chunk(len(order)) if size else ()
    want = {rank: tuple(piece.tolist()) for rank, piece in zip(order, pieces, strict=False) if len(piece)}
    for rank in EVERYBODY:
        boxes = [box for box in layout.boxes(rank) if box.numel]
        held = tuple(i for box in boxes for i in range(box.offsets[1], box.offsets[1] + box.sizes[1]))
        assert held == want.get(rank, ())
    told = spec.build_metadata((2, size))
    assert [m.rank for m in told] == list(order)
    assert sum(m.shard_sizes[1] for m in told) == size


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0, 0)])
def test_tensors_without_elements_are_sharded_like_others(shape: tuple[int, ...]) -> None:
    layout = ChunkShardingSpec(0, ["rank:1", "rank:0"]).layout(shape, (0, 1))
    assert layout == Layout(Mesh((2,), (1, 0)), [Shard(0)], shape)


def test_several_chunks_of_a_rank_and_anything_else_are_boxes() -> None:
    layout = ChunkShardingSpec(0, ["rank:1", "rank:0", "rank:1"]).layout((6, 2), (0, 1))
    assert isinstance(layout.placements[0], Boxes)
    assert [str(box) for box in layout.boxes(1)] == ["[0:2, 0:2]", "[4:6, 0:2]"]
    shards = [shard((0, 0), (8, 1), 0), shard((0, 1), (3, 3), 1), shard((3, 1), (5, 3), 0)]
    layout = EnumerableShardingSpec(shards).layout((8, 4), (0, 1))
    assert isinstance(layout.placements[0], Boxes)
    assert [str(box) for box in layout.boxes(0)] == ["[0:8, 0:1]", "[3:8, 1:4]"]


ROWS, COLUMNS = ((0, 3), (3, 5)), ((0, 1), (1, 3))
GRID = zip((3, 1, 0, 2), product(ROWS, COLUMNS), strict=True)
MEANT: dict[str, tuple[list[ShardMetadata], Layout]] = {
    "a line: a mesh in its order": (
        [shard((0, 0), (1, 4), 2), shard((1, 0), (5, 4), 0), shard((6, 0), (2, 4), 3)],
        Layout(Mesh((4,), (2, 0, 3, 1)), [Shard(0, [1, 5, 2, 0])], (8, 4)),
    ),
    "in the order of the ranks: the usual mesh": (
        [shard((0, 0), (3, 4), 1), shard((3, 0), (5, 4), 3)],
        Layout(Mesh((4,)), [Shard(0, [0, 3, 0, 5])], (8, 4)),
    ),
    "a grid: a mesh of its form": (
        [shard((a, b), (n, m), r) for r, ((a, n), (b, m)) in GRID],
        Layout(Mesh((2, 2), (3, 1, 0, 2)), [Shard(0, [3, 5]), Shard(1, [1, 3])], (8, 4)),
    ),
    "on one rank: a table there": ([shard((0, 0), (8, 4), 2)], Layout(Mesh((4,)), [OnRanks(2)], (8, 4))),
}


@pytest.mark.parametrize("name", MEANT)
def test_shards_are_the_layout_that_they_mean(name: str) -> None:
    shards, layout = MEANT[name]
    assert EnumerableShardingSpec(shards).layout((8, 4), EVERYBODY) == layout


LAYOUTS = [
    Layout(Mesh((4,)), [Shard(0)], (7, 3)),
    Layout(Mesh((4,), (3, 1, 0, 2)), [Shard(1)], (7, 3)),
    Layout(Mesh((4,)), [Shard(0, [0, 5, 2, 0])], (7, 3)),
    Layout(Mesh((4,)), [OnRanks(1)], (7, 3)),
    Layout(Mesh((2, 2)), [Shard(0), Shard(1)], (7, 3)),
    Layout(Mesh((2, 2)), [Shard(1), Shard(0, [1, 6])], (7, 3)),
    Layout(Mesh((2, 2)), [Shard(0), Shard(0)], (7, 3)),
    Layout(Mesh((2,)), [Boxes([[((0, 0), (7, 1))], [((0, 1), (3, 2)), ((3, 1), (4, 2))]])], (7, 3)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_spec_of_a_layout_means_the_same_boxes(layout: Layout) -> None:
    spec = spec_of(layout)
    again = spec.layout(layout.shape, tuple(sorted(layout.mesh.ranks)))
    for rank in layout.mesh.ranks:
        assert [b for b in again.boxes(rank) if b.numel] == [b for b in layout.boxes(rank) if b.numel]
    assert spec_of(again).layout(layout.shape, tuple(sorted(layout.mesh.ranks))) == again
