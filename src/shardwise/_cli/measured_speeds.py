"""Measures how fast ranks compute, look up rows and update them, for `shardwise doctor --calibrate`."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from shardwise import _collectives as collectives
from shardwise.embedding import RowWiseAdagrad
from shardwise.embedding.kernels import Stack, fastest_kernels
from shardwise.plan.table_costs import update_bytes

COLUMNS = 64
TABLE_BYTES = 128 << 20  # larger than the caches of a core
IDS = 1 << 15
BAG = 16  # ids of a bag, where rows are read and few sums are made
SIDE = 1024  # side of the multiplied matrices
ROUNDS = 5
ROUND_SECONDS = 0.05  # longer than the time slice of a process, where ranks share cores
FASTEST = 1e13  # bytes in a second, where a difference of times says nothing


def measure_speeds(device_type: str) -> dict[str, float]:
    """The speeds of a `Topology` by name. All ranks call this at once, and get equal results."""
    device, optimizer = torch.device(device_type), RowWiseAdagrad(lr=0.1)
    kernels, rows = fastest_kernels(device), TABLE_BYTES // (4 * COLUMNS)
    weight = torch.zeros(rows, COLUMNS, device=device)
    stack = Stack(weight, kernels, optimizer.new_states(weight))
    ids = torch.randint(rows, (IDS,), dtype=torch.int32, device=device)
    singles, bags = (torch.arange(0, IDS + 1, n, dtype=torch.int32, device=device) for n in (1, BAG))
    gradient, sums = (torch.zeros(IDS, COLUMNS, device=device) for _ in range(2))
    matrix, to = (torch.zeros(SIDE, SIDE, device=device) for _ in range(2))

    def pool(offsets: torch.Tensor) -> object:
        return kernels.pool(weight, ids, offsets, None, lambda n: sums.view(-1)[:n])

    def update() -> None:
        optimizer(stack, kernels.by_row(ids, singles), gradient, 1)

    of_singles, of_bags = _seconds(lambda: pool(singles), device_type), _seconds(lambda: pool(bags), device_type)
    of_sums = (of_singles - of_bags) * BAG / (BAG - 1)  # the others are those of reading rows
    of_updates, size = _seconds(update, device_type), sums.nbytes
    updated = float(update_bytes(IDS, len(ids.unique()), COLUMNS, 4, 0))
    return {
        "flops": 2 * SIDE**3 / _seconds(lambda: torch.mm(matrix, matrix, out=to), device_type),
        "memory_bandwidth": weight.nbytes / _seconds(lambda: _halves(weight), device_type),
        "lookup_bandwidth": size / max(of_bags - of_sums / BAG, size / FASTEST),
        "message_bandwidth": size / max(of_sums, size / FASTEST),
        "update_bandwidth": updated / of_updates,
        "alone": max(1.0, of_updates / _seconds(update, device_type, alone=True)),
    }


def _halves(x: torch.Tensor) -> object:
    """Copy the first half of a tensor to the second one."""
    half = len(x) // 2
    return x[half:].copy_(x[:half])


def _seconds(call: Callable[[], object], device_type: str, alone: bool = False) -> float:
    """The time of a call on the mean rank, while all ranks make it; alone: on the first rank, while others wait."""
    everyone = tuple(range(collectives.world_size()))
    idle = alone and collectives.rank() != 0
    calls = 1 if idle else _calls(call, device_type)
    times = []
    for _ in range(ROUNDS):
        collectives.barrier(everyone)
        times.append(0.0 if idle else _timed(call, calls, device_type) / calls)
    of_ranks: list[float] = collectives.gather_json(median(times), everyone)
    return of_ranks[0] if alone else sum(of_ranks) / len(of_ranks)


def _calls(call: Callable[[], object], device_type: str) -> int:
    """The number of calls that take about as long as a round."""
    call()
    return 1 + int(ROUND_SECONDS / _timed(call, 2, device_type) * 2)


def _timed(call: Callable[[], object], calls: int, device_type: str) -> float:
    if device_type == "cuda":
        torch.cuda.synchronize()
    begun = perf_counter()
    for _ in range(calls):
        call()
    if device_type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - begun
