"""What users of other systems suffered from: each test or case is a report that must stay solved here."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import (
    DTensor,
    Mesh,
    OnRanks,
    Partial,
    Replicate,
    Shard,
    count_comms,
    distribute_tensor,
    rank,
    shard_module,
)
from shardwise.errors import IdError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LINE = Mesh((4,))
Case = tuple[str, Callable[..., Any], tuple[tuple[Tensor, Any], ...]]  # a function, and its operands with placements


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def at(x: Tensor, placement: Any = S0) -> DTensor:
    return distribute_tensor(x, LINE, [placement])


def full_value(x: Any) -> Tensor:
    return as_dtensor(x).full_tensor()


# ---- wrong values, hangs and errors of single ops ---------------------------------------------------------------


def losses() -> Iterator[Case]:
    """W1 to W5: 5 % off, not a number on empty shards or where targets are ignored, wrong with weights."""
    for rows in (7, 5, 2, 8):
        x, y = (normal(rows, 8), S0), (normal(rows, 8).flip(1), S0)
        yield "mse_loss", F.mse_loss, (x, y)
        yield "binary_cross_entropy", lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), (x, y)
        yield "with logits", lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), (x, y)
        yield "huber_loss", F.huber_loss, (x, y)
        yield "smooth_l1_loss", F.smooth_l1_loss, (x, y)
        yield "soft_margin_loss", lambda x, y: F.soft_margin_loss(x, y.detach().sign()), (x, y)
    for rows in (8, 5):
        target = torch.arange(rows) % 6
        target[: rows // 4 + 1] = -100
        scores, weights = (normal(rows, 6), S0), (torch.arange(1.0, 7.0, dtype=torch.float64), R)
        yield "cross_entropy", F.cross_entropy, (scores, (target, S0))
        weighted = lambda x, y, w: F.cross_entropy(x, y, w.detach())  # noqa: E731
        yield "weighted cross_entropy", weighted, (scores, (target, S0), weights)
    ones = (torch.tensor([1, -1] * 4), R)
    yield "cosine_embedding_loss", F.cosine_embedding_loss, ((normal(8, 8), S1), (normal(8, 8).flip(0), S1), ones)


def convolutions() -> Iterator[Case]:
    """W12: results of the wrong shape."""
    for placement in (S0, Shard(2)):
        for conv, dims, options in (
            (F.conv1d, 1, {"padding": 1}), (F.conv2d, 2, {"stride": 2, "padding": 1}), (F.conv3d, 3, {}),
            (F.conv_transpose1d, 1, {"stride": 2}), (F.conv_transpose2d, 2, {"padding": 1}),
        ):  # fmt: skip
            x, w = normal(5, 3, *([7] * dims)), normal(*(3, 3, *([3] * dims)))
            yield (
                conv.__name__,
                lambda x, w, conv=conv, options=options: conv(x, w, **options),
                ((x, placement), (w, R)),
            )


def uneven() -> Iterator[Case]:
    """H1, H3, E5: a rank with an empty shard raised or made other collectives; chunks had no gradient."""
    x = normal(5, 3)
    for extreme in (torch.max, torch.min, torch.aminmax, lambda x: torch.linalg.vector_norm(x, float("inf"))):
        yield "extreme", extreme, ((x, S0),)
    for along in (torch.amax, torch.argmax, torch.max):
        yield "extreme along a dim", lambda x, along=along: along(x, 0), ((x, S0),)
    for placement in (S0, S1, Shard(0, [0, 4, 0, 1])):
        yield "fft", lambda x: torch.fft.fft(x, dim=0).abs(), ((x, placement),)
        yield "rfft2", lambda x: torch.fft.rfft2(x).abs(), ((x, placement),)
        yield "batch_norm", lambda x: F.batch_norm(x, None, None, training=True), ((x, placement),)
        yield "cov", torch.cov, ((x, placement),)
        yield "select", lambda x: x.select(0, 4), ((x, placement),)
        yield "squeeze_copy", lambda x: torch.squeeze_copy(x).abs(), ((x, placement),)
    for chunked in (S0, S1, R):
        yield "a chunk", lambda x: x.chunk(3, -1)[0], ((normal(5, 9), chunked),)


def lookups() -> Iterator[Case]:
    """W9, H2, L1, L2, E1 to E3, P8: frequencies, ranks without rows, pending sums, padding, bounded norms."""
    few, ids = (torch.tensor([0, 8, 3]), R), (torch.tensor([1, 1, 1, 1, 8, 1, 2]), S0)
    rows, numbers = (normal(5, 3), S0), (torch.tensor([[1, 8, 3], [3, 3, 0], [2, 2, 7], [6, 5, 3]]), S0)
    table = (normal(9, 4), S0)
    yield "pending, summed", lambda ids, w: F.embedding(ids, w).sum(), (few, table)
    yield "pending, viewed", lambda ids, w: F.embedding(ids, w).view(-1), (few, table)
    yield "pending, twice", lambda ids, w: torch.cat([F.embedding(ids, w)] * 2), (few, table)
    yield "two pending", lambda ids, w: F.embedding(ids, w) + F.embedding(ids.flip(0), w), (few, table)
    yield "without rows", F.embedding, ((torch.arange(5), R), rows)
    yield (
        "bags without rows",
        lambda ids, w: F.embedding_bag(ids, w, mode="sum"),
        ((torch.arange(5).view(1, 5), R), rows),
    )
    bounded = lambda ids, w: F.embedding(ids, w, max_norm=1.0).square()  # noqa: E731
    yield "columns of bounded norm", bounded, (numbers, (normal(9, 8), S1))
    for placement in (S0, S1, R):
        frequent = lambda ids, w: F.embedding(ids, w, scale_grad_by_freq=True).square()  # noqa: E731
        yield "frequencies", frequent, (ids, (normal(9, 4), placement))
        for mode in ("sum", "mean", "max"):
            options = {"mode": mode, "padding_idx": 8, "max_norm": 1.5}
            weights = ((normal(4, 3), S0),) if mode == "sum" else ()

            def bags(ids: Any, w: Any, weights: Any = None, options: Any = options) -> Tensor:
                return F.embedding_bag(ids, w, per_sample_weights=weights, **options).square()

            yield f"bags of {mode}", bags, (numbers, (normal(9, 8), placement), *weights)


@pytest.mark.parametrize("cases", [losses, convolutions, uneven, lookups])
@world(4)
def test_results_gradients_and_changed_operands_are_those_of_one_process(cases: Callable[[], Iterator[Case]]) -> None:
    for name, op, operands in cases():
        plain = [x.clone().requires_grad_(x.is_floating_point()) for x, _ in operands]
        ours = [at(x, placement).requires_grad_(x.is_floating_point()) for x, placement in operands]
        wanted, got = (out if isinstance(out, tuple) else (out,) for out in (op(*plain), op(*ours)))
        for want, found in zip(wanted, got, strict=True):
            assert_close(full_value(found), want, msg=lambda why, name=name: f"{name}: {why}")  # type: ignore[misc]
        for outs in (wanted, got):
            torch.autograd.backward([out.sum() for out in outs if out.is_floating_point() and out.requires_grad])
        for (x, placement), want, found in zip(operands, plain, ours, strict=True):
            assert_close(full_value(found.detach()), want.detach())
            if want.grad is not None:
                assert_close(full_value(found.grad), want.grad, msg=f"gradient of {name} with {x.shape}, {placement}")


RANDOM: dict[str, Callable[[Any], Tensor]] = {
    "randn_like": torch.randn_like,
    "dropout": lambda x: F.dropout(x, 0.5),
    "uniform_": lambda x: x.uniform_(),
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "trunc_normal_": nn.init.trunc_normal_,
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "multinomial": lambda x: torch.multinomial(x.abs(), 3),
}


def test_random_ops_give_the_same_numbers_on_any_ranks_and_no_shard_repeats_another() -> None:
    """W13, W14: all shards were identical; replicas differed under seeds of their own."""

    def body(size: int, placement: Any) -> dict[str, Tensor]:
        found = {}
        for name, op in RANDOM.items():
            torch.manual_seed(7)
            found[name] = full_value(op(distribute_tensor(torch.ones(8, 6), Mesh((size,)), [placement])))
        return found

    results = [
        of_rank for size, p in [(1, R), (4, S0), (4, R), (3, S1), (3, R)] for of_rank in world(size).run(body, size, p)
    ]
    for name in RANDOM:
        first = results[0][name]
        assert all(torch.equal(found[name], first) for found in results), name
        assert not torch.equal(first[:2], first[2:4]), name


# What each rank may send at most, in bytes, of a tensor of 64 x 8 doubles: 4,096 bytes, of which a rank holds 1,024.
FRUGAL: dict[str, tuple[Callable[[Any], Any], int]] = {
    "x[3]": (lambda x: x[3], 3 * 64),
    "x[1:5]": (lambda x: x[1:5], 0),
    "index_select": (lambda x: x.index_select(0, torch.tensor([3, 60])), 512),
    "topk": (lambda x: x.topk(2, 0)[0], 3 * 2 * 8 * 16),
    "cumsum": (lambda x: x.cumsum(0), 3 * 64),
    "softmax": (lambda x: x.softmax(0), 3 * 2 * 64),
}


@world(4)
def test_ops_along_a_sharded_dim_do_not_gather_the_tensor() -> None:
    """M2: the full tensor came to every rank without a word."""
    for name, (op, most) in FRUGAL.items():
        x = at(normal(64, 8))
        with count_comms() as comms:
            out = op(x)
        assert comms.total_bytes <= most, name
        assert_close(full_value(out), op(normal(64, 8)))


# ---- layouts and ids --------------------------------------------------------------------------------------------


@world(4)
def test_uneven_shards_lose_nothing() -> None:
    """W6, W7, W8: rows and columns were lost or zeros inserted; ranks believed in different global shapes."""
    full = torch.arange(15.0).view(5, 3)
    assert torch.equal(distribute_tensor(full, Mesh((2, 2)), [S0, S0]).full_tensor(), full)
    full = torch.arange(28.0).view(2, 14)
    part = full.split([2, 3, 4, 5], 1)[rank()]
    assert torch.equal(DTensor.from_local(part, LINE, [S1], shape=(2, 14), run_check=True).full_tensor(), full)
    x = DTensor.from_local(full.view(14, 2)[:10].split([1, 2, 3, 4])[rank()], LINE, [S0])
    assert x.shape == (10, 2)
    assert torch.equal(x.full_tensor(), full.view(14, 2)[:10])


@pytest.mark.parametrize("bad", [99, -1])
def test_ids_outside_a_row_wise_table_raise(bad: int) -> None:
    """W10: they gave zeros and no error."""

    def body() -> str:
        with pytest.raises(IdError) as caught:
            F.embedding(DTensor.from_local(torch.tensor([1, bad]), LINE, [R]), at(normal(8, 4)))
        return str(caught.value)

    assert len(set(world(4).run(body))) == 1


@world(4)
def test_redistribute_to_another_mesh_moves_the_data() -> None:
    """W11: the tensor silently stayed on its mesh."""
    full, other = torch.arange(10.0), Mesh((4,), (3, 2, 1, 0))
    y = at(full).redistribute(other, [S0])
    assert y.device_mesh == other
    assert torch.equal(y.to_local(), full.chunk(4)[3 - rank()])


@world(4)
def test_partial_plus_a_tensor() -> None:
    """E4: AttributeError; a number was added once a rank before."""
    x = DTensor.from_local(torch.tensor(float(rank())), LINE, [Partial()])
    for ten in (torch.tensor(10), 10, 10.0):
        assert full_value(x + ten) == 16


# ---- modules and optimizers -------------------------------------------------------------------------------------


@world(4)
def test_a_pair_of_layers_split_unevenly() -> None:
    """E6: columns of 10 over 4 ranks, ReLU, rows: 'mm shape error'."""
    plain = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)).double()
    want = plain(normal(5, 6))
    split = shard_module(plain, {"0.weight": S0, "0.bias": S0, "2.weight": S1})
    x = at(normal(5, 6), R)
    with count_comms() as comms:
        out = as_dtensor(split(x))
    assert comms.total_calls == 0
    assert out.placements == (Partial(),)
    assert_close(out.full_tensor(), want)


@world(4)
def test_plain_values_are_copied_into_sharded_tensors() -> None:
    """E8: an error; a plain state dict did not load."""
    x, full = at(torch.zeros(7, 3, dtype=torch.float64)), normal(7, 3)
    x.copy_(full)
    assert_close(x.full_tensor(), full)
    layer, plain = shard_module(nn.Linear(3, 7), {"weight": S0}), nn.Linear(3, 7)
    layer.load_state_dict(plain.state_dict())
    assert torch.equal(full_value(layer.weight), plain.weight)


@world(4)
def test_optimizers_on_sharded_parameters() -> None:
    """E9: no rule, or 'in-place operations that require placement changes'."""
    optimizers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.Adagrad(p, 0.1, fused=True),
        lambda p: torch.optim.Adafactor(p, 0.1),
        lambda p: torch.optim.Rprop(p, 0.1),
    ]
    for make in optimizers:
        values = [normal(7, 3), normal(5)]
        mine, plain = [nn.Parameter(at(v)) for v in values], [nn.Parameter(v.clone()) for v in values]
        for params in (mine, plain):
            optimizer = make(params)
            for _ in range(3):
                optimizer.zero_grad()
                sum((p.sin() * p).sum() for p in params).backward()  # type: ignore[union-attr]
                optimizer.step()
        for got, want in zip(mine, plain, strict=True):
            assert_close(full_value(got.detach()), want.detach(), msg=f"{type(optimizer).__name__} differs")


@world(4)
def test_gradients_of_distributed_and_plain_parameters_are_clipped_together() -> None:
    """E10: 'got mixed torch.Tensor and DTensor'."""
    values = [normal(5, 3), normal(4), normal(2, 2), normal(3)]
    for norm_type in (2.0, 1.0, float("inf")):
        reference = [nn.Parameter(v.clone()) for v in values]
        placed = zip(values, [S0, R, OnRanks(1), None], strict=True)
        mine = [nn.Parameter(v.clone() if p is None else at(v, p)) for v, p in placed]
        for p in (*reference, *mine):
            (p**2).sum().backward()
        norm, expected = (nn.utils.clip_grad_norm_(params, 0.5, norm_type) for params in (mine, reference))
        assert_close(float(norm), float(expected))
        for p, e in zip(mine, reference, strict=True):
            assert e.grad is not None
            assert_close(p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad, e.grad)


@world(4)
def test_the_gradient_of_a_row_wise_table_is_as_large_as_the_shard() -> None:
    """M1: every rank had the gradient of the full table."""
    module = shard_module(nn.Embedding(1000, 8), {"weight": S0})
    module(distribute_tensor(torch.arange(7), LINE, [R])).sum().backward()
    grad = module.weight.grad
    assert isinstance(grad, DTensor)
    assert grad.placements == (S0,)
    assert grad.to_local().shape == (250, 8)
    assert grad.to_local().untyped_storage().nbytes() == 250 * 8 * 4
