"""Meshes of several axes: data beside tensor parallelism, and beside parts of the sequence; meshes of torch."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Replicate, Shard, count_comms, shard_module
from shardwise import _collectives as collectives
from shardwise._models import MLPModule
from shardwise.errors import PlanError
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.parallel.one_process import assert_same_parameters, compare, full

R, S0, S1 = Replicate(), Shard(0), Shard(1)
PAIR = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
X = torch.linspace(-1, 1, 50).view(5, 10)
MESHES = [
    Mesh((2, 2), names=("dp", "tp")),
    Mesh((2, 2), names=("tp", "dp")),
    Mesh((2, 2), ranks=(3, 1, 0, 2)),
    Mesh((1, 3), names=("dp", "tp")),
    Mesh((3, 1), names=("dp", "tp")),
]


def data_axis(mesh: Mesh) -> int:
    return 1 if mesh.names == ("tp", "dp") else 0


def own_batch(mesh: Mesh, x: Tensor) -> Tensor:
    """This rank's part of an uneven batch."""
    axis, here = data_axis(mesh), mesh.coordinate(collectives.rank())
    assert here is not None
    sizes = {1: [5], 2: [1, 4], 3: [0, 4, 1]}[mesh.shape[axis]]
    shards: tuple[Tensor, ...] = x.split(sizes)
    return shards[here[axis]]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_passes_its_shard_of_the_batch_and_gradients_are_global(mesh: Mesh) -> None:
    def body() -> None:
        plain = MLPModule("cpu")
        module = parallelize_module(copy.deepcopy(plain), mesh, PAIR)
        part = partial(own_batch, mesh)  # the sum over shards of the batch is the global loss
        assert type(compare(module, plain, part(X), X, part, part)) is Tensor
        first = as_dtensor(module.get_parameter("net1.weight")).placements
        assert first == tuple(R if axis == data_axis(mesh) else S0 for axis in range(2))

    world(mesh.size()).run(body)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_distributed_output_has_the_mean_of_the_global_uneven_batch(mesh: Mesh) -> None:
    plan = {"net1": ColwiseParallel(use_local_output=False), "net2": RowwiseParallel(use_local_output=False)}

    def body() -> None:
        plain = MLPModule("cpu")
        module = parallelize_module(copy.deepcopy(plain), mesh, plan)
        loss = module(own_batch(mesh, X)).square().mean()
        want = plain(X).square().mean()
        assert_close(full(loss), want)
        loss.backward()
        want.backward()
        assert_same_parameters(module, plain)

    world(mesh.size()).run(body)


@world(4)
def test_a_distributed_input_keeps_what_it_is_on_data_axes() -> None:
    mesh = MESHES[0]
    plain = MLPModule("cpu")
    plan = {"net1": ColwiseParallel(use_local_output=False), "net2": RowwiseParallel(use_local_output=False)}
    module = parallelize_module(copy.deepcopy(plain), mesh, plan)
    for placement in (R, S0):
        x = DTensor.from_local(X, mesh, [R, R]).redistribute(placements=[placement, S1])
        out = module(x)
        assert out.placements == (placement, R)
        assert_close(full(out), plain(X))


class Placed(nn.Module):
    """Words, and positions that are the same in every example."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.positions = nn.Embedding(9, 4), nn.Embedding(7, 4)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.words(ids) * self.positions(torch.arange(ids.shape[1]))
        return result


@pytest.mark.parametrize("style", [RowwiseParallel, ColwiseParallel])
@pytest.mark.parametrize("local", [True, False])
@world(4)
def test_an_input_that_is_replicated_over_the_batch_gets_the_global_gradient(style: Any, local: bool) -> None:
    mesh, ids = MESHES[0], torch.arange(15).view(5, 3) % 9
    everywhere = style(input_layouts=(R, R), use_local_output=local, output_layouts=R)
    plan = {"words": style(use_local_output=local, output_layouts=R), "positions": everywhere}
    plain = Placed()
    module = parallelize_module(copy.deepcopy(plain), mesh, plan)
    part = partial(own_batch, mesh)
    compare(module, plain, part(ids), ids, part if local else lambda want: want)


@world(4)
def test_a_layout_may_name_every_axis() -> None:
    """Positions are the same for every part of the batch."""
    mesh = MESHES[0]
    torch.manual_seed(0)
    plain = nn.Embedding(9, 4)
    for style in (
        RowwiseParallel(input_layouts=(R, R), use_local_output=False),
        ColwiseParallel(input_layouts=(R, R), output_layouts=(S0, R), use_local_output=False),
        PrepareModuleInput(input_layouts=((R, R),), desired_input_layouts=((R, S0),)),
    ):
        module = parallelize_module(copy.deepcopy(plain), mesh, style)
        shard_module(module, {}, mesh=mesh)
        with count_comms() as comms:
            out = module(torch.arange(7))
        assert comms.total_calls <= 1, "nobody is asked for sizes"
        assert_close(full(out), plain(torch.arange(7)))


class Block(nn.Module):
    """A norm, two layers, and the input added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 2), (2, 3, 1)], ids=str)
def test_data_tensor_and_sequence_axes_work_together(sizes: tuple[int, int, int]) -> None:
    """Parts of the batch on "dp", of the sequence on "sp" and, between layers, on "tp" as well."""
    mesh = Mesh(sizes, names=("dp", "tp", "sp"))
    given = (S0, R, S1)
    plan = {
        "": PrepareModuleInput(input_layouts=(given,), desired_input_layouts=((S0, S1, S1),)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(output_layouts=S1, use_local_output=False),
    }
    x = torch.linspace(-1, 1, 3 * 7 * 6, dtype=torch.float64).view(3, 7, 6)

    def body() -> None:
        plain = Block().double()
        module = parallelize_module(copy.deepcopy(plain), mesh, plan)
        here = mesh.coordinate(collectives.rank())
        assert here is not None

        def part(t: Tensor) -> Tensor:
            rows = t.split([3] if sizes[0] == 1 else [1, 2])[here[0]]
            found: Tensor = rows.split([7] if sizes[2] == 1 else [2, 5], 1)[here[2]]
            return found

        compare(module, plain, part(x), x, part_of_input=part)

    world(mesh.size()).run(body)


@world(4)
def test_a_new_shard_axis_comes_last_in_the_shard_order_and_sends_nothing() -> None:
    """The sequence is cut on "sp" unevenly; to cut the parts on "tp" as well, every rank drops some of its own."""
    mesh = Mesh((2, 2), names=("tp", "sp"))
    style = PrepareModuleInput(input_layouts=((R, Shard(0, (2, 5))),), desired_input_layouts=((S0, S0),))
    module = parallelize_module(nn.Identity(), mesh, style)
    x = torch.arange(7.0)
    with count_comms() as comms:
        out = module(x.split([2, 5])[collectives.rank() % 2])
    assert comms.total_calls == 0
    assert out.layout_.shard_sizes(1) == (2, 5)
    assert_close(out.to_local(), torch.tensor([[0.0], [2.0, 3.0, 4.0], [1.0], [5.0, 6.0]][collectives.rank()]))
    assert_close(full(out), x)


@world(4)
def test_offsets_of_a_shard_of_the_batch_are_refused() -> None:
    module = parallelize_module(nn.EmbeddingBag(7, 4), MESHES[0], RowwiseParallel())
    with pytest.raises(PlanError, match=r"offsets count from the first of all ids. Fix: 2-D ids"):
        module(torch.arange(4), torch.tensor([0, 2]))
    assert module(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 4)
