"""Captures steps as FX graphs, and replays them without Python work for their sharding."""

from shardwise.graph_capture.api import Captured, capture

__all__ = ["Captured", "capture"]
