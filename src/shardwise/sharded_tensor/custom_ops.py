"""Functions of torch, implemented by users for their sharding specs."""

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

from torch import Tensor

from shardwise.errors import PlanError
from shardwise.sharded_tensor.specs import ShardingSpec
from shardwise.tensor.dispatch.spec_ops import implement_for_spec
from shardwise.tensor.dtensor import DTensor

F = TypeVar("F", bound=Callable[..., Any])


def custom_sharding_spec_op(sharding_spec_class: type[ShardingSpec], func: Any) -> Callable[[F], F]:
    """Decorate what is to run when `func` is called with a `DTensor` that was made by a spec of this very class.

    The decorated function is called on every rank as `implementation(types, args, kwargs, process_group)`: the first
    three as `__torch_function__` gets them; the group is torch's where there is one, or the ranks, and is what
    `process_group=` takes everywhere. What it returns is the result. Inside, `func` itself goes the usual way. Tensors
    of other specs, subclasses too, and results of ops, which were made by no spec, are not affected.

    Args:
        sharding_spec_class: the class; instances of subclasses do not count.
        func: such as `torch.nn.functional.embedding`, as it is called: `torch.sum` is not `Tensor.sum`.

    Raises:
        PlanError: no class of specs, nothing that can be called, a decorated function of other than four arguments,
            or a method that `DTensor` answers itself.
    """
    if not (isinstance(sharding_spec_class, type) and issubclass(sharding_spec_class, ShardingSpec)):
        raise PlanError(f"custom_sharding_spec_op needs a class of sharding specs, got {sharding_spec_class!r}.")
    if not callable(func):
        raise PlanError(f"custom_sharding_spec_op needs a function of torch, got {func!r}.")
    name = getattr(func, "__name__", "")
    if name != "detach" and name in vars(DTensor) and getattr(Tensor, name, None) is func:
        raise PlanError(f"Tensor.{name} is answered by DTensor itself and cannot be implemented for a spec.")

    def register(implementation: F) -> F:
        count = len(signature(implementation).parameters)
        if count != 4:
            raise PlanError(
                f"{implementation.__qualname__} is called with (types, args, kwargs, process_group), "
                f"but takes {count} argument{'s' * (count != 1)}."
            )
        implement_for_spec(func, sharding_spec_class, implementation)
        return implementation

    return register
