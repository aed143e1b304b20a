"""Door 1: functions that have a rule run on the locals at once.

The answer to "how does this op run on these layouts" is kept under the layouts and the other arguments, so a
warm op costs a dictionary look-up, the op itself, and giving the result its layout.
"""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch._C._autograd import _top_saved_tensors_default_hooks as hooks_of_saved
from torch.utils import _pytree as pytree

from shardwise import collectives
from shardwise.errors import RuleError
from shardwise.layout import REPLICATE, Layout
from shardwise.redistribute.run import move
from shardwise.rules import RULES, Meta, OpRule, Row
from shardwise.rules.row import Shapes, arguments, no_rows
from shardwise.rules.shapes.reshape import row_major
from shardwise.rules.shapes.view import basic
from shardwise.tensor.dispatch import meshes, resolve, spec_ops
from shardwise.tensor.dispatch.consistent_errors import guarded
from shardwise.tensor.dispatch.fallback import run_on_whole, through_the_dispatcher
from shardwise.tensor.dispatch.local_context import RankContext
from shardwise.tensor.dispatch.names import name_of
from shardwise.tensor.dispatch.promotion import all_promoted, into_plain, promoted
from shardwise.tensor.dispatch.results import labelled, measured
from shardwise.tensor.dispatch.run_local import (
    PLAIN_VALUES,
    Copying,
    Looks,
    OnLocals,
    first,
    known_outputs,
    watched,
)
from shardwise.tensor.dispatch.spec_ops import OPS
from shardwise.tensor.dtensor import DTensor, Handler, plain
from shardwise.tensor.handlers import attributes, lists
from shardwise.tensor.handlers.copies import before_change, copied, marked, outdate
from shardwise.trace.capture_hooks import unrecorded

CACHE_LIMIT = 1 << 16
Found = tuple[resolve.Recipe, Callable[..., Any], bool]  # recipe, what computes, whether it needs plain tensors
_cache: dict[Any, Found] = {}
_choices: dict[Any, tuple[Row, ...]] = {}
_handlers: dict[Any, Handler] = {}  # of functions that have no rule
# What ran on the locals as they were, and the layouts of its results; None where it works in place.
_at_once: dict[Any, tuple[Callable[..., Any], Layout | tuple[Layout | None, ...] | None]] = {}
NO_KEY = object()  # stands in a key for a value that the answer may depend on in ways that a key cannot tell


def _view_or_copy(x: Tensor, size: Any) -> Tensor:
    """C++ decides by the strides that the whole claims to have; those of the part may allow no view."""
    try:
        return x.view(size)
    except RuntimeError:
        return marked(x.reshape(size))


def _contiguous(x: Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """A part that is contiguous only because it is small is copied, as the whole would be."""
    cut = type(x) is DTensor and not x._layout.is_replicated
    if cut and memory_format is torch.contiguous_format and not row_major(x, x._layout.shape):  # type: ignore[attr-defined]
        return x.clone(memory_format=memory_format)
    return x.contiguous(memory_format=memory_format)


# C functions that stand in for Python ones, which would look at shapes on their way.
NATIVE: dict[Any, Callable[..., Any]] = {
    Tensor.contiguous: _contiguous,
    F.relu: lambda input, inplace=False: torch.relu_(input) if inplace else torch.relu(input),
    F.sigmoid: torch.sigmoid,
    F.tanh: torch.tanh,
    F.softmax: lambda input, dim=None, _stacklevel=3, dtype=None: torch.softmax(input, dim, dtype),
    F.log_softmax: lambda input, dim=None, _stacklevel=3, dtype=None: torch.log_softmax(input, dim, dtype),
    F.layer_norm: torch.layer_norm,
    F.rms_norm: torch.rms_norm,
    torch.ops.aten.view.default: _view_or_copy,
    Tensor.__rpow__: lambda x, other: torch.pow(other, x),
    Tensor.__rsub__: torch.rsub,
    Tensor.__rdiv__: lambda x, other: torch.reciprocal(x) * other,
}


# Python functions that only compare sizes: they may see DTensors, if all operands are, which saves unwrapping those.
SHAPE_INDEPENDENT = frozenset(
    (basic, F.silu, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div,
     F.binary_cross_entropy_with_logits)
)  # fmt: skip


def forget() -> None:
    """Drop what was worked out so far; needed after a rule in `RULES` was replaced."""
    for known in (_cache, _choices, _handlers, _at_once):
        known.clear()


def enter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where every torch function called with a DTensor arrives."""
    if OPS and (own := spec_ops.found(func, args, kwargs)) is not None:
        return own()
    rule = RULES.get(func)
    if rule is not None:
        return run(func, rule, args, kwargs)
    handler = _handlers.get(func)
    if handler is None:
        handler = _handlers[func] = _handler_of(func)
    return handler(func, args, kwargs)


def _handler_of(func: Any) -> Handler:
    """What answers for a function that has no rule, by its name."""
    special = DTensor._specials.get(func)
    if special is not None:
        return special
    name = getattr(func, "__name__", "")
    attribute = func.__self__.__name__ if name in ("__get__", "__set__") else name
    if attribute in attributes.SAME:
        return attributes.same
    if name in ("__get__", "__set__"):
        return attributes.attribute_of
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return lists.run
    if (getattr(func, "__module__", None) or "").startswith("torch.distributed."):
        return attributes.refuse
    return _taken_apart


def _taken_apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return through_the_dispatcher(func, args, kwargs, promoted)


def run(func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` by its rule: at once where these very arguments ran before and no operand had to be moved."""
    key = [func, _dtypes(args, kwargs)] if rule.typed or rule.random else [func]
    floats = rule.shape_independent  # then numbers of a kind are alike
    for a in args:
        kind = type(a)
        if kind is DTensor:
            key.append(a._layout)
        elif kind is bool:
            key.append((bool, a))
        elif kind in PLAIN_VALUES:
            key.append(float if floats and kind is float and a and a - a == 0 else a)  # 0, inf and nan are special
        else:
            key.append(_key_of_many(a))
    for k, a in kwargs.items():
        kind = type(a)
        key.append(k)
        key.append(a._layout if kind is DTensor else a if kind in PLAIN_VALUES else _key_of_many(a))
    ready = tuple(key)
    at_once = _at_once.get(ready)
    if at_once is None:
        return _run(func, rule, args, kwargs, ready)
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


def _dtypes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.dtype, ...]:
    with DisableTorchFunctionSubclass():
        return tuple([a.dtype for a in (*args, *kwargs.values()) if type(a) is DTensor])


def _key_of_many(a: Any) -> Any:
    """What a list or tuple, or another value, adds to the key of a call that may run at once."""
    kind = type(a)
    if kind is torch.Size or kind is torch.dtype or kind is torch.device or kind is torch.memory_format:
        return a
    if kind is not list and kind is not tuple:
        return NO_KEY
    parts = []
    for x in a:
        kind = type(x)
        if kind is DTensor:
            parts.append(x._layout)
        elif kind in PLAIN_VALUES:
            parts.append(x)
        else:
            return NO_KEY
    return tuple(parts)


def _run(func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any], ready: tuple[Any, ...]) -> Any:
    if kwargs and kwargs.get("out") is not None:
        return _into_out(func, args, kwargs)
    if not args:
        args, kwargs = _first_by_position(kwargs)
    key: Any = ready
    if NO_KEY in ready:
        key, mixed = _key(func, rule, args, kwargs)
        if rule.typed or rule.random:
            key.append(_dtypes(args, kwargs))
        if mixed:
            if rule.in_place and type(args[0]) is not DTensor:
                return into_plain(func, args, kwargs)
            return run(func, rule, *all_promoted(func, args, kwargs))
    try:
        found = _found(key, func, rule, args, kwargs)
    except resolve.NoRowError as error:
        return _without_row(func, rule, args, kwargs, error)
    except resolve.SeveralMeshesError:
        return run(func, rule, *meshes.on_one_mesh(func, args, kwargs, 0 if rule.in_place else rule.mesh_operand))
    recipe, op, unwrap = found
    mesh = recipe.layouts[0].mesh
    everywhere = mesh.size() == collectives.world_size()  # what ran at once is known to all simulated ranks
    copies = before_change(name_of(func), args[0]) if rule.in_place else ()
    if not (everywhere or rule.random) and meshes.outside(mesh):
        outdate(copies)
        views = rule.view, recipe.copied
        return args[0] if rule.in_place else meshes.nothing(func, recipe.output, mesh, args, kwargs, *views)
    with DisableTorchFunctionSubclass():
        if recipe.moves or recipe.rows:
            out = guarded(func, recipe, _LaidOut(func, found))(*args, **kwargs)
            outdate(copies)
            return out
        call = guarded(func, recipe, _callable(recipe, op, unwrap))
        out = watched(call, args, kwargs, recipe.output is None)
        if everywhere and NO_KEY not in ready:
            _remember(ready, call, recipe)
        outdate(copies)
        return args[0] if recipe.output is None else labelled(out, recipe.output)


def _remember(key: tuple[Any, ...], call: Callable[..., Any], recipe: resolve.Recipe) -> None:
    if len(_at_once) >= CACHE_LIMIT:
        _at_once.clear()
    _at_once[key] = call, recipe.output


def _callable(recipe: resolve.Recipe, op: Callable[..., Any], unwrap: bool) -> Callable[..., Any]:
    call = OnLocals(recipe, op) if unwrap and (op not in SHAPE_INDEPENDENT or recipe.local_impl is not None) else op
    return Copying(call) if recipe.copied else call


def _first_by_position(kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first operand has many names; rules know it by its place."""
    name = next(
        (n for n in ("condition", "sorted_sequence", "tensors", "tensor", "input", "self") if n in kwargs), None
    )
    if name is None:
        return (), kwargs
    return (kwargs[name],), {k: v for k, v in kwargs.items() if k != name}


def _without_row(func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any], error: RuleError) -> Any:
    """Taken apart as the rule says, by hand or into aten ops; an aten op without a row either runs on whole copies."""
    if rule.decomposition is not None:
        return rule.decomposition(*args, **kwargs)
    special = DTensor._specials.get(func)
    if special is not None:
        return special(func, args, kwargs)
    if isinstance(func, torch._ops.OpOverload):
        return run_on_whole(func, args, kwargs, str(error))
    return through_the_dispatcher(func, args, kwargs, promoted)


def _into_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def prepared(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[resolve.Recipe, RankContext, list[Any], dict[str, Any]]:
    """The first half of running an op that has a local function: the recipe, the site, and local arguments."""
    rule = RULES[func]
    key, mixed = _key(func, rule, args, kwargs)
    if mixed:
        args, kwargs = all_promoted(func, args, kwargs)
        key, _ = _key(func, rule, args, kwargs)
    return _laid_out(func, _found(key, func, rule, args, kwargs), args, kwargs)


def reason(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The reasons of the rows that `func` runs by on these operands, or why it has none."""
    rule = RULES.get(func)
    if rule is None:
        return "it has no rule: torch takes it apart into ops that have"
    try:
        args, kwargs = all_promoted(func, args, {k: v for k, v in kwargs.items() if k != "out"})
        return _found(_key(func, rule, args, kwargs)[0], func, rule, args, kwargs)[0].cause.why
    except RuleError as error:
        return str(error)


def _key(func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], bool]:
    """What the recipe may depend on, and whether plain tensors are mixed in."""
    key: list[Any] = [func]
    mixed = False
    for a in args:
        kind = type(a)
        if kind is DTensor:
            key.append(a._layout)
        elif kind is float and rule.shape_independent and a and a - a == 0:
            key.append(float)
        elif kind is bool:
            key.append((bool, a))  # not the 0 or 1 that it equals: var(False) is of all elements, var(0) along a dim
        elif kind is list or kind is tuple:
            key.append(tuple(x._layout if type(x) is DTensor else x for x in a))
            mixed = mixed or any(isinstance(x, Tensor) and type(x) is not DTensor for x in a)
        else:
            mixed = mixed or isinstance(a, Tensor)
            key.append(kind if kind is torch.Generator else a)  # whose state is no part of a recipe
    if kwargs:
        named, mixed_too = _key(func, rule, tuple(kwargs.values()), {})
        key += [tuple(kwargs), *named[1:]]
        mixed = mixed or mixed_too
    return key, mixed


def _found(key: Sequence[Any], func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """The recipe, from the cache or worked out now."""
    if rule.rows is no_rows:  # asking would cost more than running what the op is made of
        raise resolve.NoRowError(f"{name_of(func)} is put together from other ops")
    try:
        found = _cache.get(tuple(key))
    except TypeError:  # an argument that cannot be a key
        with DisableTorchFunctionSubclass(), unrecorded():
            return _resolved(func, rule, args, kwargs)
    if found is None:
        with DisableTorchFunctionSubclass(), unrecorded():  # asking a DTensor for its dtype is not an op
            found = _resolved(func, rule, args, kwargs)
        if len(_cache) >= CACHE_LIMIT:
            _cache.clear()
        _cache[tuple(key)] = found
    return found


class _LaidOut(Looks):
    """An op some of whose operands are moved first, or whose result is measured."""

    __slots__ = ("found", "func")

    def __init__(self, func: Any, found: Found) -> None:
        self.func = func
        self.found = found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recipe, ctx, locals_, named = _laid_out(self.func, self.found, args, kwargs)
        out = ctx.op(*locals_, **named) if recipe.local_impl is None else recipe.local_impl(ctx, *locals_, **named)
        if recipe.copied:
            out = copied(out, first(args, kwargs))
        if recipe.rows:
            return labelled(out, measured(recipe, ctx, out))
        return args[0] if recipe.output is None else labelled(out, recipe.output)


def _laid_out(
    func: Any, found: Found, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[resolve.Recipe, RankContext, list[Any], dict[str, Any]]:
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


def _resolved(func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    operands: list[resolve.Operand] = []

    def slot(x: Any) -> Any:
        if type(x) is DTensor:
            operands.append(resolve.Operand(x._layout, x.dtype))
            return resolve.Slot(len(operands) - 1)
        return type(x)(slot(y) for y in x) if isinstance(x, list | tuple) and type(x) is not torch.Size else x

    slotted = tuple(slot(a) for a in args)
    named = {k: slot(a) for k, a in kwargs.items()}
    op = NATIVE.get(func, func)

    name = name_of(func)
    if getattr(func, "__module__", "") == F.__name__ and _asks_in_place(func, args, kwargs):
        rule = _in_place_rule(func, name)
    chosen = _chosen(func, name, rule, operands, slotted, named)

    def shape() -> Shapes:
        if rule.shape is None:
            return resolve.meta_shape(func, slotted, named, operands)
        metas = [Meta(o.layout.shape, o.dtype, REPLICATE) for o in operands]
        filled = [resolve.with_metas(a, metas) for a in slotted]
        return rule.shape(*filled, **{k: resolve.with_metas(v, metas) for k, v in named.items()})

    recipe = resolve.recipe(name, rule, [o.layout for o in operands], chosen, shape)
    return recipe, op, recipe.local_impl is not None or bool(recipe.rows) or _runs_python(func, op)


def _runs_python(func: Any, op: Any) -> bool:
    """Whether Python code would see a DTensor, forward or backward, and take its global shape for the local one."""
    if isinstance(op, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return not str(op).startswith("aten.")
    return isinstance(op, FunctionType) and func not in NATIVE


def _chosen(
    func: Any,
    name: str,
    rule: OpRule,
    operands: list[resolve.Operand],
    slotted: tuple[Any, ...],
    named: dict[str, Any],
) -> tuple[Row, ...]:
    """Rows for these operands; one choice serves all sizes where the rule asks for none."""
    if not rule.shape_independent:
        return resolve.choose(name, rule, operands, slotted, named)
    kinds = tuple((o.layout.kind, o.dtype, tuple([n == 1 for n in o.layout.shape])) for o in operands)
    key = (func, kinds, *(_key_part(a) for a in slotted), *((k, _key_part(a)) for k, a in named.items()))
    chosen = _choices.get(key)
    if chosen is None:
        chosen = resolve.choose(name, rule, operands, slotted, named)
        if len(_choices) >= CACHE_LIMIT:
            _choices.clear()
        _choices[key] = chosen
    return chosen


def _asks_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(arguments(func, args, kwargs).get("inplace"))


def _in_place_rule(func: Any, name: str) -> OpRule:
    rule = RULES.get(getattr(Tensor, f"{name}_", None))
    if rule is None or func not in NATIVE:
        raise resolve.NoRowError(f"{name}(inplace=True) has no rule of its own")
    return rule


def _key_part(a: Any) -> Any:
    """What a choice may depend on: numbers of a kind are alike, lists are compared by content."""
    if isinstance(a, float | bool):
        return (bool, a) if isinstance(a, bool) else float if a and a - a == 0 else a
    return tuple(map(_key_part, a)) if isinstance(a, list | tuple) else a


DTensor._enter = staticmethod(enter)
