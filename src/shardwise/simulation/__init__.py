"""Memory and time of a training step on thousands of ranks, in one process that allocates nothing."""

from shardwise.simulation.api import simulate
from shardwise.simulation.result import Simulation

__all__ = ["Simulation", "simulate"]
