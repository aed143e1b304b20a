"""Complex numbers on sharded operands: parts, pairs, conjugates, sums, and their gradients."""

import pytest
import torch
from torch import Tensor

from shardwise import Mesh, Partial, Shard, count_comms, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from shardwise.testing.judge import Sample
from shardwise.testing.rule_checks import assert_equals_one_process

GENERATOR = torch.Generator().manual_seed(9)
A, B = (torch.randn(4, 3, 2, dtype=torch.float64, generator=GENERATOR) for _ in range(2))
Z = torch.complex(A, B)


def squared(z: Tensor) -> Tensor:
    return (z * z.conj()).real - z.imag


def adjoint(z: Tensor) -> Tensor:
    return z.mH + z[0].H


SAMPLES = [
    *(Sample(op, (A.abs(), B)) for op in (torch.complex, torch.polar)),
    *(Sample(op, (Z,)) for op in (torch.view_as_real, torch.angle, torch.abs, torch.real, torch.imag, torch.sgn)),
    *(Sample(op, (Z,)) for op in (torch.conj, torch.conj_physical, torch.sum, torch.mean, squared)),
    Sample(adjoint, (Z[:, :2],)),
    Sample(torch.view_as_complex, (A,)),
    Sample(torch.resolve_conj, (Z.conj(),)),
    Sample(torch.matmul, (Z[0], Z[1].mT.conj())),
    Sample(torch.vdot, (Z[:, 0, 0], Z[:, 1, 1])),
    Sample(torch.mul, (Z, A)),
]


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_complex_numbers_equal_one_process(sample: Sample) -> None:
    assert assert_equals_one_process([sample], (Mesh((3,)), Mesh((2, 2))), limit=6).cases >= 9


@world(2)
def test_real_and_imaginary_parts_do_not_communicate() -> None:
    mesh = Mesh((2,))
    z = distribute_tensor(Z, mesh, [Shard(0)])
    with count_comms() as comms:
        for part in (
            z.real,
            z.imag,
            torch.angle(z),
            torch.view_as_real(z),
            torch.view_as_complex(torch.view_as_real(z)),
        ):
            assert as_dtensor(part).placements == (Shard(0),)
        assert as_dtensor(z.sum(0).imag).placements == (Partial(),)
    assert comms.total_calls == 0
