"""Calls of keys of the table of rules that nothing else makes: spellings that torch's own list of samples leaves out.

A key takes the samples of another spelling where torch accepts them, so most keys need no line here.
"""

import torch
from torch import Tensor

from shardwise._rules.shapes.index import boolean_index
from tools.op_judge import Sample

aten = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(7)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


X, ROW, COUNTS = normal(5, 3), normal(3), torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [3, 2, 1], [0, 5, 2]])
IMAGES, QUANTILES = normal(2, 3, 7), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
RECURRENT = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3}  # and how many gates they have
PLAIN = (True, 1, 0.0, False, False, False)  # biases, layers, dropout, training, two directions, batch first
STATES = [normal(1, 4, 2), normal(1, 4, 2)]
LENGTHS, BATCHES = torch.tensor([5, 3, 1, 1]), torch.tensor([4, 2, 2, 1, 1])


def weights(gates: int) -> list[Tensor]:
    """Of a layer from three features to two states."""
    return [normal(2 * gates, 3), normal(2 * gates, 2), normal(2 * gates), normal(2 * gates)]


SAMPLES = [
    # A number first.
    Sample(aten.bitwise_and.Scalar_Tensor, (6, COUNTS)),
    Sample(aten.bitwise_or.Scalar_Tensor, (6, COUNTS)),
    Sample(aten.bitwise_xor.Scalar_Tensor, (6, COUNTS)),
    Sample(aten.float_power.Scalar, (2.0, COUNTS)),
    Sample(aten.pow.Scalar, (2.0, X)),
    Sample(aten.remainder.Scalar_Tensor, (7, COUNTS + 1)),
    Sample(aten.xlogy.Scalar_Self, (2.0, X.abs() + 1)),
    # Conditions.
    Sample(aten.where.ScalarOther, (X > 0, X, 2.0)),
    Sample(aten.where.ScalarSelf, (X > 0, 2.0, X)),
    Sample(aten.where.Scalar, (X > 0, 2.0, 3.0)),
    Sample(aten.where.default, (X > 0,)),
    # Rounded quotients.
    *(
        Sample(op, (X, 0.7), {"rounding_mode": "floor"})
        for op in (
            aten.div.Scalar_mode,
            aten.div_.Scalar_mode,
            aten.divide.Scalar_mode,
            aten.divide_.Scalar_mode,
        )
    ),
    # Shapes.
    Sample(Tensor.resize, (normal(4, 3), 2, 6)),
    # Conversions.
    Sample(Tensor.to, (X, COUNTS)),
    Sample(Tensor.type_as, (COUNTS, X)),
    Sample(aten.type_as.default, (COUNTS, X)),
    Sample(aten.to.device, (COUNTS, torch.device("cpu"), torch.float64)),
    Sample(aten.to.other, (COUNTS, X)),
    Sample(aten.to.prim_Device, (COUNTS, None, torch.float64)),
    # Reductions and order.
    Sample(aten.norm.ScalarOpt_dtype, (X, 2.0), {"dtype": torch.float64}),
    Sample(aten.norm.ScalarOpt_dim_dtype, (X, 2.0, [0], True), {"dtype": torch.float64}),
    Sample(torch._euclidean_dist, (X, normal(4, 3))),
    Sample(aten.nanquantile.default, (X, QUANTILES, 1, True)),
    Sample(aten.bucketize.Scalar, (0.4, QUANTILES)),
    # Random numbers.
    Sample(aten.rand_like.generator, (X,), {"generator": None}),
    Sample(aten.randn_like.generator, (X,), {"generator": None}),
    Sample(aten.randint_like.generator, (X, 9), {"generator": None}),
    Sample(aten.randint_like.low_generator_dtype, (X, 2, 9), {"generator": None}),
    Sample(aten.bernoulli.p, (X, 0.4)),
    Sample(torch.rrelu, (X, 0.1, 0.3, True)),
    Sample(torch.dropout, (X, 0.4, True)),
    Sample(torch.dropout, (X, 0.4, False)),
    Sample(torch.alpha_dropout, (X, 0.4, True)),
    Sample(torch.feature_dropout, (IMAGES, 0.4, True)),
    Sample(torch.feature_alpha_dropout, (IMAGES, 0.4, True)),
    Sample(torch.native_dropout, (X, 0.4, True)),
    # Complex numbers.
    Sample(Tensor.__complex__, (torch.tensor(1.5 + 2j),)),
    # Places and masks.
    Sample(aten.scatter.value_reduce, (X, 0, COUNTS[:2] % 5, 2.0), {"reduce": "add"}),
    Sample(aten.scatter_.value_reduce, (X, 0, COUNTS[:2] % 5, 2.0), {"reduce": "add"}),
    Sample(boolean_index, (X, 0, X > 0)),
    Sample(boolean_index, (X, 0, X[:, 0] > 0)),
    Sample(boolean_index, (X, 1, ROW > 0)),
    # Recurrent layers: four sequences of at most five steps of three features; states of two numbers.
    *(Sample(getattr(torch, n), (normal(5, 4, 3), normal(1, 4, 2), weights(g), *PLAIN)) for n, g in RECURRENT.items()),
    Sample(torch.lstm, (normal(5, 4, 3), STATES, weights(4), *PLAIN)),
    Sample(torch.lstm, (normal(4, 5, 3), STATES, weights(4), *PLAIN[:-1], True)),
    *(Sample(getattr(torch, f"{n}_cell"), (normal(5, 3), normal(5, 2), *weights(g))) for n, g in RECURRENT.items()),
    Sample(torch.lstm_cell, (normal(5, 3), [normal(5, 2), normal(5, 2)], *weights(4))),
    *(
        Sample(getattr(aten, n).data, (normal(10, 3), BATCHES, normal(1, 4, 2), weights(g), *PLAIN[:-1]))
        for n, g in RECURRENT.items()
    ),
    Sample(aten.lstm.data, (normal(10, 3), BATCHES, STATES, weights(4), *PLAIN[:-1])),
    *(
        Sample(op, (normal(5, 4, 3), LENGTHS, False))
        for op in (torch._pack_padded_sequence, aten._pack_padded_sequence.default)
    ),
    *(
        Sample(op, (normal(10, 3), BATCHES, False, 0.0, 5))
        for op in (torch._pad_packed_sequence, aten._pad_packed_sequence.default)
    ),
    # Padding.
    Sample(aten.reflection_pad3d.default, (normal(1, 3, 4, 2, 2), [1, 0, 1, 0, 2, 1])),
    Sample(aten.replication_pad3d.default, (normal(1, 3, 4, 2, 2), [1, 0, 1, 0, 2, 1])),
    # Normalizations.
    Sample(aten.softmax.int, (X, 1)),
    Sample(aten.log_softmax.int, (X, 1)),
    Sample(torch.instance_norm, (IMAGES, normal(3), normal(3), None, None, True, 0.1, 1e-5, False)),
    # Pooling.
    Sample(torch.max_pool1d_with_indices, (IMAGES, 3, 2)),
    Sample(torch.adaptive_max_pool1d, (IMAGES, 3)),
]

# Keys that may differ from one process, and why. One that does not is to be struck.
EXCEPTIONS: dict[str, str] = {}
