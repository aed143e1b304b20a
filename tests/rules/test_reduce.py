"""Reductions of sharded tensors equal one process."""

import pytest
import torch
from torch import Tensor

from shardwise import DTensor, Mesh, Partial, Replicate, Shard, collectives, count_comms, distribute_tensor
from shardwise.testing import world
from shardwise.testing.truth import MESHES, Sample, as_dtensor, assert_equals_one_process

GENERATOR = torch.Generator().manual_seed(2)
R, S0, S1 = Replicate(), Shard(0), Shard(1)
INF = float("inf")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def integers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape, generator=GENERATOR)


A = normal(5, 3)
SAMPLES = [
    Sample(torch.sum, (A,)),
    Sample(torch.sum, (A, 1)),
    Sample(torch.sum, (A, (0, -1), True)),
    Sample(Tensor.sum, (A,), {"axis": -1, "keepdims": True}),
    Sample(torch.sum, (A, ())),
    Sample(torch.sum, (normal(), 0)),
    Sample(torch.sum, (normal(0, 3), 1)),
    Sample(torch.sum, (normal(1, 3), 0)),
    Sample(torch.sum, (integers(5, 3), 1)),
    Sample(torch.sum, (integers(5, 3) > 0,)),
    Sample(torch.sum, (A.float(),), {"dtype": torch.float64}, tolerance=1e-5),
    Sample(torch.mean, (A,)),
    Sample(torch.mean, (A, 0, True)),
    Sample(torch.mean, (normal(2, 5, 3), (0, 2))),
    Sample(torch.mean, (A.float(),), {"dtype": torch.float64}, tolerance=1e-5),
    Sample(torch.mean, (normal(0, 3), 1)),
    Sample(torch.mean, (normal(0, 3), 0)),
    Sample(torch.mean, (normal(),)),
    Sample(torch.amax, (A, 1)),
    Sample(torch.amax, (normal(1, 3), 0)),
    Sample(torch.amin, (A, (0, 1))),
    Sample(torch.amin, (A, 0, True)),
    Sample(torch.amax, (integers(5, 3).to(torch.uint8), 0)),
    Sample(torch.amax, (integers(5, 3) > 0, 0)),
    Sample(torch.max, (A,)),
    Sample(torch.min, (A,)),
    Sample(torch.prod, (A,)),
    Sample(torch.prod, (A, 1)),
    Sample(torch.prod, (normal(0),)),
    Sample(torch.all, (A > -1, 1)),
    Sample(torch.all, (A > -1,)),
    Sample(torch.any, (A > 1,)),
    Sample(torch.any, (A > 1, 0, True)),
    *(Sample(torch.linalg.vector_norm, (A, order)) for order in (2, 1, 0, 3.5, 0.5, -1, INF, -INF)),
    Sample(torch.linalg.vector_norm, (A, 2, 1)),
    Sample(torch.linalg.vector_norm, (A, 2), {"keepdim": True}),
    Sample(Tensor.norm, (A,)),
    Sample(Tensor.std, (A,)),
    Sample(torch.logsumexp, (A, 1)),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_reductions_equal_one_process(sample: Sample) -> None:
    tally = assert_equals_one_process([sample], MESHES, limit=6)
    assert tally.cases > 20


@world(3)
def test_a_maximum_along_a_dim_gives_values_and_indices() -> None:
    values, indices = torch.max(distribute_tensor(A, Mesh((3,)), [S0]), 0)
    expected = A.max(0)
    assert torch.equal(as_dtensor(values).full_tensor(), expected.values)
    assert torch.equal(as_dtensor(indices).full_tensor(), expected.indices)


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "all"])
@pytest.mark.parametrize("dim", [2, -3, (0, 7)])
@world(2)
def test_a_dim_that_the_tensor_lacks_is_refused(name: str, dim: int | tuple[int, ...]) -> None:
    """Python's % would have made another dim of it."""
    for placement in (S0, S1, R):
        with pytest.raises(IndexError, match="Dimension out of range"):
            getattr(distribute_tensor(A > 0, Mesh((2,)), [placement]), name)(dim=dim)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@world(2)
def test_a_mean_whose_sum_does_not_fit_the_dtype_is_right(dtype: torch.dtype) -> None:
    x = distribute_tensor(torch.ones(200_000, dtype=dtype), Mesh((2,)), [S0])
    assert x.mean().item() == 1.0


@pytest.mark.parametrize("order", [2.0, 1.0, INF])
@world(3)
def test_the_gradient_of_the_norm_of_zeros_is_that_of_torch(order: float) -> None:
    plain = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    torch.linalg.vector_norm(plain, order).backward()
    x = distribute_tensor(torch.zeros(4, dtype=torch.float64), Mesh((3,)), [S0]).requires_grad_()
    torch.linalg.vector_norm(x, order).backward()
    assert plain.grad is not None
    assert not torch.isnan(as_dtensor(x.grad).full_tensor()).any()
    if order != INF:  # where all are largest, how they share is decided per shard
        assert torch.equal(as_dtensor(x.grad).full_tensor(), plain.grad)


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin"])
@world(4)
def test_a_tensor_cut_by_both_axes_is_reduced_without_a_gather(name: str) -> None:
    x = distribute_tensor(torch.ones(8, 8, dtype=torch.float64), Mesh((2, 2)), [S0, S1])
    with count_comms() as meter:
        out = as_dtensor(getattr(x, name)())
    assert all(p.is_partial() for p in out.placements)
    assert meter.total_calls == 0


@world(4)
def test_a_norm_takes_one_small_exchange() -> None:
    x = distribute_tensor(torch.ones(8, 8, dtype=torch.float64), Mesh((2, 2)), [S0, S1])
    with count_comms() as meter:
        x.norm()
    assert meter.total_calls == 1
    assert meter.total_bytes == 3 * 8


@world(3)
def test_the_mean_of_a_mean_of_unequal_shards_is_not_an_average_of_averages() -> None:
    part = torch.tensor([[1.0], [2.0], [9.0]])[: (3, 1, 0)[collectives.rank()]]
    x = DTensor.from_local(part, Mesh((3,)), [S0])
    assert as_dtensor(x.mean()).placements == (Partial(),)
    assert x.mean().item() == pytest.approx((1 + 2 + 9 + 1) / 4)


def test_a_maximum_of_nothing_is_the_same_error_on_every_rank() -> None:
    def body() -> str:
        with pytest.raises(RuntimeError, match="nothing to reduce") as caught:
            distribute_tensor(torch.ones(0, 3), Mesh((2,)), [S0]).amax(0)
        return str(caught.value)

    assert len(set(world(2).run(body))) == 1
