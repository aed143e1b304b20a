"""Texts of tensors, modules and placements in the errors of `checked` functions."""

import os

import torch
from torch import Tensor, nn

from shardwise._layout import Kind, Layout, describe
from shardwise._tensor.dtensor import DTensor
from shardwise._tensor.torch_objects import TORCH_DTENSOR, TorchDTensor, is_torch_dtensor
from shardwise.errors import LayoutError


def not_dense(x: Tensor) -> str | None:
    """The kind of `x` if it is not strided, such as sparse_coo, or has no memory: it has no shards."""
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not x.is_nested:
        return type(x).__name__
    if x.layout is torch.strided and not x.is_quantized and not x.is_nested:
        return None
    return "quantized" if x.is_quantized else "nested" if x.is_nested else str(x.layout).removeprefix("torch.")


def check_dense(x: Tensor, what: str) -> None:
    """Raise LayoutError unless `x` is strided."""
    kind = not_dense(x)
    if kind is not None:
        fixes = {"quantized": "x.dequantize()", "nested": "x.to_padded_tensor(0.0)", type(x).__name__: "a plain tensor"}
        raise LayoutError(
            f"{what} takes a dense tensor, got a {kind} one. Fix: pass {fixes.get(kind, 'x.to_dense()')}."
        )


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
describe(Tensor | TorchDTensor, Kind("a tensor", lambda x: isinstance(x, Tensor), "", LayoutError))
describe(DTensor, _one_of(DTensor, "a DTensor", "distribute_tensor() makes one"))
describe(nn.Module, _one_of(nn.Module, "an nn.Module"))
describe(torch.dtype, _one_of(torch.dtype, "a dtype", "such as torch.float32"))
describe(Layout, _one_of(Layout, "a Layout", "such as Layout(Mesh((2,)), [Shard(0)], (4, 3))"))
describe(
    torch.device | str, Kind("a device", lambda x: isinstance(x, torch.device) or _names_device(x), "'cpu' or 'cuda'")
)
describe(os.PathLike[str], _one_of(os.PathLike, "a path"))
