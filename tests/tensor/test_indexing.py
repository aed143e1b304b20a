"""Brackets on distributed tensors equal brackets in one process, and move no more than they must."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import Mesh, OnRanks, Partial, Replicate, Shard, count_comms, distribute_tensor
from shardwise import _collectives as collectives
from shardwise._layout import Layout, Placement
from shardwise.errors import RuleError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.test_random import PARTIAL_LAYOUTS, SHAPE, SHARDED_LAYOUTS, VALUES, sharded_values
from tools.op_judge import Sample
from tools.rule_checks import assert_equals_one_process

pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")  # torch says so

GENERATOR = torch.Generator().manual_seed(17)
R, S0, S1 = Replicate(), Shard(0), Shard(1)
MESHES = (Mesh((1,)), Mesh((3,)), Mesh((2, 2)))


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


A, B = normal(7, 3), normal(4, 5, 3)
ROWS, COLUMNS = torch.tensor([5, 0, -1, 3]), torch.tensor([2, 0, 1, 1])
MASK = torch.tensor([True, False, True, True, False, False, True])

BASIC: dict[str, tuple[Tensor, Any]] = {
    "row": (A, 3),
    "last row": (A, -1),
    "element": (A, (2, 1)),
    "column": (A, (slice(None), 1)),
    "slice": (A, slice(1, 5)),
    "steps": (A, slice(None, None, 3)),
    "from the end": (A, (slice(-3, None), slice(None, -1))),
    "empty slice": (A, slice(5, 2)),
    "beyond the end": (A, slice(5, 99)),
    "new dims": (A, (None, slice(1, 6, 2), None, 2, None)),
    "ellipsis": (B, (..., 0)),
    "ellipsis in the middle": (B, (1, ..., slice(1, 3))),
    "everything": (A, ...),
    "nothing": (A, ()),
    "numpy number": (A, np.int64(2)),
    "number in a tensor": (A, torch.tensor(4)),
}
PLACES: dict[str, tuple[Tensor, Any]] = {
    "rows": (A, ROWS),
    "list of rows": (A, [5, 0, -1]),
    "no rows": (A, []),
    "columns": (A, (slice(None), COLUMNS)),
    "elements": (A, (ROWS, COLUMNS)),
    "grid": (A, (ROWS[:, None], COLUMNS)),
    "rows of a slice": (A, (slice(1, 6), [0, 2])),
    "rows and a number": (B, (1, COLUMNS[:3])),
    "with a new dim": (A, (None, ROWS)),
    "apart": (B, (torch.tensor([3, 0]), slice(None), torch.tensor([1, 2]))),
    "mask": (A, MASK),
    "list of lists": (A, [[5, 0, -1], [2, 0, 1]]),
    "list of a slice and rows": (B, [slice(1, 3), [0, 4]]),
    "list of truth values": (A, MASK.tolist()),
    "mask of elements": (A, A > 0),
    "mask of later dims": (B, (slice(None), B[0] > 0)),
    "mask of a later dim": (B, (slice(1, 3), torch.tensor([True, False, True, True, False]))),
    "mask and number": (A, (MASK, 1)),
    "mask and columns": (A, (MASK, COLUMNS)),
    "true": (A, True),
    "false": (A, (False, 1)),
}


def taken(index: Any) -> Callable[[Any], Any]:
    def op(x: Any) -> Any:
        return x[index]

    return op


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BASIC, *PLACES])
def test_what_brackets_give_equals_one_process(name: str) -> None:
    x, index = {**BASIC, **PLACES}[name]
    assert assert_equals_one_process([Sample(taken(index), (x,))], MESHES, limit=4).cases > 6


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BASIC, *PLACES])
def test_what_is_assigned_to_brackets_equals_one_process(name: str) -> None:
    x, index = {**BASIC, **PLACES}[name]
    place = x[index]

    def assigned(x: Any, value: Any) -> Any:
        out = x.clone()
        out[index] = value
        return out

    samples = [
        Sample(assigned, (x, normal(*place.shape))),
        Sample(assigned, (x, normal(*place.shape[-1:]) if place.ndim and place.shape[-1] > 1 else normal())),
        Sample(lambda x: assigned(x, 2.5), (x,)),
    ]
    assert assert_equals_one_process(samples, MESHES, limit=3).cases > 6


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (lambda x, rows: x[rows], (A, torch.tensor([[5, 5], [0, -1]]))),
        (lambda x, rows, columns: x[rows, columns], (A, ROWS, COLUMNS)),
        (lambda x, mask: x[mask], (A, MASK)),
        (lambda x, mask: x[mask], (A, A > 0)),
        (lambda x, rows: x[:, rows], (A, COLUMNS)),
        (lambda x, row: x[row], (A, torch.tensor(5))),
        (lambda x, rows: x[[rows, 1]], (A, ROWS)),
        (lambda x: x[[[5, 0], [2, 1]]], (A,)),
        (lambda x: x[[(5, 0), (1, 2)]], (A,)),
        (lambda x: x[[slice(1, 5), None, -1]], (A,)),
    ],
)
def test_index_tensors_may_be_distributed(op: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    assert assert_equals_one_process([Sample(op, args)], MESHES, limit=6).cases > 11


def assigned(x: Any, rows: Any, value: Any) -> Any:
    out = x.clone()
    out[rows] = value
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        (A, ROWS, normal(4, 3)),
        (A, ROWS, normal(3)),
        (A, MASK, normal(4, 3)),
        (A, MASK, normal(3)),
        (A, A > 0, normal()),
    ],
    ids=["rows", "one row", "masked", "one row masked", "elements"],
)
def test_what_is_assigned_to_distributed_places_equals_one_process(args: tuple[Tensor, ...]) -> None:
    assert assert_equals_one_process([Sample(assigned, args)], MESHES, limit=6).cases > 11


@pytest.mark.parametrize("placement", [S0, Shard(0, [1, 0, 6]), S1, R, OnRanks(2)], ids=str)
@world(3)
def test_nothing_moves_when_whole_values_are_written(placement: Any) -> None:
    for value in (A[0], A[:1, None], 2, torch.tensor(3.0).double()):
        want, x = A.clone(), distribute_tensor(A, Mesh((3,)), [placement])
        with count_comms() as comms:
            for index in (3, slice(1, 6, 2), (slice(None), None), ROWS, MASK, (5, ...)):
                want[index] = value
                x[index] = value
        assert comms.total_calls == 0
        assert torch.equal(x.full_tensor(), want)


@world(3)
def test_values_go_to_the_owners_of_their_rows_and_rows_that_indices_name_once_to_each_rank() -> None:
    """Row 6 is on rank 2; the values are on rank 0: 3 numbers of 8 bytes, and the rows 0 to 2 stay where they are."""
    x = distribute_tensor(torch.zeros(7, 3, dtype=torch.float64), Mesh((3,)), [S0])
    values = distribute_tensor(A[:3], Mesh((3,)), [Shard(0, [3, 0, 0])])
    with count_comms() as comms:
        x[6] = values[2]
        x[:3] = values
    assert comms.total_bytes <= (3 * 8 * 3 if collectives.rank() == 0 else 0)
    assert torch.equal(x.full_tensor(), torch.cat([A[:3], torch.zeros(3, 3), A[2:3]]))
    x = distribute_tensor(A, Mesh((3,)), [S0])  # rows 0 to 2, 3 to 5, 6
    with count_comms() as comms:
        rows = as_dtensor(x[[6, 0, 6, 4]])
    held = {0: 1, 1: 1, 2: 2}[collectives.rank()]
    assert rows.placements == (R,)
    assert (comms.total_bytes, comms.total_calls, comms.implicit) == (held * 2 * 3 * 8, 1, [])
    assert torch.equal(rows.to_local(), A[[6, 0, 6, 4]])


@world(2)
def test_assignments_to_views_reach_the_original_and_those_to_copies_are_refused() -> None:
    want, x = A.clone(), distribute_tensor(A, Mesh((2,)), [S0])
    for y in (want, x):
        y[2:][1:, 0] = 1
        y.t()[1] = 2
        y.view(-1)[5:9] = 3
        y[1:5] += 10
        y[ROWS] *= 2
        y[:, 2] -= 1
    assert torch.equal(x.full_tensor(), want)
    with pytest.raises(RuleError, match="Fix: change the original"):
        x[0][1] = 1
    with pytest.raises(RuleError, match="Fix: change the original"):
        x[0] += 1
    for y in (want, x):
        y[0, 1] = 1
        y[0] = y[0] + 1
    assert torch.equal(x.full_tensor(), want)


@world(2)
def test_plain_tensors_with_distributed_indices_iteration_membership_and_one_ellipsis() -> None:
    plain, want, x = A.clone(), A.clone(), distribute_tensor(A, Mesh((2,)), [S0])
    rows = distribute_tensor(ROWS, Mesh((2,)), [S0])
    assert torch.equal(as_dtensor(plain[rows]).full_tensor(), A[ROWS])
    plain[rows] = x[:4]
    want[ROWS] = A[:4]
    assert torch.equal(plain, want)
    x = distribute_tensor(A, Mesh((2,)), [S0])
    for got, want in ((x, A), (reversed(x), reversed(A))):
        assert [as_dtensor(row).tolist() for row in got] == [row.tolist() for row in want]
    assert float(A[6, 1]) in x
    assert 100.0 not in x
    assert x[6, 1].item() == A[6, 1].item()
    assert len(x[2:]) == 5
    x = distribute_tensor(A, Mesh((2,)), [S0])
    bad: list[Any] = [(..., ..., 0), (..., ..., slice(0, 1)), (..., 0, ..., 1)]
    for index in bad:
        with pytest.raises(IndexError, match="only one ellipsis"):
            x[index]
        with pytest.raises(IndexError, match="only one ellipsis"):
            x[index] = 1
    assert x[..., 0, ...].shape == A[..., 0, ...].shape


BAD: list[tuple[Any, type[Exception]]] = [
    (7, IndexError),
    (-8, IndexError),
    ((0, 3), IndexError),
    ((0, 0, 0), IndexError),
    ([0, 7], IndexError),
    ([-8], IndexError),
    ([True, False], IndexError),
    (torch.ones(2), IndexError),
    (slice(None, None, -1), ValueError),
    ("a", TypeError),
]


@pytest.mark.parametrize(("index", "kind"), BAD, ids=repr)
def test_bad_brackets_are_the_same_error_on_every_rank(index: Any, kind: type[Exception]) -> None:
    def body(placement: Placement) -> list[str]:
        x = distribute_tensor(A, Mesh((3,)), [placement])
        with pytest.raises(kind) as read:
            x[index]
        with pytest.raises(kind) as written:
            x[index] = 1
        return [str(read.value), str(written.value)]

    with pytest.raises(kind):
        A[index]
    for placement in (S0, S1, R):
        first, *others = world(3).run(body, placement)
        assert others == [first, first]


def test_steps_in_a_tensor_without_elements() -> None:
    step, half = slice(None, None, 2), (slice(None, None, 3), slice(None, None, 2))
    for shape in [(2, 0), (0, 2), (0, 0), (2, 0, 3)]:
        full = torch.zeros(shape)
        indices: list[Any] = [step, (slice(None), step), half, *([(shape[0] - 1, step)] if shape[0] else [])]

        def body(full: Tensor = full, indices: list[Any] = indices) -> list[tuple[int, ...]]:
            found = []
            for placement in [R, S0, S1]:
                x = distribute_tensor(full, Mesh((2,)), [placement])
                for index in indices:
                    found.append(tuple(x[index].shape))
                    x[index] = 3
            return found

        assert world(2).run(body) == [[tuple(full[index].shape) for index in indices] * 3] * 2


@world(3)
def test_a_bad_index_on_one_rank_and_a_bad_value_are_errors_on_every_rank() -> None:
    x = distribute_tensor(A, Mesh((3,)), [S0])
    rows = distribute_tensor(torch.tensor([0, 1, 9, 2]), Mesh((3,)), [S0])
    with pytest.raises(IndexError, match="index 9 is out of bounds for dimension 0 with size 7"):
        x[rows]
    with pytest.raises(IndexError, match="index 9 is out of bounds for dimension 0 with size 7"):
        x.index_put_((rows,), torch.ones((), dtype=torch.float64))
    with pytest.raises(TypeError, match="can't assign a list"):
        x[0] = [1, 2, 3]  # type: ignore[assignment]
    for index in (slice(1, 3), ROWS):
        with pytest.raises(RuntimeError):
            x[index] = torch.ones(3, 3)


@world(3)
def test_a_new_dim_beside_an_empty_slice() -> None:
    """The view has a dim of length 1 that seems to run along the one that is empty."""
    x = distribute_tensor(torch.ones(5, 3, 2), Mesh((3,)), [Replicate()])
    assert tuple(x[-2, None, :0].shape) == (1, 0, 2)
    x[-2, None, :0] += 1
    assert bool((x == 1).all())


SOME = torch.tensor([5, 0, -3])
NUMBERED: dict[str, Any] = {
    "numbers": (3, -1, 0),
    "a tensor and numbers": (SOME, 2, 1),
    "tensors": (SOME, torch.tensor([[0], [4]]), torch.tensor(2)),
    "no places": (torch.tensor([], dtype=torch.int64), 0, 0),
    "short integers": (SOME.int(), 0, SOME.int() % 3),
}


def test_numbers_are_written_where_the_places_are_held() -> None:
    def body(layout: Layout, index: Any) -> Tensor:
        x = before = sharded_values(layout)
        x[index] = 7.5
        assert x is before
        assert x.layout_ == layout
        return x.full_tensor()

    for index in NUMBERED.values():
        expected = VALUES.clone()
        expected[index] = 7.5
        for layout in (*SHARDED_LAYOUTS, *PARTIAL_LAYOUTS):
            for got in world(layout.mesh.size()).run(body, layout, index):
                assert_close(got, expected, msg=str(layout))


def test_no_gradient_reaches_what_was_overwritten() -> None:
    def body(layout: Layout) -> Tensor:
        leaf = sharded_values(layout).requires_grad_()
        x = leaf * 2
        x[3, 4, 0] = 1
        as_dtensor(x).sum().backward()
        return as_dtensor(leaf.grad).full_tensor()

    expected = torch.full(SHAPE, 2.0, dtype=torch.float64)
    expected[3, 4, 0] = 0
    for layout in SHARDED_LAYOUTS:
        assert all(torch.equal(got, expected) for got in world(layout.mesh.size()).run(body, layout)), layout


@world(2)
def test_slices_of_any_placement_take_numbers_and_places_outside_are_torchs_error() -> None:
    for placement in (R, S0, OnRanks(1), Partial()):
        x = distribute_tensor(torch.arange(12.0).view(4, 3), Mesh((2,)), [R]).redistribute(placements=[placement])
        y = as_dtensor(x * 1)
        y[:, :] = 3
        assert torch.equal(y.full_tensor(), torch.full((4, 3), 3.0))
    with pytest.raises(IndexError) as expected:
        VALUES.clone()[0, 5, 0] = 1
    with pytest.raises(IndexError) as caught:
        sharded_values(Layout(Mesh((2,)), [S0], SHAPE))[SOME, 5, 0] = 1
    assert str(caught.value) == str(expected.value)
