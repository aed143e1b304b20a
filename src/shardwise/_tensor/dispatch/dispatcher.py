"""Where every torch function called with a DTensor arrives, and runs by its rule on the local tensors of its operands.

A function with rows or a decomposition runs by its rule. One with a handler is answered by that. Torch decomposes any
other into aten ops, each of which arrives here again (`fallback.py`).

What runs on the local tensors is cached under the layouts and the other arguments (`call_key`). So a warm op costs a
dictionary look-up, the op itself, and giving the result its layout.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch._C._autograd import _top_saved_tensors_default_hooks as saved_tensors_hooks
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._layout import Layout, Owner, forget_calls, remember
from shardwise._rules import RULES, OpRule
from shardwise._rules.registry import FAMILIES
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor.dispatch import operands, resolve
from shardwise._tensor.dispatch.fallback import run_decomposed, run_without_row
from shardwise._tensor.dispatch.local_calls import (
    LocalCall,
    RankContext,
    as_dtensors,
    local_call,
    warn_of_gathered,
)
from shardwise._tensor.dispatch.recipes import NO_KEY, by_value, call_key, find_recipe, forget_recipes
from shardwise._tensor.dispatch.resolve import Layouts, Output, Recipe
from shardwise._tensor.dispatch.view_copies import before_op, invalidate
from shardwise._tensor.dtensor import DTensor, check_owners, dtensors_in, name_of
from shardwise.errors import RuleError

FIRST_OPERANDS = ("condition", "sorted_sequence", "tensors", "tensor", "input", "self")
# What this rank runs for a call, and under saved-tensor hooks; the layouts of the results; those of the operands, which
# are kept for the key.
Call = tuple[Callable[..., Any], Callable[..., Any], Layouts, Sequence[Layout]]
IN_PLACE = Output.IN_PLACE
_family_cache: dict[Any, OpRule] = {}  # the entries of functions that `RULES` does not have


class _Known(threading.local):
    """The calls that the rank of this thread has compiled, by `call_key`: `Owner.calls`."""

    def __init__(self) -> None:
        self.calls: dict[Any, Call] = {}  # none until the first one


_known = _Known()


def dispatch(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Answer a call of `func` with a DTensor among its arguments."""
    rule = RULES.get(func) or _family_cache.get(func) or entry_of(func)
    if rule.handler is None:
        return run(func, rule, args, kwargs)
    return rule.handler(func, args, kwargs)


def run(func: Op, rule: OpRule, args: Args, kwargs: Kwargs) -> Any:
    """Run `func` by its rule."""
    key = call_key(func, rule, args, kwargs)
    call = _known.calls.get(key) or _compiled(func, rule, args, kwargs, key)
    if isinstance(call, partial):
        return call()
    op, op_under_hooks, layout, _ = call
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


def _compiled(func: Op, rule: OpRule, args: Args, kwargs: Kwargs, key: tuple[Any, ...]) -> "Call | partial[Any]":
    """What this rank runs for calls of this key from now on; or, for this call alone, what to call instead.

    Instead is the same call in another form, such as with DTensors for plain tensors, or one for which no row fits.
    """
    owner = collectives.owner()
    if _known.calls is not owner.calls:  # the first call of this thread in this world
        _known.calls = owner.calls
        if key in owner.calls:
            return _known.calls[key]
    tensors = dtensors_in((*args, *kwargs.values()))
    layouts = [x._layout for x in tensors]
    if {owner} != {layout.owner for layout in layouts}:
        check_owners(name_of(func), layouts)
    if "out" in kwargs:
        if kwargs["out"] is not None:
            return partial(_run_with_out, func, args, kwargs)
        return partial(run, func, rule, args, {name: x for name, x in kwargs.items() if name != "out"})
    if not args and (first := next((n for n in FIRST_OPERANDS if n in kwargs), None)) is not None:
        # Rules expect the first operand, which has many names, by position, and so does a cached call.
        return partial(run, func, rule, (kwargs[first],), {name: x for name, x in kwargs.items() if name != first})
    if NO_KEY in key and operands.has_plain_tensors((*args, *kwargs.values())):
        return partial(_run_with_plain, func, rule, args, kwargs)
    try:
        recipe = find_recipe(by_value(key), func, rule, args, kwargs)
    except (resolve.NoRowError, TypeError, ValueError) as error:
        return partial(_run_otherwise, func, rule, args, kwargs, error)
    except resolve.SeveralMeshesError:
        kept = 0 if rule.in_place else rule.kept_operand
        return partial(run, func, rule, *operands.on_one_mesh(func, args, kwargs, kept))
    if recipe.redistributed:
        warn_of_gathered(recipe, tensors)
    call = *local_call(rule, func, recipe, owner), _owned(recipe.output, owner), layouts
    if NO_KEY not in key:
        remember(owner.calls, key, call)
    return call


def _run_with_plain(func: Op, rule: OpRule, args: Args, kwargs: Kwargs) -> object:
    """Run a call with plain tensors beside DTensors."""
    if (rule.in_place or func in operands.WITHOUT_VALUES) and type(args[0]) is not DTensor:
        return (operands.into_plain if rule.in_place else operands.run_without_values)(func, args, kwargs)
    with operands.checked_sizes(func, args, kwargs):
        return run(func, rule, *operands.all_promoted(func, args, kwargs))


def _run_otherwise(func: Op, rule: OpRule, args: Args, kwargs: Kwargs, error: Exception) -> object:
    """Run a call for which the rule has no row, or which has a tensor without dims for a number, such as a size."""
    if isinstance(error, resolve.NoRowError):
        return run_without_row(func, rule, args, kwargs, error)
    numbers: list[object] = []

    def number(x: object) -> object:
        if isinstance(x, DTensor) and not x._layout.shape and not x.is_floating_point():
            numbers.append(x.item())
            return numbers[-1]
        return x

    rest, kwargs = pytree.tree_map(number, (args[1:], kwargs))
    if not numbers:
        raise error
    return run(func, rule, (*args[:1], *rest), kwargs)


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
    """The entry of any function: its own, that of its family, or the one of all others."""
    rule = RULES.get(func) or _family_cache.get(func)
    if rule is None:
        rule = _family_cache[func] = next((rule for serves, rule in FAMILIES if serves(func)), DECOMPOSED)
    return rule


DECOMPOSED = OpRule(handler=run_decomposed, is_op=True)


def is_op(func: Op) -> bool:
    """Whether a function computes something; not if it reads an attribute, sets a flag or runs backward."""
    rule = entry_of(func)
    return rule.has_rule or rule.is_op


def recipe_of(func: Op, args: Args, kwargs: Kwargs) -> Recipe:
    """The recipe of a call without plain tensors."""
    rule = RULES[func]
    return find_recipe(by_value(call_key(func, rule, args, kwargs)), func, rule, args, kwargs)


def prepared(func: Op, args: Args, kwargs: Kwargs) -> tuple[Recipe, RankContext, list[Any], Kwargs]:
    """Redistribute the operands of a call: its recipe, context and local arguments, for the caller to run."""
    args, kwargs = operands.all_promoted(func, args, kwargs)
    recipe = recipe_of(func, args, kwargs)
    return recipe, *LocalCall(RULES[func], func, recipe, collectives.owner()).prepare(args, kwargs)


def forget() -> None:
    """Drop what is cached; needed after an entry of `RULES` was replaced."""
    _family_cache.clear()
    forget_calls()
    forget_recipes()
