"""`loss_parallel`: every option of cross entropy on cut classes, and no rank that ever holds all scores."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import DTensor, Mesh, Partial, Replicate, Shard, count_comms, distribute_tensor
from shardwise import _collectives as collectives
from shardwise.errors import LayoutError, RuleError
from shardwise.parallel import ColwiseParallel, loss_parallel, parallelize_module
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.parallel.one_process import full, local_shard_of

R, S0, S1 = Replicate(), Shard(0), Shard(1)
CLASSES, EXAMPLES = 43, 30  # more classes than the few numbers an example that each of four ranks sends
generator = torch.Generator().manual_seed(0)
SCORES = torch.randn(EXAMPLES, CLASSES, generator=generator, dtype=torch.float64)
TARGETS = torch.randint(0, CLASSES, (EXAMPLES,), generator=generator).index_fill(0, torch.tensor([3, 7]), 4)
WEIGHT = torch.rand(CLASSES, generator=generator, dtype=torch.float64)
CHANCES = torch.rand(EXAMPLES, CLASSES, generator=generator, dtype=torch.float64).softmax(1)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignored": {"ignore_index": 4},
    "weighted": {"weight": WEIGHT},
    "smoothed": {"label_smoothing": 0.2},
    "all": {"weight": WEIGHT, "label_smoothing": 0.2, "ignore_index": 4},
}


class Largest(TorchDispatchMode):
    """The most elements that any tensor in memory has which an op makes on this rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            sizes = [x.nbytes // 8 for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and not x.is_meta]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("targets", [TARGETS, CHANCES], ids=["classes", "probabilities"])
@world(4)
def test_every_option_is_exact_on_any_sharding_of_the_classes(targets: Tensor, options: str, reduction: str) -> None:
    given = {**OPTIONS[options], "reduction": reduction}
    if targets is CHANCES:
        given.pop("ignore_index", None)
    y = SCORES.clone().requires_grad_()
    want = F.cross_entropy(y, targets, **given)
    want.square().sum().backward()
    for sharded in (S1, Shard(1, (0, 30, 0, 13))):
        x = distribute_tensor(SCORES, Mesh((4,)), [sharded]).requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(x, targets, **given)
            assert_close(full(loss), want)
            loss.square().sum().backward()
        assert x.grad is not None
        assert as_dtensor(x.grad).placements == as_dtensor(x).placements
        assert_close(full(x.grad), y.grad)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("sizes", ["even", "by hand"])
@pytest.mark.parametrize("targets", [TARGETS, CHANCES], ids=["classes", "probabilities"])
def test_no_rank_ever_makes_a_tensor_as_large_as_all_scores(targets: Tensor, sizes: str, ranks: int) -> None:
    """From the input of the last layer to the gradients, every tensor of every op is looked at."""
    options = OPTIONS["weighted" if targets is CHANCES else "all"]
    sharded = None if sizes == "even" else (1, *[0] * (ranks - 2), CLASSES - 1)
    torch.manual_seed(0)
    plain = nn.Linear(3, CLASSES).double()
    inputs = torch.randn(EXAMPLES, 3, dtype=torch.float64)

    def body() -> tuple[int, int, int]:
        style = ColwiseParallel(use_local_output=False, sizes=sharded)
        module = parallelize_module(copy.deepcopy(plain), None, style)
        x = inputs.clone().requires_grad_()
        # Probabilities are as many as scores: they come cut as well, or a rank would have all of them at once.
        mine = local_shard_of(targets, 1, ranks, sharded) if targets is CHANCES else targets
        with Largest() as largest, count_comms() as comms, loss_parallel():
            goal = DTensor.from_local(mine, placements=[S1]) if targets is CHANCES else mine
            loss = F.cross_entropy(module(x), goal, **options)
            loss.backward()
        assert_close(full(loss), F.cross_entropy(plain(inputs), targets, **options))
        own = len(local_shard_of(plain.weight, 0, ranks, sharded))
        return largest.elements, own * EXAMPLES, max(comms.sent_bytes.values()) // 8

    for elements, own, sent in world(ranks).run(body):
        assert elements < EXAMPLES * CLASSES
        # Scores of this rank, or the few numbers an example that every rank sends.
        assert elements <= max(own, 5 * ranks * EXAMPLES)
        assert sent < EXAMPLES * CLASSES * (ranks - 1)


def test_the_witness_sees_scores_that_are_gathered() -> None:
    """Or the test above would say nothing."""

    def body() -> int:
        module = parallelize_module(nn.Linear(3, CLASSES).double(), None, ColwiseParallel(output_layouts=R))
        with Largest() as largest:
            F.cross_entropy(module(torch.randn(EXAMPLES, 3, dtype=torch.float64)), TARGETS)
        return int(largest.elements)

    assert min(world(2).run(body)) >= EXAMPLES * CLASSES


def refusal(run: Callable[[], Any]) -> str:
    """What all four ranks are told alike."""

    def body() -> str:
        with count_comms() as comms, pytest.raises(LayoutError) as caught, loss_parallel():
            run()
        sent = comms.sent_bytes.get("all_to_all", 0)
        assert sent < SCORES.numel() // 4 * 8, "before anything of the scores is sent"
        return str(caught.value)

    (text,) = set(world(4).run(body))
    return text


def scores(placement: Any = S1) -> DTensor:
    return as_dtensor(distribute_tensor(SCORES, Mesh((4,)), [placement]).requires_grad_())


def test_plain_logits_are_refused() -> None:
    for loss in (lambda: F.cross_entropy(SCORES, TARGETS), lambda: nn.CrossEntropyLoss()(SCORES[:, :3], TARGETS % 3)):
        text = refusal(loss)
        assert "cross_entropy inside loss_parallel(): the logits, of shape (30, " in text
        assert "are a plain tensor, which has all classes or is a local shard read as all of them." in text
        assert "Fix: output_layouts=Shard(-1) and use_local_output=False in the style" in text


@pytest.mark.parametrize("placement", [R, S0, Partial()], ids=str)
@world(4)
def test_scores_of_all_classes_on_a_rank_are_refused(placement: Any) -> None:
    x = distribute_tensor(SCORES, Mesh((4,)), [placement])
    with (
        pytest.raises(LayoutError, match="not sharded along dim 1, the classes: every rank holds all of them"),
        loss_parallel(),
    ):
        F.nll_loss(x, TARGETS)


def test_an_implicit_gather_of_scores_that_a_loss_was_made_of_is_refused() -> None:
    def body() -> set[str]:
        x = scores()
        texts = set()
        with loss_parallel():
            F.cross_entropy(x, TARGETS).backward()
            gathers: tuple[Callable[[], Any], ...] = (
                lambda: torch.linalg.svdvals(x),
                lambda: torch.linalg.svdvals(as_dtensor(x.grad)),
            )
            for gather in gathers:
                with pytest.raises(RuleError) as caught:
                    gather()
                texts.add(str(caught.value).partition(" inside ")[0])
            x.redistribute(placements=[Shard(1, (2, 2, 2, 37))])
            assert as_dtensor(x.grad).full_tensor().shape == SCORES.shape  # what is called is not refused
            assert_close(x.full_tensor(), SCORES)
        return texts

    (texts,) = {frozenset(t) for t in world(4).run(body)}
    assert all("svdvals" in text for text in texts)


@world(4)
def test_an_option_that_needs_full_logits_is_refused_before_they_are_gathered() -> None:
    """Torch refuses to ignore a class of probabilities; nothing is gathered to hear it say so."""

    def run() -> None:
        F.cross_entropy(scores(), CHANCES, ignore_index=2)

    with pytest.raises((RuleError, ValueError, RuntimeError)), loss_parallel():
        run()


@world(1)
def test_one_rank_alone_may_have_all_classes() -> None:
    with loss_parallel():
        distributed = F.cross_entropy(distribute_tensor(SCORES, Mesh((1,)), [R]), TARGETS)
        assert_close(F.cross_entropy(SCORES, TARGETS), full(distributed))


@world(4)
def test_on_two_axes_the_mean_is_that_of_the_global_batch() -> None:
    mesh = Mesh((2, 2), names=("dp", "tp"))
    y = SCORES.clone().requires_grad_()
    want = F.cross_entropy(y, TARGETS, ignore_index=4, label_smoothing=0.1)
    want.backward()
    here = collectives.rank() // 2
    goal = DTensor.from_local(TARGETS.split([29, 1])[here], mesh, [S0, R])
    x = distribute_tensor(SCORES, mesh, [Shard(0, (29, 1)), S1]).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(x, goal, ignore_index=4, label_smoothing=0.1)
        loss.backward()
    assert_close(full(loss), want)
    assert_close(full(x.grad), y.grad)


@pytest.mark.parametrize("options", OPTIONS)
@world(3)
def test_no_example_at_all_has_the_loss_of_one_process(options: str) -> None:
    given = OPTIONS[options]
    none = TARGETS[:0]
    for reduction in ("sum", "mean"):
        x = distribute_tensor(SCORES[:0], Mesh((3,)), [S1]).requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(x, none, **given, reduction=reduction)
            loss.backward()
        assert_close(full(loss), F.cross_entropy(SCORES[:0], none, **given, reduction=reduction), equal_nan=True)
        assert x.grad is not None
        assert x.grad.shape == (0, CLASSES)
