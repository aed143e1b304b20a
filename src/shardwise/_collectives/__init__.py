"""The only package that uses `torch.distributed`: transports, collectives, what ranks compare, and how one fails.

The rest of the library uses a `Transport`: the processes of `torch.distributed`, or ranks simulated in one
process (`shardwise.testing`). `_trace/comm_trace.py` records the collectives, so plans can be checked against it.
A rank that fails publishes that in the store of the world (`failures`), so all ranks raise the same error.
"""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.remote_device import _remote_device as RemoteDevice

from shardwise._collectives.agreement import (
    agree,
    disagreement,
    gather_if_different,
    gather_json,
    gather_json_to_first,
)
from shardwise._collectives.api import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    check_ranks,
    check_values,
    costs,
    exchange_messages,
    expect_equal,
    expect_equal_numbers,
    expect_equal_options,
    fingerprint,
    is_here,
    is_simulated,
    message_device,
    notes_numbers,
    outside_ranks,
    owner,
    rank,
    rank_of_thread,
    reduce_scatter,
    start,
    transport,
    using,
    world_size,
)
from shardwise._collectives.checks.ledger import is_sampled, when_noting_numbers
from shardwise._collectives.checks.values import rolling, stable_digest
from shardwise._collectives.collective_call import Allocate, Collective, Ranks, Wait, describing
from shardwise._collectives.failures.reports import has_failed, report_failure
from shardwise._collectives.joining import begin_again, init_from_environment, init_processes, shutdown
from shardwise._collectives.meshes import (
    as_mesh,
    current_mesh,
    device_mesh,
    group_ranks,
    init_device_mesh,
    process_group,
    rank_and_size,
)
from shardwise._collectives.torch_bridge import chunks, storage_metadata, torch_dtensor, write_items
from shardwise._collectives.transport import Transport, draw_from_torch, reduce_stack
from shardwise._trace.comm_trace import CommCounts, count_comms

__all__ = [
    "Allocate", "Collective", "CommCounts", "DeviceMesh", "Ranks", "RemoteDevice", "Transport", "Wait", "agree",
    "all_gather", "all_reduce", "all_to_all", "as_mesh", "barrier", "begin_again", "broadcast", "check_ranks",
    "check_values", "chunks", "costs", "count_comms", "current_mesh", "describing", "device_mesh", "disagreement",
    "draw_from_torch", "exchange_messages", "expect_equal", "expect_equal_numbers", "expect_equal_options",
    "fingerprint", "gather_if_different", "gather_json", "gather_json_to_first", "group_ranks", "has_failed",
    "init_device_mesh", "init_from_environment", "init_processes", "is_here", "is_sampled", "is_simulated",
    "message_device", "notes_numbers", "outside_ranks", "owner", "process_group", "rank", "rank_and_size",
    "rank_of_thread", "reduce_scatter", "reduce_stack", "report_failure", "rolling", "shutdown", "stable_digest",
    "start", "storage_metadata", "torch_dtensor", "transport", "using", "when_noting_numbers", "world_size",
    "write_items",
]  # fmt: skip
