"""Which layout each tensor of a checkpoint gets under a plan of parameters."""

from collections.abc import Mapping

from shardwise.checkpoint.offline.sources import SourceTensor
from shardwise.checkpoint.optimizer_states import layout_of_state
from shardwise.checkpoint.state import MODEL
from shardwise.errors import PlanError, did_you_mean
from shardwise.layout import REPLICATE, Layout, Mesh

OPTIMIZER = "optimizer."  # what `state_of` puts before the names of states


def planned_layouts(
    tensors: Mapping[str, SourceTensor], plan: Mapping[str, Layout], world_size: int
) -> dict[str, Layout]:
    """The layout of every tensor, as `save` would find it on `world_size` ranks whose parameters follow `plan`.

    Args:
        plan: layouts by the name of a parameter in its module, or of a tensor in the checkpoint. States of optimizers
            get the layout of their parameter; what the plan does not name is replicated.

    Raises:
        PlanError: a name that no tensor has, another shape, or a rank that is not of the world.
    """
    replicated = Mesh((world_size,))
    found = {name: Layout(replicated, [REPLICATE], tensor.shape) for name, tensor in tensors.items()}
    for name, layout in plan.items():
        owner = next((candidate for candidate in (name, f"{MODEL}{name}") if candidate in tensors), None)
        if owner is None:
            meant = did_you_mean(name, [known.removeprefix(MODEL) for known in tensors])
            raise PlanError(
                f"{name}: the checkpoint has no such tensor.{meant} Fix: `shardwise checkpoint inspect` lists them."
            )
        _check(name, layout, tensors[owner], world_size)
        found[owner] = layout
        states = f"{OPTIMIZER}{owner.removeprefix(MODEL)}."
        for state, tensor in tensors.items():
            key = state.removeprefix(states)
            if state.startswith(states) and "." not in key and key != "step":
                found[state] = layout_of_state(layout, tensor.shape)
    return found


def _check(name: str, layout: Layout, tensor: SourceTensor, world_size: int) -> None:
    if layout.shape != tensor.shape:
        raise PlanError(
            f"{name}: shape {list(layout.shape)} in the plan, {list(tensor.shape)} in the checkpoint. "
            f"Fix: write shape = {list(tensor.shape)}."
        )
    if layout.partial_axes:
        raise PlanError(
            f"{name}: {list(layout.placements)} is a sum that is not reduced yet. Fix: Shard or Replicate in its place."
        )
    if max(layout.mesh.ranks) >= world_size:
        raise PlanError(
            f"{name}: rank {max(layout.mesh.ranks)} of its mesh is not one of {world_size} ranks. "
            f"Fix: a world of {max(layout.mesh.ranks) + 1} ranks or more."
        )
