"""The recipe of a call, from a cache or computed from the layouts of its operands."""

from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise._layout import Layout, LayoutKey, remember, strides_in_order
from shardwise._rules import RULES, OpRule
from shardwise._rules.registry import no_rows
from shardwise._rules.row import Args, Kwargs, Op, arguments
from shardwise._tensor.dispatch import resolve
from shardwise._tensor.dispatch.fallback import replicated_recipe
from shardwise._tensor.dispatch.resolve import Choice, NoRowError, Output, Recipe, Slot, SlottedCall
from shardwise._tensor.dispatch.without_memory import unobserved
from shardwise._tensor.dtensor import DTensor, dtensors_in, name_of

# ---- keys -------------------------------------------------------------------------------------------------------

EXACT_VALUES = frozenset((int, str, type(None), torch.Size, torch.dtype, torch.device, torch.memory_format))
TRUE, FALSE = object(), object()  # in a key: bools, which differ from 1 and 0: var(0) has a dim, var(False) has none
KEYWORDS = object()  # in a key: keyword arguments follow, by name
NO_KEY = object()  # in a key: an argument that cannot be part of one, so the call is not cached


def call_key(func: Any, rule: OpRule, args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """The key on which the recipe of a call depends: layouts for DTensors, other arguments themselves.

    If the rule is `shape_independent`, all floats count as equal except 0, inf and nan. The key contains `NO_KEY` if an
    argument cannot be hashed, or is a plain tensor, which must be promoted first.
    """
    key = [func, _dtypes(args, kwargs)] if rule.typed or rule.random else [func]
    floats_alike = rule.shape_independent
    for a in args:  # the most frequent kinds of arguments as in `_part`, without a call each
        kind = type(a)
        if kind is DTensor:
            key.append(a._layout.key)
        elif kind in EXACT_VALUES:
            key.append(a)
        else:
            key.append(_part(a, floats_alike))
    if kwargs:
        key.append(KEYWORDS)
        for name, a in kwargs.items():
            kind = type(a)
            key.append(name)
            if kind in EXACT_VALUES:
                key.append(a)
            elif kind is bool:
                key.append(TRUE if a else FALSE)
            else:
                key.append(a._layout.key if kind is DTensor else _part(a, floats_alike))
    return tuple(key)


def _part(a: Any, floats_alike: bool) -> object:
    """The part of a key for any argument."""
    kind = type(a)
    if kind is float:
        return float if floats_alike and a and a - a == 0 else a
    if kind is bool:
        return TRUE if a else FALSE
    if kind is list or kind is tuple:
        parts = []
        for x in a:
            kind = type(x)
            part = x._layout.key if kind is DTensor else x if kind in EXACT_VALUES else _part(x, floats_alike)
            if part is NO_KEY:
                return NO_KEY
            parts.append(part)
        return tuple(parts)
    if kind is torch.Generator:  # its state changes no recipe
        return torch.Generator
    if isinstance(a, Tensor):
        return NO_KEY
    try:
        hash(a)
    except TypeError:
        return NO_KEY
    return kind, a


def by_value(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key with layouts by value, for caches of all ranks and worlds of this process."""
    return tuple(
        [part.value() if type(part) is LayoutKey else by_value(part) if type(part) is tuple else part for part in key]
    )


def _dtypes(args: Args, kwargs: Kwargs) -> tuple[torch.dtype, ...]:
    with DisableTorchFunctionSubclass():
        return tuple([x.dtype for x in dtensors_in((*args, *kwargs.values()))])


# ---- recipes ----------------------------------------------------------------------------------------------------


_recipe_cache: dict[Any, Recipe] = {}  # by costs and key; all ranks and worlds of this process share them
# The rows that fit, and the choice of the cheapest by costs and size classes of operands: () if one row fits each axis.
_row_cache: dict[Any, tuple[resolve.Candidates, dict[tuple[object, ...], Choice]]] = {}


def forget_recipes() -> None:
    """Clear the caches."""
    _recipe_cache.clear()
    _row_cache.clear()


def find_recipe(costs: object, key: tuple[Any, ...], func: Op, rule: OpRule, args: Args, kwargs: Kwargs) -> Recipe:
    """The recipe of a call, whose `call_key` is `key`, under these costs of collectives.

    Raises:
        NoRowError: no row fits, and it is not an aten op, which would run replicated.
        RuleError: the operands are on different meshes.
    """
    value = by_value(key)
    recipe = _recipe_cache.get((costs, value))
    if recipe is None:
        with DisableTorchFunctionSubclass(), unobserved():  # reading the dtype of a DTensor is not an op
            try:
                recipe = _resolved(costs, value, func, rule, args, kwargs)
            except NoRowError as error:
                if not isinstance(func, torch._ops.OpOverload) or rule.decomposition or rule.handler_without_row:
                    raise
                recipe = replicated_recipe(func, args, kwargs, str(error))
        if NO_KEY not in key:
            remember(_recipe_cache, (costs, value), recipe)
    return recipe


def _resolved(costs: object, key: tuple[Any, ...], func: Op, rule: OpRule, args: Args, kwargs: Kwargs) -> Recipe:
    if rule.rows is no_rows:
        why = f"{name_of(func)} is decomposed into other ops" if rule.decomposition else "it has no rule"
        raise NoRowError(why)
    call = slotted(func, args, kwargs)
    rule = _in_place_rule(func, call.name, rule, args, kwargs)
    python = rule.native is None and _is_python(func)
    recipe = resolve.recipe(rule.native or func, python, rule, call, _choice(costs, key, rule, call))
    one_dtype = len({x.dtype for x in call.metas}) == 1  # torch may refuse others, but not on a rank without elements
    if len(call.metas) > 1 and rule.shape is not None and not (rule.checks_sizes and one_dtype):
        call.check_sizes()
    if rule.memory_order is not None:
        order = tuple(call.of(rule.memory_order, call.metas))
        output = recipe.output
        if isinstance(output, Layout):
            output = output.with_strides(strides_in_order(output.shape, order))
        return replace(recipe, order=order, output=output)
    if isinstance(recipe.output, Output):
        return recipe
    # A result may be other than row-major, or an alias of an operand.
    strided = [x.strides for x in call.metas].count(None) < len(call.metas)
    if rule.view or rule.shape is None or strided or torch.memory_format in map(type, (*args, *kwargs.values())):
        try:
            return resolve.with_strides(recipe, call.results())
        except RuntimeError:  # NoRowError among them
            if rule.view:
                raise
    return recipe


def slotted(func: Op, args: Args, kwargs: Kwargs) -> SlottedCall:
    """A call with slots for its DTensors."""
    operands: list[tuple[Layout, torch.dtype]] = []

    def slot(x: Any) -> Any:
        kind = type(x)
        if kind is DTensor:
            operands.append((x._layout.unowned, x.dtype))
            return Slot(len(operands) - 1)
        return kind([slot(y) for y in x]) if kind is list or kind is tuple else x

    slotted = tuple([slot(a) for a in args])
    return SlottedCall(func, slotted, {k: slot(a) for k, a in kwargs.items()} if kwargs else kwargs, operands)


def _is_python(func: Op) -> bool:
    """Whether Python code would get a DTensor, forward or backward, and take its global shape for the local one."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return not str(func).startswith("aten.")
    return isinstance(func, FunctionType)


def _in_place_rule(func: Op, name: str, rule: OpRule, args: Args, kwargs: Kwargs) -> OpRule:
    """The rule of a call; for `inplace=True` that of the in-place method."""
    if getattr(func, "__module__", "") != F.__name__ or not arguments(func, args, kwargs).get("inplace"):
        return rule
    method = getattr(Tensor, f"{name}_", None)
    in_place = RULES.get(method) if method is not None else None
    if in_place is None or rule.native is None:
        raise NoRowError(f"{name}(inplace=True) has no rule of its own")
    return in_place


def _choice(costs: object, key: tuple[Any, ...], rule: OpRule, call: SlottedCall) -> Choice:
    """Rows for these operands, independent of earlier calls: ranks with other histories choose equally.

    The rows of a shape-independent rule that fit are cached without sizes, the cheapest of several by size class.
    """
    if not rule.shape_independent:
        return Choice(call.name, rule, resolve.cheapest(rule, resolve.candidates(rule, call), call))
    kinds = _without_sizes(key), *[x.dtype for x in call.metas]
    known = _row_cache.get(kinds)
    if known is None:
        known = resolve.candidates(rule, call), {}
        if NO_KEY not in key:
            remember(_row_cache, kinds, known)
    fitting, chosen = known
    sizes = () if resolve.is_settled(fitting) else (costs, *[resolve.size_class(x.shape) for x in call.layouts])
    if sizes not in chosen:
        chosen[sizes] = Choice(call.name, rule, resolve.cheapest(rule, fitting, call))
    return chosen[sizes]


def _without_sizes(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key by value with the kinds of layouts, and which sizes are 1, instead of layouts."""
    return tuple(
        [
            (part.kind, *[n == 1 for n in part.shape])
            if type(part) is Layout
            else _without_sizes(part)
            if type(part) is tuple
            else part
            for part in key
        ]
    )
