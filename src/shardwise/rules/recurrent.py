"""Recurrent layers: every sequence of a batch is on its own; cut weights are gathered for the whole layer at once."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from shardwise.layout import REPLICATE, Shard
from shardwise.rules.empty import never_empty
from shardwise.rules.row import Meta, OpRule, Row, local_with, register

aten = torch.ops.aten


def layer(
    input: Meta, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool, *rest: Any
) -> list[Row]:
    """torch.lstm, gru, rnn_tanh, rnn_relu: sequences, states (layers, batch, hidden) and all weights to both."""
    if _packed(hx):
        raise NotImplementedError("packed sequences have batches of many sizes")
    if dropout > 0 and train and num_layers > 1:
        raise NotImplementedError("elements between layers are dropped by their places")
    batch = 0 if rest[-1] else 1
    return _of_batch(input, hx, params, batch, 1)


def cell(input: Meta, hx: Any, *params: Any, **named: Any) -> list[Row]:
    """One step; what belongs to a batch has it in its first dim."""
    return _of_batch(input, hx, [x for x in (*params, *named.values()) if isinstance(x, Meta)], 0, 0)


def _of_batch(input: Meta, hx: Any, params: Sequence[Meta], batch: int, of_states: int) -> list[Row]:
    states = 1 if isinstance(hx, Meta) else len(hx)
    kept = (Shard(of_states),) * states
    filled = (input.ndim, *(input.ndim,) * states, *(len(x.shape) - 1 for x in params))
    inputs = (Shard(batch), *kept, *(REPLICATE,) * len(params))
    output = (Shard(batch), *kept) if of_states else kept if states > 1 else kept[0]
    return [Row(inputs, output, "each rank follows its own sequences", local_with(never_empty, filled))]


def packed(*_: Any) -> list[Row]:
    """Packed sequences: batches of many sizes, one after the other in one dim."""
    raise NotImplementedError("a rank's part of packed sequences is none")


def _with_plain_sizes(op: Any) -> Any:
    """Sizes of batches and lengths are numbers that the program reads, so they leave as a plain tensor."""

    def run(*args: Any) -> Any:
        data, sizes = op(*args)
        return data, sizes.to_local()

    return run


def _in_steps(name: str, *args: Any) -> Any:
    op = getattr(aten, name)
    return (op.data if _packed(args[1]) else op.input)(*args)


def _packed(second: Any) -> bool:
    """Whether the sizes of batches stand where else the states do."""
    return not isinstance(second, list) and getattr(second, "ndim", 0) == 1


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    register(OpRule(layer, decomposition=partial(_in_steps, _name)), getattr(torch, _name))
    register(OpRule(cell), getattr(torch, f"{_name}_cell"))
    register(OpRule(packed), getattr(aten, _name).data)
for _name in ("_pack_padded_sequence", "_pad_packed_sequence"):
    register(OpRule(packed), getattr(aten, _name).default)
    register(OpRule(packed, decomposition=_with_plain_sizes(getattr(aten, _name).default)), getattr(torch, _name))
