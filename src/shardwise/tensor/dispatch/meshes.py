"""Operands on different meshes, and whether a rank is outside one."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any

from torch.utils import _pytree as pytree

from shardwise import collectives
from shardwise.errors import RuleError
from shardwise.layout import REPLICATE, Layout, Mesh, Placement
from shardwise.redistribute.plan import plan_redistribute
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor.conversion import to_local, wrap
from shardwise.tensor.dispatch.names import name_of
from shardwise.tensor.dispatch.promotion import is_strict
from shardwise.tensor.dtensor import DTensor, plain, to_layout
from shardwise.trace.comm_trace import Cause

Call = tuple[tuple[Any, ...], dict[str, Any]]


def are_several(args: Args, kwargs: Kwargs) -> bool:
    """Whether the DTensors among the arguments are on different meshes."""
    meshes = [x._layout.mesh for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor]
    return any(mesh != meshes[0] for mesh in meshes)


def on_one_mesh(func: Op, args: Args, kwargs: Kwargs, kept_operand: int | None) -> Call:
    """The arguments with every DTensor redistributed to the mesh of operand `kept_operand`; None is the largest.

    All ranks of all the meshes must call. An operand becomes replicated, keeps its placements, or gets those of that
    operand, whichever costs least. Where each rank has a tensor on its own slice of that mesh, such as mesh["dp"], it
    counts as replicated along the other axes, as a plain tensor does: nothing is sent but the ranks of the slices.

    Raises:
        RuleError: in strict mode.
    """
    operands = [x for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor]
    own_slice = cache(_own_slice)
    lead = max(operands, key=lambda x: x.numel() * x.element_size()) if kept_operand is None else operands[kept_operand]
    others = next(x._layout.mesh for x in operands if x._layout.mesh != lead._layout.mesh)
    if is_strict():
        raise RuleError(
            f"{name_of(func)}: operands live on different meshes, {lead._layout.mesh} and {others}, which strict mode "
            f"refuses. Fix: redistribute one of them to the other's device_mesh."
        )

    if kept_operand is None:
        for x in operands:
            lead = x if own_slice(lead._layout.mesh, x._layout.mesh) else lead

    def on_mesh(x: object) -> Any:
        if type(x) is not DTensor or x._layout.mesh == lead._layout.mesh:
            return x
        if axes := own_slice(x._layout.mesh, lead._layout.mesh):
            return _beside_other_slices(x, lead._layout.mesh, axes, name_of(func))
        target = _cheapest(x._layout, lead._layout)
        why = "operands of one op must be on one mesh"
        return to_layout(x, target, Cause("operand", name_of(func), x._name or "an operand", why))

    found: Call = pytree.tree_map(on_mesh, (args, kwargs))
    return found


def _own_slice(mesh: Mesh, of: Mesh) -> tuple[int, ...] | None:
    """The axes of `of` along which `mesh` is a slice of it, if each rank passes the slice that it is in.

    All ranks of `of` call. A tensor on one slice only has the same mesh on all of them, also on those outside.
    """
    if not mesh.size() < of.size() or of.coordinate(mesh.ranks[0]) is None:
        return None
    slices = {axes: of.submesh(axes, mesh.ranks[0]) for axes in combinations(range(of.ndim), mesh.ndim)}
    found = next((axes for axes, s in slices.items() if (s.shape, s.ranks) == (mesh.shape, mesh.ranks)), None)
    if found is None or not all(collectives.gather_json(not is_outside(mesh), of.sorted_ranks)):
        return None
    return found


def _beside_other_slices(x: DTensor, mesh: Mesh, axes: Sequence[int], name: str) -> DTensor:
    """What each rank has on its slice of `mesh` along `axes`, as a tensor on `mesh`: replicated along the others."""
    layout, others = x._layout, [axis for axis in range(mesh.ndim) if axis not in axes]
    along_others = mesh.submesh(others, collectives.rank()).sorted_ranks
    collectives.expect_equal(
        plain(x), along_others, f"{name}: the tensor on {_names_of(mesh, axes)} beside one on {mesh}"
    )

    def on_all(placements: Sequence[Placement]) -> list[Placement]:
        found = dict(zip(axes, placements, strict=True))
        return [found.get(axis, REPLICATE) for axis in range(mesh.ndim)]

    order = [axes[axis] for axis in layout.shard_order]
    target = Layout(mesh, on_all(layout.placements), layout.shape, [*order, *others], strides=layout.strides)
    gradient = layout.dual().placements
    return wrap(to_local(x, gradient), target, on_all(gradient))


def _names_of(mesh: Mesh, axes: Sequence[int]) -> str:
    return "its axes " + ", ".join(repr(mesh.names[axis]) if mesh.names else str(axis) for axis in axes)


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
