"""What a step takes under any plan, also one that is written by hand.

The program is the real one, on one simulated rank: `parallelize_module`, `fully_shard`, forward, backward, AdamW.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise._layout import Mesh
from shardwise.plan.module_trace import Step
from shardwise.simulation.api import without_values
from shardwise.simulation.clock import RankClock
from shardwise.simulation.memory import Roles
from shardwise.simulation.topology import Topology


@dataclass(frozen=True)
class StepPrice:
    """The modelled step of one rank.

    Attributes:
        compute: seconds of ops.
        communication: seconds of collectives.
        sent_bytes: of the rank.
        memory: bytes at the peak, by what they are for.
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
    clock = RankClock(mesh, topology)
    roles = Roles(clock.memory)
    with roles.watching(), clock.running():
        model = without_values(module)
        apply(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        _train(model, step, optimizer)  # in which the optimizer makes its states
        gc.collect()
        start = len(clock.memory.log)
        clock.restart()
        _train(model, step, optimizer)
        seconds, sent = clock.seconds(), clock.sent_by_cause()
        roles.find()
    return StepPrice(*seconds, roles.at_peak(start), sent)


def _train(model: nn.Module, step: Step, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    trained = [x for x in pytree.tree_leaves(step(model)) if isinstance(x, Tensor) and x.requires_grad]
    losses = [x for x in trained if not x.ndim][:1]
    torch.autograd.backward(losses or [x.sum() for x in trained])
    optimizer.step()
