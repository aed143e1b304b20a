"""Elementwise optimizers take a step on the local tensors.

A step over a hundred parameters dispatches a thousand ops, all with the same layouts. `step_on_locals` is a pre-hook of
all optimizers: where parameters, gradients and states of a group share layouts, torch's own step runs on the local
tensors. Where not (the first step, which makes the state; a gradient in another layout), every op is dispatched.
"""

from collections.abc import Iterator
from types import NoneType
from typing import Any
from weakref import WeakSet

from torch import Tensor, optim
from torch._C import DisableTorchFunctionSubclass
from torch.optim import Optimizer

from shardwise._layout import Layout
from shardwise._rules.row import Args, Kwargs
from shardwise._tensor.dispatch import hooks
from shardwise._tensor.dispatch.view_copies import LIVING, before_changes, invalidate
from shardwise._tensor.dtensor import DTensor
from shardwise._tensor.module_sharding import holds_replaced, refuse_replaced
from shardwise._tensor.torch_bridge.replicas import check_replicas
from shardwise.errors import RuleError

_checked: "WeakSet[Optimizer]" = WeakSet()  # whose ranks hold equal shards, which they broadcast to each other


def step_on_locals(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> Any:
    """A pre-hook of `Optimizer.step`; what it returns replaces the arguments of that step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, group in enumerate(optimizer.param_groups):
        _check_options(optimizer, i, group)
    if {*map(type, (*args[1:], *kwargs.values()))} - {NoneType}:  # a closure, which computes the gradients
        if holds_replaced(parameters):
            args, kwargs = _checked_after_closure(optimizer, parameters, args, kwargs)
    else:
        refuse_replaced(optimizer, parameters)
    if type(optimizer) in _VIEWS and DTensor in map(type, parameters):
        view: Any = object.__new__(_VIEWS[type(optimizer)])
        view.__dict__ = vars(optimizer)
        args = (view, *args[1:])
    elif isinstance(of_all := getattr(optimizer, "_all_params", None), list) and optimizer not in _checked:
        check_replicas(of_all, optimizer.process_group)  # type: ignore[attr-defined]  # of ZeroRedundancyOptimizer
        _checked.add(optimizer)
    return args, kwargs


def _check_options(optimizer: Optimizer, index: int, group: dict[str, Any]) -> None:
    """Note the options of a step, such as the learning rate, which may be computed from what ranks do not share.

    Raises:
        RuleError: one is a DTensor beside plain parameters: C++ would take the number in its local tensor.
    """
    sharded = [p for p in group["params"] if type(p) is DTensor]
    if DTensor in map(type, group.values()) and len(sharded) < len(group["params"]):
        name = next(name for name, value in group.items() if type(value) is DTensor)
        raise RuleError(f"{name} of an optimizer of plain parameters is a DTensor. Fix: {name}={name}.item().")
    if sharded:
        options = {name: group[name] for name in optimizer.defaults if name in group}
        hooks.expect_equal_options(type(optimizer), options, index, sharded[0]._layout.mesh.sorted_ranks)


def _checked_after_closure(
    optimizer: Optimizer, parameters: list[Any], args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    """The arguments of a step; replaced parameters are refused after its closure has computed the gradients."""

    def checked(x: Any) -> object:
        def run() -> object:
            loss: object = x()
            refuse_replaced(optimizer, parameters)
            return loss

        return run if callable(x) else x

    return (args[0], *map(checked, args[1:])), {name: checked(x) for name, x in kwargs.items()}


# ---- a step on local tensors ------------------------------------------------------------------------------------


def _groups(view: Optimizer) -> Iterator[dict[str, Any]]:
    """The parameter groups. While a step computes with one whose layouts agree, its DTensors are local tensors.

    Hooks and the closure of the user's run before a step asks for its groups.
    """
    for group in vars(view)["param_groups"]:
        if hooks.dispatches_each_op(group["params"]) or not _layouts_agree(view, group):
            yield group
            continue
        copies = before_changes("an optimizer's step", group["params"]) if LIVING else ()
        with DisableTorchFunctionSubclass():
            yield group
        invalidate(copies)


def _layouts_agree(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a step reads and writes elements at the same index of this rank's local tensors."""
    if group["differentiable"] or DTensor in map(type, group.values()):
        return False
    stateless = group.get("momentum") == 0 and isinstance(optimizer, optim.SGD)
    with DisableTorchFunctionSubclass():
        for p in group["params"]:
            grad, layout = p.grad, p._layout if type(p) is DTensor else None
            if grad is None:
                continue
            if getattr(grad, "_layout", None) is not layout or (layout and (layout.partial_axes or grad.is_sparse)):
                return False
            state = optimizer.state.get(p)
            if not (_state_agrees(state, layout) if state else stateless):
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


# Optimizers whose new values of an element depend on nothing but that element's gradient and state. A view of one
# shares its attributes, but for the parameter groups, and takes its place as `self` of its step.
_VIEWS: dict[type[Optimizer], type[Optimizer]] = {
    cls: type(cls.__name__, (cls,), {"param_groups": property(_groups)})
    for name in "SGD Adam AdamW Adagrad RMSprop Adadelta Adamax NAdam RAdam Rprop ASGD".split()
    for cls in [getattr(optim, name)]
}
