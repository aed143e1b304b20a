"""Collectives that have begun: short messages of every dtype are seen, and threads may end their waits meanwhile."""

import threading

import pytest
import torch
import torch.distributed as dist

from shardwise._collectives.started import OpenWorks, RecvCheck

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint32,
]  # fmt: skip
SHORT_INTEGERS = {torch.uint8: 4, torch.int8: 4, torch.int16: 2}  # elements in four bytes


def arrived(dtype: torch.dtype, counts: list[int], came: list[int], value: int = 1) -> tuple[torch.Tensor, int | None]:
    """A buffer for pieces of `counts` elements, of which `came` came; and who is said to have sent too few."""
    out = torch.empty(sum(counts), dtype=dtype)
    check = RecvCheck(out, counts, own=1)
    for shard, length in zip(out.split(counts), came, strict=True):
        shard[:length] = value
    return out, check.short_position()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0, 1])
def test_pieces_that_came_whole_are_as_they_were_sent(dtype: torch.dtype, value: int) -> None:
    for counts in ([1, 1, 1], [3, 0, 5], [0, 2, 0], [9, 4, 1]):
        out, short = arrived(dtype, counts, counts, value)
        assert short is None
        assert torch.equal(out, torch.full((sum(counts),), value).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
        check = RecvCheck(out, [1, 0, 1], own=1)
        out.fill_(special)
        assert check.short_position() is None


# ---- works that nobody has waited for ---------------------------------------------------------------------


class EndedElsewhere(dist.Work):
    """Another thread ends its wait for a collective while this one is asked whether it is completed."""

    def __init__(self, works: OpenWorks, key: int) -> None:
        super().__init__()
        self.works, self.key = works, key

    def is_completed(self) -> bool:
        thread = threading.Thread(target=self.works.remove, args=(self.key,))
        thread.start()
        thread.join()
        return False


def test_a_collective_begins_while_another_thread_ends_its_wait() -> None:
    works = OpenWorks()
    first = works.add([dist.Work()])
    second = works.add([EndedElsewhere(works, first)])
    third = works.add([])
    assert len({first, second, third}) == 3
