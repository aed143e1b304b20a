"""Shards, and sharding specs: layouts in the terms of `torch.distributed._shard`, and conversion between the two."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from itertools import product as cartesian
from operator import index
from typing import Any

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import RemoteDevice
from shardwise._layout import (
    SEQUENCE,
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
    chunk,
    describe,
    is_integer,
    shown,
)
from shardwise._tensor.arguments import not_dense
from shardwise._tensor.conversion import receive_local_shard
from shardwise._tensor.dtensor import DTensor, plain, remembering, tag, to_layout
from shardwise._torch_bridge.torch_dtensors import converted
from shardwise.errors import LayoutError, MeshError, RuleError

Ranks = tuple[int, ...]


def placement_of(given: object) -> RemoteDevice:
    """A device of a global rank, written `rank:1/cuda:0`; `rank:1` alone means its CPU.

    `cuda:0` alone is a device without a rank: a description, as in torch, that nothing can be sharded onto. Takes a
    string, a `torch.device`, or torch's `_remote_device`, and returns the latter.
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
        shard_offsets: its first index, one integer per dim.
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
            LayoutError: the placement is missing, or has no rank.
        """
        rank = None if self.placement is None else self.placement.rank()
        if rank is None:
            what = "no placement" if self.placement is None else f"the placement {self.placement}, without a rank"
            fix = f"placement='rank:R/{self.placement or 'cpu'}'"
            raise LayoutError(f"The shard {self.box} has {what}, so no rank holds it. Fix: {fix}.")
        return rank

    @property
    def holder(self) -> str:
        """The holder, for errors: a rank, or the device of a placement without one."""
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

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return self.size.numel() * self.tensor_properties.dtype.itemsize


@checked
def layout_of_shards(shards: Sequence[ShardMetadata], shape: tuple[int, ...], ranks: Ranks) -> Layout:
    """The layout in which every rank of `ranks` holds the shards that are placed on it.

    Shards along one dim become `Shard` on a mesh in the order of the shards, a grid of shards becomes `Shard` on a mesh
    of its shape, a tensor on one rank becomes `OnRanks`: ops have their best rules for these. Others become `Boxes`.
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
    """One box per rank on a grid; None if the boxes are not a grid."""
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
    """The placement of a shard on a rank of a mesh."""
    return RemoteDevice(f"rank:{rank}/{mesh.device_type}")


def shards_of(layout: Layout) -> list[ShardMetadata]:
    """The shards of a tensor with this layout; of replicas, only the first."""
    if layout.partial_axes:
        raise LayoutError(f"{layout} is Partial, it has no shards. Fix: redistribute it to Shard or Replicate first.")
    mesh = layout.mesh
    replicated = [axis for axis, p in enumerate(layout.placements) if isinstance(p, Replicate)]
    first = [rank for rank in mesh.ranks if not any((mesh.coordinate(rank) or ())[axis] for axis in replicated)]
    return [ShardMetadata(*box, device_of(mesh, rank)) for rank in first for box in layout.boxes(rank)]


# ---- specs ----------------------------------------------------------------------------------------------------------


@checked_init
@dataclass(frozen=True, init=False)
class DevicePlacementSpec:
    """A device that holds something, such as `"rank:0/cuda:0"` or `"cuda:0"`: a description, as in torch.

    Raises:
        LayoutError, MeshError: another form, or a device that torch does not know.
    """

    device: RemoteDevice

    def __init__(self, device: object) -> None:
        object.__setattr__(self, "device", placement_of(device))


class ShardingSpec(ABC):
    """A rule for the shards of tensors. To define your own, subclass it and implement `build_metadata`."""

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
        return layout_of_shards(_shards(self, tuple(shape)), tuple(shape), ranks)

    def shard(self, tensor: Tensor, src_rank: int = 0, process_group: Any = None) -> Any:
        """A `DTensor` with the values of `tensor` on the source rank, which sends every rank its shards.

        Args:
            tensor: of one shape and dtype on every rank. Only its values on the source are read, so other ranks may
                pass it on the meta device. A `DTensor`, ours or torch's, is resharded, and `src_rank` ignored.
            src_rank: index in the process group of the rank whose values are used.
            process_group: the ranks that take part; None is all.

        Raises:
            LayoutError: the spec does not fit the tensor, or `src_rank` the group.
            MismatchError: spec, source, shape, dtype or `requires_grad` differ between ranks, or only the source
                is on the meta device and so has no values.
        """
        tensor = converted(tensor)
        if isinstance(tensor, DTensor):
            return reshard(tensor, self, process_group)
        ranks = collectives.group_ranks(process_group)
        self._agree_on_source(tensor, src_rank, ranks)
        layout = self.layout(tensor.shape, ranks)
        with torch.no_grad():
            source = tensor.detach() if tensor.is_meta else tensor.detach().to(layout.mesh.device_type)
            result = tag(receive_local_shard(ranks[src_rank], source, layout), layout)
        result._spec = self
        return result.requires_grad_(tensor.requires_grad)

    def _agree_on_source(self, tensor: object, src_rank: int, ranks: Ranks) -> None:
        """Check that all ranks pass equal arguments, and that the source has values."""
        problem = text = ""
        if not isinstance(tensor, Tensor):
            problem = f"only a plain tensor can be sharded, got {shown(tensor)}."
        else:
            text = f"shape {tuple(tensor.shape)}, {tensor.dtype}, requires_grad={tensor.requires_grad}"
            if not is_integer(src_rank) or not 0 <= src_rank < len(ranks):
                problem = (
                    f"src_rank is an index in the process group, 0 to {len(ranks) - 1}, got {shown(src_rank)}. "
                    f"Fix: count it in the group, not among all ranks."
                )
            elif (kind := not_dense(tensor)) is not None:
                problem = f"only a dense tensor can be sharded, got a {kind} one. Fix: to_dense() it."
            elif tensor.is_meta and collectives.rank() == ranks[src_rank]:
                problem = (
                    f"rank {ranks[src_rank]} is the source, but its tensor is on the meta device and has no values. "
                    f"Fix: materialise it there first, such as module.to_empty(device=…), or choose another src_rank."
                )
        spec = describe_spec(self, tensor.shape if isinstance(tensor, Tensor) else None)
        facts = {"spec": spec, "src_rank": shown(src_rank), "tensor": text, "problem": problem}
        fix = "pass the same spec, source, shape, dtype and requires_grad everywhere, and values on the source."
        collectives.agree("how to shard a tensor", facts, tuple(sorted(ranks)), fix)
        if problem:
            raise LayoutError(f"shard: {problem}")


@checked
def reshard(x: DTensor, resharding_spec: ShardingSpec, process_group: object = None) -> DTensor:
    """`x` redistributed to `resharding_spec`; no element is sent twice to the same rank.

    Args:
        resharding_spec: how to shard it.
        process_group: the ranks that hold the result; None: the ranks that hold `x`. Ranks that leave call this with a
            list of ranks: torch hides the members of a group from ranks outside it.

    Raises:
        LayoutError: the spec does not fit.
    """
    same_ranks = process_group is None
    ranks = x._layout.mesh.sorted_ranks if same_ranks else collectives.group_ranks(process_group, leaving=True)
    layout = resharding_spec.layout(x._layout.shape, ranks)
    result = to_layout(x, layout)
    if result is x:  # its own spec stays
        result = remembering(x, tag(plain(x), layout))
    result._spec = resharding_spec
    return result


@checked_init
@dataclass(frozen=True, init=False)
class ChunkShardingSpec(ShardingSpec):
    """One dim sharded as by `torch.chunk`, into as many shards as there are placements.

    Args:
        dim: the dim, counted from the end if negative.
        placements: the rank that holds each shard, such as `["rank:1/cpu", "rank:0/cpu"]`; in any order, and a rank may
            hold several shards. Devices without a rank, such as `"cuda:0"`, give metadata only: sharding by such a spec
            is a LayoutError.

    Raises:
        NotImplementedError: a dim given by name.
        LayoutError: no placements, or one of another form.
        MeshError: a rank with a device that torch does not know.
    """

    dim: int
    placements: tuple[RemoteDevice, ...]

    def __init__(self, dim: int | str, placements: Sequence[Any]) -> None:
        if isinstance(dim, str):
            raise RuleError(f"ChunkShardingSpec takes dims by number, not by name, got {dim!r}. Fix: such as 0.")
        if not placements:
            raise LayoutError("A ChunkShardingSpec needs at least one placement, got none. Fix: such as 'rank:0/cpu'.")
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "placements", tuple(map(placement_of, placements)))

    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties | None = None
    ) -> ShardedTensorMetadata:
        shape = tuple(tensor_sizes)
        if not -len(shape) <= self.dim < len(shape):
            fix = f"a dim below {len(shape)}" if shape else "an EnumerableShardingSpec with one shard"
            raise LayoutError(f"{self}: a tensor of shape {shape} has no dim {self.dim}. Fix: {fix}.")
        dim, full = self.dim % len(shape), Box((0,) * len(shape), shape)
        sizes = chunk(shape[dim], len(self.placements))
        chunks = zip(accumulate(sizes, initial=0), sizes, self.placements, strict=False)
        shards = [ShardMetadata(*full.along(dim, start, n), placement) for start, n, placement in chunks]
        return ShardedTensorMetadata(shards, shape, tensor_properties)


describe(Sequence[ShardMetadata], SEQUENCE)


@checked_init
@dataclass(frozen=True, init=False)
class EnumerableShardingSpec(ShardingSpec):
    """A list of shards: any boxes, any number of them on a rank.

    Args:
        shards: boxes that cover a tensor exactly once, each with its placement; devices without a rank as in
            `ChunkShardingSpec`.

    Raises:
        LayoutError: no shards, another type, different numbers of dims, overlaps, or no placement.
    """

    shards: tuple[ShardMetadata, ...]

    def __init__(self, shards: Sequence[ShardMetadata]) -> None:
        wrong_types = [type(shard).__name__ for shard in shards if not isinstance(shard, ShardMetadata)]
        if wrong_types or not shards:
            got = ", ".join(wrong_types) or "none, and needs at least one"
            raise LayoutError(
                f"An EnumerableShardingSpec lists ShardMetadata, got {got}. "
                f"Fix: ShardMetadata(offsets, sizes, 'rank:0/cpu') of each."
            )
        dims = sorted({len(shard.shard_sizes) for shard in shards})
        if len(dims) > 1:
            raise LayoutError(
                f"The shards of a tensor have one number of dims, got {dims}: {listed(shards)}. "
                f"Fix: as many offsets and sizes in each as the tensor has dims."
            )
        object.__setattr__(self, "shards", tuple(shards))
        check_cover([(shard.holder, shard.box) for shard in shards], extent(shards))

    def build_metadata(
        self, tensor_sizes: Sequence[int], tensor_properties: TensorProperties | None = None
    ) -> ShardedTensorMetadata:
        check_cover([(shard.holder, shard.box) for shard in self.shards], tuple(tensor_sizes))
        return ShardedTensorMetadata(self.shards, tensor_sizes, tensor_properties)


def _shards(spec: ShardingSpec, shape: tuple[int, ...]) -> Sequence[ShardMetadata]:
    """The shards by `build_metadata`, which a user may have defined."""
    found = spec.build_metadata(torch.Size(shape), TensorProperties())
    if isinstance(found, ShardedTensorMetadata):
        return found.shards_metadata
    raise LayoutError(
        f"{type(spec).__name__}.build_metadata returns ShardedTensorMetadata, got {type(found).__name__}. "
        f"Fix: return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)."
    )


def describe_spec(spec: ShardingSpec, shape: Sequence[int] | None = None) -> str:
    """Text for comparison between ranks: the repr of a spec, or the name of its class and the shards of `shape`."""
    if type(spec).__repr__ is not object.__repr__:
        return repr(spec)
    if shape is None:
        return type(spec).__qualname__
    try:
        return f"{type(spec).__qualname__}: {listed(_shards(spec, tuple(shape)))}"
    except LayoutError as error:  # raised again by every rank that has it, after they agree
        return f"{type(spec).__qualname__}: {error}"


@checked
def spec_of(layout: Layout) -> ShardingSpec:
    """The spec that is equivalent to `layout`: a `ChunkShardingSpec` where possible, else a list of shards."""
    replicated = [a for a, p in enumerate(layout.placements) if isinstance(p, Replicate) and layout.mesh.shape[a] > 1]
    if replicated:
        raise LayoutError(f"No sharding spec expresses replication, and {layout} has it. Fix: use its layout instead.")
    shards = shards_of(layout)
    match layout.placements:
        case (Shard(dim=dim, sizes=None),):
            return ChunkShardingSpec(dim, [device_of(layout.mesh, rank) for rank in layout.mesh.ranks])
    return EnumerableShardingSpec(shards)
