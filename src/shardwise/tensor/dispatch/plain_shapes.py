"""A plain tensor beside DTensors that has other sizes than the op needs: mostly this rank's part of one.

Plain tensors beside DTensors are full tensors, so the op fails on its sizes. `explained` finds the global shape with
which it would not.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree

from shardwise import collectives
from shardwise.errors import RuleError, ShapeError, ShardwiseError
from shardwise.layout import REPLICATE, Layout, Placement, Shard
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor.dispatch.modes import without_modes
from shardwise.tensor.dispatch.names import name_of
from shardwise.tensor.dispatch.resolve import global_on_meta, with_meta_device
from shardwise.tensor.dtensor import DTensor
from shardwise.trace.capture_hooks import tracing_paused

Shape = tuple[int, ...]


class _Expected(NamedTuple):
    """A global shape for a plain tensor, and the placements under which it would be a local shard; () if unknown."""

    shape: Shape
    placements: tuple[Placement, ...]


@contextmanager
def explained(func: Op, args: Args, kwargs: Kwargs) -> Iterator[None]:
    """Runs a call with plain tensors; if its sizes are refused, and another shape of a plain tensor fits, say which.

    Raises:
        ShapeError: instead of torch's error.
    """
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        from_library = isinstance(error, ShardwiseError) and type(error) is not RuleError
        if from_library or (clear := _shape_error(func, args, kwargs)) is None:
            raise
        raise clear from error


def _shape_error(func: Op, args: Args, kwargs: Kwargs) -> ShapeError | None:
    if _fits(func, args, kwargs, (), ()):
        return None
    leaves = pytree.tree_leaves((args, kwargs))
    layouts = [x._layout for x in leaves if type(x) is DTensor]
    plain = dict.fromkeys(tuple(x.shape) for x in leaves if isinstance(x, Tensor) and type(x) is not DTensor and x.ndim)
    for shape in plain:
        for expected in _candidates(shape, layouts):
            if _fits(func, args, kwargs, shape, expected.shape):
                return ShapeError(_text(name_of(func), shape, expected, layouts[0]))
    return None


def _fits(func: Op, args: Args, kwargs: Kwargs, shape: Shape, wanted: Shape) -> bool:
    """Whether `func` takes operands of the global sizes, with `wanted` for plain tensors of `shape`."""

    def on_meta(x: object) -> object:
        if type(x) is DTensor:
            return global_on_meta(x._layout, x.dtype)
        if not isinstance(x, Tensor):
            return x
        size = wanted if tuple(x.shape) == shape else x.shape
        return torch.empty(size, dtype=x.dtype, device="meta")

    with DisableTorchFunctionSubclass(), tracing_paused(), without_modes(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            func(*pytree.tree_map(on_meta, args), **with_meta_device(pytree.tree_map(on_meta, kwargs)))
        except Exception:
            return False
    return True


def _candidates(shape: Shape, layouts: list[Layout]) -> Iterator[_Expected]:
    """Global shapes of which `shape` may be a part: that of an operand, then those with one other size."""
    rank = collectives.rank()
    for layout in layouts:
        if layout.shape != shape and layout.local_shape(rank) == shape:
            yield _Expected(layout.shape, layout.placements)
    sizes = dict.fromkeys(n for layout in layouts for n in layout.shape)
    for dim, have in enumerate(shape):
        for size in sizes:
            if size > have:
                expected = (*shape[:dim], size, *shape[dim + 1 :])
                yield _Expected(expected, _placements(shape, dim, expected, layouts))


def _placements(shape: Shape, dim: int, expected: Shape, layouts: list[Layout]) -> tuple[Placement, ...]:
    """The placements under which a tensor of the `expected` shape is sharded along `dim`, and local shards are `shape`.

    The mesh axis is one along which operands are sharded, if possible.
    """
    mesh, rank = layouts[0].mesh, collectives.rank()

    def sharded(axis: int) -> tuple[Placement, ...]:
        return tuple(Shard(dim) if a == axis else REPLICATE for a in range(mesh.ndim))

    axes = sorted(range(mesh.ndim), key=lambda axis: all(x.placements[axis] == REPLICATE for x in layouts))
    found = (sharded(axis) for axis in axes if Layout(mesh, sharded(axis), expected).local_shape(rank) == shape)
    return next(found, ())


def _text(name: str, shape: Shape, expected: _Expected, of: Layout) -> str:
    parts = [shape]
    if expected.placements:  # the same text on every rank
        layout = Layout(of.mesh, expected.placements, expected.shape)
        parts = list(dict.fromkeys(layout.local_shape(rank) for rank in of.mesh.sorted_ranks))
    got = " or ".join(map(str, parts[:4])) + (", by rank" if len(parts) > 1 else "")
    placements = f"[{', '.join(map(str, expected.placements))}]" if expected.placements else "placements"
    return (
        f"{name}: a plain tensor beside DTensors must have the global shape: expected {expected.shape}, got {got}. "
        f"Fix: if each rank has its own part, DTensor.from_local(x, mesh, {placements}); else pass the full tensor, "
        f"the same on every rank."
    )
