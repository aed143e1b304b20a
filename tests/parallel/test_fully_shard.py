"""Training with fully sharded parameters equals training in one process."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from shardwise import Mesh, Replicate, Shard, collectives, count_comms, distribute_tensor
from shardwise.models import Transformer
from shardwise.parallel import fully_shard
from shardwise.testing import world
from tests.parallel.one_process import full
from tests.parallel.units import (
    ARGS,
    as_units,
    assert_trained_alike,
    batches,
    copied,
    each_switch,
    gathered,
    mean_loss,
    model_args,
    sharded,
    train,
    transformer,
    two_layers,
)


@each_switch()
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_batch_of_all_ranks(tying: bool, recompute: bool, experts: int, ranks: int) -> None:
    model, data = transformer(model_args(tying, recompute, experts)), batches(5)

    def run() -> None:
        mesh = Mesh((ranks,))
        of_all = [distribute_tensor(x, mesh, [Shard(0)]) for x in data]
        assert_trained_alike(train(sharded(copied(model), mesh), of_all), model, data)

    world(ranks).run(run)


@each_switch()
@pytest.mark.parametrize("reshard", [True, False, None])
@world(3)
def test_a_plain_batch_on_each_rank(tying: bool, recompute: bool, experts: int, reshard: bool | None) -> None:
    model, data = transformer(model_args(tying, recompute, experts)), batches(6)
    own = [x.chunk(3)[collectives.rank()] for x in data]
    losses, left = train(sharded(copied(model), Mesh((3,)), reshard_after_forward=reshard), own)
    means = [collectives.all_reduce(loss, "sum", (0, 1, 2)) / 3 for loss in losses]
    assert_trained_alike((means, left), model, data)


@each_switch()
@world(4)
def test_replicas_of_shards(tying: bool, recompute: bool, experts: int) -> None:
    model, data = transformer(model_args(tying, recompute, experts)), batches(5)
    mesh = Mesh((2, 2), names=("replicate", "shard"))
    of_all = [distribute_tensor(x, mesh, [Shard(0), Shard(0)]) for x in data]
    found = sharded(copied(model), mesh)
    assert_trained_alike(train(found, of_all), model, data)
    assert found.layers[0].attention.wq.weight.placements == (Replicate(), Shard(0))


@each_switch(experts=0)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 1)])
def test_beside_tensor_parallelism_on_the_same_mesh(
    tying: bool, recompute: bool, experts: int, sequence: bool, shape: tuple[int, int]
) -> None:
    model, data = transformer(model_args(tying, recompute, experts)), batches(6)

    def run() -> None:
        mesh = Mesh(shape, names=("dp", "tp"))
        rank = collectives.rank()
        found: Any = Transformer.parallelize(copied(model), mesh, sequence)
        sharded(found, mesh.submesh("dp", rank))
        at = mesh.coordinate(rank)
        assert at is not None
        own = [x.chunk(shape[0])[at[0]] for x in data]
        losses, left = train(found, own, lambda m, tokens: mean_loss(m, tokens) / shape[0])
        sums = [collectives.all_reduce(loss, "sum", mesh.axis_ranks(rank, 0)) for loss in losses]
        assert_trained_alike((sums, left), model, data)

    world(shape[0] * shape[1]).run(run)


@each_switch(experts=0)
@world(4)
def test_beside_tensor_parallelism_on_the_other_axis(tying: bool, recompute: bool, experts: int) -> None:
    model, data = transformer(model_args(tying, recompute, experts)), batches(6)
    mesh = Mesh((2, 2), names=("dp", "tp"))
    rank = collectives.rank()
    found: Any = Transformer.parallelize(copied(model), mesh.submesh("tp", rank), False)
    sharded(found, mesh.submesh("dp", rank))
    weight = found.layers[0].attention.wq.weight
    assert weight.layout_.mesh == mesh
    assert weight.placements == (Shard(0), Shard(0))
    own = [x.chunk(2)[rank // 2] for x in data]
    losses, left = train(found, own)
    means = [collectives.all_reduce(loss, "sum", mesh.axis_ranks(rank, 0)) / 2 for loss in losses]
    assert_trained_alike((means, left), model, data)


@world(2)
def test_each_unit_is_gathered_twice_and_reduced_once() -> None:
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)])
    mesh = Mesh((2,))
    found = copied(model)
    for layer in found:
        fully_shard(layer, mesh=mesh)
    fully_shard(found, mesh=mesh)
    x = distribute_tensor(torch.ones(4, 5), mesh, [Shard(0)])
    with count_comms() as forward:
        out = found(x).sum()
    with count_comms() as backward:
        out.backward()
    assert forward.calls == {"all_gather": 3}
    assert backward.total_calls == 6
    assert backward.calls["all_gather"] == 3
    assert forward.total_bytes == 3 * (3 * 5 + 3) * 4  # the larger of the shards of 3 and 2 rows


@world(2)
def test_memory_of_parameters_is_freed_after_forward_and_after_backward() -> None:
    mesh = Mesh((2,))
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    seen: list[Any] = []
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
        layer.register_forward_pre_hook(lambda m, args: seen.append(m.weight.to_local().untyped_storage()))
    fully_shard(model, mesh=mesh)
    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
    out = model(x)

    def nbytes(x: Any) -> int:
        return int(x.nbytes())

    assert [nbytes(w) for w in seen] == [0, 0]
    during = []
    cast(Any, model[0]).weight.register_hook(lambda g: during.append([nbytes(w) for w in seen]))
    out.sum().backward()
    assert during == [[0, 0]]
    assert [nbytes(w) for w in seen] == [0, 0]


@world(2)
def test_two_uses_one_backward_and_a_second_backward() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(6, 4)

    def loss_of(model: Any, x: Tensor) -> Tensor:
        return cast(Tensor, (model(x) * model(x.flip(1))).square().mean())

    mesh = Mesh((2,))
    model = copied(plain)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    want = copied(plain)
    loss, expected = loss_of(model, distribute_tensor(x, mesh, [Shard(0)])), loss_of(want, x)
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        expected.backward(retain_graph=retain)
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        assert_close(gathered(p.grad), q.grad)


@world(2)
def test_outputs_that_are_views_and_change_in_place() -> None:
    torch.manual_seed(0)

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            y = self.inner(x)
            return y[:, :3], {"rest": y[:, 3:].unflatten(1, (3, 1))}

    plain, x = Views(), torch.randn(6, 4)

    def gradient(model: nn.Module, x: Tensor) -> Tensor:
        first, others = model(x.clone().requires_grad_())
        first += 1
        others["rest"].mul_(2)
        (first.square().sum() + others["rest"].sin().sum()).backward()
        return cast(Tensor, model.get_parameter("inner.weight").grad)

    mesh = Mesh((2,))
    model = copied(plain)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    assert_close(full(gradient(model, distribute_tensor(x, mesh, [Shard(0)]))), gradient(copied(plain), x))


@world(3)
def test_double_backward() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.randn(6, 4)

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        first = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)
        return sum((g.square().sum() for g in first), torch.zeros(()))

    mesh = Mesh((3,))
    model = copied(plain)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    want = copied(plain)
    penalty(want, x).backward()
    penalty(model, distribute_tensor(x, mesh, [Shard(0)])).backward()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        assert_close(gathered(p.grad), q.grad)


@world(2)
def test_accumulation_with_and_without_reducing() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    data = [torch.randn(4, 4) for _ in range(3)]
    want = copied(plain)
    for x in data:
        want(x).square().mean().backward()
    for sync in (True, False):
        mesh = Mesh((2,))
        model = copied(plain)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        of_all = [distribute_tensor(x, mesh, [Shard(0)]) for x in data]
        with count_comms() as comms:
            for i, x in enumerate(of_all):
                model.set_requires_gradient_sync(sync or i == len(data) - 1)
                model(x).square().mean().backward()
        assert sum(n for name, n in comms.calls.items() if name != "all_gather") == (6 if sync else 2)
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            assert_close(gathered(p.grad), q.grad)


@world(2)
def test_a_step_with_gradients_that_were_not_reduced_is_refused() -> None:
    mesh = Mesh((2,))
    model = as_units(two_layers(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)])
    model.set_requires_gradient_sync(False)
    model(batch).sum().backward()
    with pytest.raises(RuntimeError, match="gradients of 0 were not reduced"):
        optimizer.step()
    model.set_requires_gradient_sync(True)
    model[2](model[1](batch)).sum().backward()  # not the first unit
    with pytest.raises(RuntimeError, match="gradients of 0 were not reduced"):
        optimizer.step()
    model.zero_grad()
    model(batch).sum().backward()
    optimizer.step()


@world(2)
def test_frozen_parameters_and_inputs_without_gradients() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    plain[0].requires_grad_(False)
    plain[2].weight.requires_grad_(False)
    plain[3].requires_grad_(False)
    x = torch.randn(5, 4)
    mesh = Mesh((2,))
    model, want = copied(plain), copied(plain)
    for layer in (model[0], model[2], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(distribute_tensor(x, mesh, [Shard(0)])).square().sum().backward()
    want(x).square().sum().backward()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        assert p.requires_grad == q.requires_grad
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            assert_close(gathered(p.grad), q.grad)


@world(2)
def test_frozen_units_are_freed_one_after_the_other_in_backward() -> None:
    mesh = Mesh((2,))
    model: Any = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]).requires_grad_(False)
    held: list[Any] = []
    filled = []
    for layer in model:
        fully_shard(layer, mesh=mesh)
        layer.register_forward_pre_hook(lambda m, args: held.append(m.weight.to_local().untyped_storage()))
    fully_shard(model, mesh=mesh)
    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)]).requires_grad_()

    def count(grad: Tensor) -> None:
        filled.append(sum(w.nbytes() > 0 for w in held))

    for layer in model:
        layer.register_forward_hook(lambda m, args, out: out.register_hook(count) and None)
    model(x).sum().backward()
    assert max(filled) in (1, 2)  # the gradient of an input is that of an output before
    assert len(filled) == 4
    assert not any(w.nbytes() for w in held)


@pytest.mark.parametrize("reentrant", [True, False])
@world(2)
def test_checkpoints_around_units_and_inside(reentrant: bool) -> None:
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(lambda t: self.inner(t).tanh(), x, use_reentrant=reentrant)
            return cast(Tensor, self.outer(y).tanh() + x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    plain, x = Model(), torch.randn(5, 4)
    mesh = Mesh((2,))
    model, want = copied(plain), copied(plain)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mine = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    theirs = x.clone().requires_grad_()
    model(mine).square().sum().backward()
    want(theirs).square().sum().backward()
    assert_close(gathered(mine.grad), theirs.grad)
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        assert_close(gathered(p.grad), q.grad)


@pytest.mark.parametrize("reentrant", [True, False])
@world(2)
def test_a_parameter_of_the_root_that_checkpoints_use(reentrant: bool) -> None:
    """A reentrant checkpoint runs a backward of its own, in which gradients of the root are reduced early."""
    torch.manual_seed(0)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return cast(Tensor, (self.inner(x) * shift.unsqueeze(0)).tanh())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(4))
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(partial(layer, shift=self.shift), x, use_reentrant=reentrant)
            return x

    plain, x = Model(), torch.randn(6, 4)
    mesh = Mesh((2,))
    model, want = copied(plain), copied(plain)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()).square().sum().backward()
    want(x.clone().requires_grad_()).square().sum().backward()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        assert_close(gathered(p.grad), q.grad)


@world(2)
def test_evaluation_between_steps() -> None:
    model, data = transformer(ARGS), batches(4)
    mesh = Mesh((2,))
    found = sharded(copied(model), mesh)
    tokens = distribute_tensor(data[0], mesh, [Shard(0)])
    want = mean_loss(model, data[0]).detach()
    with torch.no_grad():
        assert_close(full(mean_loss(found, tokens)), want)
    with torch.inference_mode():
        assert_close(full(mean_loss(found, tokens)), want)
    loss = mean_loss(found, tokens)
    with torch.no_grad():
        assert_close(full(mean_loss(found, tokens)), want)
    loss.backward()
    reference = copied(model)
    mean_loss(reference, data[0]).backward()
    assert_close(gathered(found.output.weight.grad), reference.output.weight.grad)


@world(2)
def test_prefetching_changes_nothing_but_the_order_of_collectives() -> None:
    model, data = transformer(replace(ARGS, n_layers=4)), batches(4)
    mesh = Mesh((2,))
    of_all = [distribute_tensor(x, mesh, [Shard(0)]) for x in data]
    counts = []
    for prefetch in (0, 1, 3):
        with count_comms() as comms:
            found = train(sharded(copied(model), mesh, prefetch=prefetch), of_all)
        assert_trained_alike(found, model, data)
        counts.append((comms.total_calls, comms.total_bytes))
    assert counts == counts[:1] * 3
