import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise._layout import REDUCE_OPS, Box, Boxes, OnRanks, Partial, Placement, Replicate, Shard
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


def test_placements_print_as_they_are_written_and_are_equal_by_value() -> None:
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


MIXED = "Shard sizes must be all integers or all tuples of integers, got "


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Shard("rows"), "integer dim, got 'rows'. Named dims are not supported. Fix: "),  # type: ignore[arg-type]
        (lambda: Shard(True), "Shard(dim) takes an integer dim, got True. "),
        (lambda: Shard(0, [2, -1]), "Shard sizes must not be negative, got [2, -1]. Fix: 0 where nothing is held."),
        (lambda: Shard(0, [[2, -1]]), "Shard sizes must not be negative, got [[2, -1]]. Fix: 0 where nothing is held."),
        (lambda: Shard(0, [[1, 2], 3]), MIXED + "[[1, 2], 3]. Fix: such as"),  # type: ignore[arg-type]
        (lambda: Shard(0, [2.5, 2.5]), MIXED + "[2.5, 2.5]. Fix: such as"),  # type: ignore[arg-type]
        (lambda: Shard(0, [["2", "1"]]), MIXED + "[['2', '1']]. Fix: such as"),  # type: ignore[arg-type]
        (lambda: Partial("mean"), "one of sum, avg, max, min, product, got 'mean'. Fix: Partial('avg')."),
    ],
)
def test_a_placement_that_means_nothing_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        make()
    assert text in str(caught.value)
