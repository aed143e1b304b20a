"""Collectives of plain tensors, and what ranks check of each other. `DTensor` calls the collectives for you."""

from shardwise._collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    check_ranks,
    check_values,
    init_processes,
    reduce_scatter,
)
from shardwise._launch import under_torchrun

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "check_ranks", "check_values", "init_processes",
    "reduce_scatter", "under_torchrun",
]  # fmt: skip
