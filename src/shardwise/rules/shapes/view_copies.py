"""Copies of views: an op such as `permute_copy`, which torch tags, is the view and a copy of it."""

from functools import partial

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.rules.registry import RULES, OpRule, rule_of
from shardwise.rules.row import Op
from shardwise.rules.shapes.common import functions_named

SUFFIX = "_copy"


def register_tagged() -> None:
    """Give these ops a decomposition if the view has an entry; views of sparse tensors have none."""
    for name in [name.removesuffix(SUFFIX) for name in dir(torch) if name.endswith(SUFFIX) and name[0] != "_"]:
        views: list[Op] = [*_overloads(name), *functions_named(name)]
        tagged = [op for op in _overloads(name + SUFFIX) if torch.Tag.view_copy in op.tags]
        if (
            tagged and any(rule_of(view) for view in views) and name != "detach"
        ):  # for torch, detach_copy has a gradient
            for op in (*tagged, getattr(torch, name + SUFFIX)):
                RULES.setdefault(op, OpRule(decomposition=partial(_copied, getattr(torch.ops.aten, name))))


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    packet = getattr(torch.ops.aten, name, None)
    found = [getattr(packet, form) for form in packet.overloads()] if packet is not None else []
    return [op for op in found if not any(a.is_out for a in op._schema.arguments)]


def _copied(view: Op, *args: object, **kwargs: object) -> object:
    out = pytree.tree_map_only(Tensor, lambda x: x.clone(memory_format=torch.contiguous_format), view(*args, **kwargs))
    return tuple(out) if isinstance(out, list) else out
