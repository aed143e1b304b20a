"""Gradients follow one duality: each case equals one process, and says what was communicated."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import shardwise as sw
from shardwise import Mesh, OnRanks, Partial, Placement, Replicate, Shard, count_comms, distribute_tensor
from shardwise import _collectives as collectives
from shardwise.errors import LayoutError, RuleError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PLACES: list[Placement] = [R, S0, S1, Shard(0, [4, 0, 1]), OnRanks(2)]
HOOKED: Callable[..., Any] = Tensor.register_hook
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


X, W, V = normal(5, 3), normal(4, 3), normal(3)
LINE = Mesh((3,))


def leaf(full: Tensor, placement: Placement = S0, mesh: Any = LINE) -> sw.DTensor:
    return as_dtensor(distribute_tensor(full, mesh, [placement]).requires_grad_())


def grad_of(x: Tensor) -> Tensor:
    return as_dtensor(x.grad).full_tensor()


def plain_grads(loss: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    return list(torch.autograd.grad(loss(*leaves), leaves))


def squares(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).square().sum()


# ---- values --------------------------------------------------------------------------------------------------------


@world(3)
def test_the_gradients_of_a_loss_equal_one_process_and_lie_as_their_tensors() -> None:
    for x_at, w_at in product(PLACES, PLACES):
        x, w = leaf(X, x_at), leaf(W, S0 if isinstance(w_at, Shard) and w_at.sizes else w_at)
        squares(x, w).backward()
        for tensor, expected in zip((x, w), plain_grads(squares, X, W), strict=True):
            assert_close(grad_of(tensor), expected)
            grad = as_dtensor(tensor.grad)
            assert grad.layout_ == tensor.layout_
            assert grad.to_local().shape == tensor.to_local().shape


OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "summands": lambda x: x.sum(0),
    "copies": lambda x: as_dtensor(x.sum(0)).redistribute(placements=[R]),
    "cut": lambda x: x * x,
    "a maximum": lambda x: x.amax(0),
    "a mean": lambda x: x.mean(0),
    "a product": lambda x: x.reshape(-1).prod(),
}


@pytest.mark.parametrize("name", OUTPUTS)
@world(3)
def test_backward_starts_at_an_output_of_any_placement(name: str) -> None:
    plain = X.clone().requires_grad_()
    expected = plain.sum(0) if name == "copies" else OUTPUTS[name](plain)
    seed = torch.arange(1, expected.numel() + 1, dtype=torch.float64).view(expected.shape)
    expected.backward(seed)
    assert plain.grad is not None
    for gradient in (seed, distribute_tensor(seed, LINE, [R]), distribute_tensor(seed, LINE, [OnRanks(1)])):
        x = leaf(X)
        OUTPUTS[name](x).backward(gradient)
        assert_close(grad_of(x), plain.grad)


@world(3)
def test_autograd_grad_and_backward_take_lists_with_plain_tensors_among_them() -> None:
    x, w, plain = leaf(X), leaf(W, R), V.clone().requires_grad_()
    out, other = F.linear(x, w), x * plain
    grads = torch.autograd.grad([out.sum(), other], [x, w, plain], [None, torch.ones_like(X)], retain_graph=True)
    leaves = [t.clone().requires_grad_() for t in (X, W, V)]
    expected = torch.autograd.grad(F.linear(leaves[0], leaves[1]).sum() + (leaves[0] * leaves[2]).sum(), leaves)
    for found, tensor, wanted in zip(grads[:2], (x, w), expected, strict=False):
        assert_close(as_dtensor(found).full_tensor(), wanted)
        assert as_dtensor(found).layout_ == tensor.layout_
    assert_close(grads[2], expected[2])
    torch.autograd.backward([out.sum(), other], [None, torch.ones_like(X)], retain_graph=True)
    torch.autograd.backward(out.sum(), None, True)
    torch.autograd.backward(out.sum(), retain_graph=True, inputs={"w": w})
    assert_close(grad_of(w), 3 * expected[1])
    unused = leaf(V, R)
    assert unused.grad is None
    assert torch.autograd.grad(x.sum(), [x, unused], allow_unused=True)[1] is None
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(x.sum(), [unused])
    with pytest.raises(RuntimeError, match="scalar outputs"):
        (x * 2).backward()
    with pytest.raises(RuntimeError, match=r"real scalar outputs, got torch\.complex128"):
        (x * 2j).sum().backward()
    with pytest.raises(RuleError, match="is_grads_batched"):
        torch.autograd.grad(x.sum(), [x], is_grads_batched=True)


@world(2)
def test_a_plain_tensor_in_an_op_without_a_rule_receives_its_whole_gradient() -> None:
    x = distribute_tensor(torch.arange(4.0), Mesh((2,)), [S0])
    for op in (torch.stack, torch.cat):
        plain = torch.ones(4, requires_grad=True)
        op([x, plain]).mul(2).sum().backward()
        assert plain.grad is not None
        assert plain.grad.tolist() == [2.0] * 4
    (gradient,) = torch.autograd.grad(F.layer_norm(x, (4,), plain).square().sum(), [plain])
    (expected,) = torch.autograd.grad(F.layer_norm(torch.arange(4.0), (4,), plain).square().sum(), [plain])
    assert_close(gradient, expected)


@world(3)
def test_ranks_without_rows_take_part_in_backward_and_meet_an_infinite_slope_with_a_share_of_its_seed() -> None:
    """Two ranks hold nothing of x; their graphs must have the same collectives."""
    one = X[:1]
    for op in (torch.amax, torch.mean, torch.sum, torch.linalg.vector_norm):
        x = leaf(one, S0)
        op(x * 2).backward()
        (expected,) = plain_grads(lambda t, op=op: op(t * 2), one)
        assert_close(grad_of(x), expected)
    x = leaf(torch.tensor([0.0, 4.0]), R)  # not 1 on one rank and zeros on others: 0 * inf is nan
    x.sqrt().sum().backward()
    assert grad_of(x).tolist() == [float("inf"), 0.25]


# ---- what accumulates, and what is sent ----------------------------------------------------------------------------


@world(3)
def test_gradients_accumulate_whether_read_in_between_or_not() -> None:
    for placement, read_between in product((R, S0), (False, True)):
        w = leaf(W, placement)
        for step in range(1, 4):
            (squares(distribute_tensor(X, LINE, [S0]), w) * step).backward()
            assert not read_between or w.grad is not None
        assert_close(grad_of(w), 6 * plain_grads(squares, X, W)[1])


@world(3)
def test_zero_grad_starts_again() -> None:
    x = distribute_tensor(X, LINE, [S0])
    for placement, to_none in product((R, S0), (True, False)):
        module = sw.shard_module(nn.Linear(3, 4).double(), {"**": placement})
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=to_none)
            module(x).sum().backward()
        assert_close(grad_of(module.bias), torch.full((4,), 5.0, dtype=torch.float64))
        module.zero_grad(set_to_none=to_none)
        assert module.bias.grad is None if to_none else not grad_of(module.bias).any()


@world(3)
def test_a_gradient_may_be_set_and_changed() -> None:
    w = leaf(W, R)
    w.grad = torch.ones_like(W)
    squares(distribute_tensor(X, LINE, [S0]), w).backward()
    assert_close(grad_of(w), 1 + plain_grads(squares, X, W)[1])
    as_dtensor(w.grad).mul_(0)
    squares(distribute_tensor(X, LINE, [S0]), w).backward()
    assert_close(grad_of(w), plain_grads(squares, X, W)[1])
    w.grad = distribute_tensor(W, LINE, [S0])
    assert torch.equal(grad_of(w), W)
    del w.grad
    assert w.grad is None
    with pytest.raises(LayoutError, match=r"\(4, 3\), got \(3,\)"):
        w.grad = torch.ones(3)


@world(4)
def test_a_leaf_in_summands_has_a_whole_gradient() -> None:
    """Also if it was reduced over an axis of copies before: it was then read as summands once more."""
    for mesh, placements, terms in ((Mesh((4,)), [P], 4), (Mesh((2, 2)), [R, P], 2)):
        x = as_dtensor(sw.DTensor.from_local(V / terms, mesh, placements).requires_grad_())
        x.square().sum().backward()
        assert as_dtensor(x.grad).placements == (R,) * mesh.ndim
        assert_close(grad_of(x), 2 * V)


# ---- hooks, graphs, modes ------------------------------------------------------------------------------------------


@world(3)
def test_hooks_see_the_gradient_and_may_return_any_placement_or_a_plain_one() -> None:
    expected = plain_grads(squares, X, W)[1]
    for placement in (R, S0):
        seen: list[Tensor] = []

        def hook(grad: Tensor, placement: Placement = placement, seen: list[Tensor] = seen) -> Tensor:
            seen.append(as_dtensor(grad).full_tensor())
            return as_dtensor(grad * 2).redistribute(placements=[placement])

        w = leaf(W, R)
        HOOKED(w, hook)
        squares(distribute_tensor(X, LINE, [S0]), w).backward()
        assert_close(seen[0], expected)
        assert_close(grad_of(w), 2 * expected)
    x = leaf(X)
    handle = HOOKED(x, lambda grad: torch.full_like(X, 7.0))
    x.sum().backward()
    assert grad_of(x).unique().tolist() == [7.0]
    handle.remove()
    x.grad = None
    x.sum().backward()
    assert grad_of(x).unique().tolist() == [1.0]


@world(3)
def test_a_hook_of_a_partial_maximum_keeps_the_layout_of_its_gradient() -> None:
    for reduce_op in ("max", "min"):
        x = leaf(torch.zeros(2, 3), R)
        for hook in (lambda g: g * 2, lambda g: g.clamp(-0.5, 0.5)):
            chosen = as_dtensor(x * 1).redistribute(placements=[Partial(reduce_op)])
            HOOKED(chosen, hook)
            loss = chosen.redistribute(placements=[R]).sum()
            if x.grad is None:
                loss.backward()
                assert_close(grad_of(x), torch.full((2, 3), 2.0))
                continue
            with pytest.raises(RuleError, match=r"A hook of a tensor .* returned another layout than it got"):
                loss.backward()


@world(3)
def test_gradients_are_retained_when_asked_and_cut_by_no_grad_and_detach() -> None:
    w, x = leaf(W, R), leaf(X)
    hidden = as_dtensor(F.linear(x, w))
    hidden.retain_grad()
    hidden.square().sum().backward()
    assert_close(grad_of(hidden), 2 * F.linear(X, W))
    with torch.no_grad():
        assert not any(y.requires_grad for y in (squares(x, w), w.full_tensor(), w.to_local()))
    assert not w.detach().requires_grad
    w.grad = None
    (squares(x, w) + squares(x, w.detach())).backward()
    assert_close(grad_of(w), plain_grads(squares, X, W)[1])


@world(2)
def test_an_overflow_in_one_shard_stops_the_step_on_every_rank() -> None:
    p = nn.Parameter(distribute_tensor(torch.ones(4), Mesh((2,)), [S0]))
    optimizer, scaler = torch.optim.SGD([p], lr=0.1), torch.amp.GradScaler("cpu")
    factor = distribute_tensor(torch.tensor([1.0, 1.0, 1.0, float("inf")]), Mesh((2,)), [S0])
    scaler.scale((p * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert as_dtensor(p.detach()).full_tensor().tolist() == [1.0] * 4
    assert scaler.get_scale() == 2.0**15


# ---- real processes ------------------------------------------------------------------------------------------------


@pytest.mark.processes
@world(4, real=True)
def test_gradients_on_a_real_grid_equal_one_process_and_take_one_collective() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for places in ([R, S0], [R, S1], [S0, S1], [R, R], [Shard(0, [1, 3]), S1]):
        w = as_dtensor(distribute_tensor(W, mesh, places).requires_grad_())
        x = as_dtensor(distribute_tensor(X, mesh, [S0, R]).requires_grad_())
        hidden = as_dtensor(F.linear(x, w)).redistribute(Mesh((4,), (1, 0, 3, 2)), [Shard(0, [0, 2, 3, 0])])
        hidden.square().mean().backward()
        expected = plain_grads(lambda a, b: F.linear(a, b).square().mean(), X, W)
        assert_close(grad_of(x), expected[0])
        assert_close(grad_of(w), expected[1])
    ws = [leaf(W, R, Mesh((4,))), leaf(W, R, Mesh((4,)))]
    rows = distribute_tensor(X, Mesh((4,)), [Shard(0, [5, 0, 0, 0])])
    with count_comms() as comms:
        (squares(rows, ws[0]) + squares(rows, ws[1])).backward()
        assert comms.total_calls == 0
        grads = [as_dtensor(w.grad) for w in ws]
    assert comms.total_calls == 1
    for grad in grads:
        assert_close(grad.to_local(), plain_grads(squares, X, W)[1])


@world(3)
def test_leaves_that_backward_reaches_in_another_order_on_one_rank_are_reduced_together() -> None:
    """The kernel of an empty shard may use its operands in another order."""
    first, second = (leaf(torch.ones(n, dtype=torch.float64), R) for n in (3, 5))
    order = [second, first] if collectives.rank() == 1 else [first, second]
    torch.cat([x.to_local(grad_placements=[P]) * x.shape[0] for x in order]).sum().backward()
    assert_close(grad_of(first), torch.full((3,), 9.0, dtype=torch.float64))
    assert_close(grad_of(second), torch.full((5,), 15.0, dtype=torch.float64))
    twin = copy.deepcopy(first)
    first.grad = None
    assert_close(grad_of(twin), torch.full((3,), 9.0, dtype=torch.float64))


class _OfFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return 2 * grads[0], None


@world(2)
def test_a_replicated_leaf_for_which_a_function_has_no_gradient_has_none() -> None:
    x, y = (leaf(torch.ones(3), R, Mesh((2,))) for _ in range(2))
    _OfFirst.apply(x, y).sum().backward()  # type: ignore[no-untyped-call]
    assert y.grad is None
    assert_close(grad_of(x), torch.full((3,), 2.0))


TWICE: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda x: x[torch.tensor([0, 3, 3, 6])] ** 2 * x[1],
    "flip": lambda x: x.exp().flip(0).sin().cos(),
    "unfold": lambda x: x.unfold(0, 2, 1).exp().sum(-1),
    "reshape": lambda x: x.reshape(3, 7) ** 3 * x.reshape(-1)[3:10],
    "cat": lambda x: torch.cat([x[:, 0].exp(), x[:, 0].sin()]) ** 2 * x[:, 0].sum(),
}


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_communicate_alike_on_ranks_without_elements(name: str) -> None:
    values = torch.sin(torch.arange(21.0, dtype=torch.float64)).reshape(7, 3)

    def second(x: Any) -> Any:
        (gradient,) = torch.autograd.grad(TWICE[name](x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return x.grad

    expected = second(values.clone().requires_grad_())
    layouts: list[tuple[Mesh, list[Placement]]] = [
        (LINE, [Shard(0, [4, 0, 3])]), (LINE, [OnRanks(1)]), (Mesh((2, 2)), [S0, S1])
    ]  # fmt: skip
    for mesh, placements in layouts:

        def body(mesh: Mesh = mesh, placements: list[Placement] = placements) -> Tensor:
            return as_dtensor(second(distribute_tensor(values, mesh, placements).requires_grad_())).full_tensor()

        for gradient in world(mesh.size()).run(body):
            assert_close(gradient, expected)


class DoubledWithPlainGradient(torch.autograd.Function):
    """y = 2 x; its backward multiplies with what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient: Tensor = grads[0] * x
        return gradient


APPLY = DoubledWithPlainGradient.apply  # bound before the first DTensor, as many modules do


def _of_function(x: Any) -> Any:
    if torch.__version__.startswith("2.13."):
        return APPLY(x)  # type: ignore[no-untyped-call]
    return DoubledWithPlainGradient.apply(x)  # type: ignore[no-untyped-call]  # since 2.14 a function of C++: not seen


def _scaled(module: nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
    return (of_inputs[0] * of_outputs[0].sum(),)


def _module_with_hooks(x: Any) -> Any:
    module = nn.Identity()
    module.register_full_backward_hook(_scaled)
    return module(x)


def _hooked(x: Any) -> Any:
    HOOKED(x, lambda gradient: gradient * gradient.sum())
    return x


def _times_its_gradient(x: Any) -> Any:
    (gradient,) = torch.autograd.grad((x * x.detach().sin()).sum(), x, create_graph=True)
    return x * gradient


WATCHED: dict[str, Callable[[Any], Any]] = {
    "a hook": _hooked,
    "a module hook": _module_with_hooks,
    "a custom Function": _of_function,
    "torch.autograd.grad": _times_its_gradient,
}


@pytest.mark.parametrize("name", WATCHED)
@pytest.mark.parametrize("op", ["prod", "amax", "amin", "sum", "mean"])
def test_the_gradient_of_a_reduction_is_that_of_its_result(name: str, op: str) -> None:
    values = torch.arange(1, 13, dtype=torch.float64).reshape(4, 3).cos()

    def gradient(x: Any) -> Any:
        result = WATCHED[name](getattr(x, op)(0))
        (result * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        return x.grad

    expected = gradient(values.clone().requires_grad_())

    @world(3)
    def body() -> None:
        for placement in (S0, Shard(0, [3, 0, 1]), OnRanks(1), R):
            assert_close(as_dtensor(gradient(leaf(values, placement))).full_tensor(), expected)

    body()
