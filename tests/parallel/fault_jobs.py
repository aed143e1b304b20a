"""What ranks do in `test_unit_faults`."""

import torch
from torch import nn

from shardwise import Mesh, Shard, distribute_tensor
from shardwise import _collectives as collectives
from tests.collectives.test_survivors import end
from tests.parallel.units import as_units


def fail_in_a_step(where: str, how: str) -> None:
    """Rank 1 ends in the second step, while others gather or reduce."""
    torch.manual_seed(0)
    mesh = Mesh((3,))
    model = as_units(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), mesh, prefetch=2)
    batch = distribute_tensor(torch.ones(6, 8), mesh, [Shard(0)])
    model(batch).sum().backward()

    def fail(*args: object) -> None:
        if collectives.rank() == 1:
            end(how)

    match where:
        case "all-gather":  # of the unit after the one in which it ends
            model[1].register_forward_pre_hook(fail)
        case "backward":
            model[2].register_full_backward_pre_hook(fail)
        case "reduce-scatter":  # of the unit before
            model[1].register_full_backward_hook(fail)
    model(batch).sum().backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.to_local()


def use_other_units() -> None:
    mesh = Mesh((3,))
    model = as_units(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh)
    batch = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    model(batch).sum().backward()
    unit = model[1 if collectives.rank() == 2 else 0]
    unit(batch).sum().backward()
    unit.weight.grad.to_local()
