"""Functional collectives of torch, which are also the names by which torch's tools count collectives."""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwise._collectives import rank_and_size
from shardwise._layout import ring_elements

_NAMES = {
    "all_to_all": "all_to_all_single",
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
}
_COLLECTIVES = {"all_reduce", "broadcast", *_NAMES.values()}


@cache
def torch_op(kind: str) -> Any:
    """The op of `torch.ops.c10d_functional` that torch's tools count a collective of this kind as."""
    import_module("torch.distributed._functional_collectives")  # registers the ops
    return getattr(torch.ops.c10d_functional, _NAMES.get(kind, kind))


def functional_collective(func: object, args: Sequence[Any]) -> tuple[Any, int] | None:
    """The `torch_op` of a call of a functional collective, and what this rank sends in it; None for other ops.

    An all-reduce counts as a ring, as ours do.
    """
    if not isinstance(func, OpOverload) or not func.namespace.startswith("_c10d_functional"):
        return None
    name = func._schema.name.partition("::")[2].removesuffix("_").removesuffix("_out")
    kind = name.removesuffix("_coalesced")
    if kind not in _COLLECTIVES:
        return None
    group = next(arg for schema, arg in zip(func._schema.arguments, args, strict=False) if schema.name == "group_name")
    sent = sum(_sent(kind, x, args, group) for x in (args[0] if isinstance(args[0], list) else [args[0]]))
    return torch_op(name), sent


def _sent(kind: str, x: Tensor, args: Sequence[Any], group_name: str) -> int:
    (here, size), total = rank_and_size(group_name), x.numel()
    match kind:
        case "all_reduce":
            total = ring_elements(total, size, here)
        case "all_gather_into_tensor":
            total *= size - 1
        case "reduce_scatter_tensor":
            total -= total // size
        case "all_to_all_single":
            rows = args[2] or [x.shape[0] // size] * size
            total -= rows[here] * (total // max(x.shape[0], 1))
        case "broadcast":
            last = (args[1] - 1) % size
            total = 0 if here == last and size > 1 else total * (size > 1)
    return total * x.element_size()
