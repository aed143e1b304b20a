"""Elementwise optimizers take a step on the local tensors.

A step over a hundred parameters dispatches a thousand ops, all with the same layouts. `step_on_locals` is a pre-hook of
all optimizers: where parameters, gradients and states of a group share layouts, torch's own step runs on the local
tensors. Where not (the first step, which makes the state; a gradient in another layout), every op is dispatched.

Muon multiplies matrices: `gathering_once` gathers each before.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import chain
from operator import attrgetter, itemgetter
from types import NoneType
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn, optim
from torch._C import DisableTorchFunctionSubclass
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from shardwise._layout import Layout
from shardwise._rules.row import Args, Kwargs
from shardwise._tensor.autograd.buckets import raw_grad
from shardwise._tensor.dispatch import hooks
from shardwise._tensor.dispatch.view_copies import LIVING, before_changes, invalidate
from shardwise._tensor.dtensor import DTensor, to_layout
from shardwise._torch_bridge.replicas import check_replicas
from shardwise._trace.comm_trace import Cause
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
        view = object.__new__(_VIEWS[type(optimizer)])
        view.__dict__, view._of, view._settled = vars(optimizer), optimizer, None
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


class _Settled(NamedTuple):
    """What has gradients in a group: parameters, their gradients, and by name their states. Their layouts agree."""

    params: list[Tensor]
    grads: list[Tensor]
    states: dict[str, list[Any]]


class _Filled(NamedTuple):
    """How torch filled the lists of a step."""

    given: tuple[object, ...]  # for which options and parameters
    returned: object  # by `_init_group`
    names: tuple[str | None, ...] | None  # of the states in each list; None: it is empty. No names: in another way

    @classmethod
    def by(cls, given: tuple[object, ...], returned: object, lists: Sequence[list[Tensor]], of: _Settled) -> Self:
        """How these lists were filled."""
        found = [[name for name, x in of.states.items() if own and own[0] is x[0]] for own in lists[2:]]
        names = tuple([own[0] if own else None for own in found])
        columns = [of.params, of.grads, *([] if name is None else of.states[name] for name in names)]
        as_listed = all(list(map(id, a)) == list(map(id, b)) for a, b in zip(lists, columns, strict=True))
        return cls(given, returned, names if as_listed and {*map(type, of.params)} == {DTensor} else None)


_filled: "WeakKeyDictionary[Optimizer, dict[int, _Filled]]" = WeakKeyDictionary()  # by number of a group


class _View(Optimizer):
    """A view of an optimizer shares its attributes, and takes its place as `self` of its step."""

    __slots__ = ("_number", "_of", "_settled")
    _of: Optimizer
    _number: int  # of the group that the step computes with
    _settled: _Settled | None  # what has gradients in it, until the lists of the step are filled

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> object:
        """Fill the lists of a step as torch did before, which reads each gradient three times."""
        torchs: Any = super()
        settled, self._settled = self._settled, None
        if settled is None or not settled.params:
            return torchs._init_group(group, *lists)
        options = [_kind(x) for name, x in group.items() if name != "params"]
        given, filled = (options, list(map(id, settled.params))), _filled.setdefault(self._of, {})
        last = filled.get(self._number)
        if last is None or last.given != given or last.names is None:
            returned = torchs._init_group(group, *lists)
            filled[self._number] = _Filled.by(given, returned, lists, settled)
            return returned
        lists[0].extend(settled.params)
        lists[1].extend(settled.grads)
        for values, name in zip(lists[2:], last.names, strict=True):
            values.extend([] if name is None else settled.states[name])
        return last.returned


def _groups(view: _View) -> Iterator[dict[str, Any]]:
    """The parameter groups. While a step computes with one whose layouts agree, its DTensors are local tensors.

    Hooks and the closure of the user's run before a step asks for its groups.
    """
    for number, group in enumerate(vars(view)["param_groups"]):
        settled = None if hooks.dispatches_each_op(group["params"]) else _settled(view, group)
        if settled is None:
            yield group
            continue
        view_copies = before_changes("an optimizer's step", group["params"]) if LIVING else ()
        with DisableTorchFunctionSubclass():
            view._number, view._settled = number, settled
            yield group
        if view_copies:
            invalidate(view_copies)


def _kind(option: object) -> object:
    """What decides of an option which lists a step has: of a number, whether it is 0."""
    if isinstance(option, int | float):
        return type(option), option != 0
    return option if isinstance(option, str | None) else type(option)


def _settled(optimizer: Optimizer, group: dict[str, Any]) -> _Settled | None:
    """What has gradients, if a step reads and writes elements at the same index of this rank's local tensors.

    Lists are compared by functions of C: what a step of many small parameters takes is the time of Python for each.
    """
    if group["differentiable"] or DTensor in map(type, group.values()):
        return None
    params, stateless = group["params"], group.get("momentum") == 0 and isinstance(optimizer, optim.SGD)
    with DisableTorchFunctionSubclass():
        grads = list(map(raw_grad.__get__, params))
        layouts, of_grads = _layouts_of(params), _layouts_of(grads)
        if {*map(type, params)} != {DTensor} or any(map(_PENDING, params)) or of_grads != layouts:
            del grads  # reading reduces them, a bucket at a time
            read = [(p, grad) for p in params if (grad := p.grad) is not None]
            params, grads = [p for p, _ in read], [grad for _, grad in read]
            layouts, of_grads = _layouts_of(params), _layouts_of(grads)
        partial = any(layout is not None and layout.partial_axes for layout in {*layouts})
        if partial or of_grads != layouts or any(map(_IS_SPARSE, grads)):
            return None
        states = [state or {} for state in map(optimizer.state.get, params)]
        names = {*map(frozenset, {*map(tuple, states)})}
        if len(names) > 1 or (names and not any(names) and not stateless):
            return None
        columns = {name: list(map(itemgetter(name), states)) for name in chain(*names)}
        return _Settled(params, grads, columns) if all(_agree(x, layouts) for x in columns.values()) else None


_LAYOUT, _PENDING, _IS_SPARSE, _NDIM = map(attrgetter, ("_layout", "_pending_gradients", "is_sparse", "ndim"))


def _layouts_of(tensors: Sequence[object]) -> list[Layout | None]:
    """The layouts of DTensors, None of others."""
    if {*map(type, tensors)} == {DTensor}:
        return list(map(_LAYOUT, tensors))
    return [getattr(x, "_layout", None) for x in tensors]


def _agree(states: Sequence[object], layouts: Sequence[Layout | None]) -> bool:
    """Whether states have the layouts of their parameters; those of DTensors may be numbers, too."""
    kinds = {*map(type, states)}
    if kinds == {DTensor}:
        return _layouts_of(states) == layouts
    if kinds == {Tensor} and not any(map(_NDIM, states)):
        return True
    return all(
        x._layout is layout
        if type(x) is DTensor
        else x is not None and (layout is None or not isinstance(x, Tensor) or not x.ndim)
        for x, layout in zip(states, layouts, strict=True)
    )


# Of optimizers whose new values of an element depend on nothing but that element's gradient and state.
_VIEWS: dict[type[Optimizer], type[_View]] = {
    cls: type(cls.__name__, (_View, cls), {"__slots__": (), "param_groups": property(_groups)})
    for name in "SGD Adam AdamW Adagrad RMSprop Adadelta Adamax NAdam RAdam Rprop ASGD".split()
    for cls in [getattr(optim, name)]
}


# ---- a step that needs all of a matrix --------------------------------------------------------------------------

_UPDATE = Cause("operand", "Muon.step", "the update", "a Newton-Schulz iteration multiplies it three times")


def gathering_once(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Muon's Newton-Schulz iterations of a matrix that is gathered before; each product would gather its operands."""

    @wraps(original)
    def orthogonalized(update: Tensor, *args: object, **kwargs: object) -> Tensor:
        if type(update) is not DTensor:
            return original(update, *args, **kwargs)
        halves = update.bfloat16()
        assert isinstance(halves, DTensor)
        full = to_layout(halves, update._layout.replicated(), _UPDATE)
        out = original(full, *args, **kwargs)
        if update.dtype == full.dtype:
            update.copy_(full)  # which torch divides by its norm in place
        return out

    return orthogonalized
