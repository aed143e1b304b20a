"""The one table of op rules. Importing this package fills it, except for those of lookups and of attention."""

from shardwise._rules import linalg, loss, matmul, pointwise, random_ops, recurrent, windows
from shardwise._rules.local_context import LocalContext
from shardwise._rules.reductions import count, normalization, order, reduce
from shardwise._rules.registry import RULES, OpRule, register
from shardwise._rules.row import Meta, Row
from shardwise._rules.shapes import index, join, view

__all__ = [
    "RULES", "LocalContext", "Meta", "OpRule", "Row", "count", "index", "join", "linalg", "loss", "matmul",
    "normalization", "order", "pointwise", "random_ops", "recurrent", "reduce", "register", "view", "windows",
]  # fmt: skip

pointwise.register_tagged()  # the ops that no other file has a rule for
