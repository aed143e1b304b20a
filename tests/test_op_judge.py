"""The judge of op calls is tried on functions that are wrong on purpose, each in one way."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import DTensor, Mesh, Partial, Replicate, Shard, ShardwiseError, rank
from shardwise import _collectives as collectives
from shardwise._layout import Layout, Placement
from shardwise.testing.local_shards import partial_values
from tools.op_judge import REFUSED, Layouts, OpJudge, Outcome, Sample, layout_of
from tools.opinfo import FAMILIES, layouts_of, uneven_sizes

X = torch.arange(1.0, 16.0).view(5, 3)
UNEVEN = (Layout(Mesh((4,)), [Shard(0, (1, 3, 0, 1))], X.shape),)
REPLICATED = (Layout(Mesh((4,)), [Replicate()], X.shape),)


def outcome_of(op: Callable[..., Any], layouts: Layouts = UNEVEN, **kwargs: Any) -> tuple[Outcome, str]:
    verdict = OpJudge(Sample(op, (X,), **kwargs), timeout=60).verdict(layouts)
    return verdict.outcome, verdict.message


def on_local(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """What a rule that forgets the other ranks would do."""
    if not isinstance(x, DTensor):
        return function(x)
    return DTensor.from_local(function(x.to_local()), x.device_mesh, x.placements)


@pytest.mark.parametrize("op", [lambda x: x * 2 + 1, lambda x: x.sort(0), lambda x: (x.sum(), [x.mean(0)], 3)])
def test_what_is_right_in_every_layout_is_called_right(op: Callable[[Tensor], Any]) -> None:
    judge = OpJudge(Sample(op, (X,)))
    found = layouts_of([X], FAMILIES)
    assert len(found) >= 9
    for label, layouts in found.items():
        assert judge.verdict(layouts).outcome == Outcome.RIGHT, label


def test_values_of_the_local_shard_only_are_called_wrong() -> None:
    outcome, message = outcome_of(lambda x: on_local(x, lambda local: local.cumsum(0)))
    assert outcome == Outcome.WRONG_VALUE
    assert "differs in 12 of 15 elements, at (1, 0)" in message


def test_nonlinear_ops_on_partial_values_are_called_wrong() -> None:
    partial = (Layout(Mesh((4,)), [Partial()], X.shape),)
    assert outcome_of(lambda x: on_local(x, torch.abs), partial)[0] == Outcome.WRONG_VALUE
    assert outcome_of(lambda x: on_local(x, torch.neg), partial)[0] == Outcome.RIGHT


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.double(),
        lambda x: x.unsqueeze(0),
        lambda x: (x,),
        lambda x: 1.0,
    ],
)
def test_another_dtype_shape_or_structure_is_not_a_wrong_value(wrong: Callable[[Tensor], Any]) -> None:
    assert outcome_of(lambda x: wrong(x) if isinstance(x, DTensor) else x.clone())[0] == Outcome.WRONG_KIND


def test_a_number_is_a_value() -> None:
    assert outcome_of(lambda x: float(x.detach().sum()))[0] == Outcome.RIGHT
    assert outcome_of(lambda x: 1.0 if isinstance(x, DTensor) else 2.0)[0] == Outcome.WRONG_VALUE


@pytest.mark.parametrize("wrong", [lambda x: x.detach() * 2 + x, lambda x: x.detach() * 3])
def test_a_right_value_with_another_gradient_is_a_wrong_gradient(wrong: Callable[[Tensor], Tensor]) -> None:
    outcome, message = outcome_of(lambda x: wrong(x) if isinstance(x, DTensor) else x * 3)
    assert outcome == Outcome.WRONG_GRADIENT
    assert "operand 0" in message


def test_replicas_that_differ_are_found() -> None:
    def apart(x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            collectives.check_values(False)
        return on_local(x, lambda local: local + 1 if isinstance(x, DTensor) and rank() == 3 else local.clone())

    outcome, message = outcome_of(apart, REPLICATED)
    assert outcome == Outcome.WRONG_VALUE
    assert "rank 3" in message


def raises(error: Callable[[], Exception | None]) -> Callable[[Tensor], Tensor]:
    def op(x: Tensor) -> Tensor:
        if isinstance(x, DTensor) and (found := error()) is not None:
            raise found
        return x.clone()

    return op


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (lambda: ShardwiseError("no such rule"), Outcome.CLEAR_ERROR),
        (lambda: ShardwiseError(f"no such rule on rank {rank()}"), Outcome.OTHER_ERROR),
        (lambda: RuntimeError("from C++"), Outcome.OTHER_ERROR),
        (lambda: ShardwiseError("no such rule") if rank() else None, Outcome.SOME_RANKS),
    ],
)
def test_errors_are_clear_if_they_are_the_same_and_ours(error: Callable[[], Exception], outcome: Outcome) -> None:
    assert outcome_of(raises(error))[0] == outcome


def test_ranks_that_wait_for_one_that_does_not_come_hang() -> None:
    def op(x: Tensor) -> Tensor:
        if isinstance(x, DTensor) and rank():
            x.full_tensor()
        return x.clone()

    assert outcome_of(op)[0] == Outcome.HANG


def test_ranks_that_run_on_are_given_up() -> None:
    call = Sample(lambda x: time.sleep(1) if isinstance(x, DTensor) else None, (X,))
    verdict = OpJudge(call, timeout=0.1).verdict(UNEVEN)
    assert verdict.outcome == Outcome.HANG
    assert verdict.late


def test_what_torch_refuses_must_be_refused_on_all_ranks() -> None:
    assert outcome_of(lambda x: x.view(4, 4)) == (Outcome.RIGHT, REFUSED)
    outcome, message = outcome_of(lambda x: x.clone() if isinstance(x, DTensor) else x.view(4, 4))
    assert outcome == Outcome.WRONG_VALUE
    assert "torch raises RuntimeError" in message


def test_random_numbers_are_compared_with_a_world_of_one_rank() -> None:
    assert outcome_of(torch.rand_like)[0] == Outcome.RIGHT
    assert outcome_of(lambda x: on_local(x, torch.rand_like))[0] == Outcome.WRONG_VALUE


def test_an_op_in_place_must_return_and_change_its_operand() -> None:
    def beside(x: Tensor) -> Tensor:
        return x * 2 if isinstance(x, DTensor) else x.mul_(2)

    assert outcome_of(lambda x: x.mul_(2), mutates=True)[0] == Outcome.RIGHT
    assert outcome_of(beside, mutates=True)[0] == Outcome.WRONG_KIND
    unchanged = outcome_of(lambda x: x if isinstance(x, DTensor) else x.mul_(2), mutates=True)
    assert unchanged[0] == Outcome.WRONG_VALUE


def test_implicit_redistributions_are_counted() -> None:
    judge = OpJudge(Sample(lambda x: x.sort(0), (X,), gradients=False))
    assert judge.verdict(UNEVEN).implicit == 1
    assert judge.verdict(REPLICATED).implicit == 0


def test_aten_ops_that_run_replicated_are_named() -> None:
    judge = OpJudge(Sample(torch.unique_consecutive, (X,), gradients=False))
    assert judge.verdict(UNEVEN).fallbacks == {"aten.unique_consecutive.default"}
    assert not judge.verdict(REPLICATED).fallbacks
    assert not OpJudge(Sample(torch.sort, (X, 0), gradients=False)).verdict(UNEVEN).fallbacks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_partial_values_add_up_exactly(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, -3.7e30, 1e-30, 0.0, 7.0], dtype=torch.float64).clamp(-9e5, 9e5).to(dtype)
    for mesh, placements in ((Mesh((4,)), [Partial()]), (Mesh((2, 2)), [Partial(), Partial()])):
        layout = layout_of(x, mesh, placements)
        assert layout is not None
        parts = list(partial_values(x, layout).values())
        assert torch.equal(parts[3] + parts[1] + parts[0] + parts[2], x)
        assert sum(bool((part != 0).any()) for part in parts) >= 2


def test_partial_values_of_non_finite_elements_add_up_to_them() -> None:
    x = torch.tensor([float("inf"), float("nan"), 3e38])
    layout = layout_of(x, Mesh((4,)), [Partial()])
    assert layout is not None
    torch.testing.assert_close(sum(partial_values(x, layout).values()), x, equal_nan=True, rtol=0, atol=0)


def test_layouts_cover_uneven_empty_partial_grid_and_nested_shards() -> None:
    for length in (0, 1, 3, 5, 9):
        assert sum(uneven_sizes(length)) == length
    tensors = [X, torch.ones(()), torch.ones(4, 2, dtype=torch.int64)]
    found = layouts_of(tensors, FAMILIES)
    placements = {layout.placements for layouts in found.values() if (layout := layouts[0]) is not None}
    wanted: list[list[Placement]] = [
        [Shard(0)],
        [Shard(1)],
        [Shard(0, (1, 3, 0, 1))],
        [Shard(0, (0, 5, 0, 0))],
        [Partial()],
    ]
    wanted += [[Shard(0), Shard(1)], [Shard(0), Shard(0)], [Partial(), Shard(0)]]
    assert all(tuple(p) in placements for p in wanted)
    assert "operand 2 Shard(1)" in found
    assert layouts_of([torch.ones(3).to_sparse()], ["all"]) == {"all Shard(0)": (None,)}
