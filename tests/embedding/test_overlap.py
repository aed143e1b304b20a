"""The gradients of a collection are sent while the rest of backward runs, and the rows are updated when it ends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise import _collectives as collectives
from shardwise._trace.comm_trace import CommEvent, Listener, listening_with
from shardwise.embedding import SGD
from shardwise.testing import world
from tests.embedding import tables
from tests.embedding.tables import batch_of, collection, equal, tables_of, values_of

RANKS = (0, 1)
STEPS = (0, 3)  # of the batches of two lookups


class Events(Listener):
    def __init__(self) -> None:
        self.said: list[str] = []

    def record(self, event: CommEvent) -> None:
        self.said.append(event.cause.op.removesuffix(" of an embedding collection"))


def bottom(rank: int) -> tuple[nn.Linear, Tensor]:
    """A layer whose backward comes after that of later lookups, and its input."""
    torch.manual_seed(0)
    return nn.Linear(3, 2), torch.arange(6.0).view(2, 3) + rank


def loss_of(dense: Tensor, *pooled: Tensor) -> Tensor:
    return dense.square().sum() * sum(values.sin().sum() for values in pooled)


def step(module: Any, layer: Callable[[Tensor], Tensor], x: Tensor, rank: int) -> None:
    dense = layer(x)
    loss_of(dense, *(values_of(module(batch_of(rank, number))) for number in STEPS)).backward()


def of_one_process() -> tuple[list[Tensor], Tensor]:
    """The tables after a step of both ranks, and the gradient of the layer."""
    plain, (layer, _) = collection(), bottom(0)
    for rank in RANKS:
        step(plain, layer, bottom(rank)[1], rank)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert layer.weight.grad is not None
    return [table.detach() for table in plain.parameters()], layer.weight.grad


def sent_beside_the_rest_of_backward(in_buckets: bool) -> None:
    rank, events = collectives.rank(), Events()
    module, (layer, x) = tables.sharded("mixed", len(RANKS), SGD(0.1)), bottom(rank)
    before, seen = [stack.weight.clone() for stack in module._engine.stacks], list[Any]()

    def look(parameter: Tensor) -> None:
        unchanged = equal([stack.weight for stack in module._engine.stacks], before)
        seen.append((events.said.count("gradients"), unchanged))
        if not in_buckets:  # a collective that starts while the gradients are on their way
            assert parameter.grad is not None
            parameter.grad = collectives.all_reduce(parameter.grad, "sum", RANKS)

    weight = layer.weight
    weight.register_post_accumulate_grad_hook(look)
    with listening_with(events):
        step(module, DistributedDataParallel(layer) if in_buckets else layer, x, rank)
    assert seen == [(len(STEPS), True)]
    expected, of_layer = of_one_process()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad * (len(RANKS) if in_buckets else 1), of_layer)
    torch.testing.assert_close(tables_of(module), expected)


def test_gradients_are_sent_beside_the_rest_of_backward_and_rows_updated_at_its_end() -> None:
    world(len(RANKS)).run(sent_beside_the_rest_of_backward, False)


@pytest.mark.processes
def test_so_they_are_on_processes_beside_the_buckets_of_ddp() -> None:
    world(len(RANKS), real=True).run(sent_beside_the_rest_of_backward, True)


@world(len(RANKS))
def test_a_backward_that_fails_later_updates_no_row() -> None:
    module, other = (tables.sharded("mixed", len(RANKS), SGD(0.1)) for _ in range(2))
    rank, (layer, x) = collectives.rank(), bottom(collectives.rank())
    before = tables_of(module)
    handle = next(layer.parameters()).register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(module, layer, x, rank)
    assert equal(tables_of(module), before)
    handle.remove()
    for one in module, other:
        step(one, layer, x, rank)
    assert equal(tables_of(module), tables_of(other))


@world(len(RANKS))
def test_an_error_of_the_update_is_raised_by_backward() -> None:
    module, (layer, x) = tables.sharded("mixed", len(RANKS), SGD(0.1)), bottom(collectives.rank())

    def fail(gradients: object) -> None:
        raise ValueError("of the update")

    module._engine.update = fail
    with pytest.raises(ValueError, match="of the update"):
        step(module, layer, x, collectives.rank())
