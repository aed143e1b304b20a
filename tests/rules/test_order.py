"""What is largest, smallest, k-th, and everything in order, found without gathering the tensor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import DTensor, Mesh, Shard, count_comms, distribute_tensor, rank
from shardwise._layout import Placement, Replicate
from shardwise._rules.reductions import order
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls, sent
from tools.op_judge import Sample

INF, NAN = float("inf"), float("nan")
R, S0 = Replicate(), Shard(0)
SORTING: list[Callable[..., Any]] = [torch.sort, torch.argsort]
MEDIANS: list[Callable[..., Any]] = [torch.median, torch.nanmedian]
draw = Draw(4)
normal, integers = draw.normal, draw.integers
A, B, LINE, N = normal(5, 3), normal(2, 5, 3), normal(7), integers(5, 3)
TIED = integers(5, 3, low=-1, high=2).double()
RISING, ROWS = normal(7).sort().values, normal(5, 4).sort().values
FRACTIONS = torch.tensor([0.2, 0.7], dtype=torch.float64)
SAMPLES = [
    *(Sample(op, (x, 0)) for op in (torch.max, torch.min) for x in (TIED, N, TIED > 0)),
    *(Sample(op, (TIED, 1, True)) for op in (torch.max, torch.min)),
    *calls(Tensor.max, (B, {"dim": -2, "keepdim": True})),
    *calls(torch.max, (TIED - INF, 0), (A, A.flip(0) + 0.1)), *calls(torch.min, (A, {"other": A[0] + 0.1})),
    *(Sample(op, (x,)) for op in (torch.argmax, torch.argmin) for x in (TIED, B, N)),
    *calls(torch.argmax, (TIED, 0), (B, {"keepdim": True})), *calls(torch.argmin, (TIED, {"dim": 1, "keepdim": True})),
    *calls(torch.topk, *((A, k, 0) for k in (0, 1, 3, 5)), (B, 2, {"dim": 1, "largest": False})),
    *calls(Tensor.topk, (LINE, 2)),
    *(sample for op in SORTING for sample in calls(
        op, (A, 0), LINE, (normal(7, 1), 0, {"descending": True}),
        *((integers(9), {"stable": True, "descending": d}) for d in (False, True)))),
    *calls(torch.sort, (integers(2, 5, 3), {"dim": 1, "stable": True}), normal(0)),
    *calls(torch.msort, A, LINE),
    *calls(torch.kthvalue, (A, 2), (A, 2, 0, True), (LINE, 3)),
    *(sample for op in MEDIANS for sample in calls(op, TIED, LINE, integers(8), (A, 0, True), (LINE, 0))),
    *calls(torch.mode, (N.double(), 0), integers(9)),
    *calls(torch.quantile, (A, 0.3), (A, FRACTIONS, 0, True), (A, FRACTIONS, 1, {"interpolation": "midpoint"})),
    *calls(torch.nanquantile, (A, 0.5, {"dim": 0, "interpolation": "nearest"})),
    *calls(torch.searchsorted, (RISING, A), (ROWS, A, {"side": "right"}), (RISING, 0.3, {"out_int32": True}),
           (LINE, A, {"sorter": LINE.argsort()})),
    *calls(torch.bucketize, (A, RISING), (A, RISING, {"right": True})),
]  # fmt: skip


@pytest.mark.parametrize("op", [torch.argmax, torch.argmin])
@world(3)
def test_nan_is_the_largest_and_the_smallest_and_the_first_one_counts(op: Callable[..., Any]) -> None:
    full_value = torch.tensor([[1.0, 3], [NAN, 0], [NAN, 1], [9, NAN]])
    for sizes in ([1, 2, 1], [0, 3, 1], [4, 0, 0]):
        x = distribute_tensor(full_value, Mesh((3,), (1, 2, 0)), [Shard(0, sizes)])
        assert op(x).item() == op(full_value).item()
        assert torch.equal(as_dtensor(op(x, 0)).full_tensor(), op(full_value, 0))


@world(2)
def test_results_have_the_names_of_torch() -> None:
    x = distribute_tensor(A, Mesh((2,)), [S0])
    assert type(x.max(0)) is torch.return_types.max
    assert type(x.min(0)) is torch.return_types.min
    assert type(x.topk(2, 0)) is torch.return_types.topk
    assert type(x.sort(0)) is torch.return_types.sort
    assert type(x.flatten().sort()) is torch.return_types.sort
    assert type(x.flatten().kthvalue(2)) is torch.return_types.kthvalue
    assert type(x.flatten().median(0)) is torch.return_types.median


LONG = 3 * order.SMALL // 2
EVERY_INT64 = torch.iinfo(torch.int64)
LINES = {
    "normal": normal(LONG),
    "few values": integers(LONG, low=-50, high=51),
    "one value": torch.full((LONG,), 7),
    "all bits": torch.randint(EVERY_INT64.min, EVERY_INT64.max, (LONG,), generator=draw.generator),
    "the ends": torch.tensor([EVERY_INT64.max, EVERY_INT64.min, 0, -1]).repeat(LONG // 4),
    "floats": integers(LONG, low=-50, high=51).float().index_fill(0, torch.tensor([5, 900, LONG - 1]), NAN),
    "zeros": torch.tensor([0.0, -0.0, INF, -INF], dtype=torch.float16).repeat(LONG // 4),
    "truths": integers(LONG) > 0,
}
CUTS: list[Placement] = [S0, Shard(0, [LONG - 10, 0, 10, 0]), Shard(0, [1, 2, 3, LONG - 6])]


def laid_out(x: Tensor, sharded: Placement) -> DTensor:
    """On ranks that are not in the order of the pieces; on two axes if the cut is torch.chunk's."""
    mesh = Mesh((2, 2), (3, 1, 0, 2)) if sharded == S0 else Mesh((4,), (2, 0, 3, 1))
    return distribute_tensor(x, mesh, [sharded] * mesh.ndim)


@pytest.mark.parametrize("sharded", CUTS, ids=str)
@pytest.mark.parametrize("name", LINES)
@world(4)
def test_a_long_line_is_sorted_stably_and_stays_cut_as_it_was(name: str, sharded: Placement) -> None:
    x = laid_out(LINES[name], sharded)
    for descending in (False, True):
        expected = torch.sort(LINES[name], stable=True, descending=descending)
        values, indices = torch.sort(x, stable=True, descending=descending)
        assert as_dtensor(values).layout_ == x.layout_
        assert torch.equal(as_dtensor(values).full_tensor().nan_to_num(5000), expected.values.nan_to_num(5000))
        assert torch.equal(as_dtensor(indices).full_tensor(), expected.indices)


@pytest.mark.parametrize("sharded", CUTS, ids=str)
@pytest.mark.parametrize("name", LINES)
@world(4)
def test_the_kth_of_a_long_line_is_found_by_counting(name: str, sharded: Placement) -> None:
    x, line = laid_out(LINES[name], sharded), LINES[name].int() if name == "truths" else LINES[name]
    for k in (1, 17, LONG // 2, LONG):
        value, index = (as_dtensor(y).full_tensor() for y in torch.kthvalue(x, k))
        expected = torch.sort(line).values[k - 1]
        assert torch.equal(value.to(line.dtype).nan_to_num(5000), expected.nan_to_num(5000))
        assert torch.equal(line[index].nan_to_num(5000), expected.nan_to_num(5000))


@pytest.mark.parametrize("sharded", CUTS, ids=str)
@pytest.mark.parametrize(
    "op", [torch.median, torch.nanmedian, lambda x: torch.median(x, 0)[0], lambda x: torch.kthvalue(x, 9)[0]]
)
@pytest.mark.parametrize("name", ["normal", "floats"])
@world(4)
def test_order_statistics_of_long_lines_have_the_gradients_of_torch(
    name: str, op: Callable[[Any], Any], sharded: Placement
) -> None:
    full_value = LINES["normal"].clone() if name == "normal" else LINES["few values"].double()
    x = laid_out(full_value, sharded).requires_grad_()
    op(x).backward()
    op(full_value.requires_grad_()).backward()
    assert full_value.grad is not None
    found = as_dtensor(x.grad).full_tensor()
    if name == "normal" or op in MEDIANS:  # else it goes to any one of the equals
        assert torch.allclose(found, full_value.grad)
    else:
        assert found.sum() == full_value.grad.sum() == 1


@pytest.mark.parametrize("between", ["linear", "lower", "higher", "nearest", "midpoint"])
@pytest.mark.parametrize("name", ["normal", "few values", "floats", "zeros"])
@world(4)
def test_quantiles_of_a_long_line_are_interpolated_as_torch_does(name: str, between: str) -> None:
    full_value = LINES[name].double()
    fractions = torch.tensor([0.0, 0.25, 0.5, 0.77777, 1.0], dtype=torch.float64)
    for op in (torch.quantile, torch.nanquantile):
        plain, q = full_value.clone().requires_grad_(), fractions.clone().requires_grad_()
        expected = op(plain, q, interpolation=between)
        x = laid_out(full_value, CUTS[1])
        shared = distribute_tensor(fractions, x.device_mesh, [R]).requires_grad_()
        x.requires_grad_()
        found = op(x, shared, interpolation=between)
        assert torch.allclose(as_dtensor(found).full_tensor(), expected, equal_nan=True)
        if name == "normal":
            found.sum().backward()
            expected.sum().backward()
            for ours, theirs in ((x, plain), (shared, q)):
                assert (ours.grad is None) == (theirs.grad is None)
                if theirs.grad is not None:
                    assert torch.allclose(as_dtensor(ours.grad).full_tensor(), theirs.grad)


@world(4)
def test_a_long_line_travels_once_with_a_little_counting_and_for_an_order_statistic_not_at_all() -> None:
    x = distribute_tensor(LINES["normal"], Mesh((4,)), [S0])
    with count_comms() as comms:
        torch.sort(x)
    redistributed = LONG // 4 * 16  # values and indices
    counting = 3 * 4 * (8 << order.DIGIT)  # a round: counts for four places go to three others
    assert comms.implicit == []
    assert comms.total_calls <= 6
    assert comms.total_bytes < redistributed + 4 * counting + 100
    x = distribute_tensor(LINES["normal"], Mesh((4,)), [S0])
    with count_comms() as comms:
        torch.kthvalue(x, 100)
    assert comms.implicit == []
    assert comms.total_bytes < 5 * 3 * (8 << order.DIGIT)


def test_the_best_k_are_chosen_from_the_best_k_of_each_rank() -> None:
    found = sent(Mesh((4,)), lambda x: torch.topk(x, 5, 0), (normal(1000, 8), Shard(0, [990, 3, 0, 7])))
    assert all(number == 1 and num_bytes <= 3 * 5 * 8 * 16 for _, number, num_bytes in found)


@pytest.mark.parametrize(
    "op", [lambda x: x.sort(0), lambda x: x.median(0), lambda x: x.mode(0), lambda x: x.kthvalue(3, 0)]
)
@world(4)
def test_several_lines_are_cut_along_another_dim_to_be_ordered(op: Callable[[Any], Any]) -> None:
    x = distribute_tensor(normal(64, 32), Mesh((4,)), [S0])
    with count_comms() as comms:
        values, indices = op(x)
    last = values.ndim - 1
    assert as_dtensor(values).placements == as_dtensor(indices).placements == (Shard(last),)
    assert len(comms.implicit) == 1
    assert comms.total_bytes == 64 * 32 * 8 // 4 * 3 // 4


@world(4)
def test_pieces_of_a_sorted_sequence_add_up_where_they_are() -> None:
    sequence = distribute_tensor(torch.arange(1000.0), Mesh((4,)), [S0])
    with count_comms() as comms:
        places = as_dtensor(torch.searchsorted(sequence, torch.tensor([3.0, 700, 2000])))
    assert comms.total_calls == 0
    assert places.full_tensor().tolist() == [3, 700, 1000]


@world(4)
def test_lines_without_elements_on_an_axis_empty_ones_and_those_with_nan() -> None:
    x = distribute_tensor(torch.ones(1, 3), Mesh((2, 2)), [Shard(0), Shard(1)]).requires_grad_()
    for value in (x.kthvalue(1, 1).values, x.median(1).values):
        value = as_dtensor(value)
        assert value.to_local().shape == value.layout_.local_shape(rank())
        assert value.requires_grad
        assert value.mean().item() == 1
    x = distribute_tensor(torch.ones(0, 3), Mesh((4,)), [Shard(1)])
    assert tuple(x.topk(2).values.shape) == (0, 2)
    x = laid_out(LINES["floats"], CUTS[1])
    assert torch.isnan(as_dtensor(x.median()).full_tensor())
    assert x.nanmedian().item() == LINES["floats"].nanmedian().item()
    assert torch.isnan(as_dtensor((x * NAN).nanmedian()).full_tensor())
