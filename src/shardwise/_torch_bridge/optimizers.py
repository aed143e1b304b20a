"""Elementwise optimizers take a step on the local tensors.

A step over a hundred parameters dispatches a thousand ops, all with the same layouts. `step_on_locals` is a pre-hook of
all optimizers: where parameters, gradients and states of a group share layouts, torch's own step runs on the local
tensors. Where not (the first step, which makes the state; a gradient in another layout), every op is dispatched.
"""

from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn, optim
from torch._C import DisableTorchFunctionSubclass
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from shardwise._layout import Layout
from shardwise._rules.row import Args, Kwargs
from shardwise._tensor.autograd.buckets import raw_grad
from shardwise._tensor.dispatch import hooks
from shardwise._tensor.dispatch.view_copies import LIVING, before_changes, invalidate
from shardwise._tensor.dtensor import DTensor
from shardwise._torch_bridge.replicas import check_replicas
from shardwise.errors import OptimizerError, RuleError

_checked: "WeakSet[Optimizer]" = WeakSet()  # whose ranks hold equal shards, which they broadcast to each other


def step_on_locals(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> Any:
    """A pre-hook of `Optimizer.step`; what it returns replaces the arguments of that step.

    Raises:
        RuleError: an option is a DTensor beside plain parameters: C++ would take the number in its local tensor.
    """
    parameters: list[Any] = []
    for i, group in enumerate(optimizer.param_groups):
        parameters += group["params"]
        types = list(map(type, group["params"]))
        if DTensor in map(type, group.values()) and types.count(DTensor) < len(types):
            name = next(name for name, value in group.items() if type(value) is DTensor)
            raise RuleError(f"{name} of an optimizer of plain parameters is a DTensor. Fix: {name}={name}.item().")
        if DTensor in types:  # options, such as the learning rate, may be computed from what ranks do not share
            options = {name: group[name] for name in optimizer.defaults if name in group}
            ranks = group["params"][types.index(DTensor)]._layout.mesh.sorted_ranks
            hooks.expect_equal_options(type(optimizer), options, i, ranks)
    if _replaced.data and any(p in _replaced for p in parameters):
        args, kwargs = _refuse_replaced(optimizer, parameters, args, kwargs)
    if type(optimizer) in _VIEWS and DTensor in map(type, parameters):
        view: Any = object.__new__(_VIEWS[type(optimizer)])
        view.__dict__ = vars(optimizer)
        args = (view, *args[1:])
    elif optimizer not in _checked and "ZeroRedundancyOptimizer" in [base.__name__ for base in type(optimizer).__mro__]:
        check_replicas(vars(optimizer)["_all_params"], vars(optimizer)["process_group"])
        _checked.add(optimizer)
    return args, kwargs


# ---- an optimizer that was made before still holds the parameters that were replaced ----------------------------

LISTED = 5  # names in the error

# Of replaced parameters that something still holds, the name and the gradient that it had, as long as it exists.
_replaced: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def note_replaced(parameter: object, name: str) -> None:
    """Remember that another parameter took the place of this one in a module, as long as anything still holds it."""
    if isinstance(parameter, nn.Parameter):
        grad = _gradient(parameter)
        _replaced[parameter] = name, None if grad is None else TensorWeakRef(grad)


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    """The gradient, unreduced."""
    with DisableTorchFunctionSubclass():
        grad: Tensor | None = raw_grad.__get__(parameter)
    return grad


def _refuse_replaced(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    """Refuse a step that holds replaced parameters without a new gradient: it would change nothing.

    One with a new gradient is still trained, by another module. A frozen one would not change anyway. A closure, which
    is among the arguments, computes the gradients first. Ranks shard alike, so the error is the same on every rank.
    """

    def check() -> None:
        names = []
        for p in parameters:
            name, before = _replaced.get(p, ("", None))
            grad = _gradient(p) if name and p.requires_grad else None
            if name and p.requires_grad and (grad is None or (before is not None and grad is before())):
                names.append(name)
        if names:
            listed = ", ".join(names[:LISTED]) + (", …" if len(names) > LISTED else "")
            raise OptimizerError(
                f"{type(optimizer).__name__}.step() would not change {len(names)} of its {len(parameters)} parameters "
                f"in their module: {listed}. They were replaced there after the optimizer was made. Fix: make the "
                f"optimizer after the module is sharded."
            )

    def checked(closure: Any) -> object:
        def run() -> object:
            loss: object = closure()
            check()
            return loss

        return run if callable(closure) else closure

    if {*map(type, (*args[1:], *kwargs.values()))} <= {NoneType}:
        check()
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
        view_copies = before_changes("an optimizer's step", group["params"]) if LIVING else ()
        with DisableTorchFunctionSubclass():
            yield group
        if view_copies:
            invalidate(view_copies)


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
