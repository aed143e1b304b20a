"""Fused optimizers beside dense gradients and `torch.optim`."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from shardwise import Mesh, OnRanks, Placement, Replicate, Shard
from shardwise._layout import Box
from shardwise.embedding import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingConfig, shard_embeddings
from shardwise.embedding.optimizers import (
    SGD,
    Adagrad,
    Adam,
    Lamb,
    RowOptimizer,
    RowWiseAdagrad,
    RowWiseAdam,
    RowWiseLamb,
)
from shardwise.errors import ConfigError
from shardwise.testing import world
from tests.embedding.kernel_cases import Lookup, lookups, stack_of
from tests.embedding.one_process import OneTable
from tests.strategies import laws

OPTIMIZERS = [
    SGD(0.5),
    SGD(0.5, weight_decay=0.25, max_gradient=2.0),
    Adagrad(0.5),
    RowWiseAdagrad(0.5),
    RowWiseAdagrad(0.5, weight_decay=0.25, max_gradient=2.0),
    Adam(0.5),
    Adam(0.5, betas=(0.5, 0.75), weight_decay=0.25),
    RowWiseAdam(0.5),
    SGD(0.5, max_gradient_norm=3.0),
    SGD(0.5, max_gradient_norm=0.0, weight_decay=0.25, decoupled_weight_decay=True),
    RowWiseAdagrad(0.5, max_gradient=2.0, max_gradient_norm=2.5, weight_decay=0.25, decoupled_weight_decay=True),
    Adam(0.5, weight_decay=0.25, decoupled_weight_decay=True),
    Lamb(0.5),
    Lamb(0.0, weight_decay=0.25),
    Lamb(0.5, betas=(0.5, 0.75), weight_decay=0.25),
    RowWiseLamb(0.5, weight_decay=0.25),
    Lamb(0.5, weight_decay=0.25, decoupled_weight_decay=False),
]


def one_table(weight: Tensor, optimizer: RowOptimizer) -> OneTable:
    """The table by textbook formulas, in double precision."""
    rows, columns = weight.shape
    config = EmbeddingConfig(rows, columns, "t", feature_names=["f"])
    return OneTable(config, weight, optimizer, [Box((0, 0), (rows, columns))])


@laws
@given(st.lists(lookups(), min_size=1, max_size=4), st.sampled_from(OPTIMIZERS))
def test_steps_are_those_of_the_formulas(batches: list[Lookup], optimizer: RowOptimizer) -> None:
    columns = min(batch.gradient.shape[1] for batch in batches)
    weight = torch.arange(7.0 * columns).view(7, -1).sin()
    stack, plain = stack_of(weight.clone(), optimizer.new_states(weight)), one_table(weight, optimizer)
    for step, batch in enumerate(batches, 1):
        gradient = batch.gradient[:, :columns].contiguous()
        optimizer(stack, batch.by_row(stack.kernels), gradient, step)
        plain.weight.grad = batch.dense(7)[:, :columns]
        plain.update(sorted(set(batch.rows.tolist())))
    assert_close(stack.weight.double(), plain.weight.data, rtol=1e-5, atol=1e-5)
    untouched = [row for row in range(7) if not any(row in batch.rows for batch in batches)]
    assert torch.equal(stack.weight[untouched], weight[untouched])


OF_TORCH: list[tuple[RowOptimizer, Any]] = [
    (SGD(0.5, weight_decay=0.25, max_gradient=2.0), partial(torch.optim.SGD, weight_decay=0.25)),
    (Adagrad(0.5), torch.optim.Adagrad),
    (Adam(0.5, max_gradient=2.0), torch.optim.Adam),
    (Adam(0.5, weight_decay=0.25), partial(torch.optim.Adam, weight_decay=0.25)),
    (Adam(0.5, weight_decay=0.25, decoupled_weight_decay=True), partial(torch.optim.AdamW, weight_decay=0.25)),
]


@laws
@given(st.lists(lookups(), min_size=1, max_size=3), st.sampled_from(OF_TORCH))
def test_steps_that_look_up_every_row_are_those_of_torch(batches: list[Lookup], pair: tuple[RowOptimizer, Any]) -> None:
    optimizer, kind = pair
    columns = min(batch.gradient.shape[1] for batch in batches)
    weight = torch.arange(7.0 * columns).view(7, -1).sin()
    stack, plain = stack_of(weight.clone(), optimizer.new_states(weight)), weight.double().requires_grad_()
    of_torch = kind([plain], lr=0.5)
    for step, batch in enumerate(batches, 1):
        rows = torch.cat([batch.rows, torch.arange(7, dtype=batch.rows.dtype)])  # a last bag of every row
        offsets = torch.cat([batch.offsets, batch.offsets.new_tensor([len(rows)])])
        scale = None if batch.scale is None else torch.cat([batch.scale, torch.ones(7)])
        gradient = torch.cat([batch.gradient[:, :columns], torch.full((1, columns), 3.0)])
        optimizer(stack, stack.kernels.by_row(rows, offsets, scale), gradient, step)
        plain.grad = batch.dense(7)[:, :columns] + 3
        if optimizer.max_gradient is not None:
            torch.nn.utils.clip_grad_value_([plain], optimizer.max_gradient)
        of_torch.step()
    assert_close(stack.weight.double(), plain.detach(), rtol=1e-4, atol=1e-4)


def test_trust_ratios_of_rows_and_gradients_of_zeros_are_one() -> None:
    stack = stack_of(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), Lamb(0.5).new_states(torch.zeros(2, 2)))
    by_row = stack.kernels.by_row(torch.tensor([0, 1]), torch.arange(3))
    Lamb(0.5)(stack, by_row, torch.tensor([[1.0, -2.0], [0.0, 0.0]]), 1)
    assert_close(stack.weight, torch.tensor([[-0.5, 0.5], [3.0, 4.0]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_updated_in_float32(dtype: torch.dtype) -> None:
    weight = torch.linspace(-1, 1, 12).view(4, 3).to(dtype)
    stack = stack_of(weight.clone())
    rows, offsets, gradient = torch.tensor([1, 3, 1]), torch.tensor([0, 2, 3]), torch.ones(2, 3) / 3
    SGD(0.1)(stack, stack.kernels.by_row(rows, offsets), gradient, 1)
    dense = torch.tensor([0.0, 2.0, 0.0, 1.0])[:, None] / 3
    assert torch.equal(stack.weight, (weight.float() - 0.1 * dense).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sign", [-1, 1])
def test_stochastic_rounding_keeps_the_mean(dtype: torch.dtype, sign: int) -> None:
    rows, columns, steps = 64, 32, 64
    weight = torch.full((rows, columns), sign * 1.0).to(dtype)
    ulp = torch.finfo(dtype).eps
    optimizer = SGD(0.3 * ulp, stochastic_rounding=True)  # to the nearest, nothing would ever change
    stack, replica = stack_of(weight.clone()), stack_of(weight.clone())
    ids, offsets = torch.arange(rows), torch.arange(rows + 1)
    for step in range(1, steps + 1):
        for one, order in ((stack, ids), (replica, ids.flip(0))):
            optimizer(one, one.kernels.by_row(order, offsets), -sign * torch.ones(rows, columns), step)
    assert torch.equal(stack.weight, replica.weight)
    moved = (stack.weight.double() - weight.double()) * sign / ulp
    expected, spread = 0.3 * steps, (0.3 * 0.7 * steps / (rows * columns)) ** 0.5
    assert abs(moved.mean() - expected) < 5 * spread
    assert moved.std() == pytest.approx((0.3 * 0.7 * steps) ** 0.5, rel=0.1)  # steps are independent
    assert moved.mean(0).std() < 3 * (0.3 * 0.7 * steps / rows) ** 0.5  # and columns
    plain = stack_of(weight.clone())
    SGD(0.3 * ulp)(plain, plain.kernels.by_row(ids, offsets), -sign * torch.ones(rows, columns), 1)
    assert torch.equal(plain.weight, weight)


WRONG: list[tuple[str, object, str]] = [
    ("lr", -1.0, "0 or more"),
    ("eps", float("nan"), "0 or more"),
    ("weight_decay", -0.1, "0 or more"),
    ("max_gradient", -1.0, "0 or more"),
    ("betas", (0.9, -0.5), "0 or more"),
    ("betas", (1.0, 0.9), "less than 1"),
    ("betas", (0.9, 1.0), "less than 1"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG)
def test_numbers_outside_of_their_range_are_refused(name: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"RowWiseAdam: {name} is .*, expected {expected}"):
        replace(RowWiseAdam(0.1), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "warns"),
    [
        (RowWiseAdagrad(lr=0.1), True),
        (RowWiseAdam(lr=0.1), True),
        (Lamb(lr=0.1), True),
        (SGD(lr=0.1, max_gradient_norm=1.0), True),
        (SGD(lr=0.1), False),
        (Adagrad(lr=0.1), False),
        (Adam(lr=0.1), False),
    ],
)
def test_norms_of_local_columns_are_said(optimizer: RowOptimizer, warns: bool) -> None:
    """Exactly the tables whose weights would be those of one process are not named."""
    names = ["rows", "columns", "one", "both"]
    tables = [EmbeddingBagConfig(10, 4, name, feature_names=[name]) for name in names]
    placements: dict[str, list[Placement]] = {
        "rows": [Shard(0), Replicate()],
        "columns": [Replicate(), Shard(1)],
        "one": [OnRanks(1), Replicate()],
        "both": [Shard(0), Shard(1)],
    }

    def shard() -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            shard_embeddings(EmbeddingBagCollection(tables=tables), placements, Mesh((2, 2)), optimizer)
        return [str(one.message).split(":")[0] for one in found]

    assert world(4).run(shard) == [["columns, both"] if warns else []] * 4
