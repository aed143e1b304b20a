"""Plans: where tables and parameters go, how much could still be gained, and why."""

from shardwise.plan.topology import Link, Topology

__all__ = ["Link", "Topology"]
