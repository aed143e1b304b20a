import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise._layout import REDUCE_OPS, Box, Boxes, OnRanks, Partial, Placement, Replicate, Shard, chunk, dual
from shardwise.errors import LayoutError

BOXES = Boxes([[((0, 0), (1, 3))], [], [((1, 0), (1, 1)), ((1, 1), (1, 2))]])
ONE_OF_EACH = [
    Replicate(),
    Shard(0),
    Shard(-1, [1, 0, 2]),
    Shard(1, [[1, 2], [3, 4]]),
    *(Partial(op) for op in REDUCE_OPS),
    OnRanks(1),
    BOXES,
]


@pytest.mark.parametrize("positions", range(1, 10))
def test_chunk_cuts_as_torch_does(positions: int) -> None:
    for size in range(1, 40):
        sizes = [shard.numel() for shard in torch.arange(size).chunk(positions)]
        assert list(chunk(size, positions)) == sizes + [0] * (positions - len(sizes))
    assert chunk(0, positions) == (0,) * positions


def test_the_dual_of_the_dual_is_the_placement_again() -> None:
    for placement in [Replicate(), Shard(0), Shard(1, [2, 0]), Partial(), OnRanks(0), BOXES]:
        assert dual(dual(placement)) == placement


def test_gradients_are_sharded_alike_and_sums_and_copies_change_places() -> None:
    assert dual(Shard(1, [2, 0])) == Shard(1, [2, 0])
    assert dual(OnRanks(2)) == OnRanks(2)
    assert dual(BOXES) == BOXES
    assert dual(Replicate()) == Partial("sum")
    assert {dual(Partial(op)) for op in REDUCE_OPS} == {Replicate()}


def test_placements_know_their_kind() -> None:
    def kinds(p: Placement) -> tuple[bool, bool, bool]:
        return p.is_shard(), p.is_replicate(), p.is_partial()

    assert kinds(Shard(0)) == (True, False, False)
    assert kinds(Replicate()) == (False, True, False)
    assert kinds(Partial("max")) == (False, False, True)
    assert kinds(OnRanks(0)) == kinds(BOXES) == (False, False, False)
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert Partial("max").is_partial("max")
    assert not Partial("max").is_partial("sum")


def test_placements_print_as_they_are_written() -> None:
    assert [repr(p) for p in ONE_OF_EACH] == [
        "Replicate()",
        "Shard(0)",
        "Shard(-1, sizes=(1, 0, 2))",
        "Shard(1, sizes=((1, 2), (3, 4)))",
        "Partial('sum')",
        "Partial('avg')",
        "Partial('max')",
        "Partial('min')",
        "Partial('product')",
        "OnRanks(1)",
        "Boxes([0:1, 0:3] | - | [1:2, 0:1] [1:2, 1:3])",
    ]
    assert str(Partial("max")) == "Partial('max')"


def test_placements_are_equal_by_value() -> None:
    for placement in ONE_OF_EACH:
        same = copy.deepcopy(placement)
        assert same == placement
        assert hash(same) == hash(placement)
        assert pickle.loads(pickle.dumps(placement)) == placement  # noqa: S301
    assert len(set(ONE_OF_EACH)) == len(ONE_OF_EACH)
    assert Shard(0, [1, 2]) == Shard(0, (1, 2)) == Shard(0, torch.Size([1, 2]))
    assert Boxes(BOXES.boxes) == BOXES
    assert isinstance(BOXES.boxes[0][0], Box)


@pytest.mark.parametrize(
    ("placement", "field"),
    [(Shard(0), "dim"), (Partial(), "reduce_op"), (OnRanks(0), "position"), (BOXES, "boxes")],
    ids=["Shard", "Partial", "OnRanks", "Boxes"],
)
def test_placements_are_frozen(placement: Placement, field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(placement, field, 1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Shard("rows"),  # type: ignore[arg-type]
            (
                "Shard(dim) takes an integer dim, got 'rows'. Named dims are not supported. "
                "Fix: the number of the dim, such as Shard(0)."
            ),
        ),
        (
            lambda: Shard(True),
            (
                "Shard(dim) takes an integer dim, got True. Named dims are not supported. "
                "Fix: the number of the dim, such as Shard(0)."
            ),
        ),
        (lambda: Shard(0, [2, -1]), "Shard sizes must not be negative, got [2, -1]. Fix: 0 where nothing is held."),
        (lambda: Shard(0, [[2, -1]]), "Shard sizes must not be negative, got [[2, -1]]. Fix: 0 where nothing is held."),
        (
            lambda: Shard(0, [[1, 2], 3]),  # type: ignore[arg-type]
            (
                "Shard sizes must be all integers or all tuples of integers, got [[1, 2], 3]. "
                "Fix: such as (3, 1), the sizes of two ranks; or ((2, 1), (1, 0)), for each outer shard such a "
                "tuple."
            ),
        ),
        (
            lambda: Shard(0, [2.5, 2.5]),  # type: ignore[arg-type]
            (
                "Shard sizes must be all integers or all tuples of integers, got [2.5, 2.5]. "
                "Fix: such as (3, 1), the sizes of two ranks; or ((2, 1), (1, 0)), for each outer shard such a "
                "tuple."
            ),
        ),
        (
            lambda: Shard(0, [["2", "1"]]),  # type: ignore[arg-type]
            (
                "Shard sizes must be all integers or all tuples of integers, got [['2', '1']]. "
                "Fix: such as (3, 1), the sizes of two ranks; or ((2, 1), (1, 0)), for each outer shard such a "
                "tuple."
            ),
        ),
        (
            lambda: Partial("mean"),
            "Partial reduce_op must be one of sum, avg, max, min, product, got 'mean'. Fix: Partial('avg').",
        ),
    ],
)
def test_a_placement_that_means_nothing_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        make()
    assert str(caught.value) == text
