"""Which calls are kept whole when a step is recorded, and who records.

Most of a step is local aten ops, which a recorder sees by itself. What talks to other ranks, draws a seed, or
looks at values is a `leaf`: one call of a recording, that runs again, with new operands, whenever it is replayed.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


class Recorder(Protocol):
    """Who listens to the leaves of this thread.

    Attributes:
        paused: whether it does so at the moment.
    """

    paused: bool

    def leaf(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `function`, unseen inside, and record the call."""
        ...

    def whole(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `function`, unseen inside, and record the call, and later its backward, as one."""
        ...

    def met(self, what: str) -> None:
        """Raise, unless inside a leaf, because `what` cannot be replayed."""
        ...


class _Here(threading.local):
    recorder: Recorder | None = None


here = _Here()


def allow_in_graph(function: Callable[P, T]) -> Callable[P, T]:
    """A function that a recording calls as a whole. Its tensors must be its arguments and its results."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if here.recorder is None:
            return function(*args, **kwargs)
        return here.recorder.leaf(function, args, kwargs)  # type: ignore[no-any-return]

    return run


def allow_in_graph_with_backward(function: Callable[P, "Tensor"]) -> Callable[P, "Tensor"]:
    """A differentiable function of one tensor result that a recording calls as a leaf, and its backward as another.

    For what decides by values: it decides anew at every replay.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> "Tensor":
        if here.recorder is None:
            return function(*args, **kwargs)
        return here.recorder.whole(function, args, kwargs)  # type: ignore[no-any-return]

    return run


@contextmanager
def tracing_paused() -> Iterator[None]:
    """What is done inside is done once, such as finding out how an op runs, and is no part of a recording."""
    recorder = here.recorder
    if recorder is None:
        yield
        return
    before, recorder.paused = recorder.paused, True
    try:
        yield
    finally:
        recorder.paused = before


def not_capturable(what: str) -> None:
    """Called where something happens that a replay could not repeat; raises while somebody records."""
    if here.recorder is not None:
        here.recorder.met(what)


def is_capturing() -> bool:
    """Whether somebody records what this thread does."""
    return here.recorder is not None
