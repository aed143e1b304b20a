"""A rank outside the mesh raises what torch's kernels raise for a dtype: `"median_cpu" not implemented for 'Bool'`."""

import re
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor.dispatch.modes import without_modes
from shardwise.tensor.dtensor import DTensor
from shardwise.trace.capture_hooks import tracing_paused

_FLOATS = (torch.float32, torch.float64)  # all kernels take these
_LIMIT = re.compile(r"not implemented for|not support|support bool|only support")

_checked: set[Any] = set()  # functions with dtypes that their kernels take


def raise_dtype_error(func: Op, args: Args, kwargs: Kwargs) -> None:
    """Raise what torch raises if its kernels do not take the dtypes of these DTensors.

    Found once for each function and dtypes, by running it on tensors whose sizes are 1.
    """
    dtypes = tuple([(x.dtype, x.device) for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor])
    if all(dtype in _FLOATS for dtype, _ in dtypes) or (func, dtypes) in _checked:
        return
    args, kwargs = pytree.tree_map(_of_size_1, (args, kwargs))
    with torch.no_grad(), torch.random.fork_rng([]), tracing_paused(), without_modes():
        try:
            func(*args, **kwargs)
        except Exception as error:
            if _LIMIT.search(str(error)):
                raise
    _checked.add((func, dtypes))


def _of_size_1(x: object) -> object:
    if type(x) is DTensor:
        return torch.ones([min(n, 1) for n in x._layout.shape], dtype=x.dtype, device=x.device)
    return x.detach().clone() if isinstance(x, Tensor) else x
