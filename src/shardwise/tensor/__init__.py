"""The distributed tensor: one class, dispatch, conversions, gradients, factories."""

import shardwise.embedding  # noqa: F401  (registers the rules of lookups)
from shardwise.tensor import factories
from shardwise.tensor.autograd import functions
from shardwise.tensor.conversion import distribute_tensor
from shardwise.tensor.dispatch import entry
from shardwise.tensor.dispatch.promotion import strict
from shardwise.tensor.dtensor import DTensor, moved, plain, tag
from shardwise.tensor.handlers import (
    arriving,
    checkpointable,
    compositions,
    fused,
    indexing,
    inplace_views,
    optimisers,
    random_functions,
    sparse,
)

__all__ = [
    "DTensor", "arriving", "checkpointable", "compositions", "distribute_tensor", "entry", "factories", "functions",
    "fused", "indexing", "inplace_views", "moved", "optimisers", "plain", "random_functions", "sparse", "strict", "tag",
]  # fmt: skip
