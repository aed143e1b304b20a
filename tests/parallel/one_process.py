"""Compares a module on many ranks with the same module in one process: values and gradients."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DTensor
from shardwise import _collectives as collectives
from shardwise._layout import chunk
from shardwise.testing import world


class Tied(nn.Module):
    """A table, a layer, and a projection back to the rows of the table that is one parameter with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.middle = nn.Embedding(7, 6), nn.Linear(6, 6, bias=False)
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.middle(self.table(ids))))
        return result


def full(x: object) -> Tensor:
    """The full tensor of a DTensor; a plain tensor unchanged. There has to be one, such as a gradient."""
    assert isinstance(x, Tensor)
    return x.full_tensor() if isinstance(x, DTensor) else x


def raised(kind: type[Exception], act: Callable[[], object], size: int = 2) -> str:
    """The text that `act` raises on every rank."""

    def body() -> str:
        with pytest.raises(kind) as caught:
            act()
        return str(caught.value)

    (text,) = set(world(size).run(body))
    return text


def leaf_copy(x: Tensor) -> Tensor:
    """A new leaf with the values of `x`."""
    leaf = x.detach().clone()
    return leaf.requires_grad_() if x.is_floating_point() else leaf


def local_shard_of(x: Any, dim: int | None, ranks: int, sizes: tuple[int, ...] | None = None) -> Tensor:
    """The local shard of `x`, sharded as by `torch.chunk` or by `sizes`; `x` if `dim` is None."""
    shard: Tensor = x if dim is None else x.split(list(sizes or chunk(x.shape[dim], ranks)), dim)[collectives.rank()]
    return shard


def assert_same_parameters(module: nn.Module, plain: nn.Module) -> None:
    """Both have the same values and gradients."""
    for (name, p), (_, want) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        message = f"{name}: {{}}".format
        assert_close(full(p), want, msg=message)
        assert (p.grad is None) == (want.grad is None), name
        if want.grad is not None:
            assert_close(full(p.grad), want.grad, msg=message)


def compare(
    module: Any,
    plain: nn.Module,
    mine: Tensor,
    x: Tensor,
    part: Callable[[Tensor], Tensor] = lambda want: want,
    part_of_input: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """Forward and backward of `module` for `mine` equal those of `plain` for `x`; the output.

    Args:
        part: what this rank has of the output of `plain`.
        part_of_input: what it has of the gradient of `x`; None compares no gradients of inputs.
        options: for both modules.
    """
    ours, theirs = mine.detach().clone().requires_grad_(mine.is_floating_point()), leaf_copy(x)
    out, want = module(ours, **options), plain(theirs, **options)
    assert_close(full(out), part(want))
    factors = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).view(want.shape)
    torch.autograd.backward((out * part(factors)).square().sum())
    (want * factors).square().sum().backward()
    if part_of_input is not None:
        assert_close(full(ours.grad), part_of_input(full(theirs.grad)))
    assert_same_parameters(module, plain)
    result: Tensor = out
    return result


def check_equals_one_process(
    plain: nn.Module, parallelize: Callable[[nn.Module], Any], x: Tensor, loss: Callable[[Tensor], Tensor]
) -> nn.Module:
    """Forward and backward of a parallel copy of `plain` equal those of `plain`, for an input that all ranks have."""
    expected = copy.deepcopy(plain)
    module = copy.deepcopy(plain)
    parallelize(module)
    ours, theirs = leaf_copy(x), leaf_copy(x)
    out, want = module(ours), expected(theirs)
    assert_close(full(out), want)
    torch.autograd.backward(loss(out))
    loss(want).backward()
    if x.is_floating_point():
        assert_close(ours.grad, theirs.grad)
    assert_same_parameters(module, expected)
    return module
