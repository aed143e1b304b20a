"""The distributed tensor: one class, two doors, conversions, gradients, factories."""

from shardwise.tensor import (  # open the doors
    arriving,
    checkpointable,
    compositions,
    dispatch,
    factories,
    functions,
    fused,
    indexing,
    inplace_views,
    optimisers,
    random_functions,
    sharded,
    sparse,
)
from shardwise.tensor.conversion import distribute_tensor
from shardwise.tensor.dtensor import DTensor, moved, plain, tag
from shardwise.tensor.promotion import strict

__all__ = [
    "DTensor",
    "arriving",
    "checkpointable",
    "compositions",
    "dispatch",
    "distribute_tensor",
    "factories",
    "functions",
    "fused",
    "indexing",
    "inplace_views",
    "moved",
    "optimisers",
    "plain",
    "random_functions",
    "sharded",
    "sparse",
    "strict",
    "tag",
]
