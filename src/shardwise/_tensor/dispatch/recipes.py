"""The recipe of a call, from a cache or computed from the layouts of its operands."""

from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Layout, LayoutKey, remember, strides_in_order
from shardwise._rules import RULES, Meta, OpRule, Row
from shardwise._rules.pointwise import broadcast
from shardwise._rules.registry import Shapes, no_rows
from shardwise._rules.row import Args, Kwargs, Op, arguments
from shardwise._tensor.dispatch import resolve
from shardwise._tensor.dispatch.resolve import Output, Recipe
from shardwise._tensor.dispatch.without_memory import without_modes
from shardwise._tensor.dtensor import DTensor, dtensors_in, name_of
from shardwise._trace.capture_hooks import tracing_paused

# ---- keys -------------------------------------------------------------------------------------------------------

EXACT_VALUES = frozenset((int, str, type(None), torch.Size, torch.dtype, torch.device, torch.memory_format))
TRUE, FALSE = object(), object()  # in a key: bools, which differ from 1 and 0: var(0) has a dim, var(False) has none
KEYWORDS = object()  # in a key: keyword arguments follow, by name
NO_KEY = object()  # in a key: an argument that cannot be part of one, so the call is not cached


def call_key(func: Any, rule: OpRule, args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """What the recipe of a call depends on: layouts for DTensors, other arguments themselves.

    If the rule is `shape_independent`, all floats count as equal except 0, inf and nan. The key contains `NO_KEY` if an
    argument cannot be hashed, or is a plain tensor, which has to be promoted first.
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
    """What any argument adds to a key."""
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
    """A key with layouts by value, for what all ranks and worlds of this process share."""
    return tuple(
        [part.value() if type(part) is LayoutKey else by_value(part) if type(part) is tuple else part for part in key]
    )


def _dtypes(args: Args, kwargs: Kwargs) -> tuple[torch.dtype, ...]:
    with DisableTorchFunctionSubclass():
        return tuple([a.dtype for a in (*args, *kwargs.values()) if type(a) is DTensor])


# ---- recipes ----------------------------------------------------------------------------------------------------


_recipe_cache: dict[Any, Recipe] = {}  # by costs and key; all ranks and worlds of this process share them
# The rows that fit, and which are the cheapest, by costs and size classes of operands: () if one row fits each axis.
_row_cache: dict[Any, tuple[resolve.Candidates, dict[tuple[object, ...], tuple[Row, ...]]]] = {}


def forget_recipes() -> None:
    """Drop what is cached."""
    _recipe_cache.clear()
    _row_cache.clear()


def find_recipe(key: tuple[Any, ...], func: Op, rule: OpRule, args: Args, kwargs: Kwargs) -> Recipe:
    """The recipe of a call, whose `call_key` is `key`, by value. It depends also on what collectives cost.

    Raises:
        NoRowError: no row fits.
        SeveralMeshesError: the operands are on different meshes.
    """
    if rule.rows is no_rows:  # calling it would cost more than running what the op is decomposed into
        raise resolve.NoRowError(f"{name_of(func)} is decomposed into other ops")
    first = dtensors_in((*args, *kwargs.values()))[0]
    costs = collectives.costs(first._layout.mesh.device_type)
    recipe = _recipe_cache.get((costs, key))
    if recipe is None:
        # Reading the dtype of a DTensor is not an op.
        with DisableTorchFunctionSubclass(), tracing_paused(), without_modes():
            recipe = _resolved(costs, func, rule, args, kwargs)
        if NO_KEY not in key:
            remember(_recipe_cache, (costs, key), recipe)
    return recipe


def _resolved(costs: object, func: Op, rule: OpRule, args: Args, kwargs: Kwargs) -> Recipe:
    operands: list[resolve.Operand] = []

    def slot(x: object) -> Any:
        if type(x) is DTensor:
            operands.append(resolve.Operand(x._layout.unowned, x.dtype))
            return resolve.Slot(len(operands) - 1)
        return type(x)(map(slot, x)) if isinstance(x, list | tuple) and type(x) is not torch.Size else x

    slotted = tuple(map(slot, args))
    named = {k: slot(a) for k, a in kwargs.items()} if kwargs else kwargs
    op, name = rule.native or func, name_of(func)
    python = rule.native is None and _is_python(func)
    rule = _in_place_rule(func, name, rule, args, kwargs)
    chosen = _choice(costs, func, name, rule, operands, slotted, named)
    metas = [Meta(o.layout.shape, o.dtype, REPLICATE, o.layout.strides) for o in operands]
    known: list[resolve.MetaResults] = []

    def results() -> resolve.MetaResults:
        if not known:
            known.append(resolve.results_on_meta(func, slotted, named, operands))
        return known[0]

    def shape() -> Shapes:
        if rule.shape is None:
            return resolve.shapes_of(func, results().out)
        found: Shapes = resolve.called(rule.shape, metas, slotted, named)
        return found

    shapes = [o.layout.shape for o in operands]
    recipe = resolve.recipe(name, op, python, rule, [o.layout for o in operands], chosen, shape)
    # Elementwise ops take operands of one shape, and torch's own check is most of a call on a new shape.
    if len(operands) > 1 and rule.shape is not None and (rule.shape is not broadcast or len({*shapes}) > 1):
        resolve.check_sizes(results)
    if rule.memory_order is not None:
        order = tuple(resolve.called(rule.memory_order, metas, slotted, named))
        output = recipe.output
        if isinstance(output, Layout):
            output = output.with_strides(strides_in_order(output.shape, order))
        return replace(recipe, order=order, output=output)
    if isinstance(recipe.output, Output):
        return recipe
    # A result may be other than row-major, or an alias of an operand.
    strided = {o.layout.strides for o in operands} != {None}
    if rule.view or rule.shape is None or strided or torch.memory_format in map(type, (*slotted, *named.values())):
        try:
            return resolve.with_strides(recipe, results())
        except RuntimeError:  # NoRowError among them
            if rule.view:
                raise
    return recipe


def _is_python(func: Op) -> bool:
    """Whether Python code would get a DTensor, forward or backward, and take its global shape for the local one."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return not str(func).startswith("aten.")
    return isinstance(func, FunctionType)


def _in_place_rule(func: Op, name: str, rule: OpRule, args: Args, kwargs: Kwargs) -> OpRule:
    """The rule of a call; that of the method in place for `inplace=True`."""
    if getattr(func, "__module__", "") != F.__name__ or not arguments(func, args, kwargs).get("inplace"):
        return rule
    method = getattr(Tensor, f"{name}_", None)
    in_place = RULES.get(method) if method is not None else None
    if in_place is None or rule.native is None:
        raise resolve.NoRowError(f"{name}(inplace=True) has no rule of its own")
    return in_place


def _choice(
    costs: object, func: Op, name: str, rule: OpRule, operands: list[resolve.Operand], slotted: Args, named: Kwargs
) -> tuple[Row, ...]:
    """Rows for these operands, whatever ran before: ranks with other histories choose the same.

    The rows of a shape-independent rule that fit are cached without sizes, the cheapest of several by size class.
    """
    if not rule.shape_independent:
        return resolve.choose(name, rule, operands, slotted, named)
    layouts = [o.layout for o in operands]
    kinds = tuple([(x.kind, o.dtype, tuple([n == 1 for n in x.shape])) for o, x in zip(operands, layouts, strict=True)])
    key = kinds, call_key(func, rule, slotted, named)
    known = _row_cache.get(key)
    if known is None:
        known = resolve.candidates(name, rule, operands, slotted, named), {}
        if NO_KEY not in key[1]:
            remember(_row_cache, key, known)
    fitting, chosen = known
    settled = max(map(len, fitting), default=1) == 1
    sizes = () if settled else (costs, *[resolve.size_class(x.shape) for x in layouts])
    if sizes not in chosen:
        chosen[sizes] = resolve.cheapest(rule, fitting, operands, slotted, named)
    return chosen[sizes]
