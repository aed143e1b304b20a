"""Sharded lookups: errors, offsets, norms, small tables. tests/lookups/test_contract.py has every option."""

from functools import partial
from itertools import chain, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import rank
from shardwise._layout import Boxes, Mesh, OnRanks, Partial, Placement, Replicate, Shard
from shardwise._redistribute.run_plan import redistribute_local
from shardwise._tensor import DTensor, distribute_tensor
from shardwise.embedding import from_lengths
from shardwise.errors import IdError, IdTypeError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import calls
from tests.tensor.test_conversion import same_error

R, S0, S1 = Replicate(), Shard(0), Shard(1)
WEIGHTS: list[Placement] = [R, S0, S1, Shard(0, [1, 6, 0]), Shard(1, [0, 4, 1]), OnRanks(1)]
IDS: list[Placement] = [R, S0, Shard(0, [3, 0, 2])]
NUMBERS = torch.tensor([[3, 3, 0], [6, 1, 3], [0, 0, 0], [5, 2, 1], [3, 6, 6]])
aten: Any = torch.ops.aten


def table(rows: int = 7, cols: int = 5) -> Tensor:
    return torch.arange(rows * cols, dtype=torch.float64).view(rows, cols).sin()


SAMPLES = [
    *calls(torch.embedding, (table(), NUMBERS), (table(), NUMBERS, 3, True)),
    *calls(torch.embedding_renorm_, (table(), NUMBERS, 0.8, 2.0), gradients=False),
    *calls(aten.embedding.default, (table(), NUMBERS[:, 0], 0), gradients=False),
    *calls(aten.embedding_renorm_.default, (table(), NUMBERS[1], 0.5, 1.0), gradients=False),
    *calls(F.embedding, (NUMBERS[0], table(), 3, {"scale_grad_by_freq": True})),
    *calls(F.embedding_bag, (NUMBERS, table(), {"mode": "max"}),
           (NUMBERS, table(), None, {"mode": "sum", "per_sample_weights": table()[:5, :3]})),
    *(sample for op, rest in ((aten.embedding_dense_backward.default, ()), (aten.embedding_backward.default, (False,)))
      for sample in calls(op, *((torch.arange(60, dtype=torch.float64).view(5, 3, 4).sin(), NUMBERS, 7, *options, *rest)
                                for options in ((-1, False), (3, True))), gradients=False)),
]  # fmt: skip


def weight_of(full: Tensor, mesh: Mesh, placements: list[Placement]) -> DTensor:
    return distribute_tensor(full, mesh, placements).requires_grad_()


def gradient(weight: DTensor) -> Tensor:
    """The full gradient, dense, after checking that each rank's is no larger than its shard."""
    grad = weight.grad
    assert grad is not None
    local = grad.to_local()
    if local.is_sparse:
        local = local.to_dense()
    assert tuple(local.shape) == weight._layout.local_shape(collectives.rank())
    full_value = grad._layout.replace([R] * grad._layout.mesh.ndim)
    return redistribute_local(local, grad._layout, full_value)


@pytest.mark.parametrize(("weight", "ids"), list(product(WEIGHTS, IDS)), ids=str)
def test_a_bad_id_or_padding_is_the_same_error_on_every_rank_and_changes_no_table(
    weight: Placement, ids: Placement
) -> None:
    lookups = [f for op in (F.embedding, F.embedding_bag) for f in (op, partial(op, max_norm=0.1))]

    def body() -> list[str]:
        mesh, texts = Mesh((3,)), []
        param = weight_of(table(), mesh, [weight])
        param._name = "items.weight"
        for bad, lookup in product((99, -1, 7, 2**40), lookups):
            numbers = torch.tensor([[3, 3, 0], [6, 1, 3], [0, 0, 0], [5, 2, bad], [bad, 6, 6]])
            with pytest.raises(IdError) as caught:
                lookup(distribute_tensor(numbers, mesh, [ids]), param)
            texts.append(str(caught.value))
        for lookup in lookups[::2]:
            with pytest.raises(IdError, match="padding_idx -8 is not one of its 7 rows"):
                lookup(distribute_tensor(NUMBERS, mesh, [ids]), param, padding_idx=-8)
        torch.testing.assert_close(as_dtensor(param.detach()).full_tensor(), table())
        return texts

    found = world(3).run(body)
    assert found[0] == found[1] == found[2]
    fix = "Nothing was looked up. Fix: correct the id, or give the table more rows."
    for text, (bad, _) in zip(found[0], product((99, -1, 7, 2**40), lookups), strict=True):
        assert text.startswith(f"items.weight: id {bad} at position (3, 2) of the ids")
        assert text.endswith(f"is not in the table, whose valid ids are 0 to 6. {fix}")


@world(2)
def test_float_ids_are_refused_even_after_ids_of_the_same_layout() -> None:
    """The choice of how to look up is kept under layouts, which have no dtype."""
    param = weight_of(table(), Mesh((2,)), [S0])
    F.embedding(distribute_tensor(torch.tensor([1, 2]), Mesh((2,)), [S0]), param)
    with pytest.raises(IdTypeError, match=r"int32 or int64, got torch.float32"):
        F.embedding(distribute_tensor(torch.tensor([1.0, 2.0]), Mesh((2,)), [S0]), param)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}], ids=str)
@pytest.mark.parametrize("starts", [[1, 3], [0, 5], [0, 3, 2, 4], [0, 2, 1, 4], [0, 3, 1]], ids=str)
def test_offsets_that_describe_no_bags_are_the_same_error_on_every_rank(
    starts: list[int], options: dict[str, Any]
) -> None:
    def body() -> None:
        ids, offsets = (distribute_tensor(torch.tensor(x), Mesh((2,)), [S0]) for x in ([1, 2, 3, 4], starts))
        F.embedding_bag(ids, weight_of(table(), Mesh((2,)), [S0]), offsets, **options)

    assert "the offsets describe no bags of the ids: they must rise from 0" in same_error(2, ValueError, body)


BAGS_BY_RANK = [[[1, 2], [3]], [[4], [], [0, 5]]]


def of_this_rank(values: list[list[int]]) -> DTensor:
    return DTensor.from_local(torch.tensor(values[rank()], dtype=torch.int64), Mesh((2,)), [S0])


@pytest.mark.parametrize("offsets", [[[0, 2], [0, 1, 1]], [[0, 1], [0]], [[0, 2, 2], [0, 0, 0]]], ids=str)
def test_offsets_that_start_at_0_on_each_rank_are_an_error_that_names_from_lengths(offsets: list[list[int]]) -> None:
    def body() -> None:
        ids = of_this_rank([list(chain(*bags)) for bags in BAGS_BY_RANK])
        F.embedding_bag(ids, weight_of(table(), Mesh((2,)), [S0]), of_this_rank(offsets))

    text = same_error(2, ValueError, body)
    assert "the offsets start at 0 on each rank, but they are global" in text
    assert "Fix: shardwise.embedding.from_lengths(lengths)" in text


def test_bags_of_each_rank_are_looked_up_with_offsets_from_lengths() -> None:
    bags = [bag for of_rank in BAGS_BY_RANK for bag in of_rank]

    def body() -> Tensor:
        ids = of_this_rank([list(chain(*of_rank)) for of_rank in BAGS_BY_RANK])
        offsets = from_lengths(of_this_rank([[len(bag) for bag in of_rank] for of_rank in BAGS_BY_RANK]))
        out = F.embedding_bag(ids, weight_of(table(), Mesh((2,)), [S0]), offsets, mode="sum")
        assert isinstance(out, DTensor)
        return out.detach().full_tensor()

    expected = torch.stack([table()[torch.tensor(bag, dtype=torch.int64)].sum(0) for bag in bags])
    for found in world(2).run(body):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@world(7)
def test_a_table_smaller_than_the_world_and_no_ids_at_all(dtype: torch.dtype) -> None:
    """Five rows on seven ranks: two ranks hold nothing (they used to hang their peers)."""
    full, numbers = table(5, 3), torch.tensor([4, 0, 4, 2], dtype=dtype)
    plain = full.clone().requires_grad_()
    want = F.embedding(numbers, plain)
    want.square().sum().backward()
    mesh = Mesh((7,))
    weight = weight_of(full, mesh, [S0])
    out = as_dtensor(F.embedding(distribute_tensor(numbers, mesh, [S0]), weight))
    out.square().sum().backward()
    torch.testing.assert_close(out.full_tensor(), want)
    torch.testing.assert_close(gradient(weight), plain.grad)
    assert F.embedding(distribute_tensor(numbers[:0], mesh, [S0]), weight).shape == (0, 3)


@pytest.mark.parametrize("numbers", [[1, 0, 1], [4, 6], []])
@pytest.mark.parametrize("ids", [R, S0], ids=str)
@pytest.mark.parametrize("rows", [S0, Shard(0, (0, 7)), R], ids=str)
def test_a_lookup_is_differentiated_twice_also_where_a_rank_looks_up_no_row(
    rows: Placement, ids: Placement, numbers: list[int]
) -> None:
    at = torch.tensor(numbers, dtype=torch.int64)

    def gradient_of_penalty(weight: Any, at: Any) -> Any:
        slope: Any
        (slope,) = torch.autograd.grad(F.embedding(at, weight).sin().sum(), weight, create_graph=True)
        (weight.sum() + slope.square().sum()).backward()
        return weight.grad

    @world(2)
    def body() -> None:
        weight, found = weight_of(table(), Mesh((2,)), [rows]), distribute_tensor(at, Mesh((2,)), [ids])
        torch.testing.assert_close(gradient_of_penalty(weight, found).full_tensor(), expected)

    plain = table().requires_grad_()
    expected = gradient_of_penalty(plain, at) if numbers else torch.ones_like(plain)  # which torch raises for
    body()


@world(3)
def test_two_pending_lookups_in_one_table_are_independent_and_can_be_read_twice() -> None:
    full = table()
    first, second = torch.tensor([1, 5]), torch.tensor([6, 0])
    mesh = Mesh((3,))
    param = weight_of(full, mesh, [S0])
    a, b = (as_dtensor(F.embedding(distribute_tensor(ids, mesh, [R]), param)) for ids in (first, second))
    assert a.placements[0].is_partial()
    for _ in range(2):
        torch.testing.assert_close(b.full_tensor(), full[second])
        torch.testing.assert_close(a.full_tensor(), full[first])


@pytest.mark.parametrize("op", [F.embedding, F.embedding_bag], ids=lambda op: op.__name__)
@pytest.mark.parametrize("placement", [Boxes([[((0, 0), (2, 5))], [((2, 0), (5, 5))]]), Partial()], ids=str)
@world(2)
def test_a_table_that_cannot_change_where_it_is_is_renormalized_as_a_whole(op: Any, placement: Placement) -> None:
    full_value = table()
    want = op(NUMBERS, full_value, max_norm=1.0)
    param = distribute_tensor(table(), Mesh((2,)), [placement])
    got = op(distribute_tensor(NUMBERS, Mesh((2,)), [S0]), param, max_norm=1.0)
    torch.testing.assert_close(as_dtensor(got).full_tensor(), want)
    torch.testing.assert_close(as_dtensor(param).full_tensor(), full_value)


@world(2)
def test_a_mode_that_torch_lacks_is_refused() -> None:
    param, ids = weight_of(table(), Mesh((2,)), [S0]), distribute_tensor(NUMBERS, Mesh((2,)), [S0])
    with pytest.raises(ValueError, match="one of sum, mean or max"):
        F.embedding_bag(ids, param, mode="min")


@world(2)
def test_a_table_that_backward_still_needs_is_not_renormalized_behind_its_back() -> None:
    param, ids = weight_of(table() + 2, Mesh((2,)), [S0]), distribute_tensor(NUMBERS, Mesh((2,)), [S0])
    squares = param.square().sum()
    F.embedding(ids, param, max_norm=0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@world(3)
def test_a_rank_without_ids_refuses_a_table_with_other_dims_as_the_others_do() -> None:
    ids = distribute_tensor(torch.tensor([1, 0]), Mesh((3,)), [Shard(0)])
    with pytest.raises(RuntimeError, match="'weight' must be 2-D"):
        F.embedding(ids, torch.ones(2, 2, 3))
