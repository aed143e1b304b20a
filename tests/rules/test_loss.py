"""Losses over sharded examples and classes equal one process: uneven, empty, ignored, weighted, smoothed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Mesh, Replicate, Shard, count_comms, distribute_tensor
from shardwise.testing import world
from shardwise.testing.truth import MESHES, Sample, as_dtensor, assert_equals_one_process

GENERATOR = torch.Generator().manual_seed(4)
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def fraction(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=GENERATOR) * 0.8 + 0.1


def classes(*shape: int) -> Tensor:
    return torch.randint(0, 4, shape, generator=GENERATOR)


A, B, SHARES = normal(5, 3), normal(5, 3), fraction(5, 3)
SCORES, MANY = normal(5, 4), normal(2, 4, 3)
SOME_IGNORED = torch.tensor([1, -100, 3, -100, 0])
SAMPLES = [
    Sample(F.mse_loss, (A, B)),
    Sample(F.mse_loss, (A, B), {"reduction": "sum"}),
    Sample(F.mse_loss, (A, B, None, None, "sum")),
    Sample(F.mse_loss, (normal(0, 3), normal(0, 3))),
    Sample(F.mse_loss, (normal(), normal())),
    Sample(F.mse_loss, (normal(1), normal(1))),
    Sample(F.l1_loss, (A, B), {"reduction": "none"}),
    Sample(F.smooth_l1_loss, (A, B), {"beta": 0.5}),
    Sample(F.huber_loss, (A, B, "mean", 0.5)),
    Sample(F.binary_cross_entropy, (fraction(5, 3), fraction(5, 3))),
    Sample(F.binary_cross_entropy, (fraction(5, 3), fraction(5, 3), fraction(3)), constant=(2,)),
    Sample(F.binary_cross_entropy_with_logits, (A, fraction(5, 3))),
    Sample(
        F.binary_cross_entropy_with_logits,
        (A, fraction(5, 3), normal(3)),
        {"pos_weight": fraction(3)},
        constant=(2, 3),
    ),
    Sample(F.cross_entropy, (SCORES, classes(5))),
    Sample(F.cross_entropy, (SCORES, classes(5)), {"reduction": "sum"}),
    Sample(F.cross_entropy, (SCORES, SOME_IGNORED)),
    Sample(F.cross_entropy, (SCORES, SOME_IGNORED), {"reduction": "none"}),
    Sample(F.cross_entropy, (SCORES, torch.full((5,), -100))),
    Sample(F.cross_entropy, (SCORES, torch.tensor([1, 2, 2, 2, 0])), {"ignore_index": 2}),
    Sample(F.cross_entropy, (SCORES, classes(5), fraction(4)), constant=(2,)),
    Sample(
        F.cross_entropy,
        (SCORES, torch.tensor([1, 2, 3, 2, 0]), fraction(4)),
        {"label_smoothing": 0.1, "ignore_index": 2},
        constant=(2,),
    ),
    Sample(F.cross_entropy, (SCORES, classes(5)), {"label_smoothing": 0.1}),
    Sample(F.cross_entropy, (SCORES, fraction(5, 4))),
    Sample(F.cross_entropy, (SCORES, fraction(5, 4)), {"label_smoothing": 0.1, "reduction": "sum"}),
    Sample(F.cross_entropy, (MANY, classes(2, 3))),
    Sample(F.cross_entropy, (MANY, classes(2, 3)), {"reduction": "none"}),
    Sample(F.cross_entropy, (MANY, fraction(2, 4, 3)), {"reduction": "none"}),
    Sample(F.cross_entropy, (normal(4), torch.tensor(2))),
    Sample(F.cross_entropy, (normal(1, 4), classes(1))),
    Sample(F.nll_loss, (SCORES, classes(5))),  # no rule: on whole copies
    Sample(F.kl_div, (A, fraction(5, 3)), {"reduction": "batchmean"}),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_losses_equal_one_process(sample: Sample) -> None:
    tally = assert_equals_one_process([sample], MESHES, limit=6)
    assert tally.cases > 20


@pytest.mark.parametrize(
    "module", [nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss, nn.BCEWithLogitsLoss], ids=str
)
@world(3)
def test_loss_modules_work(module: Callable[..., Any]) -> None:
    got = module()(*(distribute_tensor(x, Mesh((3,)), [S0]) for x in (A, SHARES)))
    torch.testing.assert_close(got.full_tensor(), module()(A, SHARES))


@pytest.mark.parametrize("loss", [F.mse_loss, F.cross_entropy], ids=lambda f: f.__name__)
@world(3)
def test_the_old_names_of_reduction_mean_what_they_mean_to_torch(loss: Callable[..., Tensor]) -> None:
    full = torch.arange(16.0).view(4, 4)
    x = distribute_tensor(full, Mesh((3,)), [S0])
    with pytest.warns(UserWarning, match="deprecated"):
        want = loss(full, full, size_average=False)
    with pytest.warns(UserWarning, match="deprecated"):
        torch.testing.assert_close(as_dtensor(loss(x, x.detach(), size_average=False)).full_tensor(), want)


@world(2)
def test_losses_of_short_dtypes_do_not_overflow() -> None:
    mesh = Mesh((2,))
    far, zero = (distribute_tensor(torch.full((1000,), n).half(), mesh, [S0]) for n in (20.0, 0.0))
    assert F.mse_loss(far, zero).item() == 400.0
    scores = torch.zeros(90_000, 2).half()
    scores[:, 1] = 9
    ids = distribute_tensor(torch.zeros(90_000, dtype=torch.int64), mesh, [S0])
    assert F.cross_entropy(distribute_tensor(scores, mesh, [S0]), ids).item() == pytest.approx(9.0, rel=1e-2)


@world(2)
def test_a_target_outside_the_cut_classes_is_refused() -> None:
    scores = distribute_tensor(SCORES, Mesh((2,)), [S1])
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        F.cross_entropy(scores, distribute_tensor(torch.tensor([0, 1, 2, 3, 7]), Mesh((2,)), [R]))


@world(4)
def test_cut_classes_need_two_numbers_an_example_and_no_gather() -> None:
    scores = distribute_tensor(torch.zeros(6, 400, dtype=torch.float64), Mesh((4,)), [S1])
    target = distribute_tensor(torch.arange(6), Mesh((4,)), [R])
    with count_comms() as meter:
        loss = as_dtensor(F.cross_entropy(scores, target))
    assert loss.placements == (R,)
    assert meter.total_calls == 1
    assert meter.total_bytes == 3 * 2 * 6 * 8
