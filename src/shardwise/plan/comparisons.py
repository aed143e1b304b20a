"""Differences between two plans (`PlanChange`), and between a plan and a step that runs (`PlanCheck`)."""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from shardwise import _collectives as collectives
from shardwise._collectives import Ranks
from shardwise._layout import Mesh
from shardwise._pictures.labels import bytes_text, more_bytes_text
from shardwise._pictures.report import Report, table_text
from shardwise._trace.comm_trace import listening_with
from shardwise.simulation.memory import Memory, Roles
from shardwise.simulation.result import Recorded, sent_by_cause
from shardwise.simulation.topology import Topology

STEPS = 3  # timed steps


class PlanChange(NamedTuple):
    """The differences of another choice; numbers above 0 are costs.

    Attributes:
        sharding: the other choice.
        milliseconds: of a step.
        sent_bytes: of the rank that sends and receives most in a step.
        memory: bytes of the fullest rank.
    """

    sharding: str
    milliseconds: float
    sent_bytes: int
    memory: int

    def __str__(self) -> str:
        return (
            f"{self.sharding}: {self.milliseconds:+.3f} ms a step, {more_bytes_text(self.sent_bytes)} sent, "
            f"{more_bytes_text(self.memory)} of memory"
        )


# ---- a plan and a run -----------------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A number that a plan predicts, and the measured one."""

    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """The difference of measured and predicted, as a share of the predicted one."""
        return self.measured / self.predicted - 1 if self.predicted else float(bool(self.measured))


@dataclass(frozen=True, repr=False)
class PlanCheck(Report):
    """A plan beside a step that ran, equal on all ranks; `print` it.

    Attributes:
        sent_bytes: for each cause of communication, such as the redistribution of a parameter.
        memory: bytes at the peak of the rank that needs most in the plan.
        milliseconds: of a step; the plan's time is that of its topology.
        note: why bytes may differ.
    """

    sent_bytes: Mapping[str, Figure]
    memory: Figure
    milliseconds: Figure
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether exactly the predicted bytes were sent."""
        return not self.different

    @property
    def different(self) -> dict[str, Figure]:
        """The causes whose measured bytes differ from the predicted."""
        return {cause: figure for cause, figure in self.sent_bytes.items() if figure.predicted != figure.measured}

    def text(self, width: int | None = None, colour: bool = False) -> str:
        """A table of the figures, then one of the causes that differ."""
        sent = Figure(*map(sum, zip(*self.sent_bytes.values(), strict=True))) if self.sent_bytes else Figure(0, 0)
        rows = [("", "predicted", "measured", "difference")]
        for what, figure, form in (
            ("bytes sent", sent, "{:,.0f}".format),
            ("memory", self.memory, bytes_text),
            ("ms of a step", self.milliseconds, "{:.4g}".format),
        ):
            rows.append((what, form(figure.predicted), form(figure.measured), f"{figure.difference:+.1%}"))
        lines = ["The bytes sent are those of the plan." if self.ok else "Other bytes were sent than planned.", ""]
        lines.append(table_text(rows, "lrrr", width))
        if not self.ok:
            causes = [(f"{x.predicted:,.0f}", f"{x.measured:,.0f}", cause) for cause, x in self.different.items()]
            lines += ["", table_text([("predicted", "measured", "bytes sent for"), *causes], "rrl", width), self.note]
        return "\n".join(lines)


class StepRun(NamedTuple):
    """One rank's step: seconds, bytes sent by cause, and bytes at the peak of its memory."""

    seconds: float
    sent: dict[str, int]
    memory: int


def run_steps(step: Callable[[], object], mesh: Mesh, fullest: int) -> list[StepRun]:
    """Steps of each rank of the mesh; all ranks call it.

    The first step is not counted. Bytes and memory are those of the second, times those of later ones.

    Args:
        fullest: the rank whose memory is measured; others have 0.
    """
    ranks = mesh.sorted_ranks
    recorded, memory = Recorded(), Memory(allocate=True)
    with ExitStack() as entered:
        if collectives.rank() == fullest:
            entered.enter_context(torch.autograd.set_multithreading_enabled(False))
            entered.enter_context(memory)
        step()
        gc.collect()
        start = len(memory.log)
        with listening_with(recorded):
            step()
    seconds = median([_seconds(step, ranks, mesh.device_type) for _ in range(STEPS)])
    run = StepRun(seconds, sent_by_cause(recorded.collectives), sum(Roles(memory).at_peak(start).values()))
    return [StepRun(*of_rank) for of_rank in collectives.gather_json(run, ranks)]


def _seconds(step: Callable[[], object], ranks: Ranks, device_type: str) -> float:
    collectives.barrier(ranks)
    start = perf_counter()
    step()
    if device_type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - start


def check_of(
    predicted: Mapping[str, int], sent: Mapping[str, int], memory: Figure, seconds: float, runs: Sequence[StepRun],
    note: str = "",
) -> PlanCheck:  # fmt: skip
    """A plan beside the steps of all ranks; a step ends with the slowest rank."""
    causes = {cause: Figure(predicted.get(cause, 0), sent.get(cause, 0)) for cause in {**predicted, **sent}}
    slowest = max(run.seconds for run in runs)
    return PlanCheck(causes, memory, Figure(1e3 * seconds, 1e3 * slowest), note)


def other_costs(topology: Topology, device_type: str) -> str:
    """A note if ranks choose between an all-reduce and an all-to-all by costs that differ from the plan's."""
    of_run = collectives.costs(device_type)
    if topology.costs.numbers() == of_run.numbers():
        return ""
    return (
        f"Ranks plan redistributions by other costs ({of_run.source}) than the plan. Fix: for both a file of "
        f"shardwise doctor --calibrate: topology.with_costs_of(file), and SHARDWISE_COSTS."
    )
