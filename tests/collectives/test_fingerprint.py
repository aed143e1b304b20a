"""Ranks that compare what they are about to do: on simulated ranks and on real ones, with the same texts."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardwise import Mesh, Replicate, Shard, count_comms, distribute_tensor
from shardwise import _collectives as collectives
from shardwise._collectives import all_reduce, all_to_all, barrier, describing, fingerprint, rank
from shardwise.errors import MismatchError
from shardwise.testing.worlds import World
from tests.collectives.test_different_calls import REAL, SIMULATED, WORLDS

HERE = str(Path(__file__)).removeprefix(f"{Path.cwd()}/")
ALL = (0, 1, 2)


def line(fn: Callable[..., object], offset: int) -> str:
    return f"{HERE}:{fn.__code__.co_firstlineno + offset} in {fn.__name__}"


def refusal(act: Callable[[], object]) -> str:
    """The text of the MismatchError that `act` raises; afterwards the ranks can still talk to each other."""
    with fingerprint(), pytest.raises(MismatchError) as caught:
        act()
    barrier(ALL)
    return str(caught.value)


def same_text(ranks: World, body: Callable[[], str]) -> list[str]:
    """The lines that all ranks raise, without those that say which line of the program called.

    Real ranks have run other tests, so the number of the collective is left out.
    """
    (text,) = set(ranks.run(body))
    return [re.sub(r"collective #\d+", "collective", row) for row in text.splitlines() if "called at" not in row]


# ---- what is compared -------------------------------------------------------------------------------------


def other_kind() -> str:
    return refusal(lambda: barrier(ALL) if rank() == 1 else all_reduce(torch.ones(2), "sum", ALL))


def other_dtype() -> str:
    return refusal(lambda: all_reduce(torch.ones(2, dtype=torch.float64 if rank() == 1 else None), "sum", ALL))


def other_shape() -> str:
    return refusal(lambda: all_reduce(torch.ones(3 if rank() == 1 else 2), "max", ALL))


def other_reduction() -> str:
    return refusal(lambda: all_reduce(torch.ones(2), "min" if rank() == 1 else "max", ALL))


def other_counts() -> str:
    """Rank 1 sends an element too many to rank 2, which would be its end on real ranks."""
    counts = [1, 1, 2] if rank() == 1 else [1, 1, 1]
    return refusal(lambda: all_to_all(torch.ones(sum(counts)), counts, [1, 1, 1], ALL))


def other_purpose() -> str:
    with describing(lambda: "mm of (Shard(1), Shard(0))" if rank() == 1 else "mm of (Shard(0), Replicate())"):
        return refusal(lambda: all_reduce(torch.ones(2), "sum", ALL))


def other_line() -> str:
    def act() -> None:
        if rank() == 1:
            all_reduce(torch.ones(2), "sum", ALL)
        else:
            all_reduce(torch.ones(2), "sum", ALL)

    return refusal(act)


def other_layouts() -> list[str]:
    """Rank 1 turns rows into columns where the others turn columns into rows: the same counts, and garbage."""
    mesh, full = Mesh((3,)), torch.arange(9.0).view(3, 3)
    rows, columns = distribute_tensor(full, mesh, [Shard(0)]), distribute_tensor(full, mesh, [Shard(1)])
    if rank() == 1:
        return refusal(lambda: columns.redistribute(placements=[Shard(0)])).splitlines()
    return refusal(lambda: rows.redistribute(placements=[Shard(1)])).splitlines()


@WORLDS
def test_moves_between_other_layouts_are_found_though_their_counts_are_the_same(ranks: World) -> None:
    first, *others = ranks.run(other_layouts)
    assert others == [first, first]
    assert first[0].endswith("all ranks must make it for the same purpose.")
    calls = [row for row in first[1:-1] if "called at" not in row]
    counts = "all_to_all of float32, send counts (1, 1, 1), receive counts (1, 1, 1)"
    assert all(row.startswith(f"  rank {r}: {counts} (") for r, row in enumerate(calls))
    to_columns, to_rows, _ = calls
    assert to_columns.count("Shard(0)") == to_rows.count("Shard(1)") == 1
    assert to_columns.index("Shard(0)") < to_columns.index("Shard(1)")
    assert to_rows.index("Shard(1)") < to_rows.index("Shard(0)")


CALL = "all_to_all of float32, send counts {}, receive counts (1, 1, 1)"


@WORLDS
@pytest.mark.parametrize(
    ("body", "why", "rows"),
    [
        (
            other_kind,
            "all ranks must make the same call",
            ["all_reduce sum of float32 (2,)", "all_to_all of uint8, send counts (1, 1, 1), receive counts (1, 1, 1)"],
        ),
        (
            other_dtype,
            "all ranks must make the same call",
            ["all_reduce sum of float32 (2,)", "all_reduce sum of float64 (2,)"],
        ),
        (
            other_shape,
            "all ranks must make the same call",
            ["all_reduce max of float32 (2,)", "all_reduce max of float32 (3,)"],
        ),
        (
            other_reduction,
            "all ranks must make the same call",
            ["all_reduce max of float32 (2,)", "all_reduce min of float32 (2,)"],
        ),
        (
            other_counts,
            "rank 1 sends 2 elements to rank 2, which expects 1",
            [CALL.format((1, 1, 1)), CALL.format((1, 1, 2))],
        ),
        (
            other_purpose,
            "all ranks must make it for the same purpose",
            [
                "all_reduce sum of float32 (2,) (mm of (Shard(0), Replicate()))",
                "all_reduce sum of float32 (2,) (mm of (Shard(1), Shard(0)))",
            ],
        ),
        (
            other_line,
            "all ranks must make it in the same line",
            ["all_reduce sum of float32 (2,)", "all_reduce sum of float32 (2,)"],
        ),
    ],
)
def test_every_rank_raises_who_differs_and_how_before_anything_is_sent(
    ranks: World, body: Callable[[], str], why: str, rows: list[str]
) -> None:
    common, of_rank_1 = rows
    assert same_text(ranks, body) == [
        f"Ranks (0, 1, 2) disagree on their collective: {why}.",
        f"  rank 0: {common}",
        f"  rank 1: {of_rank_1}",
        f"  rank 2: {common}",
        "  Fix: make all ranks of a group call the same collectives in the same order.",
    ]


def called_from_two_lines() -> str:
    def act() -> None:
        if rank() == 1:
            all_reduce(torch.ones(1), "sum", ALL)
        else:
            all_reduce(torch.ones(2), "sum", ALL)

    return refusal(act)


@WORLDS
def test_the_line_of_the_program_stands_under_each_call(ranks: World) -> None:
    (text,) = set(ranks.run(called_from_two_lines))
    first = called_from_two_lines.__code__.co_firstlineno
    places = [f"{HERE}:{first + (3 if r == 1 else 5)} in act" for r in ALL]
    assert [row.strip() for row in text.splitlines() if "called at" in row] == [f"called at {p}" for p in places]


def one_left_out() -> tuple[int, str]:
    """Rank 1 has made fewer collectives with this group than the others, by its own count."""
    calls = collectives.transport().calls
    here = calls[ALL] = calls.get(ALL, 0) + 10
    if rank() == 1:
        calls[ALL] -= 7
    text = refusal(lambda: all_reduce(torch.ones(2), "sum", ALL))
    calls[ALL] = here
    return here, text


@WORLDS
def test_ranks_that_made_different_numbers_of_collectives_are_told(ranks: World) -> None:
    ((here, text),) = set(ranks.run(one_left_out))
    assert text.splitlines()[0] == (
        f"Ranks (0, 1, 2) disagree on their collective #{here + 1}: "
        f"it is collective #{here + 1}, #{here - 6}, #{here + 1} to them."
    )


# ---- what it leaves alone ---------------------------------------------------------------------------------


def same_as_without() -> tuple[list[float], int, int]:
    """Uneven counts, groups of two, gradients: results, and what `count_comms` counts."""
    mesh = Mesh((3,))
    x = distribute_tensor(torch.arange(14.0).view(7, 2), mesh, [Shard(0, sizes=[4, 0, 3])])
    x.requires_grad_()
    with count_comms() as comms:
        full = x.redistribute(placements=[Replicate()])
        (full * full).sum().backward()
        if rank() != 1:
            all_reduce(torch.ones(2), "sum", (0, 2))
    assert x.grad is not None
    return x.grad.full_tensor().flatten().tolist(), comms.total_calls, comms.total_bytes


def same_as_without_compared() -> tuple[list[float], int, int]:
    with fingerprint():
        return same_as_without()


@WORLDS
def test_ranks_that_agree_get_the_same_numbers_and_the_same_bytes(ranks: World) -> None:
    assert ranks.run(same_as_without_compared) == ranks.run(same_as_without)
    gradient = [2.0 * i for i in range(14)]
    assert all(found[0] == pytest.approx(gradient) for found in ranks.run(same_as_without))


def switched() -> list[str]:
    """Which of three disagreements are found: before, inside and after the block."""

    def disagree() -> str:
        try:
            with describing(lambda: f"rank {rank()}"):
                all_reduce(torch.ones(1), "sum", ALL)
        except MismatchError:
            return "found"
        return "not looked for"

    found = [disagree()]
    with fingerprint():
        found.append(disagree())
        with fingerprint():
            pass
        found.append(disagree())
    found.append(disagree())
    collectives.check_ranks()
    found.append(disagree())
    collectives.check_ranks(False)
    found.append(disagree())
    return found


@WORLDS
def test_it_is_on_inside_the_block_or_from_the_switch_on(ranks: World) -> None:
    expected = ["not looked for", "found", "found", "not looked for", "found", "not looked for"]
    assert ranks.run(switched) == [expected] * 3


def on_rank_1_alone() -> None:
    if rank() == 1:
        collectives.check_ranks()
    all_reduce(torch.ones(2), "sum", ALL)


@WORLDS
def test_a_rank_that_compares_alone_is_found_before_others_get_that(ranks: World) -> None:
    with pytest.raises(MismatchError) as caught:
        ranks.run(on_rank_1_alone)
    lines = [row for row in str(caught.value).splitlines() if "called at" not in row]
    assert lines[0].endswith("disagree on their collective #1: all ranks must make the same call.")
    assert lines[1] == lines[3].replace("rank 2", "rank 0") == "  rank 0: all_reduce sum of float32 (2,)"
    assert lines[2].startswith("  rank 1: ")


def in_another_thread() -> str:
    """As autograd's threads do."""
    import threading

    said = []

    def act() -> None:
        try:
            all_reduce(torch.ones(rank() + 1), "sum", ALL)
        except MismatchError as error:
            said.append(str(error))

    with fingerprint():
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
    return said[0]


@pytest.mark.processes
def test_real_ranks_and_other_threads_compare_as_simulated_ranks_do() -> None:
    assert same_text(REAL, in_another_thread)[0].endswith("all ranks must make the same call.")
    for body in (other_dtype, other_counts, other_purpose, other_line):
        assert same_text(REAL, body) == same_text(SIMULATED, body)
    assert REAL.run(same_as_without_compared) == REAL.run(same_as_without)
    assert REAL.run(switched) == SIMULATED.run(switched)
