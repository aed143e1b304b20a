"""Copies of views: an op such as `permute_copy`, which torch tags, is the view and a copy of it."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.rules.registry import RULES, OpRule, register, rule_of
from shardwise.rules.row import Op
from shardwise.rules.shapes.common import functions_named

aten = torch.ops.aten
SUFFIX = "_copy"
WITHOUT_GRADIENT = "detach"  # for torch, detach_copy has one


def register_tagged() -> None:
    """Give a decomposition to each copy of a view whose view has an entry."""
    for name in [name.removesuffix(SUFFIX) for name in dir(torch) if name.endswith(SUFFIX)]:
        packet = getattr(aten, name + SUFFIX, None)
        if packet is None or name == WITHOUT_GRADIENT:
            continue
        functions = functions_named(name)
        for op in [getattr(packet, form) for form in packet.overloads()]:
            if torch.Tag.view_copy in op.tags and not any(a.is_out for a in op._schema.arguments):
                _register(op, [getattr(getattr(aten, name), op._overloadname), *functions])
                _register(getattr(torch, name + SUFFIX), functions)


def _register(op: Op, views: Sequence[Op]) -> None:
    known = [view for view in views if rule_of(view)]
    if known and op not in RULES:
        register(OpRule(decomposition=partial(_copied, known[0])), op)


def _copied(view: Op, *args: object, **kwargs: object) -> Tensor | Sequence[Tensor]:
    found: Tensor | Sequence[Tensor] = view(*args, **kwargs)
    if isinstance(found, Tensor):
        return found.clone(memory_format=torch.contiguous_format)
    return [one.clone(memory_format=torch.contiguous_format) for one in found]
