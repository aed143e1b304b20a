"""Gradients of Replicate axes travel in buckets, when they are read or while backward runs, and are right."""

import copy
import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Mesh, Shard, count_comms, distribute_tensor, gradient_buckets, rank, shard_module, world_size
from shardwise._tensor.autograd import buckets as reduction
from shardwise.errors import MismatchError, RuleError, ShardwiseError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

R, S0, S1 = sw.Replicate(), Shard(0), Shard(1)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(7, 6, generator=GENERATOR)
Y = torch.randn(7, 3, generator=GENERATOR)


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


@contextmanager
def buckets(max_bytes: int = 25 << 20, *, overlap: bool | None = None) -> Iterator[None]:
    gradient_buckets(max_bytes, overlap=overlap)
    try:
        yield
    finally:
        gradient_buckets()


def on_line(plain: nn.Module, **plan: Any) -> nn.Module:
    return shard_module(plain, plan or {"**": R}, mesh=Mesh((world_size(),)))


def sharded(x: Tensor, mesh: Mesh | None = None) -> Tensor:
    mesh = mesh or Mesh((world_size(),))
    return distribute_tensor(x, mesh, [S0] + [R] * (mesh.ndim - 1))


def grads(module: nn.Module) -> list[Tensor]:
    return [as_dtensor(p.grad).full_tensor() if hasattr(p, "layout_") else p.grad for p in module.parameters()]  # type: ignore[misc]


def trained(module: nn.Module, x: Tensor, y: Tensor, steps: int = 4, parts: int = 1) -> list[Tensor]:
    """All gradients of each step of training, with as many backwards a step as `parts`."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(parts):
            (F.mse_loss(module(x), y) / parts).backward()
        seen += [g.clone() for g in grads(module)]
        optimizer.step()
    return seen


def equal(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b)


# ---- values and counts ---------------------------------------------------------------------------------------------


def trains_like_one_process(max_bytes: int, overlap: bool, parts: int) -> None:
    with buckets(max_bytes, overlap=overlap):
        equal(trained(on_line(mlp()), sharded(X), sharded(Y), parts=parts), trained(mlp(), X, Y))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_bytes", [1, 100, 25 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_training_equals_one_process_with_buckets_of_any_size(
    ranks: int, max_bytes: int, overlap: bool, parts: int
) -> None:
    world(ranks).run(trains_like_one_process, max_bytes, overlap, parts)


@pytest.mark.parametrize("overlap", [False, True])
@world(8)
def test_on_data_sequence_and_tensor_axes_each_set_of_axes_is_one_collective(overlap: bool) -> None:
    """Weights that tp cuts are reduced over dp and sp, those that it does not over all three axes."""
    mesh = Mesh((2, 2, 2), (), ("dp", "sp", "tp"))
    torch.manual_seed(1)
    plain = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
    module = copy.deepcopy(plain)
    plan: dict[str, list[sw.Placement]] = {"1.*": [R, R, S0], "3.weight": [R, R, S1]}
    shard_module(module, plan, mesh=mesh)
    x = torch.randn(3, 4, 6)  # each rank has torch's generator in the same state
    plain(x).square().sum().backward()
    with buckets(overlap=overlap):
        for turn in range(3):
            module.zero_grad()
            loss = module(distribute_tensor(x, mesh, [S0, S1, R])).square().sum()
            with count_comms() as backward:
                loss.backward()
            with count_comms() as read:
                assert module[0].weight.grad is not None
            # One collective is of the gradient of what the cut layers have in common.
            assert (backward.total_calls, read.total_calls) == ((3, 0) if overlap and turn else (1, 2))
            equal(grads(module), grads(plain))


@world(3)
def test_a_step_in_a_hook_of_each_parameter_sees_its_whole_gradient() -> None:
    for overlap, placement in product((False, True), (R, S0)):
        with buckets(overlap=overlap):
            module, plain = on_line(mlp(), **{"**": placement}), mlp()
            for p in (*module.parameters(), *plain.parameters()):
                optimizer = torch.optim.SGD([p], lr=0.1)
                p.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step() or o.zero_grad())
            for _ in range(3):
                F.mse_loss(module(sharded(X)), sharded(Y)).backward()
                F.mse_loss(plain(X), Y).backward()
            found = [as_dtensor(p.detach()).full_tensor() for p in module.parameters()]
            equal(found, [p.data for p in plain.parameters()])


@world(3)
def test_a_parameter_that_several_recomputations_reach_is_reduced_right() -> None:
    """Each of them is a backward of its own inside the backward."""
    torch.manual_seed(1)
    plain = nn.Linear(6, 6)
    for reentrant in (False, True):
        with buckets(overlap=True):
            module = on_line(copy.deepcopy(plain))
            for _ in range(3):
                losses = []
                for layer, x in ((module, sharded(X)), (plain, X.clone())):
                    layer.zero_grad()
                    x.requires_grad_()
                    for _ in range(3):
                        x = checkpoint(layer, x, use_reentrant=reentrant)
                    losses.append(x.square().sum())
                for loss in losses:
                    torch.autograd.backward(loss)
                equal(grads(module), grads(plain))


def step_of(module: nn.Module, batches: int = 1) -> tuple[int, int]:
    """How many collectives backward takes, and how many reading takes."""
    module.zero_grad()
    losses = [summed(module) for _ in range(batches)]
    with count_comms() as backward:
        for loss in losses:
            loss.backward()
    with count_comms() as read:
        grads(module)
    return backward.total_calls, read.total_calls


def summed(module: nn.Module) -> Tensor:
    return F.mse_loss(module(sharded(X)), sharded(Y), reduction="sum")


def summed_plain() -> nn.Module:
    """The plain module with the gradients of `summed`."""
    plain = mlp()
    F.mse_loss(plain(X), Y, reduction="sum").backward()
    return plain


@world(3)
def test_a_bucket_is_one_collective_and_holds_what_fits() -> None:
    with buckets(4 * (3 + 15)):  # bytes of the last layer, which backward comes to first; 0.bias and 0.weight: no room
        module = on_line(mlp())
        for _ in range(2):
            module.zero_grad()
            summed(module).backward()
            with count_comms() as read:
                assert module[0].bias.grad is not None  # type: ignore[index]
            assert read.total_calls == 3  # a collective for the last layer, one for each of the others
            with count_comms() as again:
                grads(module)
            assert again.total_calls == 0
    for overlap in (False, True):
        with buckets(overlap=overlap):
            module = on_line(mlp())
            assert [step_of(module, batches=4) for _ in range(3)] == [(0, 1)] * 3


# ---- while backward runs -------------------------------------------------------------------------------------------


@world(3)
def test_buckets_travel_in_backward_after_one_was_read_until_gradients_accumulate_or_are_cleared() -> None:
    with buckets(72, overlap=True):
        module = on_line(mlp())
        assert [step_of(module) for _ in range(3)] == [(0, 3), (3, 0), (3, 0)]
    assert [step_of(module) for _ in range(2)] == [(0, 1)] * 2  # the CPU waits until gradients are read
    with buckets(overlap=True):
        module, plain = on_line(mlp()), summed_plain()
        assert step_of(module) == (0, 1)
        counts = []
        for _ in range(3):
            counts.append(sum(step_of(module, batches=2)))
            equal(grads(module), [2 * g for g in grads(plain)])
        assert counts == [2, 1, 1]
    with buckets(72, overlap=True):
        module, plain = on_line(mlp()), summed_plain()
        step_of(module)
        summed(module).backward()
        module.zero_grad()
        assert [p.grad for p in module.parameters()] == [None] * 4
        summed(module).backward()
        module[0].weight.grad = None  # type: ignore[index]
        assert module[0].weight.grad is None  # type: ignore[index]
        equal(grads(module[2]), grads(plain[2]))  # type: ignore[index]


@world(3)
def test_who_changes_gradients_on_their_way_gets_what_is_there_when_they_are_read() -> None:
    """As DistributedDataParallel does, which adds up what the local gradients hold."""
    with buckets(72, overlap=True):
        module, plain = on_line(mlp()), summed_plain()
        step_of(module)
        raw: Any = torch._C.TensorBase.grad
        for expected in [(3, 3), (0, 3)]:  # sent in vain, and then no longer
            module.zero_grad()
            loss = summed(module)
            with count_comms() as step:
                loss.backward()
            with torch._C.DisableTorchFunctionSubclass():
                for p in module.parameters():
                    raw.__get__(p).mul_(10)
            with count_comms() as read:
                equal(grads(module), [10 * g for g in grads(plain)])
            assert (step.total_calls, read.total_calls) == expected


@pytest.mark.filterwarnings("ignore:Using backward")
@world(2)
def test_gradients_of_gradients_are_reduced_when_they_are_read() -> None:
    with buckets(overlap=True):
        w = as_dtensor(distribute_tensor(X, Mesh((2,)), [R]).requires_grad_())
        for _ in range(2):
            w.grad = None
            sharded(X).mul(w).pow(3).sum().backward(create_graph=True)
            grad = as_dtensor(w.grad)
            assert_close(grad.full_tensor(), 3 * X.pow(5))
            (second,) = torch.autograd.grad(grad.sum(), [w])
            assert_close(as_dtensor(second).full_tensor(), 6 * X.pow(4))


# ---- which parameters ----------------------------------------------------------------------------------------------


@world(3)
def test_parameters_that_no_rank_uses_have_no_gradient_whatever_was_used_before() -> None:
    """Three sets of parameters take turns: what a bucket held last time may not come this time."""
    used = [(0, 2), (0,), (2,), (0, 2), (0,), (0,), (0, 2), (0, 2)]
    for overlap in (False, True):
        with buckets(overlap=overlap):
            module, plain = on_line(mlp()), mlp()
            for layers in used:
                module.zero_grad()
                plain.zero_grad()
                for layer in layers:
                    width = (6, 0, 5)[layer]
                    module[layer](sharded(X)[:, :width]).square().sum().backward()  # type: ignore[index]
                    plain[layer](X[:, :width]).square().sum().backward()
                for got, want in zip(module.parameters(), plain.parameters(), strict=True):
                    assert (got.grad is None) == (want.grad is None)
                    if want.grad is not None:
                        assert_close(as_dtensor(got.grad).full_tensor(), want.grad)


def uses_its_own(named: bool, shape: Sequence[int], warm: bool) -> Tensor | None:
    mesh = Mesh((world_size(),))
    pair: Any = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(*shape))])
    if named:
        shard_module(pair, {"**": R}, mesh=mesh)
    else:
        pair = nn.ParameterList([nn.Parameter(distribute_tensor(p.detach(), mesh, [R])) for p in pair])
    if warm:
        for p in pair:
            p.sum().backward()
        assert pair[0].grad is not None
        pair.zero_grad()
    mine: Tensor = pair[min(rank(), 1)]
    mine.sum().backward()
    return mine.grad


def test_ranks_that_use_different_parameters_are_told_so_on_every_rank() -> None:
    """Of equal shapes, their gradients would be added to each other."""
    for shape, named in product([(4,), (2, 3)], (False, True)):
        with pytest.raises(MismatchError, match="the gradients that are reduced together") as caught:
            world(3).run(uses_its_own, named, shape, False)
        assert "ranks 0, 1, 2 raised the same" in "\n".join(caught.value.__notes__)
    for shape in ((2, 3), (4,)):
        with pytest.raises(ShardwiseError):  # one that leaves the others later, after both were reduced
            world(2).run(uses_its_own, True, shape, True)


@pytest.mark.processes
def test_on_processes_as_well_and_nobody_hangs() -> None:
    ranks = world(2, real=True)
    ranks.run(trains_like_one_process, 100, True, 1)
    with pytest.raises(MismatchError, match="the gradients that are reduced together"):
        ranks.run(uses_its_own, True, (2, 3), False)


@world(2)
def test_ranks_that_set_other_sizes_are_told() -> None:
    gradient_buckets(100 + rank())
    w = as_dtensor(distribute_tensor(X, Mesh((2,)), [R]).requires_grad_())
    w.sum().backward()
    with pytest.raises(MismatchError, match="max_bytes=100"):
        _ = w.grad
    with pytest.raises(RuleError, match="positive number of bytes, got 0"):
        gradient_buckets(0)


@world(2)
def test_leaves_that_come_and_go_leave_nothing_behind() -> None:
    w = as_dtensor(distribute_tensor(X, Mesh((2,)), [R]).requires_grad_())
    gone = []
    for _ in range(70):
        x = as_dtensor(distribute_tensor(X, Mesh((2,)), [R]).requires_grad_())
        gone.append(weakref.ref(x))
        w.grad = None
        (sharded(X) * w * x).sum().backward()
        assert_close(as_dtensor(w.grad).full_tensor(), X * X)
    del x
    gc.collect()
    assert not any(ref() is not None for ref in gone)
    assert len(reduction._this_rank().group_of(w).plans) <= reduction.KEPT_PLANS


@world(2)
def test_sparse_dense_and_half_gradients_have_buckets_of_their_own() -> None:
    def loss(leaves: Sequence[Tensor], x: Tensor, bags: Tensor) -> Tensor:
        table, w, h = leaves
        rows = F.embedding(bags, table, sparse=True)
        return rows.square().sum() + (x * w).sum() + (x.bfloat16() * h).sum().float()

    ids, values = torch.tensor([0, 2, 2, 5, 1, 0, 3]), (X, X[0], X[1].bfloat16())
    plain = [t.clone().requires_grad_() for t in values]
    loss(plain, X, ids).backward()
    for overlap in (False, True):
        with buckets(overlap=overlap):
            leaves = [as_dtensor(distribute_tensor(t, Mesh((2,)), [R]).requires_grad_()) for t in values]
            for _ in range(3):
                for leaf in leaves:
                    leaf.grad = None
                loss(leaves, sharded(X), sharded(ids)).backward()
                for leaf, want in zip(leaves, plain, strict=True):
                    found, expected = as_dtensor(leaf.grad), want.grad
                    assert expected is not None
                    got = found.to_local().to_dense() if found.is_sparse else found.full_tensor()
                    assert_close(got, expected.to_dense(), rtol=2e-2, atol=2e-2)


@world(3)
def test_leaves_of_some_ranks_or_steps_wait_for_no_others_and_do_not_change_when_theirs_are_sent() -> None:
    near, far = Mesh((2,), (0, 1)), Mesh((2,), (0, 2))
    leaves = [as_dtensor(distribute_tensor(torch.ones(3), mesh, [R]).requires_grad_()) for mesh in (near, far)]
    for step in range(4):
        mine = [x for x in leaves[: 1 + step % 2] if rank() in x.layout_.mesh.ranks]
        for x in mine:
            x.square().sum().backward()
        for x in mine:
            assert as_dtensor(x.grad).tolist() == [2] * 3
            x.grad = None
    every, pair = Mesh((3,)), Mesh((2,), (0, 1))
    x, w = as_dtensor(sharded(X)), as_dtensor(distribute_tensor(X, every, [R]).requires_grad_())
    own = as_dtensor(distribute_tensor(X, pair, [R]).requires_grad_()) if rank() < 2 else None
    for overlap in (False, True):
        with buckets(overlap=overlap):
            for step in range(4):
                if own is not None and step % 2:
                    own.square().sum().backward()
                moved = as_dtensor(x * w)
                (moved.redistribute(placements=[S1]) * moved.redistribute(placements=[S1])).sum().backward()
                if own is not None:
                    if not step % 2:
                        own.square().sum().backward()
                    assert_close(as_dtensor(own.grad).full_tensor(), 2 * X)
                    own.grad = None
                assert_close(x.full_tensor(), X)
                assert_close(as_dtensor(w.grad).full_tensor(), 2 * X * X * X)
                w.grad = None
