"""What users of other systems suffered from in single ops: each test is a report that must stay solved here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import (
    DTensor,
    Mesh,
    Partial,
    Replicate,
    Shard,
    count_comms,
    distribute_tensor,
    rank,
    shard_module,
)
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LINE = Mesh((4,))


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def at(x: Tensor, placement: Any = S0) -> DTensor:
    return distribute_tensor(x, LINE, [placement])


def full_value(x: Any) -> Tensor:
    return as_dtensor(x).full_tensor()


# ---- silently wrong values ---------------------------------------------------------------------------------------

ELEMENTWISE: dict[str, Callable[[Any, Any], Tensor]] = {
    "mse_loss": F.mse_loss,
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "huber_loss": F.huber_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y.sign()),
}


@pytest.mark.parametrize("rows", [7, 5, 2, 8])
@pytest.mark.parametrize("name", ELEMENTWISE)
@world(4)
def test_mean_losses_of_unequal_and_empty_shards(name: str, rows: int) -> None:
    """W1, W2: 5 % off without a word, or not a number."""
    loss, x, y = ELEMENTWISE[name], normal(rows, 8), normal(rows, 8).flip(1)
    assert_close(full_value(loss(at(x), at(y))), loss(x, y))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [8, 5])
@world(4)
def test_cross_entropy_counts_what_counts_in_the_whole_batch(rows: int, weighted: bool) -> None:
    """W3, W4: not a number where one shard's targets are all ignored; wrong with weights."""
    scores, target = normal(rows, 6), torch.arange(rows) % 6
    target[: rows // 4 + 1] = -100
    weight = torch.arange(1.0, 7.0, dtype=torch.float64) if weighted else None
    x = at(scores).requires_grad_()
    loss = F.cross_entropy(x, at(target), None if weight is None else at(weight, R))
    plain = scores.requires_grad_()
    wanted = F.cross_entropy(plain, target, weight)
    assert_close(full_value(loss), wanted)
    loss.backward()
    wanted.backward()
    assert plain.grad is not None
    assert_close(full_value(x.grad), plain.grad)


@world(4)
def test_cosine_embedding_loss_of_sharded_columns() -> None:
    """W5: 2.623 instead of 0.748 on even shards."""
    x, y, target = normal(8, 8), normal(8, 8).flip(0), torch.tensor([1, -1] * 4)
    assert_close(
        full_value(F.cosine_embedding_loss(at(x, S1), at(y, S1), at(target, R))), F.cosine_embedding_loss(x, y, target)
    )


@pytest.mark.parametrize("table_at", [S0, S1, R], ids=str)
@world(4)
def test_frequencies_of_ids_are_counted_over_all_ranks(table_at: Any) -> None:
    """W9: each rank scaled by the frequencies of its own ids."""
    table, ids = normal(9, 4), torch.tensor([1, 1, 1, 1, 8, 1, 2])
    mine, plain = at(table, table_at).requires_grad_(), table.requires_grad_()
    F.embedding(at(ids), mine, scale_grad_by_freq=True).square().sum().backward()
    F.embedding(ids, plain, scale_grad_by_freq=True).square().sum().backward()
    assert plain.grad is not None
    assert_close(full_value(mine.grad), plain.grad)


CONVOLUTIONS: dict[str, tuple[Callable[..., Tensor], int, dict[str, Any]]] = {
    "conv1d": (F.conv1d, 1, {"padding": 1}),
    "conv2d": (F.conv2d, 2, {"stride": 2, "padding": 1}),
    "conv3d": (F.conv3d, 3, {}),
    "conv_transpose1d": (F.conv_transpose1d, 1, {"stride": 2}),
    "conv_transpose2d": (F.conv_transpose2d, 2, {"padding": 1}),
}


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("name", CONVOLUTIONS)
@world(4)
def test_convolutions_of_unevenly_sharded_batches_and_images(name: str, dim: int) -> None:
    """W12: results of the wrong shape."""
    conv, spatial, options = CONVOLUTIONS[name]
    x, w = normal(5, 3, *([7] * spatial)), normal(*(3, 3, *([3] * spatial)))
    out = as_dtensor(conv(at(x, Shard(dim)), at(w, R), **options))
    wanted = conv(x, w, **options)
    assert out.shape == wanted.shape
    assert_close(out.full_tensor(), wanted)


RANDOM: dict[str, Callable[[Any], Tensor]] = {
    "randn_like": torch.randn_like,
    "dropout": lambda x: F.dropout(x, 0.5),
    "uniform_": lambda x: x.uniform_(),
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "trunc_normal_": nn.init.trunc_normal_,
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "multinomial": lambda x: torch.multinomial(x.abs(), 3),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_ops_give_the_same_numbers_on_any_ranks_and_no_shard_repeats_another(name: str) -> None:
    """W13, W14: all shards were identical; replicas differed under seeds of their own."""

    def body(size: int, placement: Any) -> Tensor:
        torch.manual_seed(7)
        return full_value(RANDOM[name](distribute_tensor(torch.ones(8, 6), Mesh((size,)), [placement])))

    results = [world(size).run(body, size, p) for size, p in [(1, R), (4, S0), (4, R), (3, S1), (3, R)]]
    first = results[0][0]
    for row in results:
        for found in row:
            assert torch.equal(found, first)
    assert not torch.equal(first[:2], first[2:4])


# ---- hangs -----------------------------------------------------------------------------------------------------

EXTREMES: dict[str, Callable[[Any], Any]] = {
    "max": torch.max,
    "min": torch.min,
    "aminmax": torch.aminmax,
    "amax": lambda x: x.amax(0),
    "argmax": lambda x: x.argmax(0),
    "norm(inf)": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "max(0)": lambda x: x.max(0),
}


@pytest.mark.parametrize("name", EXTREMES)
@world(4)
def test_extremes_with_an_empty_shard(name: str) -> None:
    """H1: the rank with the empty shard raised, the others waited."""
    op, x = EXTREMES[name], normal(5, 3)
    got, want = op(at(x)), op(x)
    for g, w in zip(got if isinstance(got, tuple) else [got], want if isinstance(want, tuple) else [want], strict=True):
        assert_close(full_value(g), w)


UNEVEN: dict[str, Callable[[Any], Tensor]] = {
    "fft": lambda x: torch.fft.fft(x, dim=0).abs(),
    "rfft2": lambda x: torch.fft.rfft2(x).abs(),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "cov": torch.cov,
    "select": lambda x: x.select(0, 4),
    "squeeze_copy": lambda x: torch.squeeze_copy(x).abs(),
}


@pytest.mark.parametrize("placement", [S0, S1, Shard(0, [0, 4, 0, 1])], ids=str)
@pytest.mark.parametrize("name", UNEVEN)
@world(4)
def test_ops_that_lost_step_on_unequal_shards(name: str, placement: Any) -> None:
    """H3: ranks issued different collectives."""
    op, x = UNEVEN[name], normal(5, 3)
    assert_close(full_value(op(at(x, placement))), op(x))


# ---- errors ----------------------------------------------------------------------------------------------------


@world(4)
def test_a_pending_lookup_can_be_summed_viewed_and_joined() -> None:
    """E3: IndexError."""
    table, ids = normal(9, 4), torch.tensor([0, 8, 3])
    out = F.embedding(at(ids, R), at(table))
    want = F.embedding(ids, table)
    assert_close(full_value(out.sum()), want.sum())
    assert_close(full_value(out.view(-1)), want.view(-1))
    assert_close(full_value(torch.cat([out, out])), torch.cat([want, want]))


@world(4)
def test_partial_plus_a_tensor() -> None:
    """E4: AttributeError; a number was added once a rank before."""
    x = DTensor.from_local(torch.tensor(float(rank())), LINE, [Partial()])
    for ten in (torch.tensor(10), 10, 10.0):
        assert full_value(x + ten) == 16


@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
@world(4)
def test_unused_chunks_have_zero_gradients(placement: Any) -> None:
    """E5: 'aten.cat got mixed torch.Tensor and DTensor'."""
    x = at(normal(5, 9), placement).requires_grad_()
    first, _, _ = x.chunk(3, -1)
    first.sum().backward()
    want = torch.zeros(5, 9, dtype=torch.float64)
    want[:, :3] = 1
    assert_close(full_value(x.grad), want)


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


OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.1),
}


@pytest.mark.parametrize("name", OPTIMISERS)
@world(4)
def test_optimisers_on_sharded_parameters(name: str) -> None:
    """E9: no rule, or 'in-place operations that require placement changes'."""
    values = [normal(7, 3), normal(5)]
    mine = [nn.Parameter(at(v)) for v in values]
    plain = [nn.Parameter(v.clone()) for v in values]
    for params in (mine, plain):
        optimiser = OPTIMISERS[name](params)
        for _ in range(3):
            optimiser.zero_grad()
            sum((p.sin() * p).sum() for p in params).backward()  # type: ignore[union-attr]
            optimiser.step()
    for got, want in zip(mine, plain, strict=True):
        assert_close(full_value(got.detach()), want.detach())


# ---- hidden gathers ---------------------------------------------------------------------------------------------

# What each rank may send at most, in bytes, of a tensor of 64 x 8 doubles: 4,096 bytes, of which a rank holds 1,024.
FRUGAL: dict[str, tuple[Callable[[Any], Any], int]] = {
    "x[3]": (lambda x: x[3], 3 * 64),
    "x[1:5]": (lambda x: x[1:5], 0),
    "index_select": (lambda x: x.index_select(0, torch.tensor([3, 60])), 512),
    "topk": (lambda x: x.topk(2, 0)[0], 3 * 2 * 8 * 16),
    "cumsum": (lambda x: x.cumsum(0), 3 * 64),
    "softmax": (lambda x: x.softmax(0), 3 * 2 * 64),
}


@pytest.mark.parametrize("name", FRUGAL)
@world(4)
def test_ops_along_a_sharded_dim_do_not_gather_the_tensor(name: str) -> None:
    """M2: the whole tensor came to every rank without a word."""
    op, most = FRUGAL[name]
    full = normal(64, 8)
    x = at(full)
    with count_comms() as comms:
        out = op(x)
    assert comms.total_bytes <= most
    assert_close(full_value(out), op(full))


# ---- embedding tables --------------------------------------------------------------------------------------------

TABLE, NUMBERS = normal(9, 8), torch.tensor([[1, 8, 3], [3, 3, 0], [2, 2, 7], [6, 5, 3]])


@world(4)
def test_columns_of_bounded_norm_have_gradients() -> None:
    """L1: with max_norm and cut columns the values were right, and no rank had a gradient."""
    mine, plain = at(TABLE, S1).requires_grad_(), TABLE.clone().requires_grad_()
    for table, ids in ((mine, at(NUMBERS)), (plain, NUMBERS)):
        F.embedding(ids, table, max_norm=1.0).square().sum().backward()
    assert plain.grad is not None
    assert_close(full_value(mine.grad), plain.grad)
    assert_close(full_value(mine.detach()), plain.detach())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("table_at", [S0, S1, R], ids=str)
@world(4)
def test_bags_pad_weigh_and_bound_and_their_table_keeps_what_changed(table_at: Any, mode: str) -> None:
    """P8: padding in the last rank's rows was wrong, a global padding_idx raised, what max_norm changed was lost."""
    options: dict[str, Any] = {"mode": mode, "padding_idx": 8, "max_norm": 1.5}
    mine, plain = at(TABLE, table_at).requires_grad_(), TABLE.clone().requires_grad_()
    weights = [normal(4, 3).requires_grad_(), at(normal(4, 3)).requires_grad_()] if mode == "sum" else [None, None]
    outs = []
    for table, ids, given in ((plain, NUMBERS, weights[0]), (mine, at(NUMBERS), weights[1])):
        outs.append(F.embedding_bag(ids, table, per_sample_weights=given, **options))
        outs[-1].square().sum().backward()
    assert plain.grad is not None
    assert_close(full_value(outs[1]), outs[0])
    assert_close(full_value(mine.grad), plain.grad)
    assert_close(full_value(mine.detach()), plain.detach())
    assert not plain.grad[8].any()
    if weights[0] is not None and weights[1] is not None:
        assert weights[0].grad is not None
        assert_close(full_value(weights[1].grad), weights[0].grad)
