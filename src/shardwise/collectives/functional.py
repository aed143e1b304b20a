"""The ops by which torch's own tools count collectives."""

from functools import cache
from importlib import import_module
from typing import Any

import torch

_NAMES = {
    "all_to_all": "all_to_all_single",
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
}


@cache
def torch_op(kind: str) -> Any:
    """The op of `torch.ops.c10d_functional` that torch's tools count a collective of this kind as."""
    import_module("torch.distributed._functional_collectives")  # registers the ops
    return getattr(torch.ops.c10d_functional, _NAMES.get(kind, kind))
