"""Ops on matrices, vectors and signals send nothing where other dims are sharded."""

from typing import Any

import torch

from shardwise import Mesh, Partial, Shard, count_comms, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls
from tools.op_judge import Sample

S0, S1, S2 = Shard(0), Shard(1), Shard(2)
linalg: Any = torch.linalg
fft: Any = torch.fft
normal = Draw(6).normal
A, B, SIGNAL, LINE, V8 = normal(4, 2, 3, 3), normal(4, 2, 3, 2), normal(4, 5, 6), normal(30), normal(8)
SYMMETRIC = A @ A.mT + 3 * torch.eye(3, dtype=torch.float64)
LU, PIVOTS = linalg.lu_factor(A)
SPECTRA, WINDOW = torch.complex(normal(4, 5, 7), normal(4, 5, 7)), V8.abs() + 0.1
SAMPLES = [
    *(Sample(op, (A,)) for op in (linalg.det, linalg.slogdet, torch.inverse, linalg.qr, linalg.lu_factor,
                                  linalg.matrix_exp)),
    *(Sample(op, (A,), gradients=False) for op in (linalg.eigvals, linalg.svd, linalg.matrix_rank)),
    *(Sample(op, (SYMMETRIC,)) for op in (torch.logdet, linalg.cholesky, linalg.eigvalsh)),
    *(Sample(op, (B,)) for op in (linalg.svdvals, linalg.pinv)),
    *calls(linalg.eigh, SYMMETRIC, gradients=False),
    *calls(linalg.inv, A[:, 0]), *calls(linalg.matrix_power, (A, 3)),
    *calls(linalg.matrix_norm, (B, "nuc"), (B, {"keepdim": True})),
    *calls(linalg.solve, (A, B), (A, normal(4, 2, 3)), (A[0], normal(3, 2))),
    *calls(linalg.solve_triangular, (A, B, {"upper": True})),
    *calls(linalg.lu_solve, (LU, PIVOTS, B)), *calls(torch.cholesky_solve, (B, SYMMETRIC)),
    *calls(linalg.cross, (normal(4, 3), normal(4, 3)), (normal(1, 3), normal(4, 3))),
    *calls(torch.cross, (normal(4, 3, 2), normal(4, 3, 2), 1)),
    *calls(linalg.vander, (normal(4, 3), {"N": 4})),
    *calls(torch.cdist, (normal(4, 2, 3), normal(4, 5, 3))),
    *calls(torch.stft, (normal(4, 30), 8, 3, None, V8, {"return_complex": True}),
           (LINE, 8, {"window": V8, "return_complex": True})),
    *calls(torch.istft, *((x, 8, 3, {"window": WINDOW}) for x in (SPECTRA, SPECTRA[0])),
           (SPECTRA, 8, 3, 8, WINDOW, {"center": False, "length": 9}), (SPECTRA, 8, {"window": WINDOW, "length": 15})),
    *calls(fft.fft, SIGNAL), *calls(fft.rfft, (SIGNAL, 4, 1, "ortho")), *calls(fft.rfft2, SIGNAL),
    *calls(fft.irfft, (SPECTRA[:, :, 0], {"n": 7})),
    *calls(fft.ifft2, (SPECTRA[:, :, :3], {"dim": (0, -1), "s": (3, 4)})),
    *calls(fft.fftn, (SIGNAL, {"s": (4,)}), SIGNAL[0]),
]  # fmt: skip


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
