"""Dtypes that every backend sends."""

import torch
from torch import Tensor

_SUPPORTED = (torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.uint8, torch.int8)
_OF_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def as_supported(x: Tensor) -> Tensor:
    """The same memory in a dtype that every backend supports."""
    if x.dtype in _SUPPORTED:
        return x
    if x.element_size() == 16:  # complex128: one row an element, so that split sizes still count elements
        return x.view(torch.int64).view(x.numel(), 2)
    return x.view(_OF_SIZE[x.element_size()])
