"""Fused optimizers beside dense gradients and `torch.optim`."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from shardwise.embedding.optimizers import SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad, RowWiseAdam
from shardwise.errors import ConfigError
from tests.embedding.kernel_cases import Lookup, Stack, lookups
from tests.strategies import laws


def plain_change(optimizer: RowOptimizer, states: dict[str, Tensor], grad: Tensor, step: int) -> Tensor:
    """What textbook formulas add to a row, in double precision."""
    match optimizer:
        case SGD():
            return -optimizer.lr * grad
        case Adagrad():
            states["s"] = states.get("s", torch.zeros_like(grad)) + grad**2
            return -optimizer.lr * grad / (states["s"].sqrt() + optimizer.eps)
        case RowWiseAdagrad():
            states["s"] = states.get("s", torch.zeros(1).double()) + (grad**2).mean()
            return -optimizer.lr * grad / (states["s"].sqrt() + optimizer.eps)
        case Adam():
            beta1, beta2 = optimizer.betas
            square = (grad**2).mean() if isinstance(optimizer, RowWiseAdam) else grad**2
            states["m"] = beta1 * states.get("m", torch.zeros_like(grad)) + (1 - beta1) * grad
            states["v"] = beta2 * states.get("v", torch.zeros(1).double()) + (1 - beta2) * square
            return (
                -optimizer.lr
                * (states["m"] / (1 - beta1**step))
                / ((states["v"] / (1 - beta2**step)).sqrt() + optimizer.eps)
            )
    raise AssertionError(optimizer)


OPTIMIZERS = [
    SGD(0.5),
    SGD(0.5, weight_decay=0.25, max_gradient=2.0),
    Adagrad(0.5),
    RowWiseAdagrad(0.5),
    RowWiseAdagrad(0.5, weight_decay=0.25, max_gradient=2.0),
    Adam(0.5),
    Adam(0.5, betas=(0.5, 0.75), weight_decay=0.25),
    RowWiseAdam(0.5),
]


@laws
@given(st.lists(lookups(), min_size=1, max_size=4), st.sampled_from(OPTIMIZERS))
def test_steps_are_those_of_the_formulas(batches: list[Lookup], optimizer: RowOptimizer) -> None:
    columns = min(batch.gradient.shape[1] for batch in batches)
    weight = torch.arange(7.0 * columns).view(7, -1).sin()
    stack, plain = Stack(weight.clone(), optimizer.new_states(weight)), weight.double()
    states: list[dict[str, Tensor]] = [{} for _ in range(7)]
    for step, batch in enumerate(batches, 1):
        gradient = batch.gradient[:, :columns].contiguous()
        optimizer(stack, batch.rows, batch.offsets, gradient, batch.scale, step)
        dense = batch.dense(7)[:, :columns]
        for row in set(batch.rows.tolist()):
            grad = dense[row] + optimizer.weight_decay * plain[row]
            most = torch.inf if optimizer.max_gradient is None else optimizer.max_gradient
            grad = grad.clamp(-most, most)
            plain[row] += plain_change(optimizer, states[row], grad, step)
    assert_close(stack.weight.double(), plain, rtol=1e-5, atol=1e-5)
    untouched = [row for row in range(7) if not any(row in batch.rows for batch in batches)]
    assert torch.equal(stack.weight[untouched], weight[untouched])


OF_TORCH = [
    (SGD(0.5), torch.optim.SGD),
    (Adagrad(0.5), torch.optim.Adagrad),
    (Adam(0.5), torch.optim.Adam),
]


@laws
@given(lookups(), st.sampled_from(OF_TORCH))
def test_the_first_step_is_that_of_torch(batch: Lookup, pair: tuple[RowOptimizer, type[torch.optim.Optimizer]]) -> None:
    optimizer, kind = pair
    weight = torch.arange(7.0 * batch.gradient.shape[1]).view(7, -1).sin()
    stack, plain = Stack(weight.clone(), optimizer.new_states(weight)), weight.double().requires_grad_()
    optimizer(stack, batch.rows, batch.offsets, batch.gradient, batch.scale, 1)
    plain.grad = batch.dense(7)
    kind([plain], lr=0.5).step()  # type: ignore[call-arg]
    assert_close(stack.weight.double(), plain.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_updated_in_float32(dtype: torch.dtype) -> None:
    weight = torch.linspace(-1, 1, 12).view(4, 3).to(dtype)
    stack = Stack(weight.clone())
    rows, offsets, gradient = torch.tensor([1, 3, 1]), torch.tensor([0, 2, 3]), torch.ones(2, 3) / 3
    SGD(0.1)(stack, rows, offsets, gradient, None, 1)
    dense = torch.tensor([0.0, 2.0, 0.0, 1.0])[:, None] / 3
    assert torch.equal(stack.weight, (weight.float() - 0.1 * dense).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sign", [-1, 1])
def test_stochastic_rounding_keeps_the_mean(dtype: torch.dtype, sign: int) -> None:
    rows, columns, steps = 64, 32, 64
    weight = torch.full((rows, columns), sign * 1.0).to(dtype)
    ulp = torch.finfo(dtype).eps
    optimizer = SGD(0.3 * ulp, stochastic_rounding=True)  # to the nearest, nothing would ever change
    stack, replica = Stack(weight.clone()), Stack(weight.clone())
    ids = torch.arange(rows)
    for step in range(1, steps + 1):
        for one in stack, replica:
            order = ids if one is stack else ids.flip(0)
            optimizer(one, order, torch.arange(rows + 1), -sign * torch.ones(rows, columns), None, step)
    assert torch.equal(stack.weight, replica.weight)
    moved = (stack.weight.double() - weight.double()) * sign / ulp
    expected, spread = 0.3 * steps, (0.3 * 0.7 * steps / (rows * columns)) ** 0.5
    assert abs(moved.mean() - expected) < 5 * spread
    assert moved.std() == pytest.approx((0.3 * 0.7 * steps) ** 0.5, rel=0.1)  # steps are independent
    assert moved.mean(0).std() < 3 * (0.3 * 0.7 * steps / rows) ** 0.5  # and columns
    plain = Stack(weight.clone())
    SGD(0.3 * ulp)(plain, ids, torch.arange(rows + 1), -sign * torch.ones(rows, columns), None, 1)
    assert torch.equal(plain.weight, weight)


WRONG: dict[str, tuple[str, object]] = {
    "lr": ("lr", -1.0),
    "eps": ("eps", float("nan")),
    "weight_decay": ("weight_decay", -0.1),
    "max_gradient": ("max_gradient", -1.0),
    "betas": ("betas", (0.9, -0.5)),
}


@pytest.mark.parametrize("name", WRONG)
def test_negative_numbers_are_refused(name: str) -> None:
    argument, value = WRONG[name]
    with pytest.raises(ConfigError, match=f"Adam: {name} is .*, expected 0 or more"):
        replace(Adam(0.1), **{argument: value})  # type: ignore[arg-type]
