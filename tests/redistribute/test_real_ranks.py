"""Moves on processes: that dtypes and groups get through torch.distributed, which simulated ranks do not show."""

from itertools import product

import pytest
import torch

from shardwise import collectives
from shardwise.layout import Boxes, Layout, Mesh, Partial, Placement, Replicate, Shard
from shardwise.redistribute.plan import plan_redistribute
from shardwise.redistribute.run_plan import redistribute_local
from shardwise.testing import world
from shardwise.testing.local_shards import local_tensor
from tests.redistribute.one_process import Case, assert_gradient, assert_value, on_this_rank

pytestmark = pytest.mark.processes

SHAPE = (5, 3)
ROWS = Boxes([[((3, 0), (2, 3)), ((0, 0), (1, 3))], [((1, 0), (2, 3))]])
DTYPES = ["float32", "bfloat16", "float16", "int16", "int32", "int64", "uint8", "bool", "complex64", "complex128"]


def moves_bit_by_bit(dtype_name: str) -> bool:
    full = torch.arange(15).view(SHAPE).to(getattr(torch, dtype_name))
    kinds: list[Placement] = [Shard(0), Shard(1, [0, 3]), Replicate(), ROWS]
    found = [Layout(Mesh((2,)), [kind], SHAPE) for kind in kinds]
    rank = collectives.rank()
    moves = [
        (redistribute_local(local_tensor(full, src, rank), src, dst), dst) for src, dst in product(found, repeat=2)
    ]
    return all(torch.equal(out, local_tensor(full, dst, rank)) for out, dst in moves)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_travels_between_processes(dtype: str) -> None:
    assert world(2, real=True).run(moves_bit_by_bit, dtype) == [True, True]


@pytest.mark.parametrize("mesh", [Mesh((2,)), Mesh((2,), (1, 0)), Mesh((2,), (2, 0))], ids=str)
def test_moves_between_processes_equal_one_process(mesh: Mesh) -> None:
    """Also for some of the processes only, which have no process group of their own, and in another order."""
    kinds: list[Placement] = [Shard(0), Replicate(), Partial(), Partial("max"), ROWS]
    for src, dst in product(kinds, repeat=2):
        assert_right_on_processes(Case(Layout(mesh, [src], SHAPE), Layout(mesh, [dst], SHAPE)))


def test_a_large_sum_is_all_reduced_between_processes() -> None:
    mesh, shape = Mesh((3,), (2, 0, 1)), (5, 10_000)
    case = Case(Layout(mesh, [Partial()], shape), Layout(mesh, [Replicate()], shape))
    assert plan_redistribute(case.src, case.dst).collectives == ("all_reduce",)
    assert_right_on_processes(case)


def assert_right_on_processes(case: Case) -> None:
    outcomes = world(case.world_size, real=True).run(on_this_rank, case)
    assert_value(case, [outcome.out for outcome in outcomes])
    assert_gradient(case, [outcome.grad for outcome in outcomes])
