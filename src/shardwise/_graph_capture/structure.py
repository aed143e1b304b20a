"""Inputs and results of a captured call: tensors and constants, in nested containers and dataclasses."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec, UnflattenFunc

from shardwise._layout import Layout, Mesh, Placement
from shardwise.embedding.jagged import JaggedTensor, KeyedJaggedTensor

CONSTANTS = (int, float, bool, str, complex, bytes, type(None), torch.dtype, torch.device, torch.Size)
# What a function may return beside tensors: a replay returns the same.
RETURNED = (*CONSTANTS, torch.layout, torch.memory_format, Enum, type, Layout, Mesh, Placement)
LEAVES = (Tensor, *CONSTANTS)


@dataclass(frozen=True)
class _Fields:
    """A dataclass on its way: a node of a tree, which pytree takes a dataclass for only if it is registered."""

    kind: type
    values: dict[str, Any]


def _rebuild(values: Iterable[object], context: tuple[type, tuple[str, ...]]) -> object:
    kind, names = context
    made: object = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # frozen or not
    return made


pytree.register_pytree_node(
    _Fields, lambda x: ([*x.values.values()], (x.kind, tuple(x.values))), cast(UnflattenFunc, _rebuild)
)


def flatten(value: object) -> tuple[list[Any], TreeSpec]:
    """The leaves of nested containers and dataclasses, and a spec whose `unflatten` rebuilds them from other leaves."""
    return pytree.tree_flatten(_with_fields(value), is_leaf=_is_size)


@lru_cache(maxsize=1024)
def jagged_leaves(spec: TreeSpec) -> frozenset[int]:
    """The leaves whose first size is a number of ids, which varies by batch: values and weights of jagged tensors."""
    found, ends = set[int](), spec.num_leaves
    if spec.type in (JaggedTensor, KeyedJaggedTensor):
        return frozenset(range(ends - 1))  # the lengths are last
    at = 0
    for child in spec.children():
        found.update(at + i for i in jagged_leaves(child))
        at += child.num_leaves
    return frozenset(found)


def _with_fields(value: object) -> object:
    return pytree.tree_map(_as_fields, value, is_leaf=_is_size)


def _as_fields(x: object) -> object:
    if isinstance(x, RETURNED) or not is_dataclass(x):
        return x
    return _Fields(type(x), {f.name: _with_fields(getattr(x, f.name)) for f in fields(x) if hasattr(x, f.name)})


def _is_size(x: object) -> bool:
    return isinstance(x, torch.Size)  # for pytree a tuple
