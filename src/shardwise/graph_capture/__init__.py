"""Steps recorded once as FX graphs, and replayed without Python work for their shardings."""

from shardwise.graph_capture.api import Captured, capture

__all__ = ["Captured", "capture"]
