"""Between local tensors and distributed ones: `from_local`, `to_local`, `distribute_tensor`."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import collectives
from shardwise.errors import LayoutError, MismatchError
from shardwise.layout import (
    Box,
    Boxes,
    Layout,
    Mesh,
    OnRanks,
    Placement,
    Placements,
    Shard,
    as_placements,
    contiguous_strides,
    placements_text,
)
from shardwise.redistribute.run_plan import redistribute_local
from shardwise.tensor.autograd.gradients import FromPlain, ToPlain
from shardwise.tensor.dtensor import DTensor, Tiling, default_mesh, plain, tag
from shardwise.tensor.handlers.copies import track


def to_local(x: DTensor, grad_placements: Placements | None) -> Tensor:
    layout = x._layout
    with DisableTorchFunctionSubclass():
        local = plain(x)
        if not local.requires_grad:
            return local
        if not torch.is_grad_enabled():
            return local.detach()
        grad_layout = layout.reduced() if grad_placements is None else layout.replace(grad_placements)
        return ToPlain.apply(local, layout, grad_layout)


def wrap(local: Tensor, layout: Layout, grad_placements: Placements | None = None) -> DTensor:
    """A local tensor that is known to fit `layout`, sharing its storage; gradients flow back to it."""
    with DisableTorchFunctionSubclass():
        if not (torch.is_grad_enabled() and local.requires_grad):
            return track(tag(local.detach(), layout))
        grad_layout = layout.reduced() if grad_placements is None else layout.replace(grad_placements)
        return track(tag(FromPlain.apply(local, layout, grad_layout), layout))


def from_local(
    local: Tensor,
    device_mesh: Any,
    placements: Placements | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Placements | None,
) -> DTensor:
    if isinstance(local, DTensor):
        raise LayoutError("from_local takes a plain local tensor, got a DTensor. Fix: use redistribute().")
    tiling: Tiling | None = getattr(local, "tiling", None)
    if tiling is not None:
        local = plain(local)
    mesh = default_mesh(local.device.type) if device_mesh is None else collectives.as_mesh(device_mesh)
    wanted = as_placements(mesh, placements)
    if shape is None and stride is not None:
        raise LayoutError("from_local: a global stride needs the global shape too.")
    if mesh.coordinate(collectives.rank()) is None:
        layout = _layout_of_parts(None, mesh, wanted, shape) if shape is not None else None
        if layout is None:
            raise LayoutError(f"from_local: rank {collectives.rank()} is outside {mesh}, so it needs the global shape.")
        nothing = local.reshape(-1)[:0].view(layout.local_shape(collectives.rank()))  # connected: backward meets peers
        return wrap(nothing, layout, grad_placements)
    if run_check:
        layout, dtype = _agreed_layout(local, tiling, mesh, wanted, shape)
        local = local.to(mesh.device_type, dtype)  # only what has no element may differ
    else:
        layout = _layout_of_parts(local, mesh, wanted, shape, tiling)
    if not local.numel():
        local = local.reshape(layout.local_shape(collectives.rank()))
    if stride is not None and tuple(stride) != contiguous_strides(layout.shape):
        raise LayoutError(
            f"from_local: only row-major global strides are known, {contiguous_strides(layout.shape)}, "
            f"got {tuple(stride)}."
        )
    result = wrap(local, layout, grad_placements)
    if tiling is not None and tiling.boxes:
        result._tiling = tiling
    return result


def _layout_of_parts(
    local: Tensor | None,
    mesh: Mesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    tiling: Tiling | None = None,
) -> Layout:
    """The layout without an exchange: from the global shape, or as even shards."""
    if shape is None:
        assert local is not None
        if any(isinstance(p, Boxes | OnRanks) or (isinstance(p, Shard) and p.sizes) for p in placements):
            raise LayoutError(
                f"from_local(run_check=False): the global shape does not follow from one local tensor under "
                f"{placements_text(mesh, placements)}. Fix: pass shape=, or leave run_check on."
            )
        global_shape = list(local.shape)
        for axis, p in enumerate(placements):
            if isinstance(p, Shard):
                global_shape[p.dim] *= mesh.shape[axis]
        shape = global_shape
    layout = Layout(mesh, placements, shape)
    rank = collectives.rank()
    if tiling is not None and tiling.boxes and not _offsets_match(layout, rank, tiling.bounds):
        raise LayoutError(
            f"from_local: under {placements_text(mesh, placements)} the shards have other offsets:\n"
            f"{_misplaced(layout, rank, tiling.bounds)}\n  {_OFFSETS_FIX}, or leave run_check on."
        )
    if local is not None and not _fits(tuple(local.shape), layout, rank, tiling is not None):
        raise LayoutError(
            f"from_local: under {placements_text(mesh, placements)} rank {rank} holds {layout.local_shape(rank)} of "
            f"{tuple(shape)}, got a local tensor of shape {tuple(local.shape)}. "
            f"Fix: give the sizes, Shard(dim, sizes=...), or leave run_check on."
        )
    return layout


def _fits(shape: tuple[int, ...], layout: Layout, rank: int, wrapped: bool) -> bool:
    """Whether `shape` is the local shape of `rank`. A rank that holds nothing may pass any empty tensor."""
    nothing = not prod(shape) and not layout.local_numel(rank) and (wrapped or not layout.boxes(rank))
    return nothing or shape == layout.local_shape(rank)


_OFFSETS_FIX = "Fix: give offsets in the global tensor; for several boxes on a rank use init_from_local_shards()"


def _offsets_match(layout: Layout, rank: int, bounds: Box) -> bool:
    boxes = layout.boxes(rank)
    return boxes == (bounds,) or not (bounds.numel or any(box.numel for box in boxes))


def _misplaced(layout: Layout, rank: int, bounds: Box) -> str:
    return f"  rank {rank}: expected {' '.join(map(str, layout.boxes(rank))) or 'nothing'}, got {bounds}"


def _agreed_layout(
    local: Tensor,
    tiling: Tiling | None,
    mesh: Mesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
) -> tuple[Layout, torch.dtype]:
    """The layout from the local shapes of all ranks, which they exchange.

    Also the dtype, which a rank without shards cannot know.
    """
    said: dict[str, Any] = {
        "shape": list(local.shape),
        "dtype": str(local.dtype),
        "mesh": str(mesh),
        "placements": [str(p) for p in placements],
        "global shape": None if shape is None else list(shape),
    }
    ranks = tuple(sorted(mesh.ranks))
    if tiling is not None:
        said["bounds"] = list(tiling.bounds) if tiling.boxes else None
    every = dict(zip(ranks, collectives.gather_json(said, ranks), strict=True))
    nobody = [rank for rank, answer in every.items() if answer.get("bounds", ()) is None]
    for field in ("dtype", "mesh", "placements", "global shape"):
        _all_alike(field, {r: answer[field] for r, answer in every.items() if field != "dtype" or r not in nobody})
    shapes = {rank: tuple(answer["shape"]) for rank, answer in every.items()}
    _guess_empty(shapes, nobody, placements)
    layout = fitted(mesh, placements, shapes, shape)
    bounds = {r: Box(*map(tuple, answer["bounds"])) for r, answer in every.items() if answer.get("bounds")}
    misplaced = [_misplaced(layout, r, box) for r, box in bounds.items() if not _offsets_match(layout, r, box)]
    if misplaced:
        raise MismatchError(
            f"from_local: under {placements_text(mesh, placements)} of shape {layout.shape} the shards "
            f"have other offsets:\n" + "\n".join(misplaced) + f"\n  {_OFFSETS_FIX}."
        )
    wrong = {r: s for r, s in shapes.items() if not _fits(s, layout, r, "bounds" in every[r])}
    if wrong:
        lines = [f"  rank {r}: expected {layout.local_shape(r)}, got {s}" for r, s in wrong.items()]
        raise MismatchError(
            f"from_local: the local tensors do not form a tensor of shape {layout.shape} under "
            f"{placements_text(mesh, placements)}:\n"
            + "\n".join(lines)
            + "\n  Fix: pass local tensors of the expected shapes, or other placements."
        )
    who = next((r for r in ranks if r not in nobody), ranks[0])
    return layout, getattr(torch, every[who]["dtype"].removeprefix("torch."))


def _guess_empty(shapes: dict[int, tuple[int, ...]], nobody: Sequence[int], placements: Sequence[Placement]) -> None:
    """Give a rank without shards the local shape of the others, with length 0 in the one sharded dim."""
    sharded = [p.dim for p in placements if isinstance(p, Shard)]
    other = next((shape for rank, shape in shapes.items() if rank not in nobody), None)
    for rank in nobody:
        if len(sharded) == 1 and other is not None and -len(other) <= sharded[0] < len(other):
            shapes[rank] = tuple(0 if d == sharded[0] % len(other) else n for d, n in enumerate(other))


def _all_alike(field: str, answers: dict[int, Any]) -> None:
    if len({repr(a) for a in answers.values()}) > 1:
        lines = "\n".join(f"  rank {rank}: {answer}" for rank, answer in answers.items())
        raise MismatchError(f"from_local: ranks disagree on the {field}:\n{lines}\n  Fix: pass the same on every rank.")


def fitted(
    mesh: Mesh,
    placements: Sequence[Placement],
    shapes: dict[int, tuple[int, ...]],
    shape: Sequence[int] | None,
) -> Layout:
    """Give every Shard without sizes the sizes of the local tensors."""
    fixed = any(isinstance(p, Boxes | OnRanks) for p in placements)
    if fixed and shape is None:
        owners = [s for r, s in shapes.items() if not _holds_nothing(mesh, placements, r)]
        shape = (
            owners[0]
            if owners and all(isinstance(p, OnRanks) or not isinstance(p, Boxes) for p in placements)
            else None
        )
        if shape is None:
            raise LayoutError(
                f"from_local: {placements_text(mesh, placements)} needs the global shape. Fix: pass shape=."
            )
    if fixed:
        return Layout(mesh, placements, shape or ())
    if len({len(s) for s in shapes.values()}) > 1:
        raise MismatchError(f"from_local: local tensors have different numbers of dims: {shapes}.")
    global_shape = list(next(iter(shapes.values())))
    dims: dict[int, list[int]] = {}
    for axis, p in enumerate(placements):
        if isinstance(p, Shard):
            if not global_shape or not -len(global_shape) <= p.dim < len(global_shape):
                raise LayoutError(
                    f"from_local: {p} shards dim {p.dim}, but the local tensors have {len(global_shape)} dims."
                )
            dims.setdefault(p.dim % len(global_shape), []).append(axis)
    result = list(placements)
    for dim, axes in dims.items():
        global_shape[dim] = _fit_dim(mesh, result, shapes, dim, axes)
    if shape is not None and tuple(shape) != tuple(global_shape):
        raise MismatchError(
            f"from_local: the local tensors form a tensor of shape {tuple(global_shape)} under "
            f"{placements_text(mesh, placements)}, but the global shape was given as {tuple(shape)}. "
            f"Local shapes: {shapes}."
        )
    return Layout(mesh, result, global_shape)


def _holds_nothing(mesh: Mesh, placements: Sequence[Placement], rank: int) -> bool:
    here = mesh.coordinate(rank)
    assert here is not None
    return any(isinstance(p, OnRanks) and p.position != here[a] for a, p in enumerate(placements))


def _fit_dim(
    mesh: Mesh, placements: list[Placement], shapes: dict[int, tuple[int, ...]], dim: int, axes: Sequence[int]
) -> int:
    """Fill in the sizes by which `axes`, outer first, shard `dim`; return its global length."""

    def length(fixed: dict[int, int], rest: Sequence[int]) -> int:
        """Of the shard at positions `fixed`, from the local shapes of the ranks that hold parts of it."""
        if not rest:
            at = tuple(fixed.get(axis, 0) for axis in range(mesh.ndim))
            return shapes[mesh.rank_at(at)][dim]
        return sum(length({**fixed, rest[0]: i}, rest[1:]) for i in range(mesh.shape[rest[0]]))

    for depth, axis in enumerate(axes):
        outer: list[dict[int, int]] = [{}]
        for other in axes[:depth]:
            outer = [{**fixed, other: i} for fixed in outer for i in range(mesh.shape[other])]
        rows = [
            tuple(length({**fixed, axis: i}, axes[depth + 1 :]) for i in range(mesh.shape[axis])) for fixed in outer
        ]
        given = placements[axis]
        assert isinstance(given, Shard)
        if given.sizes is None:
            placements[axis] = Shard(dim, rows if depth else rows[0])
    return length({}, axes)


def distribute_tensor(
    tensor: Tensor,
    device_mesh: Any = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
    shard_order: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor with the values of a plain tensor.

    Args:
        tensor: the global tensor; every rank passes one of the same shape and dtype. A leaf gives a leaf: the
            result requires grad if `tensor` does, but is not connected to it.
        device_mesh: a `Mesh` or torch's `DeviceMesh`; None is one axis of all ranks.
        placements: one per mesh axis, in a sequence or by axis name; None replicates.
        src_data_rank: position in the mesh (in its row-major order) of the rank whose values count: each
            rank receives its own part from there. None takes every rank's own values and sends nothing;
            they must be equal.
        shard_order: which axis divides first where several shard one dim.

    Raises:
        MismatchError: shapes, dtypes or placements differ between ranks.
    """
    if isinstance(tensor, DTensor):
        return tensor.redistribute(device_mesh, placements, shard_order=shard_order)
    mesh = default_mesh(tensor.device.type) if device_mesh is None else collectives.as_mesh(device_mesh)
    layout = Layout(mesh, as_placements(mesh, placements), tensor.shape, shard_order)
    ranks = tuple(sorted(mesh.ranks))
    rank = collectives.rank()
    if rank not in ranks:
        return tag(tensor.new_empty(layout.local_shape(rank)), layout)
    said = {"layout": repr(layout), "dtype": str(tensor.dtype), "src_data_rank": src_data_rank}
    collectives.agree(
        "the tensor to distribute", said, ranks, "pass the same shape, dtype, mesh and placements on every rank."
    )
    with torch.no_grad():
        local = scattered(tensor.detach(), layout, src_data_rank)
    result = tag(local, layout)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(result, tensor.requires_grad)  # type: ignore[return-value]
    return result.requires_grad_(tensor.requires_grad)  # type: ignore[return-value]


def scattered(tensor: Tensor, layout: Layout, src_data_rank: int | None) -> Tensor:
    """The local shard of `tensor`, a copy: sliced from this rank's own, or sent by the source rank."""
    mesh = layout.mesh
    if src_data_rank is None or mesh.size() == 1:
        local = redistribute_local(tensor, layout.replicated(), layout)
        return local.clone() if local is tensor else local
    if not 0 <= src_data_rank < mesh.size():
        raise LayoutError(f"src_data_rank is a position in {mesh}, 0 to {mesh.size() - 1}, got {src_data_rank}.")
    return sent_by(mesh.ranks[src_data_rank], tensor, layout)


def sent_by(source: int, tensor: Tensor, layout: Layout) -> Tensor:
    """This rank's part of the `tensor` of the rank `source`, a copy; nobody else's needs values."""
    full, rank = layout.gathered_on(source), collectives.rank()
    if rank != source:
        tensor = tensor.new_empty(full.local_shape(rank), device=layout.mesh.device_type)
    local = redistribute_local(tensor, full, layout)
    return local.clone() if local is tensor else local
