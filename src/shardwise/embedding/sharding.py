"""`shard_embeddings`: from a plain collection to a sharded one."""

from collections.abc import Mapping

import torch

from shardwise import collectives
from shardwise.collectives import DeviceMesh
from shardwise.embedding.collections import EmbeddingBagCollection, EmbeddingCollection
from shardwise.embedding.exchange.engine import MessageDtypes
from shardwise.embedding.exchange.hot_rows import check_hot_rows
from shardwise.embedding.kernels import Kernels
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.embedding.sharded import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from shardwise.errors import PlanError
from shardwise.layout import Layout, Mesh, Placements, as_placements, checked


@checked
def shard_embeddings(
    collection: EmbeddingBagCollection | EmbeddingCollection,
    plan: Mapping[str, Placements],
    mesh: Mesh | DeviceMesh,
    optimizer: RowOptimizer | Mapping[str, RowOptimizer] | None = None,
    *,
    forward_dtype: torch.dtype = torch.float32,
    backward_dtype: torch.dtype = torch.float32,
    kernels: Kernels | None = None,
    hot_rows: int = 0,
) -> ShardedEmbeddingBagCollection | ShardedEmbeddingCollection:
    """The collection with its tables sharded over `mesh`. A training step has three collectives for all tables.

        sharded = shard_embeddings(collection, {"users": Shard(0), "items": Shard(1)}, mesh, RowWiseAdagrad(lr=0.1))

    Args:
        collection: has the same values on all ranks; or is on the meta device, and is initialised with random numbers
            that do not depend on the layout, from the generator of the first rank.
        plan: the placements of each table by its name; tables that it does not name are replicated.
        mesh: all ranks that call the collection, each with its own batch.
        optimizer: updates the rows that a batch has looked up, in its backward; or one for each table, by name. The
            result's `fused_optimizer` has its learning rate and states. None: the parameters get dense gradients, for
            any optimizer of `torch.optim`.
        forward_dtype, backward_dtype: in which results, and their gradients, are sent: float32, bfloat16 or float16.
            Each is rounded once, also what a rank sends to itself, and summed in float32.
        kernels: of local lookups and updates; None: the fastest that are installed.
        hot_rows: bytes of a message. Each rank requests the rows that are in many of its bags once, and adds them
            itself: the most frequent ones, as many as save bytes, and at most these. Only for pooled tables without
            weights of ids. 0: none.

    Raises:
        ConfigError: another dtype, or negative `hot_rows`.
        PlanError: a plan, optimizers or `hot_rows` that do not fit the collection.
    """
    dtypes = MessageDtypes(forward_dtype, backward_dtype)
    check_hot_rows(hot_rows, isinstance(collection, EmbeddingBagCollection), collection._weighted)
    configs = (
        collection.embedding_bag_configs()
        if isinstance(collection, EmbeddingBagCollection)
        else collection.embedding_configs()
    )
    names = [config.name for config in configs]
    if unknown := [name for name in plan if name not in names]:
        raise PlanError(f"The plan has {unknown[0]!r}, but the tables are {', '.join(names)}. Fix: use their names.")
    if isinstance(optimizer, Mapping) and set(optimizer) != set(names):
        odd = min(set(optimizer) ^ set(names))
        raise PlanError(
            f"optimizer has {'no' if odd in names else 'an'} entry {odd!r}; the tables are {', '.join(names)}. "
            f"Fix: one entry for each table, or one optimizer for all."
        )
    optimizers = [optimizer[n] if isinstance(optimizer, Mapping) else optimizer for n in names] if optimizer else None
    where = collectives.as_mesh(mesh)
    layouts = [
        Layout(where, as_placements(where, plan.get(c.name)), (c.num_embeddings, c.embedding_dim)) for c in configs
    ]
    if isinstance(collection, EmbeddingBagCollection):
        return ShardedEmbeddingBagCollection(collection, layouts, optimizers, kernels, dtypes, hot_rows)
    return ShardedEmbeddingCollection(collection, layouts, optimizers, kernels, dtypes)
