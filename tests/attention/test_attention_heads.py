"""Sharded heads: projections at head boundaries, shared heads, masks, dropout, kernels and rotary embeddings."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Placement, Replicate, Shard, count_comms, distribute_tensor
from shardwise import _collectives as collectives
from shardwise import shard_module as sharded
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.attention.test_ring import Largest

R, S0, S1, S2, S3 = Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)
GENERATOR = torch.Generator().manual_seed(11)
attention = F.scaled_dot_product_attention


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embeddings of halves, as Llama has them."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class SelfAttention(nn.Module):
    """Causal self-attention whose keys may be shared by several heads, in one of three ways to write that."""

    def __init__(self, heads: int, shared: int, how: str = "enable_gqa", dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.shared, self.how, self.dropout, dim = heads, shared, how, dropout, 4
        self.q, self.k, self.v = (nn.Linear(12, n * dim) for n in (heads, shared, shared))
        self.o = nn.Linear(heads * dim, 12)
        angles = torch.arange(7).unsqueeze(1) * torch.tensor([1.0, 0.1, 1.0, 0.1]).double()
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def repeated(self, x: Tensor) -> Tensor:
        """As many heads as the queries have."""
        times, (batch, heads, length, dim) = self.heads // self.shared, x.shape
        if self.how == "repeat_interleave":
            return x.repeat_interleave(times, 1)
        x = x[:, :, None].expand(batch, heads, times, length, dim)
        return x.reshape(batch, heads * times, length, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, -1, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = (rotated(h, self.cos, self.sin) for h in (q, k))  # type: ignore[arg-type]
        if self.how != "enable_gqa":
            k, v = self.repeated(k), self.repeated(v)
        out = attention(q, k, v, None, self.dropout, is_causal=True, enable_gqa=self.how == "enable_gqa")
        result: Tensor = self.o(out.transpose(1, 2).reshape(batch, length, -1))
        return result


def plan(queries: Sequence[int], keys: Sequence[int] | None) -> dict[str, Placement]:
    """Projections sharded at heads of 4 features, so many on each rank; keys on all ranks if None."""
    q = [4 * n for n in queries]
    kv = R if keys is None else Shard(0, [4 * n for n in keys])
    return {"q.*": Shard(0, q), "[kv].*": kv, "o.weight": Shard(1, q)}


def taught(module: nn.Module, x: Tensor) -> list[Any]:
    """What the module gives, and the gradients of everything."""
    x = x.detach().requires_grad_()
    out = module(x)
    (out * out).sum().backward()
    return [out, x.grad, *(p.grad for p in module.parameters())]


def full(x: Any) -> Tensor:
    return as_dtensor(x).full_tensor().detach()


X = normal(3, 7, 12)
CUTS: list[tuple[int, int, tuple[int, ...], tuple[int, ...] | None, int]] = [
    # heads, heads of keys, the heads of each rank, exchanges of enable_gqa between the projections
    (10, 10, (3, 3, 3, 1), (3, 3, 3, 1), 0),
    (10, 10, (4, 0, 5, 1), (4, 0, 5, 1), 0),
    (10, 10, (10,), (10,), 0),
    (10, 10, (2, 2, 2, 2, 2), (2, 2, 2, 2, 2), 0),
    (10, 5, (4, 4, 2, 0), (2, 2, 1, 0), 0),
    (10, 5, (3, 3, 3, 1), (2, 2, 1, 0), 1),
    (8, 2, (2, 2, 2, 2), (1, 1, 0, 0), 1),
    (8, 2, (2, 2, 2, 2), None, 0),
    (8, 2, (3, 0, 5), (0, 1, 1), 1),
]


@pytest.mark.parametrize("how", ["enable_gqa", "repeat_interleave", "expand"])
@pytest.mark.parametrize("case", CUTS, ids=str)
def test_projections_sharded_at_heads_do_not_communicate(case: Any, how: str) -> None:
    heads, shared, queries, keys, exchanges = case
    module = SelfAttention(heads, shared, how).double()
    expected = taught(deepcopy(module), X)

    def body() -> int:
        mine = sharded(deepcopy(module), plan(queries, keys))
        x = distribute_tensor(X, Mesh((len(queries),)), [R])
        with count_comms() as comms:
            got = mine(x)
        assert as_dtensor(got)._layout.placements[0].is_partial() or len(queries) == 1
        for ours, theirs in zip(taught(mine, x), expected, strict=True):
            assert_close(full(ours), theirs)
        return comms.total_calls

    calls = set(world(len(queries)).run(body))
    assert calls == ({exchanges} if how == "enable_gqa" or not exchanges else {2 * exchanges})


Q, K, V = (normal(2, 10, 7, 4) for _ in range(3))


@world(4)
def test_dropout_keeps_heads_sharded_and_computes_the_weights_of_local_heads_only() -> None:
    q, k, v = (distribute_tensor(x, Mesh((4,)), [Shard(1, (4, 0, 5, 1))]) for x in (Q, K, V))
    torch.manual_seed(0)
    attention(q, k, v, dropout_p=0.2, is_causal=True)  # the ranks compare their seeds at the first draw
    with count_comms() as comms, Largest() as largest:  # type: ignore[no-untyped-call]
        out = attention(q, k, v, dropout_p=0.2, is_causal=True)
    assert as_dtensor(out).placements == (Shard(1, (4, 0, 5, 1)),)
    assert comms.implicit == []
    assert comms.total_bytes <= 64  # of a digest
    assert largest.elements <= max(2 * (4, 0, 5, 1)[collectives.rank()] * 7 * 7, 4)  # a digest is 4 long


DROPPED: list[tuple[int, list[Placement]]] = [
    (1, [R, R, R]),
    (2, [S0, S0, S0]),
    (4, [S1, S1, S1]),
    (5, [Shard(1, (0, 3, 4, 1, 2)), S1, S1]),
    (3, [S2, R, R]),
    (4, [R, Shard(2, (5, 0, 1, 1)), S2]),
    (2, [R, R, S3]),
]


@pytest.mark.parametrize("shared", [10, 2])
def test_what_attention_drops_does_not_depend_on_ranks_or_layouts(shared: int) -> None:
    operands = normal(2, 10, 6, 4), normal(2, shared, 7, 4), normal(2, shared, 7, 3)

    def dropped(ranks: int, placements: list[Placement]) -> list[Tensor]:
        pairs = zip(operands, placements, strict=True)
        q, k, v = (distribute_tensor(x, Mesh((ranks,)), [p]).requires_grad_() for x, p in pairs)
        torch.manual_seed(5)
        out = attention(q, k, v, dropout_p=0.4, enable_gqa=True)
        (out * out).sum().backward()
        return [full(x) for x in (out, q.grad, k.grad, v.grad)]

    expected = world(1).run(dropped, *DROPPED[0])[0]
    kept = attention(*operands, enable_gqa=True)
    assert not torch.allclose(expected[0], kept, rtol=0.1)
    for ranks, placements in DROPPED[1:]:
        for got in world(ranks).run(dropped, ranks, placements):
            assert_close(got, expected)


MASKS = [torch.rand(shape, generator=GENERATOR) > 0.3 for shape in ((6, 7), (1, 1, 6, 7), (2, 1, 6, 7), (2, 1, 1, 7))]
MASKS += [normal(2, 1, 6, 7), normal(2, 10, 6, 7), normal(1, 10, 6, 7), MASKS[0].expand(2, 10, 6, 7)]


@pytest.mark.parametrize("shared", [10, 5])
@pytest.mark.parametrize("number", range(len(MASKS)))
def test_masks_may_be_plain_replicated_or_sharded(number: int, shared: int) -> None:
    """A replicated mask, or one sharded with the heads of the queries, needs no communication."""
    mask = MASKS[number]
    operands = normal(2, 10, 6, 4), normal(2, shared, 7, 4), normal(2, shared, 7, 4)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[list[Any], int]:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in (q, k, v, mask)]
        with count_comms() as comms:
            out = attention(leaves[0], leaves[1], leaves[2], leaves[3], enable_gqa=shared != 10)
        (out * out).sum().backward()
        return [out.detach(), *(x.grad for x in leaves if x.requires_grad)], comms.total_calls

    expected, _ = run(*operands, mask)
    placements = [S0, S1, Shard(1, (0, 4, 4, 2)), S2, S3]
    fitting = [p for p in placements if p.dim < mask.ndim and (p.sizes is None or mask.shape[p.dim] == 10)]

    def body(placement: Placement | None) -> None:
        q, k, v = (distribute_tensor(x, Mesh((4,)), [S1]) for x in operands)
        own = mask if placement is None else distribute_tensor(mask.contiguous(), Mesh((4,)), [placement])
        got, calls = run(q, k, v, own)
        for ours, theirs in zip(got, expected, strict=True):
            assert_close(ours.full_tensor() if isinstance(ours, DTensor) else ours, theirs)
        free = placement in (None, R) or (mask.shape[-3:-2] == (10,) and placement == S1)
        assert calls == (0 if free else 1) + (0 if shared == 10 else 1)

    for placement in (None, R, *fitting):
        world(4).run(body, placement)


KERNELS = {
    SDPBackend.FLASH_ATTENTION: "ScaledDotProductFlashAttentionForCpuBackward0",
    SDPBackend.MATH: "SafeSoftmaxBackward0",
}


def nodes(out: Tensor) -> set[str]:
    """The names of the nodes in the graph of a tensor."""
    found, left = set(), [out.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return {node.name() for node in found}


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize(
    "arguments", [{}, {"is_causal": True}, {"attn_mask": MASKS[0][:, :6]}], ids=lambda a: str([*a])
)
def test_the_kernel_that_is_asked_for_runs_on_every_rank(kernel: SDPBackend, arguments: dict[str, Any]) -> None:
    operands = [normal(2, 10, 6, 8) for _ in range(3)]

    def run(inputs: Sequence[Tensor]) -> tuple[list[Any], set[str]]:
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        with sdpa_kernel(kernel):
            out = attention(q, k, v, **arguments)
            (out * out).sum().backward()
        return [out.detach(), q.grad, k.grad, v.grad], nodes(out)

    def body(placements: list[Placement]) -> None:
        pairs = zip(operands, placements, strict=True)
        got, ran = run([distribute_tensor(x, Mesh((3,)), [p]) for x, p in pairs])
        assert KERNELS[kernel] in ran or not as_dtensor(got[0]).to_local().numel()  # nothing needs no kernel
        assert not ran & (set(KERNELS.values()) - {KERNELS[kernel]})
        for ours, theirs in zip(got, expected, strict=True):
            assert_close(full(ours), theirs)

    expected, ran = run(operands)
    assert KERNELS[kernel] in ran
    layouts: list[list[Placement]] = [[S1] * 3, [Shard(1, (7, 0, 3))] * 3, [S0] * 3, [S2, R, R]]
    for placements in layouts:
        world(3).run(body, placements)


@world(2)
def test_a_kernel_that_this_device_lacks_is_the_error_of_torch() -> None:
    q, k, v = (distribute_tensor(x, Mesh((2,)), [S1]) for x in (Q, K, V))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), pytest.raises(RuntimeError, match="No viable backend"):
        attention(q, k, v)


FUSED = nn.MultiheadAttention(20, 10, batch_first=True).double()
APART = nn.MultiheadAttention(20, 10, kdim=12, vdim=8, batch_first=True).double()
LAYERS: list[tuple[nn.MultiheadAttention, dict[str, Placement]]] = [
    (FUSED, {"in_proj_*": S0, "out_proj.weight": S1}),
    (FUSED, {"in_proj_*": Shard(0, (24, 18, 18, 0)), "out_proj.weight": Shard(1, (6, 6, 6, 2))}),
    (FUSED, {"*weight": S1}),
    (APART, {"[qkv]_proj_weight": Shard(0, (6, 6, 6, 2)), "out_proj.weight": Shard(1, (6, 6, 6, 2))}),
]


@pytest.mark.slow
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("number", range(len(LAYERS)))
def test_torch_attention_with_sharded_weights_equals_one_process(number: int, need_weights: bool) -> None:
    layer, placements = LAYERS[number]
    inputs = [normal(2, 5, n) for n in (20, layer.kdim or 20, layer.vdim or 20)]

    def run(module: nn.Module, inputs: Sequence[Tensor]) -> list[Any]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        outs = [x for x in module(*leaves, need_weights=need_weights) if x is not None]
        sum((x.sin().sum() for x in outs), torch.tensor(0.0)).backward()
        return [*outs, *(x.grad for x in (*leaves, *module.parameters()))]

    def body(placement: Placement) -> None:
        mine = sharded(deepcopy(layer), placements)
        got = run(mine, [distribute_tensor(x, Mesh((4,)), [placement]) for x in inputs])
        for ours, theirs in zip(got, expected, strict=True):
            assert_close(full(ours), theirs.detach())

    expected = run(deepcopy(layer), inputs)
    for placement in (R, S0, S1):
        world(4).run(body, placement)
