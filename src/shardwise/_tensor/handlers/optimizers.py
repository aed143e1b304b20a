"""Elementwise optimizers take a step on the local tensors.

A step over a hundred parameters dispatches a thousand ops, all with the same layouts. `step_on_locals` is a pre-hook of
all optimizers: where parameters, gradients and states share layouts, torch's own step runs on the local tensors.
Where not (the first step, which makes the state; a gradient in another layout; a closure), every op is dispatched.
"""

from collections.abc import Callable, Iterator
from inspect import unwrap
from itertools import chain, repeat
from types import NoneType
from typing import Any

from torch import Tensor, optim
from torch._C import DisableTorchFunctionSubclass
from torch.optim import Optimizer

from shardwise._layout import Layout
from shardwise._rules.row import Args, Kwargs
from shardwise._tensor.dispatch import hooks
from shardwise._tensor.dispatch.hooks import expect_equal_options
from shardwise._tensor.dispatch.view_copies import LIVING, before_changes, invalidate
from shardwise._tensor.dtensor import DTensor
from shardwise._tensor.module_sharding import holds_replaced, refuse_replaced
from shardwise.errors import RuleError

# Whose new values of an element depend on nothing but that element's gradient and state.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adagrad,
    optim.RMSprop,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Rprop,
    optim.ASGD,
)


def _layouts_agree(optimizer: Optimizer) -> bool:
    """Whether a step reads and writes elements at the same index of this rank's local tensors."""
    with DisableTorchFunctionSubclass():
        return all(map(_group_agrees, repeat(optimizer), optimizer.param_groups))


def _group_agrees(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if group["differentiable"] or DTensor in map(type, group.values()):
        return False
    stateless = group.get("momentum") == 0 and type(optimizer) is optim.SGD
    for p in group["params"]:
        grad = p.grad
        if grad is None:
            continue
        state = optimizer.state.get(p)
        if not state and not stateless:
            return False
        layout = None
        if type(p) is DTensor:
            layout = p._layout
            if grad._layout is not layout or layout.partial_axes or grad.is_sparse:
                return False
        elif type(grad) is DTensor:
            return False
        if state and not _state_agrees(state, layout):
            return False
    return True


def _state_agrees(state: dict[str, Any], layout: Layout | None) -> bool:
    for value in state.values():
        if type(value) is DTensor:
            if value._layout is not layout:
                return False
        elif value is None or (layout is not None and isinstance(value, Tensor) and value.ndim):
            return False  # None: a momentum that the step would begin with a plain tensor
    return True


class _LocalStep:
    """Takes the optimizer's place as `self` of its `step`, after all hooks of the user's have run.

    The first thing that such a step needs is `param_groups`. Reading it takes the optimizer's own step, on the local
    tensors where possible, and leaves the step that reads it nothing to do.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:  # a property would hide an AttributeError raised by the step
        if name != "param_groups":
            return getattr(self._optimizer, name)
        _step(self._optimizer)
        return ()


def _step(optimizer: Optimizer) -> None:
    step: Callable[[Optimizer], None] = unwrap(type(optimizer).step)  # hooks and grad mode are around the caller
    if hooks.dispatches_each_op(lambda: _parameters(optimizer)) or not _layouts_agree(optimizer):
        return step(optimizer)
    copies = before_changes("an optimizer's step", _parameters(optimizer) if LIVING else ())
    with DisableTorchFunctionSubclass():
        step(optimizer)
    return invalidate(copies)


def step_on_locals(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> Any:
    """A pre-hook of `Optimizer.step`; what it returns replaces the arguments of that step."""
    _check_options(optimizer)
    _note_options(optimizer)
    if {*map(type, (*args[1:], *kwargs.values()))} - {NoneType}:  # a closure, which is the user's code
        return _checked_after_closure(optimizer, args, kwargs) if holds_replaced(_parameters(optimizer)) else None
    refuse_replaced(optimizer, _parameters(optimizer))
    if type(optimizer) not in ELEMENTWISE:
        return None
    return ((_LocalStep(optimizer), *args[1:]), kwargs) if _has_dtensors(optimizer) else None


def _checked_after_closure(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments of a step, whose closure computes the gradients; replaced parameters are refused after it."""

    def checked(x: object) -> object:
        if not callable(x):
            return x

        def run() -> object:
            loss: object = x()
            refuse_replaced(optimizer, _parameters(optimizer))
            return loss

        return run

    return (args[0], *map(checked, args[1:])), {name: checked(x) for name, x in kwargs.items()}


def _check_options(optimizer: Optimizer) -> None:
    """Refuse a DTensor as an option of plain parameters: C++ would take the number in its local tensor.

    Raises:
        RuleError: an option is one.
    """
    for group in optimizer.param_groups:
        if DTensor in map(type, group.values()) and not all(type(p) is DTensor for p in group["params"]):
            name = next(name for name, value in group.items() if type(value) is DTensor)
            raise RuleError(f"{name} of an optimizer of plain parameters is a DTensor. Fix: {name}={name}.item().")


def _note_options(optimizer: Optimizer) -> None:
    """Note the options of a step, such as the learning rate, which may be computed from what ranks do not share."""
    for i, group in enumerate(optimizer.param_groups):
        first = next((p for p in group["params"] if type(p) is DTensor), None)
        if first is not None:
            options = {name: group[name] for name in optimizer.defaults if name in group}
            expect_equal_options(type(optimizer), options, i, first._layout.mesh.sorted_ranks)


def _has_dtensors(optimizer: Optimizer) -> bool:
    return DTensor in map(type, _parameters(optimizer))


def _parameters(optimizer: Optimizer) -> Iterator[Any]:
    return chain.from_iterable([group["params"] for group in optimizer.param_groups])
