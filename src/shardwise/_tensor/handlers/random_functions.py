"""Random functions and initialisations that torch implements in Python, in terms of ops that have rules."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise._rules.registry import replacement
from shardwise._rules.row import Op
from shardwise._tensor.dispatch.operands import promoted
from shardwise._tensor.dtensor import DTensor, call

# ---- dropout ----------------------------------------------------------------------------------------------------


def _raise_as_torch(function: Op, input: Tensor, p: float, training: bool) -> None:
    """Raise and warn as torch does, by calling its function on a tensor with one element."""
    with torch.random.fork_rng(devices=[]):
        function(torch.ones((1,) * input.ndim), p, training)


def _dropout(function: Op, op: Op, default_training: bool, ndim: int | None, unbatched: bool) -> Op:
    """`function` of `torch.nn.functional` in terms of `op`.

    Args:
        default_training: the default of `training`.
        ndim: the number of dims of a batched input; None is any.
        unbatched: whether an unbatched input becomes a batch of one.
    """

    def drop(input: Tensor, p: float = 0.5, training: bool = default_training, inplace: bool = False) -> Tensor:
        is_batched = ndim is None or input.ndim == ndim
        if not (is_batched and 0 <= p <= 1):
            _raise_as_torch(function, input, p, training)
        add_batch = unbatched and not is_batched
        batch = input.unsqueeze(0) if add_batch else input
        if training and p > 0 and input.numel():
            batch = op(batch, p, True)
            if inplace:
                return input.copy_(batch.squeeze(0) if add_batch else batch)
        elif inplace:
            return input
        return batch.squeeze(0) if add_batch else batch

    return drop


def _in_place(op: Op) -> Op:
    """The in-place variant of a dropout op."""

    def drop(input: Tensor, p: float, train: bool) -> Tensor:
        out = op(input, p, train)
        return input.copy_(out) if train and p else input

    return drop


def _rrelu(
    input: Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    if not training and lower <= upper:  # otherwise torch.rrelu raises
        return F.leaky_relu(input, (lower + upper) / 2, inplace)
    # it saves what it reads, which must not change
    out = torch.rrelu(input.clone() if inplace else input, lower, upper, True, generator)
    return input.copy_(out) if inplace else out


def _rrelu_in_place(
    input: Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    return _rrelu(input, lower, upper, training, True, generator)


def _bernoulli_in_place(input: Tensor, p: float | Tensor = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """A tensor `p` keeps its layout: numbers are drawn in that, and then redistributed to the layout of `input`."""
    if isinstance(p, Tensor):
        if not isinstance(p, DTensor):
            assert isinstance(input, DTensor)
            p = promoted(p, input._layout.mesh, "bernoulli_")
        return input.copy_(torch.bernoulli(p.expand(input.shape), generator=generator))
    out: Tensor = call(torch.ops.aten.bernoulli_.float, input, p, generator=generator)
    return out


# ---- initialisation ---------------------------------------------------------------------------------------------


def _uniform(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    with torch.no_grad():
        return tensor.uniform_(a, b, generator=generator)


def _normal(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)


def _constant(tensor: Tensor, val: float) -> Tensor:
    with torch.no_grad():
        return tensor.fill_(val)


def _kaiming_uniform(
    tensor: Tensor,
    a: float = 0,
    mode: Literal["fan_in", "fan_out"] = "fan_in",
    nonlinearity: Literal["linear", "relu", "leaky_relu"] = "leaky_relu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Kaiming initialisation (arXiv 1502.01852) with the fan of the global tensor."""
    if 0 in tensor.shape:
        return tensor
    fan = nn.init._calculate_correct_fan(tensor, mode)
    bound = 3.0**0.5 * nn.init.calculate_gain(nonlinearity, a) / fan**0.5
    return _uniform(tensor, -bound, bound, generator)


REPLACEMENTS: dict[Op, Op] = {
    F.dropout: _dropout(F.dropout, torch.dropout, True, None, False),
    F.alpha_dropout: _dropout(F.alpha_dropout, torch.alpha_dropout, False, None, False),
    F.feature_alpha_dropout: _dropout(F.feature_alpha_dropout, torch.feature_alpha_dropout, False, None, False),
    F.dropout1d: _dropout(F.dropout1d, torch.feature_dropout, True, 3, True),
    F.dropout2d: _dropout(F.dropout2d, torch.feature_dropout, True, 4, False),
    F.dropout3d: _dropout(F.dropout3d, torch.feature_dropout, True, 5, True),
    torch.dropout_: _in_place(torch.dropout),
    torch.alpha_dropout_: _in_place(torch.alpha_dropout),
    torch.feature_dropout_: _in_place(torch.feature_dropout),
    torch.feature_alpha_dropout_: _in_place(torch.feature_alpha_dropout),
    Tensor.bernoulli_: _bernoulli_in_place,
    F.rrelu: _rrelu,
    torch.rrelu_: _rrelu_in_place,
    nn.init.uniform_: _uniform,
    nn.init.normal_: _normal,
    nn.init.constant_: _constant,
    nn.init.kaiming_uniform_: _kaiming_uniform,
}
for _op, _function in REPLACEMENTS.items():
    replacement(_op)(_function)
