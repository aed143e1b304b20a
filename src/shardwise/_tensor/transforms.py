"""Errors where `torch.func`, forward-mode autograd or `torch.compile` meets DTensors: all transform plain tensors only.

torch.func.grad(lambda v: (v * w).sum())(v)                    refused if v or w is a DTensor
torch.func.grad(lambda v: (v * w.full_tensor()).sum())(v)      refused: w would lose its gradient
full = w.full_tensor()
torch.func.grad(lambda v: (v * full).sum())(v)
"""

from collections.abc import Callable
from functools import cache
from typing import NoReturn

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd import forward_ad

from shardwise._tensor.torch_objects import TORCH_DTENSOR, is_torch_dtensor
from shardwise.errors import CaptureError, LayoutError, RuleError

FORWARD_MODE = "forward-mode autograd"
FUNC = "torch.func"

_is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def refuse_transform(what: str) -> NoReturn:
    raise RuleError(
        f"{what} would transform the local tensor of a DTensor as if it were the full tensor. Fix: transform a "
        f"function of local tensors inside shardwise.experimental.local_map, or use torch.autograd; a DTensor that is "
        f"constant in the function may be gathered before, with full_tensor()."
    )


def check_untransformed(x: Tensor, where: str) -> None:
    """Refuse a plain tensor beside DTensors that `torch.func` transforms or that has a tangent: both would be lost.

    Also refuses a DTensor of torch, which is not a plain tensor. Runs for every plain operand, so it only reads flags.
    """
    if type(x) is not Tensor and is_torch_dtensor(x):
        raise LayoutError(f"{where} is a DTensor of torch. Fix: {TORCH_DTENSOR}.")
    if _is_transformed(x):
        refuse_transform(f"{where}: {FUNC}")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        refuse_transform(f"{where}: {FORWARD_MODE}")


def check_no_transform(where: str) -> None:
    """Refuse to redistribute or convert a DTensor in a function that `torch.func` transforms.

    There no result shows that it requires grad, so the loss cannot be detected.
    """
    if _are_transforms_active() and torch.is_grad_enabled():
        refuse_transform(f"{where}: {FUNC}")


def refuse_compilation() -> None:
    """Raise if `torch.compile` is tracing.

    The compiler does not trace this function, but calls it where traced code does, such as in a module's hook.

    Raises:
        CaptureError: with the line of the user's code.
    """
    if TracingContext.try_get() is not None:
        raise _compile_error()(
            "torch.compile cannot trace a DTensor. Fix: shardwise.capture(module, backend='inductor'), which "
            "captures the step and compiles its local ops."
        )


vars(refuse_compilation)["_dynamo_marked_constant"] = True  # `assume_constant_result`, which takes seconds to import


@cache
def _compile_error() -> type[CaptureError]:
    """A CaptureError with the line of user code, which torch.compile does not wrap as it does others."""
    from torch._dynamo.exc import TorchRuntimeError

    return type("CaptureError", (CaptureError, TorchRuntimeError), {"__module__": CaptureError.__module__})
