"""Dispatch of every torch function with a DTensor: it runs by its rule on the local tensors of its operands.

A function with rows or a decomposition runs by its rule. A handler runs in place of the function. Torch decomposes any
other function into aten ops, each of which is dispatched again (`fallback.py`).

The local call is cached under the layouts and the other arguments (`call_key`). So a warm op costs a dictionary
look-up, the op itself, and giving the result its layout.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch._C._autograd import _top_saved_tensors_default_hooks as saved_tensors_hooks
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._layout import Layout, Owner, forget_calls, remember
from shardwise._rules import RULES, OpRule
from shardwise._rules.local_context import LocalContext
from shardwise._rules.registry import FAMILIES, no_rows
from shardwise._rules.row import Args, Handler, Kwargs, Op
from shardwise._tensor.dispatch import operands
from shardwise._tensor.dispatch.fallback import ReplicatedCall, handler_without_row, rule_of_others
from shardwise._tensor.dispatch.local_calls import (
    LocalCall,
    as_dtensors,
    local_call,
    warn_of_gathered,
)
from shardwise._tensor.dispatch.recipes import NO_KEY, call_key, find_recipe, forget_recipes
from shardwise._tensor.dispatch.resolve import Layouts, NoRowError, Output, Recipe
from shardwise._tensor.dispatch.view_copies import before_op, invalidate
from shardwise._tensor.dtensor import DTensor, check_owners, dtensors_in, name_of
from shardwise.errors import RuleError

FIRST_OPERANDS = ("condition", "sorted_sequence", "tensors", "tensor", "input", "self")
# What this rank runs for a call, and under saved-tensor hooks; the layouts of the results; those of the operands, which
# are kept for the key.
Call = tuple[Callable[..., Any], Callable[..., Any], Layouts, Sequence[Layout]]
IN_PLACE, OF_HANDLER = Output.IN_PLACE, Output.OF_HANDLER
_family_cache: dict[Any, OpRule] = {}  # the entries of functions that `RULES` does not have


class _Known(threading.local):
    """The calls that the rank of this thread has compiled, by `call_key`: `Owner.calls`."""

    def __init__(self) -> None:
        self.calls: dict[Any, Call] = {}  # none until the first one


_known = _Known()


def dispatch(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run a call of `func` with a DTensor among its arguments."""
    rule = RULES.get(func) or _family_cache.get(func) or entry_of(func)
    if rule.handler is None:
        return run(func, rule, args, kwargs)
    return rule.handler(func, args, kwargs)


def run(func: Op, rule: OpRule, args: Args, kwargs: Kwargs) -> Any:
    """Run `func` by its rule."""
    key = call_key(func, rule, args, kwargs)
    call = _known.calls.get(key)
    if call is None:
        call, args, kwargs = _find(func, rule, args, kwargs, key)
    op, op_under_hooks, layout, _ = call
    if layout is OF_HANDLER:
        return op(func, args, kwargs)
    copies = None
    if layout is IN_PLACE:
        copies, args = before_op(func, args)
    with DisableTorchFunctionSubclass():
        out = (op if saved_tensors_hooks(True) is None else op_under_hooks)(*args, **kwargs)
        if type(layout) is Layout:
            if type(out) is not DTensor:
                out.__class__ = DTensor
                out._layout = layout
            return out
        if copies:
            invalidate(copies)
        if type(layout) is tuple:
            return as_dtensors(out, layout)
        return args[0] if layout is IN_PLACE else out


# ---- calls that are not known by their key ----------------------------------------------------------------------


def _find(func: Op, rule: OpRule, args: Args, kwargs: Kwargs, key: tuple[Any, ...]) -> tuple[Call, Args, Kwargs]:
    """The local call, and the arguments in the usual form, which is its key for later calls."""
    owner = collectives.owner()
    _known.calls = owner.calls  # of another world, if this is the first call of this thread in this one
    layouts = [x._layout for x in dtensors_in((*args, *kwargs.values()))]
    if {owner} != {layout.owner for layout in layouts}:
        check_owners(name_of(func), layouts)
    given = args, kwargs
    if "out" in kwargs or not args:
        args, kwargs = _positional(args, kwargs)
    plain = NO_KEY in key and operands.has_plain_tensors((*args, *kwargs.values()))
    if plain or "out" in kwargs:
        other = _other_function(func, rule, args, kwargs)
        if other is not None:
            return _handled(other), args, kwargs
        args, kwargs = operands.all_promoted(func, args, kwargs)
        layouts = [x._layout for x in dtensors_in((*args, *kwargs.values()))]  # DTensors of torch have meshes too
    meshes = [layout.mesh for layout in layouts]
    if meshes.count(meshes[0]) < len(meshes) and (rule.rows is not no_rows or isinstance(func, OpOverload)):
        written = _written(func, rule, args, kwargs)
        args, kwargs = operands.on_one_mesh(func, args, kwargs, rule.kept_operand, written)
    if args is not given[0] or kwargs is not given[1]:
        key = call_key(func, rule, args, kwargs)
    if not plain:
        return _compiled(func, rule, args, kwargs, key, owner)
    with operands.checked_sizes(func, *given):
        call, args, kwargs = _compiled(func, rule, args, kwargs, key, owner)
    if call[2] is OF_HANDLER:
        call = _handled(partial(operands.run_with_checked_sizes, call[0], *given))
    return call, args, kwargs


def _positional(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Arguments with the first operand, which has many names, by position, and without `out=None`."""
    kwargs = {name: x for name, x in kwargs.items() if name != "out" or x is not None}
    if not args and (first := next((n for n in FIRST_OPERANDS if n in kwargs), None)) is not None:
        args = (kwargs.pop(first),)
    return args, kwargs


def _other_function(func: Op, rule: OpRule, args: Args, kwargs: Kwargs) -> Handler | None:
    """The function that runs a call with `out=` or with plain tensors that has no rows as it is."""
    if "out" in kwargs and not isinstance(func, OpOverload):  # it writes to `out`
        return _run_with_out
    if rule.in_place and type(args[0]) is not DTensor:
        return operands.into_plain
    if func in operands.WITHOUT_VALUES and type(args[0]) is not DTensor:
        return operands.run_without_values
    return None


def _written(func: Op, rule: OpRule, args: Args, kwargs: Kwargs) -> Sequence[Tensor]:
    """The operands to which an op writes."""
    return args[:1] if rule.in_place else operands.written_by(func, args, kwargs) if rule.rows is no_rows else ()


def _compiled(
    func: Op, rule: OpRule, args: Args, kwargs: Kwargs, key: tuple[Any, ...], owner: Owner
) -> tuple[Call, Args, Kwargs]:
    """The local call for calls in the usual form, from their first one on; and the arguments."""
    known: Call | None = owner.calls.get(key)
    if known is not None:
        return known, args, kwargs
    tensors = dtensors_in((*args, *kwargs.values()))
    layouts = [x._layout for x in tensors]
    device_type = layouts[0].mesh.device_type
    costs = owner.costs.get(device_type) or collectives.costs(device_type)
    try:
        recipe = find_recipe(costs, key, func, rule, args, kwargs)
    except NoRowError:
        call = _handled(handler_without_row(rule), layouts)
    except (TypeError, ValueError) as error:
        args, kwargs = _with_numbers(args, kwargs, error)
        return _compiled(func, rule, args, kwargs, call_key(func, rule, args, kwargs), owner)
    else:
        if recipe.redistributed:
            warn_of_gathered(recipe, tensors)
        if recipe.written is None:
            ops = local_call(rule, func, recipe, owner)
        else:
            ops = (ReplicatedCall(func, recipe, owner),) * 2
        call = *ops, _owned(recipe.output, owner), layouts
    if NO_KEY not in key:
        remember(owner.calls, key, call)
    return call, args, kwargs


def _with_numbers(args: Args, kwargs: Kwargs, error: Exception) -> tuple[Args, Kwargs]:
    """Arguments with numbers in place of tensors without dims, such as sizes; raises `error` if there are none."""
    numbers: list[object] = []

    def number(x: object) -> object:
        if isinstance(x, DTensor) and not x._layout.shape and not x.is_floating_point():
            numbers.append(x.item())
            return numbers[-1]
        return x

    rest, kwargs = pytree.tree_map(number, (args[1:], kwargs))
    if not numbers:
        raise error
    return (*args[:1], *rest), kwargs


def _handled(handler: Handler, layouts: Sequence[Layout] = ()) -> Call:
    return handler, handler, OF_HANDLER, layouts


def _owned(layouts: Layouts, owner: Owner) -> Layouts:
    if isinstance(layouts, tuple):
        return tuple([layout and owner.layout(layout) for layout in layouts])
    return owner.layout(layouts) if isinstance(layouts, Layout) else layouts


def _run_with_out(func: Op, args: Args, kwargs: Kwargs) -> object:
    """Redistribute the result into `out=`, which keeps its layout."""
    out = kwargs["out"]
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            f"{name_of(func)}(): functions with out=... arguments don't support automatic differentiation, but one of "
            f"the arguments requires grad."
        )
    result = func(*args, **{k: v for k, v in kwargs.items() if k != "out"})
    several = isinstance(out, list | tuple) and isinstance(result, tuple) and len(out) == len(result)
    pairs = list(zip(out, result, strict=True)) if several else [(out, result)]
    for into, found in pairs:
        fits = isinstance(into, Tensor) and isinstance(found, Tensor) and into.shape == found.shape
        if not fits or not torch.can_cast(found.dtype, into.dtype):
            raise RuleError(
                f"{name_of(func)}: out= must be a tensor of the shape and dtype of the result. Fix: leave it out."
            )
    written = [into.copy_(found) for into, found in pairs]
    return type(result)(written) if several else written[0]


# ---- for tools --------------------------------------------------------------------------------------------------


def entry_of(func: Op) -> OpRule:
    """The entry of any function: its own, its family's, or the general one."""
    rule = RULES.get(func) or _family_cache.get(func)
    if rule is None:
        of_family = next((rule for serves, rule in FAMILIES if serves(func)), None)
        rule = _family_cache[func] = of_family or rule_of_others(func)
    return rule


def is_op(func: Op) -> bool:
    """Whether a function computes; not if it reads an attribute, sets a flag or runs backward."""
    rule = entry_of(func)
    return rule.has_rule or rule.is_op


def recipe_of(func: Op, args: Args, kwargs: Kwargs) -> Recipe:
    """The recipe of a call without plain tensors."""
    rule = RULES[func]
    costs = collectives.costs(dtensors_in((*args, *kwargs.values()))[0]._layout.mesh.device_type)
    return find_recipe(costs, call_key(func, rule, args, kwargs), func, rule, args, kwargs)


def prepared(func: Op, args: Args, kwargs: Kwargs) -> tuple[Recipe, LocalContext, list[Any], Kwargs] | None:
    """Redistribute the operands of a call. Returns its recipe, context and local arguments.

    None if it has no row.
    """
    rule = RULES[func]
    call, args, kwargs = _find(func, rule, args, kwargs, call_key(func, rule, args, kwargs))
    local = call[1]
    return (local.recipe, *local.prepare(args, kwargs)) if isinstance(local, LocalCall) else None


def forget() -> None:
    """Clear the caches, after an entry of `RULES` was replaced."""
    _family_cache.clear()
    forget_calls()
    forget_recipes()
