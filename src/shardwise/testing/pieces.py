"""What a rank holds, cut with plain torch: the reference that layouts and moves are compared with."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product

import torch
from torch import Tensor

from shardwise.layout import Box, Boxes, Layout, Mesh, OnRanks, Partial, Placement, Shard

Parts = Mapping[tuple[int, ...], Tensor]  # where a rank stands on the Partial axes -> its contribution

REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stack: stack.sum(0, dtype=stack.dtype),
    "avg": lambda stack: stack.mean(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "product": lambda stack: stack.prod(0, dtype=stack.dtype),
}


def numbered(shape: Sequence[int]) -> Tensor:
    """A tensor whose elements are all different."""
    return torch.arange(torch.Size(shape).numel()).view(tuple(shape))


def cut_out(full: Tensor, box: Box) -> Tensor:
    return full[tuple(slice(start, start + size) for start, size in zip(*box, strict=True))]


@cache
def where(mesh: Mesh, rank: int) -> tuple[int, ...] | None:
    """The position of `rank` on each axis; None outside the mesh."""
    found: list[list[int]] = (torch.tensor(mesh.ranks).view(mesh.shape) == rank).nonzero().tolist()
    return tuple(found[0]) if found else None


def pieces_of(
    full: Tensor, mesh: Mesh, placements: Sequence[Placement], rank: int, order: Sequence[int] | None = None
) -> list[Tensor]:
    """The pieces of `full` that `rank` holds, one axis cutting after the other."""
    here = where(mesh, rank)
    if here is None:
        return []
    outer = [0] * max(full.ndim, 1)  # which of the pieces that the axes before made of a dim
    piece = full
    for axis in range(mesh.ndim) if order is None else order:
        placement, position, positions = placements[axis], here[axis], mesh.shape[axis]
        match placement:
            case OnRanks():
                if position != placement.position:
                    return []
            case Boxes():
                return [cut_out(full, box) for box in placement.boxes[position]]
            case Shard():
                dim = placement.dim % full.ndim
                piece = _cut(piece, dim, placement, positions, outer[dim])[position]
                outer[dim] = outer[dim] * positions + position
    return [piece]


def _cut(piece: Tensor, dim: int, placement: Shard, positions: int, outer: int) -> list[Tensor]:
    if placement.sizes is None:
        chunks = list(piece.chunk(positions, dim))
        return chunks + [piece.narrow(dim, 0, 0)] * (positions - len(chunks))
    row = placement.sizes[outer] if isinstance(placement.sizes[0], tuple) else placement.sizes
    assert isinstance(row, tuple)
    return list(piece.split([int(size) for size in row], dim))


def as_local(pieces: Sequence[Tensor], full: Tensor) -> Tensor:
    """How a rank stores its pieces: one as it is, several flat one after the other, none as no rows."""
    if len(pieces) == 1:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    if pieces:
        return torch.cat([piece.reshape(-1) for piece in pieces])
    return full.new_empty((0, *full.shape[1:]))


def local_of(full: Tensor, layout: Layout, rank: int) -> Tensor:
    """A copy of what `rank` stores of `full`."""
    return as_local(pieces_of(full, layout.mesh, layout.placements, rank, layout.shard_order), full)


# ---- tensors with Partial placements: one full-sized contribution for each position on the Partial axes ---


def partial_axes(layout: Layout) -> list[int]:
    return [axis for axis, p in enumerate(layout.placements) if isinstance(p, Partial)]


def contribution(layout: Layout, rank: int) -> tuple[int, ...]:
    """Which contribution `rank` holds a part of; ranks outside the mesh get the first, to hold nothing of."""
    here = where(layout.mesh, rank) or (0,) * layout.mesh.ndim
    return tuple(here[axis] for axis in partial_axes(layout))


def contributions(layout: Layout) -> list[tuple[int, ...]]:
    return list(product(*(range(layout.mesh.shape[axis]) for axis in partial_axes(layout))))


def value_of(parts: Parts, layout: Layout) -> Tensor:
    """The tensor that the contributions stand for."""
    for axis in reversed(partial_axes(layout)):
        placement = layout.placements[axis]
        assert isinstance(placement, Partial)
        reduce = REDUCE[placement.reduce_op]
        count = layout.mesh.shape[axis]
        parts = {
            key: reduce(torch.stack([parts[(*key, i)] for i in range(count)])) for key in {key[:-1] for key in parts}
        }
    return parts[()]


def summands(total: Tensor, layout: Layout, generator: torch.Generator) -> dict[tuple[int, ...], Tensor]:
    """Contributions to Partial(sum) axes of `layout` that add up to `total`."""
    keys = contributions(layout)
    parts = {key: small_integers(total.shape, generator).to(total.dtype) for key in keys[1:]}
    rest = total.clone()
    for part in parts.values():
        rest -= part
    return {**parts, keys[0]: rest}


def small_integers(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Doubles from -2 to 2: sums and products of them are exact, and there are many ties and zeros."""
    return torch.randint(-2, 3, tuple(shape), generator=generator).double()
