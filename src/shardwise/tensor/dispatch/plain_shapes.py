"""A plain tensor beside DTensors that has other sizes than the op needs: mostly this rank's part of one."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree

from shardwise.errors import RuleError, ShapeError, ShardwiseError
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor.dispatch.names import name_of
from shardwise.tensor.dispatch.without_memory import global_on_meta, with_meta_device, without_modes
from shardwise.tensor.dtensor import DTensor
from shardwise.trace.capture_hooks import tracing_paused

_OF_SIZES = re.compile("size|shape", re.IGNORECASE)  # in torch's errors


@contextmanager
def checked_sizes(func: Op, args: Args, kwargs: Kwargs) -> Iterator[None]:
    """Run a call with plain tensors inside.

    Raises:
        ShapeError: instead of torch's error for global sizes that do not fit.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        ours = isinstance(error, ShardwiseError) and not isinstance(error, RuleError)
        if ours or not _OF_SIZES.search(str(error)) or _fits(func, args, kwargs):
            raise
        leaves = pytree.tree_leaves((args, kwargs))
        distributed = [x._layout.shape for x in leaves if type(x) is DTensor]
        plain = [tuple(x.shape) for x in leaves if isinstance(x, Tensor) and type(x) is not DTensor and x.ndim]
        raise ShapeError(
            f"{name_of(func)}: a plain tensor beside DTensors must have the global shape. Here are DTensors of global "
            f"shapes {_listed(distributed)} and plain tensors of shapes {_listed(plain)}: {error} Fix: if each rank "
            f"has its own part, DTensor.from_local(x, mesh, placements); else pass the full tensor, the same on every "
            f"rank."
        ) from error


def _fits(func: Op, args: Args, kwargs: Kwargs) -> bool:
    """Whether `func` takes operands of these global sizes."""

    def on_meta(x: object) -> object:
        if type(x) is DTensor:
            return global_on_meta(x._layout, x.dtype)
        return torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x

    with DisableTorchFunctionSubclass(), tracing_paused(), without_modes(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            func(*pytree.tree_map(on_meta, args), **with_meta_device(pytree.tree_map(on_meta, kwargs)))
        except Exception:  # noqa: BLE001 - whatever torch raises for operands that it refuses
            return False
    return True


def _listed(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, dict.fromkeys(shapes)))
