"""Captures steps as FX graphs, and replays them without Python work for their sharding."""

from shardwise._graph_capture.api import Captured, capture

__all__ = ["Captured", "capture"]
