"""One table for input and output: gradients of both uses, cut vocabularies, and results cut along the sequence."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import (
    Mesh,
    Placement,
    Replicate,
    Shard,
    collectives,
    count_comms,
    distribute_tensor,
    shard_module,
)
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

R, S0, S1 = Replicate(), Shard(0), Shard(1)
VOCAB, DIM = 11, 8


class Tied(nn.Module):
    """A language model of one layer, whose table of tokens also scores them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.scores = nn.Linear(DIM, VOCAB, bias=False)
        self.scores.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.norm(self.tokens(ids)))
        return scores


torch.manual_seed(2)
MODEL = Tied().double()
IDS = torch.randint(0, VOCAB, (3, 5))
NEXT = IDS.roll(-1, 1)


def loss_of(model: nn.Module, ids: Any, labels: Any) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


LAYOUTS: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((1,), [S0]),
    ((2,), [S0]),
    ((3,), [Shard(0, (3, 0, 8))]),
    ((4,), [S0]),
    ((5,), [Shard(0, (0, 5, 1, 1, 4))]),
    ((4,), [S1]),
    ((2, 2), [R, S0]),
    ((2, 2), [S1, S0]),
]


@pytest.mark.parametrize("batch", [R, S0])
@pytest.mark.parametrize(("shape", "table"), LAYOUTS, ids=str)
def test_a_tied_table_stays_one_and_learns_from_both_of_its_uses(
    shape: tuple[int, ...], table: list[Placement], batch: Placement
) -> None:
    expected = deepcopy(MODEL)
    loss = loss_of(expected, IDS, NEXT)
    loss.backward()
    only_scores = torch.autograd.grad(
        F.cross_entropy(
            F.linear(MODEL.norm(MODEL.tokens(IDS)).detach(), MODEL.tokens.weight).flatten(0, 1), NEXT.flatten()
        ),
        MODEL.tokens.weight,
    )[0]
    mesh = Mesh(shape)

    def body() -> None:
        model = shard_module(deepcopy(MODEL), {"tokens.weight": table, "scores.weight": table}, mesh=mesh)
        assert model.get_parameter("tokens.weight") is model.get_parameter("scores.weight")
        ids, labels = (distribute_tensor(x, mesh, [batch, *[R] * (len(shape) - 1)]) for x in (IDS, NEXT))
        ours = loss_of(model, ids, labels)
        assert_close(as_dtensor(ours).full_tensor(), loss)
        ours.backward()
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert q.grad is not None
            assert_close(as_dtensor(p.grad).full_tensor(), q.grad, msg=name)
        assert not torch.allclose(as_dtensor(model.get_parameter("tokens.weight").grad).full_tensor(), only_scores)

    world(mesh.size()).run(body)


@pytest.mark.parametrize("table", [S0, Shard(0, (2, 5, 0, 4))], ids=str)
@pytest.mark.parametrize("length", [5, 8])
def test_looked_up_rows_are_reduced_straight_into_pieces_of_the_sequence(table: Shard, length: int) -> None:
    """Each rank sends the others' positions of its summands: a reduce-scatter, not an all-reduce and a slice."""
    ids = torch.randint(0, VOCAB, (3, length), generator=torch.Generator().manual_seed(3))
    rows = MODEL.tokens.weight.detach()
    expected = rows.clone().requires_grad_()
    (F.embedding(ids, expected) ** 3).sum().backward()

    def body() -> None:
        weight = distribute_tensor(rows, Mesh((4,)), [table]).requires_grad_()
        everywhere = distribute_tensor(ids, Mesh((4,)), [R])
        with count_comms() as comms:
            out = as_dtensor(F.embedding(everywhere, weight)).redistribute(placements=[S1])
        own = out.to_local().shape[1]
        assert own == max(0, min(-(-length // 4), length - collectives.rank() * -(-length // 4)))
        assert comms.calls == {"all_to_all": 1}
        assert comms.total_bytes == 3 * (length - own) * DIM * 8
        assert_close(out.full_tensor(), F.embedding(ids, rows))
        with count_comms() as comms:
            (out**3).sum().backward()
            found = as_dtensor(weight.grad)
        assert comms.calls == {"all_to_all": 1}  # the dual: gradients of all positions come to every rank
        assert comms.total_bytes == 3 * own * DIM * 8 * 3
        assert found.placements == (table,)
        assert_close(found.full_tensor(), expected.grad)

    world(4).run(body)
