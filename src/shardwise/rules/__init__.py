"""The one table of op rules. Importing this package fills it; the tensor reads it."""

from shardwise.rules import (
    attention,
    conv,
    count,
    dropout,
    embedding,
    image,
    index,
    join,
    loss,
    matmul,
    normal,
    order,
    pointwise,
    pool,
    random,
    recurrent,
    reduce,
    reshape,
    slices,
    trials,
    view,
)
from shardwise.rules.row import RULES, Meta, OpRule, Row, Site, op_rule

__all__ = [
    "RULES", "Meta", "OpRule", "Row", "Site", "attention", "conv", "count", "dropout", "embedding", "image", "index",
    "join", "loss", "matmul", "normal", "op_rule", "order", "pointwise", "pool", "random", "recurrent", "reduce",
    "reshape", "slices", "trials", "view",
]  # fmt: skip
