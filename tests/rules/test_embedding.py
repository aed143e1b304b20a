"""Sharded lookups give what one process gives: values, dense and sparse gradients, for every layout."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import collectives
from shardwise.errors import IdError, IdTypeError
from shardwise.mesh import Mesh
from shardwise.movement import move
from shardwise.placement import OnRanks, Placement, Replicate, Shard
from shardwise.tensor import DTensor, distribute_tensor
from shardwise.testing import world
from shardwise.testing.truth import as_dtensor

R, S0, S1 = Replicate(), Shard(0), Shard(1)
WEIGHTS: list[Placement] = [R, S0, S1, Shard(0, [1, 6, 0]), Shard(1, [0, 4, 1]), OnRanks(1)]
IDS: list[Placement] = [R, S0, Shard(0, [3, 0, 2])]


def table(rows: int = 7, cols: int = 5) -> Tensor:
    return torch.arange(rows * cols, dtype=torch.float64).view(rows, cols).sin()


def weight_of(full: Tensor, mesh: Mesh, placements: list[Placement]) -> DTensor:
    return distribute_tensor(full, mesh, placements).requires_grad_()  # type: ignore[return-value]


def gradient(weight: DTensor) -> Tensor:
    """The whole gradient, dense, after checking that each rank's is no larger than its shard."""
    grad = weight.grad
    assert grad is not None
    local = grad.to_local()
    if local.is_sparse:
        local = local.to_dense()
    assert tuple(local.shape) == weight._layout.local_shape(collectives.rank())
    whole = grad._layout.replace([R] * grad._layout.mesh.ndim)
    return move(local, grad._layout, whole)


def one_process(ids: Tensor, full: Tensor, op: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    weight = full.clone().requires_grad_()
    out = op(ids, weight, **kwargs)
    (out * torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos()).sum().backward()
    assert weight.grad is not None
    return out.detach(), weight.grad.to_dense() if weight.grad.is_sparse else weight.grad


def sharded(ids: DTensor, weight: DTensor, op: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out = op(ids, weight, **kwargs)
    factor = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos()
    (out * factor).sum().backward()
    return out.detach().full_tensor(), gradient(weight)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("op", ["embedding", "sum", "mean"])
@pytest.mark.parametrize(("weight", "ids"), list(product(WEIGHTS, IDS)), ids=str)
def test_any_table_and_any_ids_equal_one_process(weight: Placement, ids: Placement, op: str, sparse: bool) -> None:
    full, numbers = table(), torch.tensor([[3, 3, 0], [6, 1, 3], [0, 0, 0], [5, 2, 1], [3, 6, 6]])
    call: Any = F.embedding if op == "embedding" else F.embedding_bag
    kwargs: dict[str, Any] = {"sparse": sparse} | ({} if op == "embedding" else {"mode": op})
    expected = one_process(numbers, full, call, **kwargs)

    def body() -> tuple[Tensor, Tensor]:
        mesh = Mesh((3,))
        return sharded(distribute_tensor(numbers, mesh, [ids]), weight_of(full, mesh, [weight]), call, **kwargs)

    for out, grad in world(3).run(body):
        torch.testing.assert_close(out, expected[0])
        torch.testing.assert_close(grad, expected[1])


GRID: list[tuple[list[Placement], list[Placement]]] = [
    ([S0, S1], [R, R]),
    ([S0, S1], [S0, R]),
    ([S0, S1], [R, S0]),
    ([S0, S1], [S0, S0]),
    ([S0, S0], [S0, S0]),
    ([S1, S1], [S0, S0]),
    ([R, S0], [S0, R]),
    ([R, S0], [S0, S0]),
    ([R, S1], [S0, S0]),
    ([OnRanks(1), S0], [R, S0]),
    ([OnRanks(0), S1], [S0, S0]),
    ([S0, OnRanks(1)], [S0, R]),
    ([R, OnRanks(0)], [S0, S0]),
    ([S1, R], [S0, S0]),
]


@pytest.mark.parametrize("op", ["embedding", "mean"])
@pytest.mark.parametrize(("weight", "ids"), GRID, ids=str)
def test_grids_equal_one_process(weight: list[Placement], ids: list[Placement], op: str) -> None:
    full, numbers = table(), torch.tensor([[3, 3, 0], [6, 1, 3], [0, 0, 0], [5, 2, 1], [3, 6, 6]])
    call: Any = F.embedding if op == "embedding" else F.embedding_bag
    kwargs: dict[str, Any] = {} if op == "embedding" else {"mode": op}
    expected = one_process(numbers, full, call, **kwargs)

    def body() -> tuple[Tensor, Tensor]:
        mesh = Mesh((2, 2))
        return sharded(distribute_tensor(numbers, mesh, ids), weight_of(full, mesh, weight), call, **kwargs)

    for out, grad in world(4).run(body):
        torch.testing.assert_close(out, expected[0])
        torch.testing.assert_close(grad, expected[1])


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_ragged_bags_of_every_rank_equal_one_process(weight: Placement, mode: str) -> None:
    """Every rank has its own bags, empty ones too; rank 1 has none at all."""
    full = table()
    bags = [[[3, 3, 0], [], [6]], [], [[1, 5, 6, 2], []]]
    flat = torch.tensor([i for rank in bags for bag in rank for i in bag])
    starts = torch.tensor([0, 3, 3, 4, 8])
    expected = one_process(flat, full, F.embedding_bag, offsets=starts, mode=mode)

    def body() -> tuple[Tensor, Tensor]:
        mesh, mine = Mesh((3,)), bags[collectives.rank()]
        ids = DTensor.from_local(torch.tensor([i for bag in mine for i in bag], dtype=torch.int64), mesh, [S0])
        param = weight_of(full, mesh, [weight])
        out = F.embedding_bag(ids, param, distribute_tensor(starts, mesh, [Shard(0, [3, 0, 2])]), mode=mode)
        local = as_dtensor(out).to_local()
        before = sum(len(bags[r]) for r in range(collectives.rank()))
        factor = torch.arange(25, dtype=out.dtype).view(5, 5).cos()[before : before + len(mine)]
        DTensor.from_local(local * factor, mesh, [Shard(0, [3, 0, 2])]).sum().backward()
        return local.detach(), gradient(param)

    results = world(3).run(body)
    torch.testing.assert_close(torch.cat([out for out, _ in results]), expected[0])
    for _, grad in results:
        torch.testing.assert_close(grad, expected[1])


@pytest.mark.parametrize("bad", [99, -1, 7, 2**40])
@pytest.mark.parametrize(("weight", "ids"), list(product(WEIGHTS, IDS)), ids=str)
def test_an_id_outside_the_table_is_the_same_error_on_every_rank(weight: Placement, ids: Placement, bad: int) -> None:
    numbers = torch.tensor([[3, 3, 0], [6, 1, 3], [0, 0, 0], [5, 2, bad], [bad, 6, 6]])

    def body() -> tuple[str, int]:
        mesh = Mesh((3,))
        param = weight_of(table(), mesh, [weight])
        param._name = "items.weight"
        numbers_here = distribute_tensor(numbers, mesh, [ids])
        with pytest.raises(IdError) as caught:
            F.embedding(numbers_here, param)
        with pytest.raises(IndexError):
            F.embedding_bag(numbers_here, param)
        return str(caught.value), collectives.all_reduce(torch.ones(()), "sum", (0, 1, 2)).int().item()  # type: ignore[return-value]

    results = world(3).run(body)
    assert len(set(results)) == 1
    text, alive = results[0]
    assert text.startswith(f"items.weight: id {bad} at position (3, 2) of the ids")
    assert text.endswith("is not in the table, whose valid ids are 0 to 6. Nothing was looked up.")
    assert alive == 3


def test_ids_of_the_wrong_kind_are_refused() -> None:
    def body() -> None:
        mesh = Mesh((2,))
        param = weight_of(table(), mesh, [S0])
        with pytest.raises(IdTypeError, match=r"int32 or int64, got torch.float32. Fix: ids.long\(\)"):
            F.embedding(distribute_tensor(torch.ones(3), mesh, [S0]), param)
        with pytest.raises(IdTypeError, match="1 or 2 dims, got shape"):
            F.embedding_bag(distribute_tensor(torch.ones(3, 1, 1).long(), mesh, [S0]), param)

    world(2).run(body)


@world(2)
def test_float_ids_are_refused_even_after_ids_of_the_same_layout() -> None:
    """The choice of how to look up is kept under layouts, which have no dtype."""
    param = weight_of(table(), Mesh((2,)), [S0])
    F.embedding(distribute_tensor(torch.tensor([1, 2]), Mesh((2,)), [S0]), param)
    with pytest.raises(IdTypeError, match=r"int32 or int64, got torch.float32"):
        F.embedding(distribute_tensor(torch.tensor([1.0, 2.0]), Mesh((2,)), [S0]), param)


def test_bags_that_straddle_ranks_are_the_same_error_on_every_rank() -> None:
    flat, starts = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3])

    def body() -> str:
        mesh = Mesh((2,))
        ids = distribute_tensor(flat, mesh, [S0])  # rank 0 holds two of the first bag's three ids
        with pytest.raises(ValueError, match="between the same bags") as caught:
            F.embedding_bag(ids, weight_of(table(), mesh, [S0]), distribute_tensor(starts, mesh, [S0]))
        return str(caught.value)

    assert len(set(world(2).run(body))) == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_table_smaller_than_the_world_and_no_ids_at_all(dtype: torch.dtype) -> None:
    """Five rows on seven ranks: two ranks hold nothing (they used to hang their peers)."""
    full, numbers = table(5, 3), torch.tensor([4, 0, 4, 2], dtype=dtype)
    expected = one_process(numbers, full, F.embedding)

    def body() -> tuple[Tensor, Tensor]:
        mesh = Mesh((7,))
        out, grad = sharded(distribute_tensor(numbers, mesh, [S0]), weight_of(full, mesh, [S0]), F.embedding)
        nothing = F.embedding(distribute_tensor(numbers[:0], mesh, [S0]), weight_of(full, mesh, [S0]))
        assert nothing.shape == (0, 3)
        return out, grad

    for out, grad in world(7).run(body):
        torch.testing.assert_close(out, expected[0])
        torch.testing.assert_close(grad, expected[1])


def test_two_pending_lookups_in_one_table_are_independent_and_can_be_read_twice() -> None:
    full = table()
    first, second = torch.tensor([1, 5]), torch.tensor([6, 0])

    def body() -> None:
        mesh = Mesh((3,))
        param = weight_of(full, mesh, [S0])
        a, b = (as_dtensor(F.embedding(distribute_tensor(ids, mesh, [R]), param)) for ids in (first, second))
        assert a.placements[0].is_partial()
        for _ in range(2):
            torch.testing.assert_close(b.full_tensor(), full[second])
            torch.testing.assert_close(a.full_tensor(), full[first])

    world(3).run(body)


def test_a_lookup_with_cut_ids_takes_two_collectives_and_gathers_nothing() -> None:
    full, numbers = table(64, 8), torch.arange(48).view(24, 2) % 16  # every rank asks for repeated ids

    def body() -> tuple[dict[str, int], int]:
        mesh = Mesh((4,))
        param, ids = weight_of(full, mesh, [S0]), distribute_tensor(numbers, mesh, [S0])
        with collectives.count_comms() as forward:
            out = F.embedding_bag(ids, param, mode="sum")
        with collectives.count_comms() as backward:
            out.sum().backward()
            assert param.grad is not None
        assert backward.calls == {"all_to_all": 1}
        return forward.calls, forward.total_bytes

    for calls, sent in world(4).run(body):
        assert calls == {"all_to_all": 2}
        assert sent < full.numel() * full.element_size()  # less than the table that a gather would send
