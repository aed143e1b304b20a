"""The distributed tensor: one class, two doors, conversions, gradients, factories."""

from shardwise.tensor import dispatch  # opens the doors
from shardwise.tensor.conversion import distribute_tensor
from shardwise.tensor.dispatch import strict
from shardwise.tensor.dtensor import DTensor, moved, plain, tag

__all__ = ["DTensor", "dispatch", "distribute_tensor", "moved", "plain", "strict", "tag"]
