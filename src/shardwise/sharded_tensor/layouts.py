"""Between lists of shards and layouts: the shards of a `Layout`, and the `Layout` of some shards."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from itertools import product as cartesian

from shardwise.errors import LayoutError
from shardwise.layout import Box, Boxes, Layout, Mesh, OnRanks, Replicate, Shard, check_cover, checked, shown
from shardwise.sharded_tensor.metadata import RemoteDevice, ShardMetadata, listed

Ranks = tuple[int, ...]


@checked
def layout_of_shards(shards: Sequence[ShardMetadata], shape: tuple[int, ...], ranks: Ranks) -> Layout:
    """The layout in which every rank of `ranks` holds the shards that are placed on it.

    Shards along one dim become `Shard` on a mesh in the order of the shards, a grid of shards becomes `Shard` on a mesh
    of its shape, a tensor on one rank becomes `OnRanks`: ops have their best rules there. Anything else is `Boxes`.

    Raises:
        LayoutError: shards that do not cover the shape exactly once, or are on a rank that is not in `ranks`.
    """
    if not all(isinstance(shard, ShardMetadata) for shard in shards):
        raise LayoutError(
            f"layout_of_shards: shards must be ShardMetadata, got {shown(shards)}. "
            f"Fix: ShardMetadata(offsets, sizes, 'rank:0/cpu')."
        )
    check_cover([(f"rank {shard.rank}", shard.box) for shard in shards], shape)
    ranks = tuple(sorted(ranks))  # the placements decide who holds what, not the order of the group
    for shard in shards:
        if shard.rank not in ranks:
            raise LayoutError(
                f"The shard {shard} is on a rank that is not of the group, whose ranks are {ranks}. "
                f"Fix: place it on one of these; they are global ranks."
            )
    device = _device_type(shards)
    line = Mesh((len(ranks),), ranks, None, device)
    by_rank: dict[int, list[Box]] = {rank: [] for rank in ranks}
    for shard in shards:
        by_rank[shard.rank].append(shard.box)
    boxes = {shard.rank: shard.box for shard in shards if shard.box.numel or 0 in shape}
    if boxes and all(len(row) <= 1 for row in by_rank.values()):
        dims = [d for d in range(len(shape)) if any(box.sizes[d] != shape[d] for box in boxes.values())]
        if not dims and len(by_rank) == 1:
            return Layout(line, [Replicate()], shape)
        if not dims and sum(map(len, by_rank.values())) == 1:
            return Layout(line, [OnRanks(ranks.index(next(iter(boxes))))], shape)
        if len(dims) <= 1:
            return _along_dim(shards, boxes, dims[0] if dims else _empty_dim(shards), shape, ranks, device)
        if len(boxes) == len(ranks):
            grid = _grid(boxes, dims, shape, device)
            if grid is not None:
                return grid
    return Layout(line, [Boxes([by_rank[rank] for rank in ranks])], shape)


def _device_type(shards: Sequence[ShardMetadata]) -> str:
    types = {shard.placement.device().type: shard for shard in shards if shard.placement is not None}
    if len(types) > 1:
        raise LayoutError(
            f"The shards of a tensor live on one kind of device, got {listed(list(types.values()))}. "
            f"Fix: one kind in all placements, such as 'rank:0/cpu' and 'rank:1/cpu'."
        )
    return next(iter(types), "cpu")


def _empty_dim(shards: Sequence[ShardMetadata]) -> int:
    """If one shard holds everything: the dim along which the others are empty."""
    return next((d for s in shards for d, n in enumerate(s.shard_sizes) if not n), 0)


def _along_dim(
    shards: Sequence[ShardMetadata],
    boxes: Mapping[int, Box],
    dim: int,
    shape: tuple[int, ...],
    ranks: Ranks,
    device: str,
) -> Layout:
    """One box per rank along one dim: a mesh in the order of the boxes, ranks without one last."""
    placed = list(dict.fromkeys(shard.rank for shard in shards))
    filled = sorted(boxes, key=lambda rank: boxes[rank].offsets[dim])
    order = (*filled, *(r for r in placed if r not in boxes), *(r for r in ranks if r not in placed))
    if filled == [r for r in ranks if r in boxes]:  # the natural order, with empty shards in between
        order = ranks
    sizes = [boxes[rank].sizes[dim] if rank in boxes else 0 for rank in order]
    return Layout(Mesh((len(order),), order, None, device), [Shard(dim, sizes)], shape)


def _grid(boxes: Mapping[int, Box], dims: list[int], shape: tuple[int, ...], device: str) -> Layout | None:
    """One box per rank on a grid; None if they form no grid."""
    intervals = [sorted({(box.offsets[d], box.sizes[d]) for box in boxes.values()}) for d in dims]
    if any(a + n != b for along in intervals for (a, n), (b, _) in pairwise(along)):
        return None
    at = {tuple((box.offsets[d], box.sizes[d]) for d in dims): rank for rank, box in boxes.items()}
    ranks = [at.get(cell) for cell in cartesian(*intervals)]
    if None in ranks or len(ranks) != len(boxes):
        return None
    mesh = Mesh(tuple(map(len, intervals)), tuple(r for r in ranks if r is not None), None, device)
    return Layout(mesh, [Shard(d, [n for _, n in along]) for d, along in zip(dims, intervals, strict=True)], shape)


def shards_of(layout: Layout) -> list[ShardMetadata]:
    """The shards of a tensor with this layout; of replicas, the first.

    Raises:
        LayoutError: the layout is Partial.
    """
    if layout.partial_axes:
        raise LayoutError(f"{layout} is Partial, it has no shards. Fix: redistribute it to Shard or Replicate first.")
    mesh = layout.mesh
    replicated = [axis for axis, p in enumerate(layout.placements) if isinstance(p, Replicate)]
    shards = []
    for rank in mesh.ranks:
        coordinate = mesh.coordinate(rank)
        assert coordinate is not None
        if not any(coordinate[axis] for axis in replicated):
            shards += [ShardMetadata(*box, RemoteDevice(rank, mesh.device_type)) for box in layout.boxes(rank)]
    return shards
