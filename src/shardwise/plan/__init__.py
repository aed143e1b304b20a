"""Plans: where tables and parameters go, how much could still be gained, and why."""

from shardwise.plan.comparisons import PlanChange
from shardwise.plan.module_plan import ModulePlan, plan_module, price_module
from shardwise.plan.table_costs import BatchShape
from shardwise.plan.tables import TablePlan, plan_tables
from shardwise.simulation.topology import Link, Topology

__all__ = [
    "BatchShape", "Link", "ModulePlan", "PlanChange", "TablePlan", "Topology", "plan_module", "plan_tables",
    "price_module",
]  # fmt: skip
