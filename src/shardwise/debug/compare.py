"""Compares distributed results with plain torch: the largest difference, the same on every rank."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import add

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Box, split_by_boxes
from shardwise._tensor import DTensor, plain, to_layout

Bounds = Callable[[Tensor], tuple[float, float]]  # expected value -> relative and absolute tolerance


@dataclass(frozen=True)
class Tolerance:
    """The allowed difference of floating point numbers: `atol + rtol * |expected|`; None takes the dtype's own.

    A dtype's own relative tolerance is the square root of its eps, the absolute a tenth of that. Other dtypes must be
    equal.
    """

    rtol: float | None = None
    atol: float | None = None

    def bounds(self, want: Tensor) -> tuple[float, float]:
        rtol: float = math.sqrt(torch.finfo(want.dtype).eps)
        return rtol if self.rtol is None else self.rtol, rtol / 10 if self.atol is None else self.atol


@dataclass(frozen=True)
class Difference:
    """The largest difference that one rank sees."""

    what: str  # the result or operand
    size: float  # absolute; infinite where values are missing, not numbers, or of another kind
    got: str
    want: str  # in plain torch
    index: tuple[int, ...] = ()  # in the global tensor
    count: int = 0  # how many elements of this rank differ
    rank: int = 0  # whose


def mismatched(got: Tensor, want: Tensor, bounds: Bounds) -> Tensor:
    """The elements that differ by more than `bounds`; of integers and booleans all that are not equal."""
    if not (want.is_complex() or want.is_floating_point()):
        return got != want
    rtol, atol = bounds(want)
    return ~torch.isclose(_wide(got, want), _wide(want, want), rtol=rtol, atol=atol, equal_nan=True)


def _wide(x: Tensor, like: Tensor) -> Tensor:
    return x.to(torch.complex128 if like.is_complex() else torch.float64)


Pair = tuple[str, object, object]  # name, result, result of plain torch


def pairs(what: str, got: object, want: object) -> Iterator[Pair]:
    """Each result with its name; also inside lists, tuples and dicts."""
    if isinstance(got, list | tuple) and isinstance(want, list | tuple) and len(got) == len(want):
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            yield from pairs(f"{what}[{i}]", a, b)
    elif isinstance(got, dict) and isinstance(want, dict) and got.keys() == want.keys():
        for key in got:
            yield from pairs(f"{what}[{key!r}]", got[key], want[key])
    else:
        yield what, got, want


def largest_difference(results: Sequence[Pair], tolerance: Tolerance, ranks: tuple[int, ...]) -> Difference | None:
    """The largest difference on any of `ranks`, all of which must call; None if there is none."""
    local = _largest([_difference(what, got, want, tolerance) for what, got, want in results])
    by_rank = collectives.gather_json(None if local is None else asdict(local), ranks)
    differences = [
        Difference(**fields | {"index": tuple(fields["index"]), "rank": rank})
        for rank, fields in zip(ranks, by_rank, strict=True)
        if fields is not None
    ]
    return _largest(differences)


def _largest(differences: Sequence[Difference | None]) -> Difference | None:
    return max((d for d in differences if d is not None), key=lambda d: d.size, default=None)


def _difference(what: str, got: object, want: object, tolerance: Tolerance) -> Difference | None:
    if isinstance(got, Tensor) and isinstance(want, Tensor):
        shape, dtype = tuple(got.shape), plain(got).dtype if isinstance(got, DTensor) else got.dtype
        if shape != tuple(want.shape) or dtype != want.dtype:
            return Difference(what, math.inf, f"{shape} {dtype}", f"{tuple(want.shape)} {want.dtype}")
        full = Box((0,) * want.ndim, shape)
        views = [(full, got)]
        if isinstance(got, DTensor):  # the local boxes are compared, so that each replica is checked
            if got._layout.mesh.coordinate(collectives.rank()) is None:
                return None
            got = to_layout(got, got._layout.reduced())
            boxes = got._layout.boxes(collectives.rank())
            views = list(zip(boxes, split_by_boxes(plain(got), boxes), strict=True))
        return _largest(
            [_tensor_difference(what, x, want[b.relative_to(full)], b.offsets, tolerance) for b, x in views]
        )
    if isinstance(got, float) and isinstance(want, float):
        return _tensor_difference(what, torch.tensor(got).double(), torch.tensor(want).double(), (), tolerance)
    if isinstance(got, Tensor) or isinstance(want, Tensor) or type(got) is not type(want) or got != want:
        return Difference(what, math.inf, _kind(got), _kind(want))
    return None


def _kind(x: object) -> str:
    return f"a {type(x).__name__} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"{x!r:.80}"


def _tensor_difference(
    what: str, got: Tensor, want: Tensor, offsets: tuple[int, ...], tolerance: Tolerance
) -> Difference | None:
    wrong = mismatched(got, want, tolerance.bounds)
    if not wrong.any():
        return None
    distance = (_wide(got, want) - _wide(want, want)).abs().nan_to_num(nan=math.inf, posinf=math.inf).where(wrong, -1.0)
    at = tuple(int(i) for i in torch.unravel_index(distance.argmax(), got.shape))
    values = str(got[at].item()), str(want[at].item())
    return Difference(what, float(distance[at]), *values, tuple(map(add, offsets, at)), int(wrong.sum()))
