"""Numbers among the arguments of ops, compared between ranks while a rank watches (`collectives/value_notes.py`).

x[rank()]       # rank 0 selects row 0, rank 1 row 1: an error at the next collective
x * rank()
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.layout import Mesh
from shardwise.rules.row import Args, Handler, Kwargs, Op
from shardwise.tensor.dispatch.names import name_of
from shardwise.tensor.dtensor import DTensor
from shardwise.trace.capture_hooks import is_capturing

# Which run the user's code, or take the number of a device, which differs between ranks.
_NOT_NOTED = {torch.autograd.backward, torch.autograd.grad, Tensor.to, Tensor.cuda, Tensor.xpu}


class _State(threading.local):
    inside = False  # a call whose numbers were noted


_state = _State()


def noted(proceed: Handler, func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Note the numbers of a call of the user's, not of those that it is made of, and run it."""
    if _state.inside or func in _NOT_NOTED:
        return proceed(func, args, kwargs)
    _state.inside = True
    try:
        numbers = dict(numbers_of({f"argument {i}": x for i, x in enumerate(args)} | kwargs))
        mesh = _mesh_of((*args, *kwargs.values())) if numbers else None
        if mesh is not None:
            note_numbers(numbers, mesh, name_of(func))
        return proceed(func, args, kwargs)
    finally:
        _state.inside = False


def note_numbers(numbers: Mapping[str, complex], mesh: Mesh, what: str) -> None:
    """Note numbers, by name, that all ranks of a mesh should pass to `what`."""
    collectives.expect_equal_numbers(numbers, tuple(sorted(mesh.ranks)), what)


def numbers_of(arguments: Mapping[str, object]) -> Iterator[tuple[str, complex]]:
    """The numbers among arguments, by name: `argument 1`, `argument 1[0].start`."""
    for name, value in arguments.items():
        if isinstance(value, Number):
            yield name, value  # type: ignore[misc]
        elif isinstance(value, slice):
            yield from numbers_of({f"{name}.{part}": getattr(value, part) for part in ("start", "stop", "step")})
        elif isinstance(value, list | tuple):
            yield from numbers_of({f"{name}[{i}]": x for i, x in enumerate(value)})
        elif type(value) is Tensor and value.numel() == 1 and value.device.type == "cpu" and not is_capturing():
            yield name, value.item()


def _mesh_of(values: Sequence[object]) -> Mesh | None:
    for x in values:
        if type(x) is DTensor:
            return x._layout.mesh
        if isinstance(x, list | tuple) and (found := _mesh_of(x)) is not None:
            return found
    return None
