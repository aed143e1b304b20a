"""The distributed tensor: one class, dispatch, conversions, gradients, factories.

This file is where the class `DTensor` is completed, and where the modules that register ops are imported.
"""

import shardwise._attention
import shardwise._lookups  # noqa: F401  (both register rules)
from shardwise._tensor import conversion, factories, state_dicts, torch_dtensors, torch_patches
from shardwise._tensor.autograd import functions, gradients
from shardwise._tensor.conversion import distribute_tensor
from shardwise._tensor.dispatch import dispatcher
from shardwise._tensor.dispatch.operands import across, strict
from shardwise._tensor.dtensor import DTensor, check_owners, implement, plain, tag, to_layout
from shardwise._tensor.handlers import (
    async_redistribute,
    attributes,
    bypasses,
    compositions,
    indexing,
    lists,
    optimizers,
    sparse,
)

__all__ = [
    "DTensor",
    "async_redistribute",
    "attributes",
    "bypasses",
    "check_owners",
    "compositions",
    "distribute_tensor",
    "factories",
    "functions",
    "indexing",
    "lists",
    "optimizers",
    "plain",
    "sparse",
    "state_dicts",
    "strict",
    "tag",
    "to_layout",
    "torch_dtensors",
    "torch_patches",
]  # fmt: skip

implement(
    dispatch=dispatcher.dispatch,
    from_local=conversion.from_local,
    to_local=conversion.to_local,
    across=across,
    redistributed=async_redistribute.async_redistribute,
    backward=gradients.backward,
    read_grad=gradients.read,
    write_grad=gradients.write,
    set=attributes.set_,
)
