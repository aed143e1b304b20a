"""A DTensor has the local tensor of one rank of one world; any other rank or world refuses it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from shardwise import DTensor, Mesh, Replicate, Shard, checkpoint, collectives, distribute_tensor, rank
from shardwise.errors import MeshError
from shardwise.experimental import local_map
from shardwise.testing import world

MESH, X = Mesh((2,)), torch.arange(8.0).view(4, 2)


def sharded() -> DTensor:
    return distribute_tensor(X, MESH, [Shard(0)])


def replicated() -> DTensor:
    return distribute_tensor(X, MESH, [Replicate()])


def step(x: DTensor) -> None:
    parameter = nn.Parameter(x)
    parameter.grad = x
    optim.AdamW([parameter]).step()


def write(x: DTensor) -> None:
    x[0] = 1.0


def set_data(x: DTensor) -> None:
    nn.Parameter(sharded()).data = x


def into(x: DTensor) -> None:
    sharded().copy_(x)


USES: dict[str, Callable[[DTensor], object]] = {
    "a warm op": lambda x: x + 1,
    "redistribution": lambda x: x.redistribute(placements=[Shard(1)]),
    "asynchronous redistribution": lambda x: x.redistribute(placements=[Shard(1)], async_op=True),
    "full_tensor": lambda x: x.full_tensor(),
    "to_local": lambda x: x.to_local(),
    "item": lambda x: x.sum().item(),
    "operand": lambda x: sharded() * x,
    "beside a plain tensor": lambda x: X + x,
    "view": lambda x: x.view(8),
    "index": lambda x: x[:, 1],
    "list of tensors": lambda x: torch.cat([sharded(), x]),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "norm": lambda x: nn.utils.get_total_norm([x]),
    "lookup": lambda x: F.embedding(torch.tensor([0, 3]), x),
    "local_map": local_map(lambda local: local + 1, out_placements=[Shard(0)]),
    "backward": lambda x: (x.detach().requires_grad_() * 2).sum().backward(),
    "copy_": into,
    "assignment": write,
    "data": set_data,
    "optimizer": step,
}


def text_of(use: Callable[[DTensor], object], x: DTensor) -> str:
    with pytest.raises(MeshError) as caught:
        use(x)
    return str(caught.value)


def twice(make: Callable[[], DTensor]) -> DTensor:
    return (make(), make() + 1)[0]


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_tensor_of_another_world_is_refused_alike_on_all_ranks(use: Callable[[DTensor], object]) -> None:
    for make in (sharded, replicated):
        theirs = world(2).run(twice, make)[1]

        def run(make: Callable[[], DTensor] = make, theirs: DTensor = theirs) -> str:
            use(make().clone())  # what runs is warm
            return text_of(use, theirs)

        (text,) = set(world(2).run(run))
        assert "the DTensor of shape (4, 2) has the local tensor of rank 1 of another world, of 2 ranks. Fix: " in text


def test_a_tensor_of_another_rank_is_refused() -> None:
    made: dict[int, DTensor] = {}

    def run(name: str) -> str:
        made[rank()] = sharded()
        USES[name](made[rank()].clone())
        collectives.barrier((0, 1))
        mine = sharded()  # which both ranks make together
        return text_of((lambda x: mine * x) if name == "operand" else USES[name], made[1 - rank()])

    for name in ("a warm op", "full_tensor", "operand", "assignment", "foreach"):
        for other, text in enumerate(reversed(world(2).run(run, name))):
            assert f"has the local tensor of rank {other} of this world. Fix: " in text


def test_results_of_another_world_may_be_read_and_are_not_saved(tmp_path: Path) -> None:
    first, second = world(2).run(sharded)
    assert torch.equal(torch.cat([first.to_local(), second.to_local()]), X)
    assert first.layout_ == second.layout_
    assert {first.layout_: 1}[second.layout_] == 1
    with pytest.raises(Exception, match="rank 0 of another world"):
        world(2).run(lambda: checkpoint.save(tmp_path / "saved", {"x": first}, step=1))


KEPT: list[DTensor] = []


def keep() -> None:
    KEPT.append(sharded())
    _ = KEPT[0] + 1


def use_kept() -> str:
    x = sharded()
    _ = x + 1
    return text_of(lambda kept: kept + 1, KEPT[0])


def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.processes
def test_a_process_that_joined_another_world_refuses_tensors_of_the_first() -> None:
    ranks = world(2, real=True)
    ranks.run(keep)
    with pytest.raises(ZeroDivisionError):  # after which the pool joins a new world
        ranks.run(fail)
    assert ["of another world, of 2 ranks" in text for text in ranks.run(use_kept)] == [True, True]
