"""Ops on matrices, vectors and signals, whose other dims are cut, equal one process and send nothing."""

import pytest
import torch
from torch import Tensor

from shardwise import Mesh, Partial, Shard, count_comms, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tools.op_judge import Sample
from tools.rule_checks import assert_equals_one_process

GENERATOR = torch.Generator().manual_seed(6)
MESHES = (Mesh((3,)), Mesh((2, 2)))
S0, S1, S2 = Shard(0), Shard(1), Shard(2)
linalg, fft = torch.linalg, torch.fft


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=GENERATOR)


A = normal(4, 2, 3, 3)
SYMMETRIC = A @ A.mT + 3 * torch.eye(3, dtype=torch.float64)
B, SIGNAL = normal(4, 2, 3, 2), normal(4, 5, 6)
LU, PIVOTS = linalg.lu_factor(A)
SPECTRA, WINDOW = normal(4, 5, 7, dtype=torch.complex128), normal(8).abs() + 0.1
SAMPLES = [
    Sample(linalg.det, (A,)),
    Sample(linalg.slogdet, (A,)),
    Sample(torch.logdet, (SYMMETRIC,)),
    Sample(linalg.inv, (A[:, 0],)),
    Sample(torch.inverse, (A,)),
    Sample(linalg.cholesky, (SYMMETRIC,)),
    Sample(linalg.eigvalsh, (SYMMETRIC,)),
    Sample(linalg.eigh, (SYMMETRIC,), gradients=False),
    Sample(linalg.eigvals, (A,), gradients=False),
    Sample(linalg.svdvals, (B,)),
    Sample(linalg.svd, (A,), gradients=False),
    Sample(linalg.qr, (A,)),
    Sample(linalg.lu_factor, (A,)),
    Sample(linalg.pinv, (B,)),
    Sample(linalg.matrix_exp, (A,)),
    Sample(linalg.matrix_power, (A, 3)),
    Sample(linalg.matrix_rank, (A,), gradients=False),
    Sample(linalg.matrix_norm, (B, "nuc")),
    Sample(linalg.matrix_norm, (B,), {"keepdim": True}),
    Sample(linalg.solve, (A, B)),
    Sample(linalg.solve, (A, normal(4, 2, 3))),
    Sample(linalg.solve, (A[0], normal(3, 2))),
    Sample(linalg.solve_triangular, (A, B), {"upper": True}),
    Sample(linalg.lu_solve, (LU, PIVOTS, B)),
    Sample(torch.cholesky_solve, (B, SYMMETRIC)),
    Sample(linalg.cross, (normal(4, 3), normal(4, 3))),
    Sample(linalg.cross, (normal(1, 3), normal(4, 3))),
    Sample(torch.cross, (normal(4, 3, 2), normal(4, 3, 2), 1)),
    Sample(linalg.vander, (normal(4, 3),), {"N": 4}),
    Sample(torch.cdist, (normal(4, 2, 3), normal(4, 5, 3))),
    Sample(fft.fft, (SIGNAL,)),
    Sample(torch.stft, (normal(4, 30), 8, 3, None, normal(8)), {"return_complex": True}),
    Sample(torch.stft, (normal(30), 8), {"window": normal(8), "return_complex": True}),
    *(Sample(torch.istft, (x, 8, 3), {"window": WINDOW}) for x in (SPECTRA, SPECTRA[0])),
    Sample(torch.istft, (SPECTRA, 8, 3, 8, WINDOW), {"center": False, "length": 9}),
    Sample(torch.istft, (SPECTRA, 8), {"window": WINDOW, "length": 15}),
    Sample(fft.rfft, (SIGNAL, 4, 1, "ortho")),
    Sample(fft.irfft, (normal(4, 5, dtype=torch.complex128),), {"n": 7}),
    Sample(fft.rfft2, (SIGNAL,)),
    Sample(fft.ifft2, (normal(4, 5, 3, dtype=torch.complex128),), {"dim": (0, -1), "s": (3, 4)}),
    Sample(fft.fftn, (SIGNAL,), {"s": (4,)}),
    Sample(fft.fftn, (SIGNAL[0],)),
]


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_ops_on_slices_equal_one_process(sample: Sample) -> None:
    assert assert_equals_one_process([sample], MESHES, limit=5).cases >= 7


@world(4)
def test_batches_of_matrices_and_signals_stay_where_they_are() -> None:
    mesh = Mesh((4,))
    a, b, signal = (distribute_tensor(x, mesh, [S0]) for x in (A, B, SIGNAL))
    with count_comms() as comms:
        results = [linalg.solve(a, b), linalg.inv(a), linalg.eigh(a)[1], fft.rfft2(signal), torch.cdist(b, b)]
        assert all(as_dtensor(x).placements == (S0,) for x in results)
        assert as_dtensor(fft.fft(distribute_tensor(SIGNAL, mesh, [Partial()]))).placements == (Partial(),)
    assert not comms.implicit


@world(2)
def test_a_transform_of_a_cut_dim_is_cut_along_another() -> None:
    x = distribute_tensor(SIGNAL, Mesh((2,)), [S2])
    with count_comms() as comms:
        out = as_dtensor(fft.fft(x))
    assert out.placements in ((S0,), (S1,))
    assert comms.total_bytes == SIGNAL.numel() // 4 * 8
    torch.testing.assert_close(out.full_tensor(), fft.fft(SIGNAL))
