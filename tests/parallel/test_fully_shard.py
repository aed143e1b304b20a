"""Training with fully sharded parameters equals training in one process."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, Mesh, Replicate, Shard, collectives, count_comms, distribute_tensor, shard_module
from shardwise.errors import MismatchError, PlanError, RuleError
from shardwise.models import ModelArgs, Transformer
from shardwise.parallel import MixedPrecisionPolicy, fully_shard
from shardwise.testing import world
from tests.parallel.one_process import full

ARGS = ModelArgs(n_layers=2, vocab_size=11, max_seq_len=6, dim=12, n_heads=4, dropout_p=0.0)
SWITCHES = [
    replace(ARGS, weight_tying=tying, checkpoint_activations=recompute, num_experts=experts)
    for tying, recompute, experts in product([True, False], [True, False], [0, 3])
]
STEPS = 5
Loss = Callable[[nn.Module, Tensor], Tensor]
Trained = tuple[list[Tensor], dict[str, Tensor]]


def described(args: ModelArgs) -> str:
    on = [name for name in ("weight_tying", "checkpoint_activations", "num_experts") if getattr(args, name)]
    return ", ".join(on) or "plain"


def copied(model: nn.Module) -> Any:
    return copy.deepcopy(model)


def gathered(x: Any) -> Tensor:
    assert isinstance(x, Tensor)
    return full(x)


def batches(rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(ARGS.vocab_size, (rows, 7), generator=generator) for _ in range(STEPS)]


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, data: Sequence[Tensor], loss_of: Loss = mean_loss) -> Trained:
    """Losses, and the last gradients and parameters."""
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for tokens in data:
        optimiser.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimiser.step()
        losses.append(full(loss.detach()))
    left = {name: full(p.detach()) for name, p in model.named_parameters()}
    left |= {f"gradient of {name}": gathered(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return losses, left


def assert_trained_alike(found: Trained, model: nn.Module, data: Sequence[Tensor]) -> None:
    losses, left = train(copied(model), data)
    assert found[1].keys() == left.keys()
    assert_close(found[0], losses, rtol=1e-5, atol=1e-5)
    for name, want in left.items():
        assert_close(found[1][name], want, rtol=1e-4, atol=1e-5, msg=f"{name}: {{}}".format)


def sharded(model: Any, mesh: Mesh, **options: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def transformer(args: ModelArgs) -> Transformer:
    torch.manual_seed(0)
    return Transformer(args)


@pytest.mark.parametrize("args", SWITCHES, ids=described)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_batch_of_all_ranks(args: ModelArgs, ranks: int) -> None:
    model, data = transformer(args), batches(5)

    def run() -> None:
        mesh = Mesh((ranks,))
        of_all = [distribute_tensor(x, mesh, [Shard(0)]) for x in data]
        assert_trained_alike(train(sharded(copied(model), mesh), of_all), model, data)

    world(ranks).run(run)


@pytest.mark.parametrize("args", SWITCHES[::3], ids=described)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_a_plain_batch_on_each_rank(args: ModelArgs, reshard: bool | None) -> None:
    model, data = transformer(args), batches(6)

    def run() -> None:
        own = [x.chunk(3)[collectives.rank()] for x in data]
        losses, left = train(sharded(copied(model), Mesh((3,)), reshard_after_forward=reshard), own)
        means = [collectives.all_reduce(loss, "sum", (0, 1, 2)) / 3 for loss in losses]
        assert_trained_alike((means, left), model, data)

    world(3).run(run)


@pytest.mark.parametrize("args", SWITCHES, ids=described)
def test_replicas_of_shards(args: ModelArgs) -> None:
    model, data = transformer(args), batches(5)

    def run() -> None:
        mesh = Mesh((2, 2), names=("replicate", "shard"))
        of_all = [distribute_tensor(x, mesh, [Shard(0), Shard(0)]) for x in data]
        found = sharded(copied(model), mesh)
        assert_trained_alike(train(found, of_all), model, data)
        assert found.layers[0].attention.wq.weight.placements == (Replicate(), Shard(0))

    world(4).run(run)


@pytest.mark.parametrize("args", [a for a in SWITCHES if not a.num_experts], ids=described)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 1)])
def test_beside_tensor_parallelism_on_the_same_mesh(args: ModelArgs, sequence: bool, shape: tuple[int, int]) -> None:
    model, data = transformer(args), batches(6)

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


@pytest.mark.parametrize("args", [a for a in SWITCHES if not a.num_experts], ids=described)
def test_beside_tensor_parallelism_on_the_other_axis(args: ModelArgs) -> None:
    model, data = transformer(args), batches(6)

    def run() -> None:
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

    world(4).run(run)


def test_each_unit_is_gathered_twice_and_reduced_once() -> None:
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)])

    def run() -> None:
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

    world(2).run(run)


def test_memory_of_parameters_is_freed_after_forward_and_after_backward() -> None:
    def run() -> None:
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

    world(2).run(run)


def test_two_uses_one_backward_and_a_second_backward() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(6, 4)

    def loss_of(model: Any, x: Tensor) -> Tensor:
        return cast(Tensor, (model(x) * model(x.flip(1))).square().mean())

    def run() -> None:
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

    world(2).run(run)


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

    def run() -> None:
        mesh = Mesh((2,))
        model = copied(plain)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        assert_close(full(gradient(model, distribute_tensor(x, mesh, [Shard(0)]))), gradient(copied(plain), x))

    world(2).run(run)


def test_double_backward() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.randn(6, 4)

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        first = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)
        return sum((g.square().sum() for g in first), torch.zeros(()))

    def run() -> None:
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

    world(3).run(run)


def test_accumulation_with_and_without_reducing() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    data = [torch.randn(4, 4) for _ in range(3)]

    def run() -> None:
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

    world(2).run(run)


def test_a_step_with_gradients_that_were_not_reduced_is_refused() -> None:
    def run() -> None:
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

    world(2).run(run)


def test_frozen_parameters_and_inputs_without_gradients() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    plain[0].requires_grad_(False)
    plain[2].weight.requires_grad_(False)
    plain[3].requires_grad_(False)
    x = torch.randn(5, 4)

    def run() -> None:
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

    world(2).run(run)


def test_frozen_units_are_freed_one_after_the_other_in_backward() -> None:
    def run() -> None:
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

    world(2).run(run)


@pytest.mark.parametrize("reentrant", [True, False])
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

    def run() -> None:
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

    world(2).run(run)


@pytest.mark.parametrize("reentrant", [True, False])
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

    def run() -> None:
        mesh = Mesh((2,))
        model, want = copied(plain), copied(plain)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()).square().sum().backward()
        want(x.clone().requires_grad_()).square().sum().backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            assert_close(gathered(p.grad), q.grad)

    world(2).run(run)


def test_modules_of_the_meta_device_are_the_same_on_any_number_of_ranks() -> None:
    def run() -> list[Tensor]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))
        mesh = Mesh((collectives.world_size(),))
        torch.manual_seed(7)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return [full(p.detach()) for p in model.parameters()]

    assert_close(world(2).run(run)[0], world(3).run(run)[1])


def test_mixed_precision() -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(8, 8), torch.randn(4, 8)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)

    def run() -> None:
        mesh = Mesh((2,))
        model, want = copied(plain), copied(plain)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        mine = distribute_tensor(x, mesh, [Shard(0)])
        with count_comms() as comms:
            out = model(mine)
        assert comms.total_bytes == (4 * 8 + 4) * 2
        assert out.dtype == torch.float32
        with count_comms() as comms:
            out.square().sum().backward()
        assert comms.calls == {"all_to_all": 1}
        assert comms.total_bytes == (4 * 8 + 4) * 4
        half = F.linear(x.bfloat16(), want.weight.bfloat16(), want.bias.bfloat16())
        half.float().square().sum().backward()
        assert_close(full(out.detach()), half.float())
        assert model.weight.grad.dtype == torch.float32
        assert_close(gathered(model.weight.grad), want.weight.grad, rtol=0.02, atol=0.05)

    world(2).run(run)


def test_another_dim_and_ignored_parameters() -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(5, 7), torch.randn(4, 5)

    def run() -> None:
        mesh = Mesh((3,))
        model, want = copied(plain), copied(plain)
        bias = model.bias
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1), ignored_params=[bias])
        assert model.weight.placements == (Shard(1),)
        assert model.bias is bias
        model(distribute_tensor(x, mesh, [Shard(0)])).square().sum().backward()
        want(x).square().sum().backward()
        assert_close(gathered(model.weight.grad), want.weight.grad)
        assert_close(gathered(bias.grad), want.bias.grad)

    world(3).run(run)


def test_parameters_that_are_sharded_on_the_axis_already_stay() -> None:
    def run() -> None:
        mesh = Mesh((2,))
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3))
        shard_module(model[0], {"weight": Shard(1)}, mesh=mesh)
        table = model[0].weight
        fully_shard(model, mesh=mesh)
        assert model[0].weight is table
        ids = distribute_tensor(torch.tensor([1, 5, 2]), mesh, [Shard(0)])
        model(ids).sum().backward()
        assert isinstance(table.grad, DTensor)

    world(2).run(run)


def test_units_may_be_made_in_any_order_and_tied_parameters_stay_tied() -> None:
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.middle, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return cast(Tensor, self.head(self.middle(self.table(ids))))

    plain, ids = Tied(), torch.tensor([1, 2, 6, 6, 0])

    def run() -> None:
        want = copied(plain)
        want(ids).square().sum().backward()
        for order in (["", "table", "head"], ["table", "head", ""], ["middle", ""]):
            mesh = Mesh((2,))
            model = copied(plain)
            for path in order:
                fully_shard(model.get_submodule(path), mesh=mesh)
            assert model.head.weight is model.table.weight
            model(distribute_tensor(ids, mesh, [Shard(0)])).square().sum().backward()
            for p, q in zip(model.parameters(), want.parameters(), strict=True):
                assert_close(gathered(p.grad), q.grad)

    world(2).run(run)


def test_a_copy_of_a_module_is_a_module_of_its_own() -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(4, 4)

    def run() -> None:
        mesh = Mesh((2,))
        model = copied(plain)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        batch = distribute_tensor(x, mesh, [Shard(0)])
        out = model(batch)
        twin = copied(model)
        with torch.no_grad():
            twin[0].weight.zero_()
        out.sum().backward()
        assert_close(full(out.detach()), plain(x).detach())
        assert twin[0].weight.grad is None
        twin(batch).sum().backward()
        assert not gathered(twin[1].weight.grad).eq(gathered(model[1].weight.grad)).all()

    world(2).run(run)


def test_evaluation_between_steps() -> None:
    model, data = transformer(ARGS), batches(4)

    def run() -> None:
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

    world(2).run(run)


def test_prefetching_changes_nothing_but_the_order_of_collectives() -> None:
    model, data = transformer(replace(ARGS, n_layers=4)), batches(4)

    def run() -> None:
        mesh = Mesh((2,))
        of_all = [distribute_tensor(x, mesh, [Shard(0)]) for x in data]
        counts = []
        for prefetch in (0, 1, 3):
            with count_comms() as comms:
                found = train(sharded(copied(model), mesh, prefetch=prefetch), of_all)
            assert_trained_alike(found, model, data)
            counts.append((comms.total_calls, comms.total_bytes))
        assert counts == counts[:1] * 3

    world(2).run(run)


def test_wrong_uses_are_refused() -> None:
    def run() -> None:
        mesh = Mesh((2, 2), names=("dp", "tp"))
        dp = mesh.submesh("dp", collectives.rank())
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=dp)
        with pytest.raises(PlanError, match="called on this FullyShardedLinear before"):
            fully_shard(model, mesh=dp)
        odd = nn.Module()
        odd.scale = nn.Parameter(torch.tensor(1.0))
        with pytest.raises(PlanError, match="scale: a parameter without dims"):
            fully_shard(odd, mesh=dp)
        mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        shard_module(mixed[0], {"weight": [Replicate(), Shard(0)]}, mesh=mesh)
        fully_shard(mixed, mesh=dp)
        with pytest.raises(PlanError, match=r"are added over the ranks of that axis, but those of .* are averaged"):
            mixed(torch.ones(2, 4))
        model.weight = nn.Parameter(torch.ones(4, 4))
        with pytest.raises(PlanError, match="weight of FullyShardedLinear was replaced after fully_shard"):
            model(torch.ones(2, 4))

    world(4).run(run)


def test_changes_between_forward_and_backward_are_errors() -> None:
    def run() -> None:
        mesh = Mesh((2,))
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        out = model(x).sum()
        with torch.no_grad():
            model[0].weight.mul_(2)
        with pytest.raises(RuntimeError, match="weight of 0 changed between forward and backward"):
            out.backward()

        @torch.no_grad()
        def double(module: nn.Linear, args: object) -> None:
            module.weight.mul_(2)

        model[1].register_forward_pre_hook(double)
        with pytest.raises(RuntimeError, match="weight of 1 changed in place in forward"):
            model(x)

    world(2).run(run)


# ---- what people do ---------------------------------------------------------------------------------------------


def two_layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def as_units(model: Any, mesh: Mesh, **options: Any) -> Any:
    """A copy of which each linear layer is a unit, and all."""
    found = copied(model)
    for layer in found:
        if isinstance(layer, nn.Linear | nn.BatchNorm1d):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(found, mesh=mesh, **options)


class OneOfTwo(nn.Module):
    """Ranks use different layers of equal sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layers[collectives.rank()](x))


@pytest.mark.parametrize("units", [True, False])
def test_ranks_that_use_other_parameters_are_an_error(units: bool) -> None:
    def run() -> None:
        model: Any = OneOfTwo()
        for layer in model.layers if units else ():
            fully_shard(layer, mesh=Mesh((2,)))
        fully_shard(model, mesh=Mesh((2,)))
        with pytest.raises(MismatchError, match="for the same purpose"):
            model(torch.ones(2, 4)).sum().backward()

    world(2).run(run)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_forward_that_fails_leaves_nothing_behind(error: type[BaseException]) -> None:
    plain, x = two_layers(), torch.randn(4, 4)

    def fail(module: nn.Module, args: object) -> None:
        raise error

    def run() -> None:
        mesh = Mesh((2,))
        model, batch = as_units(plain, mesh), distribute_tensor(x, mesh, [Shard(0)])
        for prepend in (False, True):
            handle = model[2].register_forward_pre_hook(fail, prepend=prepend)
            with pytest.raises(error):
                model(batch)
            handle.remove()
            assert all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in model.parameters())
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        want = copied(plain)
        with torch.no_grad():
            want[0].weight.mul_(0.5)
        assert_close(full(model(batch)), want(x))

    world(2).run(run)


def test_a_backward_that_fails_leaves_the_stored_parameters() -> None:
    plain, x = two_layers(), torch.randn(4, 4)

    def fail(grad: Tensor) -> None:
        raise MemoryError

    def run() -> None:
        mesh = Mesh((2,))
        model, batch = as_units(plain, mesh), distribute_tensor(x, mesh, [Shard(0)])
        model(batch).sum().backward()
        handle = model[1].register_forward_hook(lambda m, args, out: out.register_hook(fail) and None)
        with pytest.raises(MemoryError):
            model(batch).sum().backward()
        handle.remove()
        assert all(isinstance(x, DTensor) for x in model.state_dict().values())
        model.zero_grad()
        model(batch).sum().backward()
        want = copied(plain)
        want(x).sum().backward()
        for p, q in zip(copied(model).parameters(), want.parameters(), strict=True):
            assert_close(full(p.detach()), q.detach())
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            assert_close(gathered(p.grad), q.grad)

    world(2).run(run)


def test_an_output_that_is_a_parameter_keeps_its_memory() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 4))

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            return self.weight[ids], self.weight.t()

    torch.manual_seed(0)
    plain, ids = Table(), torch.tensor([1, 4, 0, 1])

    def run() -> None:
        mesh = Mesh((2,))
        model = copied(plain)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        rows, weight = model(distribute_tensor(ids, mesh, [Shard(0)]))
        (rows @ weight).sum().backward()
        assert_close(full(weight.detach()), plain.weight.detach().t())
        want = copied(plain)
        rows, weight = want(ids)
        (rows @ weight).sum().backward()
        assert_close(gathered(model.weight.grad), want.weight.grad)

    world(2).run(run)


def test_values_written_through_data_between_forwards() -> None:
    plain, x = two_layers(), torch.randn(4, 4)

    def run() -> None:
        mesh = Mesh((2,))
        model, batch = copied(plain), distribute_tensor(x, mesh, [Shard(0)])
        fully_shard(model, mesh=mesh)
        model(batch)
        model[0].weight.data.mul_(0.5)
        want = copied(plain)
        want[0].weight.data.mul_(0.5)
        assert_close(full(model(batch)), want(x))

    world(2).run(run)


def test_parameters_that_are_added_or_replaced_are_refused() -> None:
    def run() -> None:
        mesh = Mesh((2,))
        model = as_units(two_layers(), mesh)
        model.append(nn.Linear(4, 4))
        with pytest.raises(PlanError, match=r"3\.weight was added after fully_shard"):
            model(torch.ones(2, 4))
        fully_shard(model[3], mesh=mesh)
        model(torch.ones(2, 4))
        model[0].scale = nn.Parameter(torch.ones(4))
        with pytest.raises(PlanError, match=r"0\.scale was added after fully_shard"):
            model(torch.ones(2, 4))

    world(2).run(run)


def test_hooks_of_plain_parameters_are_refused_and_attributes_stay() -> None:
    def run() -> None:
        model: Any = two_layers()
        model[0].weight.no_decay = True
        handle = model[0].weight.register_hook(lambda grad: grad * 0)
        with pytest.raises(PlanError, match=r"0\.weight: its hooks would not run"):
            fully_shard(model, mesh=Mesh((2,)))
        handle.remove()
        fully_shard(model, mesh=Mesh((2,)))
        assert model[0].weight.no_decay

    world(2).run(run)


def test_batch_norm_as_a_unit() -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), torch.randn(8, 4)

    def run() -> None:
        mesh = Mesh((2,))
        model, want = as_units(plain, mesh), copied(plain)
        model(distribute_tensor(x, mesh, [Shard(0)])).square().sum().backward()
        want(x).square().sum().backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            assert_close(gathered(p.grad), q.grad)

    world(2).run(run)


def test_a_gradient_penalty_beside_another_forward() -> None:
    plain = two_layers()
    x, y = torch.randn(4, 4), torch.randn(4, 4)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return cast(Tensor, gradient.square().sum() + model(y).square().sum())

    def run() -> None:
        mesh = Mesh((2,))
        model, want = as_units(plain, mesh), copied(plain)
        loss_of(model, *(distribute_tensor(t, mesh, [Shard(0)]) for t in (x, y))).backward()
        loss_of(want, x, y).backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            assert_close(gathered(p.grad), q.grad)

    world(2).run(run)


def test_a_sparse_gradient_is_refused() -> None:
    def run() -> None:
        mesh = Mesh((2,))
        model = nn.Embedding(6, 4, sparse=True)
        fully_shard(model, mesh=mesh)
        with pytest.raises(RuleError, match="weight of Embedding has a sparse gradient"):
            model(torch.tensor([1, 2])).sum().backward()

    world(2).run(run)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_fails_ends_all(where: str, prefetch: int) -> None:
    def fail(*args: object) -> None:
        if collectives.rank() == 1:
            raise ValueError("rank 1 fails")

    def run() -> None:
        mesh = Mesh((2,))
        model = as_units(two_layers(), mesh, prefetch=prefetch)
        batch = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        model(batch).sum().backward()
        if where == "forward":
            model[1].register_forward_pre_hook(fail)
        else:
            model[1].register_forward_hook(lambda m, args, out: out.register_hook(fail) and None)
        model(batch).sum().backward()

    with pytest.raises(ValueError, match="rank 1 fails"):
        world(2).run(run)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_is_recomputed_with_the_kind_of_batch_of_its_forward() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, checkpoint(lambda t: self.inner(t).tanh(), x, use_reentrant=True))

    torch.manual_seed(0)
    plain, x = Model(), torch.randn(4, 4)

    def run() -> None:
        mesh = Mesh((2,))
        model, want = copied(plain), copied(plain)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        own = x.chunk(2)[collectives.rank()].clone().requires_grad_()
        loss = model(own).square().mean()
        with torch.no_grad():
            model(distribute_tensor(x, mesh, [Shard(0)]))
        loss.backward()
        want(x.clone().requires_grad_()).square().mean().backward()
        assert_close(gathered(model.inner.weight.grad), want.inner.weight.grad)

    world(2).run(run)


def test_a_backward_inside_a_forward() -> None:
    class Energy(nn.Module):
        """Forces are the gradient of an energy."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            self.layers(x).sum().backward()
            assert x.grad is not None
            return cast(Tensor, self.layers(x) + x.grad.sum(1, keepdim=True))

    torch.manual_seed(0)
    plain, x = Energy(), torch.randn(4, 4)

    def run() -> None:
        mesh = Mesh((2,))
        model, want = copied(plain), copied(plain)
        for layer in (model.layers[0], model.layers[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(distribute_tensor(x, mesh, [Shard(0)])).square().sum().backward()
        want(x).square().sum().backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            assert_close(gathered(p.grad), q.grad)

    world(2).run(run)
