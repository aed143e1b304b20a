"""Local shards and Partial values of a tensor, computed with plain torch: the reference for layouts and tests."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from math import prod

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Box, Boxes, Layout, Mesh, OnRanks, Partial, Placement, Shard
from shardwise._tensor import tag

SEED = 1234
PartialValues = Mapping[tuple[int, ...], Tensor]  # by position on the Partial axes


def slice_box(full: Tensor, box: Box) -> Tensor:
    return full[tuple(slice(start, start + size) for start, size in zip(*box, strict=True))]


@cache
def mesh_position(mesh: Mesh, rank: int) -> tuple[int, ...] | None:
    """The position of `rank` on each axis; None outside the mesh."""
    found: list[list[int]] = (torch.tensor(mesh.ranks).view(mesh.shape) == rank).nonzero().tolist()
    return tuple(found[0]) if found else None


def local_shards(
    full: Tensor, mesh: Mesh, placements: Sequence[Placement], rank: int, order: Sequence[int] | None = None
) -> list[Tensor]:
    """The shards of `full` on `rank`: each axis of the mesh divides the shard of the axes before."""
    here = mesh_position(mesh, rank)
    if here is None:
        return []
    outer = [0] * max(full.ndim, 1)  # index of each dim's shard after the axes before
    shard = full
    for axis in range(mesh.ndim) if order is None else order:
        placement, position, positions = placements[axis], here[axis], mesh.shape[axis]
        match placement:
            case OnRanks():
                if position != placement.position:
                    return []
            case Boxes():
                return [slice_box(full, box) for box in placement.boxes[position]]
            case Shard():
                dim = placement.dim % full.ndim
                shard = _split(shard, dim, placement, positions, outer[dim])[position]
                outer[dim] = outer[dim] * positions + position
    return [shard]


def _split(x: Tensor, dim: int, placement: Shard, positions: int, outer: int) -> list[Tensor]:
    if placement.sizes is None:
        chunks = list(x.chunk(positions, dim))
        return chunks + [x.narrow(dim, 0, 0)] * (positions - len(chunks))
    sizes = placement.sizes[outer] if isinstance(placement.sizes[0], tuple) else placement.sizes
    assert isinstance(sizes, tuple)
    return list(x.split([int(size) for size in sizes], dim))


def as_local_tensor(shards: Sequence[Tensor], full: Tensor) -> Tensor:
    """A rank's shards as it stores them: one as it is, several flattened and concatenated, none as zero rows."""
    if len(shards) == 1:
        return shards[0].clone(memory_format=torch.contiguous_format)
    return torch.cat([shard.reshape(-1) for shard in shards]) if shards else full.new_empty((0, *full.shape[1:]))


def local_tensor(full: Tensor, layout: Layout, rank: int) -> Tensor:
    """A copy of the local tensor of `full` on `rank`."""
    return as_local_tensor(local_shards(full, layout.mesh, layout.placements, rank, layout.shard_order), full)


def dtensor_from_full(x: Tensor, layout: Layout | None, seed: int = SEED) -> Tensor:
    """`x`, known to all ranks, as a DTensor without communication; a plain copy if `layout` is None."""
    if layout is None:
        return x.clone()
    rank = collectives.rank()
    return tag(local_tensor(partial_values(x, layout, seed)[partial_index(layout, rank)], layout, rank), layout)


def partial_index(layout: Layout, rank: int) -> tuple[int, ...]:
    """The position of `rank` on the Partial axes; outside the mesh the first one, of which the rank holds nothing."""
    here = mesh_position(layout.mesh, rank) or (0,) * layout.mesh.ndim
    return tuple(here[axis] for axis in layout.partial_axes)


def partial_indices(layout: Layout) -> list[tuple[int, ...]]:
    return list(product(*(range(layout.mesh.shape[axis]) for axis in layout.partial_axes)))


def partial_values(x: Tensor, layout: Layout, seed: int = SEED) -> dict[tuple[int, ...], Tensor]:
    """Values on the Partial axes of `layout` that reduce to exactly `x`, in any order; `x` itself without such axes.

    Sums and averages: for each element one position holds twice the value plus noise, another its negative minus the
    noise, the rest 0. Noise is added where few digits keep that exact. Maxima, minima and products: one position holds
    the element, the others a neutral value.
    """
    keys = partial_indices(layout)
    reductions = {p.reduce_op for p in layout.placements if isinstance(p, Partial)}
    if len(keys) == 1:
        return {keys[0]: x}
    generator = torch.Generator().manual_seed(seed)
    roles = torch.rand((len(keys), *x.shape), generator=generator).argsort(0).to(x.device)
    if not reductions <= {"sum", "avg"}:
        finite = x.nan_to_num()
        (reduction,) = reductions
        neutral = {"max": finite - 1 - finite.abs(), "min": finite + 1 + finite.abs(), "product": torch.ones_like(x)}
        return {key: torch.where(role == 0, x, neutral[reduction]) for key, role in zip(keys, roles, strict=True)}
    averaged = (n for n, p in zip(layout.mesh.shape, layout.placements, strict=True) if p == Partial("avg"))
    scale = prod(averaged)
    noise = torch.randint(-3, 4, x.shape, generator=generator).to(x.device, x.dtype)
    noise = torch.where((x.abs() < 16) & ((8 * x).round() == 8 * x) if not x.is_complex() else x == 0, noise, 0)
    safe = (2 * x).isfinite()
    first, second = scale * torch.where(safe, 2 * x + noise, x), scale * torch.where(safe, -x - noise, 0)
    return {
        key: torch.where(role == 0, first, torch.where(role == 1, second, 0))
        for key, role in zip(keys, roles, strict=True)
    }
