"""Running sums, products and extremes of sharded tensors send totals of shards only."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import Mesh, Shard, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls, sent
from tools.op_judge import Sample

INF, NAN = float("inf"), float("nan")
draw = Draw(3)
normal = draw.normal
A, B, N, LINE = normal(7, 3), normal(2, 7, 3), draw.integers(7, 3, low=-2, high=3), draw.integers(9, low=-2, high=3)
SUMS = [torch.cumsum, torch.cumprod, torch.logcumsumexp]
EXTREMES = [torch.cummax, torch.cummin]
SAMPLES = [
    *(Sample(op, (A, dim)) for op in (*SUMS, *EXTREMES) for dim in (0, -1)),
    *(Sample(op, (B,), {"dim": 1}) for op in SUMS),
    *(Sample(op, (normal(), 0)) for op in (torch.cumsum, torch.cummax)),
    *(Sample(op, (normal(0, 2), 0)) for op in (*SUMS, *EXTREMES)),
    *(Sample(op, (x, 0)) for op in EXTREMES for x in (LINE, N.double(), LINE > 0)),
    *calls(Tensor.cumsum, (A, {"axis": 0})),
    *calls(torch.cumsum, (N, 0), (LINE > 0, 0)),
    *calls(torch.cumsum, (A.float(), 0, {"dtype": torch.float64}), tolerance=1e-5),
    *calls(torch.cumprod, (A.masked_fill(A > 1, 0), 0), (N, 0, {"dtype": torch.float64})),
    *calls(torch.logcumsumexp, (torch.tensor([1.0, -INF, -INF, 2, -INF, -INF, 0], dtype=torch.float64), 0)),
]  # fmt: skip


SIZES: list[list[int] | None] = [None, [2, 0, 5, 2], [0, 0, 1, 8], [9, 0, 0, 0]]
FEW_VALUES = torch.tensor([2.0, 1, 2, -INF, 2, 1, 0, 2, -INF], dtype=torch.float64)


@pytest.mark.parametrize("full", [normal(9), FEW_VALUES, -FEW_VALUES], ids=["normal", "few values", "negated"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("op", [*SUMS, *EXTREMES], ids=lambda op: op.__name__)
def test_pieces_are_taken_in_their_order_not_in_that_of_the_ranks(
    op: Callable[[Any, int], Any], sizes: list[int] | None, full: Tensor
) -> None:
    def body() -> list[Tensor]:
        x = distribute_tensor(full, Mesh((4,), (2, 0, 3, 1)), [Shard(0, sizes)])
        out = op(x, 0)
        return [as_dtensor(y).full_tensor() for y in (out if isinstance(out, tuple) else (out,))]

    expected = op(full, 0)
    for found in world(4).run(body):
        for y, wanted in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
            assert torch.allclose(y, wanted, equal_nan=True)


@pytest.mark.parametrize("op", EXTREMES, ids=lambda op: op.__name__)
@world(3)
def test_a_running_extreme_stays_nan_behind_the_last_nan(op: Callable[[Any, int], Any]) -> None:
    full = torch.tensor([1.0, 3, NAN, 5, 7, NAN, -INF, INF, 2])
    out = op(distribute_tensor(full, Mesh((3,)), [Shard(0, [2, 3, 4])]), 0)
    assert torch.equal(as_dtensor(out.values).full_tensor().isnan(), op(full, 0).values.isnan())
    assert torch.equal(as_dtensor(out.indices).full_tensor(), op(full, 0).indices)


@pytest.mark.parametrize(
    ("op", "numbers"), [(torch.cumsum, 8), (torch.cumprod, 8), (torch.logcumsumexp, 8), (torch.cummax, 16)]
)
def test_a_scan_takes_one_exchange_of_a_total_a_line(op: Callable[[Any, int], Any], numbers: int) -> None:
    def first(x: Any) -> Any:
        out = op(x, 0)
        return out[0] if isinstance(out, tuple) else out

    assert sent(Mesh((4,)), first, (torch.ones(100, 8).double(), Shard(0))) == [((Shard(0),), 1, 3 * 8 * numbers)] * 4


@pytest.mark.parametrize("sizes", [[3, 1], [2, 2], [1, 3]])
@world(2)
def test_what_stands_beside_an_infinity_keeps_the_gradient_that_torch_gives(sizes: list[int]) -> None:
    x = torch.tensor([0.5, INF, 1.0, -1.0], dtype=torch.float64)
    plain, mine = x.clone().requires_grad_(), distribute_tensor(x, Mesh((2,)), [Shard(0, sizes)]).requires_grad_()
    for leaf in (plain, mine):
        leaf.logcumsumexp(0).sum().backward()
    assert_close(as_dtensor(mine.grad).full_tensor(), plain.grad, equal_nan=True)
