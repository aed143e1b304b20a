"""New distributed tensors: constants, evenly spaced values and random ones."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from shardwise import _collectives as collectives
from shardwise._collectives import DeviceMesh
from shardwise._layout import (
    REPLICATE,
    Layout,
    Mesh,
    Placements,
    as_integers,
    as_placements,
    checked,
    is_integer,
    placements_text,
    shown,
)
from shardwise._tensor.conversion import local_shard_of
from shardwise._tensor.dispatch.hooks import expect_equal_numbers, numbers_of
from shardwise._tensor.dtensor import DTensor, default_mesh, tag
from shardwise._tensor.transforms import refuse_compilation
from shardwise.errors import LayoutError


def _made(
    size: tuple[Any, ...],
    device_mesh: Mesh | DeviceMesh | None,
    placements: Placements | None,
    dtype: torch.dtype | None,
    layout: torch.layout,
) -> DTensor:
    refuse_compilation()
    if layout is not torch.strided:
        raise LayoutError(
            f"Only dense (torch.strided) tensors can be made, got layout={layout}. "
            f"Fix: leave layout out; placements= says how it is sharded."
        )
    shape = shape_of(size)
    mesh = default_mesh() if device_mesh is None else collectives.as_mesh(device_mesh)
    where = Layout(mesh, as_placements(mesh, placements), shape)
    _note(mesh, size=shape)
    return tag(torch.empty(where.local_shape(collectives.rank()), dtype=dtype, device=mesh.device_type), where)


def _note(mesh: Mesh, **given: complex | tuple[int, ...]) -> None:
    if collectives.notes_numbers():
        expect_equal_numbers(dict(numbers_of(given)), mesh, "a factory")


@checked
def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh | DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """A DTensor of global shape `size` with uninitialized values."""
    made = _made(size, device_mesh, placements, dtype, layout)
    return made.requires_grad_(requires_grad)


@checked
def full(
    size: Sequence[int],
    fill_value: complex | torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh | DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """A DTensor of global shape `size` with one value everywhere; its dtype is that of `torch.full`."""
    number = _number(fill_value, "full")
    dtype = torch.full((), number).dtype if dtype is None else dtype
    made = _not_partial("full", _made((size,), device_mesh, placements, dtype, layout))
    _note(made._layout.mesh, fill_value=number)
    with DisableTorchFunctionSubclass():
        made.fill_(number)
    return made.requires_grad_(requires_grad)


def zeros(*size: object, **kwargs: Any) -> DTensor:
    """A DTensor of zeros; keyword arguments as for `empty`."""
    return full(shape_of(size), 0.0, **kwargs)


def ones(*size: object, **kwargs: Any) -> DTensor:
    """A DTensor of ones; keyword arguments as for `empty`."""
    return full(shape_of(size), 1.0, **kwargs)


@checked
def linspace(start: complex | torch.Tensor, end: complex | torch.Tensor, steps: int, **kwargs: Any) -> DTensor:
    """`steps` evenly spaced values from `start` to `end`, numbers or 0-d tensors; keyword arguments as for `full`."""
    return _spaced(torch.linspace, start, end, steps, **kwargs)


@checked
def logspace(
    start: complex | torch.Tensor, end: complex | torch.Tensor, steps: int, base: float = 10.0, **kwargs: Any
) -> DTensor:
    """`base` to the power of evenly spaced exponents from `start` to `end`; otherwise as `linspace`."""
    return _spaced(torch.logspace, start, end, steps, base, **kwargs)


def _number(value: complex | torch.Tensor, factory: str) -> complex:
    if not isinstance(value, torch.Tensor):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise LayoutError(f"{factory}() takes integers of 64 bits, got {shown(value)}. Fix: float({shown(value)}).")
        return value
    if value.ndim or value.is_meta:
        raise LayoutError(
            f"{factory}() takes numbers or 0-d tensors, got a tensor of shape {tuple(value.shape)} on "
            f"{value.device.type}. Fix: x.item() of one element."
        )
    return value.item()


@checked
def _spaced(
    make: Callable[..., torch.Tensor],
    start: complex | torch.Tensor,
    end: complex | torch.Tensor,
    *args: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh | DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    if args[0] < 0:
        raise LayoutError(
            f"{make.__name__}() takes 0 steps or more, got steps={args[0]}. Fix: the number of elements to make."
        )
    start, end = _number(start, make.__name__), _number(end, make.__name__)
    Layout(Mesh((1,)), [REPLICATE], (args[0],))  # refuses too many
    values = make(start, end, *args, dtype=dtype)
    made = _not_partial(make.__name__, _made((values.shape,), device_mesh, placements, values.dtype, layout))
    _note(made._layout.mesh, start=start, end=end)
    if collectives.rank() in made._layout.mesh.ranks:
        made = tag(local_shard_of(values.to(made.device), made._layout, None), made._layout)
    return made.requires_grad_(requires_grad)


@checked
def rand(*size: Any, requires_grad: bool = False, **kwargs: Any) -> DTensor:
    """Uniform in [0, 1); the same seed gives the same tensor for every mesh and layout. Arguments as `empty`."""
    return _not_partial("rand", empty(*size, **kwargs)).uniform_().requires_grad_(requires_grad)  # type: ignore[return-value]


@checked
def randn(*size: Any, requires_grad: bool = False, **kwargs: Any) -> DTensor:
    """Standard normal; the same seed gives the same tensor for every mesh and layout. Arguments as `empty`."""
    return _not_partial("randn", empty(*size, **kwargs)).normal_().requires_grad_(requires_grad)  # type: ignore[return-value]


def _not_partial(factory: str, made: DTensor) -> DTensor:
    if made._layout.partial_axes:
        raise LayoutError(
            f"{factory}() cannot create a Partial tensor: {placements_text(made._layout.mesh, made.placements)}. "
            f"Fix: use Replicate() or Shard()."
        )
    return made


def shape_of(size: tuple[Any, ...]) -> tuple[int, ...]:
    """The shape from one sequence or from integers."""
    given = size[0] if len(size) == 1 and not is_integer(size[0]) else size
    return as_integers(given, "The size of a tensor", LayoutError, "such as zeros(4, 3) or zeros((4, 3))")
