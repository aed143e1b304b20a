"""Processes that a rank starts, such as workers of a DataLoader: spawned, with no memory of their rank."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from shardwise import DTensor, Shard, distribute_tensor, rank, world_size
from shardwise.errors import RuleError, ThreadError
from shardwise.testing import world

pytestmark = pytest.mark.processes

EXAMPLES = 7


class ShardOfRank(IterableDataset[int]):
    """Every n-th example for each of n ranks, found out in the worker."""

    def __iter__(self) -> Iterator[int]:
        yield from range(rank(), EXAMPLES, world_size())


class Communicating(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        DTensor.from_local(torch.ones(rank()), placements=[Shard(0)])
        yield 0


def read(dataset: IterableDataset[int]) -> list[int]:
    """What a spawned worker reads on rank 1; the other ranks have none, which is as good and saves time."""
    workers = {"num_workers": 1, "multiprocessing_context": "spawn"} if rank() == 1 else {}
    loader = DataLoader(dataset, batch_size=None, **workers)  # type: ignore[arg-type]
    return list(loader)


def test_a_spawned_worker_has_the_rank_of_its_parent() -> None:
    assert world(3).run(read, ShardOfRank()) == [[0, 3, 6], [1, 4], [2, 5]]


@world(2)
def test_a_spawned_worker_cannot_communicate() -> None:
    if rank() == 1:
        with pytest.raises(ThreadError, match="process that a rank started, such as a worker of a DataLoader"):
            read(Communicating())


@world(2)
def test_a_dtensor_in_a_queue_of_processes_is_an_error_of_the_reader() -> None:
    queue = torch.multiprocessing.get_context("spawn").Queue()
    queue.put(distribute_tensor(torch.ones(3), placements=[Shard(0)]))
    with pytest.raises(RuleError, match="A DTensor cannot be pickled"):
        queue.get(timeout=20)
