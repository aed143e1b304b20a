"""Substitutes for functions whose Python code reads shapes.

A DTensor reports its global shape there, so such code needs plain local tensors. A substitute takes the DTensors
directly.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.rules.registry import amend
from shardwise.rules.row import Op
from shardwise.tensor.handlers.copies import mark_copy


def _view_or_copy(x: Tensor, size: Any) -> Tensor:
    """C++ asks for a view where the strides of the global tensor allow one; those of the local tensor may not."""
    try:
        return x.view(size)
    except RuntimeError:
        return mark_copy(x.reshape(size))


NATIVE: dict[Op, Op] = {
    F.relu: lambda input, inplace=False: torch.relu_(input) if inplace else torch.relu(input),
    F.sigmoid: torch.sigmoid,
    F.tanh: torch.tanh,
    F.softmax: lambda input, dim=None, _stacklevel=3, dtype=None: torch.softmax(input, dim, dtype),
    F.log_softmax: lambda input, dim=None, _stacklevel=3, dtype=None: torch.log_softmax(input, dim, dtype),
    F.layer_norm: torch.layer_norm,
    F.rms_norm: torch.rms_norm,
    torch.ops.aten.view.default: _view_or_copy,
    Tensor.__rpow__: lambda x, other: torch.pow(other, x),
    Tensor.__rsub__: torch.rsub,
    Tensor.__rdiv__: lambda x, other: torch.reciprocal(x) * other,
}
for _op, _native in NATIVE.items():
    amend(_op, native=_native)
