"""Optimisers that work element by element take their steps on the local tensors, as if these were all there is.

Asked op by op, a step over a hundred parameters is a thousand questions with the same answer. torch opens no door
around a step, so `install` puts a question before those of its own optimisers: are parameters, gradients and states
laid out alike? Then the step is one local op. Where not (the first step, which makes the state; a gradient moved
elsewhere; a closure, which is the user's code), every op finds its own way as always.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from torch import Tensor, optim
from torch._C import DisableTorchFunctionSubclass
from torch.optim import Optimizer

from shardwise.layout import Layout
from shardwise.tensor.dispatch import hooks
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.handlers.copies import LIVING, before_changes, outdate

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


def _laid_out_alike(optimizer: Optimizer) -> bool:
    """Whether a step reads and writes elements that stand at the same place of this rank's parts."""
    with DisableTorchFunctionSubclass():
        return all(_group_alike(optimizer, group) for group in optimizer.param_groups)


def _group_alike(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if group["differentiable"] or any(type(value) is DTensor for value in group.values()):
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
        if state and not _state_alike(state, layout):
            return False
    return True


def _state_alike(state: dict[str, Any], layout: Layout | None) -> bool:
    for value in state.values():
        if type(value) is DTensor:
            if value._layout is not layout:
                return False
        elif value is None or (layout is not None and isinstance(value, Tensor) and value.ndim):
            return False  # None: a momentum that the step would begin with a plain tensor
    return True


def _on_locals(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def run(self: Optimizer, closure: Any = None) -> Any:
        watched = hooks.dispatches_each_op(lambda: _parameters(self))
        if closure is not None or watched or type(self) not in ELEMENTWISE or not _has_parts(self):
            return step(self, closure)
        if not _laid_out_alike(self):
            return step(self)
        copies = before_changes("an optimiser's step", _parameters(self) if LIVING else ())
        with DisableTorchFunctionSubclass():
            found = step(self)
        outdate(copies)
        return found

    return run


def _has_parts(optimizer: Optimizer) -> bool:
    return any(type(p) is DTensor for p in _parameters(optimizer))


def _parameters(optimizer: Optimizer) -> Iterator[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])


def install() -> None:
    """Put the question before the steps; once a process."""
    for kind in ELEMENTWISE:
        step: Any = vars(kind).get("step")
        if step is None:  # inherited from one that has it
            continue
        asking: Any
        if hasattr(step, "hooked"):  # hooks of the user's are called around the question
            asking = Optimizer.profile_hook_step(_on_locals(step.__wrapped__))
            asking.hooked = True
        else:
            asking = _on_locals(step)
        kind.step = asking  # type: ignore[method-assign]


install()
