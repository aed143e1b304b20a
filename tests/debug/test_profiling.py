"""What `torch.profiler` records of ops and collectives inside `profiler_ranges`."""

import re

import pytest
import torch
from torch import Tensor, nn

from shardwise import Mesh, Replicate, Shard, count_comms, distribute_tensor, shard_module, world_size
from shardwise._tensor.dispatch.hooks import are_installed
from shardwise.debug import profiler_ranges
from shardwise.testing import world


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.up(x))
        return out


def ranges(inside: bool) -> list[str]:
    """The names that the profiler has of a step; the bytes of its collectives are compared with what was counted."""
    mesh = Mesh((world_size(),))
    block = shard_module(Block(), {"up.weight": Shard(1), "up.bias": Replicate()}, mesh=mesh)
    x = distribute_tensor(torch.ones(3, 4), mesh, [Replicate()])
    with torch.profiler.profile() as profile, count_comms() as counted:
        if inside:
            with profiler_ranges():
                block(x).square().sum().backward()
        else:
            block(x).square().sum().backward()
    names = [event.name for event in profile.events()]
    sent = [int(n[1].replace(",", "")) for name in names if (n := re.search(r"([\d,]+) bytes sent for", name))]
    assert sum(sent) == (counted.total_bytes if inside else 0)
    assert len(sent) == (counted.total_calls if inside else 0)
    assert not are_installed()
    return names


def test_an_op_has_its_layouts_and_module() -> None:
    (names,) = world(1).run(lambda: ranges(True))
    assert "linear: [Replicate()], [Shard(1)], [Replicate()] in Block.up" in names
    assert any(re.fullmatch(r"gelu: \[.*\] in Block.act", name) for name in names)
    assert any(name.startswith("sum: ") and name.endswith(" in Global") for name in names)
    assert "aten::addmm" in names


def test_outside_of_the_block_the_profiler_records_what_torch_does() -> None:
    (names,) = world(1).run(lambda: ranges(False))
    assert not any(" in Block" in name or " in Global" in name for name in names)


@pytest.mark.processes
def test_a_collective_has_its_bytes_and_its_cause() -> None:
    for names in world(2, real=True).run(ranges, True):
        assert any(re.match(r"all_\w+: [\d,]+ bytes sent for gelu, operand 0, in Block.act", name) for name in names)
