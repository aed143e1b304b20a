"""Activation checkpointing and saved-tensor hooks, nested in any way: gradients equal those of one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from shardwise import Mesh, Placement, Replicate, Shard, distribute_tensor
from shardwise.testing import world

VALUES = torch.sin(torch.arange(21.0, dtype=torch.float64) * 3).reshape(7, 3)
Block = Callable[[Tensor], Tensor]


def _router(x: Tensor) -> Tensor:
    values, experts = x.topk(2, 1)
    return torch.zeros_like(x).scatter(1, experts, values.softmax(-1))


def _indices(op: Callable[[Tensor], Any]) -> Block:
    return lambda x: op(x)[0] * (op(x)[1] + 1)


BLOCKS: dict[str, Block] = {
    "shape": lambda x: (x * x.shape[0]).sin(),
    "arange": lambda x: x * torch.arange(x.shape[0], dtype=x.dtype)[:, None],
    "row": lambda x: x[0] * x,
    "flip": lambda x: x.flip(0).exp(),
    "roll": lambda x: x.roll(1, 0) * x,
    "reshape": lambda x: x.reshape(3, 7).exp(),
    "sum": lambda x: x.sum(0) * x,
    "matmul": lambda x: x @ x.T,
    "concatenation": lambda x: torch.cat([x, x.exp()]).sin(),
    "in place": lambda x: (x * 2).add_(x.sin()).exp(),
    "split": lambda x: x.split(2)[0].exp() * x.split(2)[1],
    "product": lambda x: x.prod(0),
    "cumprod": lambda x: x.cumprod(0),
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "cross_entropy": lambda x: F.cross_entropy(x, x.argmax(1)),
    "embedding": lambda x: F.embedding(x.argmax(1), x),
    "max": _indices(lambda x: x.max(0)),
    "min": _indices(lambda x: x.min(1)),
    "sort": _indices(lambda x: x.sort(1)),
    "sort the sharded dim": _indices(lambda x: x.sort(0)),
    "topk": _indices(lambda x: x.topk(2, 1)),
    "kthvalue": _indices(lambda x: x.kthvalue(2, 1)),
    "median": _indices(lambda x: x.median(1)),
    "mode": _indices(lambda x: x.mode(1)),
    "cummax": _indices(lambda x: x.cummax(1)),
    "cummin the sharded dim": _indices(lambda x: x.cummin(0)),
    "max_pool": lambda x: F.max_pool1d(x[None], 3),
    "router": _router,
}  # fmt: skip


def _again(block: Block) -> Block:
    return lambda x: checkpoint(block, x, use_reentrant=False)


def _under(hooks: Callable[[], Any], block: Block) -> Block:
    def run(x: Tensor) -> Tensor:
        with hooks():
            return block(x)

    return run


def _halved() -> saved_tensors_hooks:
    """Hooks that store something else than the tensor, as compression does."""
    return saved_tensors_hooks(
        lambda x: x / 2 if x.is_floating_point() else x, lambda x: x * 2 if x.is_floating_point() else x
    )


RUNS: dict[str, Callable[[Block], Block]] = {
    "once": _again,
    "twice": lambda block: _again(lambda x: _again(block)(x.exp()).sin()),
    "three times": lambda block: _again(lambda x: _again(lambda y: _again(block)(y.cos()) * 2)(x.exp()).sin()),
    "two inside one": lambda block: _again(lambda x: _again(block)(x.exp()).sum() * _again(block)(x.sin())),
    "in other hooks": lambda block: _under(save_on_cpu, lambda x: _again(block)(x.exp())),
    "around other hooks": lambda block: _again(_under(_halved, lambda x: block(x.exp()).sin())),
    "hooks in hooks": lambda block: _under(_halved, _under(save_on_cpu, lambda x: block(x.exp()).sin())),
    "reentrant inside": lambda block: _again(lambda x: checkpoint(block, x.exp(), use_reentrant=True).sin()),
}
LAYOUTS: dict[str, tuple[Mesh, list[Placement]]] = {
    "uneven rows": (Mesh((2,)), [Shard(0)]),
    "an empty shard": (Mesh((3,)), [Shard(0, [4, 0, 3])]),
    "columns": (Mesh((2,)), [Shard(1)]),
    "a grid": (Mesh((2, 2)), [Shard(0), Shard(1)]),
    "replicated": (Mesh((2,)), [Replicate()]),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_through_checkpoints_and_hooks_equal_one_process(block: str, run: str) -> None:
    plain = VALUES.clone().requires_grad_()
    RUNS[run](BLOCKS[block])(plain).sum().backward()
    for mesh, placements in LAYOUTS.values():

        def body(mesh: Mesh = mesh, placements: list[Placement] = placements) -> Tensor:
            x: Any = distribute_tensor(VALUES, mesh, placements).requires_grad_()
            RUNS[run](BLOCKS[block])(x).sum().backward()
            return x.grad.full_tensor()  # type: ignore[no-any-return]

        for gradient in world(mesh.size()).run(body):
            assert_close(gradient, plain.grad)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nested_checkpoints_draw_the_same_random_numbers_again(layout: str, depth: int) -> None:
    """y = x² · masks, so that the gradient is 2 y / x with the masks of forward."""
    mesh, placements = LAYOUTS[layout]

    def dropped(x: Tensor, depth: int) -> Tensor:
        if depth == 0:
            return F.dropout(x, 0.1) * F.dropout(x, 0.05)
        inner = checkpoint(lambda y: dropped(y, depth - 1), F.dropout(x, 0.1), use_reentrant=False)
        return F.dropout(inner, 0.1)

    def body() -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        x: Any = distribute_tensor(VALUES + 2, mesh, placements).requires_grad_()
        y: Any = dropped(x, depth)
        y.sum().backward()
        return (2 * y / x).full_tensor().detach(), x.grad.full_tensor()

    for expected, gradient in world(mesh.size()).run(body):
        assert bool(expected.any())
        assert not bool(expected.all())
        assert_close(gradient, expected)
