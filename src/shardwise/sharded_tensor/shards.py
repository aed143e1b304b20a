"""Shards: their offsets, sizes and placement, and conversion between lists of shards and layouts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from itertools import product as cartesian
from operator import index

import torch
from torch import Tensor

from shardwise._collectives import RemoteDevice
from shardwise._layout import (
    Box,
    Boxes,
    Layout,
    Mesh,
    OnRanks,
    Replicate,
    Shard,
    check_cover,
    checked,
    checked_init,
    shown,
)
from shardwise.errors import LayoutError, MeshError

Ranks = tuple[int, ...]


def placement_of(given: object) -> RemoteDevice:
    """A device of a global rank, written `rank:1/cuda:0`; `rank:1` alone means its CPU.

    `cuda:0` alone is a device without a rank. It can be described, as in torch; nothing can be sharded onto it. Given
    is a string, a `torch.device`, or torch's own `_remote_device`, which the result is.
    """
    found = None
    try:
        found = given if isinstance(given, RemoteDevice) else RemoteDevice(str(given))
    except RuntimeError:
        rank, _, device = str(given).partition("/")
        raise MeshError(
            f"The placement {str(given)!r} names no device torch knows: {device!r}. "
            f"Fix: such as '{rank}/cpu' or '{rank}/cuda:0'."
        ) from None
    except ValueError:
        pass
    if found is None or found.worker_name() is not None:
        raise LayoutError(
            f"A placement is written 'rank:R/device', such as 'rank:1/cpu', or names a device, got {shown(given)}. "
            f"Names of RPC workers are not supported. Fix: the number of the rank, such as 'rank:0/cpu'."
        )
    return found


@checked_init
@dataclass(frozen=True, slots=True, init=False)
class ShardMetadata:
    """One shard of a tensor.

    Args:
        shard_offsets: where it begins, one integer per dim.
        shard_sizes: its shape.
        placement: the rank that holds it, such as "rank:0/cpu"; None if unknown. A device alone, such as "cuda:0", is
            kept; a tensor cannot be sharded with it.

    Raises:
        LayoutError: not as many offsets as sizes, or negative ones.
    """

    shard_offsets: tuple[int, ...]
    shard_sizes: tuple[int, ...]
    placement: RemoteDevice | None

    def __init__(self, shard_offsets: Sequence[int], shard_sizes: Sequence[int], placement: object = None) -> None:
        offsets, sizes = tuple(map(index, shard_offsets)), tuple(map(index, shard_sizes))
        if len(offsets) != len(sizes) or min((*offsets, *sizes), default=0) < 0:
            raise LayoutError(
                f"A shard has as many offsets as sizes, which are not negative, got {offsets} and {sizes}. Fix: one "
                f"of each for each dim; count offsets from the start of the dim; an empty shard has size 0."
            )
        object.__setattr__(self, "shard_offsets", offsets)
        object.__setattr__(self, "shard_sizes", sizes)
        object.__setattr__(self, "placement", None if placement is None else placement_of(placement))

    @property
    def box(self) -> Box:
        """Its offsets and sizes."""
        return Box(self.shard_offsets, self.shard_sizes)

    @property
    def rank(self) -> int:
        """The global rank that holds it.

        Raises:
            LayoutError: the shard has no placement, or one without a rank.
        """
        rank = None if self.placement is None else self.placement.rank()
        if rank is None:
            what = "no placement" if self.placement is None else f"the placement {self.placement}, without a rank"
            fix = f"placement='rank:R/{self.placement or 'cpu'}'"
            raise LayoutError(f"The shard {self.box} has {what}, so no rank holds it. Fix: {fix}.")
        return rank

    @property
    def holder(self) -> str:
        """Who holds it, in errors: a rank, or the device of a placement without one."""
        return f"{self.placement}" if self.placement and self.placement.rank() is None else f"rank {self.rank}"

    def __str__(self) -> str:
        return f"{self.box} on {self.placement}"


def listed(shards: Sequence[ShardMetadata]) -> str:
    """Shards as text."""
    return ", ".join(map(str, shards))


def extent(shards: Sequence[ShardMetadata]) -> tuple[int, ...]:
    """The shape of the smallest tensor that the shards fit into."""
    return tuple(map(max, zip(*(map(sum, zip(*shard.box, strict=True)) for shard in shards), strict=True)))


@checked_init
@dataclass(frozen=True, slots=True)
class TensorProperties:
    """Properties that all shards of a tensor share."""

    dtype: torch.dtype = torch.float32
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: Tensor) -> "TensorProperties":
        """The properties of `tensor`."""
        return TensorProperties(tensor.dtype, tensor.layout, tensor.requires_grad, pin_memory=tensor.is_pinned())


@checked_init
@dataclass(frozen=True, slots=True, init=False)
class ShardedTensorMetadata:
    """All shards of a tensor, its global shape, and its properties."""

    shards_metadata: tuple[ShardMetadata, ...]
    size: torch.Size
    tensor_properties: TensorProperties

    def __init__(
        self, shards_metadata: Sequence[ShardMetadata], size: Sequence[int],
        tensor_properties: TensorProperties | None = None,
    ) -> None:  # fmt: skip
        object.__setattr__(self, "shards_metadata", tuple(shards_metadata))
        object.__setattr__(self, "size", torch.Size(size))
        object.__setattr__(self, "tensor_properties", tensor_properties or TensorProperties())

    def __iter__(self) -> Iterator[ShardMetadata]:
        return iter(self.shards_metadata)


# ---- layouts ----------------------------------------------------------------------------------------------


@checked
def layout_of_shards(shards: Sequence[ShardMetadata], shape: tuple[int, ...], ranks: Ranks) -> Layout:
    """The layout in which every rank of `ranks` holds the shards that are placed on it.

    Shards along one dim become `Shard` on a mesh in the order of the shards, a grid of shards becomes `Shard` on a mesh
    of its shape, a tensor on one rank becomes `OnRanks`: ops have their best rules there. Anything else is `Boxes`.
    """
    if not all(isinstance(shard, ShardMetadata) for shard in shards):
        fix = "ShardMetadata(offsets, sizes, 'rank:0/cpu')"
        raise LayoutError(f"layout_of_shards: shards must be ShardMetadata, got {shown(shards)}. Fix: {fix}.")
    check_cover([(f"rank {shard.rank}", shard.box) for shard in shards], shape)
    ranks = tuple(sorted(ranks))  # the placements decide who holds what, not the order of the group
    held: dict[int, list[Box]] = {rank: [] for rank in ranks}
    for shard in shards:
        if shard.rank not in held:
            raise LayoutError(
                f"The shard {shard} is on a rank that is not of the group, whose ranks are {ranks}. "
                f"Fix: place it on one of these; they are global ranks."
            )
        held[shard.rank].append(shard.box)
    device = _device_type(shards)
    line = Mesh((len(ranks),), ranks, None, device)
    boxes = {shard.rank: shard.box for shard in shards if shard.box.numel or 0 in shape}
    dims = [d for d in range(len(shape)) if any(box.sizes[d] != shape[d] for box in boxes.values())]
    if not boxes or len(dims) > 1 or any(len(row) > 1 for row in held.values()):
        grid = _grid(boxes, dims, shape, device) if len(boxes) == len(ranks) == len(shards) else None
        return grid or Layout(line, [Boxes(list(held.values()))], shape)
    if not dims and len(shards) == 1:
        return Layout(line, [Replicate() if len(ranks) == 1 else OnRanks(ranks.index(shards[0].rank))], shape)
    # One box per rank along one dim: a mesh in the order of the boxes, ranks without one last.
    empty = next((d for s in shards for d, n in enumerate(s.shard_sizes) if not n), 0)  # if one shard holds everything
    dim = dims[0] if dims else empty
    order = sorted(boxes, key=lambda rank: boxes[rank].offsets[dim])
    if order == [rank for rank in ranks if rank in boxes]:  # the natural order, with empty shards in between
        order = [*ranks]
    order = [*dict.fromkeys((*order, *(shard.rank for shard in shards), *ranks))]
    sizes = [boxes[rank].sizes[dim] if rank in boxes else 0 for rank in order]
    return Layout(Mesh((len(order),), tuple(order), None, device), [Shard(dim, sizes)], shape)


def _device_type(shards: Sequence[ShardMetadata]) -> str:
    types = {shard.placement.device().type: shard for shard in shards if shard.placement is not None}
    if len(types) > 1:
        raise LayoutError(
            f"The shards of a tensor live on one kind of device, got {listed(list(types.values()))}. "
            f"Fix: one kind in all placements, such as 'rank:0/cpu' and 'rank:1/cpu'."
        )
    return next(iter(types), "cpu")


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


def device_of(mesh: Mesh, rank: int) -> RemoteDevice:
    """The placement of what a rank of a mesh holds."""
    return RemoteDevice(f"rank:{rank}/{mesh.device_type}")


def shards_of(layout: Layout) -> list[ShardMetadata]:
    """The shards of a tensor with this layout; of replicas, the first."""
    if layout.partial_axes:
        raise LayoutError(f"{layout} is Partial, it has no shards. Fix: redistribute it to Shard or Replicate first.")
    mesh = layout.mesh
    replicated = [axis for axis, p in enumerate(layout.placements) if isinstance(p, Replicate)]
    first = [rank for rank in mesh.ranks if not any((mesh.coordinate(rank) or ())[axis] for axis in replicated)]
    return [ShardMetadata(*box, device_of(mesh, rank)) for rank in first for box in layout.boxes(rank)]
