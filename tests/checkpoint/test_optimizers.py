"""Optimizers and schedulers are restored exactly, or refused with the difference; nothing is changed then."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import SGD, Adafactor, Adagrad, Adam, Optimizer, RMSprop
from torch.optim import lr_scheduler as lr
from torch.optim.lr_scheduler import LRScheduler

from shardwise import _collectives as collectives
from shardwise._layout import Mesh, OnRanks, Placement, Shard
from shardwise.checkpoint import read_manifest, restore, save, state_of
from shardwise.embedding import Adam as FusedAdam
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    RowWiseAdam,
    shard_embeddings,
)
from shardwise.embedding.fused import FusedOptimizer
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.embedding.sharded import ShardedEmbeddingBagCollection
from shardwise.errors import CheckpointError
from shardwise.testing import world
from tests.checkpoint.states import bits, failed, full
from tests.checkpoint.test_training import OPTIMIZERS

ROWS: dict[str, Placement] = {"t0": Shard(0), "t1": Shard(0, (5, 2))}


class Model(nn.Module):
    """Two tables, 9 and 7 rows, and a layer on every rank."""

    def __init__(
        self, optimizer: RowOptimizer | None = None, plan: dict[str, Placement] = ROWS, rows: Sequence[int] = (9, 7)
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        configs = [EmbeddingBagConfig(n, 6, f"t{i}", feature_names=[f"f{i}"]) for i, n in enumerate(rows)]
        mesh = Mesh((collectives.world_size(),))
        tables = shard_embeddings(EmbeddingBagCollection(configs), plan, mesh, optimizer)
        assert isinstance(tables, ShardedEmbeddingBagCollection)
        self.tables, self.layer = tables, nn.Linear(12, 1)

    def take_step(self, step: int) -> None:
        self.zero_grad()
        ids = torch.tensor([step % 9, 3, 8, step % 7, 6, 6])
        out = self.tables(KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.tensor([2, 1, 0, 3])))
        self.layer(out.values()).square().sum().backward()


Made = tuple[nn.Module, Optimizer]


def made(kind: str) -> Made:
    """A model of tables and its optimizer, on a rank."""
    if kind == "fused":  # of tables alone: the layer stays as it is
        model = Model(RowWiseAdagrad(lr=0.1))
        return model, fused_of(model)
    model = Model()
    return model, OPTIMIZERS[kind](model.parameters())


def fused_of(model: Model) -> FusedOptimizer:
    assert model.tables.fused_optimizer is not None
    return model.tables.fused_optimizer


def train(made: Made, steps: range) -> None:
    model, optimizer = made
    assert isinstance(model, Model)
    for step in steps:
        model.take_step(step)
        optimizer.step()


def values_of(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What this rank holds, to the bit."""
    return {name: bits(x) if isinstance(x, Tensor) else x for name, x in state_of(module, optimizer).items()}


@pytest.mark.parametrize(("before", "after"), [("adagrad", "adam"), ("adam, fused", "fused"), ("fused", "sgd")])
@world(2)
def test_another_optimizer_is_refused_and_nothing_changes(tmp_path: Path, before: str, after: str) -> None:
    first, second, other = made(before), made(after), made(after)
    train(first, range(5))
    save(tmp_path, state_of(*first), step=5)
    train(second, range(2))
    was = values_of(*second)
    with pytest.raises(CheckpointError, match="strict=False loads what fits"):
        restore(tmp_path, *second)
    assert values_of(*second) == was
    assert restore(tmp_path, *other, strict=False).dropped
    train(other, range(5, 8))


@world(2)
def test_tables_whose_optimizer_is_left_out_are_named() -> None:
    model = Model(RowWiseAdagrad(lr=0.1))
    of_layer = Adam(model.layer.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"^tables\.fused_optimizer is not among the optimizers"):
        state_of(model, of_layer)
    state_of(model, [of_layer, fused_of(model)])
    state_of(model)  # of a model alone


def plain() -> tuple[nn.Linear, Adam]:
    layer = nn.Linear(3, 2)
    optimizer = Adam(layer.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
    return layer, optimizer


def differences(folder: Path, module: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """The lines of the error, which are those that `strict=False` returns."""
    with pytest.raises(CheckpointError) as caught:
        restore(folder, module, *args, **kwargs)
    first, *lines, fix = str(caught.value).splitlines()
    assert first == f"Loading {folder} failed: the checkpoint does not fit the state:"
    assert fix.startswith("  Fix: make optimizers and schedulers as those that were saved")
    found = [line.strip() for line in lines]
    assert list(restore(folder, module, *args, **kwargs, strict=False).dropped) == found
    return found


def test_a_state_of_another_shape_is_refused_with_its_parameter(tmp_path: Path) -> None:
    layer, optimizer = plain()
    state = state_of(layer, optimizer)
    save(tmp_path, state | {"optimizer.weight.exp_avg": torch.zeros(7, 1)}, step=1)
    fresh = nn.Linear(3, 2)
    another = Adam(fresh.parameters())
    assert differences(tmp_path, fresh, another) == [
        "optimizer '0' (Adam): exp_avg of weight: (7, 1) in the checkpoint, (2, 3) here"
    ]
    assert [*another.state] == [fresh.bias]
    assert torch.equal(fresh.weight, layer.weight)


def test_the_differences_are_listed(tmp_path: Path) -> None:
    layer, _ = plain()
    adagrad = Adagrad(layer.parameters())
    save(tmp_path, state_of(layer, adagrad), step=1)
    assert differences(tmp_path, layer, Adam(layer.parameters())) == [
        "optimizer '0' (Adam): class: Adagrad in the checkpoint, Adam here",
        "optimizer '0' (Adam): sum of weight, bias: only in the checkpoint",
        "optimizer '0' (Adam): exp_avg, exp_avg_sq of weight, bias: missing in the checkpoint",
        "optimizer '0' (Adam): lr of hyper-parameters: 0.01 in the checkpoint, 0.001 here",
        "optimizer '0' (Adam): eps of hyper-parameters: 1e-10 in the checkpoint, 1e-08 here",
    ]
    save(tmp_path, state_of(layer, SGD(layer.parameters(), lr=0.1)), step=2)  # before the first step
    assert differences(tmp_path, layer, SGD(layer.parameters(), lr=0.1, momentum=0.9)) == [
        "optimizer '0' (SGD): momentum_buffer of weight, bias: missing in the checkpoint",
        "optimizer '0' (SGD): momentum of hyper-parameters: 0 in the checkpoint, 0.9 here",
    ]


def test_hyper_parameters_that_add_no_states_are_restored_and_names_stay_in_their_order(tmp_path: Path) -> None:
    layer, optimizer = plain()
    save(tmp_path, state_of(layer, optimizer), step=1)
    other = Adam(layer.parameters(), lr=3.0, betas=(0.1, 0.2), weight_decay=0.5, maximize=True)
    restore(tmp_path, layer, other)
    assert other.param_groups[0] | {"params": 0} == optimizer.param_groups[0] | {"params": 0}
    named = Adam([("bias", layer.bias), ("weight", layer.weight)], lr=2.0)
    restore(tmp_path, layer, named)
    assert named.param_groups[0]["param_names"] == ["bias", "weight"]
    assert named.param_groups[0]["lr"] == 0.1


def test_states_that_are_only_in_the_checkpoint_are_dropped_and_the_others_kept(tmp_path: Path) -> None:
    layer, _ = plain()
    amsgrad = Adam(layer.parameters(), lr=0.1, amsgrad=True)
    layer(torch.ones(4, 3)).square().sum().backward()
    amsgrad.step()
    save(tmp_path, state_of(layer, amsgrad), step=1)
    optimizer = Adam(layer.parameters(), lr=0.5)
    assert differences(tmp_path, layer, optimizer) == [
        "optimizer '0' (Adam): max_exp_avg_sq of weight, bias: only in the checkpoint",
        "optimizer '0' (Adam): lr of hyper-parameters: 0.1 in the checkpoint, 0.5 here",
        "optimizer '0' (Adam): amsgrad of hyper-parameters: True in the checkpoint, False here",
    ]
    assert torch.equal(optimizer.state[layer.weight]["exp_avg"], amsgrad.state[layer.weight]["exp_avg"])
    assert optimizer.state[layer.weight].keys() == {"step", "exp_avg", "exp_avg_sq"}


def two(rates: Sequence[float] = (0.1, 0.2)) -> tuple[nn.Sequential, dict[str, Optimizer]]:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    return module, {
        "first": SGD(module[0].parameters(), lr=rates[0], momentum=0.9),
        "second": Adam(module[1].parameters(), lr=rates[1]),
    }


def test_several_optimizers_have_names(tmp_path: Path) -> None:
    module, optimizers = two()
    module(torch.ones(4, 3)).sum().backward()
    for optimizer in optimizers.values():
        optimizer.step()
    path = save(tmp_path, state_of(module, optimizers), step=1)
    groups = read_manifest(path).values["optimizer.param_groups"]
    assert [(group["optimizer"], group["class"], group["params"]) for group in groups] == [
        ("first", "SGD", ["0.weight", "0.bias"]),
        ("second", "Adam", ["1.weight", "1.bias"]),
    ]
    other, others = two((3, 4))
    restore(tmp_path, other, dict(reversed(others.items())))
    assert [one.param_groups[0]["lr"] for one in others.values()] == [0.1, 0.2]
    states = (one["second"].state.values() for one in (others, optimizers))
    for restored, saved in zip(*states, strict=True):
        assert torch.equal(restored["exp_avg"], saved["exp_avg"])
    assert differences(tmp_path, other, {"first": others["first"]}) == [
        "optimizer 'second' (Adam) of 1.weight, 1.bias: only in the checkpoint"
    ]
    third, fresh = two()
    assert restore(tmp_path, third, {"first": fresh["first"]}, subset=True).dropped == ()
    assert not fresh["second"].state


def test_groups_are_found_by_their_parameters(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [{"params": [layer.weight], "lr": 0.1}, {"params": [layer.bias], "lr": 0.2}]
    save(tmp_path, state_of(layer, SGD(groups, lr=1.0)), step=1)
    optimizer = SGD([{"params": [p]} for p in (layer.bias, layer.weight)], lr=1.0)
    restore(tmp_path, layer, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]


def test_a_checkpoint_that_does_not_say_classes_is_compared_by_the_rest(tmp_path: Path) -> None:
    layer, optimizer = plain()
    state = state_of(layer, optimizer)
    for group in state["optimizer.param_groups"]:
        del group["class"], group["optimizer"]
    save(tmp_path, state, step=1)
    other = Adam(layer.parameters(), lr=0.7)
    restore(tmp_path, layer, other)
    assert other.param_groups[0]["lr"] == 0.1
    text = "\n".join(differences(tmp_path, layer, RMSprop(layer.parameters())))
    assert "betas, amsgrad, decoupled_weight_decay of hyper-parameters: only in the checkpoint" in text
    assert "square_avg of weight, bias: missing in the checkpoint" in text


def test_states_that_torch_named_are_found_and_others_are_not_lost_in_silence(tmp_path: Path) -> None:
    layer, optimizer = plain()
    parameters, states = get_state_dict(layer, optimizer)
    save(tmp_path, {"model": parameters, "optimizer": states}, step=1)
    other = nn.Linear(3, 2)
    fresh = Adam(other.parameters(), lr=9.0)
    restore(tmp_path, other, fresh)
    assert values_of(other, fresh) == values_of(layer, optimizer)
    state = state_of(layer, optimizer)
    for name in [name for name in state if name.startswith(("optimizer.weight.", "optimizer.bias."))]:
        state[name.replace("optimizer.", "optimizer.old.")] = state.pop(name)
    save(tmp_path, state, step=2)
    with pytest.raises(CheckpointError, match=r"'optimizer\.old\.weight\.exp_avg', which looks like a state of weight"):
        restore(tmp_path, other, fresh, subset=True)
    dropped = restore(tmp_path, other, fresh, strict=False, subset=True).dropped
    assert sum("looks like a state of" in line for line in dropped) == 6
    assert not fresh.state
    save(tmp_path, {"model": parameters, "opt": states}, step=3)
    text = (
        r"'optimizer.param_groups' \(there is one called 'opt': save it under 'optimizer'\): missing in the checkpoint"
    )
    with pytest.raises(CheckpointError, match=text):
        restore(tmp_path, layer, optimizer, subset=True)


class Counting(Optimizer):
    """An optimizer that is not torch's."""

    def __init__(self, params: Any, factor: float = 1.0) -> None:
        super().__init__(params, {"lr": 0.1, "factor": factor})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["updates"] = self.state[p].get("updates", 0) + 1


def test_an_optimizer_of_another_library_is_restored_or_refused_by_its_class(tmp_path: Path) -> None:
    layer, adam = plain()
    counting = Counting(layer.parameters())
    counting.step()
    save(tmp_path, state_of(layer, counting), step=1)
    another = Counting(layer.parameters(), factor=2.0)
    restore(tmp_path, layer, another)
    assert another.state[layer.weight] == {"updates": 1}
    assert another.param_groups[0]["factor"] == 1.0
    save(tmp_path, state_of(layer, adam), step=2)
    with pytest.raises(CheckpointError, match="class: Adam in the checkpoint, Counting here"):
        restore(tmp_path, layer, another)
    assert len(restore(tmp_path, layer, another, strict=False).dropped) == 1
    assert another.state[layer.weight] == {"updates": 1}
    assert another.param_groups[0]["lr"] == 0.1


def columns(size: int) -> dict[str, Placement]:
    """By columns on so many ranks, unevenly; by rows on two ranks if it is 0."""
    uneven = {0: (), 1: (6,), 2: (4, 2), 3: (1, 0, 5)}[size]
    return {"t0": Shard(1), "t1": Shard(1, uneven)} if size else {"t0": Shard(0)}


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(lr=0.1), RowWiseAdam(lr=0.1)], ids=["adagrad", "adam"])
def test_states_of_rows_become_the_mean_of_other_numbers_of_columns(tmp_path: Path, optimizer: RowOptimizer) -> None:
    state = optimizer.of_rows[0]

    def first(before: int) -> list[Tensor]:
        model = Model(optimizer, columns(before))
        for step in range(3):
            model.take_step(step)
        fused = fused_of(model)
        save(tmp_path / f"{before}", state_of(model, {"tables": fused}), step=3)
        return [of[state].full_tensor() for of in fused.state.values()]

    def second(before: int, after: int) -> tuple[list[Tensor], list[Tensor]]:
        model = Model(optimizer, columns(after))
        fused = fused_of(model)
        tensors = [of[state] for of in fused.state.values()]
        restore(tmp_path / f"{before}", model, {"tables": fused})
        assert all(one is of[state] for one, of in zip(tensors, fused.state.values(), strict=True))
        found = [tensor.full_tensor().clone() for tensor in tensors]
        for step in range(3, 5):
            model.take_step(step)
        return found, [tensor.full_tensor() for tensor in tensors]

    saved = {before: world(before or 2).run(first, before)[0] for before in (0, 2, 3)}
    for before, after in [(2, 3), (3, 2), (2, 1), (3, 0), (0, 2)]:
        for found, later in world(after or 2).run(second, before, after):
            for one, other, trained in zip(saved[before], found, later, strict=True):
                same = one.shape == other.shape
                assert torch.equal(other, one if same else one.mean(1, keepdim=True).expand(other.shape))
                assert not torch.equal(trained, other)


def test_tables_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def write() -> None:
        larger, other = Model(RowWiseAdagrad(lr=0.1), rows=(11, 7)), Model(RowWiseAdam(lr=0.1))
        save(tmp_path / "larger", state_of(larger, fused_of(larger)), step=1)
        save(tmp_path / "other", state_of(other, fused_of(other)), step=1)

    def dropped() -> int:
        model, fused = made("fused")
        train((model, fused), range(1))
        before = {name: x for name, x in values_of(model, fused).items() if name.startswith("optimizer.")}
        found = restore(tmp_path / "other", model, fused, strict=False).dropped
        assert before.items() <= values_of(model, fused).items()
        train((model, fused), range(1, 2))
        return len(found)

    world(2).run(write)
    text = failed(lambda: restore(tmp_path / "larger", *made("fused")))
    assert (
        "'model.tables.embedding_bags.t0.weight': shape (11, 6) in the checkpoint, (9, 6) in the state. "
        "Fix: restore(…, resize={'tables.embedding_bags.t0.weight': 9}), or "
        "collection.resize_({'t0': 11}) before restore" in text
    )
    assert "sum of tables.embedding_bags.t0.weight: (11, 1) in the checkpoint, (9, 1) here" in text
    text = failed(lambda: restore(tmp_path / "other", *made("fused")))
    assert "class: fused RowWiseAdam in the checkpoint, fused RowWiseAdagrad here" in text
    assert "exp_avg, exp_avg_sq of tables.embedding_bags.t0.weight, " in text
    assert "sum of tables.embedding_bags.t0.weight, tables.embedding_bags.t1.weight: missing in the checkpoint" in text
    assert world(2).run(dropped) == [4, 4]


PLANS: list[dict[str, Placement]] = [
    {"t0": Shard(0), "t1": Shard(0, (5, 0, 2))},
    {"t0": OnRanks(1), "t1": OnRanks(0)},
    {},
]


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(lr=0.1), FusedAdam(lr=0.1)], ids=["adagrad", "adam"])
@world(3)
def test_tables_and_layers_go_on_in_another_sharding(tmp_path: Path, optimizer: RowOptimizer) -> None:
    """With two optimizers in one checkpoint."""
    for number, plan in enumerate(PLANS):
        models = Model(optimizer, PLANS[number - 1]), Model(optimizer, plan)
        optimizers = [[Adam(model.layer.parameters(), lr=0.1), fused_of(model)] for model in models]
        for step in range(6):
            if step == 3:
                save(tmp_path / f"{number}", state_of(models[0], optimizers[0]), step=3)
                assert restore(tmp_path / f"{number}", models[1], optimizers[1]).step == 3
            for model, (adam, _) in [*zip(models, optimizers, strict=True)][: 1 if step < 3 else 2]:
                model.take_step(step)
                adam.step()
        one, two = (state_of(model, both) for model, both in zip(models, optimizers, strict=True))
        assert one.keys() == two.keys()
        for name, x in one.items():
            if isinstance(x, Tensor):
                torch.testing.assert_close(full(x), full(two[name]), msg=name)
            else:
                assert x == two[name]


MakeScheduler = Callable[[Optimizer], LRScheduler]

SCHEDULERS: dict[str, MakeScheduler] = {
    "step": lambda o: lr.StepLR(o, 3),
    "milestones": lambda o: lr.MultiStepLR(o, [2, 6, 6]),
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step)),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
    "one cycle": lambda o: lr.OneCycleLR(o, 0.5, total_steps=12),
    "cosine": lambda o: lr.CosineAnnealingLR(o, 7),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "exponential": lambda o: lr.ExponentialLR(o, 0.9),
    "cyclic": lambda o: lr.CyclicLR(o, 0.1, 0.2, step_size_up=3),
    "sequence": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.LinearLR(o), lr.StepLR(o, 2)], [3, 6]),
    "chain": lambda o: lr.ChainedScheduler([lr.StepLR(o, 2), lr.ConstantLR(o)]),
}


def scheduled(make: MakeScheduler) -> tuple[nn.Linear, Optimizer, LRScheduler]:
    layer = nn.Linear(2, 1)
    groups: list[dict[str, Any]] = [{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.7}]
    optimizer = SGD(groups, lr=0.3, momentum=0.9)
    return layer, optimizer, make(optimizer)


def rates(optimizer: Optimizer, scheduler: LRScheduler, steps: range) -> list[list[float]]:
    """What the learning rates and momenta are after each step."""
    found = []
    for step in steps:
        optimizer.step()
        if isinstance(scheduler, lr.ReduceLROnPlateau):
            scheduler.step(1.0 / min(step + 1, 3))
        else:
            scheduler.step()
        found.append([group[key] for group in optimizer.param_groups for key in ("lr", "momentum")])
    return found


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=list(SCHEDULERS))
@world(2)
def test_learning_rates_go_on_as_if_nothing_had_happened(tmp_path: Path, make: MakeScheduler) -> None:
    for stop in (0, 1, 5):
        first, second = scheduled(make), scheduled(make)
        rates(*first[1:], range(stop))
        save(tmp_path, state_of(*first), step=stop)
        rates(*second[1:], range(2))
        restore(tmp_path, *second)
        states = [scheduler.state_dict() for _, _, scheduler in (first, second)]
        assert states[0] == states[1]
        assert [type(value) for value in states[0].values()] == [type(value) for value in states[1].values()]
        assert [group["lr"] for group in second[1].param_groups] == [g["lr"] for g in first[1].param_groups]
        assert rates(*second[1:], range(stop, 11)) == rates(*first[1:], range(stop, 11))


def saved_schedule(folder: Path) -> tuple[nn.Linear, Optimizer, LRScheduler]:
    layer, optimizer, scheduler = scheduled(SCHEDULERS["milestones"])
    save(folder, state_of(layer, optimizer, {"rate": scheduler}), step=1)
    return layer, optimizer, scheduler


def refused_schedulers(
    folder: Path, module: nn.Module, optimizer: Optimizer, schedulers: dict[str, LRScheduler]
) -> list[str]:
    """The lines about schedulers; nothing has changed then."""

    def body() -> None:
        before = {name: scheduler.state_dict() for name, scheduler in schedulers.items()}
        try:
            restore(folder, module, optimizer, schedulers)
        finally:
            assert {name: scheduler.state_dict() for name, scheduler in schedulers.items()} == before

    lines = [line.strip() for line in failed(body).splitlines()[1:-1]]
    assert [*restore(folder, module, optimizer, schedulers, strict=False).dropped] == lines
    return lines


def test_other_schedulers_are_refused(tmp_path: Path) -> None:
    layer, optimizer, scheduler = saved_schedule(tmp_path)
    assert refused_schedulers(tmp_path, layer, optimizer, {"rate": lr.StepLR(optimizer, 2)}) == [
        "scheduler 'rate' (StepLR): class: MultiStepLR in the checkpoint, StepLR here"
    ]
    assert refused_schedulers(tmp_path, layer, optimizer, {"other": scheduler}) == [
        "scheduler 'other' (MultiStepLR): missing in the checkpoint",
        "scheduler 'rate' (MultiStepLR): only in the checkpoint",
    ]
    restore(tmp_path, layer, optimizer, {}, subset=True)
    with pytest.raises(CheckpointError, match=r"only in the checkpoint: 'optimizer\.schedulers'"):
        restore(tmp_path, layer, optimizer)
    one_group = SGD(layer.parameters(), lr=0.1, momentum=0.9)
    lines = refused_schedulers(tmp_path, layer, one_group, {"rate": lr.MultiStepLR(one_group, [1])})
    assert "scheduler 'rate' (MultiStepLR): length of base_lrs, _last_lr: 2 in the checkpoint, 1 here" in lines
    in_another_order = SGD([{"params": [p]} for p in (layer.bias, layer.weight)], lr=0.1, momentum=0.9)
    (line,) = refused_schedulers(tmp_path, layer, in_another_order, {"rate": lr.MultiStepLR(in_another_order, [1])})
    said = "groups of its optimizer: in the order [1, 0] in the checkpoint, in another here"
    assert line == f"scheduler 'rate' (MultiStepLR): {said}"


def test_what_a_scheduler_set_in_a_group_is_no_hyper_parameter_of_the_optimizer(tmp_path: Path) -> None:
    layer, optimizer, scheduler = scheduled(SCHEDULERS["one cycle"])
    rates(optimizer, scheduler, range(2))
    save(tmp_path, state_of(layer, optimizer), step=2)
    fresh = SGD([{"params": [p]} for p in layer.parameters()], lr=0.1, momentum=0.9)
    restore(tmp_path, layer, fresh)
    assert lr.LambdaLR(fresh, lambda step: 1.0, last_epoch=1).base_lrs == scheduler.base_lrs


def test_several_schedulers_of_several_optimizers(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizers: dict[str, Optimizer] = {
        "a": SGD(module[0].parameters(), lr=1.0),
        "b": Adam(module[1].parameters(), lr=2.0),
    }
    schedulers: dict[str, LRScheduler] = {
        "a": lr.StepLR(optimizers["a"], 1),
        "b": lr.ExponentialLR(optimizers["b"], 0.5),
    }
    for name, scheduler in schedulers.items():
        optimizers[name].step()
        scheduler.step()
    save(tmp_path, state_of(module, optimizers, schedulers), step=1)
    expected = {name: scheduler.get_last_lr() for name, scheduler in schedulers.items()}
    for name, scheduler in schedulers.items():
        optimizers[name].step()
        scheduler.step()
    restore(tmp_path, module, optimizers, dict(reversed(schedulers.items())))
    assert {name: scheduler.get_last_lr() for name, scheduler in schedulers.items()} == expected
    assert torch.equal(torch.tensor([o.param_groups[0]["lr"] for o in optimizers.values()]), torch.tensor([0.1, 1.0]))


def test_a_number_where_an_optimizer_has_a_pair_is_a_difference(tmp_path: Path) -> None:
    layer, adam = plain()
    save(tmp_path, state_of(layer, adam), step=1)
    found = differences(tmp_path, layer, Adafactor(layer.parameters()))  # its eps are two
    assert any("class: Adam in the checkpoint, Adafactor here" in line for line in found)
