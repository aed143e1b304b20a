"""By default, ranks that call different collectives raise one error before they exchange anything.

Inside `fingerprint()` they compare more of what they are about to do.
"""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from shardwise import DTensor, Mesh, Partial, Replicate, Shard, count_comms, distribute_tensor
from shardwise import _collectives as collectives
from shardwise._collectives import all_reduce, all_to_all, barrier, describing, fingerprint, rank
from shardwise._collectives.processes import TORCH_TRANSPORT
from shardwise.errors import MismatchError
from shardwise.testing import world
from shardwise.testing.worlds import World

SIMULATED, REAL = world(3), world(3, real=True)
WORLDS = pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(SIMULATED, id="simulated"),
        pytest.param(REAL, id="real", marks=[pytest.mark.processes, pytest.mark.slow]),
    ],
)
ALL = (0, 1, 2)
HERE = str(Path(__file__)).removeprefix(f"{Path.cwd()}/")


def odd() -> bool:
    """Whether this is the rank that does something else."""
    return rank() == 1


def caught(act: Callable[[], object]) -> str:
    """The text of the MismatchError; "" if there is none."""
    try:
        act()
    except MismatchError as error:
        return str(error)
    return ""


def one_text(ranks: World, act: Callable[[], object]) -> str:
    """The text that all ranks raise. Real ranks have run other tests, so the number of the collective varies."""
    (text,) = set(ranks.run(caught, act))
    return text


def fail() -> None:
    raise ZeroDivisionError


def sharded(size: int = 6) -> DTensor:
    return distribute_tensor(torch.arange(float(size * size)).view(size, size), Mesh((3,)), [Shard(0)])


def full(x: torch.Tensor) -> torch.Tensor:
    assert isinstance(x, DTensor)
    return x.full_tensor()


def other_kind() -> None:
    if odd():
        all_reduce(torch.ones(3), "sum", ALL)
    else:
        barrier(ALL)


def one_full_tensor_more() -> None:
    x, y = sharded(), sharded()
    if odd():
        full(x.T)  # of the shape of the next one
    full(x + y)
    full(y.T)


def swapped_reductions() -> None:
    x = distribute_tensor(torch.arange(6.0), Mesh((3,)), [Shard(0)])
    y = x * 10
    if odd():
        b = full(y.sum())
        a = full(x.sum())
    else:
        a = full(x.sum())
        b = full(y.sum())
    assert (a.item(), b.item()) == (15, 150)


SAME, PURPOSE = "all ranks must make the same call", "all ranks must make it for the same purpose"
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "dtype": (lambda: all_reduce(torch.ones(4, dtype=torch.int32 if odd() else torch.float32), "sum", ALL), SAME),
    "reduction": (lambda: all_reduce(torch.ones(4), "max" if odd() else "sum", ALL), SAME),
    "shape": (lambda: all_reduce(torch.ones(5 if odd() else 4), "sum", ALL), SAME),
    "kind": (other_kind, SAME),
    "placement": (
        lambda: sharded().redistribute(placements=[Shard(1) if odd() else Replicate()]),
        "rank 0 sends 12 elements to rank 1, which expects 4",
    ),
    "one more": (one_full_tensor_more, PURPOSE),
    "swapped": (swapped_reductions, "they reach the same lines in another order"),
    "absurd length": (
        lambda: all_to_all(torch.ones(3), [1, 1, 1], [1 << 53 if odd() else 1, 1, 1], ALL),
        f"rank 0 sends 1 elements to rank 1, which expects {1 << 53}",
    ),
}


def call(name: str) -> None:
    CALLS[name][0]()


@pytest.mark.parametrize("name", CALLS)
@WORLDS
def test_all_ranks_raise_one_text_with_all_calls_and_lines(ranks: World, name: str) -> None:
    (act, why), text = CALLS[name], one_text(ranks, partial(call, name))
    assert f": {why}.\n" in text
    assert re.findall("^  rank .", text, re.MULTILINE) == ["  rank 0", "  rank 1", "  rank 2"]
    assert text.count(f"called at {HERE}:") == 3
    assert text.count(f" in {act.__name__}\n") == 3 or why != SAME
    assert text.endswith("Fix: make all ranks of a group call the same collectives in the same order.")


@pytest.mark.processes
def test_real_ranks_raise_what_simulated_ones_do() -> None:
    for name in ("kind", "placement", "one more", "swapped", "absurd length"):
        simulated, real = (re.sub(r"#\d+", "#", one_text(ranks, partial(call, name))) for ranks in (SIMULATED, REAL))
        assert real.splitlines()[0] == simulated.splitlines()[0], name
        assert real.count("\n  rank ") == 3
    REAL.run(same_order)


def go_on() -> list[str]:
    """A different call, of which some ranks have sent their part and others nothing, and then equal calls."""
    return [caught(other_kind), *(caught(lambda: barrier(ALL)) for _ in range(3))]


@pytest.mark.processes
def test_after_different_calls_ranks_raise_again_and_send_nothing() -> None:
    (text,) = {text for texts in REAL.run(go_on) for text in texts}
    assert f": {SAME}.\n" in text


def as_on_other_hosts() -> None:
    records = TORCH_TRANSPORT._memory
    assert records is not None
    for peer in {*ALL} - {rank()}:
        records.add_peer(peer, None)


def one_reduction_of_many_differs() -> None:
    as_on_other_hosts()
    for i in range(100):
        all_reduce(torch.ones(4), "max" if odd() and i == 9 else "sum", ALL)


def one_value_differs() -> None:
    as_on_other_hosts()
    for i in range(100):
        full(sharded() * torch.full((6,), 2.0 if odd() and i >= 7 else 1.0))


@pytest.mark.processes
def test_ranks_on_several_hosts_find_it_at_one_of_the_next_64_calls() -> None:
    text = one_text(REAL, one_reduction_of_many_differs)
    assert ": all ranks must make the same call.\n" in text
    assert text.count("all_reduce sum of float32 (4,)") == 2
    assert text.count("all_reduce max of float32 (4,)") == 1
    assert "mul: the plain tensor beside DTensors" in one_text(REAL, one_value_differs)


def agree_on_several_hosts() -> None:
    as_on_other_hosts()
    same_order()


@pytest.mark.processes
def test_ranks_on_several_hosts_that_agree_raise_nothing() -> None:
    with pytest.raises(ZeroDivisionError):  # the pool joins a new world before and after
        REAL.run(fail)
    REAL.run(agree_on_several_hosts)
    with pytest.raises(ZeroDivisionError):
        REAL.run(fail)


def gather_on_different_lines() -> list[float]:
    x, found = sharded(), []
    for _ in range(3):
        if rank() == 0:
            v = x.full_tensor()
            found.append(v.sum().item())
        else:
            _ = x.full_tensor()
        p = x
        p.full_tensor()
    return found


def gather_with_other_names() -> None:
    state = {"a": sharded(), "b": sharded()}
    if rank() == 0:
        for v in state.values():
            v.full_tensor()
    else:
        [p.full_tensor() for p in state.values()]


def take_turns() -> None:
    x = sharded()
    for step in range(6):
        if rank() == step % 3:
            v = x.sum().item()
            assert v == 630
        else:
            x.sum().item()


def same_order() -> None:
    if odd():  # alone, so this call is not counted
        with pytest.raises(MismatchError, match="Rank 1 sends 1 elements to rank 1, which expects 2"):
            all_to_all(torch.ones(3), [1, 1, 1], [1, 2, 1], ALL)
    x = distribute_tensor(torch.arange(6.0), Mesh((3,)), [Shard(0)])
    for _ in range(100):
        x.sum().item()
        if rank() == 0:
            assert full(x.sum()) == 15
        else:
            full(x.sum())
        partial = DTensor.from_local(torch.ones(3), Mesh((3,)), [Partial()])
        partial.redistribute(placements=[Replicate()])


@pytest.mark.parametrize("act", [gather_on_different_lines, gather_with_other_names, take_turns, same_order])
@WORLDS
def test_ranks_may_call_the_same_collective_on_different_lines(ranks: World, act: Callable[[], object]) -> None:
    ranks.run(act)


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


def other_dtype() -> str:
    return refusal(partial(call, "dtype"))


def other_counts() -> str:
    """Rank 1 sends an element too many to rank 2, which would be its end on real ranks."""
    counts = [1, 1, 2] if rank() == 1 else [1, 1, 1]
    return refusal(lambda: all_to_all(torch.ones(sum(counts)), counts, [1, 1, 1], ALL))


def other_purpose() -> str:
    with describing(lambda: "of columns" if rank() == 1 else "of rows"):
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
    mesh, whole = Mesh((3,)), torch.arange(9.0).view(3, 3)
    rows, columns = distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(whole, mesh, [Shard(1)])
    if rank() == 1:
        return refusal(lambda: columns.redistribute(placements=[Shard(0)])).splitlines()
    return refusal(lambda: rows.redistribute(placements=[Shard(1)])).splitlines()


CALL, SUM = "all_to_all of float32, send counts {}, receive counts (1, 1, 1)", "all_reduce sum of float32 ({},)"


@WORLDS
def test_moves_between_other_layouts_are_found_though_their_counts_are_the_same(ranks: World) -> None:
    first, *others = ranks.run(other_layouts)
    assert others == [first, first]
    assert first[0].endswith(f"{PURPOSE}.")
    calls = [row for row in first[1:-1] if "called at" not in row]
    assert all(row.startswith(f"  rank {r}: {CALL.format((1, 1, 1))} (") for r, row in enumerate(calls))
    to_columns, to_rows, _ = calls
    assert to_columns.index("Shard(0)") < to_columns.index("Shard(1)")
    assert to_rows.index("Shard(1)") < to_rows.index("Shard(0)")


@WORLDS
@pytest.mark.parametrize(
    ("body", "why", "common", "of_rank_1"),
    [
        (other_dtype, SAME, SUM.format(4), "all_reduce sum of int32 (4,)"),
        (
            other_counts,
            "rank 1 sends 2 elements to rank 2, which expects 1",
            CALL.format((1, 1, 1)),
            CALL.format((1, 1, 2)),
        ),
        (other_purpose, PURPOSE, f"{SUM.format(2)} (of rows)", f"{SUM.format(2)} (of columns)"),
        (other_line, "all ranks must make it in the same line", SUM.format(2), SUM.format(2)),
    ],
)
def test_every_rank_raises_who_differs_and_how_before_anything_is_sent(
    ranks: World, body: Callable[[], str], why: str, common: str, of_rank_1: str
) -> None:
    assert same_text(ranks, body) == [
        f"Ranks (0, 1, 2) disagree on their collective: {why}.",
        f"  rank 0: {common}",
        f"  rank 1: {of_rank_1}",
        f"  rank 2: {common}",
        "  Fix: make all ranks of a group call the same collectives in the same order.",
    ]


def one_left_out() -> tuple[int, str]:
    """Rank 1 has made fewer collectives with this group than the others, by its own count."""
    log = collectives.transport().ledger.log(ALL)
    here = log.latest + 10
    log.latest = here - 7 * odd()
    text = refusal(lambda: all_reduce(torch.ones(2), "sum", ALL))
    log.latest = here
    return here, text


@WORLDS
def test_ranks_that_made_different_numbers_of_collectives_are_told(ranks: World) -> None:
    ((here, text),) = set(ranks.run(one_left_out))
    assert text.splitlines()[0] == (
        f"Ranks (0, 1, 2) disagree on their collective #{here + 1}: "
        f"it is collective #{here + 1}, #{here - 6}, #{here + 1} to them."
    )


def same_as_without() -> tuple[list[float], int, int]:
    """Uneven counts, groups of two, gradients: results, and what `count_comms` counts."""
    mesh = Mesh((3,))
    x = distribute_tensor(torch.arange(14.0).view(7, 2), mesh, [Shard(0, sizes=[4, 0, 3])])
    x.requires_grad_()
    with count_comms() as comms:
        whole = x.redistribute(placements=[Replicate()])
        (whole * whole).sum().backward()
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


def in_another_thread() -> str:
    """As autograd's threads do."""
    with fingerprint(), ThreadPoolExecutor(1) as pool, pytest.raises(MismatchError) as caught:
        pool.submit(all_reduce, torch.ones(rank() + 1), "sum", ALL).result()
    return str(caught.value)


@pytest.mark.processes
def test_real_ranks_and_other_threads_compare_as_simulated_ranks_do() -> None:
    assert same_text(REAL, in_another_thread)[0].endswith("all ranks must make the same call.")
    for body in (other_dtype, other_counts, other_purpose, other_line):
        assert same_text(REAL, body) == same_text(SIMULATED, body)
    assert REAL.run(same_as_without_compared) == REAL.run(same_as_without)
    assert REAL.run(switched) == SIMULATED.run(switched)


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
