"""DTensors of `torch.distributed.tensor` as DTensors of shardwise and back, without copies."""

from collections.abc import Sequence
from itertools import permutations
from math import prod
from typing import Any

from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._collectives import DeviceMesh
from shardwise._layout import Layout, Mesh, Partial, Replicate, Shard, as_placement, checked, shown
from shardwise._tensor.autograd.gradients import tag_full
from shardwise._tensor.conversion import wrap
from shardwise._tensor.dtensor import DTensor, as_parameter, plain, register_method, to_layout
from shardwise._tensor.torch_objects import TorchDTensor, TorchPlacement, arrived, is_torch_dtensor
from shardwise._trace.comm_trace import Cause
from shardwise.errors import LayoutError, MeshError, RuleError


@checked
def from_torch_dtensor(x: TorchDTensor) -> DTensor:
    """A DTensor of torch as one of shardwise on the same mesh, sharing its storage; gradients flow back to it.

    Args:
        x: a DTensor of `torch.distributed.tensor`, also unevenly sharded. A `_StridedShard` of `fully_shard` becomes a
            Shard with another `shard_order`.

    Raises:
        LayoutError: something else, or a `_StridedShard` that is not an order of the axes.
    """
    return wrap(arrived(x.to_local()), torch_layout(collectives.as_mesh(x.device_mesh), x.placements, x.shape))


def converted(x: object) -> Any:
    """`x`, or a DTensor of torch as one of shardwise; a parameter becomes a parameter that shares its storage."""
    if not is_torch_dtensor(x):
        return x
    if isinstance(x, nn.Parameter):
        return as_parameter(from_torch_dtensor(x.detach()), x)
    return from_torch_dtensor(x)


@checked
def to_torch_dtensor(self: DTensor, device_mesh: DeviceMesh | None = None) -> Tensor:
    """This tensor as a DTensor of torch, sharing its storage; gradients flow back to it.

    Args:
        device_mesh: torch's mesh with the ranks and axes of this one; None: the mesh it was made with.

    Raises:
        LayoutError: torch has no placements for this layout, such as given sizes.
        MeshError: no DeviceMesh is known, or a different one is given.
    """
    layout = self._layout
    mesh = collectives.device_mesh(layout.mesh) if device_mesh is None else device_mesh
    if not isinstance(mesh, DeviceMesh) or collectives.as_mesh(mesh) != layout.mesh:
        raise MeshError(
            f"to_torch_dtensor: a DTensor of torch needs torch's DeviceMesh of {layout.mesh}, got {mesh}. "
            f"Fix: make the tensor on init_device_mesh(…), or pass that as device_mesh."
        )
    factors = _split_factors(layout)
    for placement in layout.placements:
        if not isinstance(placement, Replicate | Partial) and (placement != Shard(getattr(placement, "dim", 0))):
            raise LayoutError(
                f"to_torch_dtensor: torch's DTensor has no {placement}. "
                f"Fix: redistribute it before, such as to Shard(0), which divides as torch.chunk does."
            )
    return collectives.torch_dtensor(self.to_local(), mesh, layout.placements, factors, layout.shape, layout.stride())


def _split_factors(layout: Layout) -> list[int]:
    """The number of shards, for each axis, into which axes to its right have divided its dim before."""
    dims = [getattr(placement, "dim", None) for placement in layout.placements]
    factors = _factors(layout.mesh, dims, layout.shard_order)
    for dim in {dim for dim, factor in zip(dims, factors, strict=True) if factor > 1 and dim is not None}:
        shards = prod(n for n, other in zip(layout.mesh.shape, dims, strict=True) if other == dim)
        if layout.shape[dim] % shards:
            raise LayoutError(
                f"to_torch_dtensor: dim {dim} of {layout} is divided unevenly, by the axes in another order than "
                f"torch's. Fix: redistribute(placements=…, shard_order={tuple(range(layout.mesh.ndim))}) it before."
            )
    return factors


def _factors(mesh: Mesh, dims: Sequence[int | None], order: Sequence[int]) -> list[int]:
    before = [[other for other in order[: order.index(axis)] if other > axis] for axis in range(mesh.ndim)]
    return [
        prod(mesh.shape[other] for other in others if dim is not None and dims[other] == dim)
        for dim, others in zip(dims, before, strict=True)
    ]


def torch_layout(mesh: Mesh, placements: Sequence[TorchPlacement], shape: Sequence[int]) -> Layout:
    """The layout of a DTensor of torch.

    A `_StridedShard` with `split_factor` n, which `fully_shard` makes of a sharded dim, divides a dim that axes to its
    right have divided into n shards.
    """
    factors = [getattr(p, "split_factor", 1) for p in placements]
    pairs = list(zip(placements, factors, strict=True))
    dims = [getattr(p, "dim", None) if factor > 1 or p.is_shard() else None for p, factor in pairs]
    named = zip(placements, dims, strict=True)
    unstrided = [as_placement(p, "A DTensor of torch") if dim is None else Shard(dim) for p, dim in named]
    for order in permutations(range(mesh.ndim)):
        if _factors(mesh, dims, order) == factors:
            return Layout(mesh, unstrided, shape, order)
    raise LayoutError(
        f"{shown([str(p) for p in placements])} on {mesh}: no order of the axes has these split factors. "
        f"Fix: redistribute it in torch first, to Shard(dim) without split factors."
    )


# ---- loaded into DTensors of shardwise, or the other way --------------------------------------------------------


def from_torch(x: TorchDTensor, layout: Layout, what: str) -> DTensor:
    """A DTensor of torch on the mesh of `layout`, without history; `what` names it in errors.

    If both meshes have equal ranks, local shards are used. Otherwise it is gathered first: with torch's tensor
    parallelism each group of ranks has its own mesh.
    """
    x = x.detach()
    if x.is_meta or collectives.as_mesh(x.device_mesh).sorted_ranks != layout.mesh.sorted_ranks:
        return tag_full(x.full_tensor(), layout, what)
    return from_torch_dtensor(x)


def to_torch(x: DTensor, like: TorchDTensor, what: str) -> Tensor:
    """A DTensor as one of torch with the mesh and placements of `like`, without history."""
    x = x.detach()
    wanted = torch_layout(collectives.as_mesh(like.device_mesh), like.placements, like.shape)
    if wanted.mesh.sorted_ranks != x._layout.mesh.sorted_ranks:
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


register_method("from_torch_dtensor", staticmethod(from_torch_dtensor))
register_method("to_torch_dtensor", to_torch_dtensor)
