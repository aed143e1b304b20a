"""Operands on different meshes, and ranks outside the mesh of an op."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree

from shardwise import collectives
from shardwise.errors import RuleError
from shardwise.layout import REPLICATE, Layout, Mesh
from shardwise.redistribute.plan import plan_redistribute
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor.dispatch.names import name_of
from shardwise.tensor.dispatch.promotion import is_strict
from shardwise.tensor.dispatch.version_checks import check_versions, on_meta, recording_saved, saved_by, watched_of
from shardwise.tensor.dtensor import DTensor, plain, tag, to_layout
from shardwise.tensor.handlers.copies import copies_of
from shardwise.trace.autograd_function import TensorFunction
from shardwise.trace.comm_trace import Cause

Call = tuple[tuple[Any, ...], dict[str, Any]]


def are_several(args: Args, kwargs: Kwargs) -> bool:
    """Whether the DTensors among the arguments are on different meshes."""
    meshes = [x._layout.mesh for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor]
    return any(mesh != meshes[0] for mesh in meshes)


def on_one_mesh(func: Op, args: Args, kwargs: Kwargs, mesh_operand: int | None) -> Call:
    """The arguments with every DTensor redistributed to the mesh of operand `mesh_operand`; None is the largest.

    All ranks of all the meshes must call. An operand becomes replicated, keeps its placements, or gets those of that
    operand, whichever costs least.

    Raises:
        RuleError: in strict mode.
    """
    operands = [x for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor]
    lead = max(operands, key=lambda x: x.numel() * x.element_size()) if mesh_operand is None else operands[mesh_operand]
    others = next(x._layout.mesh for x in operands if x._layout.mesh != lead._layout.mesh)
    if is_strict():
        raise RuleError(
            f"{name_of(func)}: operands live on different meshes, {lead._layout.mesh} and {others}, which strict mode "
            f"refuses. Fix: redistribute one of them to the other's device_mesh."
        )

    def on_mesh(x: object) -> Any:
        if type(x) is not DTensor or x._layout.mesh == lead._layout.mesh:
            return x
        target = _cheapest(x._layout, lead._layout)
        why = "operands of one op must be on one mesh"
        return to_layout(x, target, Cause("operand", name_of(func), x._name or "an operand", why, target))

    found: Call = pytree.tree_map(on_mesh, (args, kwargs))
    return found


def _cheapest(src: Layout, lead: Layout) -> Layout:
    mesh = lead.mesh
    candidates = [Layout(mesh, [REPLICATE] * mesh.ndim, src.shape)]
    if src.shape == lead.shape:
        candidates.append(lead.reduced())
    if src.mesh.shape == mesh.shape:
        candidates.append(Layout(mesh, src.placements, src.shape, src.shard_order).reduced())
    return min(candidates, key=lambda dst: plan_redistribute(src, dst).cost)


def is_outside(mesh: Mesh) -> bool:
    """Whether this rank is not one of the mesh's."""
    return mesh.size() < collectives.world_size() and mesh.coordinate(collectives.rank()) is None


def empty_results(
    func: Callable[..., Any],
    layouts: Any,
    mesh: Mesh,
    args: Args,
    kwargs: Kwargs,
    view: bool = False,
    copies: bool = False,
) -> Any:
    """The results of an op on a rank outside the mesh: DTensors without elements.

    Args:
        layouts: of the results, see `Recipe.output`; None is replicated.
        view: the op returns views of its first operand, or copies of them if `copies`.
    """

    operands = [x for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor]
    with DisableTorchFunctionSubclass():
        meta_args, meta_kwargs, meta_operands = on_meta(args, kwargs)
        try:
            with recording_saved(meta_operands) as saved_by:
                metas = func(*meta_args, **meta_kwargs)
        except RuntimeError as error:  # among them NotImplementedError
            if not isinstance(error, NotImplementedError) and "on meta tensors" not in str(error):
                raise
            raise RuleError(
                f"{name_of(func)}: rank {collectives.rank()} is outside {mesh}; the result has a data-dependent shape. "
                f"Fix: call it on the ranks of the mesh only."
            ) from error
        saved = saved_by(metas) if torch.is_grad_enabled() else frozenset()
        number = iter(range(len(pytree.tree_leaves(metas))))

        def empty(x: Any) -> Any:
            index = next(number)
            if not isinstance(x, Tensor):
                return x
            given = layouts if isinstance(layouts, Layout | None) else layouts[index]
            layout = given or Layout(mesh, [REPLICATE] * mesh.ndim, x.shape, strides=x.stride())
            shape = layout.local_shape(collectives.rank())
            if view and x.dtype == operands[0].dtype and not copies:
                return tag(plain(operands[0]).reshape(-1)[:0].view(shape), layout)
            local = torch.empty(shape, dtype=x.dtype, device=operands[0].device)
            if x.requires_grad:
                local = _EmptyResult.apply(local, bool(saved), *operands)
            return tag(local, layout)

        out = pytree.tree_map(empty, metas)
        if torch.is_grad_enabled():
            check_versions(func, out, watched_of(saved, operands, out))
        return copies_of(operands[0], out) if view and copies else out


def changed_empty(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """The first operand of an op that works in place, on a rank outside the mesh: it has no elements to change.

    Its version and its history change as on the other ranks.
    """
    x, recording = args[0], torch.is_grad_enabled()
    operands = [y for y in pytree.tree_leaves((args, kwargs)) if type(y) is DTensor]
    with DisableTorchFunctionSubclass():
        changed = torch.empty_like(plain(x))
        saved = saved_by(func, args, kwargs) if recording else frozenset()
        if recording and any(y.requires_grad for y in operands if y is not x):
            changed = _EmptyResult.apply(changed, bool(saved), *operands[1:])
        Tensor.copy_(x, changed)
        check_versions(func, x, watched_of(saved, operands, x))
    return x


class _EmptyResult(TensorFunction):
    """Keeps a rank outside the mesh in the graph, so that backward can be called there too.

    If the op saves tensors, so does this: an activation checkpoint recomputes when the first is read, on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, saves: bool, *operands: Tensor) -> Tensor:
        ctx.operands, ctx.saves = [(x.new_zeros(()), x.shape) for x in operands], saves
        if saves:
            ctx.save_for_backward(local)
        return torch.empty_like(local)  # not a view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.saves:
            assert ctx.saved_tensors
        return None, None, *(zero.expand(shape) for zero, shape in ctx.operands)
