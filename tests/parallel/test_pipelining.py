"""torch's pipeline schedules, with our tensor parallelism or fully sharded parameters inside each stage."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from shardwise import DTensor, init_device_mesh, rank
from shardwise.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from shardwise.testing import world

STAGES, BLOCKS, MICROBATCHES, EXAMPLES, DIM = 2, 4, 3, 12, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 10), nn.Linear(10, DIM)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


@pytest.mark.processes
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_gradients_of_stages_are_those_of_one_process(schedule: type[ScheduleGPipe | Schedule1F1B], axis: str) -> None:
    world(4, real=True).run(compare, schedule, axis)


def compare(schedule: type[ScheduleGPipe | Schedule1F1B], axis: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
    x, y = torch.randn(EXAMPLES, DIM), torch.randn(EXAMPLES, DIM)
    mesh = init_device_mesh("cpu", (STAGES, 2), mesh_dim_names=("pp", axis))
    stage, own = divmod(rank(), 2)
    part = deepcopy(model[stage * 2 : stage * 2 + 2])
    if axis == "tp":
        parallelize_module(part, mesh[axis], {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
        examples = slice(None)
    else:
        fully_shard(part, mesh=mesh[axis])
        examples = slice(own, None, 2)
    inputs, targets = x[examples], y[examples]
    # Without the shapes torch would run the stage on uninitialized memory, which differs by rank.
    size = inputs.chunk(MICROBATCHES)[0].shape
    received = torch.empty(size, device="meta", requires_grad=stage > 0)
    sent = torch.empty(size, device="meta", requires_grad=True)
    pipeline = PipelineStage(part, stage, STAGES, torch.device("cpu"), received, sent, group=mesh.get_group("pp"))
    run = schedule(pipeline, MICROBATCHES, loss_fn=F.mse_loss)
    losses: list[Tensor] = []
    run.step(*[inputs] * (stage == 0), target=targets, losses=losses)

    loss = F.mse_loss(model(x), y)
    loss.backward()
    if stage == STAGES - 1 and axis == "tp":
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
    for (name, mine), expected in zip(
        part.named_parameters(), model[stage * 2 : stage * 2 + 2].parameters(), strict=True
    ):
        assert isinstance(mine.grad, DTensor), name
        torch.testing.assert_close(mine.grad.full_tensor(), expected.grad)
