"""The base class of this library's autograd functions, and their context."""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


class Context(Protocol):
    """The values that `forward` keeps for `backward`: tensors, and others in `args`."""

    args: Any
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class TensorFunction(torch.autograd.Function):
    """An autograd function of one result. Torch leaves `apply` without a type."""

    apply: ClassVar[Callable[..., Tensor]]
