"""Ordinary optimizers on sharded parameters take the steps that they take in one process."""

import copy
import gc
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.testing import assert_close

import shardwise as sw
from shardwise import DTensor, Mesh, OnRanks, Placement, Shard, distribute_module, distribute_tensor, shard_module
from shardwise._tensor.dispatch import dispatcher
from shardwise._tensor.dispatch.hooks import hook_calls
from shardwise._torch_bridge import optimizers
from shardwise.errors import OptimizerError, RuleError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, local_parameters, parallelize_module
from shardwise.parallel.fully_sharded import fully_shard
from shardwise.sharded_tensor import ChunkShardingSpec, ShardingPlan
from shardwise.sharded_tensor import shard_module as shard_by_plan
from shardwise.simulation import simulate
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

R, S0, S1 = sw.Replicate(), Shard(0), Shard(1)
GENERATOR = torch.Generator().manual_seed(0)
Make = Callable[..., torch.optim.Optimizer]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


FIRST, BIAS, SECOND, X, Y = normal(5, 3), normal(5), normal(1, 5), normal(7, 3), normal(7, 1)
VALUES = (FIRST, BIAS, SECOND)
LAYOUTS: dict[str, tuple[Placement, Placement, Placement]] = {
    "copies": (R, R, R),
    "rows": (S0, S0, S0),  # the second weight has one row: two ranks hold nothing of it
    "columns then rows": (S0, S0, S1),
    "uneven": (Shard(0, [1, 4, 0]), Shard(0, [1, 4, 0]), Shard(1, [1, 4, 0])),
    "on ranks": (OnRanks(0), OnRanks(1), OnRanks(2)),
    "mixed": (S1, R, OnRanks(1)),
}
OPTIMIZERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.05}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "maximize": (torch.optim.Adam, {"lr": 0.05, "maximize": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.05, "centered": True, "momentum": 0.9}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.05}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.05, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.05}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.05}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05, "t0": 1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05, "weight_decay": 0.1}),  # its factors have other shapes
}
FUSED = ("SGD", "momentum", "Adagrad", "Adam", "amsgrad", "AdamW", "maximize")  # what torch has fused
WAYS: dict[str, dict[str, bool]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def loss_of(weights: list[Any], x: Tensor, y: Tensor) -> Tensor:
    first, bias, second = weights
    return F.mse_loss(F.linear(torch.relu(F.linear(x, first, bias)), second), y)


def train(weights: list[Any], make: Make, settings: dict[str, Any], x: Tensor, y: Tensor, *, steps: int = 3) -> Any:
    optimizer = make(weights, **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(weights, x, y).backward()
        optimizer.step()
    return optimizer


def sharded(layout: str, mesh: Mesh) -> list[nn.Parameter]:
    return [
        nn.Parameter(distribute_tensor(value, mesh, [place]))
        for value, place in zip(VALUES, LAYOUTS[layout], strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in OPTIMIZERS for way in WAYS if way != "fused" or name in FUSED]
)
@world(3)
def test_steps_equal_one_process_for_every_layout(name: str, way: str) -> None:
    make, settings = OPTIMIZERS[name]
    settings = settings | WAYS[way]
    expected = [nn.Parameter(value.clone()) for value in VALUES]
    train(expected, make, settings, X, Y)
    mesh = Mesh((3,))
    for layout, data in product(LAYOUTS, (R, S0)):
        weights = sharded(layout, mesh)
        inputs = [distribute_tensor(t, mesh, [data]) for t in (X, Y)]
        optimizer = train(weights, make, settings, *inputs)
        for weight, want, place in zip(weights, expected, LAYOUTS[layout], strict=True):
            assert as_dtensor(weight).placements == (place,)
            assert_close(as_dtensor(weight.detach()).full_tensor(), want.detach())
            shard = as_dtensor(weight).to_local()
            assert as_dtensor(weight.grad).to_local().shape == shard.shape
            if name != "Adafactor":
                assert_state_fits(optimizer.state[weight], shard)


def assert_state_fits(state: dict[str, Any], shard: Tensor) -> None:
    """No state is larger than the shard it belongs to; numbers (step counts) aside."""
    for key, value in state.items():
        if isinstance(value, DTensor):
            local = value.to_local()
            assert local.shape == shard.shape, key
            assert local.untyped_storage().nbytes() <= max(shard.numel(), 1) * 8, key
        elif isinstance(value, Tensor):
            assert value.ndim == 0, key


@pytest.mark.slow
@world(4)
def test_steps_on_a_grid_equal_one_process() -> None:
    mesh = Mesh((2, 2))
    expected = [nn.Parameter(value.clone()) for value in VALUES]
    train(expected, torch.optim.AdamW, {"lr": 0.05}, X, Y)
    for places in ([R, S0], [S0, S1], [S1, S0], [R, R]):
        weights = [
            nn.Parameter(distribute_tensor(FIRST, mesh, places)),
            nn.Parameter(distribute_tensor(BIAS, mesh, [R, S0])),
            nn.Parameter(distribute_tensor(SECOND, mesh, [R, S1])),
        ]
        train(weights, torch.optim.AdamW, {"lr": 0.05}, *(distribute_tensor(t, mesh, [S0, R]) for t in (X, Y)))
        for weight, want in zip(weights, expected, strict=True):
            assert_close(as_dtensor(weight.detach()).full_tensor(), want.detach())


TABLE = normal(7, 5)
IDS = [torch.tensor([[0, 3], [3, 6], [1, 1]]), torch.tensor([[2, 2], [0, 0], [5, 5]]), torch.tensor([[0, 3]] * 3)]
TABLES: list[Placement] = [R, S0, S1, OnRanks(2), Shard(0, [0, 2, 5])]


def train_table(table: nn.Parameter, ids: list[Any], name: str) -> list[float]:
    optimizer = getattr(torch.optim, name)([table], lr=0.1)
    losses = []
    for batch in ids:
        optimizer.zero_grad()
        loss = F.embedding_bag(batch, table, mode="sum", sparse=True).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's optimizers build sparse tensors themselves
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "SparseAdam"])
@world(3)
def test_sparse_steps_equal_one_process_for_every_layout(name: str) -> None:
    plain = nn.Parameter(TABLE.clone())
    expected = train_table(plain, IDS, name)
    mesh = Mesh((3,))
    for place, data in product(TABLES, (R, S0)):
        table = nn.Parameter(distribute_tensor(TABLE, mesh, [place]))
        losses = train_table(table, [distribute_tensor(batch, mesh, [data]) for batch in IDS], name)
        assert losses == pytest.approx(expected)
        assert_close(as_dtensor(table.detach()).full_tensor(), plain.detach())


@pytest.mark.parametrize("way", WAYS)
@world(3)
def test_a_loaded_optimizer_goes_on_as_if_it_had_never_stopped(way: str) -> None:
    mesh, settings = Mesh((3,)), {"lr": 0.05, **WAYS[way]}
    for layout in LAYOUTS:
        straight = sharded(layout, mesh)
        x, y = (distribute_tensor(t, mesh, [S0]) for t in (X, Y))
        train(straight, torch.optim.AdamW, settings, x, y, steps=4)
        weights = sharded(layout, mesh)
        saved = copy.deepcopy(train(weights, torch.optim.AdamW, settings, x, y, steps=2).state_dict())
        resumed = torch.optim.AdamW(weights, **settings)  # type: ignore[arg-type]
        resumed.load_state_dict(saved)
        for _ in range(2):
            resumed.zero_grad()
            loss_of(weights, x, y).backward()
            resumed.step()
        for got, want in zip(weights, straight, strict=True):
            assert_close(as_dtensor(got.detach()).to_local(), as_dtensor(want.detach()).to_local())


@pytest.mark.processes
@world(2, real=True)
def test_real_processes_take_the_steps_of_one() -> None:
    expected = [nn.Parameter(value.clone()) for value in VALUES]
    train(expected, torch.optim.AdamW, {"lr": 0.05, "fused": True}, X, Y)
    mesh = Mesh((2,))
    places: list[Placement] = [Shard(0, [5, 0]), R, S0]
    weights = [nn.Parameter(distribute_tensor(v, mesh, [p])) for v, p in zip(VALUES, places, strict=True)]
    inputs = [distribute_tensor(t, mesh, [S0]) for t in (X, Y)]
    train(weights, torch.optim.AdamW, {"lr": 0.05, "fused": True}, *inputs)
    for weight, want in zip(weights, expected, strict=True):
        assert_close(as_dtensor(weight.detach()).full_tensor(), want.detach())
    assert sw.world_size() == 2


# ---- a warm step asks no op for its recipe, and is right where it has to ask ------------------------------------
VALUE = torch.arange(35.0).reshape(7, 5) / 10
GRAD = (torch.arange(35.0).reshape(7, 5) * 7 % 11 - 5) / 10


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
        assert asked(ours.step, monkeypatch) or not name.startswith("Adam"), "the first step makes the state"
        assert asked(ours.step, monkeypatch) == []
        reference.step(), reference.step()
        assert_close(as_dtensor(mine.detach()).full_tensor(), theirs.detach(), rtol=0, atol=0)
        assert all(type(v) is DTensor for v in ours.state[mine].values() if isinstance(v, Tensor) and v.ndim)

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
def test_closures_and_hooks_around_a_step_see_distributed_tensors() -> None:
    p, seen = with_grad(Mesh((3,))), list[float]()
    optimizer = optim.SGD([p], lr=0.1)

    def closure() -> float:
        total = p.sum()
        assert type(total) is DTensor
        seen.append(total.item())
        return float(seen[-1])

    for _ in range(2):
        p.grad = distribute_tensor(GRAD, Mesh((3,)), [S0])
        optimizer.step(closure)
    assert seen == pytest.approx([float(VALUE.sum()), float((VALUE - 0.1 * GRAD).sum())])
    hooked, shapes = optim.Adam([p]), list[tuple[int, ...]]()
    hooked.register_step_pre_hook(lambda *_: shapes.append(tuple((p * 2).shape)))
    hooked.register_step_post_hook(lambda *_: shapes.append(tuple(p.sum(0).shape)))
    for _ in range(3):
        hooked.step()
    assert shapes == [(7, 5), (5,)] * 3


@world(3)
def test_states_in_another_layout_or_that_begin_late_are_those_of_their_parameter() -> None:
    p, reference = with_grad(Mesh((3,))), plain_with_grad()
    ours, theirs = optim.Adam([p], lr=0.1), optim.Adam([reference], lr=0.1)
    for step in range(3):
        ours.step(), theirs.step()
        if step == 0:
            ours.state[p]["exp_avg"] = ours.state[p]["exp_avg"].redistribute(placements=[S1])
    assert_close(as_dtensor(p.detach()).full_tensor(), reference.detach())
    late = optim.SGD([p], lr=0.1)
    late.step()
    late.param_groups[0]["momentum"] = 0.9
    late.step(), late.step()
    assert type(late.state[p]["momentum_buffer"]) is DTensor


@world(2)
def test_plain_parameters_share_a_group_hooks_of_tools_see_a_step_and_errors_leave_nothing_behind() -> None:
    p, other, reference = with_grad(Mesh((2,))), plain_with_grad(), plain_with_grad()
    ours, theirs = optim.Adam([other, p], foreach=True), optim.Adam([reference])
    for _ in range(3):
        ours.step(), theirs.step()
    assert_close(other, reference)
    assert_close(as_dtensor(p.detach()).full_tensor(), reference.detach())
    p, names = with_grad(Mesh((2,))), list[str]()
    optimizer = optim.Adam([p], foreach=True)
    optimizer.step()

    def watcher(proceed: Callable[[], Any], func: Any, args: Any, kwargs: Any) -> Any:
        names.append(getattr(func, "__name__", ""))
        return proceed()

    with hook_calls(watcher):
        optimizer.step()
    assert "_foreach_lerp_" in names
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert tuple(p.sum(0).shape) == (5,)
    assert torch._C._is_torch_function_enabled()


# ---- made before the module was sharded -------------------------------------------------------------------------

ONES = torch.ones(2, 4)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def by_function(module: nn.Module) -> nn.Module:
    def partition(name: str, child: nn.Module, mesh: Any) -> None:
        if name == "0":
            child.register_parameter(
                "weight", nn.Parameter(distribute_tensor(child.get_parameter("weight"), mesh, [S0]))
            )

    return distribute_module(module, Mesh((2,)), partition)


@pytest.mark.parametrize("name", ["SGD", "amsgrad", "Adagrad", "NAdam"])
@world(2)
def test_steps_stay_right_while_gradients_options_groups_and_states_change(name: str) -> None:
    mesh, (make, settings) = Mesh((2,)), OPTIMIZERS[name]
    for way in ("foreach", "fused") if name in FUSED else ("foreach",):
        generator = torch.Generator().manual_seed(0)
        plain, ours = (
            [nn.Parameter(convert(value.clone())) for value in VALUES]
            for convert in (torch.clone, lambda x: distribute_tensor(x, mesh, [S0]))
        )
        pairs = [(ps, make(ps[:2], **settings, **{way: True})) for ps in (plain, ours)]
        for step in range(9):
            grads = [torch.randn(value.shape, dtype=value.dtype, generator=generator) for value in VALUES]
            for ps, optimizer in pairs:
                for p, grad in zip(ps, grads, strict=True):
                    p.grad = distribute_tensor(grad, mesh, [S0]) if ps is ours else grad.clone()
                if step == 3:
                    ps[0].grad = None
                optimizer.param_groups[0].update({"momentum": 0.9 * (step in (2, 3, 6))} if name == "SGD" else {})
                if step == 5:
                    optimizer.add_param_group({"params": ps[2:]})
                    optimizer.param_groups[0].update(lr=0.02, **{way: False})
                if step == 7:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                optimizer.step()
            for found, expected in zip(ours, plain, strict=True):
                assert_close(as_dtensor(found.detach()).full_tensor(), expected.detach())


MATRICES: dict[str, tuple[tuple[int, int], Placement]] = {
    "rows": ((8, 5), S0),
    "columns": ((5, 8), S1),
    "the longer dim": ((5, 12), S1),
    "uneven": ((7, 6), S0),
    "some empty": ((6, 3), S1),
    "given sizes": ((6, 7), Shard(0, [1, 0, 4, 1])),
    "one rank": ((3, 4), OnRanks(2)),
    "copies": ((4, 5), R),
}


def test_a_step_holds_unreduced_gradients_no_longer_than_their_bucket() -> None:
    def build(mesh: Mesh) -> Callable[[], None]:
        model = shard_module(nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4))), {}, mesh=mesh)
        optimizer, x = optim.AdamW(model.parameters()), distribute_tensor(torch.ones(2, 2048), mesh, [S0])

        def step() -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        return step

    (found,) = simulate(build, mesh=Mesh((2,))).classes
    assert found.memory["gradients"] < 1.6 * found.memory["parameters"]  # a bucket has two of the four


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@world(4)
def test_muon_gathers_each_matrix_once_a_step_and_equals_one_process(dtype: torch.dtype) -> None:
    """In bfloat16 without Nesterov's momentum torch also divides the momentum itself by its norm.

    There an element of a shard may have another last bit: kernels compute whole vectors in another precision.
    """
    mesh, generator = Mesh((4,)), torch.Generator().manual_seed(0)
    for (shape, placement), nesterov in product(MATRICES.values(), (True, False)):
        value, *grads = torch.randn(3, *shape, generator=generator).to(dtype)
        plain, matrix = nn.Parameter(value.clone()), nn.Parameter(distribute_tensor(value, mesh, [placement]))
        ours, one = (optim.Muon([p], lr=0.1, nesterov=nesterov) for p in (matrix, plain))
        with sw.count_comms() as gathered:
            as_dtensor(matrix.detach()).full_tensor()
        for grad in grads:
            plain.grad, matrix.grad = grad.clone(), distribute_tensor(grad, mesh, [placement])
            one.step()
            with sw.count_comms() as counts:
                ours.step()
            assert counts.total_bytes <= gathered.total_bytes
        assert as_dtensor(matrix).placements == (placement,)
        momenta = ours.state[matrix]["momentum_buffer"], one.state[plain]["momentum_buffer"]
        pairs: list[tuple[Tensor, Tensor]] = [(matrix, plain), momenta]
        tolerance = 0.0 if dtype == torch.float32 else 0.02
        for found, expected in pairs:
            full = as_dtensor(found.detach()).full_tensor()
            assert_close(full, expected.detach(), rtol=tolerance, atol=tolerance)


SHARDED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "shard_module": lambda module: shard_module(module, {"0.weight": S0}),
    "parallelize_module": lambda module: parallelize_module(
        module, None, {"0": ColwiseParallel(), "1": RowwiseParallel()}
    ),
    "fully_shard": fully_shard,
    "distribute_module": by_function,
    "sharded_tensor.shard_module": lambda module: shard_by_plan(
        module,
        ShardingPlan(
            {name: ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]) for name, _ in module.named_parameters()}
        ),
    ),
}


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        module(ONES).sum().backward()
        optimizer.step()


def refusal(step: Callable[[], object]) -> str:
    with pytest.raises(OptimizerError) as caught:
        step()
    return str(caught.value)


@pytest.mark.parametrize("made", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize("sharded", SHARDED)
@world(2)
def test_every_step_names_parameters_that_were_replaced(sharded: str, made: Any) -> None:
    module = layers()
    early = made(module.parameters(), lr=0.1)
    SHARDED[sharded](module)
    (text,) = {refusal(lambda: trained(module, early)) for _ in range(2)}
    assert text.startswith(f"{made.__name__}.step() would not change 4 of its 4 parameters in their module: ")
    assert text.endswith("Fix: make the optimizer after the module is sharded.")
    assert all(name in text for name in ("weight", "bias"))


@world(1)
def test_parameters_that_are_sharded_again_or_made_local_are_named() -> None:
    module = shard_module(layers(), {"**": S0})
    early = torch.optim.SGD(module.parameters(), lr=0.1)
    shard_module(module, {"1.weight": Shard(1)})
    text = "would not change {} of its 4 parameters in their module: "
    assert text.format(1) + "1.weight." in refusal(lambda: trained(module, early))
    late = torch.optim.SGD(module.parameters(), lr=0.1)
    local_parameters(module)
    assert text.format(4) + "0.weight, 0.bias, 1.weight, 1.bias." in refusal(lambda: trained(module, late))


@world(2)
def test_nothing_of_a_refused_step_is_done_whose_gradients_are_from_before() -> None:
    module = layers()
    early = torch.optim.SGD(module.parameters(), lr=0.1)
    before = [p.detach().clone() for p in module.parameters()]
    module(ONES).sum().backward()
    shard_module(module[0], {"weight": S0})
    refusal(early.step)
    refusal(lambda: trained(module, early))
    for p, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(p.full_tensor() if isinstance(p, DTensor) else p, old)


@world(2)
def test_a_closure_computes_the_gradients_first() -> None:
    shared, other = layers(), layers()
    other[0].weight = shared[0].weight
    of_other = torch.optim.LBFGS(other.parameters(), lr=0.1)
    early = torch.optim.LBFGS(shared[1].parameters(), lr=0.1)
    shard_module(shared, {"**": S0})

    def closure(module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad()
        loss = module(ONES).square().sum()
        loss.backward()
        return loss

    before = other[0].get_parameter("weight").detach().clone()
    of_other.step(partial(closure, other, of_other))
    assert not torch.equal(other[0].get_parameter("weight"), before)
    refusal(lambda: early.step(partial(closure, shared, early)))
    refusal(lambda: early.step(closure=partial(closure, shared, early)))


@world(2)
def test_what_still_trains_is_not_refused() -> None:
    """An optimizer made afterwards, copies, a parameter that another module still trains, old modules, frozen ones."""

    def sgd(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1)

    plain = layers()
    of_plain = sgd(plain)
    module = shard_module(copy.deepcopy(plain), {"0.weight": S0})
    trained(module, sgd(module))
    trained(plain, of_plain)
    shared, other = layers(), layers()
    other[0].weight = shared[0].weight
    of_other = sgd(other)
    shard_module(shared, {"0.weight": S0})
    trained(other, of_other)
    shard_module(module, {})  # nothing is replaced
    trained(module, sgd(module))
    adapted = layers()
    adapted[0].requires_grad_(False)
    of_adapted = sgd(adapted)
    shard_module(adapted[0], {"weight": S0})
    trained(adapted, of_adapted)


def test_nothing_is_remembered_of_parameters_that_nothing_holds() -> None:
    shard_module(layers(), {"0.weight": S0})
    gc.collect()
    before = len(optimizers._replaced)
    module = layers()
    held = module[0].weight
    shard_module(module, {"0.weight": S0})
    assert isinstance(module[0].weight, DTensor)
    assert len(optimizers._replaced) == before + 1
    del held
    assert len(optimizers._replaced) == before


# ---- row-sparse gradients outside of an optimizer ---------------------------------------------------------------

NUMBERS = torch.arange(28.0).view(7, 4).sub(13)


def gradient(table: Tensor, ids: Tensor = IDS[0]) -> Any:
    leaf = nn.Parameter(table)
    F.embedding_bag(ids, leaf, mode="sum", sparse=True).square().sum().backward()
    return leaf.grad


@world(2)
def test_the_dense_form_of_a_sparse_gradient_is_that_of_one_process() -> None:
    expected = gradient(NUMBERS).to_dense()
    for placement in (R, S0, S1, Shard(1, (0, 4)), Shard(0, (7, 0)), OnRanks(1)):
        for ids in (IDS[0], distribute_tensor(IDS[0], placements=[S0])):
            found = gradient(distribute_tensor(NUMBERS, placements=[placement]), ids)
            assert not found.to_dense().is_sparse
            assert torch.equal(found.to_dense().full_tensor(), expected), placement
            assert torch.equal(found.coalesce().to_dense().norm(), expected.norm())


@world(4)
def test_a_rank_without_columns_takes_part_in_the_sum_of_sparse_gradients() -> None:
    mesh = Mesh((2, 2))
    table = distribute_tensor(NUMBERS, mesh, [Shard(1, (4, 0)), R])
    found = gradient(table, distribute_tensor(IDS[0], mesh, [R, S0]))
    assert torch.equal(found.to_dense().full_tensor(), gradient(NUMBERS).to_dense())


@world(2)
def test_what_would_show_only_local_rows_is_refused_on_all_ranks() -> None:
    refused: list[Callable[[Any], object]] = [
        lambda grad: grad.coalesce().values().norm(),
        lambda grad: grad.coalesce().indices(),
        lambda grad: grad.coalesce()._indices(),
        lambda grad: grad._values().norm(),
        lambda grad: grad.full_tensor(),
        lambda grad: grad.redistribute(placements=[R]),
    ]
    for use in refused:
        grad = gradient(distribute_tensor(NUMBERS, placements=[S0]))
        assert grad.size() == NUMBERS.shape
        with pytest.raises(RuleError, match=r"sparse DTensor .* Fix: to_dense\(\)"):
            use(grad)
