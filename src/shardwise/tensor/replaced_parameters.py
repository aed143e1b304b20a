"""Parameters that were replaced in their modules: an optimizer that was made before still holds them."""

import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils.weak import TensorWeakRef

from shardwise.errors import OptimizerError

LISTED = 5  # names in the error
_GRAD = vars(torch._C.TensorBase)["grad"]  # of a DTensor, reading `.grad` reduces it


class _Replaced(NamedTuple):
    parameter: "weakref.ref[nn.Parameter]"
    name: str
    grad: Callable[[], Tensor | None]  # the gradient that it had, as long as it exists


_replaced: dict[int, _Replaced] = {}  # by id; those that something still holds


def note_replaced(parameter: object, name: str) -> None:
    """Remember that another parameter took the place of this one in a module, as long as anything still holds it."""
    if isinstance(parameter, nn.Parameter):
        key, grad = id(parameter), _gradient(parameter)
        ref = weakref.ref(parameter, lambda _: _replaced.pop(key, None))
        _replaced[key] = _Replaced(ref, name, (lambda: None) if grad is None else TensorWeakRef(grad))


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    """The gradient, unreduced."""
    with DisableTorchFunctionSubclass():
        grad: Tensor | None = _GRAD.__get__(parameter)
    return grad


def holds_replaced(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a parameter among these was replaced in a module."""
    return bool(_replaced) and any(map(_found, parameters))


def _found(parameter: nn.Parameter) -> _Replaced | None:
    found = _replaced.get(id(parameter))
    return found if found is not None and found.parameter() is parameter else None


def refuse_replaced(optimizer: object, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse a step of an optimizer that holds replaced parameters without a new gradient: it would change nothing.

    One with a new gradient is still trained, by another module. A frozen one would not change anyway.

    Raises:
        OptimizerError: the names of all of them; ranks shard alike, so it is the same on every rank.
    """
    if not _replaced:
        return
    names, count = [], 0
    for count, p in enumerate(parameters, 1):  # noqa: B007 - their number
        found = _found(p)
        if found is not None and p.requires_grad and ((grad := _gradient(p)) is None or grad is found.grad()):
            names.append(found.name)
    if names:
        listed = ", ".join(names[:LISTED]) + (", …" if len(names) > LISTED else "")
        raise OptimizerError(
            f"{type(optimizer).__name__}.step() would not change {len(names)} of its {count} parameters in their "
            f"module: {listed}. They were replaced there after the optimizer was made. Fix: make the optimizer after "
            f"the module is sharded."
        )
