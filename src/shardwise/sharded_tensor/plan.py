"""Plans and sharders: how the parameters of a module are cut, and who does it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from shardwise.sharded_tensor.specs import ShardingSpec


class Sharder(ABC):
    """Makes a sharded module of a whole one; subclass it where a spec a parameter is not enough.

    It may merge the tables of a module, change how it is called, or choose another implementation.
    """

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The module that takes the place of `module` in its parent."""


@dataclass(frozen=True)
class ShardingPlan:
    """What becomes of a module.

    Args:
        plan: a parameter, by its path such as "encoder.table.weight", to the spec that cuts it; or a submodule, by
            its path, to the `Sharder` that replaces it. The two may not meet in one part of the module.
        output_plan: a submodule ("" is the module itself) to the spec that its outputs are resharded to.
        return_local_tensor: submodules whose outputs become this rank's plain part, for data-parallel code behind.
    """

    plan: Mapping[str, ShardingSpec | Sharder]
    output_plan: Mapping[str, ShardingSpec] | None = None
    return_local_tensor: Sequence[str] | None = field(default=None)


class ShardingPlanner(ABC):
    """Works out plans; subclass it to choose specs by the sizes of tables, measured costs or anything else."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """A plan for `module`, the same on every rank."""
