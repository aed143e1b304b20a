"""The base class of this library's autograd functions."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor


class TensorFunction(torch.autograd.Function):
    """An autograd function of one result. Torch leaves `apply` without a type."""

    apply: ClassVar[Callable[..., Tensor]]
