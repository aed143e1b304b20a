"""Door 1: functions that have a rule run on the locals at once.

The answer to "how does this op run on these layouts" is kept under the layouts and the other arguments, so a
warm op costs a dictionary look-up, the op itself, and giving the result its layout.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch._C._autograd import _top_saved_tensors_default_hooks as hooks_of_saved
from torch.utils import _pytree as pytree

from shardwise import collectives
from shardwise.errors import RuleError
from shardwise.layout import Layout
from shardwise.redistribute.run import move
from shardwise.rules import RULES, OpRule
from shardwise.rules.row import Args, Kwargs
from shardwise.tensor.dispatch import meshes, recipes, resolve
from shardwise.tensor.dispatch.consistent_errors import guarded
from shardwise.tensor.dispatch.fallback import run_decomposed, run_replicated
from shardwise.tensor.dispatch.keys import NO_KEY, call_key
from shardwise.tensor.dispatch.local_context import RankContext
from shardwise.tensor.dispatch.names import name_of
from shardwise.tensor.dispatch.promotion import all_promoted, has_plain_tensors, into_plain
from shardwise.tensor.dispatch.recipes import Found
from shardwise.tensor.dispatch.results import labelled, measured
from shardwise.tensor.dispatch.run_local import Copying, Looks, OnLocals, first, known_outputs, watched
from shardwise.tensor.dtensor import DTensor, plain
from shardwise.tensor.handlers.copies import before_change, copied, outdate

# What ran on the locals as they were, and the layouts of its results; None where it works in place.
_at_once: dict[Any, tuple[Callable[..., Any], Layout | tuple[Layout | None, ...] | None]] = {}


def forget() -> None:
    """Drop what was worked out so far."""
    _at_once.clear()
    recipes.forget()


def run(func: Any, rule: OpRule, args: Args, kwargs: Kwargs) -> Any:
    """Run `func` by its rule: at once where these very arguments ran before and no operand had to be moved."""
    key = call_key(func, rule, args, kwargs)
    at_once = _at_once.get(key)
    if at_once is None:
        return _run(func, rule, args, kwargs, key)
    op, layout = at_once
    copies = before_change(name_of(func), args[0]) if layout is None else None
    with DisableTorchFunctionSubclass():
        out = op(*args, **kwargs) if hooks_of_saved(True) is None else watched(op, args, kwargs, layout is None)
        if type(layout) is not Layout:
            if copies:
                outdate(copies)
            return args[0] if layout is None else labelled(out, layout)
        if type(out) is not DTensor:
            out.__class__ = DTensor
            out._layout = layout
        return out


def _run(func: Any, rule: OpRule, args: Args, kwargs: Kwargs, key: tuple[Any, ...]) -> Any:
    if kwargs and kwargs.get("out") is not None:
        return _into_out(func, args, kwargs)
    if not args:
        args, kwargs = _first_by_position(kwargs)
    if NO_KEY in key and has_plain_tensors((*args, *kwargs.values())):
        if rule.in_place and type(args[0]) is not DTensor:
            return into_plain(func, args, kwargs)
        return run(func, rule, *all_promoted(func, args, kwargs))
    try:
        found = recipes.find(key, func, rule, args, kwargs)
    except resolve.NoRowError as error:
        return _without_row(func, rule, args, kwargs, error)
    except resolve.SeveralMeshesError:
        return run(func, rule, *meshes.on_one_mesh(func, args, kwargs, 0 if rule.in_place else rule.mesh_operand))
    recipe = found.recipe
    mesh = recipe.layouts[0].mesh
    everywhere = mesh.size() == collectives.world_size()  # what ran at once is known to all simulated ranks
    copies = before_change(name_of(func), args[0]) if rule.in_place else ()
    if not (everywhere or rule.random) and meshes.outside(mesh):
        outdate(copies)
        views = rule.view, recipe.copied
        return args[0] if rule.in_place else meshes.nothing(func, recipe.output, mesh, args, kwargs, *views)
    with DisableTorchFunctionSubclass():
        if recipe.moves or recipe.rows:
            out = guarded(rule, func, recipe, _LaidOut(found))(*args, **kwargs)
            outdate(copies)
            return out
        call = guarded(rule, func, recipe, _callable(rule, found))
        out = watched(call, args, kwargs, recipe.output is None)
        if everywhere and NO_KEY not in key:
            _remember(key, call, recipe)
        outdate(copies)
        return args[0] if recipe.output is None else labelled(out, recipe.output)


def _remember(key: tuple[Any, ...], call: Callable[..., Any], recipe: resolve.Recipe) -> None:
    if len(_at_once) >= recipes.CACHE_LIMIT:
        _at_once.clear()
    _at_once[key] = call, recipe.output


def _callable(rule: OpRule, found: Found) -> Callable[..., Any]:
    recipe, op, needs_plain = found
    call = OnLocals(recipe, op) if needs_plain and (not rule.takes_dtensors or recipe.local_impl is not None) else op
    return Copying(call) if recipe.copied else call


def _first_by_position(kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The first operand has many names; rules know it by its place."""
    name = next(
        (n for n in ("condition", "sorted_sequence", "tensors", "tensor", "input", "self") if n in kwargs), None
    )
    if name is None:
        return (), kwargs
    return (kwargs[name],), {k: v for k, v in kwargs.items() if k != name}


def _without_row(func: Any, rule: OpRule, args: Args, kwargs: Kwargs, error: RuleError) -> Any:
    """Taken apart as the rule says, by hand or into aten ops; an aten op without a row either runs on whole copies."""
    if rule.decomposition is not None:
        return rule.decomposition(*args, **kwargs)
    if rule.fallback is not None:
        return rule.fallback(func, args, kwargs)
    if isinstance(func, torch._ops.OpOverload):
        return run_replicated(func, args, kwargs, str(error))
    return run_decomposed(func, args, kwargs)


def _into_out(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`out=` keeps its layout: the result is moved there."""
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
            raise RuleError(f"{name_of(func)}: out= must be a tensor of the shape and dtype of the result.")
    written = [into.copy_(found) for into, found in pairs]
    return type(result)(written) if several else written[0]


def prepared(func: Any, args: Args, kwargs: Kwargs) -> tuple[resolve.Recipe, RankContext, list[Any], Kwargs]:
    """The first half of running an op that has a local function: the recipe, the site, and local arguments."""
    args, kwargs = all_promoted(func, args, kwargs)
    return _laid_out(find(func, args, kwargs), args, kwargs)


def find(func: Any, args: Args, kwargs: Kwargs) -> Found:
    """The recipe of a call without plain tensors."""
    rule = RULES[func]
    return recipes.find(call_key(func, rule, args, kwargs), func, rule, args, kwargs)


class _LaidOut(Looks):
    """An op some of whose operands are moved first, or whose result is measured."""

    __slots__ = ("found",)

    def __init__(self, found: Found) -> None:
        self.found = found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recipe, ctx, locals_, named = _laid_out(self.found, args, kwargs)
        out = ctx.op(*locals_, **named) if recipe.local_impl is None else recipe.local_impl(ctx, *locals_, **named)
        if recipe.copied:
            out = copied(out, first(args, kwargs))
        if recipe.rows:
            return labelled(out, measured(recipe, ctx, out))
        return args[0] if recipe.output is None else labelled(out, recipe.output)


def _laid_out(found: Found, args: Args, kwargs: Kwargs) -> tuple[resolve.Recipe, RankContext, list[Any], Kwargs]:
    """The operands as the recipe wants them, as local tensors."""
    recipe, op, unwrap = found
    moves = dict(recipe.moves)
    operands: list[DTensor] = []
    hooked = hooks_of_saved(True) is not None

    def operand(x: Any) -> Any:
        if type(x) is not DTensor:
            return [operand(y) for y in x] if isinstance(x, list | tuple) else x
        index = len(operands)
        operands.append(x)
        if index in moves:
            name = x._name or f"operand {index}"
            cause = recipe.cause._replace(kind="operand", operand=name, wanted=moves[index])
            return move(plain(x), x._layout, moves[index], cause)
        # Python code would see the global shape of a DTensor, and so would hooks on what is saved; see `watched`.
        hide = unwrap or (hooked and not x.requires_grad and (index > 0 or recipe.output is not None))
        return plain(x) if hide else x

    locals_ = [operand(a) for a in args]
    named = {k: operand(a) for k, a in kwargs.items()}
    ctx = RankContext(op, recipe.layouts, known_outputs(recipe), recipe.local_axes, operands, recipe.cause)
    return recipe, ctx, locals_, named
