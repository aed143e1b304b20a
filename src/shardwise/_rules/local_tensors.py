"""Local tensors for torch's kernels: empty shards, and dtypes in which ranks compute before they combine."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardwise._rules.local_context import LocalContext

# ---- empty shards: kernels refuse some, and give others a constant gradient ---------------------------------------


def filled(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """`x`, with empty dims among its last ones padded with zeros to `lengths`: most kernels refuse empty dims."""
    shape = x.shape[x.ndim - len(lengths) :]
    if all(shape):
        return x
    return F.pad(
        x, [n for size, length in zip(shape[::-1], lengths[::-1], strict=True) for n in (0, 0 if size else length)]
    )


def never_empty(
    dims: tuple[int | tuple[int, ...], ...], ctx: LocalContext, *args: object, **kwargs: object
) -> Tensor | tuple[Tensor, ...]:
    """The op itself on every rank, as a local implementation.

    Args:
        dims: for each tensor operand, the number of last dims that must not be empty, or the sizes for empty ones.
    """
    lengths = iter((1,) * n if isinstance(n, int) else n for n in dims)

    def fill(x: Any) -> Any:
        if isinstance(x, Tensor):
            return filled(x, next(lengths))
        return [fill(y) for y in x] if isinstance(x, list | tuple) else x

    out = ctx.call(*[fill(x) for x in args], **{name: fill(x) for name, x in kwargs.items()})
    if isinstance(out, Tensor):
        return emptied(out, ctx.output.local_shape(ctx.rank))
    shapes = iter([layout.local_shape(ctx.rank) for layout in ctx.outputs])
    return tuple(emptied(x, next(shapes)) if isinstance(x, Tensor) else x for x in out)


def emptied(out: Tensor, shape: Sequence[int]) -> Tensor:
    """`out` with dims of size 0 where `shape` has size 0."""
    for dim, n in enumerate(shape):
        out = out if n else out.narrow(dim, 0, 0)
    return out


# ---- values -------------------------------------------------------------------------------------------------------


def has_values(x: Tensor) -> bool:
    """Whether a tensor has values: False on the meta device, or in a mode without its values (`simulation`)."""
    modes = _get_current_dispatch_mode_stack()
    return not x.is_meta and all(mode.has_values(x) for mode in modes if hasattr(mode, "has_values"))


# ---- dtypes -------------------------------------------------------------------------------------------------------


def autocast_to_float(x: Tensor, *device_types: str) -> Tensor:
    """`x`, or a float32 copy under autocast, for an op that torch then computes in float32, such as a loss.

    Args:
        device_types: devices on which torch does this; all by default.
    """
    kind = x.device.type
    half = x.dtype in (torch.bfloat16, torch.float16) and kind in (device_types or (kind,))
    return x.float() if half and torch.is_autocast_enabled(kind) else x


def as_accumulator(x: Tensor) -> Tensor:
    """16-bit floats as float32, in which torch's kernels accumulate.

    Raises:
        RuntimeError: integers, which torch refuses too.
    """
    if not x.is_floating_point():
        raise RuntimeError(f"This op is not implemented for {x.dtype}, only for floating point numbers.")
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def as_float64(x: Tensor) -> Tensor:
    """Floats in double precision: combined values are rounded once, and 0 * 1e60 is 0 where 0 * inf is nan."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64 if x.is_floating_point() else x.dtype)
