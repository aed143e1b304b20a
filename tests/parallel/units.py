"""Modules for tests of `fully_shard`."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import Mesh
from shardwise.parallel import fully_shard
from tests.parallel.one_process import full


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
