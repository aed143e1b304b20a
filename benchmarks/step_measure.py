"""What `plan_steps.py` measures of a step on all ranks, and how it compares that with what was predicted."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from measure import print_table

from shardwise import count_comms
from shardwise.simulation.memory import Memory, Roles


@dataclass(frozen=True)
class Measured:
    """A step: seconds of the slowest rank, in each round; the bytes that each rank sends, and holds at the peak."""

    rounds: list[float]
    sent_bytes: list[int]
    memory: list[int]


@dataclass(frozen=True)
class Predicted:
    """The same of a plan with a name."""

    name: str
    seconds: float
    sent_bytes: list[int]
    memory: float  # of the fullest rank


def measure_steps(steps: Sequence[Callable[[], object]], rounds: int) -> list[Measured]:
    """Runs on ranks. Steps take turns, so that a slow moment of the machine is not one step's: two rounds to warm up,
    those that are timed, one whose bytes are counted, two for memory."""
    times = np.zeros((rounds + 2, len(steps)))
    gc.collect()
    gc.disable()
    for of_round in times:
        for number, step in enumerate(steps):
            dist.barrier()
            begun = perf_counter()
            step()
            of_round[number] = perf_counter() - begun
    gc.enable()
    slowest = torch.from_numpy(times)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found = []
    for step, of_step in zip(steps, slowest[2:].T.tolist(), strict=True):
        with count_comms() as comms:
            step()
        with Memory(allocate=True) as memory:
            step()  # after it all storages that a step uses are known
            gc.collect()
            start = len(memory.log)
            step()
        held = sum(Roles(memory).at_peak(start).values())
        each: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
        dist.all_gather_object(each, (comms.total_bytes, held))
        found.append(Measured(of_step, *map(list, zip(*each, strict=True))))
    return found


def counted_step(rounds: int) -> int:
    """The number of the step whose bytes are counted."""
    return rounds + 3


def report(title: str, predicted: Sequence[Predicted], measured: Sequence[Measured]) -> None:
    rows, times, fullest = [], [], []
    for said, found in zip(predicted, measured, strict=True):
        times.append((1e3 * said.seconds, 1e3 * median(found.rounds)))
        fullest.append((said.memory / 1e6, max(found.memory) / 1e6))
        sent = said.sent_bytes, found.sent_bytes[: len(said.sent_bytes)]
        rows.append([said.name, *of(times[-1]), f"{max(sent[0]) / 1e6:.2f}", sent[0] == sent[1], *of(fullest[-1])])
    columns = ["plan", "ms", "measured", "error", "MB sent", "equal", "MB held", "measured", "error"]
    print_table(title, columns, rows)
    correlation, (slow, full) = rank_correlation(times), (map(error, x) for x in (times, fullest))
    worst = max(fullest, key=lambda pair: abs(error(pair)))
    print(
        f"rank correlation of times {correlation:.3f}, median error {median(map(abs, slow)):.0%}; median error of "
        f"memory {median(map(abs, full)):.1%}, worst {error(worst):+.1%}"
    )


def of(pair: tuple[float, float]) -> list[str]:
    return [f"{pair[0]:.1f}", f"{pair[1]:.1f}", f"{error(pair):+.0%}"]


def error(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1] - 1


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's."""
    ranks = np.argsort(np.argsort(np.array(pairs), axis=0), axis=0)
    return float(np.corrcoef(ranks.T)[0, 1])
