"""Schedulers of torch on a `fused_optimizer`, beside the same ones on `torch.optim` in one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from shardwise import _collectives as collectives
from shardwise._layout import Mesh, Partial
from shardwise._tensor import DTensor
from shardwise.embedding import SGD, Adagrad, Adam, KeyedJaggedTensor, Lamb, shard_embeddings
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.testing import world
from tests.embedding.test_fused import CONFIGS, PLANS, collection, face, loss_of

STEPS, SIZE = 8, 2
ROWS = (7, 10, 10, 5)

Scheduler = Callable[[torch.optim.Optimizer], Any]


def batch_of(rank: int, step: int) -> KeyedJaggedTensor:
    """Every row is looked up on every rank, so that optimizers of torch change the same rows."""
    g = torch.Generator().manual_seed(10 * step + rank)
    values = torch.cat([torch.randperm(rows, generator=g) for rows in ROWS])
    lengths = torch.tensor([n for rows in ROWS for n in (rows - 2, 2)])
    return KeyedJaggedTensor(["f0", "f1", "g1", "f2"], values, lengths=lengths)


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
    """Beside one process, with layers in an optimizer of their own."""
    names, mesh = [config.name for config in CONFIGS], Mesh((SIZE,))
    plain = collection()
    optimizers: Any = {name: kind(0.1, weight_decay=0.01 * i) for i, name in enumerate(names)} if apart else kind(0.1)
    sharded = shard_embeddings(collection(), PLANS[sharding], mesh, optimizers)
    torch.manual_seed(0)
    layers = nn.Linear(20, 1), nn.Linear(20, 1)
    layers[1].load_state_dict(layers[0].state_dict())
    groups = [{"params": [p], "weight_decay": 0.01 * i * apart} for i, p in enumerate(plain.parameters())]
    groups = groups if apart else [{"params": list(plain.parameters())}]
    both = [
        [face(sharded), torch.optim.SGD(layers[0].parameters(), lr=0.001)],
        [of_torch(groups, lr=0.1), torch.optim.SGD(layers[1].parameters(), lr=0.001)],
    ]
    schedulers = [schedule(optimizers[0]) for optimizers in both]
    for step in range(STEPS):
        for module, layer, ranks, composite in (
            (sharded, layers[0], [collectives.rank()], both[0]),
            (plain, layers[1], range(SIZE), both[1]),
        ):
            for optimizer in composite:
                optimizer.zero_grad()
            for rank in ranks:
                layer(module(batch_of(rank, step)).values()).sub(1).square().sum().backward()
        for parameter in layers[0].parameters():
            assert parameter.grad is not None
            parameter.grad = DTensor.from_local(parameter.grad, mesh, [Partial()]).full_tensor()
        for composite, scheduler in zip(both, schedulers, strict=True):
            for optimizer in composite:
                optimizer.step()
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*((float(step > 2),) if plateau else ()))
        assert [g["lr"] for g in both[0][0].param_groups] == [g["lr"] for g in both[1][0].param_groups]
        for name, value in sharded.state_dict().items():
            want = plain.state_dict()[name]
            torch.testing.assert_close(value.full_tensor(), want, rtol=1e-4, atol=1e-5, msg=f"{name}, step {step}")
    torch.testing.assert_close(layers[0].weight, layers[1].weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sharding", ["row", "column", "mixed"])
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_schedulers_change_the_step_that_they_change_in_torch(sharding: str, schedule: str) -> None:
    apart = schedule == "a lambda for each group"
    kind, of_torch = (SGD, torch.optim.SGD) if apart or schedule == "plateau" else (Adam, torch.optim.Adam)
    world(SIZE).run(train, sharding, SCHEDULERS[schedule], kind, of_torch, apart)


def test_one_cycle_of_groups_with_and_without_betas_is_an_error_of_torch() -> None:
    optimizers = {"t0": SGD(0.1), "t1": Adam(0.1), "t2": Adam(0.1)}
    fused = face(shard_embeddings(collection(), {}, Mesh((1,)), optimizers))
    with pytest.raises(ValueError, match="cycle_momentum"):
        lr_scheduler.OneCycleLR(fused, max_lr=0.2, total_steps=3)
    lr_scheduler.OneCycleLR(fused, max_lr=0.2, total_steps=3, cycle_momentum=False)


def unchanged(optimizer: RowOptimizer, dtype: torch.dtype) -> None:
    made = collection()
    sharded = shard_embeddings(made.to(dtype), PLANS["mixed"], Mesh((SIZE,)), optimizer)
    before = {name: value.full_tensor() for name, value in sharded.state_dict().items()}
    for step in range(2):
        loss_of(sharded(batch_of(collectives.rank(), step))).backward()
    for name, value in sharded.state_dict().items():
        assert torch.equal(value.full_tensor(), before[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [SGD, Adagrad, Adam, Lamb])
def test_a_learning_rate_of_0_changes_nothing(kind: Any, dtype: torch.dtype) -> None:
    for decoupled in False, True:
        optimizer = kind(0.0, weight_decay=0.1, decoupled_weight_decay=decoupled, stochastic_rounding=True)
        world(SIZE).run(unchanged, optimizer, dtype)
