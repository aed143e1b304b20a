"""Schedulers of learning rates go on where they stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as lr
from torch.optim.lr_scheduler import LRScheduler

from shardwise.checkpoint import restore, save, state_of
from shardwise.errors import CheckpointError
from shardwise.testing import world
from tests.checkpoint.states import failed

Make = Callable[[Optimizer], LRScheduler]

SCHEDULERS: dict[str, Make] = {
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


def made(make: Make) -> tuple[nn.Linear, Optimizer, LRScheduler]:
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
def test_learning_rates_go_on_as_if_nothing_had_happened(tmp_path: Path, make: Make) -> None:
    def body() -> None:
        for stop in (0, 1, 5):
            first, second = made(make), made(make)
            rates(*first[1:], range(stop))
            save(tmp_path, state_of(*first), step=stop)
            rates(*second[1:], range(2))
            restore(tmp_path, *second)
            states = [scheduler.state_dict() for _, _, scheduler in (first, second)]
            assert states[0] == states[1]
            assert [type(value) for value in states[0].values()] == [type(value) for value in states[1].values()]
            assert [group["lr"] for group in second[1].param_groups] == [g["lr"] for g in first[1].param_groups]
            assert rates(*second[1:], range(stop, 11)) == rates(*first[1:], range(stop, 11))

    world(2).run(body)


def saved(folder: Path) -> tuple[nn.Linear, Optimizer, LRScheduler]:
    layer, optimizer, scheduler = made(SCHEDULERS["milestones"])
    save(folder, state_of(layer, optimizer, {"rate": scheduler}), step=1)
    return layer, optimizer, scheduler


def refused(folder: Path, module: nn.Module, optimizer: Optimizer, schedulers: dict[str, LRScheduler]) -> list[str]:
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
    layer, optimizer, scheduler = saved(tmp_path)
    assert refused(tmp_path, layer, optimizer, {"rate": lr.StepLR(optimizer, 2)}) == [
        "scheduler 'rate' (StepLR): class MultiStepLR in the checkpoint, StepLR here"
    ]
    assert refused(tmp_path, layer, optimizer, {"other": scheduler}) == [
        "scheduler 'other' (MultiStepLR): missing in the checkpoint",
        "scheduler 'rate' (MultiStepLR): only in the checkpoint",
    ]
    restore(tmp_path, layer, optimizer, {}, subset=True)
    with pytest.raises(CheckpointError, match=r"only in the checkpoint: 'optimizer\.schedulers'"):
        restore(tmp_path, layer, optimizer)
    one_group = SGD(layer.parameters(), lr=0.1, momentum=0.9)
    lines = refused(tmp_path, layer, one_group, {"rate": lr.MultiStepLR(one_group, [1])})
    assert "scheduler 'rate' (MultiStepLR): base_lrs has 2 items in the checkpoint, 1 here" in lines
    in_another_order = SGD([{"params": [p]} for p in (layer.bias, layer.weight)], lr=0.1, momentum=0.9)
    (line,) = refused(tmp_path, layer, in_another_order, {"rate": lr.MultiStepLR(in_another_order, [1])})
    assert line == (
        "scheduler 'rate' (MultiStepLR): it has learning rates by group, "
        "and the groups are in another order in the checkpoint"
    )


def test_what_a_scheduler_set_in_a_group_is_no_hyper_parameter_of_the_optimizer(tmp_path: Path) -> None:
    layer, optimizer, scheduler = made(SCHEDULERS["one cycle"])
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
