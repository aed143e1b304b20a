"""What users of other systems suffered from: each test is a report that must stay solved here."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import DTensor, Mesh, OnRanks, Replicate, Shard, collectives, distribute_tensor, shard_module
from shardwise.errors import IdError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@world(4)
def test_one_dim_sharded_by_both_axes_of_a_mesh_loses_no_row() -> None:
    """W6: (5, 3) cut twice on a 2 x 2 mesh; the last row was lost and a zero row inserted."""
    full = torch.arange(15.0).view(5, 3)
    x = distribute_tensor(full, Mesh((2, 2)), [S0, S0])
    assert torch.equal(x.full_tensor(), full)


@world(4)
def test_from_local_keeps_the_columns_of_uneven_shards() -> None:
    """W7: parts of 2, 3, 4, 5 columns with the global shape given; columns were dropped, zeros inserted."""
    full = torch.arange(28.0).view(2, 14)
    part = full.split([2, 3, 4, 5], 1)[collectives.rank()]
    x = DTensor.from_local(part, Mesh((4,)), [S1], shape=(2, 14), run_check=True)
    assert torch.equal(x.full_tensor(), full)


@world(4)
def test_from_local_finds_the_global_shape_of_uneven_shards() -> None:
    """W8: r + 1 rows on rank r and no shape given; every rank believed in another global shape."""
    full = torch.arange(20.0).view(10, 2)
    part = full.split([1, 2, 3, 4])[collectives.rank()]
    x = DTensor.from_local(part, Mesh((4,)), [S0])
    assert x.shape == (10, 2)
    assert torch.equal(x.full_tensor(), full)


@pytest.mark.parametrize("bad", [99, -1])
def test_ids_outside_a_row_wise_table_raise(bad: int) -> None:
    """W10: they gave zeros and no error."""

    def body() -> str:
        mesh = Mesh((4,))
        table = distribute_tensor(torch.randn(8, 4), mesh, [S0])
        with pytest.raises(IdError) as caught:
            F.embedding(DTensor.from_local(torch.tensor([1, bad]), mesh, [R]), table)
        return str(caught.value)

    assert len(set(world(4).run(body))) == 1


@world(4)
def test_redistribute_to_another_mesh_moves_the_data() -> None:
    """W11: the tensor silently stayed on its mesh."""
    full = torch.arange(10.0)
    x = distribute_tensor(full, Mesh((4,)), [S0])
    other = Mesh((4,), (3, 2, 1, 0))
    y = x.redistribute(other, [S0])
    assert y.device_mesh == other
    sizes = (1, 3, 3, 3)  # rank 3 now holds the first piece
    first = 10 - sum(sizes[: collectives.rank() + 1])
    assert torch.equal(y.to_local(), full[first : first + sizes[collectives.rank()]])


@world(4)
def test_a_row_wise_lookup_works_if_some_ranks_hold_no_row() -> None:
    """H2, L2: 5 rows on 4 ranks; one rank raised and the others waited for ever."""
    full, ids = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    mesh = Mesh((4,))
    table = distribute_tensor(full, mesh, [S0])
    rows = as_dtensor(F.embedding(distribute_tensor(ids, mesh, [R]), table))
    torch.testing.assert_close(rows.full_tensor(), full)
    bags = as_dtensor(F.embedding_bag(distribute_tensor(ids.view(1, 5), mesh, [R]), table, mode="sum"))
    torch.testing.assert_close(bags.full_tensor(), full.sum(0, keepdim=True))


@world(2)
def test_a_pending_lookup_can_be_read_again_and_again() -> None:
    """E1: the second read raised, because the mask was gone."""
    mesh = Mesh((2,))
    table = distribute_tensor(torch.eye(4), mesh, [S0])
    out = as_dtensor(F.embedding(distribute_tensor(torch.tensor([3, 0]), mesh, [R]), table))
    assert torch.equal(out.full_tensor(), torch.eye(4)[[3, 0]])
    assert torch.equal(out.full_tensor(), torch.eye(4)[[3, 0]])


@world(2)
def test_two_pending_lookups_do_not_disturb_each_other() -> None:
    """E2: 'MaskBuffer has been materialized with conflicting data'."""
    mesh = Mesh((2,))
    table = distribute_tensor(torch.eye(4), mesh, [S0])
    a = F.embedding(distribute_tensor(torch.tensor([3]), mesh, [R]), table)
    b = F.embedding(distribute_tensor(torch.tensor([1]), mesh, [R]), table)
    assert torch.equal(as_dtensor(a + b).full_tensor(), torch.tensor([[0.0, 1.0, 0.0, 1.0]]))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_gradients_of_distributed_and_plain_parameters_are_clipped_together(norm_type: float) -> None:
    """E10: 'got mixed torch.Tensor and DTensor'."""
    values = [torch.randn(5, 3), torch.randn(4), torch.randn(2, 2), torch.randn(3)]
    reference = [nn.Parameter(v.clone()) for v in values]
    sum((p**2).sum() for p in reference).backward()  # type: ignore[union-attr]
    expected = nn.utils.clip_grad_norm_(reference, 0.5, norm_type)

    def body() -> None:
        mesh = Mesh((3,))
        placed = zip(values, [S0, R, OnRanks(1), None], strict=True)
        mine = [nn.Parameter(v.clone() if p is None else distribute_tensor(v, mesh, [p])) for v, p in placed]
        for p in mine:
            (p**2).sum().backward()
        norm = nn.utils.clip_grad_norm_(mine, 0.5, norm_type)
        torch.testing.assert_close(torch.as_tensor(float(norm)), expected)
        for p, e in zip(mine, reference, strict=True):
            assert p.grad is not None
            assert e.grad is not None
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            torch.testing.assert_close(grad, e.grad)

    world(3).run(body)


@world(4)
def test_the_gradient_of_a_row_wise_table_is_as_large_as_the_shard() -> None:
    """M1: every rank had the gradient of the whole table."""
    module = shard_module(nn.Embedding(1000, 8), {"weight": S0})
    module(distribute_tensor(torch.arange(7), Mesh((4,)), [R])).sum().backward()
    grad = module.weight.grad
    assert isinstance(grad, DTensor)
    assert grad.placements == (S0,)
    assert grad.to_local().shape == (250, 8)
    assert grad.to_local().untyped_storage().nbytes() == 250 * 8 * 4
