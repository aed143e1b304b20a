"""What users do with units: hooks, copies, failures, changes of parameters."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, Mesh, Shard, distribute_tensor
from shardwise import _collectives as collectives
from shardwise.errors import MismatchError, PlanError, RuleError, ThreadError
from shardwise.parallel import fully_shard
from shardwise.parallel.fully_sharded.units import TRANSITIONS, State, unit_of
from shardwise.testing import world
from tests.parallel.one_process import full
from tests.parallel.units import as_units, assert_same_gradients, check_gradients, copied, squares, two_layers


@world(2)
def test_ranks_that_call_other_units_or_copies_are_an_error() -> None:
    mesh = Mesh((2,))
    if collectives.rank() == 1:
        copied(as_units(two_layers(), Mesh((1,), (1,))))  # ranks may make units and copies of their own
    model = as_units(two_layers(), mesh)
    for units in ((model[0], model[2]), (model, copied(model))):
        with pytest.raises(MismatchError, match="for the same purpose"):
            units[collectives.rank()](torch.ones(2, 4)).sum().backward()


def test_a_copy_that_one_rank_made_is_not_taken_for_another_one() -> None:
    x = torch.ones(2, 4)

    def run() -> Tensor:
        model = as_units(two_layers(), Mesh((2,)))
        snapshots = [copied(model) for _ in range(2 - collectives.rank())]  # one more on rank 0
        teacher = copied(model)
        with torch.no_grad():
            for p in teacher.parameters():
                p.mul_(3)
        own = (snapshots[0], teacher)[collectives.rank()]
        with pytest.raises(MismatchError, match=r"copy 1 made at units\.py:\d+ in copied"):
            own(x)
        return cast(Tensor, teacher(x))

    want = two_layers()
    with torch.no_grad():
        for p in want.parameters():
            p.mul_(3)
    for out in world(2).run(run):
        assert_close(out, want(x))


def test_a_state_that_cannot_follow_is_refused() -> None:
    unit = fully_shard(nn.Linear(4, 4))

    def begin_backward(module: nn.Module, args: object) -> None:
        full = cast(Any, unit_of(module)).shown
        full.become(State.BACKWARD)

    unit.register_forward_pre_hook(begin_backward)
    text = r"^Parameters of Linear \(unit \d+\) are in forward: expected gathered next, got in backward\. Fix: run"
    with pytest.raises(ThreadError, match=text):
        unit(torch.ones(2, 4))
    assert {before for before, _ in TRANSITIONS} == {after for _, after in TRANSITIONS} == set(State)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@world(2)
def test_a_forward_that_fails_leaves_nothing_behind(error: type[BaseException]) -> None:
    plain, x = two_layers(), torch.randn(4, 4)

    def fail(module: nn.Module, args: object) -> None:
        raise error

    mesh = Mesh((2,))
    model, batch = as_units(plain, mesh), distribute_tensor(x, mesh, [Shard(0)])
    for prepend in (False, True):
        handle = model[2].register_forward_pre_hook(fail, prepend=prepend)
        with pytest.raises(error):
            model(batch)
        handle.remove()
        assert all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in model.parameters())
    for each in (model, plain):
        each[0].weight.data.mul_(0.5)
    assert_close(full(model(batch)), plain(x))


@world(2)
def test_a_backward_that_fails_leaves_the_stored_parameters() -> None:
    plain, x = two_layers(), torch.randn(4, 4)

    def fail(grad: Tensor) -> None:
        raise MemoryError

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
    assert_same_gradients(model, want)


@pytest.mark.parametrize("prefetch", [0, 1])
@world(2)
def test_what_follows_a_backward_that_failed_in_a_unit(prefetch: int) -> None:
    plain, x, mesh = two_layers(), torch.randn(4, 4), Mesh((2,))
    model, want = as_units(plain, mesh, prefetch=prefetch), copied(plain)
    of_all = distribute_tensor(x, mesh, [Shard(0)])

    def fail(grad: Tensor) -> None:
        raise MemoryError

    for then, batch in ((model, of_all), (model, x), (lambda x: (model[2].unshard(), model(x))[1], of_all)):
        out = model(of_all)
        out.register_hook(fail)
        with pytest.raises(MemoryError):
            out.sum().backward()
        squares(then, batch).backward()
        squares(want, x).backward()
    assert_same_gradients(model, want)


@pytest.mark.parametrize("reshard", [True, 2])
@world(4)
def test_an_output_that_is_a_parameter_keeps_its_memory(reshard: bool | int) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 4))

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            return self.weight[ids], self.weight.t()

    plain, shown = Table(), list[Tensor]()

    def loss(model: Any, ids: Tensor) -> Tensor:
        rows, weight = model(ids)
        shown.append(weight)
        total: Tensor = (rows @ weight).sum()
        return total

    check_gradients(plain, torch.tensor([1, 4, 0, 1]), loss, reshard_after_forward=reshard)
    assert_close(full(shown[0].detach()), plain.weight.detach().t())


@world(2)
def test_parameters_that_are_added_or_replaced_are_refused() -> None:
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


def _exchange_parameters(model: Any) -> None:
    model[0].weight, model[2].weight = model[2].weight, model[0].weight


def _tie(model: Any) -> None:
    model[2].weight = model[0].weight


def _leave_out_bias(model: Any) -> None:
    model[2].bias = None


def _exchange_modules(model: Any) -> None:
    model[0], model[2] = model[2], model[0]


def _copy_module(model: Any) -> None:
    model[2] = copied(model[2])


def _freeze(model: Any) -> None:
    model[2].weight.requires_grad_(False)


def _convert(model: Any) -> None:
    model.bfloat16()
    model.double()


@pytest.mark.parametrize("kinds", [(), nn.Linear])
@pytest.mark.parametrize(
    "change", [_exchange_parameters, _tie, _leave_out_bias, _exchange_modules, _copy_module, _freeze, _convert]
)
@world(2)
def test_a_step_uses_the_parameters_that_modules_have_then(change: Callable[[Any], None], kinds: Any) -> None:
    plain, x = two_layers(), torch.randn(4, 4)
    model, bias = as_units(plain, Mesh((2,)), kinds), None
    for each in (plain, model):
        for step in range(3):
            each.zero_grad()
            if step == 1:
                bias = each[2].bias
                change(each)
            elif change is _leave_out_bias and step == 2:
                each[2].bias = bias
            own = x if each is plain else x.chunk(2)[collectives.rank()]
            loss = squares(each, own.to(each[0].weight.dtype))
            (loss * len(x) / len(own)).backward()  # whose gradients are averaged
    assert_same_gradients(model, plain)


class Quantized(nn.Linear):
    """A layer that reads an attribute of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.weight.scale, self.bias)  # type: ignore[attr-defined]


@pytest.mark.parametrize("as_dtensors", [True, False])
@world(2)
def test_forward_sees_what_users_set_on_parameters(as_dtensors: bool) -> None:
    plain, x, mesh = nn.Sequential(Quantized(4, 3), nn.Linear(3, 2)), torch.ones(2, 4), Mesh((2,))
    plain[0].weight.scale = 0.5  # type: ignore[union-attr]
    model: Any = as_units(nn.Sequential(Quantized(4, 3), nn.Linear(3, 2)), mesh, ())
    model.load_state_dict(plain.state_dict())
    model[0].weight.scale = 0.5
    got = model(distribute_tensor(x, mesh, [Shard(0)]) if as_dtensors else x)
    assert_close(full(got), plain(x))


@world(2)
def test_a_parameter_of_one_element_has_the_gradient_of_one_process() -> None:
    """The fix for one without dims. One rank has no shard of it."""

    class Gated(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.gate = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gate

    check_gradients(nn.Sequential(Gated(), nn.Linear(3, 2)), torch.randn(4, 4))


@pytest.mark.parametrize("change", ["weight_norm", "prune", "del"])
@world(2)
def test_a_parameter_that_is_taken_away_is_refused_by_name(change: str) -> None:
    model: Any = as_units(two_layers(), Mesh((2,)))
    if change == "weight_norm":
        nn.utils.parametrizations.weight_norm(model[0])
    elif change == "prune":
        prune.identity(model[0], "weight")
    else:
        del model[0].weight
    with pytest.raises(PlanError, match=r"^weight of .*Linear was taken away after fully_shard"):
        model(torch.ones(2, 4))


@world(2)
def test_forward_gathers_parameters_also_if_it_is_called_around_the_hooks() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, *, twice: int = 2) -> Tensor:
            return self.last.forward(self.first.forward(x) * twice)

    plain, x, mesh = Direct(), torch.randn(3, 4), Mesh((2,))
    model, want = as_units(plain, mesh), copied(plain)
    for recompute in (False, True):
        part = x[: 2 + collectives.rank()]
        out = (
            checkpoint(model.forward, part, twice=3, use_reentrant=False) if recompute else model.forward(part, twice=3)
        )
        out.sum().backward()
        parts = [want(x[: 2 + r], twice=3).sum() for r in range(2)]
        (sum(parts, torch.zeros(())) / 2).backward()
    assert_same_gradients(model, want)
    assert str(inspect.signature(model.forward)) == str(inspect.signature(plain.forward))


@world(2)
def test_modules_of_a_list_are_units_and_tied_parameters_stay_tied() -> None:
    plain, x, mesh = two_layers(), torch.randn(4, 4), Mesh((2,))
    plain[2].weight = plain[0].weight
    model, want = copied(plain), copied(plain)
    listed = [model[0], model[0], model[1], model[2]]
    assert fully_shard(listed, mesh=mesh) is listed
    fully_shard([model, nn.Sequential(*model)], mesh=mesh)
    for each, batch in ((model, distribute_tensor(x, mesh, [Shard(0)])), (want, x)):
        squares(each, batch).backward()
    assert_same_gradients(model, want)
    assert model[0].weight is model[2].weight


@world(2)
def test_batch_norm_as_a_unit() -> None:
    check_gradients(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), torch.randn(8, 4))


@world(2)
def test_a_gradient_penalty_beside_another_forward() -> None:
    def penalty(model: Any, both: Tensor) -> Tensor:
        x, y = both[:, 0].clone().requires_grad_(), both[:, 1]
        (gradient,) = torch.autograd.grad(squares(model, x), x, create_graph=True)
        return gradient.square().sum() + squares(model, y)

    check_gradients(two_layers(), torch.randn(4, 2, 4), penalty)


@world(2)
def test_a_transformed_forward_of_a_plain_batch_is_refused() -> None:
    model = as_units(two_layers(), Mesh((2,)))
    for transformed in (torch.func.grad(lambda x: model(x).sum()), torch.no_grad()(torch.vmap(model))):
        with pytest.raises(RuleError, match=r"the forward of 0, a unit of fully_shard: torch\.func would transform"):
            transformed(torch.ones(2, 4))


@world(2)
def test_a_sparse_gradient_is_refused() -> None:
    mesh = Mesh((2,))
    model = nn.Embedding(6, 4, sparse=True)
    fully_shard(model, mesh=mesh)
    with pytest.raises(RuleError, match="weight of Embedding has a sparse gradient"):
        model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@world(2)
def test_a_reentrant_checkpoint_is_recomputed_with_the_kind_of_batch_of_its_forward() -> None:
    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, checkpoint(lambda t: self[0](t).tanh(), x, use_reentrant=True))

    want, x, mesh = Model(nn.Linear(4, 4)), torch.randn(4, 4), Mesh((2,))
    model = fully_shard(copied(want), mesh=mesh, reshard_after_forward=True)
    own = x.chunk(2)[collectives.rank()].clone().requires_grad_()
    loss = model(own).square().mean()
    with torch.no_grad():
        model(distribute_tensor(x, mesh, [Shard(0)]))
    loss.backward()
    want(x.clone().requires_grad_()).square().mean().backward()
    assert_same_gradients(model, want)


@world(2)
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

    check_gradients(Energy(), torch.randn(4, 4))


@pytest.mark.parametrize("reshard", [True, False])
@world(3)
def test_a_step_through_parameters_that_functional_call_puts_there(reshard: bool) -> None:
    plain = two_layers()
    x, y = torch.randn(5, 4), torch.randn(5, 4)

    def train(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """MAML: one inner step, then a gradient of the parameters through it, and a step."""
        own = dict(model.named_parameters())
        loss = torch.func.functional_call(model, own, (x,)).square().mean()
        inner = torch.autograd.grad(loss, list(own.values()), create_graph=True)
        moved = {name: p - 0.5 * g for (name, p), g in zip(own.items(), inner, strict=True)}
        outer = model(x).square().mean() + torch.func.functional_call(model, moved, (y,)).square().mean()
        outer.backward()
        assert all(p is own[name] for name, p in model.named_parameters())
        gradients = [full(p.grad).clone() for p in model.parameters()]
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return full(outer), gradients + [full(p).clone() for p in model.parameters()]

    want = copied(plain)
    expected = [train(want, x, y) for _ in range(2)]
    mesh = Mesh((3,))
    model = as_units(plain, mesh, reshard_after_forward=reshard)
    for loss, values in expected:
        found, got = train(model, *(distribute_tensor(t, mesh, [Shard(0)]) for t in (x, y)))
        assert_close([found, *got], [loss, *values])
