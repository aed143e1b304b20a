"""The one table of op rules. Importing this package fills it, except for those of lookups and of attention."""

from shardwise.rules import conv, image, loss, matmul, pointwise, pool, recurrent
from shardwise.rules.local_context import LocalContext
from shardwise.rules.random import dropout, random
from shardwise.rules.reductions import count, normalisation, order, reduce
from shardwise.rules.registry import RULES, OpRule, op_rule
from shardwise.rules.row import Meta, Row
from shardwise.rules.shapes import index, join, masks, reshape, slices, view, view_copies

__all__ = [
    "RULES", "LocalContext", "Meta", "OpRule", "Row", "conv", "count", "dropout", "image",
    "index", "join", "loss", "masks", "matmul", "normalisation", "op_rule", "order", "pointwise", "pool", "random",
    "recurrent", "reduce", "reshape", "slices", "view", "view_copies",
]  # fmt: skip

pointwise.register_tagged()  # the ops that no other file has a rule for
view_copies.register_tagged()
