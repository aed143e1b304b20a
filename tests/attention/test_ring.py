"""Ring attention: queries, keys and values sharded along the sequence equal one process, and no rank holds all keys."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, Mesh, Placement, Replicate, Shard, capture, count_comms, debug, distribute_tensor
from shardwise._attention import ring
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
SEQUENCE = (S2,)
attention: Callable[..., Any] = F.scaled_dot_product_attention


def operands(queries: int, keys: int, heads: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values, and a gradient of the result."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, 4, queries, 3), (2, heads, keys, 3), (2, heads, keys, 2), (2, 4, queries, 2))
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


def trained(xs: Sequence[Any], grad: Tensor, **options: Any) -> list[Any]:
    """Attention, its gradients, and those of a function of these."""
    leaves = [x.clone().requires_grad_() for x in xs]
    out = attention(*leaves, **options)
    first = torch.autograd.grad(out, leaves, grad)
    smooth = attention(*leaves, **options).sin()
    second = torch.autograd.grad((smooth * grad).sum(), leaves, create_graph=True)
    torch.stack([(x * x).sum() for x in second]).sum().backward()
    return [out.detach(), *first, *(leaf.grad for leaf in leaves)]


def assert_equals_one_process(
    mesh: Mesh, placements: Sequence[Placement], queries: int, keys: int, heads: int = 4, **options: Any
) -> None:
    *xs, grad = operands(queries, keys, heads)
    if heads != 4:
        options["enable_gqa"] = True
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # it has gradients of gradients
        expected = trained(xs, grad, **options)

    def body() -> list[Tensor]:
        x, k, v, g = (distribute_tensor(t, mesh, placements) for t in (*xs, grad))
        found = trained((x, k, v), g, **options)
        assert as_dtensor(found[0]).placements == x.placements
        return [as_dtensor(t).full_tensor() for t in found]

    for found in world(mesh.size()).run(body):
        for got, want in zip(found, expected, strict=True):
            assert_close(got, want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (7, 7), (2, 2), (7, 3), (3, 9)])
@pytest.mark.parametrize("ranks", [2, 5])
def test_a_sharded_sequence_equals_one_process(ranks: int, queries: int, keys: int, causal: bool) -> None:
    """With sequences that the ranks do not divide, and with fewer positions than ranks."""
    assert_equals_one_process(Mesh((ranks,)), SEQUENCE, queries, keys, is_causal=causal)


@pytest.mark.parametrize("sizes", [(1, 4, 0, 2), (0, 0, 7, 0)])
def test_shards_of_any_sizes_equal_one_process(sizes: tuple[int, ...]) -> None:
    assert_equals_one_process(Mesh((4,)), [Shard(2, sizes)], 7, 7, is_causal=True, scale=0.7)


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize(
    "placements", [(S0, S2), (S1, S2), (R, S2), (S2, S2)], ids=["dp x cp", "tp x cp", "replicas", "cp x cp"]
)
def test_two_mesh_axes_equal_one_process(placements: Sequence[Placement], heads: int) -> None:
    assert_equals_one_process(Mesh((2, 3)), placements, 5, 5, heads, is_causal=True)


@world(3)
def test_operands_of_other_numbers_of_dims_and_broadcast_ones_equal_one_process() -> None:
    query, key, value, _ = operands(5, 4)
    cases: list[tuple[Tensor, ...]] = [(query[0, 0], key[0, 0], value[0, 0]), (query[0], key[0], value[0])]
    cases += [(query, key[:, :1], value[:1]), tuple(x.expand(2, *x.shape) for x in (query, key, value))]
    for xs in cases:
        expected = attention(*(leaves := [x.clone().requires_grad_() for x in xs]))
        expected.square().sum().backward()
        sharded = [distribute_tensor(x.clone(), Mesh((3,)), [Shard(x.ndim - 2)]).requires_grad_() for x in xs]
        out = attention(*sharded)
        out.square().sum().backward()
        assert_close(out.full_tensor(), expected)
        for x, leaf in zip(sharded, leaves, strict=True):
            assert_close(as_dtensor(x.grad).full_tensor(), leaf.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_as_close_to_float64_as_torch_is(dtype: torch.dtype) -> None:
    *xs, grad = (x.to(dtype) for x in operands(64, 64, dtype=torch.float64))
    wide = trained_once([x.double() for x in xs], grad.double())
    plain = trained_once(xs, grad)

    def body() -> list[Tensor]:
        q, k, v, g = (distribute_tensor(x, Mesh((4,)), SEQUENCE) for x in (*xs, grad))
        return [as_dtensor(x).full_tensor() for x in trained_once((q, k, v), g)]

    found = world(4).run(body)[0]
    for got, peer, want in zip(found, plain, wide, strict=True):
        assert got.dtype == dtype
        error, error_of_torch = ((x.double() - want).abs().max() for x in (got, peer))
        assert error <= 4 * error_of_torch + torch.finfo(dtype).eps


def trained_once(xs: Sequence[Any], grad: Any) -> list[Any]:
    leaves = [x.clone().requires_grad_() for x in xs]
    out = attention(*leaves, is_causal=True)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an op makes."""

    elements: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_no_rank_has_keys_values_or_scores_of_the_full_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "SCORES", 256)
    positions, width, ranks = 256, 4, 8

    def body() -> int:
        torch.manual_seed(0)
        xs = [torch.randn(1, positions, width).requires_grad_() for _ in range(3)]
        xs = [distribute_tensor(x.detach(), Mesh((ranks,)), [S1]).requires_grad_() for x in xs]
        largest = Largest()  # type: ignore[no-untyped-call]
        with largest:
            attention(*xs, is_causal=True).sum().backward()
        return largest.elements

    block = positions // ranks * width
    assert max(world(ranks).run(body)) <= max(2 * (block + positions // ranks), 256)  # keys and values in one message


@pytest.mark.parametrize("heads", [4, 2])
def test_each_block_is_sent_once_to_each_rank_and_of_causal_attention_only_to_those_that_need_it(heads: int) -> None:
    *xs, grad = operands(8, 8, heads, dtype=torch.bfloat16)
    block, gradient = 2 * heads * 2 * 5 * 2, 2 * heads * 2 * 5 * 4  # of one rank: bfloat16, and float32

    def body(causal: bool) -> list[int]:
        q, k, v, g = (distribute_tensor(x, Mesh((4,)), SEQUENCE) for x in (*xs, grad))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with count_comms() as forward:
            out = attention(*leaves, is_causal=causal, enable_gqa=heads != 4)
        with count_comms() as backward:
            out.backward(g)
        assert forward.implicit == backward.implicit == []
        return [forward.total_bytes, backward.total_bytes]

    assert world(4).run(body, False) == [[3 * block, 3 * block + 4 * gradient]] * 4
    forward = [block * n for n in (1, 2, 3, 0)]  # block i goes from rank i to 3: i + 1 blocks leave rank i
    backward = [a + gradient * n for a, n in zip(forward, (1, 2, 3, 3), strict=True)]  # rank 3 returns those of others
    assert world(4).run(body, True) == [list(pair) for pair in zip(forward, backward, strict=True)]


@world(3)
def test_explain_names_the_ring_and_a_shadow_run_agrees() -> None:
    xs = [distribute_tensor(x, Mesh((3,)), SEQUENCE) for x in operands(6, 6)[:3]]
    with debug.explain() as report, debug.shadow():
        attention(*xs, is_causal=True)
    assert "ring attention" in str(report)


@world(3)
def test_checkpoints_and_replays_equal_one_run() -> None:
    *xs, _ = operands(7, 7)

    def step(query: DTensor, key: DTensor, value: DTensor) -> Any:
        return attention(query, key, value, is_causal=True).square()

    def gradients(function: Any) -> list[Tensor]:
        leaves = [distribute_tensor(x, Mesh((3,)), SEQUENCE).requires_grad_() for x in xs]
        function(*leaves).sum().backward()
        return [as_dtensor(x.grad).full_tensor() for x in leaves]

    expected = gradients(step)
    for got, want in zip(gradients(partial(checkpoint, step, use_reentrant=False)), expected, strict=True):
        assert_close(got, want, rtol=0, atol=0)
    captured = capture(step)
    for _ in range(3):
        for got, want in zip(gradients(captured), expected, strict=True):
            assert_close(got, want)


@pytest.mark.processes
def test_real_processes_pass_blocks_of_any_sizes_as_simulated_ranks_do() -> None:
    """There a block is sent while the rank computes with it."""
    for got, want in zip(
        world(3, real=True).run(step_of_uneven_blocks), world(3).run(step_of_uneven_blocks), strict=True
    ):
        assert_close(got, want)


def step_of_uneven_blocks() -> list[Tensor]:
    *xs, grad = operands(64, 64, 2)
    leaves = [distribute_tensor(x, Mesh((3,)), [Shard(2, (40, 0, 24))]).requires_grad_() for x in xs]
    out = attention(*leaves, is_causal=True, enable_gqa=True)
    out.backward(distribute_tensor(grad, Mesh((3,)), [Shard(2, (40, 0, 24))]))
    return [as_dtensor(x).full_tensor().detach() for x in (out, *(leaf.grad for leaf in leaves))]
