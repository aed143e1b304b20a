"""The layout with which `explain` says that an op sends less: what it would send is what it then sends."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Mesh, Placement, Replicate, Shard, count_comms, distribute_tensor
from shardwise._layout import Layout
from shardwise.debug import explain
from shardwise.debug.other_layouts import OtherLayout
from shardwise.testing import world

S0, S1, R = Shard(0), Shard(1), Replicate()
MESHES = [Mesh((3,)), Mesh((2, 2), names=("dp", "tp"))]
OPS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(7, 24), (10, 24)]),
    "matmul": (torch.matmul, [(30, 8), (8, 5)]),
    "mul": (torch.mul, [(7, 6), (7, 6)]),
}


def run(op: str, layouts: list[Layout], result: Layout | None) -> tuple[Any, Layout, bool]:
    """What the op, backward and gradients of this rank send, the layout of the result, and whether work is divided."""
    call, _ = OPS[op]
    full = [torch.arange(float(torch.Size(x.shape).numel())).view(x.shape) for x in layouts]
    operands: list[Any] = [
        distribute_tensor(x, y.mesh, y.placements).requires_grad_() for x, y in zip(full, layouts, strict=True)
    ]
    with explain() as report, count_comms() as counts:
        out: DTensor = call(*operands)
        own = out.layout_
        if result is not None:
            out = out.redistribute(placements=result.placements)
        with torch.no_grad():
            grad = DTensor.from_local(torch.zeros(out.layout_.dual().local_shape(report_rank())), own.mesh,
                                      out.layout_.dual().placements, shape=out.shape, stride=out.stride())  # fmt: skip
        out.backward(grad)
        for x in operands:
            assert x.grad is not None
    events = [e for e in report.events if e.cause.kind == "operand" and not e.cause.backward and e.cause.op == op]
    used = [x.layout_ for x in operands] + [e.dst for e in events if e.dst is not None]
    replicated = sum(all(p == R for p in x.placements) for x in used)
    return (counts.total_bytes, next(iter(report._others.values()), None)), own, replicated < len(operands)


def report_rank() -> int:
    from shardwise import rank

    return rank()


def total(
    mesh: Mesh, op: str, layouts: list[Layout], result: Layout | None
) -> tuple[int, Layout, OtherLayout | None, bool]:
    found = world(mesh.size()).run(run, op, layouts, result)
    return sum(sent for (sent, _), _, _ in found), found[0][1], found[0][0][1], found[0][2]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_another_layout_sends_what_is_said_and_no_other_sends_less(op: str, mesh: Mesh) -> None:
    _, shapes = OPS[op]
    placements = [*product((S0, S1, R), repeat=mesh.ndim)]
    said = 0
    for given in product(placements[:: mesh.ndim], repeat=2):
        layouts = [Layout(mesh, p, shape) for p, shape in zip(given, shapes, strict=True)]
        now, result, other, _ = total(mesh, op, layouts, None)
        least = now
        for index in (0, 1):
            for axis, placement in product(range(mesh.ndim), (S0, S1, R)):
                changed = [*layouts[:index], layouts[index].with_axis(axis, placement), *layouts[index + 1 :]]
                then, _, _, divided = total(mesh, op, changed, result)
                if divided and other is not None:
                    least = min(least, then)
        if other is not None:
            said += 1
            assert now - least == other.now.num_bytes - other.then.num_bytes
            assert other.now.seconds > 0
    assert said or op == "mul"


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
