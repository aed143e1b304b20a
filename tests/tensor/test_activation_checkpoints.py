"""Activation checkpointing and saved-tensor hooks, nested in any way: gradients equal those of one process."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardwise import DTensor, Mesh, Placement, Replicate, Shard, distribute_tensor
from shardwise.testing import world

aten = torch.ops.aten
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
    "a constant": lambda x: x.detach() * x,
    "a sum of constants": lambda x: x * x.detach().sum(0),
    "a transposed constant": lambda x: x.detach().mT @ x,
    "into a constant": lambda x: x.detach().clone().mul_(x),
    "a masked constant": lambda x: torch.where(x.detach() > 0.5, x, x.detach()),
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


def _flat() -> saved_tensors_hooks:
    """Hooks that store tensors in one dim, as offloading in one buffer does."""
    return saved_tensors_hooks(lambda x: (x.reshape(-1), x.shape), lambda stored: stored[0].view(stored[1]))


def _selective() -> Any:
    return create_selective_checkpoint_contexts([aten.exp.default, aten.mm.default, aten.sum.dim_IntList])


RUNS: dict[str, Callable[[Block], Block]] = {
    "once": _again,
    "twice": lambda block: _again(lambda x: _again(block)(x.exp()).sin()),
    "three times": lambda block: _again(lambda x: _again(lambda y: _again(block)(y.cos()) * 2)(x.exp()).sin()),
    "two inside one": lambda block: _again(lambda x: _again(block)(x.exp()).sum() * _again(block)(x.sin())),
    "in other hooks": lambda block: _under(save_on_cpu, lambda x: _again(block)(x.exp())),
    "around other hooks": lambda block: _again(_under(_halved, lambda x: block(x.exp()).sin())),
    "hooks in hooks": lambda block: _under(_halved, _under(save_on_cpu, lambda x: block(x.exp()).sin())),
    "in hooks that reshape": lambda block: _under(_flat, lambda x: _again(block)(x.exp()).sin()),
    "selective": lambda block: (
        lambda x: checkpoint(lambda y: _again(block)(y.exp()).sin(), x, use_reentrant=False, context_fn=_selective)
    ),
    "selective inside": lambda block: _again(
        lambda x: checkpoint(lambda y: block(y.exp()).sin(), x.cos(), use_reentrant=False, context_fn=_selective)
    ),
    "reentrant": lambda block: lambda x: checkpoint(lambda y: block(y.exp()).sin(), x, use_reentrant=True),
    "reentrant inside": lambda block: _again(lambda x: checkpoint(block, x.exp(), use_reentrant=True).sin()),
}
LAYOUTS: dict[str, tuple[Mesh, list[Placement]]] = {
    "uneven rows": (Mesh((2,)), [Shard(0)]),
    "an empty shard": (Mesh((3,)), [Shard(0, [4, 0, 3])]),
    "columns": (Mesh((2,)), [Shard(1)]),
    "a grid": (Mesh((2, 2)), [Shard(0), Shard(1)]),
    "replicated": (Mesh((2,)), [Replicate()]),
}


# Each block in every third run, and each run with every third block, in each layout; the others are slow.
CASES = [
    pytest.param(block, run, layout, marks=() if (b + r) % 3 == 0 and (b // 3 + r) % 5 == at else pytest.mark.slow)
    for (b, block), (r, run), (at, layout) in product(enumerate(BLOCKS), enumerate(RUNS), enumerate(LAYOUTS))
]


@pytest.mark.parametrize(("block", "run", "layout"), CASES)
def test_gradients_through_checkpoints_and_hooks_equal_one_process(block: str, run: str, layout: str) -> None:
    plain = VALUES.clone().requires_grad_()
    RUNS[run](BLOCKS[block])(plain).sum().backward()
    mesh, placements = LAYOUTS[layout]

    def body() -> Tensor:
        x: Any = distribute_tensor(VALUES, mesh, placements).requires_grad_()
        RUNS[run](BLOCKS[block])(x).sum().backward()
        return x.grad.full_tensor()  # type: ignore[no-any-return]

    for gradient in world(mesh.size()).run(body):
        assert_close(gradient, plain.grad)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # inside a reentrant one
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nested_checkpoints_draw_the_same_random_numbers_again(layout: str, depth: int, reentrant: bool) -> None:
    """y = x² · masks, so that the gradient is 2 y / x with the masks of forward; they are those of one rank."""

    def dropped(x: Tensor, depth: int) -> Tensor:
        if depth == 0:
            return F.dropout(x, 0.1) * F.dropout(x, 0.05)
        inner = checkpoint(lambda y: dropped(y, depth - 1), F.dropout(x, 0.1), use_reentrant=reentrant)
        return F.dropout(inner, 0.1)

    def body(mesh: Mesh, placements: list[Placement]) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(5)
        x: Any = distribute_tensor(VALUES + 2, mesh, placements).requires_grad_()
        y: Any = dropped(x, depth)
        y.sum().backward()
        return (2 * y / x).full_tensor().detach(), x.grad.full_tensor(), torch.get_rng_state().double()

    (alone,) = world(1).run(body, Mesh((1,)), [Replicate()])
    for expected, gradient, state in world(LAYOUTS[layout][0].size()).run(body, *LAYOUTS[layout]):
        assert 0 < expected.count_nonzero() < expected.numel()
        assert_close(gradient, expected)
        assert_close((expected, gradient, state), alone)


class _Experts(Function):
    """Saves inputs, an intermediate tensor, an output and indices; says which outputs have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        hidden = x.exp()
        out = hidden @ w
        top, experts = out.max(1)
        ctx.save_for_backward(x, hidden, out, w, experts)
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        ctx.scale = scale
        return out, top, experts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out: Tensor | None, of_top: Tensor | None, of_experts: None) -> tuple[Any, Any, None]:
        x, hidden, out, w, experts = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, w.requires_grad, False)
        assert x.shape == hidden.shape
        assert out.shape == (x.shape[0], w.shape[1])
        grad = torch.zeros_like(out) if of_out is None else of_out
        if of_top is not None:
            grad = grad + torch.zeros_like(out).scatter(1, experts[:, None], of_top[:, None])
        needs_w = ctx.needs_input_grad[1]
        return (grad @ w.T) * hidden * (x.shape[0] / 7), hidden.T @ grad if needs_w else None, None


def _all_outputs(x: Tensor, w: Tensor) -> Tensor:
    out, top, experts = _Experts.apply(x.sin(), w, 1.0)  # type: ignore[no-untyped-call]
    assert not experts.requires_grad
    return out * (experts[:, None] + 1) + top[:, None]  # type: ignore[no-any-return]


def _one_output(x: Tensor, w: Tensor) -> Tensor:
    return _Experts.apply(x.sin(), w.detach(), 1.0)[1] * w.sum()  # type: ignore[no-untyped-call, no-any-return]


FUNCTIONS = {"all outputs": _all_outputs, "one output": _one_output}


@pytest.mark.parametrize("run", ["once", "twice", "in hooks that reshape", "in other hooks", "reentrant"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_custom_functions_get_what_they_saved_through_checkpoints_and_hooks(name: str, run: str) -> None:
    weight = torch.cos(torch.arange(6.0, dtype=torch.float64)).reshape(3, 2)

    def gradients(x: Any, w: Any) -> list[Tensor]:
        RUNS[run](lambda y: FUNCTIONS[name](y, w))(x).sum().backward()
        return [as_full(x.grad), as_full(w.grad)]

    expected = gradients(VALUES.clone().requires_grad_(), weight.clone().requires_grad_())
    for mesh, placements in LAYOUTS.values():

        def body(mesh: Mesh = mesh, placements: list[Placement] = placements) -> list[Tensor]:
            x = distribute_tensor(VALUES, mesh, placements).requires_grad_()
            return gradients(x, distribute_tensor(weight, mesh).requires_grad_())

        for found in world(mesh.size()).run(body):
            assert_close(found, expected)


def as_full(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_derivatives_through_nested_checkpoints_equal_one_process(layout: str) -> None:
    mesh, placements = LAYOUTS[layout]

    def second(x: Any) -> Tensor:
        out = _again(lambda y: _again(lambda z: (z * z[0]).sin() * z.shape[0])(y.exp()).cumsum(0))(x)
        (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return as_full(x.grad)

    def body() -> Tensor:
        return second(distribute_tensor(VALUES, mesh, placements).requires_grad_())

    expected = second(VALUES.clone().requires_grad_())
    for found in world(mesh.size()).run(body):
        assert_close(found, expected)


LINE, PAIR, OTHER_PAIR = Mesh((4,)), Mesh((2,), (0, 1)), Mesh((2,), (3, 2))
Move = Callable[[Any, Mesh], Any]
ACROSS_MESHES: dict[str, Callable[[Any, Move], Any]] = {
    "to all ranks": lambda x, to: to(x.sin(), LINE).exp(),
    "from all ranks": lambda x, to: to(to(x, LINE), PAIR).exp() * 2,
    "to other ranks": lambda x, to: to(to(x.exp(), LINE), OTHER_PAIR).sin() * 2,
    "to others and back": lambda x, to: to(to(x.exp(), OTHER_PAIR).sin(), PAIR) * x,
}


@pytest.mark.parametrize("name", ACROSS_MESHES)
@pytest.mark.parametrize("run", ["once", "twice", "in hooks that reshape"])
def test_ranks_outside_a_mesh_recompute_with_the_others(name: str, run: str) -> None:
    def gradient(x: Any, to: Move) -> Any:
        RUNS[run](lambda y: ACROSS_MESHES[name](y, to))(x).sum().backward()
        return x.grad

    def body() -> Tensor:
        x: Any = distribute_tensor(VALUES, LINE, [Replicate()])
        x = x.redistribute(PAIR, [Shard(0)]).detach().requires_grad_()
        found = gradient(x, lambda y, mesh: y.redistribute(mesh, [Shard(0)]))
        return found.redistribute(LINE, [Replicate()]).to_local()  # type: ignore[no-any-return]

    expected = gradient(VALUES.clone().requires_grad_(), lambda y, mesh: y)
    for found in world(4).run(body):
        assert_close(found, expected)
