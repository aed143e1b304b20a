"""Debugging: what code sends and why, whether ops are right, and where shards are."""

from shardwise.debug.budget import Budget, no_implicit_comm
from shardwise.debug.comm_mode import CommDebugMode
from shardwise.debug.compare_plans import CollectiveSequence, RedistributeComparison, explain_redistribute
from shardwise.debug.explanation import Explanation, explain
from shardwise.debug.module_tracker import profiler_ranges
from shardwise.debug.shadow import Shadow, shadow
from shardwise.debug.visualize import visualize_sharding
from shardwise.trace.comm_trace import Cause, CommEvent

__all__ = [
    "Budget", "Cause", "CollectiveSequence", "CommDebugMode", "CommEvent", "Explanation", "RedistributeComparison",
    "Shadow", "explain", "explain_redistribute", "no_implicit_comm", "profiler_ranges", "shadow", "visualize_sharding",
]  # fmt: skip
