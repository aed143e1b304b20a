"""A module on many ranks beside the same module in one process: values and gradients."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DTensor, collectives
from shardwise.layout import chunk


def whole(x: Tensor) -> Tensor:
    """All of a DTensor; a plain tensor as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def own_part(x: Tensor) -> Tensor:
    """A leaf with the values of `x`, apart from it."""
    made = x.detach().clone()
    return made.requires_grad_() if x.is_floating_point() else made


def part_of(x: Tensor, dim: int | None, ranks: int, sizes: tuple[int, ...] | None = None) -> Tensor:
    """What this rank has of `x`, cut as torch.chunk does or by `sizes`; all of it where no dim is cut."""
    if dim is None:
        return x
    pieces: tuple[Tensor, ...] = x.split(list(sizes or chunk(x.shape[dim], ranks)), dim)
    return pieces[collectives.rank()]


def same_parameters(module: nn.Module, plain: nn.Module) -> None:
    """Both have the same values and gradients, wherever they lie."""
    for (name, p), (_, want) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        told = f"{name}: {{}}".format
        assert_close(whole(p), want, msg=told)
        assert (p.grad is None) == (want.grad is None), name
        if want.grad is not None:
            assert p.grad is not None
            assert_close(whole(p.grad), want.grad, msg=told)


def check_like_alone(
    plain: nn.Module, parallelize: Callable[[nn.Module], Any], x: Tensor, loss: Callable[[Tensor], Tensor]
) -> nn.Module:
    """Forward and backward of a parallel copy of `plain` equal those of `plain`, for an input that all ranks have."""
    expected = copy.deepcopy(plain)
    module = copy.deepcopy(plain)
    parallelize(module)
    mine, theirs = own_part(x), own_part(x)
    out, want = module(mine), expected(theirs)
    assert_close(whole(out), want)
    torch.autograd.backward(loss(out))
    loss(want).backward()
    if x.is_floating_point():
        assert mine.grad is not None
        assert_close(mine.grad, theirs.grad)
    same_parameters(module, expected)
    return module
