"""What a step takes under any plan, also one that is written by hand.

The program is the real one, on one simulated rank: `parallelize_module`, `fully_shard`, forward, backward, AdamW.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from shardwise._layout import Mesh
from shardwise.plan.module_trace import Step
from shardwise.simulation.api import simulate_rank, training
from shardwise.simulation.result import sent_by_cause
from shardwise.simulation.topology import Topology


@dataclass(frozen=True)
class StepPrice:
    """The modelled step of one rank.

    Attributes:
        compute: seconds of ops.
        communication: seconds of collectives.
        sent_bytes: of the rank.
        memory: bytes at the peak, by what they are for; with states of all parameters that train.
        sent_by_cause: the bytes of each cause of communication.
    """

    compute: float
    communication: float
    sent_bytes: int
    memory: Mapping[str, int]
    sent_by_cause: Mapping[str, int]

    @property
    def seconds(self) -> float:
        return self.compute + self.communication

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())


def price_step(
    module: nn.Module, apply: Callable[[nn.Module], object], step: Step, mesh: Mesh, topology: Topology
) -> StepPrice:
    """The modelled step of rank 0 of `mesh`.

    Args:
        apply: parallelises a copy of the module in place.
        step: runs the forward on this rank's part of the batch, and the loss if there is one.
    """
    build = training(module, lambda model, _: apply(model), step, first_step=False)
    one, _ = simulate_rank(build, mesh, topology, mesh.ranks[0])
    return StepPrice(one.compute, one.communication, one.sent_bytes, one.memory, sent_by_cause(one.collectives))
