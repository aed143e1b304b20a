"""Copies of views: an op such as `permute_copy`, which torch tags, is the view and a copy of it."""

from functools import partial

import torch
from torch import Tensor

from shardwise.rules.registry import RULES, OpRule
from shardwise.rules.row import Op

SUFFIX = "_copy"


def register_tagged() -> None:
    """Give these ops a decomposition."""
    for name in [name.removesuffix(SUFFIX) for name in dir(torch) if name.endswith(SUFFIX)]:
        view, packet = (getattr(torch.ops.aten, spelling, None) for spelling in (name, name + SUFFIX))
        if view is None or packet is None or name == "detach":  # detach_copy has a gradient
            continue
        ops = [getattr(packet, form) for form in packet.overloads()]
        ops = [op for op in ops if torch.Tag.view_copy in op.tags and not any(a.is_out for a in op._schema.arguments)]
        for op in (*ops, getattr(torch, name + SUFFIX)) if ops else ():
            RULES.setdefault(op, OpRule(decomposition=partial(_copied, view)))


def _copied(view: Op, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
    found: Tensor | tuple[Tensor, ...] = view(*args, **kwargs)
    if isinstance(found, Tensor):
        return found.clone(memory_format=torch.contiguous_format)
    return tuple(one.clone(memory_format=torch.contiguous_format) for one in found)
