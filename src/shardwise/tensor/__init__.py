"""The distributed tensor: one class, two doors, conversions, gradients, factories."""

from shardwise.tensor import dispatch, factories, sparse  # open the doors
from shardwise.tensor.conversion import distribute_tensor
from shardwise.tensor.dispatch import strict
from shardwise.tensor.dtensor import DTensor, moved, plain, tag

__all__ = [
    "DTensor",
    "dispatch",
    "distribute_tensor",
    "factories",
    "moved",
    "plain",
    "sparse",
    "strict",
    "tag",
]
