"""Parameters that were replaced in their modules: an optimizer that was made before still holds them."""

import warnings
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

LISTED = 5  # names in the warning
_GRAD = vars(torch._C.TensorBase)["grad"]  # of a DTensor, reading `.grad` reduces it


class _Replaced(NamedTuple):
    parameter: "weakref.ref[nn.Parameter]"
    name: str
    grad: int  # id of the gradient that it had; 0: none


_replaced: dict[int, _Replaced] = {}  # by id; those that something still holds


def note_replaced(parameter: object, name: str) -> None:
    """Remember that another parameter took the place of this one in a module, as long as anything still holds it."""
    if isinstance(parameter, nn.Parameter):
        key = id(parameter)
        ref = weakref.ref(parameter, lambda _: _replaced.pop(key, None))
        _replaced[key] = _Replaced(ref, name, _gradient(parameter))


def _gradient(parameter: nn.Parameter) -> int:
    """Which gradient it has, unreduced; 0: none."""
    with DisableTorchFunctionSubclass():
        grad = _GRAD.__get__(parameter)
    return 0 if grad is None else id(grad)


def warn_of_replaced(optimizer: object, parameters: Iterable[nn.Parameter]) -> None:
    """Warn, once, if an optimizer that takes a step holds replaced parameters that got no gradient since.

    One with a new gradient is still used by another module.
    """
    if not _replaced:
        return
    names, count = [], 0
    for count, p in enumerate(parameters, 1):  # noqa: B007 - their number
        found = _replaced.get(id(p))
        if found is not None and found.parameter() is p and _gradient(p) in (0, found.grad):
            names.append(found.name)
            del _replaced[id(p)]
    if names:
        listed = ", ".join(names[:LISTED]) + (", …" if len(names) > LISTED else "")
        warnings.warn(
            f"This step of {type(optimizer).__name__} does not change {len(names)} of its {count} parameters in their "
            f"module: {listed}. They were replaced there after the optimizer was made. Fix: make the optimizer after "
            f"the module is sharded.",
            stacklevel=4,  # the caller of `step`
        )
