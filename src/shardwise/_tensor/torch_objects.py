"""Checks for objects of `torch.distributed.tensor`, without importing it."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard, cast

import torch
from torch import Tensor

from shardwise import _collectives as collectives


class TorchPlacement(Protocol):
    """A placement of `torch.distributed.tensor`."""

    def is_shard(self) -> bool: ...


class TorchDTensor(Protocol):
    """A DTensor of `torch.distributed.tensor`, which takes long to import."""

    is_meta: bool
    shape: torch.Size
    device_mesh: collectives.DeviceMesh
    placements: tuple[TorchPlacement, ...]

    def detach(self) -> "TorchDTensor": ...
    def to_local(self) -> Tensor: ...
    def full_tensor(self) -> Tensor: ...
    def stride(self) -> tuple[int, ...]: ...
    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: collectives.DeviceMesh,
        placements: Sequence[TorchPlacement],
        *,
        run_check: bool,
        shape: torch.Size,
        stride: tuple[int, ...],
    ) -> Tensor: ...


def is_torch_dtensor(x: object) -> TypeGuard[TorchDTensor]:
    """Whether `x` is a DTensor of `torch.distributed.tensor`, which knows nothing of ours."""
    return is_torch_dtensor_class(type(x))


def is_torch_dtensor_class(kind: type) -> bool:
    """Whether a class is that of the DTensors of `torch.distributed.tensor`, or a subclass."""
    return any(cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed.") for cls in kind.__mro__)


def arrived(x: Tensor) -> Tensor:
    """`x`, after a wait if it is an `AsyncCollectiveTensor` of torch, the result of a running collective."""
    if type(x).__name__ != "AsyncCollectiveTensor":
        return x
    return x.clone() if x.requires_grad else cast(Any, x).trigger_wait()


TORCH_DTENSOR = "DTensor.from_torch_dtensor(x) makes a DTensor of shardwise from torch's"
