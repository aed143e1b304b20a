"""Conversion between local tensors and distributed ones, and asynchronous redistributions.

The first use of such a redistribution's result reads `_layout`, which waits for it.
"""

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import _collectives as collectives
from shardwise._collectives import DeviceMesh, Wait
from shardwise._layout import (
    PARTIAL,
    REPLICATE,
    Box,
    Boxes,
    Layout,
    Mesh,
    OnRanks,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    as_integer,
    as_integers,
    as_placements,
    checked,
    contiguous_strides,
    dims_by_stride,
    placements_text,
    strides_in_order,
)
from shardwise._layout.dim_shards import sizes_by_axis
from shardwise._redistribute.run_plan import redistribute_local, start_redistribute
from shardwise._tensor.arguments import check_dense
from shardwise._tensor.autograd.gradients import FromPlain, ToPlain
from shardwise._tensor.dispatch.view_copies import track
from shardwise._tensor.dtensor import DTensor, Tiling, as_parameter, check_owners, default_mesh, plain, tag, to_layout
from shardwise._tensor.torch_objects import TorchDTensor, arrived, is_torch_dtensor
from shardwise._tensor.transforms import check_no_transform, check_untransformed, refuse_compilation
from shardwise._trace.autograd_function import TensorFunction
from shardwise._trace.comm_trace import EXPLICIT
from shardwise.errors import LayoutError, MismatchError


def to_local(x: DTensor, grad_placements: Placements | None) -> Tensor:
    layout = x._layout
    if collectives.world_size() > 1:  # elsewhere the local tensors that simulated ranks returned may be read
        check_owners("to_local", (layout,))
    check_no_transform("to_local")
    with DisableTorchFunctionSubclass():
        grad_layout = None if grad_placements is None else layout.replace(grad_placements)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x.detach()  # the base of a view would be the DTensor
        return ToPlain.apply(plain(x), layout, grad_layout or layout.reduced())


def wrap(local: Tensor, layout: Layout, grad_placements: Placements | None = None) -> DTensor:
    """A local tensor that is known to fit `layout`, as a DTensor that shares its storage; gradients flow back to it."""
    with DisableTorchFunctionSubclass():
        if not (torch.is_grad_enabled() and local.requires_grad):
            return track(tag(local.detach(), layout))
        grad_layout = layout.reduced() if grad_placements is None else layout.replace(grad_placements)
        return track(tag(FromPlain.apply(local, layout, grad_layout), layout))


def mesh_for(x: Tensor, device_mesh: Mesh | DeviceMesh | None) -> Mesh:
    """`device_mesh` as a `Mesh`; None is one axis of all ranks, on the device of `x`."""
    if device_mesh is not None:
        return collectives.as_mesh(device_mesh)
    return default_mesh("cpu" if x.is_meta else x.device.type)


_of_wrapper: dict[str, Callable[[Any], Tensor]] = {}  # functions by the module of the wrapper's class


def register_wrapper(module: str, convert: Callable[[Any], Tensor]) -> None:
    """Register `convert`, by which `from_local` makes a local tensor of one whose class is of `module`."""
    _of_wrapper[module] = convert


class _Passed(NamedTuple):
    """The arguments of one rank's `from_local`; sent as JSON of its values."""

    shape: list[int]
    dtype: str
    mesh: str
    placements: list[str]
    global_shape: list[int] | None
    device: str
    requires_grad: bool
    order: list[int]  # the order of dims in memory; empty if it is row-major
    bounds: (
        list[list[int]] | None
    )  # bounds of the shards of a LocalShardsWrapper, empty if it has none; None: a plain tensor


def from_local(
    local: Tensor,
    device_mesh: Mesh | DeviceMesh | None,
    placements: Placements | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Placements | None,
) -> DTensor:
    refuse_compilation()
    if isinstance(local, DTensor):
        raise LayoutError("from_local takes a plain local tensor, got a DTensor. Fix: use redistribute().")
    local = _of_wrapper.get(type(local).__module__, arrived)(local)
    check_dense(local, "from_local")
    check_untransformed(local, "from_local")
    tiling: Tiling | None = getattr(local, "tiling", None)
    if tiling is not None:
        local = plain(local)
    mesh = mesh_for(local, device_mesh)
    local = _on_mesh_device(local, mesh)
    wanted, rank = as_placements(mesh, placements), collectives.rank()
    if shape is None and stride is not None:
        raise LayoutError("from_local: a global stride needs the global shape too. Fix: pass shape=.")
    if mesh.coordinate(rank) is None:
        if shape is None:
            raise LayoutError(
                f"from_local: rank {rank} is outside {mesh}, so it needs the global shape. Fix: pass shape=."
            )
        layout = Layout(mesh, wanted, shape)
        nothing = local.reshape(-1)[:0].view(layout.local_shape(rank))  # connected: backward meets peers
        return wrap(nothing, layout, grad_placements)
    passed = _passed(local, mesh, wanted, shape, tiling)
    order: list[int] | None = passed.order
    if run_check:
        ranks = tuple(sorted(mesh.ranks))
        answers = collectives.gather_json(passed, ranks)
        all_passed = {member: _Passed(*answer) for member, answer in zip(ranks, answers, strict=True)}
        layout, dtype = _layout_from_all_ranks(mesh, wanted, shape, all_passed)
        order = _common_order(all_passed)
        needs_grad = any(other.requires_grad for other in all_passed.values())
        _check_fit(layout, wanted, all_passed, MismatchError, "pass local tensors of the expected shapes")
        local = local.to("meta" if local.is_meta else mesh.device_type, dtype)  # only what has no element may differ
        if needs_grad and not local.requires_grad:  # a rank without shards takes part in backward, too
            local.requires_grad_()
    else:
        layout = Layout(mesh, wanted, _even_shape(local, mesh, wanted) if shape is None else shape)
        _check_fit(layout, wanted, {rank: passed}, LayoutError, "give the sizes, Shard(dim, sizes=...)")
        if not local.numel():  # its strides say what those of the other ranks say
            order = _order(local)
    if not local.numel():
        local = local.reshape(layout.local_shape(rank))
    layout = layout.with_strides(_strides(stride, order, layout))
    replicated = [axis for axis, p in enumerate(layout.placements) if isinstance(p, Replicate)]
    if replicated:
        ranks = tuple(sorted(mesh.submesh(replicated, rank).ranks))
        collectives.expect_equal(local, ranks, "from_local: the local tensor of a Replicate axis")
    result = wrap(local, layout, grad_placements)
    if tiling is not None and tiling.boxes:
        result._tiling = tiling
    return result


def _passed(
    local: Tensor, mesh: Mesh, placements: Sequence[Placement], shape: Sequence[int] | None, tiling: Tiling | None
) -> _Passed:
    return _Passed(
        shape=list(local.shape),
        dtype=str(local.dtype),
        mesh=str(mesh),
        placements=[str(p) for p in placements],
        global_shape=None if shape is None else list(shape),
        device="meta" if local.is_meta else "",
        requires_grad=local.requires_grad and torch.is_grad_enabled(),
        order=[] if local.is_contiguous() else _order(local) or [],
        bounds=None if tiling is None else [list(x) for x in tiling.bounds] if tiling.boxes else [],
    )


def _order(local: Tensor) -> list[int] | None:
    """The order of the dims in memory; None if the elements have gaps."""
    order = dims_by_stride(local.stride())
    return order if local.permute(order).is_contiguous() else None


def _common_order(all_passed: dict[int, _Passed]) -> list[int] | None:
    """The order of the dims in memory on all ranks; None is row-major, or ranks differ."""
    orders = {tuple(passed.order) for passed in all_passed.values() if min(passed.shape, default=0) > 1}
    orders = orders or {tuple(passed.order) for passed in all_passed.values()}
    return list(orders.pop()) or None if len(orders) == 1 else None


def _strides(given: Sequence[int] | None, order: Sequence[int] | None, layout: Layout) -> tuple[int, ...]:
    """The strides of the global tensor: the given ones, or the dims in this order; row-major for None."""
    shape = layout.shape
    if given is None:
        return strides_in_order(shape, range(len(shape)) if order is None or len(order) != len(shape) else order)
    found = as_integers(given, "from_local: stride", LayoutError, "such as (3, 1)")
    if len(found) != len(shape) or found != strides_in_order(shape, dims_by_stride(found)):
        raise LayoutError(
            f"from_local: stride={found} describes no tensor of shape {shape} without gaps. "
            f"Fix: leave it out, or pass such as {contiguous_strides(shape)}."
        )
    return found


def _on_mesh_device(tensor: Tensor, mesh: Mesh) -> Tensor:
    """The tensor, moved if the mesh has another device type; a meta tensor stays."""
    return tensor if tensor.is_meta or tensor.device.type == mesh.device_type else tensor.to(mesh.device_type)


def _even_shape(local: Tensor, mesh: Mesh, placements: Sequence[Placement]) -> list[int]:
    """The global shape, if all ranks have local tensors of one shape."""
    if any(isinstance(p, Boxes | OnRanks) or (isinstance(p, Shard) and p.sizes) for p in placements):
        raise LayoutError(
            f"from_local(run_check=False): the global shape does not follow from one local tensor under "
            f"{placements_text(mesh, placements)}. Fix: pass shape=, or leave run_check on."
        )
    shape = list(local.shape)
    for axis, p in enumerate(placements):
        if isinstance(p, Shard):
            shape[p.dim] *= mesh.shape[axis]
    return shape


def _layout_from_all_ranks(
    mesh: Mesh, placements: Sequence[Placement], shape: Sequence[int] | None, all_passed: dict[int, _Passed]
) -> tuple[Layout, torch.dtype]:
    """The layout and the dtype, which a rank without shards does not know."""
    empty = [rank for rank, passed in all_passed.items() if passed.bounds == []]
    others = {rank: passed for rank, passed in all_passed.items() if rank not in empty}
    _check_equal("dtype", {rank: passed.dtype for rank, passed in others.items()})
    _check_equal("kind of device", {rank: passed.device for rank, passed in others.items()})
    _check_equal("requires_grad of the local tensors", {rank: passed.requires_grad for rank, passed in others.items()})
    _check_equal("mesh", {rank: passed.mesh for rank, passed in all_passed.items()})
    _check_equal("placements", {rank: passed.placements for rank, passed in all_passed.items()})
    _check_equal("global shape", {rank: passed.global_shape for rank, passed in all_passed.items()})
    first = next(iter(others.values()), next(iter(all_passed.values())))
    sharded = [p.dim for p in placements if isinstance(p, Shard)]
    if others and len(sharded) == 1 and -len(first.shape) <= sharded[0] < len(first.shape):
        for rank in empty:
            nothing = list(first.shape)
            nothing[sharded[0]] = 0
            all_passed[rank] = all_passed[rank]._replace(shape=nothing)
    shapes = {rank: tuple(passed.shape) for rank, passed in all_passed.items()}
    dtype = getattr(torch, first.dtype.removeprefix("torch."))
    return layout_of_local_shapes(mesh, placements, shapes, shape), dtype


def _check_equal(what: str, by_rank: Mapping[int, object]) -> None:
    values = list(by_rank.values())
    if any(value != values[0] for value in values):
        lines = "\n".join(f"  rank {rank}: {value}" for rank, value in by_rank.items())
        raise MismatchError(f"from_local: ranks disagree on the {what}:\n{lines}\n  Fix: pass the same on every rank.")


def _check_fit(
    layout: Layout,
    placements: Sequence[Placement],
    all_passed: dict[int, _Passed],
    error: type[LayoutError | MismatchError],
    fix: str,
) -> None:
    """Raise `error` unless the layout gives the ranks the boxes, and the local shapes, that they passed."""
    expected = f"a tensor of shape {layout.shape} under {placements_text(layout.mesh, placements)}"
    otherwise = "or other placements" if error is MismatchError else "or leave run_check on"
    misplaced, misshapen = [], []
    for rank, passed in all_passed.items():
        boxes, shape, here = layout.boxes(rank), tuple(passed.shape), layout.local_shape(rank)
        if corners := passed.bounds:
            bounds = Box(*map(tuple, corners))
            if boxes != (bounds,) and (bounds.numel or any(box.numel for box in boxes)):
                misplaced.append(f"  rank {rank}: expected {' '.join(map(str, boxes)) or 'nothing'}, got {bounds}")
        # A rank that holds nothing may pass any empty tensor.
        if shape != here and (0 not in shape or layout.local_numel(rank) or (boxes and passed.bounds is None)):
            misshapen.append(f"  rank {rank}: expected {here}, got {shape}")
    if misplaced:
        raise error(
            f"from_local: the shards do not have the offsets that they have in {expected}:\n"
            + "\n".join(misplaced)
            + f"\n  Fix: give offsets in the global tensor, {otherwise}; for several boxes on a rank use "
            f"init_from_local_shards()."
        )
    if misshapen:
        raise error(
            f"from_local: the local tensors do not form {expected}:\n"
            + "\n".join(misshapen)
            + f"\n  Fix: {fix}, {otherwise}."
        )


def layout_of_local_shapes(
    mesh: Mesh, placements: Sequence[Placement], shapes: dict[int, tuple[int, ...]], shape: Sequence[int] | None = None
) -> Layout:
    """The layout of local tensors of these shapes, by rank: a Shard without sizes gets the local sizes.

    Raises:
        LayoutError, MismatchError: there is none. The caller checks whether replicas have equal shapes.
    """
    if any(isinstance(p, Boxes | OnRanks) for p in placements):
        if shape is None and not any(isinstance(p, Boxes) for p in placements):
            shape = next((s for rank, s in shapes.items() if _is_owner(mesh, placements, rank)), None)
        if shape is None:
            raise LayoutError(
                f"from_local: {placements_text(mesh, placements)} needs the global shape. Fix: pass shape=."
            )
        return Layout(mesh, placements, shape)
    if len({len(s) for s in shapes.values()}) > 1:
        raise MismatchError(
            f"from_local: local tensors have different numbers of dims: {shapes}. "
            f"Fix: the dims of the global tensor on each rank, also for an empty shard, such as torch.empty(0, 4)."
        )
    global_shape = list(next(iter(shapes.values())))
    axes_of_dim: dict[int, list[int]] = {}
    for axis, p in enumerate(placements):
        if isinstance(p, Shard):
            if not -len(global_shape) <= p.dim < len(global_shape):
                raise LayoutError(
                    f"from_local: {p} shards dim {p.dim}, but the local tensors have {len(global_shape)} dims. "
                    f"Fix: Shard one of these dims; tensors without dims are Replicate() or Partial()."
                )
            axes_of_dim.setdefault(p.dim % len(global_shape), []).append(axis)
    found = list(placements)
    for dim, axes in axes_of_dim.items():
        first_replicas = {rank: s[dim] for rank, s in shapes.items() if _is_first_replica(mesh, axes, rank)}
        global_shape[dim] = sum(first_replicas.values())
        for axis, sizes in sizes_by_axis(mesh, axes, tuple(range(mesh.ndim)), first_replicas).items():
            if not isinstance(p := placements[axis], Shard) or p.sizes is None:
                found[axis] = Shard(dim, sizes)
    if shape is not None and tuple(shape) != tuple(global_shape):
        raise MismatchError(
            f"from_local: the local tensors form a tensor of shape {tuple(global_shape)} under "
            f"{placements_text(mesh, placements)}, but the global shape was given as {tuple(shape)}. "
            f"Local shapes: {shapes}. Fix: leave shape out, or pass local tensors that make it."
        )
    return Layout(mesh, found, global_shape)


def _is_owner(mesh: Mesh, placements: Sequence[Placement], rank: int) -> bool:
    """Whether every OnRanks placement names the position of `rank`."""
    here = mesh.coordinate(rank)
    return here is not None and all(
        not isinstance(p, OnRanks) or p.position == position for p, position in zip(placements, here, strict=True)
    )


def _is_first_replica(mesh: Mesh, axes: Sequence[int], rank: int) -> bool:
    """Whether `rank` is the first one along all axes but `axes`."""
    here = mesh.coordinate(rank)
    return here is not None and not any(position for axis, position in enumerate(here) if axis not in axes)


@checked
def distribute_tensor(
    tensor: Tensor | TorchDTensor,
    device_mesh: Mesh | DeviceMesh | None = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
    shard_order: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor with the values of a plain tensor.

    Args:
        tensor: the global tensor; every rank passes one of equal shape and dtype. A DTensor, ours or torch's, is
            redistributed, and keeps what the other arguments omit; gradients flow back. A leaf gives a leaf: the result
            requires grad if `tensor` does, but is not connected to it. Its values move to the device type of the mesh.
        device_mesh: a `Mesh` or torch's `DeviceMesh`; None is one axis of all ranks.
        placements: one per mesh axis, in a sequence or by axis name; None replicates.
        src_data_rank: position in the mesh (in its row-major order) of the rank whose values are used: each rank
            receives its local shard from there. None takes every rank's own values and sends nothing; they must be
            equal.
        shard_order: which axis shards first where several shard one dim.

    Raises:
        MismatchError: shapes, dtypes or placements differ between ranks.
    """
    refuse_compilation()
    if is_torch_dtensor(tensor):
        tensor = DTensor.from_torch_dtensor(tensor)
    if isinstance(tensor, DTensor):
        return tensor.redistribute(device_mesh, placements, shard_order=shard_order)
    assert isinstance(tensor, Tensor)
    tensor = arrived(tensor)
    check_dense(tensor, "distribute_tensor")
    check_untransformed(tensor, "distribute_tensor")
    mesh = mesh_for(tensor, device_mesh)
    layout = Layout(mesh, as_placements(mesh, placements), tensor.shape, shard_order)
    ranks, rank = tuple(sorted(mesh.ranks)), collectives.rank()
    if rank not in ranks:
        return tag(_on_mesh_device(tensor.new_empty(layout.local_shape(rank)), mesh), layout)
    facts = {
        "layout": repr(layout),
        "dtype": str(tensor.dtype),
        "on the meta device": tensor.is_meta,
        "requires_grad": tensor.requires_grad,
        "src_data_rank": src_data_rank,
    }
    fix = "pass the same shape, dtype, kind of device, requires_grad, mesh and placements on every rank."
    collectives.agree("the tensor to distribute", facts, ranks, fix)
    if src_data_rank is None:
        collectives.expect_equal(tensor, ranks, "distribute_tensor(src_data_rank=None): the tensor")
    with torch.no_grad():
        if tensor.is_meta:  # it has no values to send
            local = tensor.new_empty(layout.local_shape(rank))
        else:
            local = local_shard_of(tensor.detach().contiguous(), layout, src_data_rank)
    result = tag(local, layout)
    if isinstance(tensor, torch.nn.Parameter):
        return as_parameter(result, tensor)  # type: ignore[return-value]
    return result.requires_grad_(tensor.requires_grad)


def local_shard_of(tensor: Tensor, layout: Layout, src_data_rank: int | None) -> Tensor:
    """A copy of this rank's shard of `tensor`: a slice of its own, or received from the source rank."""
    mesh = layout.mesh
    if src_data_rank is None or mesh.size() == 1:
        local = _on_mesh_device(redistribute_local(tensor, layout.replicated(), layout), mesh)
        return local.clone() if local is tensor else local
    src_data_rank = as_integer(src_data_rank, "src_data_rank", LayoutError, "a position in the mesh, such as 0")
    if not 0 <= src_data_rank < mesh.size():
        raise LayoutError(
            f"src_data_rank is a position in {mesh}, 0 to {mesh.size() - 1}, got {src_data_rank}. "
            f"Fix: one of these, or None if every rank has the values."
        )
    return receive_local_shard(mesh.ranks[src_data_rank], tensor, layout)


def receive_local_shard(source: int, tensor: Tensor, layout: Layout) -> Tensor:
    """A copy of this rank's shard of the tensor of rank `source`; on other ranks `tensor` needs no values."""
    full, rank = layout.gathered_on(source), collectives.rank()
    if rank == source:
        tensor = _on_mesh_device(tensor, layout.mesh)
    else:
        tensor = tensor.new_empty(full.local_shape(rank), device=layout.mesh.device_type)
    local = redistribute_local(tensor, full, layout)
    return local.clone() if local is tensor else local


# ---- redistributions that are asynchronous, or whose gradient has a dtype of its own ------------------------------

_data: Any = torch._C.TensorBase.data


class _Pending:
    """A running redistribution. A call with its `DTensor` waits and returns the layout."""

    def __init__(self, target: Layout, finish: Wait) -> None:
        self._target, self._finish = target, finish
        self._waiting = Lock()  # several threads may use the tensor

    def __call__(self, x: DTensor) -> Layout:
        own = vars(x)
        with self._waiting:
            if "_layout" not in own:  # else another thread waited
                layout, local = collectives.owner().layout(self._target), self._finish()
                with DisableTorchFunctionSubclass():
                    _data.__set__(x, local)
                own["_layout"] = layout  # first: other threads do not take the lock any more once it is there
                del own["_settle"]
        return own["_layout"]  # type: ignore[no-any-return]


class _Redistribute(TensorFunction):
    """A redistribution whose gradient is sent in its own dtype, and which may be asynchronous."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, src: Layout, dst: Layout, dtype: torch.dtype, later: list[Wait] | None
    ) -> Tensor:
        ctx.src, ctx.dst, ctx.dtype = src, dst, dtype
        if later is not None:
            later.append(start_redistribute(local, src, dst))
            return local.new_empty(dst.local_shape(collectives.rank()))
        out = redistribute_local(local, src, dst)
        return out.view_as(out) if out is local else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = redistribute_local(grads[0].to(ctx.dtype), ctx.dst.dual(), ctx.src.dual(), EXPLICIT.for_backward())
        return back.to(grads[0].dtype), None, None, None, None


def async_redistribute(x: DTensor, target: Layout, backward_dtype: torch.dtype, async_op: bool) -> DTensor:
    """`x` in another layout; its gradient is converted to `backward_dtype` before it is redistributed back.

    Gradients of averages, maxima, minima and products are more than the dual redistribution: these are reduced before,
    or made after.
    """
    check_owners("redistribute", (x._layout,))
    between = _without_others(target)
    if x.requires_grad and torch.is_grad_enabled() and (x._layout != _without_others(x._layout) or target != between):
        reduced = to_layout(x, _without_others(x._layout))
        return to_layout(async_redistribute(reduced, between, backward_dtype, async_op), target)
    later: list[Wait] | None = [] if async_op else None
    with DisableTorchFunctionSubclass():
        out: Any = _Redistribute.apply(plain(x), x._layout, target, backward_dtype, later)
        if later is None:
            return tag(out, target)
        out.__class__ = DTensor
        out._settle = _Pending(target, *later)
        return out  # type: ignore[no-any-return]


def _without_others(layout: Layout) -> Layout:
    """`layout` with Replicate for Partial averages, maxima, minima and products."""
    return layout.replace([REPLICATE if isinstance(p, Partial) and p != PARTIAL else p for p in layout.placements])
