"""The layout with which `explain` says that an op sends less: what it would send is what it then sends."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Mesh, Replicate, Shard, count_comms, distribute_tensor, rank
from shardwise._layout import Layout
from shardwise.debug import explain
from shardwise.testing import world

S0, S1, R = Shard(0), Shard(1), Replicate()
OPS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(7, 24), (10, 24)]),
    "matmul": (torch.matmul, [(30, 8), (8, 5)]),
}
Sent = tuple[int, Layout, bool, tuple[int, int] | None]


def run(op: str, layouts: list[Layout], result: Layout | None = None) -> Sent:
    """What this rank sends for an op, its backward and gradients; the layout of the result; whether ranks share the
    work; the bytes that are said of all ranks, now and then."""
    call, _ = OPS[op]
    operands: list[Any] = [
        distribute_tensor(torch.ones(x.shape), x.mesh, x.placements).requires_grad_() for x in layouts
    ]
    with explain() as report, count_comms() as counts:
        out: DTensor = call(*operands)
        own = out.layout_
        if result is not None:
            out = out.redistribute(placements=result.placements)
        dual = out.layout_.dual()
        zeros = torch.zeros(dual.local_shape(rank()))
        out.backward(DTensor.from_local(zeros, dual.mesh, dual.placements, shape=out.shape, stride=out.stride()))
        assert all(x.grad is not None for x in operands)
    used = dict(enumerate(layouts))
    for event in report.events:
        if event.cause.kind == "operand" and not event.cause.backward and event.dst is not None:
            used[int(event.cause.operand[-1])] = event.dst
    shared = any(p != R for x in used.values() for p in x.placements)
    said = next(iter(report._others.values()), None)
    return counts.total_bytes, own, shared, said and (said.now.num_bytes, said.then.num_bytes)


def survey(op: str, mesh: Mesh, step: int) -> list[tuple[int, list[int], list[bool], tuple[int, int] | None]]:
    """For operands in many layouts, what this rank sends; and with each other layout of one of them."""
    found = []
    shapes = OPS[op][1]
    for given in [*product(product((S0, S1, R), repeat=mesh.ndim), repeat=2)][::step]:
        layouts = [Layout(mesh, p, shape) for p, shape in zip(given, shapes, strict=True)]
        now, result, _, said = run(op, layouts)
        others = []
        for index, axis, placement in product((0, 1), range(mesh.ndim), (S0, S1, R)):
            changed = [*layouts]
            changed[index] = layouts[index].with_axis(axis, placement)
            others.append(run(op, changed, result))
        found.append((now, [other[0] for other in others], [other[2] for other in others], said))
    return found


@pytest.mark.parametrize(
    ("op", "mesh", "step"),
    [("linear", Mesh((3,)), 1), ("matmul", Mesh((3,)), 1), ("linear", Mesh((2, 2), names=("dp", "tp")), 29)],
)
def test_another_layout_sends_what_is_said_and_no_other_sends_less(op: str, mesh: Mesh, step: int) -> None:
    said_of_some = 0
    for of_ranks in zip(*world(mesh.size()).run(survey, op, mesh, step), strict=True):
        now = sum(one[0] for one in of_ranks)
        shared, said = of_ranks[0][2:]
        others = [sum(sent) for sent in zip(*(one[1] for one in of_ranks), strict=True)]
        least = min(sent for sent, is_shared in zip(others, shared, strict=True) if is_shared)
        if said is not None:
            said_of_some += 1
            assert said[0] - said[1] == now - least
    assert said_of_some


def test_nothing_is_said_where_the_op_sends_least_or_exchanges_data_itself() -> None:
    def body() -> str:
        mesh = Mesh((2,))
        table = distribute_tensor(torch.ones(9, 4), mesh, [S0])
        ids = distribute_tensor(torch.tensor([0, 8, 3, 7]), mesh, [S0])
        x = distribute_tensor(torch.ones(4, 4), mesh, [S0])
        with explain() as report:
            F.embedding(ids, table)
            x @ distribute_tensor(torch.ones(4, 2), mesh, [R])
            torch.softmax(x, 0)
        return str(report)

    assert "less: " not in world(2).run(body)[0]
