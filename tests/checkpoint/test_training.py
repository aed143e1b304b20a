"""Training goes on where it stopped, on other ranks and layouts, as if it had run in one process."""

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.testing import assert_close

from shardwise import _collectives as collectives
from shardwise import shard_module
from shardwise._layout import Layout, Mesh, OnRanks, Placement, Replicate, Shard
from shardwise._tensor import DTensor, plain
from shardwise.checkpoint import load_safetensors, read_manifest, restore, save, state_of
from shardwise.errors import CheckpointError
from shardwise.testing import world
from shardwise.testing.local_shards import local_tensor
from tests.checkpoint.states import bits, dealt_out, distributed, failed, flip, full

Place = Callable[[Tensor], Tensor]
Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: Adagrad(p, lr=0.1, lr_decay=0.01),
    "adam": lambda p: Adam(p, lr=0.1),
    "adam, foreach": lambda p: Adam(p, lr=0.1, foreach=True, amsgrad=True),
    "adam, fused": lambda p: Adam(p, lr=0.1, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.1, foreach=False),
    "rmsprop": lambda p: RMSprop(p, lr=0.1, centered=True, momentum=0.5),
}
TABLE = (5, 3)


def layout_of_table(name: str, size: int) -> Layout:
    if name == "grid":
        return Layout(Mesh((2, 2) if size == 4 else (1, size)), [Shard(0), Shard(1)], TABLE)
    placements: dict[str, Placement] = {
        "rows": Shard(0),
        "columns": Shard(1),
        "uneven": Shard(0, sizes=(4, *[0] * (size - 2), 1) if size > 1 else (5,)),
        "boxes": dealt_out(TABLE, size),
        "copies": Replicate(),
        "the first rank": OnRanks(0),
    }
    return Layout(Mesh((size,)), [placements[name]], TABLE)


class Model(nn.Module):
    """A table under two names, a bias, a scalar, a parameter that nothing uses, and two buffers."""

    running: Tensor

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.table = nn.Parameter(place(torch.linspace(-1, 1, 15).view(5, 3)))
        self.bias = nn.Parameter(place(torch.linspace(1, 2, 3)))
        self.scale = nn.Parameter(place(torch.tensor(0.5)))
        self.unused = nn.Parameter(torch.ones(2))
        self.tied = nn.ModuleDict({"head": nn.Module()})
        self.tied["head"].weight = self.table
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def loss(self) -> Tensor:
        self.running += 1
        return (self.table * self.table).sum() + (self.bias**2).sum() + self.scale * self.scale


def spread(size: int, name: str) -> Place:
    """Lays out the table by name; other tensors are copies."""

    def place(full: Tensor) -> Tensor:
        shape = tuple(full.shape)
        return distributed(
            full, layout_of_table(name, size) if full.ndim == 2 else Layout(Mesh((size,)), [Replicate()], shape)
        )

    return place


def train(model: Model, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()


def held(x: Tensor) -> Tensor:
    """What this rank holds of `x`."""
    return plain(x).detach() if isinstance(x, DTensor) else x.detach()


def expected(full: Tensor, like: Tensor) -> Tensor:
    """What a rank holds of a plain tensor that is laid out as `like`."""
    return local_tensor(full.detach(), like._layout, collectives.rank()) if isinstance(like, DTensor) else full.detach()


def snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """The values of a state on this rank, to the bit."""
    return {name: bits(x) if isinstance(x, Tensor) else x for name, x in state.items()}


# Of ranks and layouts: each layout is saved, and loaded from another one.
PAIRS = [
    ((1, "rows"), (4, "columns")),
    ((4, "grid"), (2, "rows")),
    ((2, "columns"), (3, "uneven")),
    ((3, "uneven"), (2, "boxes")),
    ((4, "boxes"), (1, "copies")),
    ((2, "the first rank"), (4, "grid")),
    ((2, "copies"), (4, "the first rank")),
]


FEW = [
    pytest.param(make, PAIRS if name == "adam" else [PAIRS[number % len(PAIRS)]], id=name)
    for number, (name, make) in enumerate(OPTIMIZERS.items())
]
EVERY = [
    pytest.param(make, PAIRS, marks=pytest.mark.slow, id=f"{name}, every pair") for name, make in OPTIMIZERS.items()
]


@pytest.mark.parametrize(("make", "pairs"), [*FEW, *EVERY])
def test_interrupted_training_ends_like_uninterrupted_training(tmp_path: Path, make: Make, pairs: list[Any]) -> None:
    alone = Model(torch.clone)
    optimizer_alone = make(alone.parameters())
    train(alone, optimizer_alone, 13)
    wanted = state_of(alone, optimizer_alone)

    def first(folder: Path, size: int, layout: str) -> None:
        model = Model(spread(size, layout))
        optimizer = make(model.parameters())
        train(model, optimizer, 3)
        save(folder, state_of(model, optimizer) | {"epoch": 3}, step=3)

    def second(folder: Path, size: int, layout: str) -> None:
        model = Model(spread(size, layout))
        optimizer = make(model.parameters())
        for group in optimizer.param_groups:
            group["lr"] = 99.0
        extra = {"epoch": 0}
        restored = restore(folder, model, optimizer, extra=extra)
        assert (restored.step, restored.dropped) == (3, ())
        assert extra == {"epoch": 3}
        train(model, optimizer, 10)
        found = state_of(model, optimizer)
        assert found.keys() == wanted.keys()
        # The fused kernel rounds differently in the rest of a shard that does not fill a vector register.
        rounding = 1e-6 if optimizer.defaults.get("fused") else 0.0
        for name, x in wanted.items():
            if isinstance(x, Tensor):
                torch.testing.assert_close(held(found[name]), expected(x, found[name]), rtol=rounding, atol=0)
            else:
                assert found[name] == x

    for number, (before, after) in enumerate(pairs):
        world(before[0]).run(first, tmp_path / f"{number}", *before)
        world(after[0]).run(second, tmp_path / f"{number}", *after)


def test_the_names_are_those_of_the_module_and_shared_tensors_are_there_once() -> None:
    model = Model(torch.clone)
    head = model.tied["head"].get_parameter("weight")
    groups: list[dict[str, Any]] = [{"params": [model.bias, model.scale], "lr": 0.5}, {"params": [head]}]
    optimizer = Adam(groups)
    train(model, optimizer, 1)
    state = state_of(model, optimizer)
    assert sorted(state) == [
        *("model.bias", "model.running", "model.scale", "model.table", "model.unused"),
        *("optimizer.bias.exp_avg", "optimizer.bias.exp_avg_sq", "optimizer.bias.step"),
        "optimizer.param_groups",
        *("optimizer.scale.exp_avg", "optimizer.scale.exp_avg_sq", "optimizer.scale.step"),
        *("optimizer.table.exp_avg", "optimizer.table.exp_avg_sq", "optimizer.table.step"),
    ]
    assert [group["params"] for group in state["optimizer.param_groups"]] == [["bias", "scale"], ["table"]]
    assert [group["lr"] for group in state["optimizer.param_groups"]] == [0.5, 0.001]
    assert not {"foreach", "fused", "capturable", "differentiable"} & state["optimizer.param_groups"][0].keys()


def saved_by_adam(folder: Path, steps: int = 2) -> None:
    model = Model(torch.clone)
    optimizer = Adam(model.parameters(), lr=0.1, betas=(0.5, 0.75))
    train(model, optimizer, steps)
    save(folder, state_of(model, optimizer), step=steps)


def test_a_used_optimizer_is_brought_back_in_place(tmp_path: Path) -> None:
    saved_by_adam(tmp_path)
    model = Model(torch.clone)
    optimizer = Adam(model.parameters(), lr=0.3)
    train(model, optimizer, 5)
    average = optimizer.state[model.table]["exp_avg"]
    restore(tmp_path, model, optimizer)
    assert optimizer.state[model.table]["exp_avg"] is average
    assert optimizer.state[model.table]["step"].item() == 2
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)


def test_states_that_did_not_exist_yet_are_taken_away_and_a_rate_in_a_tensor_stays_one(tmp_path: Path) -> None:
    rate, model = torch.tensor(0.5), Model(torch.clone)
    save(tmp_path, state_of(model, Adam(model.parameters(), lr=torch.tensor(0.25), capturable=False)), step=0)
    optimizer = Adam(model.parameters(), lr=rate)
    train(model, optimizer, 5)
    restore(tmp_path, model, optimizer)
    assert not optimizer.state
    assert torch.equal(model.table, Model(torch.clone).table)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_a_restore_that_fails_leaves_module_and_optimizer_as_they_were(tmp_path: Path) -> None:
    saved_by_adam(tmp_path)
    flip(tmp_path / "step-00000002" / "rank-0000.safetensors")

    def body() -> None:
        model = Model(spread(2, "rows"))
        optimizer = Adam(model.parameters(), lr=0.3)
        train(model, optimizer, 1)
        before = snapshot(state_of(model, optimizer))
        identities = {id(x) for state in optimizer.state.values() for x in state.values()}
        try:
            restore(tmp_path, model, optimizer)
        finally:
            assert snapshot(state_of(model, optimizer)) == before
            assert {id(x) for state in optimizer.state.values() for x in state.values()} == identities

    assert "is damaged: its crc32 is" in failed(body)


class Extra(nn.Linear):
    """Has a state of its own, of any kind and length."""

    extra: Any = torch.zeros(2)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Doubled(nn.Linear):
    """Saves and loads under another name; its bias, as an alias."""

    extra = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}doubled"] = self.weight.detach() * 2
        destination[f"{prefix}bias"] = self.bias.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state_dict[f"{prefix}doubled"] / 2)
            self.bias.copy_(state_dict[f"{prefix}bias"])


class Derived(nn.Linear):
    """Completes itself when it was loaded."""

    extra: Any = None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_load_state_dict_post_hook(lambda module, _: module.derive())  # type: ignore[no-untyped-call]
        self.derive()

    def derive(self) -> None:
        self.extra = float(full(self.weight).sum())


OF_ITS_OWN: dict[str, tuple[type[nn.Linear], Any]] = {
    "a tensor of another length": (Extra, torch.arange(5)),
    "a number": (Extra, 7.5),
    "a text": (Extra, "a"),
    "a list": (Extra, [1, None]),
    "nothing": (Extra, {}),
    "a nested mapping": (Extra, {"a": {"b": torch.ones(3), "c": True}, "d": 1}),
    "other names": (Doubled, None),
    "a hook": (Derived, None),
}


@pytest.mark.parametrize("way", ["restore", "load_safetensors"])
@pytest.mark.parametrize("name", OF_ITS_OWN)
def test_a_module_loads_by_its_own_load_state_dict(name: str, way: str, tmp_path: Path) -> None:
    kind, extra = OF_ITS_OWN[name]
    if way == "load_safetensors" and not isinstance(extra, Tensor | None):
        return
    torch.manual_seed(0)
    source, before, expected = kind(3, 5), kind(3, 5), kind(3, 5)
    source.load_state_dict(source.state_dict())
    if kind is Extra:
        vars(source)["extra"], vars(before)["extra"] = extra, {}
    expected.load_state_dict(source.state_dict())
    if way == "load_safetensors":
        save_file(source.state_dict(), tmp_path / "model.safetensors")
    else:
        save(tmp_path, state_of(source), step=1)

    def body() -> None:
        module = shard_module(deepcopy(before), {"weight": Shard(0, sizes=(0, 4, 1))})
        load_safetensors(tmp_path, module) if way == "load_safetensors" else restore(tmp_path, module)
        assert_close(full(module.weight), expected.weight.detach(), rtol=0, atol=0)
        assert_close(full(module.bias), expected.bias.detach(), rtol=0, atol=0)
        if isinstance(extra, Tensor | dict):
            assert_close(module.extra, expected.extra)
        elif kind is not Doubled:
            assert module.extra == pytest.approx(expected.extra) if kind is Derived else module.extra == expected.extra

    world(3).run(body)


def test_an_extra_state_that_would_be_another_one_is_refused(tmp_path: Path) -> None:
    module = Extra(2, 2)
    module.extra = {"a": {"b.c": 1}}
    with pytest.raises(CheckpointError, match=r"_extra_state.a: the key 'b.c' of an extra state has a dot. Fix: "):
        state_of(module)


def test_what_a_module_saves_and_does_not_load_is_an_error(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(lambda module, state, *_: state.update(other=torch.ones(1)))
    save(tmp_path, state_of(module), step=1)
    assert "in load_state_dict of the module, failed: 'other' is in state_dict()" in failed(
        lambda: restore(tmp_path, module), size=1
    )


def test_the_module_alone_can_be_saved_and_restored(tmp_path: Path) -> None:
    saved_by_adam(tmp_path)
    model = Model(torch.clone)
    said = r"only in the checkpoint: 'optimizer\.bias\.exp_avg'(?s:.*)Fix: pass these too; or subset=True, which passes"
    with pytest.raises(CheckpointError, match=said):
        restore(tmp_path, model)
    restore(tmp_path, model, subset=True)
    assert model.running.tolist() == [2, 2, 2]
    alone = save(tmp_path, state_of(model), step=9)
    with pytest.raises(CheckpointError, match=r"'optimizer\.param_groups': missing in the checkpoint"):
        restore(alone, model, Adam(model.parameters()))
    save(tmp_path, model.state_dict(), step=10)
    said = r"Fix: .* load\(folder, module.state_dict\(\)\), or import it with prefix"
    with pytest.raises(CheckpointError, match=said):
        restore(tmp_path, model)


def test_groups_and_parameters_that_are_refused(tmp_path: Path) -> None:
    saved_by_adam(tmp_path)
    model, layer = Model(torch.clone), nn.Linear(2, 2)
    restore(tmp_path, model, Adam(reversed([*model.parameters()])))
    groups = (
        "group 0: parameters table: in groups of table, bias, scale and 1 more in the checkpoint, in one group here"
    )
    with pytest.raises(CheckpointError, match=groups):
        restore(tmp_path, model, Adam([{"params": [p]} for p in model.parameters()]))
    with pytest.raises(CheckpointError, match=r"extra cannot hold 'model\.bias'"):
        restore(tmp_path, model, extra={"model.bias": torch.zeros(3)}, subset=True)
    with pytest.raises(CheckpointError, match=r"parameter bias is in two optimizers\. Fix"):
        state_of(layer, [SGD(layer.parameters(), lr=0.1), SGD([layer.bias], lr=0.1)])
    with pytest.raises(
        CheckpointError, match="parameter 0 of group 0 of optimizer '0' is not a parameter of the module"
    ):
        state_of(model, Adam(Model(torch.clone).parameters()))
    adam = Adam(model.parameters())
    adam.state[torch.ones(1)] = {"shared": 1}
    with pytest.raises(CheckpointError, match="the optimizer keeps state of a Tensor that is not a parameter"):
        state_of(model, adam)
    adam.state = defaultdict(dict, {model.table: {"al": [torch.ones(1)]}})  # as LBFGS
    with pytest.raises(CheckpointError, match="Adam keeps a list of tensors, 'al' of table"):
        state_of(model, adam)


def test_a_module_that_does_not_fit_is_told_what_helps_it_and_not_what_helps_optimizers(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    save(tmp_path, state_of(layer, Adam(layer.parameters())) | {"config": {"lr": 0.1, "seed": 3}}, step=1)
    larger = nn.Linear(3, 4)
    text = failed(lambda: restore(tmp_path, larger, SGD(larger.parameters()), extra={"config": None}), size=1)
    assert "  missing in the checkpoint: 'config', which has 'config.lr' and 1 more below it. Fix: name each" in text
    assert (
        "'model.bias': shape (2,) in the checkpoint, (4,) in the state. Fix: restore(…, resize={'bias': Rows(4, "
        in text
    )
    assert "strict=False" not in text
    extra: dict[str, Any] = {"config": {"lr": None, "seed": None}}
    restore(tmp_path, layer, Adam(layer.parameters()), extra=extra)
    assert extra == {"config": {"lr": 0.1, "seed": 3}}


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DataParallel": nn.DataParallel,
    "compile": lambda module: torch.compile(module, backend="eager"),
    "both": lambda module: nn.DataParallel(cast("nn.Module", torch.compile(module, backend="eager"))),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("wrapped_before", [False, True], ids=["unwrapped before", "wrapped before"])
def test_wrappers_do_not_change_names(tmp_path: Path, wrap: Callable[[nn.Module], Any], wrapped_before: bool) -> None:
    def made(is_wrapped: bool) -> tuple[nn.Module, Optimizer]:
        module = nn.Sequential(nn.Linear(2, 3))
        optimizer = Adam(module.parameters())
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return wrap(module) if is_wrapped else module, optimizer

    module, optimizer = made(wrapped_before)
    save(tmp_path, state_of(module, optimizer), step=1)
    assert "model.0.weight" in read_manifest(tmp_path / "step-00000001").tensors
    other, its_optimizer = made(not wrapped_before)
    restore(tmp_path, other, its_optimizer)
    for mine, its in zip(module.parameters(), other.parameters(), strict=True):
        assert bits(mine) == bits(its)
        assert bits(optimizer.state[mine]["exp_avg"]) == bits(its_optimizer.state[its]["exp_avg"])


class RowWise(Optimizer):
    """Keeps one number a row of its table, cut as the rows are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    rows = self.state[p].setdefault("rows", torch.zeros_like(p[:, 0]))
                    rows += p.grad.square().mean(1)


def test_state_of_one_number_a_row_is_sharded_like_the_rows(tmp_path: Path) -> None:
    def first(layout: str) -> None:
        model = Model(spread(2, layout))
        optimizer = RowWise([model.table])
        train(model, optimizer, 1)
        save(tmp_path / layout, state_of(model, optimizer), step=1)

    def second(layout: str) -> None:
        model = Model(spread(3, layout))
        optimizer = RowWise([model.table])
        restore(tmp_path / layout, model, optimizer)
        rows = optimizer.state[model.table]["rows"]
        assert isinstance(model.table, DTensor)
        assert isinstance(rows, DTensor)
        assert rows.placements == model.table.placements
        means = (2 * torch.linspace(-1, 1, 15).view(5, 3)).square().mean(1)
        torch.testing.assert_close(held(rows), expected(means, rows))
        train(model, optimizer, 1)

    for layout in ("rows", "copies", "the first rank"):
        world(2).run(first, layout)
        world(3).run(second, layout)
