"""Autocast around captured calls: the casts are ops of the graph, so a replay runs without autocast."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
State = tuple[tuple[str, torch.dtype], ...]

DEVICES = ("cpu", "cuda", "xpu", "mtia", "hpu")


def autocast_state() -> State:
    """The devices for which autocast is on, with its dtypes."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple((d, torch.get_autocast_dtype(d)) for d in DEVICES if torch.is_autocast_enabled(d))


def with_autocast(state: State, function: Callable[P, T]) -> Callable[P, T]:
    """`function` under the autocast of `state`, whatever is on where it is called."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        present = autocast_state()
        if present == state:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for device, _ in present:
                stack.enter_context(torch.autocast(device, enabled=False))
            for device, dtype in state:
                stack.enter_context(torch.autocast(device, dtype))
            return function(*args, **kwargs)

    return run
