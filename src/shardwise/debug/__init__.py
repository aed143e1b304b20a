"""Debugging: what code sends and why, whether ops are right, and where shards are."""

from shardwise._trace.comm_trace import CommEvent
from shardwise.debug.budget import no_implicit_comm
from shardwise.debug.comm_mode import CommDebugMode
from shardwise.debug.explanation import explain
from shardwise.debug.layouts import explain_redistribute, visualize_sharding
from shardwise.debug.module_tracker import profiler_ranges
from shardwise.debug.shadow import shadow

__all__ = [
    "CommDebugMode", "CommEvent", "explain", "explain_redistribute", "no_implicit_comm", "profiler_ranges", "shadow",
    "visualize_sharding",
]  # fmt: skip
