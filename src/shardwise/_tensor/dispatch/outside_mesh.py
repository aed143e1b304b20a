"""Ops on a rank outside their mesh: results without elements, with the autograd graph of the other ranks.

    x = distribute_tensor(torch.ones(2), Mesh((1,), (1,)), [Replicate()]).requires_grad_()
    y = x.exp()    # on rank 0: no elements, a view of nothing, requires grad, is saved for backward

An op runs on torch's meta device. So it raises torch's errors, and gives the shapes of its results, which of them
require grad, and what it saves. Views are views of the empty tensor, and changes in place change it, so autograd raises
as on the other ranks. A backward with `create_graph=True` is an error here.
"""

from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Layout, Mesh
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor.dispatch.consistent_errors import (
    OnMeta,
    check_versions,
    raise_dtype_error,
    run_on_meta,
    tensors_in,
    versions_of,
)
from shardwise._tensor.dispatch.resolve import Layouts, Output, Recipe
from shardwise._tensor.dispatch.view_copies import copies_of, storage_of
from shardwise._tensor.dispatch.without_memory import Autocast
from shardwise._tensor.dtensor import DTensor, dtensors_in, name_of, plain, tag
from shardwise._trace.autograd_function import TensorFunction
from shardwise.errors import RuleError

_TO = Tensor.to  # a simulation wraps it


def _run_on_meta(func: Op, args: Args, kwargs: Kwargs, device_type: str, in_place: bool = False) -> OnMeta | None:
    """Run a call without memory; None if the results depend on data."""
    if func is _TO and len(args) > 1 and isinstance(args[1], str | int | torch.device):
        args = (args[0], "meta", *args[2:])
    try:
        return run_on_meta(func, args, kwargs, Autocast.of(device_type), in_place)
    except RuntimeError as error:  # among them NotImplementedError
        if isinstance(error, NotImplementedError) or "on meta tensors" in str(error):
            return None
        raise


class _EmptyResult(TensorFunction):
    """Keeps a rank outside the mesh in the graph, so that backward can be called there too.

    If the op saves tensors, so does this node: an activation checkpoint recomputes when the first is read, on all
        ranks.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, op: Op, mesh: Mesh, saves: bool, *sources: Tensor) -> Tensor:
        ctx.op, ctx.mesh, ctx.sources, ctx.saves = op, mesh, sources, saves
        if saves:
            ctx.save_for_backward(local)
        return torch.empty_like(local)  # not a view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuleError(
                f"{name_of(ctx.op)}: rank {collectives.rank()} is outside {ctx.mesh}, and a backward with "
                f"create_graph=True is made on the ranks of the mesh only. Fix: call it there, or redistribute to a "
                f"mesh of all ranks before."
            )
        if ctx.saves:
            assert ctx.saved_tensors
        return None, None, None, None, *(x.new_zeros(()) for x in ctx.sources)


def _source(x: Tensor) -> Tensor:
    """A tensor that connects a result with an operand: nothing changes it later, and torch saves nothing."""
    return plain(x).sum() if x.requires_grad else x.new_zeros(())


def run_outside(func: Op, recipe: Recipe, args: Args, kwargs: Kwargs) -> object:
    """The local call on a rank outside the mesh of a recipe."""
    if recipe.local_impl is None:
        raise_dtype_error(func, args, kwargs)
    if recipe.output is Output.IN_PLACE or recipe.written:
        return changed_empty(func, args, kwargs)
    return empty_results(func, recipe.output, recipe.layouts[0].mesh, args, kwargs, recipe.copied)


def empty_results(func: Op, layouts: Layouts, mesh: Mesh, args: Args, kwargs: Kwargs, copies: bool = False) -> Any:
    """The results of an op on a rank outside the mesh: DTensors without elements.

    Args:
        layouts: of the results, see `Recipe.output`; of an `Output`, replicated.
        copies: the results are copies where torch gives views.
    """
    with DisableTorchFunctionSubclass():
        operands = dtensors_in((*args, *kwargs.values()))
        found = _run_on_meta(func, args, kwargs, operands[0]._layout.mesh.device_type)
        if found is None:
            raise RuleError(
                f"{name_of(func)}: rank {collectives.rank()} is outside {mesh}; the result has a data-dependent shape. "
                f"Fix: call it on the ranks of the mesh only."
            )
        metas, results, saved = found
        versions = versions_of(saved, operands)
        leaves, form = pytree.tree_flatten(results)
        sources: list[Tensor] = []
        replicated = [REPLICATE] * mesh.ndim
        device = _device(func, args, kwargs) or operands[0].device
        grouped = len({x.grad_fn for x in tensors_in(results)}) == 1 and not isinstance(results, Tensor)

        def empty(index: int, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            viewed = next(
                (y for y, meta in zip(operands, metas, strict=True) if storage_of(x) is storage_of(meta)), None
            )
            if viewed is not None and any(x is meta for meta in metas) and not copies:
                return viewed
            given = layouts[index] if isinstance(layouts, tuple) else layouts
            layout = given if isinstance(given, Layout) else Layout(mesh, replicated, x.shape, strides=x.stride())
            shape = layout.local_shape(collectives.rank())
            is_view = x._is_view() or not x.requires_grad  # aten._unsafe_view shares memory, and is not a view
            if viewed is not None and is_view and x.dtype == viewed.dtype and not copies:
                return tag(_empty_view(viewed, shape, x, grouped), layout)
            local = torch.empty(shape, dtype=x.dtype, device=device)
            if x.requires_grad:
                sources.extend(map(_source, operands[len(sources) :]))
                local = _EmptyResult.apply(local, func, mesh, bool(saved), *sources)
            return tag(local, layout)

        out = pytree.tree_unflatten([empty(i, x) for i, x in enumerate(leaves)], form)
        check_versions(func, out, saved, versions)
        return copies_of(operands[0], out) if copies else out


def _device(func: Op, args: Args, kwargs: Kwargs) -> torch.device | str | int | None:
    """The device that a call names; the meta device does not know where results are."""
    given = args[1] if func is _TO and len(args) > 1 else kwargs.get("device")
    named = given if isinstance(given, torch.device | str | int) else None
    return "cpu" if func is Tensor.cpu else named


def _empty_view(x: DTensor, shape: tuple[int, ...], view: Tensor, grouped: bool) -> Tensor:
    """A view of `x` without elements, for autograd as by `view`: `grouped` with other results of one op.

    It refuses in-place changes of grouped results.
    """
    flat = plain(x).reshape(-1)[:0]
    out = (flat.split([0])[0] if grouped else flat).view(shape)
    return out.detach() if not view._is_view() or (out.requires_grad and not view.requires_grad) else out


def changed_empty(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The first operand of an in-place op on a rank outside the mesh: it has no elements to change.

    Its version and its history change as on the other ranks.
    """
    x = args[0]
    with DisableTorchFunctionSubclass():
        if func in (Tensor.detach_, torch.detach_):
            return func(x)
        operands = dtensors_in((*args, *kwargs.values()))
        found = _run_on_meta(func, args, kwargs, x._layout.mesh.device_type, in_place=True)
        saved = frozenset() if found is None else found.saved
        connected = any(y.requires_grad for y in operands) if found is None else found.results.requires_grad
        versions = versions_of(saved, operands)
        changed = torch.empty_like(plain(x))
        if torch.is_grad_enabled() and connected:
            changed = _EmptyResult.apply(changed, func, x._layout.mesh, bool(saved), *map(_source, operands))
        Tensor.copy_(x, changed)
        check_versions(func, x, saved, versions)
    return x if _returns_something(func) else None


def _returns_something(func: Op) -> bool:
    """Whether an in-place op returns its operand; custom ops may return nothing."""
    schema = getattr(func, "_schema", None)
    return schema is None or bool(schema.returns)
