"""Memory that messages use one after the other."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import Mesh, Shard, count_comms, distribute_tensor, world_size
from shardwise._redistribute import batched
from shardwise._redistribute.batched import buffers_of_rank
from shardwise._redistribute.buffers import MIN_BYTES, Buffers
from shardwise.parallel import fully_shard
from shardwise.testing import world
from tests.parallel.one_process import full

CPU, NUMEL = torch.device("cpu"), MIN_BYTES // 4


def test_memory_that_was_given_back_is_lent_again() -> None:
    buffers = Buffers()
    lent = buffers.lend(torch.float32, CPU)
    first, second = lent.empty(2 * NUMEL), lent.empty(2 * NUMEL)
    assert first.data_ptr() != second.data_ptr()
    assert first.shape == (2 * NUMEL,)
    held = {first.data_ptr(), second.data_ptr()}
    other = buffers.lend(torch.float32, CPU)
    assert other.empty(2 * NUMEL).data_ptr() not in held
    lent.give_back()
    assert buffers.lend(torch.int32, CPU).empty(2 * NUMEL).data_ptr() not in held
    again = [other.empty(2 * NUMEL), other.empty(2 * NUMEL - 1)]
    assert {x.data_ptr() for x in again} == held
    lent.give_back()  # gives back nothing twice
    assert other.empty(2 * NUMEL).data_ptr() not in held


def test_the_smallest_buffer_that_fits_is_lent_the_largest_are_kept_and_none_after_clear() -> None:
    buffers = Buffers()
    lent = buffers.lend(torch.float32, CPU)
    large, small = (lent.empty(n).data_ptr() for n in (6 * NUMEL, 2 * NUMEL))
    lent.give_back()
    assert lent.empty(NUMEL).data_ptr() == small
    assert lent.empty(NUMEL).data_ptr() != large
    assert lent.empty(3 * NUMEL).data_ptr() == large
    buffers = Buffers()
    lent = buffers.lend(torch.float32, CPU)
    held = [lent.empty(n * NUMEL).data_ptr() for n in (4, 6, 8)]
    lent.give_back()
    assert lent.empty(8 * NUMEL).data_ptr() == held[2]
    assert lent.empty(5 * NUMEL).data_ptr() == held[1]
    lent.give_back()
    buffers.clear()
    assert not buffers._free


def test_small_messages_and_those_of_other_devices_have_memory_of_their_own() -> None:
    buffers = Buffers()
    for lent, numel in (
        (buffers.lend(torch.float32, CPU), NUMEL - 1),
        (buffers.lend(torch.float32, torch.device("meta")), NUMEL),
    ):
        assert lent.empty(numel).shape == (numel,)
        lent.give_back()
    assert not buffers._free


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(601, 601, bias=i != 1) for i in range(4)))  # 1.4 MB each


def batch() -> Tensor:
    return torch.arange(6 * 601.0).view(6, 601).sin()


def steps(model: nn.Module, x: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        out = model(x)
    return [out, *model.parameters()]


def trained_in_units() -> list[Tensor]:
    model, mesh = layers(), Mesh((world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = steps(model, distribute_tensor(batch(), mesh, [Shard(0)]))
    assert not buffers_of_rank()._free
    return [full(x.detach()) for x in found]


@pytest.mark.parametrize("ranks", [2, 3])
def test_large_gradients_are_reduced_in_several_messages(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "MESSAGE_BYTES", MIN_BYTES + 600_000)  # one weight and biases

    def run() -> tuple[int, list[Tensor]]:
        mesh = Mesh((world_size(),))
        model, x = fully_shard(layers(), mesh=mesh), distribute_tensor(batch(), mesh, [Shard(0)])
        loss = model(x).sum()
        with count_comms() as counts:
            loss.backward()
        return counts.calls["all_to_all"], [full(p.grad) for p in model.parameters() if p.grad is not None]

    plain = layers()
    plain(batch()).sum().backward()
    for calls, gradients in world(ranks).run(run):
        assert calls == 4  # one for each weight
        assert_close(gradients, [p.grad for p in plain.parameters()])


@pytest.mark.parametrize(
    ("ranks", "real"), [(2, False), (3, False), pytest.param(2, True, marks=pytest.mark.processes)]
)
def test_units_with_large_messages_train_as_one_process(ranks: int, real: bool) -> None:
    want = [x.detach() for x in steps(layers(), batch())]
    for found in world(ranks, real=real).run(trained_in_units):
        assert_close(found, want)
