"""A plain tensor beside DTensors that has other sizes than the op needs: mostly this rank's part of one.

Plain tensors beside DTensors are full tensors, so the op fails on its sizes. `explained` finds the global shape with
which it would not.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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


@contextmanager
def explained(func: Op, args: Args, kwargs: Kwargs) -> Iterator[None]:
    """Runs a call with plain tensors; if its sizes are refused, and another shape of a plain tensor fits, say which.

    Raises:
        ShapeError: instead of torch's error.
    """
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        other = isinstance(error, ShardwiseError) and not isinstance(error, RuleError)
        if other or (clear := _shape_error(func, args, kwargs)) is None:
            raise
        raise clear from error


def _shape_error(func: Op, args: Args, kwargs: Kwargs) -> ShapeError | None:
    if _fits(func, args, kwargs, {}):
        return None
    leaves = pytree.tree_leaves((args, kwargs))
    layouts = [x._layout for x in leaves if type(x) is DTensor]
    shapes = [tuple(x.shape) for x in leaves if isinstance(x, Tensor) and type(x) is not DTensor and x.ndim]
    for wanted in _candidates(list(dict.fromkeys(shapes)), layouts):
        if _fits(func, args, kwargs, wanted):
            return ShapeError(_text(name_of(func), *next(iter(wanted.items())), layouts))
    return None


def _fits(func: Op, args: Args, kwargs: Kwargs, wanted: Mapping[Shape, Shape]) -> bool:
    """Whether `func` takes operands of the global sizes, with the wanted shapes for those of plain tensors."""

    def on_meta(x: object) -> object:
        if type(x) is DTensor:
            return global_on_meta(x._layout, x.dtype)
        if not isinstance(x, Tensor):
            return x
        return torch.empty(wanted.get(tuple(x.shape), x.shape), dtype=x.dtype, device="meta")

    with DisableTorchFunctionSubclass(), tracing_paused(), without_modes(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            func(*pytree.tree_map(on_meta, args), **with_meta_device(pytree.tree_map(on_meta, kwargs)))
        except Exception:  # noqa: BLE001 - whatever torch raises for operands that it refuses
            return False
    return True


def _candidates(shapes: list[Shape], layouts: list[Layout]) -> Iterator[dict[Shape, Shape]]:
    """Global shapes of which those of plain tensors may be parts.

    Those of operands; then with one other size, in one plain tensor, then in all that share the size.
    """
    rank = collectives.rank()
    for layout in layouts:
        local = layout.local_shape(rank)
        if local in shapes and local != layout.shape:
            yield {local: layout.shape}
    sizes = dict.fromkeys(n for layout in layouts for n in layout.shape)
    changes = [
        (shape, dim, size) for shape in shapes for dim in range(len(shape)) for size in sizes if size > shape[dim]
    ]
    for shape, dim, size in changes:
        yield {shape: _resized(shape, dim, size)}
    for first, dim, size in changes:
        yield {x: _resized(x, dim, size) for x in (first, *shapes) if x[dim : dim + 1] == first[dim : dim + 1]}


def _resized(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _placements(shape: Shape, expected: Shape, layouts: list[Layout]) -> tuple[Placement, ...]:
    """Placements under which a tensor of the expected shape has local shards of `shape` here; () if there are none.

    Those of an operand of that shape, else sharded along one mesh axis, one along which operands are if possible.
    """
    mesh, rank = layouts[0].mesh, collectives.rank()
    dim = next(d for d, (have, size) in enumerate(zip(shape, expected, strict=True)) if have != size)
    axes = sorted(range(mesh.ndim), key=lambda axis: all(x.placements[axis] == REPLICATE for x in layouts))
    along = [tuple(Shard(dim) if a == axis else REPLICATE for a in range(mesh.ndim)) for axis in axes]
    possible = [*(x.placements for x in layouts if x.shape == expected), *along]
    return next((p for p in possible if Layout(mesh, p, expected).local_shape(rank) == shape), ())


def _text(name: str, shape: Shape, expected: Shape, layouts: list[Layout]) -> str:
    mesh, found, parts = layouts[0].mesh, _placements(shape, expected, layouts), [shape]
    if found:  # the same text on every rank
        layout = Layout(mesh, found, expected)
        parts = list(dict.fromkeys(layout.local_shape(rank) for rank in mesh.sorted_ranks))
    got = " or ".join(map(str, parts[:4])) + (", by rank" if len(parts) > 1 else "")
    placements = f"[{', '.join(map(str, found))}]" if found else "placements"
    return (
        f"{name}: a plain tensor beside DTensors must have the global shape: expected {expected}, got {got}. "
        f"Fix: if each rank has its own part, DTensor.from_local(x, mesh, {placements}); else pass the full tensor, "
        f"the same on every rank."
    )
