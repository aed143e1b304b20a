"""Sharding specs: how a tensor of any shape is cut into shards, and on which rank each of them lives.

A spec says the same as a `Layout`, in the words of `torch.distributed._shard`: `ShardingSpec.layout` and `spec_of`
translate.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from itertools import product as cartesian
from typing import Any, ClassVar

from torch import Tensor

from shardwise.errors import LayoutError
from shardwise.layout import Box, Boxes, Layout, Mesh, OnRanks, Placement, Replicate, Shard, check_cover, chunk
from shardwise.sharded_tensor.metadata import (
    RemoteDevice,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)

Ranks = tuple[int, ...]


class ShardingSpec(ABC):
    """How tensors are cut into shards. Subclass it for a cut of your own: `build_metadata` is all it takes."""

    _shard: ClassVar[Callable[..., Any]]  # set by what moves tensors; here they are only described

    @abstractmethod
    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties | None = None
    ) -> ShardedTensorMetadata:
        """The shards of a tensor of shape `tensor_sizes`: boxes that cover it exactly once, each with its rank.

        Raises:
            LayoutError: the spec does not fit this shape.
        """

    def layout(self, shape: Sequence[int], ranks: Ranks) -> Layout:
        """The layout of a tensor of `shape` under this spec, for the `ranks` of a process group.

        Raises:
            LayoutError: shards that overlap, leave a gap, are out of range or on a rank that is not of the group.
        """
        return layout_of_shards(_told(self, tuple(shape)), tuple(shape), ranks)

    def shard(self, tensor: Tensor, src_rank: int = 0, process_group: Any = None) -> Any:
        """A `DTensor`: `tensor` of the rank `src_rank`, cut into shards that are sent to their ranks.

        Args:
            tensor: of one shape and dtype on every rank; only the values of the source are looked at, so the others
                may pass one on the meta device.
            src_rank: position in the process group of the rank whose values count.
            process_group: who takes part; None is everybody.

        Raises:
            LayoutError: the spec does not fit the tensor, or `src_rank` the group.
            MismatchError: spec, source, shape, dtype or `requires_grad` differ between ranks, or the source alone
                has no values, on the meta device.
        """
        return self._shard(self, tensor, src_rank, process_group)


@dataclass(frozen=True, init=False)
class ChunkShardingSpec(ShardingSpec):
    """One dim cut as `torch.chunk` cuts it, into as many shards as there are placements.

    Args:
        dim: the dim, counted from the end if negative.
        placements: who holds each shard, such as `["rank:1/cpu", "rank:0/cpu"]`; in any order, and a rank may hold
            several shards.

    Raises:
        NotImplementedError: a dim given by name.
        LayoutError: no placements, or none of the form 'rank:R/device'.
    """

    dim: int
    placements: tuple[RemoteDevice, ...]

    def __init__(self, dim: int, placements: Sequence[Any]) -> None:
        if isinstance(dim, str):
            raise NotImplementedError(f"ChunkShardingSpec knows dims by number, not by name, got {dim!r}.")
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise LayoutError(f"The dim of a ChunkShardingSpec is an integer, got {dim!r}.")
        if not placements:
            raise LayoutError("A ChunkShardingSpec needs at least one placement, such as 'rank:0/cpu'.")
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "placements", tuple(map(RemoteDevice.parse, placements)))

    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties | None = None
    ) -> ShardedTensorMetadata:
        shape = tuple(tensor_sizes)
        if not -len(shape) <= self.dim < len(shape):
            raise LayoutError(f"{self}: a tensor of shape {shape} has no dim {self.dim}.")
        dim, start, shards = self.dim % len(shape), 0, []
        for size, placement in zip(chunk(shape[dim], len(self.placements)), self.placements, strict=True):
            offsets = [start if d == dim else 0 for d in range(len(shape))]
            sizes = [size if d == dim else n for d, n in enumerate(shape)]
            shards.append(ShardMetadata(offsets, sizes, placement))
            start += size
        return ShardedTensorMetadata(shards, shape, tensor_properties)


@dataclass(frozen=True, init=False)
class EnumerableShardingSpec(ShardingSpec):
    """Every shard by itself: any boxes, any number on a rank, none on some.

    Args:
        shards: boxes that cover a tensor exactly once, each with its placement.

    Raises:
        LayoutError: no shards; shards of different numbers of dims, that overlap or have no placement; other things.
    """

    shards: tuple[ShardMetadata, ...]

    def __init__(self, shards: Sequence[ShardMetadata]) -> None:
        if not shards:
            raise LayoutError("An EnumerableShardingSpec needs at least one shard.")
        strange = [type(shard).__name__ for shard in shards if not isinstance(shard, ShardMetadata)]
        if strange:
            raise LayoutError(f"An EnumerableShardingSpec lists ShardMetadata, got {', '.join(strange)}.")
        dims = sorted({len(shard.shard_sizes) for shard in shards})
        if len(dims) > 1:
            raise LayoutError(f"The shards of a tensor have one number of dims, got {dims}: {_listed(shards)}.")
        object.__setattr__(self, "shards", tuple(shards))
        reach = tuple(max(s.shard_offsets[d] + s.shard_sizes[d] for s in shards) for d in range(dims[0]))
        check_cover([(f"rank {shard.rank}", shard.box) for shard in shards], reach)

    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties | None = None
    ) -> ShardedTensorMetadata:
        shape = tuple(tensor_sizes)
        check_cover([(f"rank {shard.rank}", shard.box) for shard in self.shards], shape)
        return ShardedTensorMetadata(self.shards, shape, tensor_properties)


def _told(spec: ShardingSpec, shape: tuple[int, ...]) -> Sequence[ShardMetadata]:
    """The shards as a spec tells them, which may be of a user's class."""
    told = spec.build_metadata(shape)
    if not isinstance(told, ShardedTensorMetadata):
        raise LayoutError(
            f"{type(spec).__name__}.build_metadata returns ShardedTensorMetadata, got {type(told).__name__}."
        )
    return told.shards_metadata


def words_of(spec: ShardingSpec, shape: Sequence[int] | None = None) -> str:
    """What ranks compare a spec by: its repr, or, of a class without one, its name and its shards of `shape`."""
    if type(spec).__repr__ is not object.__repr__:
        return repr(spec)
    if shape is None:
        return type(spec).__qualname__
    try:
        return f"{type(spec).__qualname__}: {_listed(_told(spec, tuple(shape)))}"
    except LayoutError as error:  # which every rank will meet again, if it is that of every rank
        return f"{type(spec).__qualname__}: {error}"


def _listed(shards: Sequence[ShardMetadata]) -> str:
    return ", ".join(map(str, shards))


# ---- a spec as a layout -----------------------------------------------------------------------------------------


def layout_of_shards(shards: Sequence[ShardMetadata], shape: tuple[int, ...], ranks: Ranks) -> Layout:
    """The layout in which every rank of `ranks` holds the shards that name it.

    A cut along one dim becomes `Shard` on a mesh in the order of the shards, a grid `Shard` on a mesh of its form, a
    tensor on one rank `OnRanks`: ops have their best rules there. Anything else is `Boxes`.

    Raises:
        LayoutError: shards that do not cover the shape exactly once, or are on a rank that is not in `ranks`.
    """
    check_cover([(f"rank {shard.rank}", shard.box) for shard in shards], shape)
    ranks = tuple(sorted(ranks))  # the shards say who holds what; a group in another order is the same layout
    for shard in shards:
        if shard.rank not in ranks:
            raise LayoutError(f"The shard {shard} is on a rank that is not of the group, whose ranks are {ranks}.")
    device = _device_type(shards)
    rows: dict[int, list[Box]] = {rank: [] for rank in ranks}
    for shard in shards:
        rows[shard.rank].append(shard.box)
    single = all(len(row) <= 1 for row in rows.values())
    boxes = {shard.rank: shard.box for shard in shards if shard.box.numel or 0 in shape}
    if single and boxes:
        dims = [d for d in range(len(shape)) if any(box.sizes[d] != shape[d] for box in boxes.values())]
        if not dims and len(rows) == 1:
            return Layout(Mesh((1,), ranks, None, device), [Replicate()], shape)
        if not dims and sum(map(len, rows.values())) == 1:
            return Layout(Mesh((len(ranks),), ranks, None, device), [OnRanks(ranks.index(next(iter(boxes))))], shape)
        if len(dims) <= 1:
            return _line(shards, boxes, dims[0] if dims else _cut_dim(shards), shape, ranks, device)
        if len(boxes) == len(ranks):
            grid = _grid(boxes, dims, shape, device)
            if grid is not None:
                return grid
    return Layout(Mesh((len(ranks),), ranks, None, device), [Boxes([rows[rank] for rank in ranks])], shape)


def _device_type(shards: Sequence[ShardMetadata]) -> str:
    types = {shard.placement.device().type: shard for shard in shards if shard.placement is not None}
    if len(types) > 1:
        raise LayoutError(f"The shards of a tensor live on one kind of device, got {_listed(list(types.values()))}.")
    return next(iter(types), "cpu")


def _cut_dim(shards: Sequence[ShardMetadata]) -> int:
    """Of shards of which one holds everything: the dim along which the others are empty."""
    return next((d for s in shards for d, n in enumerate(s.shard_sizes) if not n), 0)


def _line(
    shards: Sequence[ShardMetadata], boxes: dict[int, Box], dim: int, shape: tuple[int, ...], ranks: Ranks, device: str
) -> Layout:
    """One box a rank along one dim: a mesh in their order, ranks without any at the end."""
    listed = list(dict.fromkeys(shard.rank for shard in shards))
    filled = sorted(boxes, key=lambda rank: boxes[rank].offsets[dim])
    order = (*filled, *(r for r in listed if r not in boxes), *(r for r in ranks if r not in listed))
    if filled == [r for r in ranks if r in boxes]:  # the natural order, with empty shards in between
        order = ranks
    sizes = [boxes[rank].sizes[dim] if rank in boxes else 0 for rank in order]
    return Layout(Mesh((len(order),), order, None, device), [Shard(dim, sizes)], shape)


def _grid(boxes: dict[int, Box], dims: list[int], shape: tuple[int, ...], device: str) -> Layout | None:
    """One box a rank, at every crossing of some cuts; None if they stand otherwise."""
    cuts = [sorted({(box.offsets[d], box.sizes[d]) for box in boxes.values()}) for d in dims]
    if any(a + n != b for cut in cuts for (a, n), (b, _) in pairwise(cut)):
        return None
    at = {tuple((box.offsets[d], box.sizes[d]) for d in dims): rank for rank, box in boxes.items()}
    ranks = [at.get(crossing) for crossing in cartesian(*cuts)]
    if None in ranks or len(ranks) != len(boxes):
        return None
    mesh = Mesh(tuple(map(len, cuts)), tuple(r for r in ranks if r is not None), None, device)
    placements = [Shard(d, [n for _, n in cut]) for d, cut in zip(dims, cuts, strict=True)]
    return Layout(mesh, placements, shape)


# ---- a layout as a spec -----------------------------------------------------------------------------------------


def shards_of(layout: Layout) -> list[ShardMetadata]:
    """The shards of a tensor laid out so; of copies, the first.

    Raises:
        LayoutError: the layout has summands, which are no shards.
    """
    if layout.partial_axes:
        raise LayoutError(f"{layout} has summands, not shards. Fix: redistribute it first.")
    mesh = layout.mesh
    copies = [axis for axis, p in enumerate(layout.placements) if isinstance(p, Replicate)]
    found = []
    for rank in mesh.ranks:
        here = mesh.coordinate(rank)
        assert here is not None
        if not any(here[axis] for axis in copies):
            found += [ShardMetadata(*box, RemoteDevice(rank, mesh.device_type)) for box in layout.boxes(rank)]
    return found


def spec_of(layout: Layout) -> ShardingSpec:
    """The spec that says what `layout` says: by chunks where it is cut so, else shard by shard.

    Raises:
        LayoutError: the layout has copies or summands, of which specs know nothing.
    """
    copies = [a for a, p in enumerate(layout.placements) if isinstance(p, Replicate) and layout.mesh.shape[a] > 1]
    if copies:
        raise LayoutError(f"No sharding spec tells of copies, and {layout} has them. Fix: ask for its layout instead.")
    shards = shards_of(layout)
    if layout.mesh.ndim == 1 and _is_chunks(layout.placements[0]):
        dim = layout.placements[0].dim  # type: ignore[attr-defined]
        return ChunkShardingSpec(dim, [RemoteDevice(rank, layout.mesh.device_type) for rank in layout.mesh.ranks])
    return EnumerableShardingSpec(shards)


def _is_chunks(placement: Placement) -> bool:
    return isinstance(placement, Shard) and placement.sizes is None
