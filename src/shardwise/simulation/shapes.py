"""Training steps of models of well-known sizes, which `shardwise simulate` knows by name."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Mesh, Placement, Shard
from shardwise._models import ModelArgs, Transformer
from shardwise._tensor import DTensor
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    shard_embeddings,
)
from shardwise.errors import ConfigError, did_you_mean
from shardwise.parallel import fully_shard, loss_parallel
from shardwise.parallel.experts import MixtureOfExperts, Routing, balanced_choices
from shardwise.parallel.shard_module import shard_module
from shardwise.simulation.api import Step

TENSOR_AXIS = "tp"  # shards the model; every other axis of the mesh shards the batch
EXPERT_AXIS = "ep"  # shards the experts as well
DATA_AXES = ("dp", "fs")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a shape."""

    layers: int | None = None  # default: as many as the model has
    batch_size: int = 1  # examples of each shard of the batch
    context: int = 4096  # tokens of an example
    sequence_parallel: bool = False  # shard the activations between layers along the sequence dim
    fully_shard: bool = False  # shard parameters and the states of the optimizer over the axes of the batch

    def __post_init__(self) -> None:
        for name in ("layers", "batch_size", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, expected 1 or more. Fix: give a positive number.")

    def check(self, mesh: Mesh, axes: Sequence[str]) -> None:
        """Raise ConfigError if a mesh has other axes, or lacks an axis for an option."""
        names = mesh.names or ()
        wrong = None
        for name in names:
            if name not in axes:
                meant = did_you_mean(name, axes)
                raise ConfigError(f"The shape has no axis {name!r}.{meant} Fix: a mesh of {', '.join(axes)}.")
        if not names:
            wrong = "A shape needs a mesh with axis names"
        elif self.sequence_parallel and TENSOR_AXIS not in names:
            wrong = f"sequence_parallel needs an axis {TENSOR_AXIS} in the mesh"
        elif self.fully_shard and not {*names}.intersection(DATA_AXES):
            wrong = f"fully_shard needs an axis of {', '.join(DATA_AXES)} in the mesh"
        if wrong:
            such = ",".join(f"{name}=2" for name in axes if name in ("dp", TENSOR_AXIS))
            raise ConfigError(f"{wrong}, got {mesh}. Fix: give one such as {such}.")


class BalancedExperts(MixtureOfExperts):
    """Tokens choose all experts equally often: a simulation has no scores."""

    def route(self, tokens: Tensor) -> Routing:
        routing = super().route(tokens)
        local = tokens.to_local() if isinstance(tokens, DTensor) else tokens
        chosen = balanced_choices(len(local), self.top_k, self.num_experts)
        if isinstance(tokens, DTensor):
            chosen = _distributed(chosen, tokens.layout_.mesh)
        return routing._replace(chosen=chosen)


def transformer(args: ModelArgs, options: Options, mesh: Mesh) -> Step:
    """AdamW on a Transformer that is tensor-parallel on the axis tp; other axes shard the batch.

    With `num_experts`, each token chooses 2 experts. ep shards them, and tp their hidden features.
    """
    layers = args.n_layers if options.layers is None else options.layers
    model = Transformer(replace(args, n_layers=layers, max_seq_len=options.context))
    if args.num_experts:
        by_axis = {
            name: [
                {EXPERT_AXIS: Shard(0), TENSOR_AXIS: Shard(features)}.get(axis, REPLICATE) for axis in mesh.names or ()
            ]
            for name, features in (("w1", 1), ("w2", 2))
        }
        for block in model.layers:
            experts = BalancedExperts(args.dim, args.ffn_dim, args.num_experts)
            block.expert_layer = shard_module(experts, by_axis, mesh=mesh, src_rank=None)
            if options.fully_shard:  # by dim 0, most ranks would have no expert
                fully_shard(experts, mesh=_data_mesh(mesh), shard_placement_fn=_longest_dim)
    _shard(model, mesh, options)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        size = options.batch_size, options.context
        tokens, targets = (_distributed(torch.randint(args.vocab_size, size), mesh) for _ in range(2))
        with loss_parallel() if TENSOR_AXIS in (mesh.names or ()) else nullcontext():  # tp shards the vocabulary
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()

    return step


def _shard(model: Transformer, mesh: Mesh, options: Options) -> None:
    """Shard `model` in place on the axis tp if there is one; with `fully_shard` each layer is a unit on other axes."""
    if TENSOR_AXIS in (mesh.names or ()):
        Transformer.parallelize(model, mesh, options.sequence_parallel, gather_output=False, src_data_rank=None)
    else:
        shard_module(model, {}, mesh=mesh, src_rank=None)
    if options.fully_shard:
        for unit in (*model.layers, model):
            fully_shard(unit, mesh=_data_mesh(mesh))


def _data_mesh(mesh: Mesh) -> Mesh:
    """The axes dp and fs of `mesh`, of the ranks that share this rank's position on the others."""
    return mesh.submesh([name for name in mesh.names or () if name in DATA_AXES], collectives.rank())


def _longest_dim(parameter: nn.Parameter) -> Shard:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return Shard(max(range(local.ndim), key=local.shape.__getitem__))


class Recommender(nn.Module):
    """Sums of rows of many tables, and dense features, in one multi-layer perceptron."""

    def __init__(self, num_tables: int, dim: int, dense: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(dense, 512), nn.ReLU(), nn.Linear(512, dim), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(dim * (num_tables + 1), 1024), nn.ReLU(), nn.Linear(1024, 1))

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """(batch, dense) and (batch, tables * dim) -> (batch, 1)."""
        scores: Tensor = self.top(torch.cat([self.bottom(dense), pooled], 1))
        return scores


def recommender(options: Options, mesh: Mesh, tables: int = 1000, rows: int = 1_000_000, dim: int = 64) -> Step:
    """Row-wise Adagrad on tables that are row-wise over all ranks, Adagrad on dense layers, which are replicated."""
    dense, ids_of_bag = 13, 4
    names = [f"t{number}" for number in range(tables)]
    collection = EmbeddingBagCollection(
        [EmbeddingBagConfig(rows, dim, name, feature_names=[name]) for name in names], device="meta"
    )
    by_rows = [Shard(0)] * mesh.ndim
    sharded = shard_embeddings(collection, dict.fromkeys(names, by_rows), mesh, RowWiseAdagrad(lr=0.1))
    fused = sharded.fused_optimizer
    assert fused is not None
    model = Recommender(tables, dim, dense)
    shard_module(model, {}, mesh=mesh, src_rank=None)
    optimizer = torch.optim.Adagrad(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        size = options.batch_size
        lengths = torch.full((tables * size,), ids_of_bag)
        ids = KeyedJaggedTensor(names, torch.randint(rows, (tables * size * ids_of_bag,)), lengths=lengths)
        pooled = DTensor.from_local(sharded(ids).values(), mesh, by_rows, run_check=False)
        features = DTensor.from_local(torch.ones(size, dense), mesh, by_rows, run_check=False)
        scores = model(features, pooled)
        F.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores)).backward()
        optimizer.step()
        fused.step()

    return step


def _distributed(local: Tensor, mesh: Mesh) -> DTensor:
    """The batch with the shard `local` on this rank, sharded along dim 0 on every axis but tp."""
    names = mesh.names or ()
    placements: list[Placement] = [REPLICATE if name == TENSOR_AXIS else Shard(0) for name in names]
    data_ranks = prod(size for name, size in zip(names, mesh.shape, strict=True) if name != TENSOR_AXIS)
    shape = torch.Size((len(local) * data_ranks, *local.shape[1:]))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=local.stride())


# Feed-forward layers of the models have three matrices, of 28,672 and 14,336 features; those here have two.
LLAMA_70B = ModelArgs(
    n_layers=80, vocab_size=32_000, dim=8192, n_heads=64, n_kv_heads=8, hidden_dim=43_008, dropout_p=0.0,
    weight_tying=False,
)  # fmt: skip
MIXTRAL_8X7B = ModelArgs(
    n_layers=32, vocab_size=32_000, dim=4096, n_heads=32, n_kv_heads=8, hidden_dim=21_504, num_experts=8, dropout_p=0.0,
    weight_tying=False,
)  # fmt: skip


class Shape(NamedTuple):
    """A step by its name."""

    build: Callable[[Options, Mesh], Step]
    options: tuple[str, ...]  # options that change it
    axes: tuple[str, ...]  # axes of the mesh


_OPTIONS = ("layers", "batch_size", "context", "fully_shard")
SHAPES: Mapping[str, Shape] = {
    "llama-70b": Shape(
        lambda options, mesh: transformer(LLAMA_70B, options, mesh), (*_OPTIONS, "sequence_parallel"),
        (*DATA_AXES, TENSOR_AXIS),
    ),
    "mixtral-8x7b": Shape(
        lambda options, mesh: transformer(MIXTRAL_8X7B, options, mesh), _OPTIONS, (*DATA_AXES, EXPERT_AXIS, TENSOR_AXIS)
    ),
    "dlrm": Shape(recommender, ("batch_size",), ("dp",)),
}  # fmt: skip
