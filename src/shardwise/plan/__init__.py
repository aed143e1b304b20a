"""Plans: where tables and parameters go, how much could still be gained, and why."""

from shardwise.plan.table_costs import BatchShape
from shardwise.plan.tables import PlanChange, TablePlan, plan_tables
from shardwise.plan.topology import Link, Topology

__all__ = ["BatchShape", "Link", "PlanChange", "TablePlan", "Topology", "plan_tables"]
