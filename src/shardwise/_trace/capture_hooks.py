"""Graph capture of calls of this library: traced, or one opaque call of the graph.

A tracer sees local aten ops by itself. A function that communicates, draws a seed or reads values is decorated with
`allow_in_graph`: the graph has one opaque call of it, and every replay runs it again with new operands.
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


class Tracer(Protocol):
    """The tracer of this thread; `paused` while calls run untraced."""

    paused: bool

    def call_opaque(self, name: str, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """Run `function` untraced, and add the call to the graph under this name."""
        ...

    def call_opaque_with_backward(
        self, function: "Callable[..., Tensor]", args: tuple[Any, ...], kwargs: dict[str, Any], any_sizes: bool
    ) -> "Tensor":
        """Run `function` untraced, and add the call, and later its backward, to the graph."""
        ...

    def check_method(self, name: str, x: "Tensor") -> None:
        """Guard the values of `x` if its C++ method of this name reads them; raise if no guard can."""
        ...

    def not_capturable(self, what: str) -> None:
        """Raise unless paused: `what` cannot be replayed."""
        ...


class _Current(threading.local):
    tracer: Tracer | None = None


current = _Current()


@contextmanager
def traced_by(tracer: Tracer) -> Iterator[None]:
    """Trace the calls of this thread with `tracer`."""
    current.tracer = tracer
    try:
        yield
    finally:
        current.tracer = None


def allow_in_graph(function: Callable[P, T]) -> Callable[P, T]:
    """A function that is one opaque call of a captured graph. Its tensors must be its arguments and its results."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if current.tracer is None:
            return function(*args, **kwargs)
        return current.tracer.call_opaque(function.__name__, function, args, kwargs)

    return run


def allow_in_graph_with_backward(function: "Callable[P, Tensor]", *, any_sizes: bool = False) -> "Callable[P, Tensor]":
    """A data-dependent differentiable function: one opaque call for its forward and one for its backward.

    A write to a tensor counts in the `_version` of the tensor.

    Args:
        any_sizes: whether its result has one shape for jagged tensors of any number of ids.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> "Tensor":
        if current.tracer is None:
            return function(*args, **kwargs)
        return current.tracer.call_opaque_with_backward(function, args, kwargs, any_sizes)

    return run


class RunsInReplays:
    """Base of modules that are opaque calls of a graph: it depends on their tensors and hooks, on no other state."""


@contextmanager
def tracing_paused() -> Iterator[None]:
    """Calls inside are not part of a captured graph."""
    tracer = current.tracer
    if tracer is None:
        yield
        return
    before, tracer.paused = tracer.paused, True
    try:
        yield
    finally:
        tracer.paused = before


def not_capturable(what: str) -> None:
    """Raise while this thread is traced: a replay could not repeat what happens here."""
    if current.tracer is not None:
        current.tracer.not_capturable(what)


def is_capturing() -> bool:
    """Whether this thread is traced."""
    return current.tracer is not None
