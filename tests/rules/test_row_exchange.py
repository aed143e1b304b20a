"""Rows are sent to their owners: a rank that fails before it answers fails all, and tables stay usable."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import DTensor, Mesh, Shard, distribute_tensor, rank
from shardwise._rules.row_exchange import Route
from shardwise.errors import RemoteRankError
from shardwise.parallel import mix_experts
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
