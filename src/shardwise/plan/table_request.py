"""The arguments of a plan of tables (`Request`), and whether they fit the tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from shardwise._layout import Kind, Placements, checked_init
from shardwise.embedding.batch import features_of
from shardwise.embedding.configs import EmbeddingConfig
from shardwise.embedding.exchange.engine import MessageDtypes
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.errors import ConfigError, PlanError, did_you_mean
from shardwise.plan.table_costs import BatchShape, check_counts, check_features
from shardwise.plan.table_options import SHARDINGS, Sharding
from shardwise.simulation.topology import Topology

OBJECTIVES = ("time", "memory", "bytes")
Objective = Annotated[str, Kind("'time', 'memory' or 'bytes'", lambda x: isinstance(x, str) and x in OBJECTIVES)]

Configs = Sequence[EmbeddingConfig]
Shardings = Sequence[Sharding] | Mapping[str, Sequence[Sharding]]


@checked_init
@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `plan_tables`."""

    tables: Configs
    weighted: bool
    topology: Topology
    batch: BatchShape
    optimizer: RowOptimizer | None
    pinned: Mapping[str, Placements]
    allowed: Shardings
    groups: Sequence[Sequence[str]]
    counts: Mapping[str, Tensor]
    head_room: float
    objective: Objective
    forward_dtype: torch.dtype
    backward_dtype: torch.dtype

    @property
    def names(self) -> list[str]:
        return [config.name for config in self.tables]

    @property
    def dtypes(self) -> MessageDtypes:
        """The dtypes of the messages of results and of gradients."""
        return MessageDtypes(self.forward_dtype, self.backward_dtype)

    @property
    def memory(self) -> float:
        """Bytes that tables may take on a rank."""
        return self.topology.memory * (1 - self.head_room)

    def check(self) -> None:
        """Raise a ConfigError or PlanError if an argument does not fit the tables."""
        names, features = self.names, set(features_of(self.tables).names)
        check_features(self.batch, features)
        of_tables = self.allowed if isinstance(self.allowed, Mapping) else {}
        grouped = [name for group in self.groups for name in group]
        for what, given in (
            ("pinned", self.pinned), ("allowed", of_tables), ("counts", self.counts), ("groups", grouped),
        ):  # fmt: skip
            for name in given:
                if name not in names:
                    raise PlanError(
                        f"plan_tables: {what} has {name!r}, which is not a table.{did_you_mean(name, names)} "
                        f"Fix: names of tables, such as {names[0]!r}."
                    )
        if len(set(grouped)) != len(grouped):
            raise PlanError("plan_tables: a table is in two groups. Fix: each table in one.")
        check_head_room(self.head_room)
        for config in self.tables:
            if config.name in self.counts:
                check_counts(config, self.counts[config.name])

    def allowed_for(self, name: str) -> Sequence[str]:
        """The shardings that a table may have."""
        return self.allowed.get(name, SHARDINGS) if isinstance(self.allowed, Mapping) else self.allowed


def check_head_room(share: float) -> None:
    """Raise a ConfigError if it is not a share of the memory that leaves some."""
    if not 0 <= share < 1:
        raise ConfigError(f"head_room is {share}, expected 0 to below 1. Fix: such as 0.1.")
