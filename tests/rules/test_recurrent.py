"""Recurrent layers on sharded operands equal one process; a sharded batch needs no communication."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from shardwise import DTensor, Mesh, Replicate, Shard, count_comms, distribute_tensor, shard_module
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tools.op_judge import tensors_in

GENERATOR = torch.Generator().manual_seed(8)
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
X = torch.randn(4, 5, 6, dtype=torch.float64, generator=GENERATOR)
STATES = torch.randn(2, 4, 3, dtype=torch.float64, generator=GENERATOR)


class Packed(nn.Module):
    """Sequences of several lengths, not sorted by them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(6, 3, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        packed = pack_padded_sequence(x, torch.tensor([2, 5, 1, 4]), batch_first=True, enforce_sorted=False)
        out, last = self.inner(packed)
        padded, lengths = pad_packed_sequence(out, batch_first=True)
        assert lengths.tolist() == [2, 5, 1, 4]
        return padded, last


LAYERS: list[tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = [
    (lambda: nn.LSTM(6, 3, 2, batch_first=True), (X,)),
    (lambda: nn.LSTM(6, 3, proj_size=2, bidirectional=True), (X,)),
    (lambda: nn.GRU(6, 3, 2, bias=False, batch_first=True), (X, STATES)),
    (lambda: nn.RNN(6, 3, 2, nonlinearity="relu", batch_first=True), (X,)),
    (lambda: nn.RNN(6, 3, 2), (X[0],)),
    (lambda: nn.LSTMCell(6, 3), (X[:, 0],)),
    (lambda: nn.GRUCell(6, 3), (X[:, 0], STATES[0])),
    (lambda: nn.RNNCell(6, 3), (X[0, 0],)),
    (Packed, (X,)),
]


def run(module: nn.Module, operands: tuple[Tensor, ...]) -> list[Any]:
    """Results, gradients of operands, gradients of parameters."""
    leaves = [x.requires_grad_() for x in operands]
    outs = tensors_in(module(*leaves))
    torch.stack([x.sin().sum() for x in outs]).sum().backward()
    return [*(x.detach() for x in outs), *(x.grad for x in (*leaves, *module.parameters()))]


def sharded(module: nn.Module, operands: tuple[Tensor, ...], dim: int, plan: dict[str, Any]) -> list[Tensor]:
    mesh = Mesh((3,))
    layer = deepcopy(module)
    if plan:
        shard_module(layer, plan, mesh=mesh)
    placements = [R if dim >= x.ndim else Shard(dim) for x in operands]
    results = run(
        layer, tuple(distribute_tensor(x.clone(), mesh, [p]) for x, p in zip(operands, placements, strict=True))
    )
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in results]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LAYERS)))
def test_recurrent_layers_equal_one_process(number: int) -> None:
    make, operands = LAYERS[number]
    module = make().double()
    expected = run(deepcopy(module), tuple(x.clone() for x in operands))
    for dim, plan in ((3, {}), (0, {}), (1, {}), (2, {}), (0, {"**": S0})):
        for got in world(3).run(sharded, module, operands, dim, plan):
            torch.testing.assert_close(got, expected)


@world(4)
def test_a_sharded_batch_does_not_communicate_and_gathers_of_weights_are_noted() -> None:
    mesh, states = Mesh((4,)), distribute_tensor(torch.zeros(1, 4, 3, dtype=torch.float64), Mesh((4,)), [S1])
    x, layer = distribute_tensor(X, mesh, [S0]), nn.GRU(6, 3, batch_first=True).double()
    with count_comms() as comms:
        out, last = layer(x, states)
        assert (as_dtensor(out).placements, as_dtensor(last).placements) == ((S0,), (S1,))
    assert comms.total_calls == 0
    shard_module(layer, {"weight_hh_l0": S0}, mesh=mesh)
    with count_comms() as comms:
        layer(x, states)
    assert len(comms.implicit) == comms.total_calls == 1


def test_dropout_between_layers_is_the_same_for_every_layout() -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(6, 3, 2, dropout=0.5, batch_first=True).double()

    def outcome(placement: Any) -> Tensor:
        x = distribute_tensor(X, Mesh((2,)), [placement])
        torch.manual_seed(4)
        return as_dtensor(layer(x)[0]).full_tensor().detach()

    expected = world(2).run(outcome, R)[0]
    for placement in (S0, S1, S2):
        for got in world(2).run(outcome, placement):
            torch.testing.assert_close(got, expected)
