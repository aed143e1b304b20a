"""Conversion between DTensors of `torch.distributed.tensor` and those of shardwise."""

from collections.abc import Sequence
from itertools import permutations
from math import prod

from torch import Tensor

from shardwise import collectives
from shardwise.errors import LayoutError, RuleError
from shardwise.layout import Layout, Mesh, Shard, as_placement, shown
from shardwise.tensor.arguments import TorchDTensor, TorchPlacement
from shardwise.tensor.autograd.gradients import tag_full
from shardwise.tensor.conversion import wrap
from shardwise.tensor.dtensor import DTensor, plain, to_layout
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
    return wrap(x.to_local(), torch_layout(mesh, x.placements, x.shape))


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


def torch_layout(mesh: Mesh, placements: Sequence[TorchPlacement], shape: Sequence[int]) -> Layout:
    """The layout of a DTensor of torch.

    A `_StridedShard` with `split_factor` n, which `fully_shard` makes of a sharded dim, divides what axes to its right
    have divided before into n shards.

    Raises:
        LayoutError: the split factors fit no order of the axes.
    """
    factors = [getattr(placement, "split_factor", 1) for placement in placements]
    sharded = [placement.is_shard() or factor > 1 for placement, factor in zip(placements, factors, strict=True)]
    dims = [getattr(p, "dim", None) if is_shard else None for p, is_shard in zip(placements, sharded, strict=True)]

    def factor_in(order: Sequence[int], axis: int) -> int:
        before = order[: order.index(axis)]
        return prod(mesh.shape[other] for other in before if other > axis and dims[other] == dims[axis])

    unstrided = [
        as_placement(p, "A DTensor of torch") if d is None else Shard(d) for p, d in zip(placements, dims, strict=True)
    ]
    for order in permutations(range(mesh.ndim)):
        if all(dims[axis] is None or factor_in(order, axis) == factors[axis] for axis in range(mesh.ndim)):
            return Layout(mesh, unstrided, shape, order)
    raise LayoutError(f"{shown([str(p) for p in placements])} on {mesh}: no order of the axes has these split factors.")
