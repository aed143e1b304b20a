"""Torch functions that users have implemented for tensors of one class of sharding spec."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from torch.utils import _pytree as pytree

from shardwise import collectives
from shardwise.rules import OpRule
from shardwise.rules.row import Args, Kwargs, reregister
from shardwise.tensor.dispatch.entry import entry_of
from shardwise.tensor.dispatch.run import run
from shardwise.tensor.dtensor import DTensor

Implementation = Callable[[tuple[type, ...], Args, Kwargs, Any], Any]

_running: ContextVar[tuple[Any, ...]] = ContextVar("functions that run as users have implemented them", default=())


class SpecOp:
    """The handler of a function that is implemented for classes of specs: calls of other tensors take the usual way."""

    def __init__(self, usual: OpRule) -> None:
        self.usual = usual
        self.by_spec: dict[type, Implementation] = {}

    def __call__(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        for x in pytree.tree_leaves((args, kwargs)) if func not in _running.get() else ():
            implementation = self.by_spec.get(type(x._spec)) if type(x) is DTensor else None
            if implementation is not None:
                with _usual_way_inside(func):
                    return implementation((DTensor,), args, kwargs, collectives.process_group(x._layout.mesh.ranks))
        if self.usual.handler is None:
            return run(func, self.usual, args, kwargs)
        return self.usual.handler(func, args, kwargs)


_implemented: dict[Any, SpecOp] = {}


def implement_for_spec(func: Any, spec_class: type, implementation: Implementation) -> None:
    """Let `implementation` answer calls of `func` whose first operand with an implementation has such a spec."""
    if func not in _implemented:
        usual = entry_of(func)
        _implemented[func] = SpecOp(usual)
        reregister(replace(usual, handler=_implemented[func], is_op=True), func)
    _implemented[func].by_spec[spec_class] = implementation


def implemented() -> frozenset[Any]:
    """The functions that are implemented for some class of specs."""
    return frozenset(_implemented)


def forget_implementations() -> None:
    """Let all functions take their usual way again."""
    for func, op in _implemented.items():
        reregister(op.usual, func)
    _implemented.clear()


@contextmanager
def _usual_way_inside(func: Any) -> Iterator[None]:
    token = _running.set((*_running.get(), func))
    try:
        yield
    finally:
        _running.reset(token)


def concern(tensors: Iterator[Any]) -> bool:
    """Whether any of `tensors` has a spec for which some function is implemented."""
    kinds = {kind for op in _implemented.values() for kind in op.by_spec}
    return bool(kinds) and any(type(getattr(x, "_spec", None)) in kinds for x in tensors)
