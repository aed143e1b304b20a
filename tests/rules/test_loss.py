"""Losses over sharded examples and classes: uneven, empty, ignored, weighted, smoothed."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

from shardwise import Mesh, Placement, Replicate, Shard, count_comms, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls, sent
from tests.tensor.test_conversion import same_error
from tools.op_judge import Sample

R, S0, S1 = Replicate(), Shard(0), Shard(1)
draw = Draw(4)
normal, fraction = draw.normal, draw.fraction


def classes(*shape: int) -> Tensor:
    return draw.ids(4, *shape)


A, B, SHARES = normal(5, 3), normal(5, 3), fraction(5, 3)
SIGNS, SIDES = normal(5, 3).sign(), normal(5).sign().long()
SCORES, MANY, W4 = normal(5, 4), normal(2, 4, 3), fraction(4)
SOME_IGNORED, ONE_IGNORED = torch.tensor([1, -100, 3, -100, 0]), torch.tensor([1, 2, 3, 2, 0])
LOG_P, LENGTHS = normal(6, 3, 5).log_softmax(2), (torch.tensor([6, 5, 6]), torch.tensor([2, 0, 1]))
SUM, NONE = {"reduction": "sum"}, {"reduction": "none"}
ELEMENTS = [
    *calls(F.mse_loss, (A, B), (A, B, SUM), (A, B, None, None, "sum"), (A, B, {"weight": SHARES}),
           (A, B, {"weight": SHARES, **SUM}), (A, B, {"weight": SHARES, **NONE}), (normal(0, 3), normal(0, 3)),
           (normal(), normal()), (normal(1), normal(1))),
    *calls(F.l1_loss, (A, B, NONE)),
    *calls(F.smooth_l1_loss, (A, B, {"beta": 0.5})),
    *calls(F.huber_loss, (A, B, "mean", 0.5), (A, B, {"weight": SHARES})),
    *calls(F.binary_cross_entropy, (SHARES, fraction(5, 3))),
    *calls(F.binary_cross_entropy, (SHARES, fraction(5, 3), fraction(3)), constant=(2,)),
    *calls(F.binary_cross_entropy_with_logits, (A, fraction(5, 3), normal(3), {"pos_weight": fraction(3)}),
           constant=(2, 3)),
    *calls(F.kl_div, (A, SHARES, {"reduction": "batchmean"}), (A, B, {"log_target": True, **SUM}),
           (normal(), fraction(), {"reduction": "batchmean"})),
    *calls(F.poisson_nll_loss, (A, SHARES * 5), (SHARES, SHARES * 5, False, True)),
    *calls(F.gaussian_nll_loss, (A, B, SHARES), (A, B, fraction(5), {"full": True}), (A, B, 0.5, SUM)),
    *calls(F.soft_margin_loss, (A, SIGNS), constant=(1,)),
    *calls(F.hinge_embedding_loss, (A, SIGNS, {"margin": 0.3})),
    *calls(F.margin_ranking_loss, (A, B, SIGNS, {"margin": 0.3})),
]  # fmt: skip
EXAMPLES = [
    *calls(F.cosine_embedding_loss, (A, B, SIDES, 0.1), (A, B, SIDES, NONE), constant=(2,)),
    *calls(F.triplet_margin_loss, (A, B, SHARES, {"swap": True}), (A, B, SHARES, {"p": 1, **NONE})),
    *calls(F.triplet_margin_with_distance_loss, (A, B, SHARES, {"distance_function": nn.PairwiseDistance()})),
    *calls(F.multi_margin_loss, (SCORES, classes(5)), (normal(4), classes())),
    *calls(F.multi_margin_loss, (SCORES, classes(5), 2, 0.5, W4, NONE), (normal(4, 4), classes(4), {"weight": W4}),
           constant=(2,)),
    *calls(F.multilabel_margin_loss, (SCORES, torch.tensor([[3, 0, -1, 1]] * 4 + [[-1, 2, 2, 2]]))),
    *calls(F.multilabel_soft_margin_loss, (SCORES, (normal(5, 4) > 0).double(), W4),
           (normal(4, 4), fraction(4, 4), fraction(4, 4)), constant=(1, 2)),
    *calls(F.multilabel_soft_margin_loss, (MANY, (normal(2, 4, 3) > 0).double(), NONE), constant=(1,)),
    *calls(F.ctc_loss, (LOG_P, classes(3, 2) + 1, *LENGTHS), (LOG_P, classes(3, 2) + 1, *LENGTHS, {"blank": 0, **NONE}),
           (LOG_P, classes(3, 2) + 1, (6, 5, 6), (2, 1, 1), {"zero_infinity": True, **SUM})),
]  # fmt: skip
CLASSES = [
    *calls(F.cross_entropy, (SCORES, classes(5)), (SCORES, classes(5), SUM), (SCORES, SOME_IGNORED),
           (SCORES, SOME_IGNORED, NONE), (SCORES, torch.full((5,), -100)), (SCORES, ONE_IGNORED, {"ignore_index": 2})),
    *calls(F.cross_entropy, (SCORES, SOME_IGNORED, W4), (SCORES, SOME_IGNORED, W4, NONE),
           (SCORES, ONE_IGNORED, W4, {"label_smoothing": 0.1, "ignore_index": 2}),
           (SCORES, SOME_IGNORED, W4, {"label_smoothing": 1.0, **SUM}), constant=(2,)),
    *calls(F.cross_entropy, (SCORES, classes(5), {"label_smoothing": 0.1}), (SCORES, fraction(5, 4)),
           (SCORES, fraction(5, 4), {"label_smoothing": 0.1, **SUM})),
    *calls(F.cross_entropy, (SCORES, fraction(5, 4), W4), (MANY, classes(2, 3), W4, {"label_smoothing": 0.2}),
           (MANY, fraction(2, 4, 3), W4, NONE), (normal(4), torch.tensor(2), W4), constant=(2,)),
    *calls(F.cross_entropy, (MANY, classes(2, 3), NONE), (normal(1, 4), classes(1)), (normal(0, 4), classes(0), SUM)),
    *calls(F.nll_loss, (SCORES, SOME_IGNORED), (normal(4), torch.tensor(2))),
    *calls(F.nll_loss, (SCORES, SOME_IGNORED, W4, SUM), (MANY, classes(2, 3), W4), constant=(2,)),
    *calls(F.nll_loss, (MANY, classes(2, 3), {"ignore_index": 1, **NONE})),
]  # fmt: skip
LINEAR = calls(
    F.linear_cross_entropy,
    (normal(5, 3), normal(4, 3), SOME_IGNORED),
    (normal(3), normal(4, 3), torch.tensor(2), {"linear_bias": normal(4)}),
    (normal(5, 3), normal(4, 2, 3), classes(5, 2), {"linear_bias": normal(4, 2)}),
    (normal(5, 3), normal(4, 3), classes(5), {"options": LinearCrossEntropyOptions(batch_chunk_size=2)}),
)


@pytest.mark.parametrize("placements", [(S0, S1), (S1, S0), (S1, S1), (S0, S0)], ids=str)
@pytest.mark.parametrize("sample", [s for s in CLASSES if s.op is not F.linear_cross_entropy][::2], ids=str)
def test_batch_and_classes_may_both_be_sharded(sample: Sample, placements: tuple[Placement, Placement]) -> None:
    """Scores are not gathered: the ranks exchange a few numbers per example, for any number of classes."""
    scores, target, *rest = sample.tensors()
    if scores.ndim < 2:
        return
    want = sample.call([scores, target, *rest])

    def body() -> Tensor:
        mesh = Mesh((2, 2))
        batch = [p if p == S0 or target.ndim == scores.ndim else R for p in placements]
        weights = [distribute_tensor(w, mesh, [S0 if p == S1 else R for p in placements]) for w in rest]
        x, y = distribute_tensor(scores, mesh, placements), distribute_tensor(target, mesh, batch)
        with count_comms() as comms:
            out = as_dtensor(sample.call([x, y, *weights]))
        assert comms.implicit == []
        assert comms.total_calls <= 2
        return out.full_tensor()

    for got in world(4).run(body):
        torch.testing.assert_close(got, want, equal_nan=True)


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


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("of_scores", "of_targets"), [(S1, R), (S0, S0)], ids=str)
def test_a_target_that_is_no_class_is_the_same_error_on_every_rank(
    loss: Callable[..., Tensor], of_scores: Placement, of_targets: Placement
) -> None:
    operands = (SCORES, of_scores), (torch.tensor([0, 1, 2, 3, 7]), of_targets)
    text = same_error(3, IndexError, lambda: loss(*(distribute_tensor(x, Mesh((3,)), [p]) for x, p in operands)))
    assert text == "Target 7 is out of bounds: there are 4 classes."


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("keep", [nullcontext, save_on_cpu])
@world(2)
def test_weights_that_require_grad_are_refused_as_torch_does(loss: Callable[..., Tensor], keep: Any) -> None:
    """A rank without classes would not take part in the sum of their gradients."""
    for placement in (Shard(1, (0, 4)), S0, R):
        scores = distribute_tensor(SCORES, Mesh((2,)), [placement]).requires_grad_()
        weight = distribute_tensor(W4, Mesh((2,)), [R]).requires_grad_()
        with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'weight'"), keep():
            loss(scores, SOME_IGNORED, weight)


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss], ids=lambda f: f.__name__)
@world(3)
def test_a_rank_whose_classes_are_all_masked_has_a_gradient_of_zero(loss: Callable[..., Tensor]) -> None:
    full = SCORES.clone()
    full[:, :2] = float("-inf")
    grads = []
    for x in (full, distribute_tensor(full, Mesh((3,)), [S1])):
        leaf = x.detach().requires_grad_()
        loss(leaf, torch.tensor([2, 3, 3, 2, 2])).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(as_dtensor(grads[1]).full_tensor(), grads[0])


def test_sharded_classes_exchange_four_numbers_per_example() -> None:
    operands = (torch.zeros(6, 400, dtype=torch.float64), S1), (torch.arange(6), R)
    assert sent(Mesh((4,)), F.cross_entropy, *operands) == [((R,), 1, 3 * 4 * 6 * 8)] * 4


UNDER_AUTOCAST: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda x: F.cross_entropy(x, SOME_IGNORED),
    "smoothed": lambda x: F.cross_entropy(x, SOME_IGNORED, label_smoothing=0.1),
    "of shares": lambda x: F.cross_entropy(x, SCORES.softmax(1).bfloat16()),
    "no reduction": lambda x: F.cross_entropy(x, SOME_IGNORED, reduction="none"),
    "nll_loss": lambda x: F.nll_loss(x, SOME_IGNORED),
}


@pytest.mark.parametrize("name", UNDER_AUTOCAST)
@world(2)
def test_under_autocast_losses_of_half_scores_are_in_single_precision(name: str) -> None:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = UNDER_AUTOCAST[name](x)
        out.sum().backward()
        return out

    half = SCORES.bfloat16()
    plain = half.clone().requires_grad_()
    expected = run(plain)
    for placement in (R, S0, S1):
        x = distribute_tensor(half, placements=[placement]).requires_grad_()
        found = as_dtensor(run(x)).full_tensor()
        assert found.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(found, expected)
        assert x.grad is not None
        assert plain.grad is not None
        torch.testing.assert_close(as_dtensor(x.grad).full_tensor(), plain.grad)
