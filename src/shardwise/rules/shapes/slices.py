"""Ops that treat each vector, matrix or signal along their last dims by itself: any dim before those may be cut."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import Shard
from shardwise.rules.empty import never_empty
from shardwise.rules.pointwise import SUMS, broadcast, cut_at, tensors_of
from shardwise.rules.row import LocalFunction, Meta, OpRule, Row, local_with, register

aten = torch.ops.aten

# How many of its last dims an op looks at, one number an operand; further operands are looked at whole.
LINALG = {
    "det slogdet inv inv_ex cholesky cholesky_ex eig eigvals eigh eigvalsh svd svdvals qr lu lu_factor": (2,),
    "lu_factor_ex ldl_factor ldl_factor_ex matrix_exp matrix_power matrix_rank pinv": (2,),
    "solve_triangular": (2, 2), "lu_solve ldl_solve": (2, 1, 2), "vander": (1,),
}  # fmt: skip
OLDER = {
    "det slogdet logdet inverse cholesky cholesky_inverse qr svd pinverse matrix_exp matrix_power lu": (2,),
    "cholesky_solve triangular_solve": (2, 2), "lu_unpack": (2, 1), "lu_solve": (2, 2, 1),
}  # fmt: skip


def slice_rows(
    operands: Sequence[tuple[Meta, int]], seen: Collection[int] = (), local: LocalFunction | None = None
) -> list[Row]:
    """Rows of an op that looks at some last dims of each operand; those before are stretched to one shape.

    Args:
        operands: the tensors, and how many of their dims.
        seen: which of the dims before them it looks at as well.
    """
    leads = [x._replace(shape=x.shape[: max(x.ndim - k, 0)]) for x, k in operands]
    shape = broadcast(*leads)
    return [
        Row(tuple(cut_at(x, d, shape) for x in leads), Shard(d), f"slices along dim {d} are on their own", local)
        for d in range(len(shape))
        if d not in seen
    ]


def sliced(looks: Sequence[int], *args: Any, **kwargs: Any) -> list[Row]:
    """out[batch] = f(a[batch], b[batch], …)."""
    operands = tensors_of(args, kwargs)
    further = [x.ndim for x in operands[len(looks) :]]
    return slice_rows(list(zip(operands, [*looks, *further], strict=True)))


def solve(A: Meta, B: Meta, **_: Any) -> list[Row]:
    """A[batch] out[batch] = B[batch], vectors or matrices."""
    vector = B.ndim == 1 or B.shape == A.shape[:-1]
    return slice_rows([(A, 2), (B, 1 if vector else 2)])


def cross(input: Meta, other: Meta, dim: int | None = -1) -> list[Row]:
    """Products of vectors along one dim."""
    if dim is None:  # a piece may have 3 of something else
        raise NotImplementedError("the first dim of length 3 is found when the op is taken apart")
    seen = dim % len(torch.broadcast_shapes(input.shape, other.shape))
    return slice_rows([(input, 0), (other, 0)], (seen,))


def fourier(
    dims: Any, input: Meta, n: Any = None, dim: Any = None, norm: str | None = None, *, s: Any = None
) -> list[Row]:
    """A transform along some dims; where all cut ones are, their cuts are brought to another dim."""
    lengths, dim = (n if s is None else s), (dims if dim is None else dim)
    if dim is None:
        dim = range(-(input.ndim if lengths is None else len(lengths)), 0)
    seen = {d % input.ndim for d in ([dim] if isinstance(dim, int) else dim)}
    rows = slice_rows([(input, 0)], seen, local_with(never_empty, (input.ndim,)))
    return [*rows, *(Row((p,), p, "a transform of summands") for p in SUMS if p == input.placement)]


def short_time(input: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """A transform of each signal."""
    others = tensors_of(args, kwargs)
    local = local_with(never_empty, (2, *(0 for _ in others)))
    return slice_rows([(input, 1), *((x, x.ndim) for x in others)], (), local)


def unpool(dims: int, input: Meta, indices: Meta, *_: Any, **__: Any) -> list[Row]:
    """Elements go back to the places in their plane that pooling took them from."""
    return slice_rows([(input, dims), (indices, dims)], (), local_with(never_empty, (dims + 1,) * 2))


def pairs(last: int, input: Meta) -> list[Row]:
    """Complex numbers as pairs in a last dim, and back."""
    return [*slice_rows([(input, last)]), *(Row((p,), p, "a view of summands") for p in SUMS)]


for _homes, _table in (((torch.linalg,), LINALG), ((torch, Tensor), OLDER)):
    for _names, _looks in _table.items():
        _ops = [getattr(home, name) for name in _names.split() for home in _homes if hasattr(home, name)]
        register(OpRule(partial(sliced, _looks)), *_ops)
_decompositions = [getattr(aten, f"_linalg_{name}").default for name in ("det", "slogdet", "svd", "eigh")]
register(OpRule(partial(sliced, (2,))), *_decompositions)
register(OpRule(solve), torch.linalg.solve, torch.linalg.solve_ex)
register(OpRule(cross), torch.linalg.cross, aten.linalg_cross.default)
register(OpRule(lambda input, other, dim=None: cross(input, other, dim)), torch.cross, Tensor.cross)
for _suffix, _dims in (("", -1), ("2", (-2, -1)), ("n", None)):
    _transforms = [getattr(torch.fft, name + _suffix) for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")]
    register(OpRule(partial(fourier, _dims)), *_transforms)
register(OpRule(short_time), torch.stft, Tensor.stft)
for _count in (1, 2, 3):
    register(OpRule(partial(unpool, _count)), getattr(F, f"max_unpool{_count}d"))
register(OpRule(partial(pairs, 0)), torch.view_as_real, aten.view_as_real.default)
register(OpRule(partial(pairs, 1)), torch.view_as_complex, aten.view_as_complex.default)
