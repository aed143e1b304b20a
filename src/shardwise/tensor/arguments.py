"""How tensors, modules and placements read in the errors of `checked` functions."""

import os
from collections.abc import Sequence
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn

from shardwise import collectives
from shardwise.errors import LayoutError
from shardwise.layout import Kind, Layout, describe
from shardwise.tensor.dtensor import DTensor


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


TORCH_DTENSOR = "DTensor.from_torch_dtensor(x) makes a DTensor of shardwise from torch's"


def not_dense(x: Tensor) -> str | None:
    """What `x` is if it is not strided, such as sparse_coo: it has no shards along its dims."""
    if x.layout is torch.strided and not x.is_quantized and not x.is_nested:
        return None
    return "quantized" if x.is_quantized else "nested" if x.is_nested else str(x.layout).removeprefix("torch.")


def check_dense(x: Tensor, what: str) -> None:
    """Raise LayoutError unless `x` is strided."""
    kind = not_dense(x)
    if kind is not None:
        fix = "x.dequantize()" if x.is_quantized else "x.to_dense()" if not x.is_nested else "x.to_padded_tensor(0.0)"
        raise LayoutError(f"{what} takes a dense tensor, got a {kind} one. Fix: pass {fix}.")


def _misuse(x: object) -> str:
    return TORCH_DTENSOR if is_torch_dtensor(x) else ""


def _names_device(x: object) -> bool:
    try:
        return isinstance(x, str) and torch.device(x) is not None
    except RuntimeError:
        return False


def _one_of(cls: type, expected: str, fix: str = "") -> Kind:
    return Kind(expected, lambda value: isinstance(value, cls), fix, misuse=_misuse)


describe(
    Tensor, Kind("a tensor", lambda x: isinstance(x, Tensor) and not is_torch_dtensor(x), "", LayoutError, _misuse)
)
describe(
    TorchDTensor, Kind("a DTensor of torch", is_torch_dtensor, "DTensor.from_local() takes a local tensor", LayoutError)
)
describe(DTensor, _one_of(DTensor, "a DTensor", "distribute_tensor() makes one"))
describe(nn.Module, _one_of(nn.Module, "an nn.Module"))
describe(torch.dtype, _one_of(torch.dtype, "a dtype", "such as torch.float32"))
describe(Layout, _one_of(Layout, "a Layout", "such as Layout(Mesh((2,)), [Shard(0)], (4, 3))"))
describe(
    torch.device | str, Kind("a device", lambda x: isinstance(x, torch.device) or _names_device(x), "'cpu' or 'cuda'")
)
describe(os.PathLike[str], _one_of(os.PathLike, "a path"))
