"""Complex numbers on sharded operands: parts, pairs, conjugates, sums, and their gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Mesh, OnRanks, Partial, Replicate, Shard, count_comms, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls, sent
from tools.op_judge import Sample
from tools.rule_checks import assert_equals_one_process

draw = Draw(9)
A, B = draw.normal(4, 3, 2), draw.normal(4, 3, 2)
Z = torch.complex(A, B)


def squared(z: Tensor) -> Tensor:
    return (z * z.conj()).real - z.imag


def adjoint(z: Tensor) -> Tensor:
    return z.mH + z[0].H


SAMPLES = [
    *(Sample(op, (A.abs(), B)) for op in (torch.complex, torch.polar)),
    *(Sample(op, (Z,)) for op in (torch.view_as_real, torch.angle, torch.abs, torch.real, torch.imag, torch.sgn,
                                  torch.conj, torch.conj_physical, torch.sum, torch.mean, squared)),
    Sample(adjoint, (Z[:, :2],)),
    Sample(torch.view_as_complex, (A,)),
    Sample(torch.resolve_conj, (Z.conj(),)),
    *calls(torch.matmul, (Z[0], Z[1].mT.conj())),
    *calls(torch.vdot, (Z[:, 0, 0], Z[:, 1, 1])),
    *calls(torch.mul, (Z, A)),
]  # fmt: skip


def conjugated(resolve: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    return torch.view_as_real(resolve(z.conj()))


def negated(resolve: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    x = z.conj().imag
    out = resolve(x)
    assert [x.is_neg(), out.is_neg(), resolve(out) is out] == [True, False, True]
    return out


RESOLVED = [
    (conjugated, (torch.resolve_conj, Tensor.resolve_conj, torch.ops.aten.resolve_conj.default)),
    (negated, (torch.resolve_neg, Tensor.resolve_neg, torch.ops.aten.resolve_neg.default)),
]


@pytest.mark.parametrize(("function", "op"), [(function, op) for function, ops in RESOLVED for op in ops])
def test_resolved_conjugates_and_negatives_equal_one_process(function: Any, op: Any) -> None:
    samples = [Sample(partial(function, op), (z,)) for z in (Z, Z.mT, Z[:, :0])]
    assert assert_equals_one_process(samples, (Mesh((3,)), Mesh((2, 2))), limit=8).cases >= 36


@world(3)
def test_resolving_needs_no_communication_and_changes_nothing_that_is_resolved() -> None:
    for placement in (Shard(0), Shard(1, [0, 3, 0]), Replicate(), Partial(), OnRanks(1)):
        z = distribute_tensor(Z, Mesh((3,)), [placement])
        with count_comms() as comms:
            out = as_dtensor(z.conj().resolve_conj())
        assert (comms.total_calls, out.placements, out.is_conj()) == (0, z.placements, False)
        assert out.stride() == Z.conj().resolve_conj().stride()
        for same in (z, z.conj().imag.exp(), z.real):
            assert same.resolve_conj() is same
            assert same.resolve_neg() is same
        conjugate = z.conj()
        conjugate.resolve_conj().zero_()
        torch.testing.assert_close(as_dtensor(conjugate).full_tensor(), Z.conj())


def test_real_and_imaginary_parts_do_not_communicate() -> None:
    pairs = lambda z: torch.view_as_complex(torch.view_as_real(z))  # noqa: E731
    for op in (torch.real, torch.imag, torch.angle, torch.view_as_real, pairs):
        assert sent(Mesh((2,)), op, (Z, Shard(0))) == [((Shard(0),), 0, 0)] * 2
    assert sent(Mesh((2,)), lambda z: z.sum(0).imag, (Z, Shard(0))) == [((Partial(),), 0, 0)] * 2
