"""Random functions, and initialisations, that torch writes in Python: what they come to on ops that have rules."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.rules.registry import handler
from shardwise.rules.row import Handler, Op
from shardwise.tensor.dispatch.promotion import promoted
from shardwise.tensor.dtensor import DTensor, call


def _handler(function: Callable[..., Any]) -> Handler:
    """A function with the parameters of torch's as what the doors call."""
    return lambda func, args, kwargs: function(*args, **kwargs)


# ---- dropout ------------------------------------------------------------------------------------------------


def _checked_by(function: Any, input: Tensor, p: float, training: bool) -> None:
    """Torch's own errors and warnings, from a tensor of one element."""
    with torch.random.fork_rng(devices=[]):
        function(torch.ones((1,) * input.ndim), p, training)


def _dropout(function: Any, op: Any, training_by_default: bool, batched: int | None, unbatched: bool) -> Handler:
    """A function of `torch.nn.functional` that runs `op`.

    Args:
        batched: how many dims a batch has; None is any number.
        unbatched: whether one without a batch is made a batch of one.
    """

    def drop(input: Tensor, p: float = 0.5, training: bool = training_by_default, inplace: bool = False) -> Tensor:
        usual = batched is None or input.ndim == batched
        if not (usual and 0 <= p <= 1):
            _checked_by(function, input, p, training)
        if not training or p == 0:
            return input
        lacks_batch = unbatched and not usual
        out = op(input.unsqueeze(0) if lacks_batch else input, p, True)
        out = out.squeeze(0) if lacks_batch else out
        return input.copy_(out) if inplace else out

    return _handler(drop)


def _in_place(op: Any) -> Handler:
    def drop(input: Tensor, p: float, train: bool) -> Tensor:
        out = op(input, p, train)
        return input.copy_(out) if train and p else input

    return _handler(drop)


def _rrelu(
    input: Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    if not training and lower <= upper:  # if not, torch says so
        return F.leaky_relu(input, (lower + upper) / 2, inplace)
    out = torch.rrelu(input, lower, upper, True, generator)
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
    """Probabilities of another layout than that of `input` stay where they are: what they chose is moved."""
    if isinstance(p, Tensor):
        beside = input if isinstance(input, DTensor) else p
        chances = p if isinstance(p, DTensor) else promoted(p, beside._layout.mesh, "bernoulli_")  # type: ignore[attr-defined]
        return input.copy_(torch.bernoulli(chances.expand(input.shape), generator=generator))
    return call(torch.ops.aten.bernoulli_.float, input, p, generator=generator)  # type: ignore[no-any-return]


# ---- initialisation -----------------------------------------------------------------------------------------


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
    mode: Any = "fan_in",
    nonlinearity: Any = "leaky_relu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """He's initialisation (arXiv 1502.01852) from the global fan."""
    if 0 in tensor.shape:
        return tensor
    fan = nn.init._calculate_correct_fan(tensor, mode)
    bound = 3.0**0.5 * nn.init.calculate_gain(nonlinearity, a) / fan**0.5
    return _uniform(tensor, -bound, bound, generator)


HANDLERS: dict[Op, Handler] = {
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
    Tensor.bernoulli_: _handler(_bernoulli_in_place),
    F.rrelu: _handler(_rrelu),
    torch.rrelu_: _handler(_rrelu_in_place),
    nn.init.uniform_: _handler(_uniform),
    nn.init.normal_: _handler(_normal),
    nn.init.constant_: _handler(_constant),
    nn.init.kaiming_uniform_: _handler(_kaiming_uniform),
}
for _op, _answer in HANDLERS.items():
    handler(_op)(_answer)
