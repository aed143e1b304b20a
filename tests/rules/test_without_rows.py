"""Ops without rows of their own: their operands are gathered, or torch decomposes them, and every layout is right."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from shardwise import Mesh, Replicate, Shard, count_comms, distribute_tensor
from shardwise import _collectives as collectives
from shardwise._rules.registry import rule_of
from shardwise._tensor.dispatch.fallback import ReplicatedCall
from shardwise.testing import world
from tests.tensor.test_conversion import same_error
from tools.op_judge import Sample
from tools.rule_checks import assert_equals_one_process

GENERATOR = torch.Generator().manual_seed(1)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


A, B, ROWS, LENGTHS = normal(5, 3), normal(2, 5, 3), normal(7, 3), torch.tensor([3, 0, 4])
POOLED, INDICES = F.max_pool2d(normal(2, 3, 6, 4), 2, return_indices=True)
REPLICATED = [
    Sample(torch.renorm, (B, 2, 0, 1.5)),
    Sample(torch.renorm, (B, float("inf"), -2, 1.5)),
    Sample(Tensor.renorm_, (A, 2, 1, 1.5), gradients=False, mutates=True),
    Sample(torch.pdist, (ROWS,)),
    Sample(F.pdist, (torch.cat([A, A[:2]]), 1)),  # two pairs of equal rows
    Sample(torch.segment_reduce, (ROWS, "mean"), {"lengths": LENGTHS}),
    Sample(torch.segment_reduce, (ROWS, "sum"), {"offsets": torch.tensor([1, 4, 4, 6]), "initial": 2.5}),
    Sample(torch.segment_reduce, (normal(2, 7), "min"), {"lengths": LENGTHS.repeat(2, 1), "axis": 1}),
    Sample(F.max_unpool2d, (POOLED, INDICES, 2)),
    Sample(F.channel_shuffle, (normal(2, 4, 2, 3), 2)),
    Sample(
        F.fractional_max_pool2d,
        (B[None], 2, (2, 2)),
        {"_random_samples": torch.rand(1, 2, 2, dtype=B.dtype)},
        constant=(1,),
    ),
    Sample(F.affine_grid, (normal(4, 2, 3), [4, 1, 3, 2]), {"align_corners": False}),
    Sample(torch.diagonal_scatter, (A, normal(2), -3)),
    Sample(torch.unbind_copy, (A, 1)),
]
DECOMPOSED = [Sample(torch.kron, (A, normal(2, 4))), Sample(torch.kron, (normal(1, 3), normal(4, 3, 2)))]


def test_ops_without_rows_equal_one_process() -> None:
    samples = [*REPLICATED, *DECOMPOSED]
    assert all(rule_of(sample.op) is None for sample in samples)
    tally = assert_equals_one_process(samples, (Mesh((3,)), Mesh((2, 2))), limit=3)
    assert (tally.cases, tally.refused) == (6 * len(samples), 0)


@world(3)
def test_what_runs_replicated_is_reported() -> None:
    for sample in REPLICATED:
        operands = [distribute_tensor(x, Mesh((3,)), [Shard(0)]) for x in sample.tensors()]
        with count_comms() as comms:
            sample.call(operands)
        assert comms.fallbacks, sample


@world(3)
def test_a_second_call_of_what_runs_replicated_is_found_by_its_key() -> None:
    x = distribute_tensor(A, Mesh((3,)), [Shard(0)])
    torch.renorm(x, 2, 0, 1.5)
    calls = collectives.owner().calls
    known = [call for call in calls.values() if isinstance(call[0], ReplicatedCall)]
    count = len(calls)
    assert_close(torch.renorm(x, 2, 0, 1.5).full_tensor(), torch.renorm(A, 2, 0, 1.5))  # type: ignore[attr-defined]
    assert (len(known), len(calls)) == (1, count)


@pytest.mark.parametrize(
    ("op", "x"),
    [
        (lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([3, 0, 5])), ROWS),
        (lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([-1, 4, 4])), ROWS),
        (torch.poisson, torch.tensor([2.0, 1, 0, -1])),
    ],
)
def test_an_error_of_some_values_is_torchs_on_every_rank(op: Callable[[Any], Any], x: Tensor) -> None:
    with pytest.raises(RuntimeError) as expected:
        op(x)
    for placement in (Replicate(), Shard(0)):
        body = partial(lambda p: op(distribute_tensor(x, Mesh((3,)), [p])), placement)
        assert same_error(3, RuntimeError, body) == str(expected.value)
