"""Captured functions that read values: each value that is read has graphs of its own, and equals the function."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import shardwise as sw
from shardwise.errors import CaptureError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

NAN = float("nan")
SCORES = torch.tensor([0.5, -1.0, 2.0, 0.25])
ROWS = torch.tensor([[1.0, -2, 3], [1, 2, 3], [-1, -2, 3], [-1, -2, -3], [1, 2, 3], [0.0, -0.0, 5], [-0.0, 0.0, 5]])


def _branches(x: Tensor) -> Tensor:
    if (x > 0).all():
        return x * 2
    return -x if x.sum() > 0 else x + 1


def _rows_of_several(x: Tensor) -> tuple[Tensor, Tensor]:
    values, counts = torch.unique(x.detach(), return_counts=True)
    return (x * values.numel()).cumsum(0), counts


# The function, and how many kinds of calls ROWS are for it.
READS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "item": (lambda x: x * x.sum().item(), 5),
    "if": (_branches, 3),
    "tolist": (lambda x: x * x.tolist()[0], 6),
    "the sign of zero": (lambda x: x + 1 / x[0].abs().item() if x[0] else x / x[0].item(), 4),
    "equal": (lambda x: x * torch.equal(x, x.abs()), 2),
    "a mask": (lambda x: x[x > 0] * 2, 4),
    "nonzero": (lambda x: x * len((x > 0).nonzero()), 4),
    "a shape of several results": (_rows_of_several, 2),
    "two values": (lambda x: x[x > 0] * (2 if x[0] > 0 else 3), 4),
    "where it is split": (lambda x: x.tensor_split((x.detach() > 0).long().cumsum(0)[:2])[1] * 2, 3),
    "a value of a value": (lambda x: x * x[int((x > 0).sum()) - 1].item(), 6),
}


@pytest.mark.parametrize("name", READS)
def test_each_value_that_is_read_has_graphs_of_its_own(name: str) -> None:
    function, kinds = READS[name]
    step = sw.capture(function)
    for row in [*ROWS, *ROWS]:
        x, y = row.clone().requires_grad_(), row.clone().requires_grad_()
        found, expected = step(x), function(y)
        assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        for out, at in ((found, x), (expected, y)):
            (out[0] if isinstance(out, tuple) else out).sum().backward()
            assert at.grad is not None
        assert_close(x.grad, y.grad, rtol=0, atol=0, equal_nan=True)
    assert len(step.graphs()) == kinds


def test_a_value_that_is_no_number_equals_itself_and_too_many_are_an_error_with_the_line() -> None:
    step = sw.capture(lambda x: x * x.sum().item())
    for x in (torch.tensor([NAN]), torch.tensor([NAN]), torch.tensor([1.0])):
        assert_close(step(x), x * x, equal_nan=True)
    assert len(step.graphs()) == 2
    step = sw.capture(lambda x: x * x.sum().item(), limit=2)
    step(torch.ones(1)), step(torch.zeros(1))
    with pytest.raises(
        CaptureError, match=r"reads another value by item\(\), or an `if` at .*test_value_guards.py:\d+"
    ):
        step(torch.ones(1) * 2)


def test_values_of_tensors_that_are_no_arguments() -> None:
    class Masked(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([True, True]))

        def forward(self, x: Tensor) -> Tensor:
            return x if self.mask.all() else x[self.mask]

    module = Masked()
    step, x = sw.capture(module), torch.randn(2)
    for mask in ([True, True], [True, False], [False, False], [True, True], [False, True]):
        module.mask.copy_(torch.tensor(mask))
        assert torch.equal(step(x), module(x))
    assert len(step.graphs()) == 3


class Widths(nn.Module):
    """Reads the values of a buffer of integers, which no op of the forward takes."""

    widths: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("widths", torch.tensor([1, 2]))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(self.widths.tolist(), 1)
        return torch.cat([part * number for number, part in enumerate(parts, 1)], 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_list_of_a_buffer_is_compared(ranks: int) -> None:
    def body() -> int:
        module = sw.shard_module(Widths(), {})
        step, x = sw.capture(module), sw.distribute_tensor(torch.arange(9.0).view(3, 3), placements=[sw.Shard(0)])
        for widths in ([1, 2], [2, 1], [1, 2], [2, 1]):
            module.widths.copy_(torch.tensor(widths))
            assert torch.equal(step(x).full_tensor(), module(x).full_tensor())
        return len(step.graphs())

    assert world(ranks).run(body) == [2] * ranks


def test_places_that_a_kernel_reads_are_compared() -> None:
    places, x = torch.tensor([1, 2]), torch.randn(4)
    step = sw.capture(lambda x: x.tensor_split(places)[1] * 2)
    for ends in ([1, 2], [0, 3], [1, 2], [0, 3]):
        places.copy_(torch.tensor(ends))
        assert torch.equal(step(x), x[ends[0] : ends[1]] * 2)
    assert len(step.graphs()) == 2


def test_ranks_that_read_different_values() -> None:
    """The mask is a plain tensor of each rank; both branches make the same collectives."""

    def body() -> list[Any]:
        mesh = sw.Mesh((3,))
        weight = sw.distribute_tensor(torch.arange(20.0).view(5, 4), mesh, [sw.Shard(0)]).requires_grad_()

        def function(x: Any, mask: Tensor) -> Any:
            y = (x @ weight).redistribute(placements=[sw.Replicate()]).to_local()
            return y if mask.all() else y * mask

        step, found = sw.capture(function), []
        for number in (0, 1, 2, 0, 3, 2):
            x = sw.distribute_tensor(torch.arange(10.0).view(2, 5) + number, mesh, [sw.Shard(1)])
            mask = torch.tensor([True, number % (sw.rank() + 1) == 0, True, True])
            results = []
            for run in (step, function):
                out = run(x, mask)
                out.sum().backward()
                results.append((out.detach(), as_dtensor(weight.grad).full_tensor()))
                weight.grad = None
            assert_close(results[0], results[1], rtol=0, atol=0)
            found.append(results[0])
        assert len(step.graphs()) == (1 if sw.rank() == 0 else 2)
        return found

    assert len(world(3).run(body)) == 3


def test_the_value_of_a_replicated_tensor_may_be_read() -> None:
    def body() -> int:
        mesh = sw.Mesh((2,))
        step = sw.capture(lambda x, mask: x * 2 if mask.all() else x * 3)
        for number in (0, 1, 0, 1):
            x = sw.distribute_tensor(torch.ones(3), mesh, [sw.Shard(0)])
            mask = sw.distribute_tensor(torch.tensor([True, number > 0]), mesh, [sw.Replicate()])
            assert torch.equal(step(x, mask).full_tensor(), torch.full((3,), 2.0 if number else 3.0))
        return len(step.graphs())

    assert world(2).run(body) == [2, 2]


@pytest.mark.parametrize("loss", [F.nll_loss, F.cross_entropy], ids=lambda f: f.__name__)
def test_the_loss_of_one_example_has_one_graph_for_all_targets_on_every_rank(loss: Callable[..., Tensor]) -> None:
    def body() -> tuple[list[Tensor], int]:
        mesh = sw.Mesh((3,))
        scores, weight = (sw.distribute_tensor(x, mesh, [sw.Shard(0, sizes=(3, 0, 1))]) for x in (SCORES, SCORES.abs()))
        step = sw.capture(lambda x, target: loss(x, target, weight))
        targets = [sw.distribute_tensor(torch.tensor(i), mesh, [sw.OnRanks(2)]) for i in range(4)]
        return [as_dtensor(step(scores, i)).full_tensor() for i in targets], len(step.graphs())

    expected = [loss(SCORES, torch.tensor(i), SCORES.abs()) for i in range(4)]
    for found, graphs in world(3).run(body):
        assert_close(found, expected)
        assert graphs == 1


# ---- what no guard can compute before the replay ------------------------------------------------------------------


def _written(x: Tensor) -> Tensor:
    y = x * 1
    y[0] = 3
    return x * (y + 1).sum().item()


def _argument_written(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2 if x.sum() > 0 else x


def _constant_written(x: Tensor) -> Tensor:
    table = torch.tensor([3.0, 1, 2])
    table.add_(1)
    return x * (x + table).sum().item()


def _tolist_twice(x: Tensor) -> Tensor:
    y = x * (1 + float(x.tolist()[0]))
    x.add_(1)
    return y * float(x.tolist()[0])


OUTSIDE = torch.tensor([2.0, 1.0, 3.0])

REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a random number": lambda x: x * (x + torch.rand(3)).sum().item(),
    "what was written in place": _written,
    "an argument that was written": _argument_written,
    "an argument that was written after it was read": _tolist_twice,
    "with a constant that was written": _constant_written,
    "numpy": lambda x: x * float(x.detach().numpy()[0]),
    "numpy of a tensor from outside": lambda x: x * float(OUTSIDE.numpy()[0]),
    "asarray of a tensor from outside": lambda x: x * float(np.asarray(OUTSIDE)[0]),
    "a copy of a tensor from outside": lambda x: x * copy.deepcopy(OUTSIDE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_no_guard_can_compute_are_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)a replay cannot repeat.*called at .*test_value_guards.py:\d+ in"):
        sw.capture(REFUSED[name])(torch.ones(3))


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist], ids=lambda f: f.__name__)
def test_values_read_in_backward_are_refused(read: Callable[[Tensor], float]) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(lambda g: g * read(g.sum()))
        return y.sum()

    out = sw.capture(function)(torch.ones(3, requires_grad=True))
    with pytest.raises(CaptureError, match=rf"a replay cannot repeat {read.__name__}\(\)"):
        out.backward()


@pytest.mark.parametrize(
    ("read", "function"),
    [
        ("item", lambda x: x * x.sum().item()),
        ("tolist", lambda x: torch.nonzero(x, as_tuple=True)),  # reads the sizes of shards
    ],
    ids=["item", "nonzero"],
)
@world(2)
def test_values_that_collectives_compute_are_refused(read: str, function: Callable[[Tensor], Any]) -> None:
    x = sw.distribute_tensor(torch.ones(4), sw.Mesh((2,)), [sw.Shard(0)])
    with pytest.raises(CaptureError, match=rf"a replay cannot repeat {read}\(\)"):
        sw.capture(function)(x)
