"""When a recording is not used: what it took for granted has changed, or a replay could not repeat the step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import CaptureError
from shardwise.parallel import ColwiseParallel, parallelize_module
from shardwise.testing import world


def full(x: Any) -> Tensor:
    found: Tensor = x.full_tensor()
    return found.clone()


def test_numbers_in_a_closure_are_guarded() -> None:
    factor = 1.0

    def function(x: Tensor) -> Tensor:
        return x * factor

    step, x = sw.capture(function), torch.randn(3)
    for _ in range(2):
        assert torch.equal(step(x), x)
    factor = 4.0
    assert torch.equal(step(x), x * factor)


@world(2)
def test_every_kind_of_call_has_its_own_graph() -> None:
    mesh = sw.Mesh((2,))
    x, y = torch.randn(4, 6), torch.randn(6, 4)
    kinds: list[Any] = [
        sw.distribute_tensor(x, mesh, [sw.Shard(0)]), sw.distribute_tensor(x, mesh, [sw.Shard(0, [1, 3])]),
        sw.distribute_tensor(x, mesh, [sw.Replicate()]),
        sw.distribute_tensor(x.double(), mesh, [sw.Shard(0)]), x, y.t(), x[:2],
        sw.distribute_tensor(x, mesh, [sw.Shard(0)]).requires_grad_(),
    ]  # fmt: skip
    step = sw.capture(lambda a: (a.reshape(-1) * 2).sum(0))
    for _ in range(2):
        for a in kinds:
            out = step(a)
            assert type(out) is type(a)
            assert torch.allclose(out.full_tensor() if isinstance(out, sw.DTensor) else out, step.function(a))
            if a.requires_grad:
                out.backward()
    assert len(step.graphs()) == len(kinds)


def test_aliased_arguments_are_another_kind_of_call_and_too_many_kinds_an_error() -> None:
    step, a, b = sw.capture(lambda x, y: x * 2 + y), torch.randn(3), torch.randn(3)
    assert torch.equal(step(a, a), 3 * a)
    assert torch.equal(step(a, b), a * 2 + b)
    assert torch.equal(step(b, b), 3 * b)
    step = sw.capture(lambda x, n: x * n, limit=3)
    for n in (1.0, 2.0, 3.0, 1.0):
        step(torch.ones(2), n)
    with pytest.raises(CaptureError, match=r"(?s)3 kinds of calls already.*pass numbers that change as tensors"):
        step(torch.ones(2), 4.0)


@world(2)
def test_debugging_tools_see_the_step_itself() -> None:
    mesh = sw.Mesh((2,))
    weight = sw.distribute_tensor(torch.randn(4, 4), mesh, [sw.Shard(0)])
    step = sw.capture(lambda x: (weight @ x).sum())
    x = sw.distribute_tensor(torch.randn(4, 4), mesh, [sw.Shard(0)])
    step(x)
    with sw.count_comms() as comms:
        step(x)
    assert comms.implicit
    with pytest.raises(sw.ShardwiseError, match="no_implicit_comm"), sw.no_implicit_comm():
        step(x)


# ---- what cannot be replayed ------------------------------------------------------------------------------------

OUTSIDE = torch.randn(3, requires_grad=True) * 2


def _seeds(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    torch.manual_seed(7)
    return x + torch.rand(3)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "backward": (lambda x: (x * torch.ones(3, requires_grad=True)).sum().backward(), r"backward\(\) runs inside"),
    "a tensor from outside": (lambda x: x * OUTSIDE, "computed outside of it and requires grad"),
    "a seed": (_seeds, "_seeds calls manual_seed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_replay_could_not_repeat_is_refused_while_tracing(name: str) -> None:
    function, said = REFUSED[name]
    with pytest.raises(CaptureError, match=said):
        sw.capture(function)(torch.randn(3))


def test_constants_may_be_read() -> None:
    def function(x: Tensor) -> Tensor:
        table = torch.tensor([3, 1, 2])
        table.add_(1)
        return x * int(table.max()) + table

    step = sw.capture(function)
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(step(x), function(x))


@world(2)
def test_facts_that_ranks_exchange_are_refused_on_all_of_them() -> None:
    mesh = sw.Mesh((2,))
    step = sw.capture(lambda x: sw.DTensor.from_local(x, mesh, [sw.Shard(0)]).sum())
    with pytest.raises(CaptureError, match="what shapes from_local was given"):
        step(torch.randn(2 + sw.rank()))


def test_plain_batches_of_unknown_shard_sizes_are_refused_and_given_sizes_work() -> None:
    def check(style: ColwiseParallel, length: int) -> Tensor:
        torch.manual_seed(0)
        layer = parallelize_module(nn.Linear(3, 4), sw.Mesh((2,)), style)
        step, x = sw.capture(lambda x: layer(x).sum()), torch.randn(length, 3)
        step(x).backward()
        return step(x) - step.function(x)  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match="asking other ranks for the shapes of the input of the module"):
        world(2).run(check, ColwiseParallel(input_layouts=sw.Shard(0)), 2)
    assert world(2).run(check, ColwiseParallel(input_layouts=sw.Shard(0, [2, 2])), 2) == [torch.tensor(0.0)] * 2


def test_gradient_hooks_arguments_and_second_derivatives_that_are_refused() -> None:
    weight = nn.Parameter(torch.randn(3))
    weight.register_hook(lambda g: g * 2)
    with pytest.raises(CaptureError, match="gradient hooks, which would run twice"):
        sw.capture(lambda x: x * weight)(torch.randn(3))
    with pytest.raises(CaptureError, match="an argument is a object"):
        sw.capture(lambda x, y: x)(torch.randn(3), object())
    step = sw.capture(lambda x: (x**3).sum())
    for _ in range(2):
        x = torch.randn(3, requires_grad=True)
        with pytest.raises(CaptureError, match="no derivative of its own"):
            torch.autograd.grad(step(x), x, create_graph=True)
        step(x).backward()


# ---- compilers ---------------------------------------------------------------------------------------------------


# inductor gives paths to the C++ compiler unquoted: in an environment whose path has a space it compiles nothing.
COMPILER = "aot_eager" if " " in torch.__file__ else "inductor"
BACKENDS = [(2, "aot_eager"), pytest.param(1, COMPILER, marks=[pytest.mark.processes, pytest.mark.slow])]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
@pytest.mark.parametrize(("ranks", "backend"), BACKENDS)
def test_ops_between_collectives_may_be_compiled(ranks: int, backend: str) -> None:
    def check() -> None:
        torch.manual_seed(0)
        mesh = sw.Mesh((ranks,))
        layers = [nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)] if ranks > 1 else [nn.Linear(4, 4, bias=False)]
        plan = {"0.*": sw.Shard(0), "2.weight": sw.Shard(1)} if ranks > 1 else {}
        model = sw.shard_module(nn.Sequential(*layers), plan, mesh=mesh)
        step = sw.capture(lambda x: model(x).square().mean(), backend=backend)
        for _ in range(3):
            x = sw.distribute_tensor(torch.randn(5, 4), mesh, [sw.Replicate()])
            grads = []
            for function in (step.function, step):
                function(x).backward()
                grads.append([full(p.grad) for p in model.parameters()])
                model.zero_grad()
            torch.testing.assert_close(*grads)
        assert len(step.graphs()) == 1

    world(ranks).run(check)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
def test_a_compiler_gets_the_ops_of_forward_and_backward_and_no_collective() -> None:
    seen: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(" ".join(str(node.target) for node in module.graph.nodes if node.op == "call_function"))
        return module.forward

    def check() -> None:
        model = sw.shard_module(
            nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), {"0.*": sw.Shard(0), "1.weight": sw.Shard(1)}
        )
        step = sw.capture(lambda x: model(x).relu().sum(), backend=backend)
        for _ in range(2):
            step(sw.distribute_tensor(torch.ones(5, 4), placements=[sw.Replicate()])).backward()

    world(2).run(check)
    assert any("aten.addmm" in stretch for stretch in seen)
    assert any("aten.threshold_backward" in stretch for stretch in seen)
    assert not any(word in stretch for stretch in seen for word in ("all_to_all", "all_reduce"))
