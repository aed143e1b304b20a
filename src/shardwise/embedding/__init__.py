"""Collections of embedding tables: their inputs and results, and how they are sharded."""

from shardwise._lookups import from_lengths
from shardwise.embedding.balance import balanced_rows, count_rows
from shardwise.embedding.collections import EmbeddingBagCollection, EmbeddingCollection
from shardwise.embedding.configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from shardwise.embedding.jagged import JaggedTensor, KeyedJaggedTensor
from shardwise.embedding.keyed_tensor import KeyedTensor
from shardwise.embedding.optimizers import SGD, Adagrad, Adam, Lamb, RowWiseAdagrad, RowWiseAdam, RowWiseLamb
from shardwise.embedding.position_weights import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModuleCollection,
)
from shardwise.embedding.prefetch import prefetch
from shardwise.embedding.sharded import shard_embeddings

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "FeatureProcessedEmbeddingBagCollection",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Lamb",
    "PoolingType",
    "PositionWeightedModuleCollection",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "RowWiseLamb",
    "balanced_rows",
    "count_rows",
    "from_lengths",
    "prefetch",
    "shard_embeddings",
]  # fmt: skip
