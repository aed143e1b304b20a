"""The transformer of a configuration, its initial values, and its sharding over a mesh."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwise import collectives
from shardwise.demos.lm.batches import NUM_BYTES
from shardwise.demos.lm.config import TENSOR_AXIS, LanguageModelConfig
from shardwise.layout import Mesh
from shardwise.models import ModelArgs, Transformer
from shardwise.parallel.fully_sharded import fully_shard
from shardwise.parallel.shard_module import shard_module

# Of both tables. With a tenth of it, attention needs several times as many steps to learn to look one byte back.
TABLE_STD = 0.5
OUTPUT_STD = 0.02  # all bytes start about equally likely


def build(config: LanguageModelConfig) -> Transformer:
    """The model with its initial values, which depend on the seed only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = outline(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=_std(name, config))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
    return model


def _std(name: str, config: LanguageModelConfig) -> float:
    if name.endswith("embeddings.weight"):
        return TABLE_STD
    if name == "output.weight":
        return OUTPUT_STD
    std = 1 / math.sqrt(config.dim)
    if name.endswith(("wo.weight", "w2.weight")):  # residual layers: GPT-2 (Radford et al., 2019), 2.3
        std /= math.sqrt(2 * config.layers)
    return std


def outline(config: LanguageModelConfig) -> Transformer:
    """The model on the current default device, with torch's initial values."""
    return Transformer(
        ModelArgs(
            n_layers=config.layers,
            vocab_size=NUM_BYTES,
            max_seq_len=config.context,
            dim=config.dim,
            n_heads=config.heads,
            dropout_p=config.dropout,
            weight_tying=False,
        )
    )


def shard(
    model: Transformer, mesh: Mesh, sequence_parallel: bool, over_data: bool = False, src_data_rank: int | None = 0
) -> Transformer:
    """Shard `model` in place: tensor-parallel on the axis `tp` if there is one, replicated on all other axes.

    Args:
        over_data: shard it on the last of the other axes as well; each layer is a unit of `fully_shard`.
        src_data_rank: as of `parallelize_module`.
    """
    if TENSOR_AXIS in (mesh.names or ()):
        Transformer.parallelize(model, mesh, sequence_parallel, gather_output=False, src_data_rank=src_data_rank)
    else:
        shard_module(model, {}, mesh=mesh, src_rank=None)
    if over_data:
        for unit in (*model.layers, model):
            fully_shard(unit, mesh=data_mesh(mesh))
    return model


def data_mesh(mesh: Mesh) -> Mesh:
    """The axes of `mesh` but `tp`, of the ranks with which this one shares its position on that."""
    return mesh.submesh([name for name in mesh.names or () if name != TENSOR_AXIS], collectives.rank())


def groups(model: nn.Module, weight_decay: float) -> Iterator[dict[str, Any]]:
    """Parameter groups of the optimizer: weight decay on matrices, none on vectors."""
    for decay, ndims in ((weight_decay, (2,)), (0.0, (0, 1))):
        yield {"params": [p for p in model.parameters() if p.ndim in ndims], "weight_decay": decay}
