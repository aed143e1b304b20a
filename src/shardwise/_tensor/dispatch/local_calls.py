"""What a recipe runs on the local tensors of its operands, and the layouts of its results."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks as saved_tensors_hooks

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Layout, Mesh, Shard, contiguous_strides, strides_in_order
from shardwise._redistribute.run_plan import redistribution
from shardwise._redistribute.transfers import Exchange
from shardwise._rules import OpRule
from shardwise._rules.local_context import specialization
from shardwise._rules.row import Args, Kwargs, LocalFunction
from shardwise._tensor.dispatch import align_shards
from shardwise._tensor.dispatch.local_context import RankContext
from shardwise._tensor.dispatch.resolve import Layouts, Output, Recipe
from shardwise._tensor.dispatch.view_copies import copies_of, is_copy, storage_of
from shardwise._tensor.dtensor import DTensor, _as_subclass, tag
from shardwise._trace.capture_hooks import tracing_paused
from shardwise._trace.comm_trace import Cause
from shardwise._trace.user_stack import call_site

PLAIN_VALUES = frozenset((int, float, bool, str, type(None)))
_warned: set[tuple[Mesh, int]] = set()  # axes along which a parameter is all-gathered
T = TypeVar("T")


def local_call(rule: OpRule, recipe: Recipe) -> Callable[..., Any]:
    """What this rank runs for calls of this recipe, but for the errors of other ranks (`consistent_errors`).

    It is called with the DTensor arguments under `DisableTorchFunctionSubclass`, so C++ works on each DTensor's own
    storage, which is the local shard. Calls that need plain local tensors convert them.
    """
    if recipe.itself:
        return _first_argument
    moved = bool(recipe.redistributed)
    plain_only = recipe.needs_plain and (moved or not rule.takes_dtensors or recipe.local_impl is not None)
    if not (plain_only or moved):
        return _CopyCall(recipe.op) if recipe.copied else recipe.op
    makes_views = recipe.view or rule.in_place or recipe.local_impl in (None, rule.empty_shards_impl)
    call = LocalCall(recipe, plain_only, makes_views)
    call.specialize()
    return _CopyCall(call) if recipe.copied else call


def _first_argument(x: T, *args: object, **kwargs: object) -> T:
    return x


def no_views(out: object, args: Args, layouts: Layouts | None) -> object:
    """The results of a local implementation of an op that returns new tensors: they share memory with nothing.

    A change of a view in place would change an operand, or what was saved for backward, on this rank. Their dims are in
    the order of the layouts in memory, by which later ops decide between views and copies.
    """
    if isinstance(out, tuple | list):
        of_results = layouts if isinstance(layouts, tuple) else (None,) * len(out)
        return type(out)([no_views(x, args, layout) for x, layout in zip(out, of_results, strict=True)])
    if not isinstance(out, Tensor) or out.is_sparse:
        return out
    order = layouts.dim_order if isinstance(layouts, Layout) else None
    if order is not None and len(order) == out.ndim:
        if not out.permute(order).is_contiguous():
            back = sorted(range(out.ndim), key=order.__getitem__)
            return out.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    elif not (out.is_contiguous() and (not out.numel() or out.stride() == contiguous_strides(out.shape))):
        return out.clone(memory_format=torch.contiguous_format)
    if not out._is_view():
        return out
    storage = storage_of(out)
    if out.requires_grad or any(isinstance(a, Tensor) and not a.is_sparse and storage_of(a) is storage for a in args):
        return out.clone()
    return torch.ops.aten._unsafe_view(out, out.size())


class ReadsLayouts:
    """A call that reads the layouts of its operands, so it must get them as DTensors."""

    __slots__ = ()


class LocalCall(ReadsLayouts):
    """A call that redistributes operands, or runs Python code or a local implementation, on local tensors.

    Args:
        plain_only: all operands are needed as plain tensors, not only those that are redistributed.
        makes_views: torch may return an operand or a view of one, or nothing here does otherwise.
    """

    __slots__ = (
        "_causes",
        "_makes_views",
        "_outputs",
        "_plain_only",
        "_python",
        "_redistributions",
        "_specialized",
        "_targets",
        "recipe",
    )

    def __init__(self, recipe: Recipe, plain_only: bool, makes_views: bool) -> None:
        self.recipe, self._plain_only, self._makes_views = recipe, plain_only, makes_views
        self._targets = dict(recipe.redistributed)
        self._causes: dict[tuple[int, str], Cause] = {}  # by index and name of an operand that is redistributed
        outputs = recipe.output if isinstance(recipe.output, tuple) else (recipe.output,)
        self._outputs = tuple([x for x in outputs if isinstance(x, Layout)]) or recipe.layouts[:1]
        self._redistributions = collectives.owner().redistributions
        self._specialized: LocalFunction | None = None
        self._python = False

    def specialize(self) -> None:
        """Compute what the local implementation can compute once for this rank."""
        if not self._targets:
            with tracing_paused():
                self._specialized, self._python = specialization(self.recipe.local_impl, self._context([]))

    def __call__(self, *args: object, **kwargs: object) -> Any:
        specialized = self._specialized
        if specialized is not None and not self._python:
            out = specialized(*args, **kwargs)
            if out is not NotImplemented:
                return out
        operands, locals_, named = self._on_locals(args, kwargs)
        if specialized is not None and self._python:
            out = specialized(*locals_, **named)
            if out is not NotImplemented:
                return out
        recipe = self.recipe
        if recipe.local_impl is None and not recipe.rows:
            out, layouts = recipe.op(*locals_, **named), recipe.output
        else:
            ctx = self._context(operands)
            local = recipe.op if recipe.local_impl is None else partial(recipe.local_impl, ctx)
            out = local(*locals_, **named)
            layouts = layouts_of_results(recipe, ctx, out) if recipe.rows else recipe.output
        if not self._makes_views:
            out = no_views(out, args, layouts)
        return as_dtensors(out, layouts) if recipe.rows else out

    def prepare(self, args: Args, kwargs: Kwargs) -> tuple[RankContext, list[Any], Kwargs]:
        """The context of the local function, and its arguments: local tensors in the layouts that the recipe wants."""
        operands, locals_, named = self._on_locals(args, kwargs)
        return self._context(operands), locals_, named

    def _on_locals(self, args: Args, kwargs: Kwargs) -> tuple[list[DTensor], list[Any], Kwargs]:
        """The operands, and the arguments with local tensors in their place."""
        operands: list[DTensor] = []
        locals_ = self._locals(args, operands)
        named = dict(zip(kwargs, self._locals(kwargs.values(), operands), strict=True)) if kwargs else {}
        for index in self._targets:
            if getattr(operands[index], "_is_param", False):  # as in the check of `isinstance(x, nn.Parameter)`
                _warn_of_gathered(self.recipe, operands)
        return operands, locals_, named

    def _locals(self, values: Iterable[Any], operands: list[DTensor]) -> list[Any]:
        """Values with local tensors in place of DTensors, which are appended to `operands`."""
        found = []
        for x in values:
            kind = type(x)
            if kind is DTensor:
                index = len(operands)
                operands.append(x)
                if index in self._targets:
                    x = self._moved(x, index)
                # Saved-tensor hooks may get an operand: see `call_under_hooks`.
                elif self._plain_only or (saved_tensors_hooks(True) is not None and self._may_be_saved(x, index)):
                    x = x.detach() if x.is_sparse else _as_subclass(x, Tensor)
            elif kind is list or kind is tuple:
                x = self._locals(x, operands)
            found.append(x)
        return found

    def _may_be_saved(self, x: DTensor, index: int) -> bool:
        return not x.requires_grad and (index > 0 or self.recipe.output is not Output.IN_PLACE)

    def _moved(self, x: DTensor, index: int) -> Tensor:
        """The local tensor of operand `index` in the layout that the recipe wants."""
        name = x._name or f"operand {index}"
        cause = self._causes.get((index, name))
        if cause is None:
            cause = self._causes[index, name] = self.recipe.cause._replace(kind="operand", operand=name)
        local = x.detach() if x.is_sparse else _as_subclass(x, Tensor)
        src, dst = x._layout, self._targets[index]
        found = self._redistributions.get((src.key, dst.key)) or redistribution(src, dst)
        return found.run(local, cause)

    def _context(self, operands: list[DTensor]) -> RankContext:
        recipe = self.recipe
        return RankContext(recipe.op, recipe.layouts, self._outputs, recipe.local_axes, operands, recipe.cause)


@dataclass(slots=True, eq=False)
class _CopyCall(ReadsLayouts):
    """An op that returns copies where torch returns views."""

    call: Callable[..., Any]

    def __call__(self, *args: object, **kwargs: object) -> Any:
        first = next(a for a in (*args, *kwargs.values()) if type(a) is DTensor)
        return copies_of(first, self.call(*args, **kwargs))


def _warn_of_gathered(recipe: Recipe, operands: Sequence[DTensor]) -> None:
    """Warn, once for each mesh axis, if a call all-gathers a parameter along an axis on which its batch is sharded.

    Parameters of one dim, such as those of norms, are too small to matter: the next one is named.

    Args:
        operands: before they are redistributed.
    """
    for index, target in recipe.redistributed:
        x = operands[index]
        if not isinstance(x, nn.Parameter) or len(target.shape) == 1:
            continue
        mesh = target.mesh
        for axis, (have, wanted) in enumerate(zip(x._layout.placements, target.placements, strict=True)):
            gathered = isinstance(have, Shard) and wanted == REPLICATE and mesh.shape[axis] > 1
            if not gathered or (mesh, axis) in _warned or not _is_batch_sharded(operands, axis):
                continue
            _warned.add((mesh, axis))
            label, site = repr(mesh.names[axis]) if mesh.names else str(axis), call_site()
            text = (
                f"{recipe.cause.op}: {x._name or 'a parameter'} is sharded on mesh axis {label}, as is its input, so "
                f"each call all-gathers it, keeps it until backward, and reduces its gradient alone; so with all "
                f"parameters like it. Fix: fully_shard(module), which frees them in between; or Replicate() on {label} "
                f"(data parallelism); or ColwiseParallel and RowwiseParallel on a second mesh axis (tensor "
                f"parallelism). explain() lists all that a step sends."
            )
            warnings.warn_explicit(text, UserWarning, *((site.file, site.line) if site else (__file__, 1)))


def _is_batch_sharded(operands: Sequence[DTensor], axis: int) -> bool:
    """Whether an operand that is no parameter is sharded on the axis."""
    return any(isinstance(x._layout.placements[axis], Shard) and not isinstance(x, nn.Parameter) for x in operands)


def call_under_hooks(call: Callable[..., Any], args: Args, kwargs: Kwargs, in_place: bool) -> Any:
    """Run an op so that saved-tensor hooks get local tensors that stay local tensors, if there are such hooks.

    Torch passes to a hook the Python object that an op saves. An operand that does not require grad is therefore passed
    to the op as a plain tensor. A result that does not, such as the indices of `topk`, is returned as another object
    than the saved one, because the caller makes it a DTensor. Checkpointing compares the shapes of saved tensors.
    """
    if saved_tensors_hooks(True) is None:
        return call(*args, **kwargs)
    if isinstance(call, ReadsLayouts):
        return _not_saved(call(*args, **kwargs))
    written = args[0] if in_place else None
    hidden: list[tuple[Tensor, DTensor]] = []
    shown = [_shown(a, written, hidden) for a in args]
    out = call(*shown, **{k: _shown(a, written, hidden) for k, a in kwargs.items()})
    same = next((x for plain_x, x in hidden if plain_x is out), None)  # such as what `contiguous` returns
    return _not_saved(out) if same is None else same


def _shown(a: object, written: object, hidden: list[tuple[Tensor, DTensor]]) -> Any:
    """An argument with local tensors in place of DTensors that an op may save; both are appended to `hidden`."""
    if type(a) is list or type(a) is tuple:
        return type(a)(_shown(x, written, hidden) for x in a)
    if type(a) is not DTensor or a is written or a.requires_grad or a.is_sparse:
        return a
    hidden.append((_as_subclass(a, Tensor), a))
    return hidden[-1][0]


def _not_saved(out: object) -> object:
    """Results of which those that do not require grad are other objects than an op may have saved."""
    if isinstance(out, tuple | list):
        return type(out)([_not_saved(x) for x in out])
    if type(out) is not Tensor or out.requires_grad or is_copy(out):  # a copy of a view is known by its object
        return out
    return _as_subclass(out, Tensor) if out._is_view() else out.detach()  # not a view of what no one holds


# ---- results ----------------------------------------------------------------------------------------------------


def as_dtensors(out: Any, layouts: Layouts) -> Any:
    """The result, or each tensor of a tuple or list of results, as a DTensor."""
    if isinstance(layouts, Layout):
        return out if type(out) is DTensor else tag(out, layouts)
    assert isinstance(layouts, tuple)
    for x, layout in zip(out, layouts, strict=True):
        if layout is not None and isinstance(x, Tensor) and type(x) is not DTensor:
            tag(x, layout)
    return out


def layouts_of_results(recipe: Recipe, ctx: RankContext, out: Any) -> Any:
    """The layouts of results with data-dependent shapes: the ranks exchange the sizes of their local tensors."""
    if isinstance(out, Tensor):
        return _layout_of_result(recipe, ctx, out, None)
    return tuple(_layout_of_result(recipe, ctx, x, i) if isinstance(x, Tensor) else None for i, x in enumerate(out))


def _layout_of_result(recipe: Recipe, ctx: RankContext, x: Tensor, index: int | None) -> Layout:
    mesh = recipe.layouts[0].mesh
    placements, shape = [align_shards.output_at(row, index) for row in recipe.rows], tuple(x.shape)
    order = align_shards.leader(recipe.layouts).shard_order
    found = list(placements)
    for dim in sorted({p.dim for p in placements if isinstance(p, Shard)}):
        axes = tuple(axis for axis, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim)
        ranks = ctx.ranks(axes)
        ones = [1] * len(ranks)
        sent = torch.tensor([x.shape[dim]] * len(ranks), device=collectives.message_device(ranks))
        sizes = Exchange(ranks, ctx.cause).start(sent, ones, ones)().tolist()
        shape = (*shape[:dim], sum(sizes), *shape[dim + 1 :])
        of_axes = align_shards.sizes_by_axis(mesh, axes, order, dict(zip(ranks, sizes, strict=True)))
        for axis, axis_sizes in of_axes.items():
            found[axis] = Shard(dim, axis_sizes)
    layout = Layout(mesh, found, shape, order)
    return layout.with_strides(strides_in_order(shape, recipe.order)) if recipe.order and not index else layout
