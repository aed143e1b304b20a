"""Bags of rows without columns, as of empty column shards: torch's CUDA kernels read invalid memory there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import DTensor, Mesh, Replicate, Shard, distribute_tensor
from shardwise._layout import Placement
from shardwise._lookups.ids import pool
from shardwise.testing import world

aten = torch.ops.aten
KERNELS = {aten._embedding_bag.default, aten._embedding_bag_forward_only.default}
FULL = torch.arange(35.0, dtype=torch.float64).view(7, 5)
IDS, OFFSETS = torch.tensor([3, 0, 6, 3, 1, 2]), torch.tensor([0, 2, 2, 5])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(("offsets", "last"), [(OFFSETS, False), (OFFSETS, True), (None, False)])
def test_results_and_gradients_are_those_of_torch(mode: str, offsets: Tensor | None, last: bool) -> None:
    ids = IDS.view(2, 3) if offsets is None else IDS
    seen = []
    for function in (F.embedding_bag, pool):
        rows = torch.zeros(7, 0, dtype=torch.float64, requires_grad=True)  # of float32 torch refuses them
        out = function(ids, rows, offsets, mode=mode, include_last_offset=last)
        out.sum().backward()
        seen.append((out, rows.grad))
    torch.testing.assert_close(seen[1], seen[0])


@pytest.mark.parametrize("num_ids", [0, 6])
def test_weights_have_gradients_of_zeros(num_ids: int) -> None:
    rows, weights = torch.zeros(7, 0, requires_grad=True), torch.ones(num_ids, requires_grad=True)
    pool(IDS[:num_ids], rows, OFFSETS.clamp(max=num_ids), "sum", weights).sum().backward()
    assert rows.grad is not None
    assert weights.grad is not None
    assert torch.equal(weights.grad, torch.zeros(num_ids))


def test_a_sparse_gradient_stays_sparse() -> None:
    rows = torch.zeros(7, 0, requires_grad=True)
    pool(IDS, rows, OFFSETS, "sum", sparse=True).sum().backward()
    assert rows.grad is not None
    assert rows.grad.is_sparse


class RefuseEmptyColumns(TorchDispatchMode):
    """A GPU."""

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KERNELS:
            assert args[0].shape[1], "an illegal memory access"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options", [{}, {"mode": "max"}, {"padding_idx": 3}, {"mode": "sum", "weighted": True}, {"mode": "sum"}], ids=str
)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "placements",
    [[Shard(1), Shard(1)], [Shard(0), Shard(1, [5, 0])], [Shard(0), Shard(1, [0, 5])], [Shard(1), Shard(0, [0, 7])]],
    ids=str,
)
def test_no_kernel_gets_rows_without_columns(
    placements: list[Placement], sharded: bool, options: dict[str, Any]
) -> None:
    """Of plain ids in bags at offsets, and of sharded ones in rows."""
    ids, offsets = (IDS.view(2, 3), None) if sharded else (IDS, OFFSETS)
    options = dict(options)
    if options.pop("weighted", False):
        options["per_sample_weights"] = torch.linspace(-1, 1, 6, dtype=torch.float64).view(ids.shape)
    plain = FULL.clone().requires_grad_()
    expected = F.embedding_bag(ids, plain, offsets, **options)
    expected.square().sum().backward()

    @world(4)
    def on_ranks() -> None:
        table = distribute_tensor(FULL, Mesh((2, 2)), placements).requires_grad_()
        mine = distribute_tensor(ids, Mesh((2, 2)), [Shard(0), Replicate()]) if sharded else ids
        with RefuseEmptyColumns():  # type: ignore[no-untyped-call]
            out = F.embedding_bag(mine, table, offsets, **options)
            out.square().sum().backward()
        assert isinstance(out, DTensor)
        torch.testing.assert_close(out.full_tensor(), expected)
        assert table.grad is not None
        torch.testing.assert_close(table.grad.full_tensor(), plain.grad)

    on_ranks()
