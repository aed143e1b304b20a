"""The whole contract of lookups on every kind of table: a sample of `tools/embedding_matrix.py`, and what they cost."""

from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import Mesh, count_comms, distribute_tensor
from shardwise._layout import Boxes, OnRanks, Placement, Replicate, Shard
from shardwise._lookups.rules import embedding_bags
from shardwise.errors import IdError, RuleError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tools.embedding_matrix import CHOICES, PLACES, REFUSED, Case, covering, differs, main, possible, refusals, wrong

R, S0, S1 = Replicate(), Shard(0), Shard(1)
CASES = list(covering(2))


def complaints(cases: list[Case], real: bool = False) -> list[str]:
    return [f"{case}: {complaint}" for case in cases if (complaint := wrong(case, real))]


def test_every_choice_gives_what_torch_gives() -> None:
    assert complaints(list(covering(1))) == []


@pytest.mark.slow
@pytest.mark.parametrize("table", PLACES)
def test_every_two_choices_together_give_what_torch_gives(table: str) -> None:
    assert complaints([case for case in CASES if case.table == table]) == []


def test_the_cases_hold_every_two_choices_that_are_possible_together() -> None:
    for one, other in combinations(CHOICES, 2):
        wanted = {pair for pair in product(CHOICES[one], CHOICES[other]) if possible({one: pair[0], other: pair[1]})}
        assert {(getattr(case, one), getattr(case, other)) for case in CASES} == wanted


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("asked", REFUSED, ids=str)
def test_what_torch_refuses_is_refused_on_every_table(asked: dict[str, Any], every: int) -> None:
    """With the same type of exception, forward or backward; `wrong` compares them."""
    cases = [case for case in refusals() if all(getattr(case, name) == value for name, value in asked.items())]
    assert len(cases) >= len(PLACES)
    assert complaints(cases[::every]) == []


# What pairs of choices did not find.
FOUND = [
    Case("grid 1T", "sum", "one bag", "first axis", by="together"),  # ranks whose peers hold nothing waited in backward
    Case("grid RT", "mean", "bags", "all axes", by="together"),  # some copies of the table knew of no straddling bags
    Case("grid 11", "embedding", "line", "first axis", 3, (1.5, float("inf"))),  # columns in the wrong places
    Case("one rank", "embedding", "line", "whole", max_norm=(8.0, 0.5), sparse=True),  # a changed view has no gradient
    Case("rows of 4", "sum", "bags and early end", "other mesh", dtype=torch.float32),  # as torch with short dtypes
    Case("grid rows, inner axis first", "sum", "bags", "all axes", 3, (2.0, 2.0), weights="like ids"),
    Case("grid RT", "sum", "one bag", "other mesh", max_norm=(3.0, 1.0), dtype=torch.bfloat16),  # the table moved
]


def test_cases_that_were_wrong_once_stay_right() -> None:
    assert complaints(FOUND) == []


@pytest.mark.processes
def test_real_processes_give_what_torch_gives() -> None:
    cases = [case for case in CASES if case.mesh.size() == 3][::8]
    assert len(cases) >= 8
    assert complaints(cases, real=True) == []


def test_a_wrong_outcome_is_seen() -> None:
    one = torch.ones(3, dtype=torch.float64)
    assert differs(one, one + 2**-52, 0.0) is not None
    assert differs(one, one + 2**-52, 1e-13) is None
    assert differs(one, one.float(), 0.1) is not None
    assert differs(None, one, 1.0) == f"None instead of {one}"
    assert differs(None, None, 0.0) is None


def test_the_command_tells_how_many_cases_there_were(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert main(["--strength", "1", "--only", "table rows of 3;"]) == 0
    finally:
        torch.set_num_threads(threads)
    assert "cases, " in capsys.readouterr().out


TABLE = torch.arange(35, dtype=torch.float64).view(7, 5).sin()
BAGS = torch.tensor([[3, 3, 0], [6, 1, 3], [0, 0, 0], [5, 2, 1], [3, 6, 6]])
WEIGHTS = torch.arange(15, dtype=torch.float64).view(5, 3).cos()


BIG = torch.arange(512 * 16, dtype=torch.float64).view(512, 16).sin()
FEW = torch.tensor([[5, 500], [7, 7], [300, 5], [12, 499]])
QUARTERS = [[((0, 0), (256, 8)), ((256, 8), (256, 8))], [((0, 8), (256, 8)), ((256, 0), (256, 8))]]
LOOKUPS: dict[str, Callable[[Any, Any], Any]] = {
    "embedding": F.embedding,
    "sum": lambda ids, table: F.embedding_bag(ids, table, mode="sum"),
    "max": lambda ids, table: F.embedding_bag(ids, table, mode="max"),
    "max_norm": lambda ids, table: F.embedding_bag(ids, table, max_norm=0.5),
    "frequencies": lambda ids, table: F.embedding(ids, table, scale_grad_by_freq=True, padding_idx=7),
}


@pytest.mark.parametrize("number", range(5))
@world(2)
def test_ids_and_rows_travel_but_no_table_and_no_gradient_of_one(number: int) -> None:
    placement = (S0, S1, OnRanks(1), Boxes(QUARTERS), Shard(0, [0, 512]))[number]
    for name, sharded in product(LOOKUPS, (R, S0)):
        table = distribute_tensor(BIG, Mesh((2,)), [placement]).requires_grad_()
        ids = distribute_tensor(FEW, Mesh((2,)), [sharded])
        with count_comms() as comms:
            LOOKUPS[name](ids, table).sum().backward()
            assert table.grad is not None
        rows = FEW.numel() * 16 * 8  # bytes of all that is looked up
        assert comms.total_bytes < 4 * rows + 1000 < BIG.numel() * 8 / 8, (name, sharded)


@world(4)
def test_one_bad_id_is_heard_by_ranks_that_look_up_in_another_copy_of_the_table() -> None:
    mesh, ids = Mesh((2, 2)), FEW.clone()
    ids[3, 1] = 512
    table = distribute_tensor(BIG, mesh, [R, S0])
    for first in ([S0, R], [R, S0], [S0, S0]):
        with pytest.raises(IdError, match=r"id 512 at position \(3, 1\)"):
            F.embedding_bag(distribute_tensor(ids, mesh, first), table)


LENGTHS = [3, 0, 9, 1, 0, 0, 4, 7, 0, 2]
STARTS = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
LONG = torch.arange(26) * 37 % 512
CUTS: list[tuple[Placement, Placement]] = [
    (S0, S0),
    (Shard(0, [26, 0, 0]), Shard(0, [0, 0, 10])),
    (Shard(0, [1, 24, 1]), Shard(0, [9, 1, 0])),
    (Shard(0, [0, 25, 1]), Shard(0, [0, 0, 10])),
]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(("ids_at", "offsets_at"), CUTS, ids=str)
@world(3)
def test_ids_go_to_the_bags_whose_offsets_another_rank_holds(
    ids_at: Placement, offsets_at: Placement, mode: str
) -> None:
    mesh, plain = Mesh((3,)), BIG.clone().requires_grad_()
    want = F.embedding_bag(LONG, plain, STARTS, mode=mode)
    want.square().sum().backward()
    assert plain.grad is not None
    table = distribute_tensor(BIG, mesh, [S0]).requires_grad_()
    ids, offsets = distribute_tensor(LONG, mesh, [ids_at]), distribute_tensor(STARTS, mesh, [offsets_at])
    with count_comms() as comms:
        out = as_dtensor(F.embedding_bag(ids, table, offsets, mode=mode))
        out.square().sum().backward()
        assert table.grad is not None
    assert out.layout_.boxes(0)[0].sizes[0] == offsets.layout_.boxes(0)[0].sizes[0]
    torch.testing.assert_close(out.full_tensor(), want, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(as_dtensor(table.grad).full_tensor(), plain.grad, rtol=1e-13, atol=1e-13)
    assert comms.total_bytes < 4 * len(LONG) * 16 * 8


@world(3)
def test_several_lookups_of_which_one_straddles_equal_one_process() -> None:
    mesh = Mesh((3,))
    table, ids, offsets = distribute_tensor(BIG, mesh, [S0]), distribute_tensor(LONG, mesh, [S0]), [0, 9, 18]
    fitting = distribute_tensor(torch.tensor(offsets), mesh, [S0])
    straddling = distribute_tensor(STARTS, mesh, [S0])
    outs = embedding_bags([ids] * 2, [table] * 2, [fitting, straddling])
    for starts, out in zip((fitting, straddling), outs, strict=True):
        want = F.embedding_bag(LONG, BIG, as_dtensor(starts).full_tensor())
        torch.testing.assert_close(as_dtensor(out).full_tensor(), want, rtol=1e-13, atol=1e-13)


@world(4)
def test_orders_of_cutting_differ_between_ids_offsets_and_table_and_nothing_of_the_table_moves() -> None:
    mesh, plain = Mesh((2, 2)), BIG.clone().requires_grad_()
    want = F.embedding_bag(LONG, plain, STARTS, max_norm=1.0)
    table = distribute_tensor(BIG, mesh, [S0, S0], shard_order=[1, 0]).requires_grad_()
    ids, offsets = (
        distribute_tensor(LONG, mesh, [S0, S0]),
        distribute_tensor(STARTS, mesh, [S0, S0], shard_order=[1, 0]),
    )
    with count_comms() as comms:
        out = as_dtensor(F.embedding_bag(ids, table, offsets, max_norm=1.0))
    assert comms.implicit == []
    torch.testing.assert_close(out.full_tensor(), want, rtol=1e-13, atol=1e-13)
    assert torch.equal(as_dtensor(table.detach()).full_tensor(), plain)


@world(3)
def test_a_module_trains_as_one_in_one_process_with_all_options_at_once() -> None:
    """Three steps with weights in the bags, padding, a norm: the table of one step is that of the next."""
    mesh = Mesh((3,))
    options: dict[str, Any] = {"mode": "sum", "padding_idx": -1, "max_norm": 1.0, "include_last_offset": True}
    plain = nn.EmbeddingBag(7, 5, _weight=TABLE.clone(), **options)
    module = nn.EmbeddingBag(7, 5, _weight=TABLE.clone(), **options)
    module.weight = nn.Parameter(distribute_tensor(TABLE, mesh, [S1]))
    ends = torch.tensor([0, 3, 3, 8, 15])
    for each, to in ((plain, lambda x: x), (module, lambda x: distribute_tensor(x, mesh, [S0]))):
        optimizer = torch.optim.Adagrad(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(to(BAGS.flatten()), to(ends), to(WEIGHTS.flatten())).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(as_dtensor(module.weight.detach()).full_tensor(), plain.weight.detach())


@world(2)
def test_several_boxes_on_a_rank_have_no_sparse_gradient_and_say_so() -> None:
    table = distribute_tensor(BIG, Mesh((2,)), [Boxes(QUARTERS)]).requires_grad_()
    with pytest.raises(RuleError, match=r"several boxes has no sparse gradient. Fix: sparse=False, or one box a rank"):
        F.embedding(FEW, table, sparse=True)
    with torch.no_grad():
        assert torch.equal(as_dtensor(F.embedding(FEW, table, sparse=True)).full_tensor(), F.embedding(FEW, BIG))
