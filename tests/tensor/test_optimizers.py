"""A warm step of an elementwise optimizer asks no op for its way, and is right where it has to ask."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Replicate, Shard, distribute_tensor
from shardwise.tensor.dispatch import dispatcher
from shardwise.tensor.dispatch.hooks import hook_calls
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

R, S0, S1 = Replicate(), Shard(0), Shard(1)
VALUE = torch.arange(35.0).reshape(7, 5) / 10
GRAD = (torch.arange(35.0).reshape(7, 5) * 7 % 11 - 5) / 10
Make = Callable[[list[nn.Parameter]], optim.Optimizer]


def with_grad(mesh: Mesh, place: Any = S0, grad_place: Any = None) -> nn.Parameter:
    p = nn.Parameter(distribute_tensor(VALUE, mesh, [place]))
    p.grad = distribute_tensor(GRAD, mesh, [grad_place or place])
    return p


def plain_with_grad() -> nn.Parameter:
    p = nn.Parameter(VALUE.clone())
    p.grad = GRAD.clone()
    return p


def asked(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the list ops and in-place ops that asked for their way."""
    seen: list[str] = []
    enter = dispatcher.dispatch

    def noting(func: Any, args: Any, kwargs: Any) -> Any:
        seen.append(getattr(func, "__name__", ""))
        return enter(func, args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(dispatcher, "dispatch", noting)  # not a hook of a tool, for which every op is dispatched
        patch.setattr(DTensor, "_dispatch", staticmethod(noting))
        run()
    return [name for name in seen if name.endswith("_") and not name.startswith("__")]


WARM: dict[str, Make] = {
    "Adam in a loop": lambda ps: optim.Adam(ps, foreach=False),
    "Adam, foreach": lambda ps: optim.Adam(ps, foreach=True),
    "Adam, fused": lambda ps: optim.Adam(ps, fused=True),
    "Adagrad": lambda ps: optim.Adagrad(ps, foreach=True),
    "SGD without a state": lambda ps: optim.SGD(ps, lr=0.1),
    "SGD with momentum": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", WARM)
def test_a_warm_step_asks_nothing_and_equals_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @world(1)
    def body() -> None:
        mine, theirs = with_grad(Mesh((1,))), plain_with_grad()
        ours, reference = WARM[name]([mine]), WARM[name]([theirs])
        ours.step(), reference.step()
        assert asked(ours.step, monkeypatch) == []
        reference.step()
        assert_close(as_dtensor(mine.detach()).full_tensor(), theirs.detach(), rtol=0, atol=0)
        assert all(type(v) is DTensor for v in ours.state[mine].values() if isinstance(v, Tensor) and v.ndim)

    body()


def test_a_first_step_asks_because_it_makes_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    @world(1)
    def body() -> None:
        p = with_grad(Mesh((1,)))
        assert asked(optim.Adam([p], foreach=True).step, monkeypatch)

    body()


class Halving(optim.SGD):
    """An optimizer of somebody's, whose step need not be element by element."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.mean())


@world(3)
def test_an_optimizer_of_somebodys_is_not_taken_for_elementwise() -> None:
    p = with_grad(Mesh((3,)))
    optimizer = Halving([p], lr=0.1)
    for _ in range(2):
        optimizer.step()
    assert_close(as_dtensor(p.detach()).full_tensor(), VALUE - VALUE.mean(), rtol=1e-5, atol=1e-6)


@world(3)
def test_a_closure_sees_distributed_tensors() -> None:
    p = with_grad(Mesh((3,)))
    optimizer = optim.SGD([p], lr=0.1)
    sums = []

    def closure() -> float:
        total = p.sum()
        assert type(total) is DTensor
        sums.append(total.item())
        return float(sums[-1])

    for _ in range(2):
        p.grad = distribute_tensor(GRAD, Mesh((3,)), [S0])
        optimizer.step(closure)
    assert sums == pytest.approx([float(VALUE.sum()), float((VALUE - 0.1 * GRAD).sum())])


@world(3)
def test_hooks_around_a_step_see_distributed_tensors() -> None:
    p = with_grad(Mesh((3,)))
    optimizer = optim.Adam([p])
    shapes: list[tuple[int, ...]] = []
    optimizer.register_step_pre_hook(lambda *_: shapes.append(tuple((p * 2).shape)))
    optimizer.register_step_post_hook(lambda *_: shapes.append(tuple(p.sum(0).shape)))
    for _ in range(3):
        optimizer.step()
    assert shapes == [(7, 5), (5,)] * 3


@world(3)
def test_a_state_that_lies_elsewhere_is_brought_to_its_parameter() -> None:
    p, reference = with_grad(Mesh((3,))), plain_with_grad()
    ours, theirs = optim.Adam([p], lr=0.1), optim.Adam([reference], lr=0.1)
    for step in range(3):
        ours.step(), theirs.step()
        if step == 0:
            state = ours.state[p]
            state["exp_avg"] = state["exp_avg"].redistribute(placements=[S1])
    assert_close(as_dtensor(p.detach()).full_tensor(), reference.detach())


@world(3)
def test_a_momentum_that_begins_late_is_distributed() -> None:
    p = with_grad(Mesh((3,)))
    optimizer = optim.SGD([p], lr=0.1)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    for _ in range(2):
        optimizer.step()
    assert type(optimizer.state[p]["momentum_buffer"]) is DTensor


@world(2)
def test_plain_and_distributed_parameters_share_a_group() -> None:
    p, other = with_grad(Mesh((2,))), plain_with_grad()
    reference = plain_with_grad()
    ours, theirs = optim.Adam([other, p], foreach=True), optim.Adam([reference])
    for _ in range(3):
        ours.step(), theirs.step()
    assert_close(other, reference)
    assert_close(as_dtensor(p.detach()).full_tensor(), reference.detach())


@world(2)
def test_who_watches_sees_the_ops_of_a_step() -> None:
    p = with_grad(Mesh((2,)))
    optimizer = optim.Adam([p], foreach=True)
    optimizer.step()
    names: list[str] = []

    def watcher(proceed: Callable[[], Any], func: Any, args: Any, kwargs: Any) -> Any:
        names.append(getattr(func, "__name__", ""))
        return proceed()

    with hook_calls(watcher):
        optimizer.step()
    assert "_foreach_lerp_" in names


@world(2)
def test_a_step_after_an_error_of_the_optimizer_asks_as_before() -> None:
    p = with_grad(Mesh((2,)))
    optimizer = optim.Adam([p], foreach=True)
    optimizer.step()
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert tuple(p.sum(0).shape) == (5,)
    assert torch._C._is_torch_function_enabled()
