"""Hooks on every call of a torch function with a DTensor, for tools, and notes of the numbers that are passed.

While there are neither, calls go to `dispatcher.dispatch` directly.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from shardwise import collectives
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor.dispatch import dispatcher
from shardwise.tensor.dispatch.number_notes import noted
from shardwise.tensor.dtensor import set_dispatcher

Proceed = Callable[[], Any]
Hook = Callable[[Proceed, Any, Args, Kwargs], Any]  # (proceed, func, args, kwargs); proceed() runs the call

_hooks: "WeakKeyDictionary[Any, list[Hook]]" = WeakKeyDictionary()  # by transport: simulated ranks have one each


@contextmanager
def hook_calls(hook: Hook) -> Iterator[None]:
    """Inside, `hook` gets every function that this rank calls with a DTensor, and the aten ops it is decomposed into.

    The hook that was installed last is called first.
    """
    mine = _hooks.setdefault(collectives.transport(), [])
    mine.append(hook)
    _choose_dispatcher()
    try:
        yield
    finally:
        mine[:] = [other for other in mine if other is not hook]
        _choose_dispatcher()


def are_installed() -> bool:
    """Whether any rank of this process has a hook installed."""
    return any(_hooks.values())


def _choose_dispatcher(watching: bool | None = None) -> None:
    if watching is not None:
        _state.watching = watching
    proceed = _call_hooks if are_installed() else dispatcher.dispatch
    set_dispatcher(partial(noted, proceed) if _state.watching else proceed)


class _State:
    watching = False  # whether a rank of this process watches


_state = _State()
collectives.when_watching(_choose_dispatcher)
_conditions: list[Callable[[Iterable[Any]], bool]] = []


def dispatch_each_op_if(condition: Callable[[Iterable[Any]], bool]) -> None:
    """Let composite steps, such as those of optimisers, dispatch op by op for tensors that meet the condition."""
    _conditions.append(condition)


def dispatches_each_op(tensors: Callable[[], Iterable[Any]]) -> bool:
    """Whether hooks, or functions that are overridden for some of `tensors`, need to see every op."""
    return are_installed() or any(condition(tensors()) for condition in _conditions)


def _call_hooks(func: Op, args: Args, kwargs: Kwargs) -> object:
    proceed: Proceed = lambda: dispatcher.dispatch(func, args, kwargs)  # noqa: E731
    for hook in _hooks.get(collectives.transport(), ()):
        proceed = _bound(hook, proceed, func, args, kwargs)
    return proceed()


def _bound(hook: Hook, proceed: Proceed, func: Op, args: Args, kwargs: Kwargs) -> Proceed:
    return lambda: hook(proceed, func, args, kwargs)
