"""Embedding tables as features: what goes beyond one `F.embedding_bag` at a time."""

from shardwise.embedding.together import embedding_bags

__all__ = ["embedding_bags"]
