"""DTensors of `torch.distributed.tensor` that are loaded into DTensors of shardwise, or the other way."""

from torch import Tensor

from shardwise import collectives
from shardwise.errors import RuleError
from shardwise.layout import Layout
from shardwise.tensor.autograd.gradients import tag_full
from shardwise.tensor.conversion import wrap
from shardwise.tensor.dtensor import DTensor, plain, to_layout
from shardwise.tensor.torch_dtensors import torch_layout
from shardwise.tensor.torch_objects import TorchDTensor, arrived
from shardwise.trace.comm_trace import Cause


def from_torch(x: TorchDTensor, layout: Layout, what: str) -> DTensor:
    """A DTensor of torch on the mesh of `layout`, without history; `what` names it in errors.

    Local shards are used where both meshes have the same ranks. Otherwise it is gathered first: with torch's tensor
    parallelism each group of ranks has a mesh of its own.
    """
    x = x.detach()
    mesh = collectives.as_mesh(x.device_mesh)
    if x.is_meta or sorted(mesh.ranks) != sorted(layout.mesh.ranks):
        return tag_full(x.full_tensor(), layout, what)
    return wrap(arrived(x.to_local()), torch_layout(mesh, x.placements, x.shape))


def to_torch(x: DTensor, like: TorchDTensor, what: str) -> Tensor:
    """A DTensor as one of torch with the mesh and placements of `like`, without history."""
    x = x.detach()
    mesh = collectives.as_mesh(like.device_mesh)
    wanted = torch_layout(mesh, like.placements, like.shape)
    if sorted(mesh.ranks) != sorted(x._layout.mesh.ranks):
        x = tag_full(full_here(x, what), wanted, what)
    local = plain(to_layout(x, wanted, Cause("explicit", "load_state_dict", what)))
    return like.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def full_here(x: DTensor, what: str) -> Tensor:
    """The full tensor on this rank, without history; `what` names it in errors.

    Raises:
        RuleError: this rank is outside the mesh, where `full_tensor` has no elements.
    """
    mesh = x._layout.mesh
    if mesh.coordinate(collectives.rank()) is None:
        raise RuleError(
            f"{what}: rank {collectives.rank()} is outside {mesh} and has no elements of it. "
            f"Fix: redistribute it to a mesh of all ranks first."
        )
    return x.detach().full_tensor()
