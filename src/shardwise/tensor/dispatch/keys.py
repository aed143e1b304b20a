"""The key under which the recipe of a call is cached."""

from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise.layout import LayoutKey, Owner
from shardwise.rules import OpRule
from shardwise.rules.row import Args, Kwargs
from shardwise.tensor.dtensor import DTensor

PLAIN_VALUES = frozenset((int, float, bool, str, type(None)))
EXACT_VALUES = frozenset((int, str, type(None), torch.Size, torch.dtype, torch.device, torch.memory_format))
TRUE, FALSE = object(), object()  # in a key: bools, which differ from 1 and 0: var(0) has a dim, var(False) has none
KEYWORDS = object()  # in a key: keyword arguments follow, by name
NO_KEY = object()  # in a key: an argument that cannot be part of one, so the call is not cached


def call_key(func: Any, rule: OpRule, args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """What the recipe of a call depends on: layouts for DTensors, other arguments themselves.

    If the rule is `shape_independent`, all floats count as equal except 0, inf and nan. The key contains `NO_KEY` if an
    argument cannot be hashed, or is a plain tensor, which has to be promoted first.
    """
    key = [func, _dtypes(args, kwargs)] if rule.typed or rule.random else [func]
    floats_alike = rule.shape_independent
    for a in args:  # the most frequent kinds of arguments as in `_part`, without a call each
        kind = type(a)
        if kind is DTensor:
            key.append(a._layout.key)
        elif kind in EXACT_VALUES:
            key.append(a)
        else:
            key.append(_part(a, floats_alike))
    if kwargs:
        key.append(KEYWORDS)
        for name, a in kwargs.items():
            kind = type(a)
            key.append(name)
            if kind in EXACT_VALUES:
                key.append(a)
            elif kind is bool:
                key.append(TRUE if a else FALSE)
            else:
                key.append(a._layout.key if kind is DTensor else _part(a, floats_alike))
    return tuple(key)


def _part(a: Any, floats_alike: bool) -> object:
    """What any argument adds to a key."""
    kind = type(a)
    if kind is float:
        return float if floats_alike and a and a - a == 0 else a
    if kind is bool:
        return TRUE if a else FALSE
    if kind is list or kind is tuple:
        parts = []
        for x in a:
            kind = type(x)
            part = x._layout.key if kind is DTensor else x if kind in EXACT_VALUES else _part(x, floats_alike)
            if part is NO_KEY:
                return NO_KEY
            parts.append(part)
        return tuple(parts)
    if kind is torch.Generator:  # its state changes no recipe
        return torch.Generator
    if isinstance(a, Tensor):
        return NO_KEY
    try:
        hash(a)
    except TypeError:
        return NO_KEY
    return kind, a


def by_value(key: tuple[Any, ...], owner: Owner) -> tuple[Any, ...] | None:
    """A key with layouts by value, for what all ranks and worlds of this process share.

    None if there is a layout of another owner: a DTensor that another rank made, or this one in another world.
    """
    found: list[object] = []
    for part in key:
        kind = type(part)
        if kind is LayoutKey:
            if part.owner is not owner and part.owner is not None:
                return None
            found.append(part.value())
        elif kind is tuple:
            inner = by_value(part, owner)
            if inner is None:
                return None
            found.append(inner)
        else:
            found.append(part)
    return tuple(found)


def _dtypes(args: Args, kwargs: Kwargs) -> tuple[torch.dtype, ...]:
    with DisableTorchFunctionSubclass():
        return tuple([a.dtype for a in (*args, *kwargs.values()) if type(a) is DTensor])
