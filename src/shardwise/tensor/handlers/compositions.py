"""Ops with a decomposition of their own, because torch's would communicate more, or would miss something."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.rules.registry import handler, replacement
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor.dispatch.fallback import run_decomposed


@handler(torch.roll, Tensor.roll, no_row=True)
def _roll(func: Op, args: Args, kwargs: Kwargs) -> object:
    """Without dims, through all elements in row-major order."""
    x, shifts = args[0], args[1] if len(args) > 1 else kwargs["shifts"]
    return x.reshape(-1).roll(shifts, 0).view(x.shape).clone()  # not a view, which could not be detached in place


@replacement(torch.rot90, Tensor.rot90)
def _rot90(input: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    a, b = dims
    match k % 4:
        case 1:
            return input.flip(b).transpose(a, b).clone()
        case 2:
            return input.flip(a, b)
        case 3:
            return input.flip(a).transpose(a, b).clone()
    return input.clone()


@replacement(torch.functional.block_diag)
def _block_diag(*tensors: Tensor) -> Tensor:
    small = [torch.zeros([min(n, 1) for n in x.shape], dtype=x.dtype) for x in tensors]
    dtype = torch.block_diag(*small).dtype  # not that of the meta device, where a 0-d tensor counts as any other
    blocks = [(x if x.ndim == 2 else x.reshape(1, x.numel())).to(dtype) for x in tensors]
    width, before, rows = sum(x.shape[1] for x in blocks), 0, []
    for x in blocks:
        rows.append(F.pad(x, (before, width - before - x.shape[1])))
        before += x.shape[1]
    return torch.cat(rows)


@replacement(torch.resolve_conj, Tensor.resolve_conj, torch.ops.aten.resolve_conj.default)
def _resolve_conj(input: Tensor) -> Tensor:
    """As torch: local tensors say whether their conjugate is still to be computed, which the meta device does not."""
    return input.clone() if input.is_conj() else input


@replacement(torch.resolve_neg, Tensor.resolve_neg, torch.ops.aten.resolve_neg.default)
def _resolve_neg(input: Tensor) -> Tensor:
    return input.clone() if input.is_neg() else input


@handler(torch.tensor_split, Tensor.tensor_split, no_row=True)
def _tensor_split(func: Op, args: Args, kwargs: Kwargs) -> object:
    """Indices in a tensor are read as numbers."""
    args = tuple(a.tolist() if i and isinstance(a, Tensor) else a for i, a in enumerate(args))
    return func(*args, **{k: a.tolist() if isinstance(a, Tensor) else a for k, a in kwargs.items()})


@handler(F.one_hot)
def _one_hot(func: Op, args: Args, kwargs: Kwargs) -> object:
    """Torch checks the classes in a way that skips tensors without memory, such as wrappers."""

    def coded(x: Tensor, num_classes: int = -1) -> object:
        if x.numel() and x.min().item() < 0:
            raise RuntimeError("Class values must be non-negative.")
        if x.numel() and -1 < num_classes <= x.max().item():
            raise RuntimeError("Class values must be smaller than num_classes.")
        return run_decomposed(func, (x, num_classes), {})

    return coded(*args, **{"x" if k in ("tensor", "input", "self") else k: a for k, a in kwargs.items()})
