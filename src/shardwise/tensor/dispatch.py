"""Door 1: functions that have a rule run on the locals at once.

The answer to "how does this op run on these layouts" is kept under the layouts and the other arguments, so a
warm op costs a dictionary look-up, the op itself, and giving the result its layout.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import collectives
from shardwise.errors import RuleError
from shardwise.layout import Layout
from shardwise.mesh import Mesh
from shardwise.meter import Cause
from shardwise.movement import move
from shardwise.placement import REPLICATE, Shard
from shardwise.rules import RULES, Meta, OpRule, Row
from shardwise.rules.row import Shapes
from shardwise.tensor import cuts, gradients, lists, resolve
from shardwise.tensor.conversion import wrap
from shardwise.tensor.dtensor import DTensor, moved, passing, plain, tag
from shardwise.tensor.site import LocalSite
from shardwise.tensor.wrapper import refuse_view_of_copy, run_on_whole, through_the_dispatcher

CACHE_LIMIT = 1 << 16
Found = tuple[resolve.Recipe, Callable[..., Any], bool]  # recipe, what computes, whether it needs plain tensors
_cache: dict[Any, Found] = {}
_choices: dict[Any, tuple[Row, ...]] = {}
_at_once: dict[Any, tuple[Callable[..., Any], Layout]] = {}  # what ran on the locals as they were, and its layout
PLAIN_VALUES = frozenset((int, float, bool, str, type(None)))
_strict: ContextVar[bool] = ContextVar("shardwise_strict", default=False)

# C functions that stand in for Python ones, which would look at shapes on their way.
NATIVE: dict[Any, Callable[..., Any]] = {
    F.relu: lambda input, inplace=False: torch.relu_(input) if inplace else torch.relu(input),
    F.sigmoid: torch.sigmoid,
    F.tanh: torch.tanh,
    Tensor.__rpow__: lambda x, other: torch.pow(other, x),
    Tensor.__rsub__: torch.rsub,
    Tensor.__rdiv__: lambda x, other: torch.reciprocal(x) * other,
}

# What is the same for the local tensor and the whole one.
SAME = frozenset(
    """
    requires_grad requires_grad_ is_floating_point is_complex is_signed element_size retain_grad retains_grad
    device dtype is_leaf grad_fn layout is_sparse is_sparse_csr is_quantized is_mkldnn is_meta is_cpu is_cuda
    is_nested is_inference is_conj is_neg get_device output_nr _version itemsize names _is_view is_shared
    is_pinned is_coalesced sparse_dim dense_dim register_hook register_post_accumulate_grad_hook _backward_hooks
    _post_accumulate_grad_hooks __hash__ is_contiguous type _is_zerotensor
    """.split()
)


def forget() -> None:
    """Drop what was worked out so far; needed after a rule in `RULES` was replaced."""
    for known in (_cache, _choices, _at_once):
        known.clear()


@contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Inside, a plain tensor mixed into an op with DTensors is an error, not a replicated operand.

    `strict(False)` allows a part of a strict program what is allowed without it.
    """
    token = _strict.set(enabled)
    try:
        yield
    finally:
        _strict.reset(token)


def enter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where every torch function called with a DTensor arrives."""
    rule = RULES.get(func)
    if rule is not None:
        return run(func, rule, args, kwargs)
    special = DTensor._specials.get(func)
    if special is not None:
        return special(func, args, kwargs)
    name = getattr(func, "__name__", "")
    attribute = func.__self__.__name__ if name in ("__get__", "__set__") else name
    if attribute in SAME:
        return _same(func, attribute, args, kwargs)
    if name in ("__get__", "__set__"):
        return _attribute(func, name, attribute, args)
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return lists.run(func, name, args, kwargs)
    return through_the_dispatcher(func, args, kwargs, promoted)


def run(func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` by its rule: at once where these very arguments ran before and nothing had to be done to them."""
    if kwargs:
        return _run(func, rule, args, kwargs)
    key = [func]
    for a in args:
        kind = type(a)
        if kind is DTensor:
            key.append(a._layout)
        elif kind in PLAIN_VALUES:
            key.append(float if kind is float and rule.sizeless else a)
        else:
            return _run(func, rule, args, kwargs)
    at_once = _at_once.get(tuple(key))
    if at_once is None:
        return _run(func, rule, args, kwargs)
    op, layout = at_once
    with DisableTorchFunctionSubclass():
        out = op(*args)
        if type(out) is not DTensor:
            out.__class__ = DTensor
            out._layout = layout
        return out


def _run(func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs and kwargs.get("out") is not None:
        return _into_out(func, args, kwargs)
    key, mixed = _key(func, rule, args, kwargs)
    if mixed:
        if rule.in_place and type(args[0]) is not DTensor:
            return _into_plain(func, args, kwargs)
        return run(func, rule, *_promoted(func, args, kwargs))
    try:
        found = _found(key, func, rule, args, kwargs)
    except resolve.NoRowError as error:
        return _without_row(func, args, kwargs, error)
    recipe, op, unwrap = found
    if rule.in_place:
        refuse_view_of_copy(_name(func), args[0])
    with DisableTorchFunctionSubclass():
        if recipe.moves or unwrap:
            return _run_laid_out(func, found, args, kwargs)
        out = op(*args, **kwargs)
        if recipe.output is None or type(out) is DTensor:
            return out
        if type(recipe.output) is not Layout:
            return labelled(out, recipe.output)
        if not kwargs and all(type(a) is DTensor or type(a) in PLAIN_VALUES for a in args):
            if len(_at_once) >= CACHE_LIMIT:
                _at_once.clear()
            _at_once[tuple(key)] = op, recipe.output
        return tag(out, recipe.output)


def _without_row(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: RuleError) -> Any:
    """Taken apart into aten ops; an aten op that has no row either runs on whole copies."""
    if isinstance(func, torch._ops.OpOverload):
        return run_on_whole(func, args, kwargs, str(error))
    return through_the_dispatcher(func, args, kwargs, promoted)


def _into_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`out=` keeps its layout: the result is moved there."""
    out = kwargs["out"]
    result = func(*args, **{k: v for k, v in kwargs.items() if k != "out"})
    fits = isinstance(out, Tensor) and isinstance(result, Tensor) and out.shape == result.shape
    if not fits or not torch.can_cast(result.dtype, out.dtype):
        raise RuleError(f"{_name(func)}: out= must be a tensor of the shape and dtype of the result.")
    return out.copy_(result)


def prepared(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[resolve.Recipe, LocalSite, list[Any], dict[str, Any]]:
    """The first half of running an op that has a local function: the recipe, the site, and local arguments."""
    rule = RULES[func]
    key, mixed = _key(func, rule, args, kwargs)
    if mixed:
        args, kwargs = _promoted(func, args, kwargs)
        key, _ = _key(func, rule, args, kwargs)
    return _laid_out(func, _found(key, func, rule, args, kwargs), args, kwargs)


def _key(func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], bool]:
    """What the recipe may depend on, and whether plain tensors are mixed in."""
    key: list[Any] = [func]
    mixed = False
    for a in args:
        kind = type(a)
        if kind is DTensor:
            key.append(a._layout)
        elif kind is float and rule.sizeless:
            key.append(float)
        elif isinstance(a, list):
            key.append(tuple(x._layout if type(x) is DTensor else x for x in a))
            mixed = mixed or any(isinstance(x, Tensor) and type(x) is not DTensor for x in a)
        else:
            mixed = mixed or isinstance(a, Tensor)
            key.append(a)
    for k, a in kwargs.items():
        key.append(k)
        kind = type(a)
        key.append(a._layout if kind is DTensor else float if kind is float and rule.sizeless else a)
        mixed = mixed or (kind is not DTensor and isinstance(a, Tensor))
    return key, mixed


def _found(key: list[Any], func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """The recipe, from the cache or worked out now."""
    try:
        found = _cache.get(tuple(key))
    except TypeError:  # an argument that cannot be a key
        with DisableTorchFunctionSubclass():
            return _resolved(func, rule, args, kwargs)
    if found is None:
        with DisableTorchFunctionSubclass():  # asking a DTensor for its dtype is not an op
            found = _resolved(func, rule, args, kwargs)
        if len(_cache) >= CACHE_LIMIT:
            _cache.clear()
        _cache[tuple(key)] = found
    return found


def _run_laid_out(func: Any, found: Found, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    recipe, site, locals_, named = _laid_out(func, found, args, kwargs)
    out = site.op(*locals_, **named) if recipe.local is None else recipe.local(site, *locals_, **named)
    if recipe.rows:
        return labelled(out, _measured(recipe, site, out))
    return args[0] if recipe.output is None else labelled(out, recipe.output)


def labelled(out: Any, layouts: Layout | tuple[Layout | None, ...]) -> Any:
    """The result, or the results in what they came in, as DTensors."""
    if isinstance(layouts, Layout):
        return out if type(out) is DTensor else tag(out, layouts)
    for x, layout in zip(out, layouts, strict=True):
        if layout is not None and isinstance(x, Tensor) and type(x) is not DTensor:
            tag(x, layout)
    return out


def _measured(recipe: resolve.Recipe, site: LocalSite, out: Any) -> Any:
    """Layouts of results whose pieces are as long as they came out: the ranks tell each other."""
    if isinstance(out, Tensor):
        return _measured_layout(recipe, site, out, None)
    return tuple(_measured_layout(recipe, site, x, i) if isinstance(x, Tensor) else None for i, x in enumerate(out))


def _measured_layout(recipe: resolve.Recipe, site: LocalSite, x: Tensor, index: int | None) -> Layout:
    mesh = recipe.layouts[0].mesh
    outputs = [cuts.output_at(row, index) for row in recipe.rows]
    dims = {p.dim for p in outputs if isinstance(p, Shard)}
    if not dims:
        return Layout(mesh, outputs, x.shape)
    assert len(dims) == 1, "a ragged result is cut along one dim"
    (dim,) = dims
    own = torch.tensor([x.shape[dim]])
    axes = tuple(axis for axis, p in enumerate(outputs) if isinstance(p, Shard))
    ranks = site.ranks(axes)
    ones = [1] * len(ranks)
    lengths = collectives.all_to_all(own.repeat(len(ranks)), ones, ones, ranks).tolist()
    order = cuts.leader(recipe.layouts, recipe.rows).shard_order
    return cuts.ragged_layout(mesh, outputs, order, dim, dict(zip(ranks, lengths, strict=True)), tuple(x.shape))


def _laid_out(
    func: Any, found: Found, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[resolve.Recipe, LocalSite, list[Any], dict[str, Any]]:
    """The operands as the recipe wants them, as local tensors."""
    recipe, op, unwrap = found
    moves = dict(recipe.moves)
    operands: list[DTensor] = []

    def operand(x: Any) -> Any:
        if type(x) is not DTensor:
            return [operand(y) for y in x] if isinstance(x, list | tuple) else x
        index = len(operands)
        operands.append(x)
        if index in moves:
            name = x._name or f"operand {index}"
            cause = recipe.cause._replace(kind="operand", operand=name, wanted=moves[index])
            return passing(move(plain(x), x._layout, moves[index], cause))
        return plain(x) if unwrap else x  # Python code would see the global shape of a DTensor

    locals_ = [operand(a) for a in args]
    named = {k: operand(a) for k, a in kwargs.items()}
    outputs = recipe.output if isinstance(recipe.output, tuple) else (recipe.output or recipe.layouts[0],)
    known = tuple(layout for layout in outputs if layout is not None)
    return recipe, LocalSite(op, recipe.layouts, known, recipe.local_axes, operands, recipe.cause), locals_, named


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

    name = _name(func)
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
    return (
        recipe,
        op,
        recipe.local is not None or bool(recipe.rows) or (isinstance(op, FunctionType) and func not in NATIVE),
    )


def _chosen(
    func: Any,
    name: str,
    rule: OpRule,
    operands: list[resolve.Operand],
    slotted: tuple[Any, ...],
    named: dict[str, Any],
) -> tuple[Row, ...]:
    """Rows for these operands; one choice serves all sizes where the rule asks for none."""
    if not rule.sizeless:
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
    return bool(signature(func).bind(*args, **kwargs).arguments.get("inplace"))


def _in_place_rule(func: Any, name: str) -> OpRule:
    rule = RULES.get(getattr(Tensor, f"{name}_", None))
    if rule is None or func not in NATIVE:
        raise RuleError(f"{name}(inplace=True) is not supported on DTensors. Fix: leave inplace off.")
    return rule


def _key_part(a: Any) -> Any:
    """What a choice may depend on: numbers of a kind are alike, lists are compared by content."""
    if isinstance(a, float):
        return float
    return tuple(map(_key_part, a)) if isinstance(a, list | tuple) else a


def _promoted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Plain tensors beside DTensors count as replicated; the whole gradient flows back to them."""
    everything = [*args, *kwargs.values()]
    first = next(x for a in everything for x in (a if isinstance(a, list | tuple) else (a,)) if type(x) is DTensor)
    mesh = first._layout.mesh

    def promote(x: Any) -> Any:
        if isinstance(x, list | tuple) and type(x) is not torch.Size:
            return type(x)(promote(y) for y in x)
        if not isinstance(x, Tensor) or type(x) is DTensor:
            return x
        if x.is_sparse and tuple(x.shape) == first._layout.local_shape(collectives.rank()):
            return tag(x.detach(), first._layout)  # built by an optimiser from this rank's rows
        return promoted(x, mesh, _name(func))

    return tuple(promote(a) for a in args), {k: promote(a) for k, a in kwargs.items()}


def _into_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain tensor changes in place, on every rank alike, by whole copies of the DTensor operands."""

    def whole(x: Any) -> Any:
        if type(x) is not DTensor:
            return x
        target = x._layout.replicated()
        why = "a plain tensor changes in place by whole copies of the operands"
        return moved(x, target, Cause("operand", _name(func), x._name or "the operand", why, target)).to_local()

    return func(*(whole(a) for a in args), **{k: whole(a) for k, a in kwargs.items()})


def promoted(x: Tensor, mesh: Mesh, name: str) -> DTensor:
    """A plain tensor as a replicated DTensor."""
    if _strict.get() and x.ndim:
        raise RuleError(
            f"{name}: a plain tensor of shape {tuple(x.shape)} beside DTensors is refused in strict mode. "
            f"Fix: DTensor.from_local(x, mesh, [Replicate()]) if every rank has the same, or the placements it has."
        )
    return wrap(x, Layout(mesh, [REPLICATE] * mesh.ndim, x.shape))


def _same(func: Any, attribute: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if attribute == "register_hook":
        return _register_hook(x, *args[1:], **kwargs)
    if attribute == "register_post_accumulate_grad_hook":
        args = (x, _as_user_code(*args[1:], **kwargs))
        kwargs = {}
    with DisableTorchFunctionSubclass():
        out = func(*args, **kwargs)
    turned_on = attribute == "requires_grad_" or (attribute == "requires_grad" and len(args) > 1)
    if turned_on and type(x) is DTensor:
        gradients.watch(x)
    return out


def _as_user_code(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The engine may run where DTensors count as their local parts; in a hook they are what users know."""

    def run_hook(*args: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return hook(*args)

    return run_hook


def _register_hook(x: DTensor, hook: Callable[[Any], Any]) -> Any:
    """The hook sees the gradient as a DTensor, and may return another one of any placements."""
    layout = x._layout

    def on_local(grad: Tensor) -> Tensor | None:
        returned = _as_user_code(hook)(
            tag(grad.detach() if not torch.is_grad_enabled() else grad.view_as(grad), layout.dual())
        )
        if returned is None:
            return None
        if type(returned) is DTensor:
            return gradients.as_cotangent(plain(returned), returned._layout, layout)
        return gradients.as_cotangent(returned, layout.replicated(), layout)

    with DisableTorchFunctionSubclass():
        return x.register_hook(on_local)  # type: ignore[no-untyped-call]


def _attribute(func: Any, kind: str, attribute: str, args: tuple[Any, ...]) -> Any:
    x = args[0]
    if attribute == "data":
        with DisableTorchFunctionSubclass():
            if kind == "__get__":
                return tag(func(*args), x._layout)
            value = args[1]
            if type(value) is not DTensor or value._layout != x._layout:
                raise RuleError(f"Setting .data needs a DTensor laid out as {x._layout}. Fix: redistribute it first.")
            return func(*args)
    if attribute in ("real", "imag", "H", "mH", "_base", "_grad"):
        raise RuleError(f"DTensor has no .{attribute} yet. Fix: use to_local() or full_tensor().")
    raise RuleError(
        f"DTensor does not answer for .{attribute}: it might show the local shard for the whole. "
        f"Fix: ask to_local() or full_tensor()."
    )


def _name(func: Any) -> str:
    if getattr(func, "__name__", "") == "__get__":
        return f".{func.__self__.__name__}"
    return str(getattr(func, "__name__", func))


def _extreme(of_all: Any) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """torch.max and torch.min are three ops in one: of all elements, along a dim, of two tensors."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1 and not kwargs:
            return run(of_all, RULES[of_all], args, kwargs)
        return through_the_dispatcher(func, args, kwargs, promoted)

    return handler


_largest, _smallest = _extreme(torch.ops.aten.max.default), _extreme(torch.ops.aten.min.default)
DTensor._specials |= {torch.max: _largest, Tensor.max: _largest, torch.min: _smallest, Tensor.min: _smallest}


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise RuleError(
        f"{_name(func)}() would reach this rank's part of a DTensor as if it were the whole. "
        f"Fix: call it on to_local() or full_tensor()."
    )


DTensor._specials |= dict.fromkeys(
    (Tensor.share_memory_, Tensor.storage, Tensor.untyped_storage, Tensor.resize_, Tensor.resize_as_), _refuse
)
DTensor._enter = staticmethod(enter)
