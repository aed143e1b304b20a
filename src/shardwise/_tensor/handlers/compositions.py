"""Functions in terms of other ops: torch's own code would communicate more, or read local shapes."""

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._rules.registry import handler, replacement, update
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor.dispatch.fallback import run_decomposed
from shardwise._tensor.dispatch.operands import promoted
from shardwise._tensor.dispatch.view_copies import mark_copy
from shardwise._tensor.dtensor import DTensor, call

# ---- decompositions ---------------------------------------------------------------------------------------------


@handler(torch.roll, Tensor.roll, no_row=True)
def _roll(func: Op, args: Args, kwargs: Kwargs) -> object:
    """Roll; without dims, through all elements in row-major order."""
    x, shifts = args[0], args[1] if len(args) > 1 else kwargs["shifts"]
    return x.reshape(-1).roll(shifts, 0).view(x.shape).clone()  # a view could not be detached in place


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
    dtype = torch.block_diag(*small).dtype  # on the meta device a 0-d tensor would count as any other
    blocks = [(x if x.ndim == 2 else x.reshape(1, x.numel())).to(dtype) for x in tensors]
    width, before, rows = sum(x.shape[1] for x in blocks), 0, []
    for x in blocks:
        rows.append(F.pad(x, (before, width - before - x.shape[1])))
        before += x.shape[1]
    return torch.cat(rows)


# As torch: local tensors say whether their conjugate is still to be computed, which the meta device does not.
replacement(torch.resolve_conj, Tensor.resolve_conj, torch.ops.aten.resolve_conj.default)(
    lambda input: input.clone() if input.is_conj() else input
)
replacement(torch.resolve_neg, Tensor.resolve_neg, torch.ops.aten.resolve_neg.default)(
    lambda input: input.clone() if input.is_neg() else input
)


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


@handler(F.linear_cross_entropy)
def _linear_cross_entropy(func: Op, args: Args, kwargs: Kwargs) -> object:
    """`options` are for the fused kernel, which works in chunks."""
    named = {k: v for k, v in kwargs.items() if k not in ("linear_bias", "options")}
    x, linear_weight, target = args
    bias, (classes, *rest) = kwargs["linear_bias"], linear_weight.shape[:-1]
    if rest:
        linear_weight, bias = linear_weight.flatten(0, -2), None if bias is None else bias.flatten()
    if named["ignore_index"] is None:
        named["ignore_index"] = -100
    logits = F.linear(x, linear_weight, bias)
    return F.cross_entropy(logits.unflatten(-1, (classes, *rest)) if rest else logits, target, **named)


# ---- random functions that torch implements in Python ---------------------------------------


def _body(function: Any) -> Op:
    """Torch's Python code of `function`, which calls ops with DTensors, without asking subclasses."""
    return FunctionType(function.__code__, {**function.__globals__, "has_torch_function_unary": lambda x: False})


def _dropout(function: Op) -> Op:
    """A dropout function, which returns the input itself if it drops nothing; torch passes all arguments."""
    body = _body(function)

    def drop(input: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
        out: Tensor = body(input, p, training, inplace)
        return out if training and p else input

    return drop


def _in_place(op: Op) -> Op:
    """The in-place variant of a dropout op."""

    def drop(input: Tensor, p: float, train: bool) -> Tensor:
        out = op(input, p, train)
        return input.copy_(out) if train and p else input

    return drop


def _bernoulli_in_place(input: Tensor, p: float | Tensor = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """A tensor `p` keeps its layout: numbers are drawn in that, and then redistributed to the layout of `input`."""
    if isinstance(p, Tensor):
        if not isinstance(p, DTensor):
            assert isinstance(input, DTensor)
            p = promoted(p, input._layout.mesh, "bernoulli_")
        return input.copy_(torch.bernoulli(p.expand(input.shape), generator=generator))
    out: Tensor = call(torch.ops.aten.bernoulli_.float, input, p, generator=generator)
    return out


REPLACEMENTS: dict[Op, Op] = {
    **{f: _dropout(f) for f in (F.dropout, F.alpha_dropout, F.feature_alpha_dropout)},
    **{f: _dropout(f) for f in (F.dropout1d, F.dropout2d, F.dropout3d)},
    torch.dropout_: _in_place(torch.dropout),
    torch.alpha_dropout_: _in_place(torch.alpha_dropout),
    torch.feature_dropout_: _in_place(torch.feature_dropout),
    torch.feature_alpha_dropout_: _in_place(torch.feature_alpha_dropout),
    Tensor.bernoulli_: _bernoulli_in_place,
    F.rrelu: _body(F.rrelu),
    # it saves what it reads, which must not change
    torch.rrelu_: lambda input, *args, **kwargs: input.copy_(torch.rrelu(input.clone(), *args, **kwargs)),
}
for _op, _function in REPLACEMENTS.items():
    replacement(_op)(_function)


# ---- substitutes for functions whose Python code reads shapes ---------------------------------------------------

# A DTensor reports its global shape there, so such code needs plain local tensors; a substitute takes DTensors.


def _view_or_copy(x: Tensor, size: Any) -> Tensor:
    """C++ makes a view if the strides of the global tensor allow one; those of the local tensor may not."""
    try:
        return x.view(size)
    except RuntimeError:
        return mark_copy(x.reshape(size))


NATIVE: dict[Op, Op] = {
    F.relu: lambda input, inplace=False: torch.relu_(input) if inplace else torch.relu(input),
    F.sigmoid: torch.sigmoid,
    F.tanh: torch.tanh,
    F.softmax: lambda input, dim=None, _stacklevel=3, dtype=None: torch.softmax(input, dim, dtype),
    F.log_softmax: lambda input, dim=None, _stacklevel=3, dtype=None: torch.log_softmax(input, dim, dtype),
    F.layer_norm: torch.layer_norm,
    F.rms_norm: torch.rms_norm,
    torch.ops.aten.view.default: _view_or_copy,
    Tensor.__rpow__: lambda x, other: torch.pow(other, x),
    Tensor.__rsub__: torch.rsub,
    Tensor.__rdiv__: lambda x, other: torch.reciprocal(x) * other,
}
for _op, _native in NATIVE.items():
    update(_op, native=_native)
