"""`input_reshard`: what a tensor-parallel module keeps of its input for backward is sharded in between."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._collectives import DeviceMesh
from shardwise._layout import Layout, Mesh, Shard, checked
from shardwise._redistribute.run_plan import redistribute_local
from shardwise._tensor import DTensor
from shardwise._tensor.dtensor import plain
from shardwise._trace.comm_trace import Cause
from shardwise.errors import MeshError

_CAUSE = Cause("internal", "input_reshard", "", "an input that was saved for backward is all-gathered")


@checked
def input_reshard(
    module: nn.Module, tp_device_mesh: Mesh | DeviceMesh, input_reshard_dim: int | None = None
) -> nn.Module:
    """Keep only a shard of the module's replicated inputs between forward and backward.

    Args:
        module: such as a tensor-parallel block. Sharded are inputs that are plain tensors, equal on all ranks of the
            mesh, or DTensors that are replicated on it. All else that is saved is kept as it is.
        tp_device_mesh: one axis, such as `mesh["tp"]`.
        input_reshard_dim: the dim of the saved tensors to shard, in any sizes; tensors without it are kept as they are.
            None: nothing changes.

    Returns:
        `module`, with hooks.

    Sends: in backward an all-gather for each op that saved an input. Memory is saved if nothing else holds the input.

    Raises:
        MeshError: a mesh of several axes, or one without this rank.
    """
    mesh = collectives.as_mesh(tp_device_mesh)
    if mesh.ndim != 1 or mesh.coordinate(collectives.rank()) is None:
        raise MeshError(
            f"input_reshard takes a mesh of one axis that has this rank, got {mesh}. "
            "Fix: one axis of it, such as mesh['tp']."
        )
    if input_reshard_dim is None:
        return module
    calls: list[tuple[_Inputs, AbstractContextManager[object]]] = []

    def begin(_: nn.Module, args: Sequence[object], kwargs: dict[str, object]) -> None:
        inputs = _Inputs(mesh, input_reshard_dim, _replicated([*args, kwargs], mesh))
        calls.append((inputs, saved_tensors_hooks(inputs.pack, _unpack)))
        calls[-1][1].__enter__()

    def end(*_: object) -> None:
        inputs, hooks = calls.pop()
        hooks.__exit__(None, None, None)
        inputs.inputs.clear()  # torch keeps the hook with what it packed

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end, always_call=True)
    return module


def _replicated(trees: Sequence[object], mesh: Mesh) -> list[Tensor]:
    """The local tensors of the inputs that all ranks of the mesh have."""
    found = []
    for x in pytree.tree_leaves(trees):
        if isinstance(x, DTensor):
            if _is_replicated(x._layout, mesh):
                found.append(plain(x))
        elif isinstance(x, Tensor):
            collectives.expect_equal(x, mesh.sorted_ranks, "an input of a module with input_reshard")
            found.append(x)
    return found


def _is_replicated(layout: Layout, mesh: Mesh) -> bool:
    if any(p.is_partial() for p in layout.placements) or not set(mesh.ranks) <= set(layout.mesh.ranks):
        return False
    first = layout.boxes(mesh.ranks[0])
    return all(layout.boxes(rank) == first for rank in mesh.ranks)


_Packed = tuple[Tensor, Layout | None]  # a saved tensor; or its shard, with the layout of that


class _Inputs:
    """Packs what ops of one call of a module save of its inputs."""

    def __init__(self, mesh: Mesh, dim: int, inputs: Sequence[Tensor]) -> None:
        self.mesh, self.dim = mesh, dim
        # Kept, so that no other tensor gets their memory meanwhile.
        self.inputs = {x.untyped_storage().data_ptr(): (x, x._version) for x in inputs if x.numel()}

    def pack(self, x: Tensor) -> _Packed:
        """Shards an unchanged input, or a view of it, as `F.linear` saves it."""
        if x.layout != torch.strided or not -x.ndim <= self.dim < x.ndim or not x.numel():
            return x, None
        given = self.inputs.get(x.untyped_storage().data_ptr())
        if given is None or given[0]._version != given[1]:
            return x, None
        layout = Layout(self.mesh, [Shard(self.dim % x.ndim)], x.shape)
        with torch.no_grad():
            return redistribute_local(x.detach(), layout.replicated(), layout, _CAUSE), layout


def _unpack(packed: _Packed) -> Tensor:
    x, layout = packed
    if layout is None:
        return x
    with torch.no_grad():
        return redistribute_local(x, layout, layout.replicated(), _CAUSE)
