"""Plans: where tables and parameters go, how much could still be gained, and why."""

from shardwise.plan.module_plan import ModulePlan, plan_module, price_module
from shardwise.plan.topology import Link, Topology

__all__ = ["Link", "ModulePlan", "Topology", "plan_module", "price_module"]
