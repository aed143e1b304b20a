"""Observers of every call with a DTensor: hooks of tools, and records of the numbers that are passed.

    x[rank()]    # rank 0 selects row 0, rank 1 row 1: an error at the next collective if ranks record numbers

Without either, calls go to `dispatcher.dispatch` directly.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Number
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Mesh
from shardwise._rules.row import Args, Handler, Kwargs, Op
from shardwise._tensor.dispatch import dispatcher
from shardwise._tensor.dtensor import dtensors_in, name_of, set_dispatcher
from shardwise._trace.capture_hooks import is_capturing

# ---- hooks ------------------------------------------------------------------------------------------------------

Proceed = Callable[[], Any]
Hook = Callable[[Proceed, Any, Args, Kwargs], Any]  # (proceed, func, args, kwargs); proceed() runs the call

_hooks: "WeakKeyDictionary[Any, list[Hook]]" = WeakKeyDictionary()  # by transport: simulated ranks have one each


@contextmanager
def hook_calls(hook: Hook) -> Iterator[None]:
    """Inside, `hook` gets every function that this rank calls with a DTensor.

    It also gets the aten ops of a decomposed function, if they have a rule. The last installed hook is called first.
    """
    mine = _hooks.setdefault(collectives.transport(), [])
    mine.append(hook)
    _choose_dispatcher()
    try:
        yield
    finally:
        mine.remove(hook)
        _choose_dispatcher()


def are_installed() -> bool:
    """Whether any rank of this process has a hook installed."""
    return _state.hooked


def _choose_dispatcher(noting: bool | None = None) -> None:
    if noting is not None:
        _state.noting = noting
    _state.hooked = any(_hooks.values())
    proceed = _call_hooks if _state.hooked else dispatcher.dispatch
    set_dispatcher(partial(record_numbers, proceed) if _state.noting else proceed)


class _State:
    hooked = False  # whether a rank of this process has a hook installed
    noting = False  # whether a rank of this process notes numbers


_state = _State()
collectives.when_noting_numbers(_choose_dispatcher)
_conditions: list[Callable[[Iterable[Any]], bool]] = []


def dispatch_each_op_if(condition: Callable[[Iterable[Any]], bool]) -> None:
    """Dispatch composite steps, such as those of optimizers, op by op for tensors that meet the condition."""
    if condition not in _conditions:
        _conditions.append(condition)


def dispatches_each_op(tensors: Iterable[Any]) -> bool:
    """Whether hooks, or functions that are overridden for some of `tensors`, must see every op."""
    return _state.hooked or (bool(_conditions) and any(condition(tensors) for condition in _conditions))


def _call_hooks(func: Op, args: Args, kwargs: Kwargs) -> object:
    proceed: Proceed = partial(dispatcher.dispatch, func, args, kwargs)
    for hook in _hooks.get(collectives.transport(), ()):
        proceed = partial(hook, proceed, func, args, kwargs)
    return proceed()


# ---- numbers ----------------------------------------------------------------------------------------------------

# Which run the user's code, or take the number of a device, which differs between ranks.
_NOT_RECORDED = {torch.autograd.backward, torch.autograd.grad, Tensor.to, Tensor.cuda, Tensor.xpu}


class _Recording(threading.local):
    inside = False  # a call whose numbers were recorded


_recording = _Recording()


def record_numbers(proceed: Handler, func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Record the numbers of a user's call, not of its inner calls, and run it."""
    if _recording.inside or func in _NOT_RECORDED:
        return proceed(func, args, kwargs)
    _recording.inside = True
    try:
        numbers = dict(numbers_of({f"argument {i}": x for i, x in enumerate(args)} | kwargs))
        tensors = dtensors_in((*args, *kwargs.values())) if numbers else []
        if tensors:
            expect_equal_numbers(numbers, tensors[0]._layout.mesh, name_of(func))
        return proceed(func, args, kwargs)
    finally:
        _recording.inside = False


def expect_equal_numbers(numbers: Mapping[str, complex], mesh: Mesh, what: str) -> None:
    """Record numbers, by name, that must be equal on all ranks of a mesh in calls of `what`."""
    collectives.expect_equal_numbers(numbers, tuple(sorted(mesh.ranks)), what)


def expect_equal_options(kind: type, options: Mapping[str, object], group: int, ranks: tuple[int, ...]) -> None:
    """Record the numbers among the options of a step of an optimizer of class `kind`, and the class."""

    def numbers() -> dict[str, complex]:
        digest = (
            collectives.stable_digest(kind.__name__) % 1_000_000 / 1e6
        )  # large values would hide small differences of others
        return {"a digest of its class": digest, **dict(numbers_of(options))}

    collectives.expect_equal_options(numbers, group, ranks, f"{kind.__name__}.step() of parameter group {group}")


def numbers_of(arguments: Mapping[str, object]) -> Iterator[tuple[str, complex]]:
    """The numbers among arguments, by name: `argument 1`, `argument 1[0].start`."""
    for name, value in arguments.items():
        if isinstance(value, (int, float, complex, Number)):
            yield name, value  # type: ignore[misc]
        elif isinstance(value, slice):
            yield from numbers_of({f"{name}.{part}": getattr(value, part) for part in ("start", "stop", "step")})
        elif isinstance(value, list | tuple):
            yield from numbers_of({f"{name}[{i}]": x for i, x in enumerate(value)})
        elif type(value) is Tensor and value.numel() == 1 and value.device.type == "cpu" and not is_capturing():
            yield name, value.item()
