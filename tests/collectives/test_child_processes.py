"""Processes that a rank starts, such as workers of a DataLoader: spawned, with no memory of their rank."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shardwise import DTensor, Shard, distribute_tensor, rank, world_size
from shardwise.errors import RuleError, ThreadError
from shardwise.testing import world

pytestmark = pytest.mark.processes

EXAMPLES = 7


class ShardOfRank(IterableDataset[Any]):
    """Every n-th example for each of n ranks, found out in the worker, and what communicating there raises."""

    def __iter__(self) -> Iterator[Any]:
        yield from range(rank(), EXAMPLES, world_size())
        if get_worker_info() is not None:
            with pytest.raises(ThreadError) as caught:
                DTensor.from_local(torch.ones(rank()), placements=[Shard(0)])
            yield str(caught.value)


def read() -> list[Any]:
    """What a spawned worker reads on rank 1; the other ranks have none, which is as good and saves time."""
    workers = {"num_workers": 1, "multiprocessing_context": "spawn"} if rank() == 1 else {}
    return list(DataLoader(ShardOfRank(), batch_size=None, **workers))  # type: ignore[arg-type]


def test_a_spawned_worker_has_the_rank_of_its_parent_and_cannot_communicate() -> None:
    first, (*second, said), third = world(3).run(read)
    assert [first, second, third] == [[0, 3, 6], [1, 4], [2, 5]]
    assert said.startswith("A process that a rank started, such as a worker of a DataLoader, cannot communicate")


@world(2)
def test_a_dtensor_in_a_queue_of_processes_is_an_error_of_the_reader() -> None:
    queue = torch.multiprocessing.get_context("spawn").Queue()
    queue.put(distribute_tensor(torch.ones(3), placements=[Shard(0)]))
    with pytest.raises(RuleError, match="A DTensor cannot be pickled"):
        queue.get(timeout=20)
