"""`fused_optimizer` of sharded collections: schedulers of torch, groups of tables, states that do not fit."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from shardwise import _collectives as collectives
from shardwise._layout import Boxes
from shardwise.embedding import SGD, Adagrad, Adam, KeyedJaggedTensor, Lamb, RowWiseAdagrad
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.errors import ConfigError, PlanError
from shardwise.testing import world
from tests.embedding.tables import FEATURES, NAMES, batch_of, collection, loss_of, sharded

STEPS, SIZE = 8, 2


def one_step(module: Any, step: int) -> None:
    loss_of(module(batch_of(collectives.rank(), step))).backward()


# ---- schedulers -----------------------------------------------------------------------------------------------

Scheduler = Callable[[torch.optim.Optimizer], Any]


def batch_of_all_rows(rank: int, step: int) -> KeyedJaggedTensor:
    """Every row is looked up on every rank, so that optimizers of torch change the same rows."""
    g = torch.Generator().manual_seed(10 * step + rank)
    values = torch.cat([torch.randperm(rows, generator=g) for rows in FEATURES.values()])
    lengths = torch.tensor([n for rows in FEATURES.values() for n in (rows - 2, 2)])
    return KeyedJaggedTensor(list(FEATURES), values, lengths=lengths)


def warmup(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    ramp = lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [ramp, lr_scheduler.CosineAnnealingLR(optimizer, 4)], [3])


SCHEDULERS: dict[str, Scheduler] = {
    "a lambda for each group": partial(
        lr_scheduler.LambdaLR, lr_lambda=[lambda t: 1 / (1 + t), lambda t: 0.5**t, lambda t: float(t % 2)]
    ),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=STEPS + 1),
    "warmup": warmup,
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0),
}


def train(sharding: str, schedule: Scheduler, kind: Any, of_torch: Any, apart: bool) -> None:
    """Beside one process."""
    plain = collection()
    optimizers: Any = {name: kind(0.1, weight_decay=0.01 * i) for i, name in enumerate(NAMES)} if apart else kind(0.1)
    module = sharded(sharding, SIZE, optimizers)
    groups = [{"params": [p], "weight_decay": 0.01 * i * apart} for i, p in enumerate(plain.parameters())]
    groups = groups if apart else [{"params": list(plain.parameters())}]
    both = module.fused_optimizer, of_torch(groups, lr=0.1)
    schedulers = [schedule(optimizer) for optimizer in both]
    for step in range(STEPS):
        for optimizer in both:
            optimizer.zero_grad()
        for tables, ranks in ((module, [collectives.rank()]), (plain, range(SIZE))):
            for rank in ranks:
                tables(batch_of_all_rows(rank, step)).values().sub(1.1).square().mean().backward()
        for optimizer, scheduler in zip(both, schedulers, strict=True):
            optimizer.step()
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*((float(step > 2),) if plateau else ()))
        assert [g["lr"] for g in both[0].param_groups] == [g["lr"] for g in both[1].param_groups]
        for name, value in module.state_dict().items():
            want = plain.state_dict()[name]
            torch.testing.assert_close(value.full_tensor(), want, rtol=1e-4, atol=1e-5, msg=f"{name}, step {step}")


@pytest.mark.parametrize("sharding", ["mixed", *(pytest.param(x, marks=pytest.mark.slow) for x in ("row", "column"))])
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_schedulers_change_the_step_that_they_change_in_torch(sharding: str, schedule: str) -> None:
    apart = schedule == "a lambda for each group"
    kind, of_torch = (SGD, torch.optim.SGD) if apart or schedule == "plateau" else (Adam, torch.optim.Adam)
    world(SIZE).run(train, sharding, SCHEDULERS[schedule], kind, of_torch, apart)


def test_one_cycle_of_groups_with_and_without_betas_is_an_error_of_torch() -> None:
    fused = sharded({}, 1, {"t0": SGD(0.1), "t1": Adam(0.1), "t2": Adam(0.1)}).fused_optimizer
    with pytest.raises(ValueError, match="cycle_momentum"):
        lr_scheduler.OneCycleLR(fused, max_lr=0.2, total_steps=3)
    lr_scheduler.OneCycleLR(fused, max_lr=0.2, total_steps=3, cycle_momentum=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [SGD, Adagrad, Adam, Lamb])
@world(SIZE)
def test_a_learning_rate_of_0_changes_nothing(kind: Any, dtype: torch.dtype) -> None:
    for decoupled in False, True:
        optimizer = kind(0.0, weight_decay=0.1, decoupled_weight_decay=decoupled, stochastic_rounding=True)
        module = sharded("mixed", SIZE, optimizer, plain=collection().to(dtype))
        before = {name: value.full_tensor() for name, value in module.state_dict().items()}
        for step in 0, 2:
            one_step(module, step)
        for name, value in module.state_dict().items():
            assert torch.equal(value.full_tensor(), before[name])


@world(SIZE)
def test_an_optimizer_for_each_table() -> None:
    optimizers: dict[str, RowOptimizer] = {"t0": SGD(0.5), "t1": RowWiseAdagrad(0.1), "t2": SGD(0.0)}
    module = sharded("row", SIZE, optimizers)
    fused = module.fused_optimizer
    assert [(g["lr"], g["param_names"]) for g in fused.param_groups] == [
        (0.5, ["embedding_bags.t0.weight"]), (0.1, ["embedding_bags.t1.weight"]), (0.0, ["embedding_bags.t2.weight"]),
    ]  # fmt: skip
    one_step(module, 0)  # `test_matrix` compares the steps of several optimizers
    again = sharded("column", SIZE, optimizers).fused_optimizer
    again.load_state_dict(fused.state_dict())
    assert list(again.state_dict()["state"][1]) == ["sum"]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="optimizer has no entry 't1'; the tables are t0, t1, t2"):
        sharded({}, 1, {"t0": SGD(1.0), "t2": SGD(1.0)})
    with pytest.raises(PlanError, match="optimizer has an entry 'a'"):
        sharded({}, 1, dict.fromkeys([*NAMES, "a"], SGD(1.0)))
    adam, adagrad = (sharded({}, 1, optimizer).fused_optimizer for optimizer in (Adam(0.1), Adagrad(0.1)))
    with pytest.raises(ConfigError, match=r"t0.weight has the states \['sum'\], expected \['exp_avg', 'exp_avg_sq'\]"):
        adam.load_state_dict(adagrad.state_dict())
    other = copy.deepcopy(adagrad.state_dict())
    other["state"][2]["sum"] = torch.ones(3, 4)
    other["state"][0]["sum"] = torch.ones(7, 4)
    with pytest.raises(ConfigError, match=r"t2.weight, state sum: shape \(3, 4\), expected \(5, 4\)"):
        adagrad.load_state_dict(other)
    assert adagrad.state_dict()["state"][0]["sum"].full_tensor().eq(0).all()  # nothing was loaded
    other = copy.deepcopy(adam.state_dict())
    other["state"][0]["exp_avg"] = torch.ones(7, 8)  # as many rows, but a number for each element
    with pytest.raises(ConfigError, match=r"t0.weight, state exp_avg: shape \(7, 8\), expected \(7, 4\)"):
        adam.load_state_dict(other)
    row_wise = sharded({"t0": Boxes([[((0, 0), (7, 2)), ((0, 2), (7, 2))]])}, 1, RowWiseAdagrad(0.1))
    one_step(row_wise, 0)
    with pytest.raises(PlanError, match=r"Table t0 is .* its states of rows have no layout"):
        row_wise.fused_optimizer.state_dict()
