"""Rows are sent to their owners.

A rank that fails before it answers fails all, and tables stay usable. What one rank does is linear in the ranks.
"""

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import DTensor, Mesh, Placement, Replicate, Shard, distribute_tensor, rank
from shardwise._collectives import Collective, Wait, using
from shardwise._rules.row_exchange import Route
from shardwise.errors import RemoteRankError
from shardwise.parallel import mix_experts
from shardwise.simulation.one_rank import OneRank
from shardwise.simulation.result import Recorded
from shardwise.testing import world

MESH = Mesh((3,))


def sharded(x: Tensor) -> DTensor:
    return distribute_tensor(x, MESH, [Shard(0)])


def looked_up() -> Tensor:
    return F.embedding(sharded(torch.arange(5) % 4), sharded(torch.arange(14.0).view(7, 2)))


def indexed() -> Tensor:
    return sharded(torch.arange(14.0).view(7, 2))[sharded(torch.arange(5) % 4)]


def mixed_by_experts() -> Tensor:
    chosen = sharded(torch.arange(10).view(5, 2) % 4)
    w1, w2, tokens, weights = (torch.ones(*shape) for shape in ((4, 7, 6), (4, 6, 7), (5, 6), (5, 2)))
    return mix_experts(chosen, sharded(w1), sharded(w2), sharded(tokens), sharded(weights))


@pytest.mark.parametrize("op", [looked_up, indexed, mixed_by_experts])
def test_a_rank_that_fails_between_headers_and_answers_fails_all_and_is_named(
    op: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Route.answer
    named: dict[int, int | None] = {}

    def answer_or_fail(route: Route, rows: Tensor) -> Tensor:
        if rank() == 1:
            raise MemoryError("no room for answers")
        return answer(route, rows)

    def failing() -> None:
        try:
            op()
        except RemoteRankError as error:
            named[rank()] = error.rank
            raise

    with monkeypatch.context() as patch:
        patch.setattr(Route, "answer", answer_or_fail)
        with pytest.raises(MemoryError, match="no room") as caught:
            world(3).run(failing)
    assert caught.value.__notes__[0] == "on rank 1 of 3, simulated"
    assert named == {0: 1, 2: 1}
    assert len(world(3).run(lambda: op().sum())) == 3


class Counting(OneRank):
    """One rank, the bytes that it sends and how many functions it calls."""

    sent_bytes = calls = 0

    def start(self, collective: Collective) -> Wait:
        self.sent_bytes += collective.sent_bytes(self.rank)
        return super().start(collective)

    def count(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event in ("call", "c_call")


X, IDS, COLUMNS = torch.arange(30.0).view(10, 3), torch.arange(12) * 7 % 10, torch.ones(9, 1)
AMONG_RANKS: dict[str, Callable[[Mesh], Tensor]] = {
    "index": lambda mesh: local(X, mesh)[local(IDS, mesh)],
    "replicated index": lambda mesh: local(X, mesh)[local(IDS, mesh, Replicate())],
    "gather": lambda mesh: local(X, mesh).gather(0, local(IDS.view(4, 3), mesh)),
    "index_add": lambda mesh: local(X, mesh).index_add(0, local(IDS, mesh), local(X.repeat(2, 1)[:12], mesh)),
    "embedding": lambda mesh: F.embedding(local(IDS, mesh), local(X, mesh)),
    "embedding, column-wise": lambda mesh: F.embedding(local(IDS % 9, mesh), local(COLUMNS, mesh, Shard(1))),
    "embedding_bag": lambda mesh: F.embedding_bag(local(IDS.view(4, 3), mesh), local(X, mesh), mode="sum"),
    "cat": lambda mesh: torch.cat([local(X, mesh), local(X, mesh)]),
    "roll": lambda mesh: local(X, mesh).roll(7, 0),
    "flatten": lambda mesh: local(COLUMNS, mesh, Shard(1)).flatten(),
    "halo": lambda mesh: F.max_pool1d(local(X.T, mesh, Shard(1)), 3, 1, 1),
}


def local(x: Tensor, mesh: Mesh, placement: Placement | None = None) -> DTensor:
    return DTensor.from_local(x, mesh, [placement or Shard(0)])


@pytest.mark.parametrize("op", AMONG_RANKS)
def test_what_one_rank_does_and_sends_grows_no_faster_than_the_number_of_ranks(op: str) -> None:
    def of_a_rank(count: int) -> tuple[int, int]:
        transport = Counting(count // 2, count, Recorded())
        with using(transport):
            sys.setprofile(transport.count)
            try:
                AMONG_RANKS[op](Mesh((count,)))
            finally:
                sys.setprofile(None)
        return transport.calls, transport.sent_bytes

    of_a_rank(8)  # what is made once for all worlds
    few, more, many = map(of_a_rank, (32, 64, 128))
    for a, b, c in zip(few, more, many, strict=True):
        assert c - b <= 2.2 * max(b - a, 0) + 300, (few, more, many)
