"""Modules for tests of `fully_shard`, and their training."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import Mesh
from shardwise.models import ModelArgs, Transformer
from shardwise.parallel import fully_shard
from tests.parallel.one_process import full

ARGS = ModelArgs(n_layers=2, vocab_size=11, max_seq_len=6, dim=12, n_heads=4, dropout_p=0.0)
SWITCHES: dict[str, Sequence[int]] = {"tying": (True, False), "recompute": (True, False), "experts": (0, 3)}
STEPS = 5
Test = TypeVar("Test", bound=Callable[..., None])
Loss = Callable[[nn.Module, Tensor], Tensor]
Trained = tuple[list[Tensor], dict[str, Tensor]]


def copied(model: nn.Module) -> Any:
    return copy.deepcopy(model)


def gathered(x: Any) -> Tensor:
    assert isinstance(x, Tensor)
    return full(x)


def two_layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def as_units(model: Any, mesh: Mesh, **options: Any) -> Any:
    """A copy of which each linear layer is a unit, and all."""
    found = copied(model)
    for layer in found:
        if isinstance(layer, nn.Linear | nn.BatchNorm1d):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(found, mesh=mesh, **options)


def each_switch(**fixed: int) -> Callable[[Test], Test]:
    """Parametrize a test by the switches of `model_args`, each a parameter, but for those that have a `fixed` value."""

    def parametrized(test: Test) -> Test:
        for name, values in SWITCHES.items():
            test = pytest.mark.parametrize(name, [fixed[name]] if name in fixed else values)(test)
        return test

    return parametrized


def model_args(tying: bool, recompute: bool, experts: int) -> ModelArgs:
    return replace(ARGS, weight_tying=tying, checkpoint_activations=recompute, num_experts=experts)


def batches(rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(ARGS.vocab_size, (rows, 7), generator=generator) for _ in range(STEPS)]


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, data: Sequence[Tensor], loss_of: Loss = mean_loss) -> Trained:
    """Losses, and the last gradients and parameters."""
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for tokens in data:
        optimiser.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimiser.step()
        losses.append(full(loss.detach()))
    left = {name: full(p.detach()) for name, p in model.named_parameters()}
    left |= {f"gradient of {name}": gathered(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return losses, left


def assert_trained_alike(found: Trained, model: nn.Module, data: Sequence[Tensor]) -> None:
    losses, left = train(copied(model), data)
    assert found[1].keys() == left.keys()
    assert_close(found[0], losses, rtol=1e-5, atol=1e-5)
    for name, want in left.items():
        assert_close(found[1][name], want, rtol=1e-4, atol=1e-5, msg=f"{name}: {{}}".format)


def sharded(model: Any, mesh: Mesh, **options: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def transformer(args: ModelArgs) -> Transformer:
    torch.manual_seed(0)
    return Transformer(args)
