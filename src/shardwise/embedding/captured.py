"""Lookups in captured graphs: each is one opaque call, whose Python code runs at every replay with new ids."""

from collections.abc import Callable

from torch import Tensor

from shardwise.embedding.jagged import KeyedJaggedTensor
from shardwise.embedding.jagged.keyed_jagged_tensor import JaggedFeatures
from shardwise.tensor import DTensor
from shardwise.tensor.transforms import refuse_compilation
from shardwise.trace.capture_hooks import allow_in_graph_with_backward, not_capturable


def look_up(lookup: Callable[..., Tensor], features: JaggedFeatures, *tables: Tensor) -> Tensor:
    """`lookup(features, *tables)`, the results of a collection as one tensor.

    Args:
        tables: that get gradients, or a tensor in their place: backward runs if one of them requires grad.
    """
    refuse_compilation()
    if isinstance(features, JaggedFeatures) and not isinstance(features, KeyedJaggedTensor):
        not_capturable(f"a lookup of a {type(features).__module__}.{type(features).__qualname__}")
    if any(isinstance(table, DTensor) for table in tables):
        not_capturable("a lookup in tables that are DTensors, of a collection without shard_embeddings")
    return _in_graph(lookup, features, *tables)


def _collection_lookup(lookup: Callable[..., Tensor], features: JaggedFeatures, *tables: Tensor) -> Tensor:
    return lookup(features, *tables)


_in_graph = allow_in_graph_with_backward(_collection_lookup, any_sizes=True)
