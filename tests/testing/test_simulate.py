"""A simulated step communicates, and takes memory, as the same step in a world of ranks that all run."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import Mesh, Shard, collectives, count_comms
from shardwise.errors import ShardwiseError
from shardwise.models import ModelArgs, Transformer
from shardwise.parallel import fully_shard
from shardwise.simulation.memory import Memory
from shardwise.testing import simulate, world

ARGS = ModelArgs(n_layers=2, vocab_size=64, max_seq_len=16, dim=48, n_heads=4, dropout_p=0.0)
Step = Callable[[], object]


def tensor_parallel(model: nn.Module, mesh: Mesh) -> None:
    assert isinstance(model, Transformer)
    Transformer.parallelize(model, mesh, use_seq_parallel=False)


def sequence_parallel(model: nn.Module, mesh: Mesh) -> None:
    assert isinstance(model, Transformer)
    Transformer.parallelize(model, mesh, use_seq_parallel=True)


def fully_sharded(model: nn.Module, mesh: Mesh) -> None:
    assert isinstance(model, Transformer)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


STYLES = [tensor_parallel, sequence_parallel, fully_sharded]


def training(style: Callable[[nn.Module, Mesh], None], args: ModelArgs = ARGS) -> Callable[[Mesh], Step]:
    def build(mesh: Mesh) -> Step:
        torch.manual_seed(0)
        model = Transformer(args)
        style(model, mesh)
        optimizer = torch.optim.Adam(model.parameters())

        def step() -> None:
            tokens = torch.randint(args.vocab_size, (3, 13))
            optimizer.zero_grad()
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()

        return step

    return build


def run(build: Callable[[Mesh], Step], size: int) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Collectives and bytes of the second step, by kind, on each rank of a world."""

    def rank() -> tuple[dict[str, int], dict[str, int]]:
        step = build(Mesh((size,)))
        step()
        with count_comms() as counts:
            step()
        return counts.calls, counts.sent_bytes

    return world(size).run(rank)


def peak_of_rank_0(build: Callable[[Mesh], Step], size: int) -> int:
    """The most bytes in storages during the second step of rank 0, in which everything is allocated."""

    def rank() -> int:
        if collectives.rank():
            step = build(Mesh((size,)))
            step()
            step()
            return 0
        with Memory(allocate=True) as memory:
            step = build(Mesh((size,)))
            step()
            gc.collect()
            start = len(memory.log)
            step()
        now = most = sum(change for _, change in memory.log[:start])
        for _, change in memory.log[start:]:
            now += change
            most = max(most, now)
        return most

    return world(size).run(rank)[0]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("style", STYLES)
def test_collectives_and_bytes_are_those_of_a_world(style: Callable[[nn.Module, Mesh], None], size: int) -> None:
    counted = run(training(style), size)
    found = simulate(training(style), mesh=Mesh((size,)))
    assert sorted(rank for one in found.classes for rank in one.ranks) == list(range(size))
    for one in found.classes:
        calls: Counter[str] = Counter()
        sent: Counter[str] = Counter()
        for collective in one.collectives:
            calls[collective.kind] += 1
            sent[collective.kind] += collective.sent_bytes
        assert (dict(calls), dict(sent)) == counted[one.ranks[0]]


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """It would free cycles of activation checkpointing at times that depend on other threads."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Fully sharded and checkpointed is not among them: the simulated peak is up to 8 % above that of the world.
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("style", "checkpointed"),
    [(tensor_parallel, False), (tensor_parallel, True), (sequence_parallel, True), (fully_sharded, False)],
)
@pytest.mark.usefixtures("no_garbage_collection")
def test_memory_is_that_of_a_world(style: Callable[[nn.Module, Mesh], None], checkpointed: bool, size: int) -> None:
    args = ModelArgs(**{**vars(ARGS), "checkpoint_activations": checkpointed})
    found = simulate(training(style, args), mesh=Mesh((size,)))
    assert found.classes[0].peak_bytes == pytest.approx(peak_of_rank_0(training(style, args), size), rel=0.05)


def test_memory_has_the_bytes_of_what_it_is_for() -> None:
    model = nn.Linear(1 << 15, 1 << 15, bias=False, device="meta")  # 4 GiB
    batch = torch.ones(2, 1 << 15)
    found = simulate(model, batch, mesh=Mesh((1024,)), plan={"weight": Shard(0)})
    (one,) = found.classes
    weight = 4 << 20
    assert len(one.ranks) == 1024
    assert (one.memory["parameters"], one.memory["gradients"]) == (weight, weight)
    assert one.memory["optimizer states"] == 2 * weight + 4  # and the number of steps
    assert model.weight.is_meta
    assert "1,024 ranks" in str(found)


def test_ranks_with_other_shards_are_other_classes() -> None:
    found = simulate(nn.Linear(3, 10), torch.ones(2, 3), mesh=Mesh((4,)), plan={"weight": Shard(0), "bias": Shard(0)})
    assert [one.ranks for one in found.classes] == [(0, 1, 2), (3,)]
    assert [one.memory["parameters"] for one in found.classes] == [3 * 4 * 4, 1 * 4 * 4]


def test_ranks_of_sub_meshes_are_equal() -> None:
    def build(mesh: Mesh) -> Step:
        model = fully_shard(nn.Linear(8, 8), mesh=mesh.submesh("shard", collectives.rank()))
        return lambda: model(torch.ones(2, 8)).sum().backward()

    found = simulate(build, mesh=Mesh((3, 4), names=("replicate", "shard")))
    assert [len(one.ranks) for one in found.classes] == [12]
    assert {found.axes(one) for one in found.classes[0].collectives} == {"shard"}


def test_reading_a_value_is_an_error() -> None:
    def build(mesh: Mesh) -> Step:
        return lambda: torch.ones(3).sum().item()

    with pytest.raises(ShardwiseError, match="has no values, but a number is read"):
        simulate(build, mesh=Mesh((2,)))
    with pytest.raises(ShardwiseError, match="has no values, but tolist"):
        simulate(lambda mesh: lambda: torch.ones(3).tolist(), mesh=Mesh((2,)))
