"""Modules for tests of `fully_shard`, and their training."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Shard, distribute_tensor
from shardwise import _collectives as collectives
from shardwise._models import ModelArgs, Transformer
from shardwise.parallel import fully_shard
from tests.parallel.one_process import full

ARGS = ModelArgs(n_layers=2, vocab_size=11, max_seq_len=6, dim=12, n_heads=4, dropout_p=0.0)
SWITCHES: dict[str, Sequence[int]] = {"tying": (True, False), "recompute": (True, False), "experts": (0, 3)}
STEPS = 3
Test = TypeVar("Test", bound=Callable[..., None])
Loss = Callable[[Any, Tensor], Tensor]
Trained = tuple[list[Tensor], dict[str, Tensor]]


def copied(model: nn.Module) -> Any:
    return copy.deepcopy(model)


# ---- small modules, and one step of them ----------------------------------------------------------------------------


def two_layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def as_units(model: Any, mesh: Mesh, kinds: Any = nn.Linear | nn.BatchNorm1d, **options: Any) -> Any:
    """A copy of which each module of these kinds is a unit, and all."""
    found = copied(model)
    for module in [*found.modules()][1:]:
        if isinstance(module, kinds):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(found, mesh=mesh, **options)


def squares(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum()
    return loss


def assert_same_gradients(model: nn.Module, want: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        assert p.requires_grad == q.requires_grad, name
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            assert_close(full(p.grad), q.grad, msg=f"{name}: {{}}".format)


def check_gradients(plain: nn.Module, x: Tensor, loss: Loss = squares, **options: Any) -> Any:
    """Gradients of `as_units` for a batch of all ranks are those of one process, and those of the batch, if it has."""
    mesh = Mesh((collectives.world_size(),))
    model, want = as_units(plain, mesh, **options), copied(plain)
    mine, theirs = distribute_tensor(x.detach(), mesh, [Shard(0)]), x.detach().clone()
    for each, given in ((model, mine), (want, theirs)):
        loss(each, given.requires_grad_(x.requires_grad)).backward()
    assert_same_gradients(model, want)
    if x.requires_grad:
        assert_close(full(mine.grad), theirs.grad)
    return model


# ---- transformers, and their training -------------------------------------------------------------------------------


def each_switch(**fixed: int) -> Callable[[Test], Test]:
    """Parametrize a test by the switches of `model_args`, each a parameter, but for those that have a `fixed` value."""

    def parametrized(test: Test) -> Test:
        for name, values in SWITCHES.items():
            test = pytest.mark.parametrize(name, [fixed[name]] if name in fixed else values)(test)
        return test

    return parametrized


def model_args(tying: bool, recompute: bool, experts: int) -> ModelArgs:
    return replace(ARGS, weight_tying=tying, checkpoint_activations=recompute, num_experts=experts)


def transformer(args: ModelArgs) -> Any:
    torch.manual_seed(0)
    return Transformer(args)


def sharded(model: Any, mesh: Mesh, **options: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batches(rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(ARGS.vocab_size, (rows, 7), generator=generator) for _ in range(STEPS)]


def batches_of_all(rows: int, mesh: Mesh) -> list[DTensor]:
    return [distribute_tensor(x, mesh, [Shard(0)] * mesh.ndim) for x in batches(rows)]


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, data: Sequence[Tensor], loss_of: Loss = mean_loss) -> Trained:
    """Losses, and the last gradients and parameters."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for tokens in data:
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        losses.append(full(loss.detach()))
    left = {name: full(p.detach()) for name, p in model.named_parameters()}
    left |= {f"gradient of {name}": full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return losses, left


def train_parts(model: nn.Module, rows: int, mesh: Mesh, mean: bool) -> Trained:
    """Train each rank of the first axis on its part of the batches; gradients are averaged over the axis, or added."""
    rank, count = collectives.rank(), mesh.shape[0]
    at = mesh.coordinate(rank)
    assert at is not None
    own = [x.chunk(count)[at[0]] for x in batches(rows)]
    losses, left = train(model, own, mean_loss if mean else lambda m, tokens: mean_loss(m, tokens) / count)
    sums = [collectives.all_reduce(loss, "sum", mesh.axis_ranks(rank, 0)) for loss in losses]
    return [total / count for total in sums] if mean else sums, left


@cache
def trained_alone(args: ModelArgs, rows: int) -> Trained:
    return train(transformer(args), batches(rows))


def assert_trained_alike(found: Trained, args: ModelArgs, rows: int) -> None:
    """Losses, gradients and parameters equal those of one process."""
    losses, left = trained_alone(args, rows)
    assert found[1].keys() == left.keys()
    assert_close(found[0], losses, rtol=1e-5, atol=1e-5)
    for name, want in left.items():
        assert_close(found[1][name], want, rtol=1e-4, atol=1e-5, msg=f"{name}: {{}}".format)
