"""Torch functions that users have implemented for tensors of one class of sharding spec."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch.utils import _pytree as pytree

from shardwise import collectives
from shardwise.tensor.dtensor import DTensor

Implementation = Callable[[tuple[type, ...], tuple[Any, ...], dict[str, Any], Any], Any]

# By torch function, then by class of spec.
OPS: dict[Any, dict[type, Implementation]] = {}

_running: ContextVar[tuple[Any, ...]] = ContextVar("functions that run as users have implemented them", default=())


def found(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """What answers a call, for the first operand whose spec has an implementation; None where none has."""
    own = OPS.get(func)
    if own is None or func in _running.get():
        return None
    for x in pytree.tree_leaves((args, kwargs)):
        implementation = own.get(type(x._spec)) if type(x) is DTensor else None
        if implementation is not None:
            return _call(implementation, func, x, args, kwargs)
    return None


def _call(
    implementation: Implementation, func: Any, x: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any]:
    def run() -> Any:
        with _usual_way_inside(func):
            return implementation((DTensor,), args, kwargs, collectives.process_group(x._layout.mesh.ranks))

    return run


@contextmanager
def _usual_way_inside(func: Any) -> Iterator[None]:
    token = _running.set((*_running.get(), func))
    try:
        yield
    finally:
        _running.reset(token)


def concern(tensors: Iterator[Any]) -> bool:
    """Whether any of `tensors` has a spec for which some function is implemented."""
    kinds = {kind for own in OPS.values() for kind in own}
    return any(type(getattr(x, "_spec", None)) in kinds for x in tensors)
