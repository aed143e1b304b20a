"""The distributed tensor: one class, dispatch, conversions, gradients, factories.

This file completes the class `DTensor`, and imports the modules that register ops.
"""

import shardwise._attention
import shardwise._lookups
import shardwise._tensor.handlers.compositions
import shardwise._tensor.handlers.indexing
import shardwise._tensor.handlers.lists  # noqa: F401  (all five register ops)
from shardwise._tensor import conversion
from shardwise._tensor.autograd import gradients
from shardwise._tensor.conversion import distribute_tensor
from shardwise._tensor.dispatch import dispatcher
from shardwise._tensor.dispatch.operands import across, strict
from shardwise._tensor.dtensor import DTensor, check_owners, implement, plain, tag, to_layout
from shardwise._tensor.handlers import attributes

__all__ = ["DTensor", "check_owners", "distribute_tensor", "plain", "strict", "tag", "to_layout"]

implement(
    dispatch=dispatcher.dispatch,
    dispatch_unseen=dispatcher.dispatch,
    from_local=conversion.from_local,
    to_local=conversion.to_local,
    across=across,
    redistributed=conversion.async_redistribute,
    backward=gradients.backward,
    read_grad=gradients.read_grad,
    write_grad=gradients.write_grad,
    set=attributes.set_,
)
