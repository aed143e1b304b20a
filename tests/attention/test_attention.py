"""Attention on sharded operands equals one process; keys meet in one exchange."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from shardwise import DTensor, Mesh, Replicate, Shard, count_comms, distribute_tensor
from shardwise.testing import check_rows, world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import sent
from tools.op_judge import Sample
from tools.rule_checks import assert_equals_one_process

GENERATOR = torch.Generator().manual_seed(4)
MESHES = (Mesh((3,)), Mesh((2, 2)))
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
attention = F.scaled_dot_product_attention


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def some(*shape: int) -> Tensor:
    """A mask that blinds some queries."""
    mask = torch.rand(shape, generator=GENERATOR) > 0.4
    mask[..., 1, :] = False
    return mask


def causal_and_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """A call without a row. torch's kernels disagree on whether they take it, and so do its versions."""
    return attention(query, key, value, mask, is_causal=True)


def is_refused_by_torch(function: Callable[..., Tensor], *args: Tensor) -> bool:
    try:
        function(*args)
    except RuntimeError:
        return True
    return False


Q, K, V = normal(2, 4, 5, 3), normal(2, 4, 6, 3), normal(2, 4, 6, 2)
FEW_K, FEW_V = K[:, :2].contiguous(), V[:, :2].contiguous()
SAMPLES = [
    Sample(attention, (Q, K, V)),
    Sample(attention, (Q, K, V), {"is_causal": True}),
    Sample(attention, (Q, K[:, :, :3].contiguous(), V[:, :, :3].contiguous()), {"is_causal": True, "scale": 0.3}),
    Sample(attention, (Q, K, V, some(5, 6))),
    Sample(attention, (Q, K, V, some(2, 1, 5, 6))),
    Sample(attention, (Q, K, V, some(2, 4, 5, 1))),
    Sample(attention, (Q, K, V, normal(4, 5, 6))),
    Sample(attention, (Q, K, V, normal(2, 1, 1, 6))),
    Sample(attention, (Q, K[:, :1].contiguous(), V[:1].contiguous())),
    Sample(attention, (Q[0], K[0], V[0]), {"is_causal": True}),
    Sample(attention, (Q[0, 0], K[0, 0], V[0, 0], some(5, 6))),
    Sample(attention, (Q, FEW_K, FEW_V), {"enable_gqa": True}),
    Sample(attention, (Q, FEW_K, FEW_V, some(4, 5, 6)), {"enable_gqa": True}),
    Sample(attention, (Q, FEW_K, FEW_V), {"enable_gqa": True, "is_causal": True}),
    Sample(attention, (Q, FEW_K, V), {"enable_gqa": True}),
    Sample(attention, (normal(1, 6, 2, 3), normal(1, 2, 3, 3), normal(1, 2, 3, 3)), {"enable_gqa": True}),
    Sample(attention, (Q, K[:, :, :1].contiguous(), V[:, :, :1].contiguous(), normal(5, 1))),
    Sample(attention, (Q, K[:, :, :0].contiguous(), V[:, :, :0].contiguous())),
    Sample(attention, (Q * 400, K * 400, V)),
]
CAUSAL_AND_MASKED = (Q, K, normal(2, 4, 6, 3), some(5, 6))
if not is_refused_by_torch(causal_and_masked, *CAUSAL_AND_MASKED):
    SAMPLES.append(Sample(causal_and_masked, CAUSAL_AND_MASKED, gradients=False))


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_attention_equals_one_process(sample: Sample) -> None:
    assert assert_equals_one_process([sample], MESHES, limit=7).cases >= 14


PROJECTIONS = (normal(12, 4), normal(12), None, None, False, 0.0, normal(4, 4), normal(4))
MULTI_HEAD = [  # of three examples and of one: results of every number of dims
    Sample(
        F.multi_head_attention_forward,
        (*(normal(length, *examples, 4) for length in (5, 4, 4)), 4, 2, *PROJECTIONS),
        options,
    )
    for examples in ((3,), ())
    for options in ({}, {"average_attn_weights": False}, {"need_weights": False})
]


@pytest.mark.parametrize(
    "sample",
    [pytest.param(sample, marks=[pytest.mark.slow] * (i not in (1, 3))) for i, sample in enumerate(MULTI_HEAD)],
    ids=lambda sample: f"{sample.args[0].ndim}d-{sample.kwargs}",
)
def test_each_row_of_multi_head_attention_equals_one_process(sample: Sample) -> None:
    check_rows(sample.op, sample.args, sample.kwargs, limit=4)


def test_batch_heads_and_causal_queries_are_computed_where_they_are() -> None:
    for placements in ((S0, S0, S0), (S1, S1, S1), (S2, R, R)):
        operands = zip((Q, K, V), placements, strict=True)
        assert sent(Mesh((4,)), partial(attention, is_causal=True), *operands) == [((placements[0],), 0, 0)] * 4


@world(2)
def test_layers_with_a_sharded_batch_do_not_communicate() -> None:
    x = distribute_tensor(INPUT, Mesh((2,)), [S0])
    for module in (
        nn.MultiheadAttention(8, 2, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    ):
        with count_comms() as comms:
            out = module.double().eval()(*[x] * (3 if isinstance(module, nn.MultiheadAttention) else 1))
            assert as_dtensor(out[0] if isinstance(out, tuple) else out).placements == (S0,)
        assert comms.total_calls == 0


def test_sharded_keys_need_one_collective_whose_size_does_not_depend_on_their_number() -> None:
    for keys in (6, 60):
        k, v = (torch.ones(2, 4, keys, n, dtype=torch.float64) for n in (3, 2))
        found = sent(Mesh((3,)), attention, (Q[:, :, :1], R), (k, S2), (v, S2))
        assert [rest for _, *rest in found] == [[1, 2 * (2 * 4 * (2 + 2)) * 8]] * 3


def test_key_heads_are_sharded_with_the_query_heads_that_share_them() -> None:
    for of_keys in (S1, R):
        operands = (Q, S1), (FEW_K, of_keys), (FEW_V, of_keys)
        assert sent(Mesh((2,)), partial(attention, enable_gqa=True), *operands) == [((S1,), 0, 0)] * 2


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
@world(2)
def test_a_causal_bias_of_torch_is_the_mask_that_it_describes(bias: Any) -> None:
    expected = attention(Q, K, V, bias(5, 6))
    for placement in (R, S1, S2):
        q, k, v = (distribute_tensor(x, Mesh((2,)), [placement]) for x in (Q, K, V))
        torch.testing.assert_close(as_dtensor(attention(q, k, v, bias(5, 6))).full_tensor(), expected)


@pytest.mark.slow
@world(2)
def test_attention_under_autocast_has_the_dtype_of_one_process() -> None:
    single = Q.float(), K.float(), V.float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = attention(single[0], single[1], single[2])
        for placements in ([S1, S1, S1], [S2, R, R], [R, S2, S2]):
            pairs = zip(single, placements, strict=True)
            q, k, v = (distribute_tensor(x, Mesh((2,)), [p]) for x, p in pairs)
            out = as_dtensor(attention(q, k, v, is_causal=False))
            assert out.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(out.full_tensor(), expected, rtol=0.02, atol=0.02)


INPUT = normal(4, 5, 8)
PADDING = torch.arange(5) >= torch.tensor([[3], [5], [1], [4]])
LAYERS: list[tuple[Callable[[], nn.Module], int, dict[str, Any]]] = [
    (lambda: nn.MultiheadAttention(8, 2, batch_first=True), 3, {}),
    (lambda: nn.MultiheadAttention(8, 4, add_bias_kv=True, add_zero_attn=True, bias=False), 3, {"need_weights": False}),
    (lambda: nn.MultiheadAttention(8, 2, batch_first=True), 3, {"key_padding_mask": PADDING}),
    (lambda: nn.MultiheadAttention(8, 2, batch_first=True), 3, {"attn_mask": torch.ones(5, 5).triu(1).bool()}),
    (lambda: nn.MultiheadAttention(8, 2, batch_first=True), 3, {"attn_mask": INPUT[:, :, :5].repeat_interleave(2, 0)}),
    (lambda: nn.MultiheadAttention(8, 2, batch_first=True), 3, {"average_attn_weights": False}),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1, {"src_key_padding_mask": PADDING}),
    (lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True), 2, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("number", range(len(LAYERS)))
def test_attention_layers_equal_one_process(number: int, training: bool) -> None:
    """In eval mode as well, where torch has a fast path for plain tensors."""
    make, operands, arguments = LAYERS[number]
    module = make().double().train(training)

    def run(*inputs: Any) -> list[Any]:
        layer = deepcopy(module)
        leaves = [x.requires_grad_() for x in inputs]
        outs = layer(*leaves, **arguments)
        outs = [x for x in (outs if isinstance(outs, tuple) else (outs,)) if x is not None]
        torch.stack([x.sin().sum() for x in outs]).sum().backward()
        return [*(x.detach() for x in outs), *(x.grad for x in (*leaves, *layer.parameters()))]

    def sharded(placement: Any) -> list[Tensor]:
        results = run(*(distribute_tensor(INPUT, Mesh((3,)), [placement]) for _ in range(operands)))
        return [x.full_tensor() if isinstance(x, DTensor) else x for x in results]

    expected = run(*(INPUT.clone() for _ in range(operands)))
    for placement in (R, S0, S1, S2, Shard(0, (3, 0, 1)), Shard(1, (1, 0, 4))):
        for got in world(3).run(sharded, placement):
            torch.testing.assert_close(got, expected)
