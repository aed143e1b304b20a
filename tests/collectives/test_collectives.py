"""Collectives, simulated and real, with sizes of every kind; and what has begun and nobody has waited for."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import reduce

import pytest
import torch
import torch.distributed as dist

from shardwise import _collectives as collectives
from shardwise._collectives import count_comms, rank
from shardwise._collectives.started import SLICE_SECONDS, Mark, OpenWorks, mark_ends
from shardwise.errors import GroupError, MismatchError
from shardwise.testing import world

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float64, torch.complex128]
COUNTS = [(4, 4, 4), (3, 3, 1), (0, 5, 0), (0, 0, 0), (1, 0, 2)]
GROUPS = [(0, 1, 2), (0, 2)]  # of the world's process group, and of ranks without one


def numbers(owner: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count) + 7 * owner + 1).to(dtype)


def gather_and_broadcast(counts: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype) -> None:
    if rank() not in ranks:
        return
    counts = counts[: len(ranks)]
    every = [numbers(r, count, dtype) for r, count in zip(ranks, counts, strict=True)]
    own = every[ranks.index(rank())]
    before = own.clone()
    gathered = collectives.all_gather(own, counts, ranks)
    assert gathered.dtype == dtype
    assert torch.equal(gathered, torch.cat(every))
    for root, sent in zip(ranks, every, strict=True):
        given = own if rank() == root else own.new_empty(0)
        received = collectives.broadcast(given, len(sent), root, ranks)
        assert torch.equal(received, sent)
        received.zero_()
    gathered.zero_()
    assert torch.equal(own, before)  # nothing shares its memory


def reduce_and_scatter(counts: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype) -> None:
    if rank() not in ranks:
        return
    counts = counts[: len(ranks)]
    every = [numbers(r, sum(counts), dtype) for r in ranks]
    every[0][:3] = 0  # so that sums of bools are not all true
    every[1][:2] = 0
    position = ranks.index(rank())
    own = every[position]
    before = own.clone()
    total = reduce(torch.logical_or if dtype == torch.bool else torch.add, every)
    result = collectives.reduce_scatter(own, counts, ranks)
    assert result.dtype == dtype
    assert torch.equal(result, total.split(list(counts))[position])
    assert result.untyped_storage().nbytes() == result.nbytes  # it keeps no padding
    result.zero_()
    assert torch.equal(own, before)


@pytest.mark.parametrize("ranks", GROUPS)
@pytest.mark.parametrize("counts", COUNTS)
def test_simulated_ranks_get_what_the_others_have(counts: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        world(3).run(gather_and_broadcast, counts, ranks, dtype)
        world(3).run(reduce_and_scatter, counts, ranks, dtype)


def every_case() -> None:
    for ranks in GROUPS:
        for counts in COUNTS:
            for dtype in DTYPES:
                gather_and_broadcast(counts, ranks, dtype)
                reduce_and_scatter(counts, ranks, dtype)


@pytest.mark.processes
def test_real_ranks_get_what_the_others_have_in_any_group_and_wait_for_late_ones() -> None:
    world(3, real=True).run(every_case)
    assert world(3, real=True).run(from_a_late_root) == [[2.0] * 3, [], [2.0] * 3]
    world(3, real=True).run(in_groups_of_torch)


def from_a_late_root() -> list[float]:
    if rank() == 1:
        return []
    collectives.barrier((0, 2))
    if rank() == 2:
        time.sleep(2 * SLICE_SECONDS)
    return collectives.broadcast(torch.full((3,), float(rank())), 3, 2, (0, 2)).tolist()  # rank 0 only receives


def in_groups_of_torch() -> None:
    for ranks in [(0, 2), (2, 0), (2, 0, 1)]:
        for _ in range(2):
            group = dist.new_group(list(ranks), sort_ranks=False)
            members = tuple(sorted(ranks))
            if rank() in ranks:
                assert isinstance(group, dist.ProcessGroup)
                assert collectives.group_ranks(group) == ranks
                known = collectives.process_group(ranks)
                assert isinstance(known, dist.ProcessGroup)
                assert dist.get_process_group_ranks(known) == list(ranks)
                gather_and_broadcast((3, 3, 1), members, torch.float32)
                reduce_and_scatter((3, 3, 1), members, torch.float32)
                dist.destroy_process_group(group)
                with pytest.raises(GroupError, match="was destroyed"):
                    collectives.group_ranks(group)
            gather_and_broadcast((3, 3, 1), members, torch.float32)
            reduce_and_scatter((3, 3, 1), members, torch.float32)


def sum_in_rank_order() -> list[float]:
    own = [1e8, 1.0, -1e8, 1.0][rank()]
    return collectives.reduce_scatter(torch.full((4,), own), (0, 2, 2, 0), (0, 1, 2, 3)).tolist()


def test_simulated_ranks_add_in_their_order() -> None:
    """1e8 + 1 is 1e8 in single precision, so that another order gives another sum."""
    assert world(4).run(sum_in_rank_order) == [[], [1.0, 1.0], [1.0, 1.0], []]


def scatter_views() -> None:
    x = torch.arange(12.0) + rank()
    for counts in ((3, 3), (4, 2)):
        mine = collectives.reduce_scatter(x[::2], counts, (0, 1))
        assert torch.equal(mine, (4 * torch.arange(6.0) + 1).split(counts)[rank()])
    z = torch.complex(torch.arange(6.0), torch.ones(6))
    assert torch.equal(collectives.reduce_scatter(z.conj(), (3, 3), (0, 1)), 2 * z.conj().split(3)[rank()])
    assert torch.equal(collectives.all_reduce(z.conj(), "product", (0, 1)), z.conj() * z.conj())


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.processes)])
def test_what_is_reduced_may_be_a_strided_or_conjugate_view(real: bool) -> None:
    world(2, real=real).run(scatter_views)


def counted() -> tuple[dict[str, int], dict[str, int]]:
    with count_comms() as comms:
        collectives.all_gather(torch.ones(3 - rank()), (3, 2, 1), (0, 1, 2))
        collectives.reduce_scatter(torch.ones(6), (3, 2, 1), (0, 1, 2))
        collectives.broadcast(torch.ones(5), 5, 1, (0, 1, 2))
    return comms.calls, comms.sent_bytes


def test_what_a_rank_sends_is_counted() -> None:
    """Uneven tensors are padded; the last of a chain sends nothing."""
    once = {"all_gather": 1, "reduce_scatter": 1, "broadcast": 1}
    padded, full = 2 * 3 * 4, 5 * 4
    sent = {"all_gather": padded, "reduce_scatter": padded}
    assert world(3).run(counted) == [(once, {**sent, "broadcast": last}) for last in (0, full, full)]


def of_one_rank() -> None:
    x = torch.arange(3.0)
    for result in (
        collectives.all_gather(x, (3,), (0,)),
        collectives.reduce_scatter(x, (3,), (0,)),
        collectives.broadcast(x, 3, 0, (0,)),
    ):
        assert torch.equal(result, x)
        assert result.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("lengths", "calls"), [((0, 3, 5), 1), ((246, 246, 246), 1), ((247, 0, 1), 2), ((9, 0, 3000), 2)]
)
def test_short_json_values_are_gathered_by_one_collective(lengths: tuple[int, ...], calls: int) -> None:
    every = ["x" * length for length in lengths]  # two bytes more as JSON

    def gather() -> None:
        with count_comms() as comms:
            assert collectives.gather_json(every[rank()], (0, 1, 2)) == every
            found = collectives.gather_json_to_first(every[rank()], (0, 1, 2))
        assert found == (every if rank() == 0 else [])
        assert comms.total_calls == calls + 2

    world(3).run(gather)


def test_a_group_of_one_rank_gets_a_copy() -> None:
    world(1).run(of_one_rank)


DIFFERENT: dict[str, Callable[[], object]] = {
    "root": lambda: collectives.broadcast(torch.ones(2), 2, rank(), (0, 1)),
    "size": lambda: collectives.all_gather(torch.ones(2), (2, 2) if rank() else (2, 3), (0, 1)),
    "shard": lambda: collectives.reduce_scatter(torch.ones(4), (2, 2) if rank() else (1, 3), (0, 1)),
    "kind": lambda: (
        collectives.all_gather(torch.ones(2), (2, 2), (0, 1))
        if rank()
        else collectives.reduce_scatter(torch.ones(4), (2, 2), (0, 1))
    ),
}


def differ(name: str, checked: bool) -> None:
    with collectives.fingerprint() if checked else nullcontext():
        DIFFERENT[name]()


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=[pytest.mark.processes, pytest.mark.slow])])
@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("checked", [False, True])
def test_ranks_that_disagree_raise(name: str, real: bool, checked: bool) -> None:
    with pytest.raises(MismatchError, match="must make the same call"):
        world(2, real=real).run(differ, name, checked)


SENT_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint32,
]  # fmt: skip
SHORT_INTEGERS = {torch.uint8: 4, torch.int8: 4, torch.int16: 2}  # elements in four bytes


def arrived(dtype: torch.dtype, counts: list[int], came: list[int], value: int = 1) -> tuple[torch.Tensor, int | None]:
    """A buffer for pieces of `counts` elements, of which `came` came; and who is said to have sent too few."""
    out = torch.empty(sum(counts), dtype=dtype)
    marks = mark_ends(out, counts, own=1)
    for shard, length in zip(out.split(counts), came, strict=True):
        shard[:length] = value
    return out, short_position(marks)


def short_position(marks: Sequence[Mark]) -> int | None:
    return next((position for position, word, mark in marks if word.value == mark), None)


@pytest.mark.parametrize("dtype", SENT_DTYPES, ids=str)
@pytest.mark.parametrize("value", [0, 1])
def test_pieces_that_came_whole_are_as_they_were_sent(dtype: torch.dtype, value: int) -> None:
    for counts in ([1, 1, 1], [3, 0, 5], [0, 2, 0], [9, 4, 1]):
        out, short = arrived(dtype, counts, counts, value)
        assert short is None
        assert torch.equal(out, torch.full((sum(counts),), value).to(dtype))


@pytest.mark.parametrize("dtype", SENT_DTYPES, ids=str)
def test_a_piece_that_came_short_is_found(dtype: torch.dtype) -> None:
    least = SHORT_INTEGERS.get(dtype, 1)
    for missing in range(least, 9):
        assert arrived(dtype, [3, 2, 8], [3, 2, 8 - missing])[1] == 2
        assert arrived(dtype, [8, 2, 3], [8 - missing, 2, 3])[1] == 0


def test_fewer_than_four_missing_bytes_of_short_integers_go_unseen() -> None:
    """As documented: any mark would be a value that the element may have."""
    assert arrived(torch.uint8, [8, 0, 8], [8, 0, 5])[1] is None
    assert arrived(torch.uint8, [3, 0, 0], [0, 0, 0])[1] is None


def test_the_own_shard_empty_buffers_and_special_values_are_not_taken_for_a_mark() -> None:
    assert arrived(torch.float32, [0, 5, 0], [0, 0, 0])[1] is None
    assert arrived(torch.float32, [0, 0, 0], [0, 0, 0])[1] is None
    for special in (float("nan"), float("inf"), -0.0):
        out = torch.empty(2, dtype=torch.float16)
        marks = mark_ends(out, [1, 0, 1], own=1)
        out.fill_(special)
        assert short_position(marks) is None


class EndedElsewhere(dist.Work):
    """Another thread ends its wait for a collective while this one is asked whether it is completed."""

    def __init__(self, works: OpenWorks, key: int) -> None:
        super().__init__()
        self.works, self.key = works, key

    def is_completed(self) -> bool:
        thread = threading.Thread(target=self.works.pop, args=(self.key,))
        thread.start()
        thread.join()
        return False


def test_a_collective_begins_while_another_thread_ends_its_wait() -> None:
    works = OpenWorks({1: [dist.Work()]})
    works[2] = [EndedElsewhere(works, 1)]
    works.remove_completed()
    assert list(works) == [2]
