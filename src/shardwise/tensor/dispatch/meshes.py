"""Operands on different meshes, and whether a rank is outside one."""

from typing import Any

from torch.utils import _pytree as pytree

from shardwise import collectives
from shardwise.errors import RuleError
from shardwise.layout import REPLICATE, Layout, Mesh
from shardwise.redistribute.plan import plan_redistribute
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor.dispatch.names import name_of
from shardwise.tensor.dispatch.promotion import is_strict
from shardwise.tensor.dtensor import DTensor, to_layout
from shardwise.trace.comm_trace import Cause

Call = tuple[tuple[Any, ...], dict[str, Any]]


def are_several(args: Args, kwargs: Kwargs) -> bool:
    """Whether the DTensors among the arguments are on different meshes."""
    meshes = [x._layout.mesh for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor]
    return any(mesh != meshes[0] for mesh in meshes)


def on_one_mesh(func: Op, args: Args, kwargs: Kwargs, kept_operand: int | None) -> Call:
    """The arguments with every DTensor redistributed to the mesh of operand `kept_operand`; None is the largest.

    All ranks of all the meshes must call. An operand becomes replicated, keeps its placements, or gets those of that
    operand, whichever costs least.

    Raises:
        RuleError: in strict mode.
    """
    operands = [x for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor]
    lead = max(operands, key=lambda x: x.numel() * x.element_size()) if kept_operand is None else operands[kept_operand]
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
