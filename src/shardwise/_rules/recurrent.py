"""Recurrent layers. The batch may be sharded; sharded weights are all-gathered once per layer."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise._layout import REPLICATE, Shard
from shardwise._rules.local_context import local_with
from shardwise._rules.local_tensors import never_empty
from shardwise._rules.registry import OpRule, register
from shardwise._rules.row import Meta, Op, Row

aten = torch.ops.aten
States = Meta | Sequence[Meta]


def layer(
    input: Meta,
    hx: States,
    params: Sequence[Meta],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    *rest: object,
) -> list[Row]:
    """torch.lstm, gru, rnn_tanh, rnn_relu: sequences, states (layers, batch, hidden) and all weights to both."""
    if _packed(hx):
        raise NotImplementedError("packed sequences have batches of different sizes")
    if dropout > 0 and train and num_layers > 1:
        raise NotImplementedError("dropout between layers uses a counter-based RNG")
    batch = 0 if rest[-1] else 1
    return _of_batch(input, hx, params, batch, 1)


def cell(input: Meta, hx: States, *params: object, **named: object) -> list[Row]:
    """One step of a layer; the batch is dim 0 of all batched operands."""
    return _of_batch(input, hx, [x for x in (*params, *named.values()) if isinstance(x, Meta)], 0, 0)


def _of_batch(input: Meta, hx: States, params: Sequence[Meta], batch: int, of_states: int) -> list[Row]:
    states = 1 if isinstance(hx, Meta) else len(hx)
    of_hidden = (Shard(of_states),) * states
    filled_dims = (input.ndim, *(input.ndim,) * states, *(len(x.shape) - 1 for x in params))
    inputs = (Shard(batch), *of_hidden, *(REPLICATE,) * len(params))
    output = (Shard(batch), *of_hidden) if of_states else of_hidden if states > 1 else of_hidden[0]
    return [Row(inputs, output, "batch-sharded", local_with(never_empty, filled_dims))]


def packed(*_: object) -> list[Row]:
    """Packed sequences: batches of different sizes, concatenated in one dim."""
    raise NotImplementedError("a shard of packed sequences is not a packed sequence")


def _with_plain_sizes(op: Op) -> Op:
    """The op, with its returned sizes as a plain tensor, because the program reads them."""

    def run(*args: object) -> tuple[Tensor, Tensor]:
        data, sizes = op(*args)
        return data, sizes.to_local()

    return run


def _overload(name: str, *args: object) -> Any:
    op = getattr(aten, name)
    return (op.data if _packed(args[1]) else op.input)(*args)


def _packed(second: object) -> bool:
    """Whether the second argument is the batch sizes, not the states."""
    return not isinstance(second, list) and getattr(second, "ndim", 0) == 1


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    register(OpRule(layer, decomposition=partial(_overload, _name)), getattr(torch, _name))
    register(OpRule(cell), getattr(torch, f"{_name}_cell"))
    register(OpRule(packed), getattr(aten, _name).data)
for _name in ("_pack_padded_sequence", "_pad_packed_sequence"):
    register(OpRule(packed), getattr(aten, _name).default)
    register(OpRule(packed, decomposition=_with_plain_sizes(getattr(aten, _name).default)), getattr(torch, _name))
