"""Steps recorded once as FX graphs, and replayed without Python work for their shardings."""

from shardwise.captured.api import Captured, capture

__all__ = ["Captured", "capture"]
