"""How tensors are packed into one message, and unpacked: what is for each rank of a group, side by side.

    Shards     a tensor that is divided along one dim, a shard for each rank
    Copies     a tensor that is sent to every rank; of what is received, the sum
    Regions    any regions of several tensors

A list of regions is as long as there are ranks, with a slice for each dim, so steps along mesh axes have none.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise._layout import Box
from shardwise._layout.boxes import BoxIndex
from shardwise._layout.dim_shards import sizes_between

# A tensor in another shape. Not by `view`: autograd refuses in-place ops on a view that comes out of a Function.
as_result: Callable[..., Tensor] = torch.ops.aten._unsafe_view.default


def packed(tensors: Sequence[Tensor], out: Callable[[int], Tensor] | None = None) -> Tensor:
    """The elements of tensors, one after the other, in memory that `out` gives for so many."""
    flat = [x if x.ndim == 1 else x.reshape(-1) for x in tensors]
    if len(flat) == 1:
        return flat[0]
    return torch.cat(flat, out=None if out is None else out(sum(x.numel() for x in flat)))


def unpacked(message: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors of these shapes whose elements are in a message, and in its memory. A change of one is none of it."""
    return [as_result(part, shape) for part, shape in zip(message.split(list(map(prod, shapes))), shapes, strict=True)]


def total(parts: Sequence[Tensor]) -> Tensor:
    """The sum of two or more tensors in their order, so that it has the same bits on all replicas."""
    first, second, *others = parts
    if first.dtype == torch.bool:
        return torch.stack(list(parts)).any(0)
    out = first + second
    for part in others:
        out += part
    return out


def identity(reduce_op: str, dtype: torch.dtype) -> float:
    """The identity of `reduce_op`: 0 of a sum, -inf of a maximum."""
    if reduce_op in ("sum", "avg"):
        return 0
    if reduce_op == "product":
        return 1
    if dtype == torch.bool:
        return reduce_op == "min"
    if dtype.is_floating_point:
        return float("-inf") if reduce_op == "max" else float("inf")
    return torch.iinfo(dtype).min if reduce_op == "max" else torch.iinfo(dtype).max


# ---- one part for each rank ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shards:
    """A tensor of this shape, and a shard of it for each rank: they divide one dim."""

    shape: tuple[int, ...]
    dim: int
    starts: "array[int]"  # of the shards from the first to the last along the dim; see `DimShards`
    order: tuple[int, ...] | None  # for each rank, which of them it has; None: these rise

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the shards along the dim."""
        return sizes_between(self.starts)

    @property
    def counts(self) -> tuple[int, ...]:
        """The elements of each rank's shard."""
        width, sizes = prod(self.shape[: self.dim]) * prod(self.shape[self.dim + 1 :]), self.sizes
        numel = {size: width * size for size in set(sizes)}  # few objects for many ranks
        in_order = sizes if self.order is None else map(sizes.__getitem__, self.order)
        return tuple(map(numel.__getitem__, in_order))

    @property
    def in_order(self) -> bool:
        """Whether the shards of the ranks, one after the other, are the elements of the tensor in their order."""
        return self.order is None and (not prod(self.shape) or prod(self.shape[: self.dim]) == 1)

    def split(self, x: Tensor) -> list[Tensor]:
        """The shard of each rank, as 1-D tensors."""
        parts: Sequence[Tensor]
        if prod(self.shape[: self.dim]) == 1:  # the shards are one after the other
            width = prod(self.shape[self.dim + 1 :])
            parts = x.reshape(-1).split([width * n for n in self.sizes])
        else:
            parts = [part.reshape(-1) for part in x.split(self.sizes, self.dim)]
        return list(parts) if self.order is None else [parts[position] for position in self.order]

    def join(self, parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """The tensor, in `out` if it is given, of the shard of each rank, as 1-D tensors."""
        if self.order is not None:
            by_position = dict(zip(self.order, parts, strict=True))
            parts = [by_position[position] for position in range(len(parts))]
        before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
        if prod(before) == 1:  # the shards are one after the other
            if out is None:
                return as_result(torch.cat(list(parts)), self.shape)
            torch.cat(list(parts), out=out.view(-1))
            return out
        views = [part.view(*before, n, *after) for part, n in zip(parts, self.sizes, strict=True)]
        return torch.cat(views, self.dim) if out is None else torch.cat(views, self.dim, out=out)

    def pack(self, x: Tensor) -> Tensor:
        sizes = self.sizes
        if self.order is None and len(set(sizes)) == 1:  # one copy; `split` copies each shard first
            return torch.stack(x.split(sizes, self.dim)).flatten()
        return torch.cat(self.split(x))

    def unpack(self, message: Tensor) -> Tensor:
        return self.join(message.split(self.counts))


def join_blocks(blocks: Sequence[Tensor], shape: Sequence[int], out: Tensor | None) -> Tensor:
    """A tensor whose shards, one after the other, are the rows of these matrices; in `out` if it is given."""
    flat = blocks[0].new_empty(prod(shape)) if out is None else out.view(-1)
    for part, block in zip(flat.split([block.numel() for block in blocks]), blocks, strict=True):
        if block.numel():
            part.view(block.shape).copy_(block)
    return as_result(flat, shape) if out is None else out


def split_blocks(x: Tensor, blocks: Sequence[Tensor]) -> None:
    """Copy the shards of a tensor, which are one after the other, into the rows of these matrices."""
    for part, block in zip(x.reshape(-1).split([block.numel() for block in blocks]), blocks, strict=True):
        if block.numel():
            block.copy_(part.view(block.shape))


@dataclass(frozen=True)
class Copies:
    """A tensor of this shape, and all of it for each rank. What comes from them is added."""

    shape: tuple[int, ...]
    count: int  # the number of ranks
    order: tuple[int, ...] | None = None  # of the ranks in the mesh, in which all replicas add; None: they rise

    @property
    def counts(self) -> tuple[int, ...]:
        return (prod(self.shape),) * self.count

    @property
    def in_order(self) -> bool:
        return not prod(self.shape)

    def pack(self, x: Tensor) -> Tensor:
        return torch.cat([x.reshape(-1)] * self.count)  # `repeat` takes several times as long

    def unpack(self, message: Tensor) -> Tensor:
        parts = message.view(self.count, *self.shape).unbind()
        return total(parts if self.order is None else [parts[index] for index in self.order])


# ---- any regions ---------------------------------------------------------------------------------------------


class Region(NamedTuple):
    """A region of one of several tensors."""

    tensor: int
    slices: tuple[slice, ...]
    sizes: tuple[int, ...]


def regions_in(outer: Sequence[Box], parts: Sequence[tuple[int, Box]]) -> list[tuple[int, Region]]:
    """Boxes, by peer, as regions of tensors that have the `outer` boxes: each is in one of these."""
    found, index = {}, BoxIndex([[box] for box in outer]) if len(outer) > 1 else None
    for box in dict.fromkeys([box for _, box in parts]):  # one may be sent to thousands of ranks
        at, own = (0, outer[0]) if index is None else next(index.touching(box))
        found[box] = Region(at, box.relative_to(own), box.sizes)
    return [(peer, found[box]) for peer, box in parts]


@dataclass(frozen=True)
class Regions:
    """Regions of several tensors, in the order of the ranks to which they are sent or that send them.

    Attributes:
        shapes: of the tensors.
        elements: of which ranks, and how many; of thousands of ranks only few.
        num_ranks: of the group.
        order: in which regions are written, so that sums have the same bits on all replicas.
        first: for each region: it is written over what is there, not added to it.
        fill: the reduction whose identity fills the tensors before; None: those written first are all elements.
    """

    shapes: tuple[tuple[int, ...], ...]
    regions: tuple[Region, ...]
    elements: tuple[tuple[int, int], ...]
    num_ranks: int
    order: tuple[int, ...]
    first: tuple[bool, ...]
    fill: str | None

    @classmethod
    def of(
        cls,
        shapes: Sequence[tuple[int, ...]],
        ranks: tuple[int, ...],
        parts: Iterable[tuple[int, Region]],
        order: Sequence[int] = (),
        first: Sequence[bool] = (),
        fill: str | None = None,
    ) -> "Regions":
        """Regions to or from peers, by peer, which are some of `ranks`; there are no ranks if nothing is sent.

        By default each element is in one region.
        """
        elements: dict[int, int] = {}
        regions = []
        for peer, region in parts:
            regions.append(region)
            index = bisect_left(ranks, peer)
            elements[index] = elements.get(index, 0) + prod(region.sizes)
        order, first = order or range(len(regions)), first or [True] * len(regions)
        return cls(tuple(shapes), tuple(regions), tuple(elements.items()), len(ranks), tuple(order), tuple(first), fill)

    @property
    def counts(self) -> list[int]:
        """The elements of each rank's regions."""
        counts = [0] * self.num_ranks
        for index, count in self.elements:
            counts[index] = count
        return counts

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The regions of these tensors."""
        return [tensors[region.tensor][region.slices] for region in self.regions]

    def pack(self, tensors: Sequence[Tensor], like: Tensor) -> Tensor:
        """The message to all ranks, of the dtype of `like`."""
        return packed(self.parts(tensors)) if self.regions else like.new_empty(0)

    def split(self, message: Tensor) -> list[Tensor]:
        """The regions in a message, each in its shape."""
        found = message.split([prod(region.sizes) for region in self.regions])
        return [part.view(region.sizes) for part, region in zip(found, self.regions, strict=True)]

    @cached_property
    def _in_tensors(self) -> list[list[int]]:
        """The regions of each tensor, in the order in which they are written."""
        found: list[list[int]] = [[] for _ in self.shapes]
        for i in self.order:
            found[self.regions[i].tensor].append(i)
        return found

    def join(self, parts: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """The tensors that have these regions. One that is a region shares its memory."""
        return [self._joined(*each, parts, like) for each in zip(self.shapes, self._in_tensors, strict=True)]

    def _joined(self, shape: tuple[int, ...], order: Sequence[int], parts: Sequence[Tensor], like: Tensor) -> Tensor:
        if order and self.regions[order[0]].sizes == shape and sum(self.first[i] for i in order) == 1:
            found = [parts[i] for i in order]  # each is all of the tensor
            return total(found) if found[1:] else as_result(found[0], shape)
        out = like.new_empty(shape)
        self._write(out, order, parts)
        return out

    def write(self, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Write these regions into the tensors."""
        for out, order in zip(outs, self._in_tensors, strict=True):
            self._write(out, order, parts)

    def _write(self, out: Tensor, order: Sequence[int], parts: Sequence[Tensor]) -> None:
        if self.fill is not None:
            out.fill_(identity(self.fill, out.dtype))
        for i in order:
            region = out[self.regions[i].slices]
            if self.first[i]:
                region.copy_(parts[i])
            elif out.dtype == torch.bool:
                region.logical_or_(parts[i])
            else:
                region.add_(parts[i])
