"""What `explain` says of ranks with less work, beside FLOPs that torch counts on each rank."""

import re
from collections.abc import Callable
from html import unescape
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise import Mesh, OnRanks, Placement, Replicate, Shard, distribute_tensor, shard_module
from shardwise.debug import Explanation, explain
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.testing import world

S0, S1, R = Shard(0), Shard(1), Replicate()


def products(ranks: int, rows: int, placement: Placement) -> Callable[[], object]:
    """Two linear layers on a batch."""
    mesh = Mesh((ranks,))
    model = shard_module(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), {}, mesh=mesh)
    x = distribute_tensor(torch.ones(rows, 8), mesh, [placement])
    return lambda: model(x)


def flops(ranks: int, rows: int, placement: Placement = S0) -> list[int]:
    """Those of each rank."""

    def body() -> int:
        step = products(ranks, rows, placement)
        with FlopCounterMode(display=False) as counter:
            step()
        return int(counter.get_total_flops())

    return world(ranks).run(body)


def unbalanced(ranks: int, make: Callable[[], Callable[[], object]]) -> str:
    """That part of the report; empty if there is none. The same on every rank."""
    (text,) = set(world(ranks).run(lambda: str(explain(make())).partition("Unbalanced: ")[2]))
    return text


@pytest.mark.parametrize(
    ("ranks", "rows", "placement"),
    [(4, 5, S0), (4, 9, S0), (3, 4, S0), (4, 3, S0), (8, 9, S0), (3, 9, Shard(0, (6, 0, 3))), (2, 5, Shard(0, (1, 4)))],
)
def test_the_ratio_is_that_of_the_flops_of_ranks(ranks: int, rows: int, placement: Placement) -> None:
    counted = flops(ranks, rows, placement)
    text = unbalanced(ranks, lambda: products(ranks, rows, placement))
    assert text.startswith(f"the busiest rank does {max(counted) * ranks / sum(counted):.2f} times the mean work")
    sizes = re.search(r"dim 0 by rank: ([\d, ]+)", text)
    assert sizes is not None
    by_rank = list(map(int, sizes[1].split(", ")))
    assert [n * sum(counted) for n in by_rank] == [n * rows for n in counted]


@pytest.mark.parametrize(("ranks", "rows"), [(4, 8), (4, 7), (4, 4), (3, 100), (8, 1000), (1, 5), (4, 0)])
def test_nothing_is_said_where_ranks_have_about_as_much(ranks: int, rows: int) -> None:
    assert unbalanced(ranks, lambda: products(ranks, rows, S0)) == ""


def test_nothing_is_said_of_replicated_work_nor_of_a_small_part_of_it() -> None:
    def make() -> Callable[[], object]:
        mesh = Mesh((4,))
        x, y = distribute_tensor(torch.ones(500, 8), mesh, [R]), distribute_tensor(torch.ones(5), mesh, [S0])
        return lambda: (x.sin().cos(), y.sin())

    assert unbalanced(4, make) == ""


@pytest.mark.parametrize(("ranks", "rows"), [(4, 5), (4, 9), (4, 3), (8, 9), (3, 4)])
def test_the_sizes_that_are_advised_take_as_long_as_is_said(ranks: int, rows: int) -> None:
    text = unbalanced(ranks, lambda: products(ranks, rows, S0))
    busiest = max(flops(ranks, rows))
    found = re.search(rf"a multiple of {ranks} along dim 0: (\d+) takes as long as {rows}", text)
    assert found is not None
    assert flops(ranks, int(found[1])) == [busiest] * ranks
    less = re.search(r", (\d+) takes (\d+)/(\d+) of that", text)
    if less is not None:
        size, part, whole = map(int, less.groups())
        assert [n * whole for n in flops(ranks, size)] == [busiest * part] * ranks
    fewer = re.search(rf"; (\d+) ranks take as long as {ranks}", text)
    if fewer is not None:
        assert int(fewer[1]) < ranks
        assert max(flops(int(fewer[1]), rows)) == busiest
    assert fewer is not None or less is not None


def test_an_operand_counts_in_the_layout_in_which_the_op_runs() -> None:
    def make() -> Callable[[], object]:
        even = distribute_tensor(torch.ones(400, 8), Mesh((4,)), [S0])
        uneven = distribute_tensor(torch.ones(8, 5), Mesh((4,)), [S1])
        return lambda: even @ uneven  # which is all-gathered

    assert unbalanced(4, make) == ""


def test_shard_sizes_that_the_user_chose_are_said_to_be_worse_than_even_ones() -> None:
    text = unbalanced(3, lambda: products(3, 100, Shard(0, (70, 0, 30))))
    assert "avoid: [Shard(0)]: the busiest rank has 34% of the elements in place of 70%" in text
    assert max(flops(3, 100)) * 100 == 34 * sum(flops(3, 100))


def test_parameters_that_are_divided_so_are_named() -> None:
    def make() -> Callable[[], object]:
        mesh = Mesh((4,))
        layers = nn.Sequential(*(nn.Linear(64, 5) if i == 0 else nn.Linear(5, 5) for i in range(2)))
        shard_module(layers, {"0.*": S0}, mesh=mesh)
        x = distribute_tensor(torch.ones(2, 64), mesh, [R])
        return lambda: layers[0](x)

    text = unbalanced(4, make)
    assert "parameters: *.weight, *.bias" in text


class Heads(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.up = nn.Linear(8, heads * 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(x).view(len(x), self.heads, 4).softmax(-1).sin().cos()
        return out


@pytest.mark.parametrize("heads", [3, 4])
def test_a_rank_without_a_head_is_noticed_where_heads_are_divided(heads: int) -> None:
    def make() -> Callable[[], object]:
        mesh = Mesh((4,))
        model = shard_module(Heads(heads), {"up.*": S0}, mesh=mesh)
        x = distribute_tensor(torch.ones(6, 8), mesh, [R])
        return lambda: model(x)

    text = unbalanced(4, make)
    assert ("dim 1 by rank: 1, 1, 0, 1" in text) == (heads == 3)
    assert ("a multiple of 4 along dim 1: 4 takes as long as 3; 3 ranks take as long as 4" in text) == (heads == 3)
    assert (text == "") == (heads == 4)


@pytest.mark.parametrize("one", [True, False])
def test_tables_on_one_rank_are_unbalanced_and_tables_on_each_rank_are_not(one: bool) -> None:
    def make() -> Callable[[], object]:
        mesh = Mesh((3,))
        tables = [distribute_tensor(torch.ones(9, 4), mesh, [OnRanks(0 if one else i)]) for i in range(3)]
        return lambda: [table.sin() for table in tables]

    text = unbalanced(3, make)
    assert text.startswith("the busiest rank does 3.00 times the mean work") == one
    assert (text == "") != one


def test_a_mesh_of_many_ranks_is_told_in_short() -> None:
    text = unbalanced(12, lambda: products(12, 13, S0))
    assert "dim 0 by rank: 2 on 6 ranks, 1 on 1 rank, 0 on 5 ranks" in text


def test_a_notebook_has_what_the_text_has() -> None:
    def body() -> tuple[str, str]:
        report: Explanation[Any] = explain(products(4, 5, S0))
        return str(report), report._repr_html_()

    text, html = world(4).run(body)[0]
    title, _, *lines = text.partition("Unbalanced")[2].splitlines()
    plain = unescape(re.sub("<[^>]*>", "\n", html.partition("Unbalanced")[2]))
    assert title in plain
    ratio, ops, what = lines[0].split(maxsplit=2)
    assert {ratio, ops, what} <= set(plain.splitlines())
    for line in lines[1:]:
        assert line.strip().removeprefix("avoid: ") in plain
    assert len(lines) > 2


def test_an_op_that_is_decomposed_counts_once() -> None:
    def make(layer: Callable[[Tensor], Tensor]) -> str:
        x = distribute_tensor(torch.ones(5, 4), Mesh((4,)), [S0])
        return str(explain(lambda: layer(x)))

    counts = [
        re.search(r"1\.60x +(\d+)", world(4).run(lambda layer=layer: make(layer))[0])  # type: ignore[misc]
        for layer in (torch.sin, lambda x: torch.inner(x, torch.ones(3, 4)))
    ]
    assert [found and found[1] for found in counts] == ["1", "1"]


def test_heads_that_are_kept_whole_are_not_to_be_split() -> None:
    def make(heads: int) -> Callable[[], object]:
        mesh = Mesh((4,))
        plan = {
            "0": ColwiseParallel(use_local_output=False, unit=8),
            "1": RowwiseParallel(unit=8),
        }
        model = nn.Sequential(nn.Linear(64, 8 * heads), nn.Linear(8 * heads, 64))
        parallelize_module(model, mesh, plan)
        return lambda: model(torch.ones(2, 64))

    text = unbalanced(4, lambda: make(3))
    assert "avoid: a multiple of 32 along dim 0: 32 takes as long as 24; 3 ranks take as long as 4\n" in f"{text}\n"
    assert unbalanced(4, lambda: make(4)) == ""
    assert "a multiple of 32 along dim 0: 64 takes as long as 40, 32 takes 1/2 of that" in unbalanced(
        4, lambda: make(5)
    )
