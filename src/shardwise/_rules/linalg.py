"""Batched ops on vectors, matrices or signals in the last dims (linalg, fft): batch dims may be sharded."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, _linalg_utils

from shardwise._layout import REPLICATE, Shard
from shardwise._rules.local_context import LocalContext, local_with
from shardwise._rules.local_tensors import never_empty
from shardwise._rules.pointwise import SUMS, broadcast, shard_at, tensors_of
from shardwise._rules.registry import OpRule, register
from shardwise._rules.row import LocalFunction, Meta, Row

aten = torch.ops.aten

# The number of last dims of each operand on which an op works; for further operands, all.
LINALG = {
    "det slogdet inv inv_ex cholesky cholesky_ex eig eigvals eigh eigvalsh svd svdvals qr lu lu_factor": (2,),
    "lu_factor_ex ldl_factor ldl_factor_ex matrix_exp matrix_power pinv": (2,),
    "matrix_sqrth polar": (2,),  # since torch 2.14
    "solve_triangular": (2, 2), "lu_solve ldl_solve": (2, 1, 2), "vander": (1,),
}  # fmt: skip
TORCH = {
    "det slogdet logdet inverse cholesky cholesky_inverse qr svd pinverse matrix_exp matrix_power lu": (2,),
    "cholesky_solve triangular_solve": (2, 2), "lu_unpack": (2, 1), "lu_solve": (2, 2, 1),
}  # fmt: skip


def slice_rows(
    operands: Sequence[tuple[Meta, int]], core: Collection[int] = (), local: LocalFunction | None = None
) -> list[Row]:
    """Rows of an op on some last dims of each operand; the batch dims before them are broadcast.

    Args:
        operands: the tensors, each with the number of last dims on which the op works.
        core: batch dims on which the op also works.
    """
    leads = [x._replace(shape=x.shape[: max(x.ndim - k, 0)]) for x, k in operands]
    shape = broadcast(*leads)
    return [
        Row(tuple(shard_at(x, d, shape) for x in leads), Shard(d), f"dim {d} is a batch dim", local)
        for d in range(len(shape))
        if d not in core
    ]


def batched(last_dims: Sequence[int], *args: object, **kwargs: object) -> list[Row]:
    """out[batch] = f(a[batch], b[batch], …)."""
    operands = tensors_of(args, kwargs)
    further = [x.ndim for x in operands[len(last_dims) :]]
    return slice_rows(list(zip(operands, [*last_dims, *further], strict=True)))


def solve(A: Meta, B: Meta, **_: object) -> list[Row]:
    """A[batch] out[batch] = B[batch], vectors or matrices."""
    vector = B.ndim == 1 or B.shape == A.shape[:-1]
    return slice_rows([(A, 2), (B, 1 if vector else 2)])


def cross(input: Meta, other: Meta, dim: int | None = -1) -> list[Row]:
    """Products of vectors along one dim."""
    if dim is None:  # a shard of another dim may have length 3
        raise NotImplementedError("the first dim of length 3 is found when the op is decomposed")
    core = dim % len(torch.broadcast_shapes(input.shape, other.shape))
    return slice_rows([(input, 0), (other, 0)], (core,))


def fourier(
    dims: Any, input: Meta, n: Any = None, dim: Any = None, norm: str | None = None, *, s: Any = None
) -> list[Row]:
    """A transform along some dims, which its rows do not shard."""
    lengths, dim = (n if s is None else s), (dims if dim is None else dim)
    if dim is None:
        dim = range(-(input.ndim if lengths is None else len(lengths)), 0)
    core = {d % input.ndim for d in ([dim] if isinstance(dim, int) else dim)}
    rows = slice_rows([(input, 0)], core, local_with(never_empty, (input.ndim,)))
    return [*rows, *(Row((p,), p, "a transform of partial sums is Partial") for p in SUMS if p == input.placement)]


def short_time(dims: int, input: Meta, *args: object, **kwargs: object) -> list[Row]:
    """A short-time transform of each signal (1 dim), or the signal of each transform (2 dims), which is linear."""
    others = tensors_of(args, kwargs)
    local = local_with(never_empty, (2 if dims == 1 else input.ndim, *(0 for _ in others)))
    rows = slice_rows([(input, dims), *((x, x.ndim) for x in others)], (), local)
    rest = (REPLICATE,) * len(others)
    linear = [p for p in SUMS if dims == 2 and p == input.placement]
    return [*rows, *(Row((p, *rest), p, "linear in the transform") for p in linear)]


def _signal_shape(
    input: Meta, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Meta | None = None,
    center: bool = True, normalized: bool = False, onesided: bool | None = None, length: int | None = None,
    return_complex: bool = False,
) -> tuple[int, ...]:  # fmt: skip
    full = n_fft + (n_fft // 4 if hop_length is None else hop_length) * (input.shape[-1] - 1)
    return (*input.shape[:-2], full - center * (n_fft // 2) * 2 if length is None else length)


def pairs(last: int, input: Meta) -> list[Row]:
    """view_as_real, view_as_complex: complex numbers as pairs in a last dim."""
    return [*slice_rows([(input, last)]), *(Row((p,), p, "a view of partial sums is Partial") for p in SUMS)]


def _view_as_real(ctx: LocalContext, x: Tensor) -> Tensor:
    """Torch cannot differentiate this for a tensor without elements whose gradient is expanded."""
    out: Tensor = ctx.call(x)
    if out.requires_grad and not out.numel():
        out.register_hook(lambda grad: grad.clone(memory_format=torch.contiguous_format))
    return out


# torch keeps functions that it removed in `_linalg_utils`, where they only raise (`qr` and `cholesky` since 2.14).
for _homes, _table, _removed in (((torch.linalg,), LINALG, {}), ((torch, Tensor), TORCH, vars(_linalg_utils))):
    for _names, _last_dims in _table.items():
        _kept = [name for name in _names.split() if name not in _removed]
        _ops = [getattr(home, name) for name in _kept for home in _homes if hasattr(home, name)]
        register(OpRule(partial(batched, _last_dims)), *_ops)
_decompositions = [getattr(aten, f"_linalg_{name}").default for name in ("det", "slogdet", "svd", "eigh")]
register(OpRule(partial(batched, (2,))), *_decompositions)
register(OpRule(solve), torch.linalg.solve, torch.linalg.solve_ex)
register(OpRule(cross), torch.linalg.cross, aten.linalg_cross.default)
register(OpRule(lambda input, other, dim=None: cross(input, other, dim)), torch.cross, Tensor.cross)
for _suffix, _dims in (("", -1), ("2", (-2, -1)), ("n", None)):
    _transforms = [getattr(torch.fft, name + _suffix) for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")]
    register(OpRule(partial(fourier, _dims)), *_transforms)
register(OpRule(partial(short_time, 1)), torch.stft, Tensor.stft)
register(OpRule(partial(short_time, 2), shape=_signal_shape), torch.istft, Tensor.istft)
register(OpRule(partial(pairs, 0), empty_shards_impl=_view_as_real), torch.view_as_real, aten.view_as_real.default)
register(OpRule(partial(pairs, 1)), torch.view_as_complex, aten.view_as_complex.default)
