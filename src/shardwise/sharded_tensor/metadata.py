"""Metadata of shards: offsets, sizes and placement."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import index

import torch
from torch import Tensor

from shardwise.errors import LayoutError, MeshError
from shardwise.layout import Box, checked_init, shown


@checked_init
@dataclass(frozen=True, slots=True, repr=False)
class RemoteDevice:
    """A device of a global rank, written `rank:1/cuda:0`; `rank:1` alone means its CPU.

    `cuda:0` alone is a device without a rank. It can be described, as in torch; nothing can be sharded onto it.
    """

    of_rank: int | None
    of_device: str = "cpu"

    @staticmethod
    def parse(text: object) -> "RemoteDevice":
        """From a string, a `torch.device`, a `RemoteDevice`, or torch's own `_remote_device`.

        Raises:
            LayoutError: another form, such as the name of an RPC worker.
            MeshError: a rank with a device that torch does not know.
        """
        if isinstance(text, RemoteDevice):
            return text
        who, has_device, device = str(text).partition("/")
        if not has_device and (local := _device(who)) is not None:
            return RemoteDevice(None, local)
        kind, _, number = who.partition(":")
        if kind != "rank" or not (number.isascii() and number.isdigit()):
            raise LayoutError(
                f"A placement is written 'rank:R/device', such as 'rank:1/cpu', or names a device, got {shown(text)}. "
                f"Names of RPC workers are not supported. Fix: the number of the rank, such as 'rank:0/cpu'."
            )
        if (found := _device(device if has_device else "cpu")) is None:
            raise MeshError(
                f"The placement {str(text)!r} names no device torch knows: {device!r}. "
                f"Fix: such as 'rank:{int(number)}/cpu' or 'rank:{int(number)}/cuda:0'."
            )
        return RemoteDevice(int(number), found)

    def rank(self) -> int | None:
        """The global rank; None of a device without a rank."""
        return self.of_rank

    def device(self) -> torch.device:
        """The device, as that rank sees it."""
        return torch.device(self.of_device)

    def __repr__(self) -> str:
        return self.of_device if self.of_rank is None else f"rank:{self.of_rank}/{self.of_device}"


def _device(text: str) -> str | None:
    try:
        return str(torch.device(text))
    except RuntimeError:
        return None


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
        if len(offsets) != len(sizes):
            raise LayoutError(
                f"A shard has as many offsets as sizes, got {offsets} and {sizes}. Fix: one of each for each dim."
            )
        if min((*offsets, *sizes), default=0) < 0:
            raise LayoutError(
                f"Offsets and sizes of a shard are not negative, got {offsets} and {sizes}. "
                f"Fix: count offsets from the start of each dim; an empty shard has size 0."
            )
        object.__setattr__(self, "shard_offsets", offsets)
        object.__setattr__(self, "shard_sizes", sizes)
        object.__setattr__(self, "placement", None if placement is None else RemoteDevice.parse(placement))

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
        if self.placement is None or self.placement.of_rank is None:
            what = "no placement" if self.placement is None else f"the placement {self.placement}, without a rank"
            raise LayoutError(
                f"The shard {self.box} has {what}, so no rank holds it. "
                f"Fix: placement='rank:R/{self.placement.of_device if self.placement else 'device'}'."
            )
        return self.placement.of_rank

    @property
    def holder(self) -> str:
        """Who holds it, in errors: a rank, or the device of a placement without one."""
        if self.placement is not None and self.placement.of_rank is None:
            return self.placement.of_device
        return f"rank {self.rank}"

    def __str__(self) -> str:
        return f"{self.box} on {self.placement}"


def listed(shards: Sequence[ShardMetadata]) -> str:
    """Shards as text."""
    return ", ".join(map(str, shards))


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
        """Those of `tensor`."""
        return TensorProperties(tensor.dtype, tensor.layout, tensor.requires_grad, pin_memory=tensor.is_pinned())


@checked_init
@dataclass(frozen=True, slots=True, init=False)
class ShardedTensorMetadata:
    """All shards of a tensor, its global shape, and its properties."""

    shards_metadata: tuple[ShardMetadata, ...]
    size: torch.Size
    tensor_properties: TensorProperties

    def __init__(
        self,
        shards_metadata: Sequence[ShardMetadata],
        size: Sequence[int],
        tensor_properties: TensorProperties | None = None,
    ) -> None:
        object.__setattr__(self, "shards_metadata", tuple(shards_metadata))
        object.__setattr__(self, "size", torch.Size(size))
        object.__setattr__(self, "tensor_properties", tensor_properties or TensorProperties())

    def __iter__(self) -> Iterator[ShardMetadata]:
        return iter(self.shards_metadata)

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return prod(self.size) * self.tensor_properties.dtype.itemsize
