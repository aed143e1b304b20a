"""Attention on sharded operands equals one process; keys meet in one exchange."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from shardwise import DTensor, Mesh, Replicate, Shard, count_comms, distribute_tensor
from shardwise.testing import check_rows, world
from shardwise.testing.assertions import as_dtensor
from tools.op_judge import Sample
from tools.rule_checks import assert_equals_one_process

GENERATOR = torch.Generator().manual_seed(4)
MESHES = (Mesh((3,)), Mesh((2, 2)))
R, S0, S1, S2, S3 = Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)
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


@world(4)
def test_batch_heads_and_causal_queries_are_computed_where_they_are() -> None:
    mesh = Mesh((4,))
    for placement in (S0, S1):
        q, k, v = (distribute_tensor(x, mesh, [placement]) for x in (Q, K, V))
        with count_comms() as comms:
            assert as_dtensor(attention(q, k, v, is_causal=True)).placements == (placement,)
        assert comms.total_calls == 0
    q, k, v = (distribute_tensor(x, mesh, [p]) for x, p in ((Q, S2), (K, R), (V, R)))
    with count_comms() as comms:
        assert as_dtensor(attention(q, k, v, is_causal=True)).placements == (S2,)
    assert comms.total_calls == 0


@pytest.mark.parametrize("mask", [None, some(5, 6), normal(5, 6)], ids=["no mask", "bool", "float"])
@pytest.mark.parametrize("ndim", [3, 4])
def test_a_result_changed_in_place_is_an_error_on_ranks_with_empty_shards_too(ndim: int, mask: Tensor | None) -> None:
    """Whether a kernel saves its result is torch's choice: every rank does as one process."""

    def error_of(x: Any, k: Any, v: Any) -> str:
        out = attention(x.requires_grad_(), k, v, mask)
        out.mul_(2)
        try:
            out.sum().backward()
        except RuntimeError as error:
            return str(error)[:60]
        return ""

    operands = [x if ndim == 4 else x[0] for x in (Q, K, K)]
    expected = error_of(*(x.clone() for x in operands))

    def body() -> str:
        return error_of(*(distribute_tensor(x, Mesh((5,)), [S0]) for x in operands))

    assert world(5).run(body) == [expected] * 5


@world(2)
def test_key_heads_are_sharded_with_the_query_heads_that_share_them() -> None:
    mesh = Mesh((2,))
    q, k, v = (distribute_tensor(x, mesh, [S1]) for x in (Q, FEW_K, FEW_V))
    with count_comms() as comms:
        attention(q, k, v, enable_gqa=True)
    assert comms.total_calls == 0
    k, v = (distribute_tensor(x, mesh, [R]) for x in (FEW_K, FEW_V))
    with count_comms() as comms:
        assert as_dtensor(attention(q, k, v, enable_gqa=True)).placements == (S1,)
    assert comms.total_calls == 0


@world(3)
def test_sharded_keys_need_one_collective_whose_size_does_not_depend_on_their_number() -> None:
    mesh, sent = Mesh((3,)), []
    for keys in (6, 60):
        q = distribute_tensor(Q[:, :, :1], mesh, [R])
        k, v = (distribute_tensor(torch.ones(2, 4, keys, n, dtype=torch.float64), mesh, [S2]) for n in (3, 2))
        with count_comms() as comms:
            attention(q, k, v)
        assert (comms.total_calls, comms.implicit) == (1, [])
        sent.append(comms.total_bytes)
    assert sent[0] == sent[1] == 2 * (2 * 4 * (2 + 2)) * 8


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


def test_dropped_weights_are_the_same_for_every_layout() -> None:
    def dropped(placements: list[Any], ranks: int) -> Tensor:
        pairs = zip((Q, K, V), placements, strict=True)
        q, k, v = (distribute_tensor(x, Mesh((ranks,)), [p]) for x, p in pairs)
        torch.manual_seed(5)
        return as_dtensor(attention(q, k, v, dropout_p=0.5, is_causal=True)).full_tensor()

    expected = world(1).run(dropped, [R, R, R], 1)[0]
    assert not torch.allclose(expected, attention(Q, K, V, is_causal=True))
    for placements in ([S0, S0, S0], [S1, S1, S1], [S2, R, R], [R, S2, S2]):
        for got in world(3).run(dropped, placements, 3):
            torch.testing.assert_close(got, expected)


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


@world(2)
def test_attention_layers_with_a_sharded_batch_do_not_communicate() -> None:
    x = distribute_tensor(INPUT, Mesh((2,)), [S0])
    for module in (
        nn.MultiheadAttention(8, 2, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    ):
        with count_comms() as comms:
            out = module.double().eval()(*[x] * (3 if isinstance(module, nn.MultiheadAttention) else 1))
            assert as_dtensor(out[0] if isinstance(out, tuple) else out).placements == (S0,)
        assert comms.total_calls == 0
