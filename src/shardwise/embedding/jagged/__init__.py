"""Ids of bags of different lengths, and the results of their lookups, with the names of TorchRec."""

from shardwise.embedding.jagged.jagged_tensor import JaggedTensor
from shardwise.embedding.jagged.keyed_jagged_tensor import KeyedJaggedTensor
from shardwise.embedding.jagged.keyed_tensor import KeyedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
