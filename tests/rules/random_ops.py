"""Is a random op independent of the layout? What the tests of random ops share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import Boxes, DTensor, Mesh, OnRanks, Partial, Placement, Replicate, Shard
from shardwise.layout import Layout
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from shardwise.testing.local_shards import dtensor_from_full

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
SHAPE = (6, 5, 3)
BOXES = Boxes([[((0, 0, 0), (2, 5, 3)), ((4, 0, 0), (2, 5, 3))], [], [((2, 0, 0), (2, 5, 3))]])
Op = Callable[[Any], Any]


def on(mesh: Mesh, placements: Sequence[Placement], order: Sequence[int] | None = None) -> Layout:
    return Layout(mesh, placements, SHAPE, order)


ONE = on(Mesh((1,)), [R])
SHARDED_LAYOUTS = [  # layouts without Partial
    on(Mesh((3,), (2, 0, 1)), [R]),
    on(Mesh((2,)), [S0]),
    on(Mesh((3,), (2, 0, 1)), [S1]),
    on(Mesh((5,)), [S0]),  # the last rank holds nothing
    on(Mesh((3,)), [Shard(0, [0, 5, 1])]),
    on(Mesh((3,)), [OnRanks(1)]),
    on(Mesh((3,)), [BOXES]),
    on(Mesh((2, 2)), [S0, S0]),
    on(Mesh((2, 2)), [S0, S0], (1, 0)),
    on(Mesh((2, 2)), [S2, S1]),
    on(Mesh((2, 2)), [Shard(1, [4, 1]), Shard(1, [[1, 3], [0, 1]])]),
    on(Mesh((2, 2)), [OnRanks(1), S0]),
]
PARTIAL_LAYOUTS = [
    on(Mesh((2,)), [Partial()]),
    on(Mesh((2, 2)), [Partial(), S0]),
    on(Mesh((2, 2)), [Partial(), Partial("avg")]),
    on(Mesh((2,)), [Partial("max")]),
    on(Mesh((2,)), [Partial("product")]),
]
VALUES = 0.1 + 0.8 * torch.rand(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sharded_values(layout: Layout, values: Tensor = VALUES) -> DTensor:
    """This rank's sharded_values of `values`."""
    return as_dtensor(dtensor_from_full(values, layout))


def as_list(out: Any) -> list[DTensor]:
    return [as_dtensor(x) for x in (out if isinstance(out, tuple) else (out,))]


@dataclass(frozen=True)
class Outcome:
    values: list[Tensor]
    grad: Tensor | None
    state: Tensor  # of torch's generator


def outcome(op: Op, layout: Layout) -> Outcome:
    x = sharded_values(layout)
    x.requires_grad_(not any(isinstance(p, Partial) and p.reduce_op != "sum" for p in layout.placements))
    torch.manual_seed(5)
    outs = as_list(op(x))
    if outs[0].requires_grad:
        outs[0].backward(torch.ones(outs[0].shape, dtype=outs[0].dtype))
    grad = None if x.grad is None else as_dtensor(x.grad).full_tensor()
    return Outcome([as_dtensor(out.detach()).full_tensor() for out in outs], grad, torch.get_rng_state())


def assert_the_same_on_all_layouts(op: Op) -> None:
    """Bit for bit, gradients up to rounding; torch's generator has moved on alike."""
    (expected,) = world(1).run(outcome, op, ONE)
    for layout in SHARDED_LAYOUTS:
        for got in world(layout.mesh.size()).run(outcome, op, layout):
            assert all(map(torch.equal, got.values, expected.values)), layout
            assert (got.grad is None) == (expected.grad is None), layout
            if expected.grad is not None:
                assert_close(got.grad, expected.grad, msg=str(layout))
            assert torch.equal(got.state, expected.state), layout


def assert_the_same_on_summands(op: Op) -> None:
    """Up to the rounding of the sum."""
    (expected,) = world(1).run(outcome, op, ONE)
    for layout in PARTIAL_LAYOUTS:
        for got in world(layout.mesh.size()).run(outcome, op, layout):
            for a, b in zip(got.values, expected.values, strict=True):
                assert_close(a, b, rtol=1e-12, atol=1e-12, msg=str(layout))
            if got.grad is not None:
                assert_close(got.grad, expected.grad)
            assert torch.equal(got.state, expected.state), layout


def assert_refused_as_by_torch(op: Op) -> None:
    """The error of torch on every rank, before anything is drawn."""
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever torch says
        op(VALUES.clone())
    wanted = TypeError if expected.type is NotImplementedError else expected.type

    def body(layout: Layout) -> tuple[type[BaseException], str]:
        x, before = sharded_values(layout), torch.get_rng_state()
        with pytest.raises(wanted) as caught:
            op(x)
        assert torch.equal(torch.get_rng_state(), before)
        return caught.type, str(caught.value)

    for layout in (on(Mesh((3,)), [S0]), on(Mesh((2, 2)), [S1, S0]), on(Mesh((2,)), [R])):
        assert set(world(layout.mesh.size()).run(body, layout)) == {(wanted, str(expected.value))}


COUNT = 100_000


def drawn(fill: Op, dtype: torch.dtype, count: int = COUNT) -> Tensor:
    """Numbers from three ranks."""

    def body() -> Tensor:
        torch.manual_seed(11)
        x = sharded_values(Layout(Mesh((3,)), [Shard(0, [1, count - 1, 0])], (count,)), torch.zeros(count, dtype=dtype))
        return as_dtensor(fill(x)).full_tensor()

    numbers = world(3).run(body)[0]
    assert numbers.dtype == dtype
    return numbers.double()
