"""Where the dims of an operand go in a view: the op runs on a meta tensor whose strides identify its dims.

probe_views(Tensor.transpose, x, (0, 1), {})   of x (4, 6): strides (8, 1) -> (1, 8)
ViewMap(dims=(DimSlice(1, 0, 1, 6), DimSlice(0, 0, 1, 4)), fixed={})
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.layout import Box
from shardwise.rules.row import Args, Kwargs, Meta, Op

LARGEST_STEP = 255  # in an empty dim


class DimSlice(NamedTuple):
    """A dim of a view: `length` elements start, start + step, … of dim `dim` of the operand."""

    dim: int
    start: int
    step: int
    length: int

    def offset_of(self, index: int) -> int:
        """How many elements of the slice come before `index` of the operand's dim."""
        return min(max(0, -((self.start - index) // self.step)), self.length)

    def local(self, own: Box) -> slice:
        """The slice in the local tensor of a rank that holds `own`."""
        first, end = own.offsets[self.dim], own.offsets[self.dim] + own.sizes[self.dim]
        low, high = self.offset_of(first), self.offset_of(end)
        start = self.start + low * self.step - first
        return slice(start, start + (high - low) * self.step, self.step) if low < high else slice(0, 0, self.step)


@dataclass(frozen=True)
class ViewMap:
    """Which elements of the operand a view has."""

    dims: tuple[DimSlice | int, ...]  # one per dim of the view; a number is the length of a new dim
    fixed: dict[int, int]  # dims of the operand that the view lacks, and the index taken of them

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(a if isinstance(a, int) else a.length for a in self.dims)

    def dim_of(self, dim: int) -> int | None:
        """The dim of the view that runs along `dim` of the operand."""
        return next((i for i, a in enumerate(self.dims) if isinstance(a, DimSlice) and a.dim == dim), None)

    def local_index(self, own: Box) -> tuple[Any, ...]:
        """The index by which a rank that holds `own` gets its local shard of the view."""
        index: list[Any] = [at - own.offsets[d] for d, at in sorted(self.fixed.items())]
        for place, along in enumerate(self.dims):
            before = [a.dim for a in self.dims[: place + 1] if isinstance(a, DimSlice)]
            at = place + sum(d < max(before) for d in self.fixed) if before else place
            index.insert(at, None if isinstance(along, int) else along.local(own))
        return tuple(index)


def probe_views(op: Op, x: Meta, args: Args, kwargs: Kwargs) -> tuple[list[ViewMap], bool]:
    """What `op` does to a tensor like `x`, and whether it has several results.

    Raises:
        NotImplementedError: a dim of the result runs along several dims of the operand, or the other way round.
    """
    out = op(_probe(x.shape, x.dtype), *args, **kwargs)
    several = isinstance(out, list | tuple)
    return [_view_map(y, x.shape) for y in (out if several else [out])], several


@lru_cache(maxsize=1024)
def _probe(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, _strides(shape), dtype=dtype, device="meta")


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Strides whose sums and multiples identify the dims.

    A slice of an empty dim is empty, and has any step.
    """
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * (n + 2 if n else LARGEST_STEP + 1))
    return strides[::-1][: len(shape)] if shape else []


def _view_map(view: Tensor, shape: tuple[int, ...]) -> ViewMap:
    strides, rest, starts = _strides(shape), int(view.storage_offset()), []
    for stride in strides:
        start, rest = divmod(rest, stride)
        starts.append(start)
    dims: list[DimSlice | int] = list(view.shape)
    for place, (length, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        dim = next((d for d, s in enumerate(strides) if s <= stride), -1)
        if dim >= 0 and stride % strides[dim] == 0:
            step = stride // strides[dim]
            if length == 0 or starts[dim] + (length - 1) * step < shape[dim]:
                dims[place] = DimSlice(dim, starts[dim], step, length)
        elif stride and length != 1:
            raise NotImplementedError("a dim of the view runs along several dims")
    for dim in range(len(shape)):  # a new dim of length 1 has any stride
        claims = [i for i, a in enumerate(dims) if isinstance(a, DimSlice) and a.dim == dim]
        longest = max(claims, key=lambda i: (view.shape[i] != 1, view.shape[i]), default=None)
        for i in claims:
            if i != longest:
                if view.shape[i] != 1:
                    raise NotImplementedError("several dims of the view run along one")
                dims[i] = 1
    kept = {a.dim for a in dims if isinstance(a, DimSlice)}
    return ViewMap(tuple(dims), {d: starts[d] for d in range(len(shape)) if d not in kept})
