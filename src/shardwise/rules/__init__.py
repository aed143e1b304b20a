"""The one table of op rules. Importing this package fills it; the tensor reads it."""

from shardwise.rules import (
    attention,
    conv,
    dropout,
    embedding,
    join,
    loss,
    matmul,
    normal,
    pointwise,
    pool,
    random,
    reduce,
    reshape,
    view,
)  # fmt: skip
from shardwise.rules.row import RULES, Meta, OpRule, Row, Site, op_rule

__all__ = [
    "RULES", "Meta", "OpRule", "Row", "Site", "attention", "conv", "dropout", "embedding", "join", "loss", "matmul",
    "normal", "op_rule", "pointwise", "pool", "random", "reduce", "reshape", "view",
]  # fmt: skip
