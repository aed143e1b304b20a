"""The local calls of a recipe, and the layouts of its results."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks as saved_tensors_hooks

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Layout, Mesh, Owner, Shard, contiguous_strides, strides_in_order
from shardwise._layout.dim_shards import sizes_by_axis
from shardwise._redistribute.run_plan import redistribution
from shardwise._rules import OpRule
from shardwise._rules.local_context import LocalContext, has_specialized_version, specialization
from shardwise._rules.row import Args, Kwargs, LocalFunction, Op
from shardwise._tensor.dispatch import align_shards
from shardwise._tensor.dispatch.consistent_errors import (
    Version,
    check_versions,
    raise_if_others_do,
    saved_by,
    versions_of,
)
from shardwise._tensor.dispatch.outside_mesh import run_outside
from shardwise._tensor.dispatch.resolve import Layouts, Output, Recipe, has_empty_shards
from shardwise._tensor.dispatch.view_copies import copies_of, is_copy, mark_copy, storage_of
from shardwise._tensor.dispatch.without_memory import Autocast
from shardwise._tensor.dtensor import DTensor, _as_subclass, dtensors_in, tag
from shardwise._trace.capture_hooks import tracing_paused
from shardwise._trace.comm_trace import Cause
from shardwise._trace.user_stack import call_site
from shardwise.errors import RuleError

_warned: set[tuple[Mesh, int]] = set()  # axes along which a parameter is all-gathered


def local_call(rule: OpRule, func: Op, recipe: Recipe, owner: Owner) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The local call of rank `owner` for a recipe: torch's op itself or a `LocalCall`; and the one under hooks.

    It gets the DTensor arguments under `DisableTorchFunctionSubclass`, so C++ works on each DTensor's storage, which is
    the local shard.
    """
    call = LocalCall(rule, func, recipe, owner)
    if call.is_op and not (call.is_outside or recipe.copied or call.watches_versions or call.checks_values):
        return recipe.op, call
    call.specialize()
    return call, call


def no_views(out: object, args: Args, layouts: Layouts | None) -> object:
    """The results of a local implementation of an op that returns new tensors: they share memory with nothing.

    An in-place change of a view would change an operand, or a tensor saved for backward, on this rank. Their dims have
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


class LocalCall:
    """A call that is more than torch's op on the storage of the DTensors.

    It redistributes operands, runs the op, Python code or a local implementation on local tensors, and raises the
    errors that only other ranks would raise (`consistent_errors.py`).

    Saved-tensor hooks get local tensors that stay local. Torch passes to a hook the Python object that an op saves. So
    an operand that does not require grad is passed to the op as a plain tensor. A result that does not, such as the
    indices of `topk`, is returned as another object than the saved one, because the caller makes it a DTensor.
    Checkpointing compares the shapes of saved tensors.

    Attributes:
        is_outside: this rank is outside the mesh, and runs nothing.
        is_op: it runs torch's op on the DTensors as they are.
        watches_versions: this rank may save other tensors for backward than torch does.
        checks_values: a rank with an empty shard would not raise the errors of the others.
    """

    def __init__(self, rule: OpRule, func: Op, recipe: Recipe, owner: Owner) -> None:
        rank, local_impl, targets = owner.rank, recipe.local_impl, dict(recipe.redistributed)
        self.func, self.recipe, self._targets = func, recipe, targets
        self._causes: dict[tuple[int, str], Cause] = {}  # by index and name of an operand that is redistributed
        self._redistributions = owner.redistributions
        # Otherwise C++ works on the storage of the DTensors.
        self._plain_only = local_impl is not None or (
            (recipe.python or bool(recipe.rows)) and (bool(targets) or not rule.takes_dtensors)
        )
        self._makes_views = recipe.view or rule.in_place or local_impl in (None, rule.empty_shards_impl)
        self._in_place = recipe.output is Output.IN_PLACE
        outputs = recipe.output if isinstance(recipe.output, tuple) else (recipe.output,)
        self._outputs = tuple([x for x in outputs if isinstance(x, Layout)]) or recipe.layouts[:1]
        self._specialized: LocalFunction | None = None
        self._python = False
        self.is_op = not (self._plain_only or targets)
        mesh = recipe.layouts[0].mesh
        self.is_outside = not rule.random and mesh.size() < owner.world_size and mesh.coordinate(rank) is None

        self._index_form = rule.index_form
        self.checks_values = rule.index_form is not None or (rule.value_errors and has_empty_shards(recipe.layouts[0]))
        # If operands move, the indices that a rank holds may be some of them.
        self._checks_first = self.checks_values and (bool(targets) or not recipe.layouts[0].local_numel(rank))
        saves_others = local_impl is not None and not has_specialized_version(local_impl)
        self.watches_versions = not rule.view and (
            saves_others or bool(targets) or any(map(has_empty_shards, {*recipe.layouts}))
        )
        # If this rank runs the op itself on elements, it saves all but the operands that are redistributed.
        watches_all = self.watches_versions and (
            local_impl is not None or not all(layout.local_numel(rank) for layout in recipe.layouts)
        )
        self._watched = None if watches_all else frozenset(targets)

    def specialize(self) -> None:
        """Compute once for this rank what the local implementation can."""
        if not (self._targets or self.is_outside):
            with tracing_paused():
                self._specialized, self._python = specialization(self.recipe.local_impl, self._context([]))

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self.is_outside:
            return run_outside(self.func, self.recipe, args, kwargs)
        hooked, writes = saved_tensors_hooks(True) is not None, self._in_place or bool(self.recipe.written)
        saved: frozenset[int] = frozenset()
        versions: list[Version] = []
        if self.watches_versions and torch.is_grad_enabled():
            operands = dtensors_in((*args, *kwargs.values()))
            for x in operands:
                if x.requires_grad:
                    saved = self._saved(operands, args, kwargs)
                    versions = versions_of(saved, operands) if writes else []
                    break
        if self._checks_first:
            raise_if_others_do(self.func, self._index_form, args, kwargs)
        try:
            out = self._run(args, kwargs, hooked)
        except (IndexError, RuntimeError):
            if self.checks_values:
                raise_if_others_do(self.func, self._index_form, args, kwargs)
            raise
        if self.recipe.copied:
            out = copies_of(dtensors_in((*args, *kwargs.values()))[0], out)
        if hooked:  # torch checks no versions of what hooks keep
            return _not_saved(out)
        if saved:
            if not writes:  # it may change running statistics without torch's notice
                versions = versions_of(saved, operands)
            check_versions(self.func, args[0] if self._in_place else out, saved, versions)
        return out

    def _saved(self, operands: Sequence[DTensor], args: Args, kwargs: Kwargs) -> frozenset[int]:
        """The operands and results that torch saves and this rank may not save."""
        needs = tuple([x.requires_grad for x in operands])
        autocast = Autocast.of(self.recipe.layouts[0].mesh.device_type)
        found = self.recipe.saved.get((needs, autocast))
        if found is None:
            found = self.recipe.saved[needs, autocast] = saved_by(self.func, args, kwargs, autocast)
        return found if self._watched is None else found & self._watched

    def _run(self, args: Args, kwargs: Kwargs, hooked: bool) -> Any:
        recipe, specialized = self.recipe, self._specialized
        if self.is_op and not hooked:
            return recipe.op(*args, **kwargs)
        if specialized is not None and not self._python:
            out = specialized(*args, **kwargs)
            if out is not NotImplemented:
                return out
        operands: list[DTensor] = []
        locals_ = self._locals(args, operands, hooked)
        named = dict(zip(kwargs, self._locals(kwargs.values(), operands, hooked), strict=True)) if kwargs else {}
        if specialized is not None and self._python:
            out = specialized(*locals_, **named)
            if out is not NotImplemented:
                return out
        if recipe.local_impl is None and not recipe.rows:
            out, layouts = recipe.op(*locals_, **named), recipe.output
        else:
            ctx = self._context(operands)
            local = recipe.op if recipe.local_impl is None else partial(recipe.local_impl, ctx)
            out = local(*locals_, **named)
            layouts = layouts_of_results(recipe, ctx, out) if recipe.rows else recipe.output
        if self.is_op and locals_ and out is locals_[0]:  # such as what `contiguous` returns
            return args[0]
        if not self._makes_views:
            out = no_views(out, args, layouts)
        return as_dtensors(out, layouts) if recipe.rows else out

    def prepare(self, args: Args, kwargs: Kwargs) -> tuple[LocalContext, list[Any], Kwargs]:
        """The context of the local function, and its arguments: local tensors in the recipe's layouts."""
        operands: list[DTensor] = []
        locals_ = self._locals(args, operands, False)
        named = dict(zip(kwargs, self._locals(kwargs.values(), operands, False), strict=True))
        return self._context(operands), locals_, named

    def _locals(self, values: Iterable[Any], operands: list[DTensor], hooked: bool) -> list[Any]:
        """Values with local tensors for DTensors, which are appended to `operands`."""
        found = []
        for x in values:
            kind = type(x)
            if kind is DTensor:
                index, target = len(operands), self._targets.get(len(operands))
                operands.append(x)
                hidden = hooked and not x.requires_grad and (index > 0 or not self._in_place)
                if target is not None:
                    x = self._move(x, index)
                elif self._plain_only or hidden:
                    x = x.detach() if x.is_sparse else _as_subclass(x, Tensor)
            elif kind is list or kind is tuple:
                x = kind(self._locals(x, operands, hooked))
            found.append(x)
        return found

    def _move(self, x: DTensor, index: int) -> Tensor:
        """The local tensor of operand number `index`, in the recipe's layout."""
        src, target = x._layout, self._targets[index]
        name = x._name or (f"operand {index}" if self.recipe.written is None else "an operand")
        cause = self._causes.get((index, name))
        if cause is None:
            cause = self.recipe.cause._replace(operand=name)
            if self.recipe.written is None:
                cause = cause._replace(kind="operand")
            self._causes[index, name] = cause
        if x.is_sparse:
            raise RuleError("A sparse DTensor cannot be redistributed. Fix: to_dense() it first.")
        move = self._redistributions.get((src.key, target.key)) or redistribution(src, target)
        return move.run(_as_subclass(x, Tensor), cause)

    def _context(self, operands: list[DTensor]) -> LocalContext:
        recipe = self.recipe
        return LocalContext(
            recipe.op, recipe.layouts, self._outputs, recipe.local_axes, operands, recipe.cause, mark_copy
        )


def warn_of_gathered(recipe: Recipe, operands: Sequence[DTensor]) -> None:
    """Warn, once for each mesh axis, if a call all-gathers a parameter along an axis on which its batch is sharded.

    Parameters of one dim, such as those of norms, are too small to matter: the next one is named.
    """
    batches = [x._layout.placements for x in operands if not isinstance(x, nn.Parameter)]
    for index, target in recipe.redistributed:
        x, mesh = operands[index], target.mesh
        if not isinstance(x, nn.Parameter) or len(target.shape) == 1:
            continue
        for axis, (have, wanted) in enumerate(zip(x._layout.placements, target.placements, strict=True)):
            gathered = isinstance(have, Shard) and wanted == REPLICATE and mesh.shape[axis] > 1
            if not (gathered and any(isinstance(p[axis], Shard) for p in batches)) or (mesh, axis) in _warned:
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


def _not_saved(out: object) -> object:
    """Results; those that do not require grad become other objects than an op may have saved."""
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


def layouts_of_results(recipe: Recipe, ctx: LocalContext, out: Any) -> Any:
    """The layouts of results with data-dependent shapes: the ranks exchange the sizes of their local tensors."""
    if isinstance(out, Tensor):
        return _layout_of_result(recipe, ctx, out, None)
    return tuple(_layout_of_result(recipe, ctx, x, i) if isinstance(x, Tensor) else None for i, x in enumerate(out))


def _layout_of_result(recipe: Recipe, ctx: LocalContext, x: Tensor, index: int | None) -> Layout:
    mesh = recipe.layouts[0].mesh
    placements, shape = [align_shards.output_at(row, index) for row in recipe.rows], tuple(x.shape)
    order = align_shards.common_order(recipe.layouts)
    found = list(placements)
    for dim in sorted({p.dim for p in placements if isinstance(p, Shard)}):
        axes = tuple(axis for axis, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim)
        ranks = ctx.ranks(axes)
        headers = [[x.shape[dim]]] * len(ranks)
        sizes = [n for (n,) in ctx.exchange(ranks).headers(headers, collectives.message_device(ranks))]
        shape = (*shape[:dim], sum(sizes), *shape[dim + 1 :])
        of_axes = sizes_by_axis(mesh, axes, order, dict(zip(ranks, sizes, strict=True)))
        for axis, axis_sizes in of_axes.items():
            found[axis] = Shard(dim, axis_sizes)
    layout = Layout(mesh, found, shape, order)
    return layout.with_strides(strides_in_order(shape, recipe.order)) if recipe.order and not index else layout
