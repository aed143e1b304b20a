"""Dropout drops the same elements for every layout, and hands on gradients of what it kept."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import Mesh
from shardwise.layout import Layout
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.random_ops import (
    ONE,
    S0,
    S1,
    VALUES,
    Op,
    assert_refused_as_by_torch,
    assert_the_same_on_all_layouts,
    assert_the_same_on_summands,
    on,
    sharded_values,
)

DROPOUTS: dict[str, Op] = {
    "F.dropout": lambda x: F.dropout(x, 0.3),
    "F.dropout(p=1)": lambda x: F.dropout(x, 1.0),
    "F.dropout(inplace)": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "nn.Dropout": nn.Dropout(0.3),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "torch.dropout_": lambda x: torch.dropout_(x.clone(), 0.3, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "dropout1d of one": lambda x: F.dropout1d(x[:, :, 0], 0.3),
    "dropout2d": lambda x: F.dropout2d(x[:, :, None], 0.3),
    "dropout3d": lambda x: nn.Dropout3d(0.3)(x[:, :, None, None]),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "alpha_dropout(inplace)": lambda x: F.alpha_dropout(x.clone(), 0.3, True, inplace=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "feature_alpha_dropout_": lambda x: torch.feature_alpha_dropout_(x.clone(), 0.3, True),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "rrelu(inplace) in eval": lambda x: F.rrelu(x - 0.5, inplace=True),
    "rrelu_": lambda x: torch.rrelu_(x - 0.5, 0.1, 0.2, True),
    "rrelu(inplace)": lambda x: F.rrelu(x - 0.5, training=True, inplace=True),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_the_same_elements_are_dropped_whatever_the_layout(name: str) -> None:
    assert_the_same_on_all_layouts(DROPOUTS[name])


@pytest.mark.parametrize("name", DROPOUTS)
def test_partial_values_have_one_mask(name: str) -> None:
    assert_the_same_on_summands(DROPOUTS[name])


def dropped(
    op: Callable[[Any, float], Any], p: float, shape: Sequence[int] = (40, 50, 8)
) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor, the tensor after `op`, and the gradient of its sum, from two ranks."""

    def body() -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(3)
        full = 1 + torch.rand(tuple(shape), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        x = sharded_values(Layout(Mesh((2,)), [S1], shape), full).requires_grad_()
        out = as_dtensor(op(x, p))
        out.sum().backward()
        assert x.grad is not None
        return full, as_dtensor(out.detach()).full_tensor(), as_dtensor(x.grad).full_tensor()

    return world(2).run(body)[0]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_scaled_elements_and_their_gradients(p: float) -> None:
    x, out, grad = dropped(F.dropout, p)
    kept = out != 0
    assert abs(kept.double().mean().item() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / x.numel())
    assert_close(out, torch.where(kept, x / (1 - p), 0))
    assert_close(grad, torch.where(kept, 1 / (1 - p), 0.0).double())


@pytest.mark.parametrize("op", [F.dropout1d, F.feature_alpha_dropout])
def test_all_elements_of_a_channel_are_dropped(op: Callable[..., Tensor]) -> None:
    def drop(x: Any, p: float) -> Tensor:
        return op(x, p, True)

    x, out, grad = dropped(drop, 0.5)
    assert (grad == grad[:, :, :1]).all()
    share = (grad[:, :, 0] != 0).double().mean().item()
    assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(x.shape[0] * x.shape[1])
    if op is F.dropout1d:
        assert_close(out, x * grad)


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    def body() -> tuple[float, float]:
        torch.manual_seed(9)
        x = sharded_values(
            Layout(Mesh((2,)), [S0], (200_000,)), torch.randn(200_000, generator=torch.Generator().manual_seed(2))
        )
        out = as_dtensor(F.alpha_dropout(x, 0.3, True)).full_tensor()
        return out.mean().item(), out.std().item()

    mean, std = world(2).run(body)[0]
    assert mean == pytest.approx(0, abs=0.01)
    assert std == pytest.approx(1, abs=0.01)


def test_what_drops_nothing_draws_nothing() -> None:
    def body() -> bool:
        x = sharded_values(on(Mesh((2,)), [S0]))
        before = torch.get_rng_state()
        for same in (F.dropout(x, 0.0), F.dropout(x, 0.5, False), F.alpha_dropout(x), F.dropout(x, 0.5, False, True)):
            assert same is x
        others = [torch.dropout(x, 0.5, False), nn.Dropout1d().eval()(x), torch.native_dropout(x, 0.5, False)[0]]
        others += [torch.dropout_(x, 0.0, True), torch.feature_dropout(x, 0.0, True)]
        assert all(torch.equal(as_dtensor(out).full_tensor(), VALUES) for out in others)
        assert as_dtensor(torch.native_dropout(x, 0.5, False)[1]).full_tensor().all()
        return torch.equal(before, torch.get_rng_state())

    assert world(2).run(body) == [True, True]


BAD: dict[str, Op] = {
    "F.dropout": lambda x: F.dropout(x, 1.5),
    "torch.dropout": lambda x: torch.dropout(x, -0.5, True),
    "dropout in eval": lambda x: F.alpha_dropout(x, 1.5, False),
    "dropout of integers": lambda x: F.dropout(x.long()),
    "native_dropout": lambda x: torch.native_dropout(x, 1.5, True),
    "dropout1d of 4 dims": lambda x: F.dropout1d(x[None]),
    "feature_dropout of 1 dim": lambda x: torch.feature_dropout(x[0, 0], 0.5, True),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_torchs_error_on_every_rank_before_anything_is_drawn(name: str) -> None:
    assert_refused_as_by_torch(BAD[name])


def test_torchs_warnings_about_dims_are_given() -> None:
    def body() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            F.dropout2d(sharded_values(ONE))
        return [str(w.message) for w in caught]

    ((text,),) = world(1).run(body)
    assert text.startswith("dropout2d: Received a 3D input")
