"""Training with fully sharded parameters equals training in one process."""

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from shardwise import Mesh, Replicate, Shard, count_comms, distribute_tensor
from shardwise import _collectives as collectives
from shardwise._models import Transformer
from shardwise.testing import world
from tests.parallel.one_process import full
from tests.parallel.units import (
    ARGS,
    as_units,
    assert_same_gradients,
    assert_trained_alike,
    batches,
    batches_of_all,
    check_gradients,
    copied,
    each_switch,
    mean_loss,
    model_args,
    sharded,
    squares,
    train,
    train_parts,
    transformer,
    two_layers,
)


@each_switch()
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_batch_of_all_ranks(tying: bool, recompute: bool, experts: int, ranks: int) -> None:
    args = model_args(tying, recompute, experts)

    def run() -> None:
        mesh = Mesh((ranks,))
        assert_trained_alike(train(sharded(transformer(args), mesh), batches_of_all(5, mesh)), args, 5)

    world(ranks).run(run)


@each_switch()
@pytest.mark.parametrize("reshard", [True, False, None])
@world(3)
def test_a_plain_batch_on_each_rank(tying: bool, recompute: bool, experts: int, reshard: bool | None) -> None:
    args, mesh = model_args(tying, recompute, experts), Mesh((3,))
    model = sharded(transformer(args), mesh, reshard_after_forward=reshard)
    assert_trained_alike(train_parts(model, 6, mesh, mean=True), args, 6)


@each_switch()
@world(4)
def test_replicas_of_shards(tying: bool, recompute: bool, experts: int) -> None:
    args, mesh = model_args(tying, recompute, experts), Mesh((2, 2), names=("replicate", "shard"))
    found = sharded(transformer(args), mesh)
    assert_trained_alike(train(found, batches_of_all(5, mesh)), args, 5)
    assert found.layers[0].attention.wq.weight.placements == (Replicate(), Shard(0))


@each_switch(experts=0)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 1)])
def test_beside_tensor_parallelism_on_the_same_mesh(
    tying: bool, recompute: bool, experts: int, sequence: bool, shape: tuple[int, int]
) -> None:
    args = model_args(tying, recompute, experts)

    def run() -> None:
        mesh = Mesh(shape, names=("dp", "tp"))
        found = Transformer.parallelize(transformer(args), mesh, sequence)
        sharded(found, mesh["dp"])
        assert_trained_alike(train_parts(found, 6, mesh, mean=False), args, 6)

    world(shape[0] * shape[1]).run(run)


@each_switch(experts=0)
@world(4)
def test_beside_tensor_parallelism_on_the_other_axis(tying: bool, recompute: bool, experts: int) -> None:
    args, mesh = model_args(tying, recompute, experts), Mesh((2, 2), names=("dp", "tp"))
    found: Any = Transformer.parallelize(transformer(args), mesh["tp"], False)
    sharded(found, mesh["dp"])
    weight = found.layers[0].attention.wq.weight
    assert weight.layout_.mesh == mesh
    assert weight.placements == (Shard(0), Shard(0))
    assert_trained_alike(train_parts(found, 6, mesh, mean=True), args, 6)


@world(2)
def test_prefetching_changes_nothing_but_the_order_of_collectives() -> None:
    args, mesh = replace(ARGS, n_layers=4), Mesh((2,))
    counts = []
    for prefetch in (0, 1, 3):
        with count_comms() as comms:
            found = train(sharded(transformer(args), mesh, prefetch=prefetch), batches_of_all(4, mesh))
        assert_trained_alike(found, args, 4)
        counts.append((comms.total_calls, comms.total_bytes))
    assert counts == counts[:1] * 3


@world(2)
def test_prefetching_a_unit_that_runs_again_after_one_inside_it() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.weight = nn.Linear(4, 4), nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.inner(x).tanh() @ self.weight)

    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self[0](self[0](x)))

    plain, x, mesh = Twice(Outer()), torch.randn(4, 4), Mesh((2,))
    model, want = as_units(plain, mesh, Outer | nn.Linear, prefetch=2), copied(plain)
    for _ in range(2):  # the second forward knows the order of the first one
        squares(model, distribute_tensor(x, mesh, [Shard(0)])).backward()
        squares(want, x).backward()
    assert_same_gradients(model, want)


@world(2)
def test_evaluation_between_steps() -> None:
    model, data, mesh = transformer(ARGS), batches(4), Mesh((2,))
    found = sharded(copied(model), mesh)
    tokens = distribute_tensor(data[0], mesh, [Shard(0)])
    want = mean_loss(model, data[0])
    for around in (torch.no_grad, torch.inference_mode):
        with around():
            assert_close(full(mean_loss(found, tokens)), want.detach())
    loss = mean_loss(found, tokens)
    with torch.no_grad():
        assert_close(full(mean_loss(found, tokens)), want.detach())
    loss.backward()
    want.backward()
    assert_same_gradients(found, model)


# ---- collectives and memory -----------------------------------------------------------------------------------------


@world(2)
def test_each_unit_is_gathered_twice_and_reduced_once() -> None:
    mesh = Mesh((2,))
    found = as_units(nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)]), mesh)
    x = distribute_tensor(torch.ones(4, 5), mesh, [Shard(0)])
    with count_comms() as forward:
        out = found(x).sum()
    with count_comms() as backward:
        out.backward()
    assert forward.calls == {"all_gather": 3}
    assert backward.total_calls == 6
    assert backward.calls["all_gather"] == 3
    assert forward.total_bytes == 3 * (3 * 5 + 3) * 4  # the larger of the shards of 3 and 2 rows


def gathered_memory(layers: list[Any]) -> list[Any]:
    """The storages of all-gathered weights, filled by forward."""
    held: list[Any] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda m, args: held.append(m.weight.to_local().untyped_storage()))
    return held


@world(2)
def test_memory_of_parameters_is_freed_after_forward_and_after_backward() -> None:
    mesh = Mesh((2,))
    model = as_units(two_layers(), mesh)
    seen = gathered_memory([model[0], model[2]])
    out = model(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
    assert [w.nbytes() for w in seen] == [0, 0]
    during = []
    model[0].weight.register_hook(lambda g: during.append([w.nbytes() for w in seen]))
    out.sum().backward()
    assert during == [[0, 0]]
    assert [w.nbytes() for w in seen] == [0, 0]


@world(2)
def test_frozen_units_are_freed_one_after_the_other_in_backward() -> None:
    mesh = Mesh((2,))
    model = as_units(nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]).requires_grad_(False), mesh)
    held, filled = gathered_memory(list(model)), list[int]()

    def count(grad: Tensor) -> None:
        filled.append(sum(w.nbytes() > 0 for w in held))

    for layer in model:
        layer.register_forward_hook(lambda m, args, out: out.register_hook(count) and None)
    model(distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)]).requires_grad_()).sum().backward()
    assert max(filled) in (1, 2)  # the gradient of an input is that of an output before
    assert len(filled) == 4
    assert not any(w.nbytes() for w in held)


# ---- kinds of backward ----------------------------------------------------------------------------------------------


@world(2)
def test_two_uses_one_backward_and_a_second_backward() -> None:
    def twice(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = (model(x) * model(x.flip(1))).square().mean()
        loss.backward(retain_graph=True)
        return loss

    check_gradients(two_layers(), torch.randn(6, 4), twice)


@world(2)
def test_outputs_that_are_views_and_change_in_place() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            y = self.inner(x)
            return y[:, :3], {"rest": y[:, 3:].unflatten(1, (3, 1))}

    def loss(model: Any, x: Tensor) -> Tensor:
        first, others = model(x.clone().requires_grad_())
        first += 1
        others["rest"].mul_(2)
        total: Tensor = first.square().sum() + others["rest"].sin().sum()
        return total

    check_gradients(Views(), torch.randn(6, 4), loss, kinds=(), reshard_after_forward=True)


@world(3)
def test_double_backward() -> None:
    def penalty(model: Any, x: Tensor) -> Tensor:
        first = torch.autograd.grad(squares(model, x), list(model.parameters()), create_graph=True)
        return sum((g.square().sum() for g in first), torch.zeros(()))

    check_gradients(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(6, 4), penalty)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 3)])
def test_gradients_of_average_gradients(shape: tuple[int, ...]) -> None:
    """Ranks have plain batches of 2, 2, 1 or no rows."""
    plain, x = two_layers().double(), torch.randn(5, 4, dtype=torch.float64)

    def each_order(model: Any, loss: Tensor) -> None:
        for _ in range(2):
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            loss = sum((g.square().sum() for g in gradients), torch.zeros(()))
        loss.backward()

    def run() -> None:
        mesh = Mesh(shape)
        model, want = as_units(plain, mesh), copied(plain)
        each_order(model, squares(model, x[collectives.rank() * 2 :][:2]))
        each_order(want, squares(want, x[: 2 * mesh.size()]) / mesh.size())
        assert_same_gradients(model, want)

    world(prod(shape)).run(run)


@world(2)
def test_accumulation_with_and_without_reducing() -> None:
    plain, mesh = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), Mesh((2,))
    data = [torch.randn(4, 4) for _ in range(3)]
    want = copied(plain)
    for x in data:
        squares(want, x).backward()
    of_all = [distribute_tensor(x, mesh, [Shard(0)]) for x in data]
    for sync in (True, False):
        model = as_units(plain, mesh)
        with count_comms() as comms:
            for i, batch in enumerate(of_all):
                model.set_requires_gradient_sync(sync or i == len(data) - 1)
                squares(model, batch).backward()
        assert sum(n for name, n in comms.calls.items() if name != "all_gather") == (6 if sync else 2)
        assert_same_gradients(model, want)


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
    twin = copied(model)
    with pytest.raises(RuntimeError, match="were not reduced"):
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
    twin.set_requires_gradient_sync(True)
    twin(batch).sum().backward()
    want = two_layers()
    (2 * want(torch.ones(2, 4)).sum()).backward()
    assert_same_gradients(twin, want)
    model.set_requires_gradient_sync(True)
    model[2](model[1](batch)).sum().backward()  # not the first unit
    with pytest.raises(RuntimeError, match="gradients of 0 were not reduced"):
        optimizer.step()
    model.zero_grad()
    model(batch).sum().backward()
    optimizer.step()


@world(2)
def test_frozen_parameters_and_inputs_without_gradients() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    plain[0].requires_grad_(False)
    plain[2].weight.requires_grad_(False)
    plain[3].requires_grad_(False)
    check_gradients(plain, torch.randn(5, 4))


@pytest.mark.parametrize("reentrant", [True, False])
@world(2)
def test_checkpoints_around_units_and_inside(reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(lambda t: self.inner(t).tanh(), x, use_reentrant=reentrant)
            out: Tensor = self.outer(y).tanh() + x
            return out

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    check_gradients(Model(Block(), Block()), torch.randn(5, 4, requires_grad=True), kinds=Block)


@pytest.mark.parametrize("reentrant", [True, False])
@world(2)
def test_a_parameter_of_the_root_that_checkpoints_use(reentrant: bool) -> None:
    """A reentrant checkpoint runs a backward of its own, in which gradients of the root are reduced early."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            out: Tensor = (self.inner(x) * shift.unsqueeze(0)).tanh()
            return out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(4))
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(partial(layer, shift=self.shift), x, use_reentrant=reentrant)
            return x

    check_gradients(Model(), torch.randn(6, 4, requires_grad=True), kinds=Layer)
