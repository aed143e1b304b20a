"""Memory and communication of a training step on thousands of ranks, in one process that allocates nothing."""

from shardwise.simulation.api import Step, simulate
from shardwise.simulation.result import Collective, RankClass, Simulation

__all__ = ["Collective", "RankClass", "Simulation", "Step", "simulate"]
