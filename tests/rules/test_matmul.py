"""Products of sharded operands: rows, reasons, and when partial sums are reduced."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import Mesh, Partial, Replicate, Shard, count_comms, distribute_tensor
from shardwise._rules import RULES, Meta
from shardwise.debug import explain
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls
from tools.op_judge import Sample

R, S0, S1 = Replicate(), Shard(0), Shard(1)
normal = Draw(1).normal


def stretched_addmv(input: Tensor, mat: Tensor, vec: Tensor) -> Tensor:
    """A call without a row."""
    return torch.addmv(input, mat, vec)


A, B, SQUARE, M, V4, BATCH = normal(5, 3), normal(3), normal(3, 3), normal(3, 4), normal(4), normal(2, 5, 3)
SAMPLES = [
    *calls(torch.matmul, (A, M), (B, M), (A, B), (BATCH, M), (normal(1, 5, 3), normal(4, 3, 2)),
           (normal(1, 5, 3), normal(1, 3, 2)), (normal(2, 1, 5, 3), normal(4, 3, 2)), (normal(5, 0), normal(0, 4)),
           (normal(0, 3), M)),
    *calls(torch.mm, (A, normal(3, 1))), *calls(torch.mv, (A, B)), *calls(torch.dot, (B, normal(3))),
    *calls(torch.bmm, (normal(3, 2, 4), normal(3, 4, 2))),
    *calls(F.linear, (A, normal(4, 3)), (A, normal(4, 3), V4), (A, normal(1, 3), normal(1)), (B, normal(4, 3), V4),
           (A, B), (BATCH, normal(4, 3), V4)),
    *calls(torch.addmm, (V4, A, M, {"beta": 2, "alpha": 0.5}), (normal(5, 4), A, M), (normal(5, 1), A, M),
           (normal(), A, M)),
    *calls(torch.addmm, (normal(5, 4).fill_(float("nan")), A, M, {"beta": 0}), gradients=False),
    *calls(torch.einsum, ("ij,kj->ik", A, normal(4, 3)), ("ij,k->k", A, B), ("ij,ij->", A, normal(5, 3)),
           ("bij,bjk->ik", normal(2, 3, 4), normal(2, 4, 3)), ("ij,kj->ik", (A, normal(4, 3))), ("ii->i", SQUARE),
           ("...ij,jk", normal(2, 4, 3), normal(3, 2)), ("b...ij,...jk", normal(2, 1, 4, 3), normal(5, 3, 2)),
           ("iij,jk", normal(3, 3, 4), normal(4, 2)), ("ij,j->i", A, normal(1)), ("ba,a", A, B)),
    *calls(torch.addmv, (normal(5), A, B, {"beta": 2.5})), *calls(stretched_addmv, (normal(1), A, B)),
    *calls(torch.addr, (normal(5, 1), normal(5), B, {"alpha": 0.5})),
    *calls(torch.addbmm, (V4, BATCH, normal(2, 3, 4), {"alpha": 2})),
    *calls(torch.baddbmm, (normal(2, 1, 4), BATCH, normal(2, 3, 4), {"beta": 0.5})),
    *calls(Tensor.addmm_, (normal(5, 4), A, M, {"beta": 0.5})),
    *calls(Tensor.baddbmm_, (normal(2, 5, 4), BATCH, normal(2, 3, 4))),
    *calls(torch.outer, (B, V4)), *calls(torch.inner, (BATCH, A), (B, normal(3))),
    *calls(torch.vdot, (normal(5), normal(5))),
    *calls(torch.linalg.vecdot, (normal(5, 1, 3), normal(4, 3)), (A, normal(5, 3), {"dim": 0})),
    *calls(torch.tensordot, (normal(2, 4, 3), normal(4, 3, 2), {"dims": 2}),
           (normal(2, 4, 3), normal(5, 2, 3), {"dims": ([0, -1], [1, 2])})),
    *calls(torch.linalg.multi_dot, [B, M, normal(4, 2)], [A, M, V4]),
    *calls(F.bilinear, (BATCH, normal(2, 5, 2), normal(4, 3, 2), V4), (B, normal(2), normal(4, 3, 2))),
    *calls(Tensor.__rmatmul__, (M, A)),
]  # fmt: skip


@world(2)
def test_column_then_row_parallel_layers_communicate_once() -> None:
    mesh = Mesh((2,))
    first, second = (distribute_tensor(SQUARE, mesh, [p]) for p in (S0, S1))
    x = distribute_tensor(A, mesh, [R])
    with count_comms() as comms:
        hidden = F.linear(x, first)
        out = as_dtensor(F.linear(torch.relu(hidden), second))
        assert out.placements == (Partial(),)
        assert comms.total_calls == 0
        out.full_tensor()
    assert comms.total_calls == 1


@world(3)
def test_shapes_that_do_not_fit_are_refused_on_every_rank_alike() -> None:
    x = distribute_tensor(A, Mesh((3,)), [S0])
    with pytest.raises(RuntimeError):
        x @ distribute_tensor(A, Mesh((3,)), [R])


@world(2)
def test_two_rows_are_not_stretched_where_torch_refuses_to() -> None:
    mesh = Mesh((2,))
    x, other = distribute_tensor(normal(5, 1), mesh, [R]), distribute_tensor(normal(2, 4), mesh, [S0])
    for product in (torch.matmul, F.linear):  # the local shard would fit
        with pytest.raises(RuntimeError):
            product(x, other)
    with pytest.raises(RuntimeError):
        torch.addmm(x, distribute_tensor(normal(1, 5, 1), mesh, [S1]), other)
    with pytest.raises(RuntimeError):
        torch.einsum("ij,jk", x, other[0])


@world(3)
def test_terms_are_sharded_or_added_on_one_rank_without_communication() -> None:
    mesh = Mesh((3,))
    left, right = distribute_tensor(A, mesh, [S1]), distribute_tensor(SQUARE, mesh, [S0])
    term = distribute_tensor(B, mesh, [Partial()])
    with count_comms() as comms:
        assert as_dtensor(torch.addmm(term, left, right)).placements == (Partial(),)
        assert as_dtensor(torch.einsum("...i,ij", left, right)).placements == (Partial(),)
    assert comms.total_calls == 0


@pytest.mark.parametrize(
    ("rows", "columns", "ranks"), [(2, 8, 2), (200, 8, 4), (2000, 7, 2), (2000, 90, 4), (21, 24, 4)]
)
def test_partial_inputs_are_reduced_before_a_sharded_weight_which_is_not_redistributed(
    rows: int, columns: int, ranks: int
) -> None:
    """Also where the weight is smaller: else every rank would compute all columns, and the sum would come later."""
    x, weight = normal(rows, 6), normal(columns, 6)

    def body() -> None:
        replicated = distribute_tensor(x, Mesh((ranks,)), [R])
        partial = as_dtensor(replicated).redistribute(placements=[Partial()])
        sharded = distribute_tensor(weight, Mesh((ranks,)), [S0])
        with count_comms() as comms:
            out = as_dtensor(F.linear(partial, sharded))
        assert out.placements == (S1,)
        assert [move.split(":")[0] for move in comms.implicit] == ["linear, operand 0"]
        torch.testing.assert_close(out.full_tensor(), F.linear(x, weight))

    world(ranks).run(body)


@world(4)
def test_partial_inputs_of_a_row_parallel_weight_are_reduce_scattered() -> None:
    """Each rank gets the columns that its rows of the weight take: a reduce-scatter, and the result is a sum again."""
    x, weight = distribute_tensor(X, Mesh((4,)), [R]), distribute_tensor(WEIGHT, Mesh((4,)), [Shard(0, (3, 0, 2, 1))])
    partial = as_dtensor(x).redistribute(placements=[Partial()])
    with count_comms() as comms:
        out = as_dtensor(torch.mm(partial, weight))
    assert out.placements == (Partial(),)
    assert (comms.total_calls, len(comms.implicit)) == (1, 1)
    own = weight.to_local().shape[0]
    assert comms.total_bytes == 14 * (6 - own) * 8
    torch.testing.assert_close(out.full_tensor(), X @ WEIGHT)


X, WEIGHT = normal(14, 6), normal(6, 6)


PRODUCTS = [torch.matmul, torch.mm, torch.mv, torch.dot, torch.bmm, F.linear, torch.addmm, torch.einsum, torch.baddbmm]


@pytest.mark.parametrize(
    ("call", "operands", "placements", "operand", "why"),
    [
        (torch.mm, (A, normal(3, 4)), (S0, S0), 1, "dim 0 of operand 0 is sharded"),
        (torch.mm, (normal(90, 3), normal(3, 4)), (Partial(), R), None, ""),
        (torch.addmm, (normal(4), A, normal(3, 4)), (S0, S0, R), 0, "dim 0 of operand 1 is sharded"),
        (torch.matmul, (normal(4, 2, 5, 3), normal(2, 3, 4)), (Shard(2), Shard(2)), 1, "dim 2 of operand 0 is sharded"),
        (lambda x, y: torch.einsum("bi,bj->ij", x, y), (A, normal(5, 9)), (S0, S1), 0, "dim 1 of operand 1 is sharded"),
    ],
)  # fmt: skip
def test_reasons_name_dims_of_operands(
    call: Any, operands: tuple[Tensor, ...], placements: tuple[Any, ...], operand: int | None, why: str
) -> None:
    def body() -> list[tuple[str, str]]:
        mesh = Mesh((2,))
        xs = [distribute_tensor(x, mesh, [p]) for x, p in zip(operands, placements, strict=True)]
        with explain() as report:
            call(*xs)
        return [(event.cause.operand, event.cause.why) for event in report.events]

    expected = [] if operand is None else [(f"operand {operand}", why)]
    assert world(2).run(body) == [expected] * 2


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.op in PRODUCTS], ids=str)
def test_the_reason_of_every_row_names_exactly_the_dims_that_it_shards(sample: Sample) -> None:
    def meta(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(map(meta, x))
        return Meta(tuple(x.shape), x.dtype, R) if isinstance(x, Tensor) else x

    for row in RULES[sample.op].rows(*meta(sample.args), **{k: meta(v) for k, v in sample.kwargs.items()}):
        named = {(int(i), int(d)) for d, i in re.findall(r"dim (\d+) of operand (\d+)", row.why)}
        assert named == {(i, p.dim) for i, p in enumerate(row.inputs) if isinstance(p, Shard)}
        assert ("partial sums" in row.why) == bool(named and row.output == Partial())
