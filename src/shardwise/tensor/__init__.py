"""The distributed tensor: one class, two doors, conversions, gradients, factories."""

from shardwise.tensor import arriving, dispatch, factories, functions, items, random_functions, sparse  # open the doors
from shardwise.tensor.conversion import distribute_tensor
from shardwise.tensor.dtensor import DTensor, moved, plain, tag
from shardwise.tensor.promotion import strict

__all__ = [
    "DTensor",
    "arriving",
    "dispatch",
    "distribute_tensor",
    "factories",
    "functions",
    "items",
    "moved",
    "plain",
    "random_functions",
    "sparse",
    "strict",
    "tag",
]
