"""Functions of torch that users implement for their sharding specs: entries of the table of ops."""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import replace
from inspect import signature
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._layout import shown
from shardwise._rules import OpRule, registry
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor.dispatch import hooks
from shardwise._tensor.dispatch.dispatcher import entry_of, run
from shardwise._tensor.dtensor import DTensor
from shardwise.errors import PlanError
from shardwise.sharded_tensor.specs import ShardingSpec

F = TypeVar("F", bound=Callable[..., Any])
Implementation = Callable[[tuple[type, ...], Args, Kwargs, Any], Any]


def custom_sharding_spec_op(sharding_spec_class: type[ShardingSpec], func: Any) -> Callable[[F], F]:
    """Decorate the implementation of `func` for a `DTensor` made by a spec of this class.

    The decorated function is called on every rank as `implementation(types, args, kwargs, process_group)`: the first
    three as `__torch_function__` gets them; the group is torch's if there is one, otherwise the ranks, as every
    `process_group=` accepts. Its result is the result of the call. Inside it, `func` dispatches as usual. Not affected
    are tensors of other specs or of subclasses of the spec, and results of ops, which no spec made.

    Args:
        sharding_spec_class: the class; subclasses do not count.
        func: such as `torch.nn.functional.embedding`, exactly as called: `torch.sum` is not `Tensor.sum`.

    Raises:
        PlanError: not a class of specs, not a callable, a decorated function that does not take four arguments, or a
            method that `DTensor` itself defines.
    """
    if not (isinstance(sharding_spec_class, type) and issubclass(sharding_spec_class, ShardingSpec)):
        raise PlanError(
            f"custom_sharding_spec_op needs a class of sharding specs, got {shown(sharding_spec_class)}. "
            f"Fix: such as ChunkShardingSpec, or a subclass of ShardingSpec of your own."
        )
    if not callable(func):
        raise PlanError(
            f"custom_sharding_spec_op needs a function of torch, got {shown(func)}. "
            f"Fix: the function itself, such as torch.nn.functional.embedding."
        )
    name = getattr(func, "__name__", "")
    if name != "detach" and name in vars(DTensor) and getattr(Tensor, name, None) is func:
        raise PlanError(
            f"Tensor.{name} is defined by DTensor itself and cannot be implemented for a spec. "
            f"Fix: implement the functions that are called on its result."
        )

    def register(implementation: F) -> F:
        if (count := len(signature(implementation).parameters)) != 4:
            raise PlanError(
                f"{implementation.__qualname__} is called with (types, args, kwargs, process_group), but takes {count} "
                f"argument{'s' * (count != 1)}. Fix: a function of these four."
            )
        if func not in _implemented:
            _implemented[func] = _SpecOp(entry_of(func))
            registry.register(replace(entry_of(func), handler=_implemented[func], is_op=True), func, replace=True)
        _implemented[func].by_spec[sharding_spec_class] = implementation
        hooks.dispatch_each_op_if(_any_implemented_for)
        return implementation

    return register


class _SpecOp:
    """The handler of a function that is implemented for classes of specs; calls with other tensors run as usual."""

    def __init__(self, usual: OpRule) -> None:
        self.usual = usual
        self.by_spec: dict[type, Implementation] = {}

    def __call__(self, func: Op, args: Args, kwargs: Kwargs) -> Any:
        for x in pytree.tree_leaves((args, kwargs)) if func not in _running.get() else ():
            implementation = self.by_spec.get(type(x._spec)) if type(x) is DTensor else None
            if implementation is not None:
                token = _running.set((*_running.get(), func))
                try:
                    return implementation((DTensor,), args, kwargs, collectives.process_group(x._layout.mesh.ranks))
                finally:
                    _running.reset(token)
        if self.usual.handler is None:
            return run(func, self.usual, args, kwargs)
        return self.usual.handler(func, args, kwargs)


_implemented: dict[Any, _SpecOp] = {}
_running: ContextVar[Args] = ContextVar("functions whose custom implementation runs", default=())


def forget_implementations() -> None:
    """Remove all implementations, for tests."""
    while _implemented:
        func, op = _implemented.popitem()
        registry.register(op.usual, func, replace=True)


def _any_implemented_for(tensors: Iterable[Any]) -> bool:
    """Whether some function is implemented for the spec of one of `tensors`."""
    classes = {spec_class for op in _implemented.values() for spec_class in op.by_spec}
    return bool(classes) and any(type(getattr(x, "_spec", None)) in classes for x in tensors)
