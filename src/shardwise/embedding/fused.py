"""`FusedOptimizer`: the hyper-parameters and states of a sharded collection, as a `torch.optim.Optimizer`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, overload

import torch
from torch import nn

from shardwise._layout import Boxes, Layout, Placement, Shard
from shardwise._tensor import DTensor
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.errors import ConfigError, PlanError

StatesOf = Callable[[str], dict[str, DTensor]]  # the states of the table whose parameter has this name


class FusedOptimizer(torch.optim.Optimizer):
    """What updates the tables of a collection in backward; `sharded.fused_optimizer`.

        scheduler = torch.optim.lr_scheduler.StepLR(sharded.fused_optimizer, step_size=1000)

    A group has the tables of one optimizer. Its hyper-parameters may be changed, as schedulers do, and count from the
    next backward. Every backward is a step, or those in a block of `sharded.accumulate()` are one: `step()` only counts
    for schedulers, and there are no gradients to zero.

    `state_dict()` has states as DTensors, of the rows of their tables. A state with a number for each row is
    [rows, shards of columns]; loaded into another number of these shards, it becomes their mean.

    Attributes:
        kinds: the class of the optimizer of each group.
    """

    def __init__(
        self,
        optimizers: Sequence[RowOptimizer],
        groups: Sequence[Sequence[tuple[str, nn.Parameter]]],
        states_of: StatesOf,
    ) -> None:
        self.kinds = [type(optimizer) for optimizer in optimizers]
        values = [asdict(optimizer) for optimizer in optimizers]
        common = {name: value for name, value in values[0].items() if all(name in others for others in values)}
        super().__init__(
            [
                {"params": list(params), "step": 0, **of_optimizer}
                for params, of_optimizer in zip(groups, values, strict=True)
            ],
            common,  # schedulers look here for what they may change
        )
        self.replace_states(states_of)

    def replace_states(self, states_of: StatesOf) -> None:
        """Have the states of tables that were resized."""
        self._without_layout: PlanError | None = None
        for name, parameter in self._named():
            try:
                self.state[parameter] = states_of(name)
            except PlanError as error:  # tables can be trained, but not saved
                self._without_layout = error

    def optimizers(self) -> list[RowOptimizer]:
        """The optimizer of each group with its present hyper-parameters."""
        return [
            kind(**{field.name: group[field.name] for field in fields(kind)})
            for kind, group in zip(self.kinds, self.param_groups, strict=True)
        ]

    def begin_step(self) -> list[tuple[RowOptimizer, int]]:
        """The optimizer of each group with its present hyper-parameters, and the number of its step."""
        for group in self.param_groups:
            group["step"] += 1
        return [(one, group["step"]) for one, group in zip(self.optimizers(), self.param_groups, strict=True)]

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Nothing: the tables were updated in backward."""
        return None if closure is None else closure()

    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer of torch, with DTensors.

        Raises:
            PlanError: states without a layout.
        """
        self.check_layouts()
        return super().state_dict()

    def check_layouts(self) -> None:
        """Raise PlanError if there are states without a layout, which cannot be saved."""
        if self._without_layout is not None:
            raise self._without_layout

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """States of this sharding, of another one, or of full tensors; and the hyper-parameters.

        Raises:
            ConfigError: the states are not those of these tables and optimizers; nothing is loaded.
        """
        saved, groups = state_dict["state"], state_dict["param_groups"]
        expected = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in groups] != expected:
            got = [len(group["params"]) for group in groups]
            raise ConfigError(
                f"The state has groups of {got} tables, expected {expected}. "
                f"Fix: the tables and optimizers that the state was saved from."
            )
        of_rows = [kind.of_rows for kind, count in zip(self.kinds, expected, strict=True) for _ in range(count)]
        numbers = [number for group in groups for number in group["params"]]
        pairs = []
        for (name, parameter), number, rows in zip(self._named(), numbers, of_rows, strict=True):
            given, own = saved.get(number, {}), self.state[parameter]
            if given.keys() != own.keys():
                raise ConfigError(
                    f"Table {name} has the states {sorted(given)}, expected {sorted(own)}. Fix: the same optimizer; or "
                    "load_state_dict or restore, as torch's set_state_dict leaves out tables (requires_grad=False)."
                )
            for state, target in own.items():
                shape = tuple(given[state].shape)
                if shape != target.shape and not (state in rows and is_of_other_columns(shape, tuple(target.shape))):
                    fix = " Fix: resize_ the collection first." if shape[1:] == target.shape[1:] else ""
                    raise ConfigError(
                        f"Table {name}, state {state}: shape {shape}, expected {tuple(target.shape)}.{fix}"
                    )
                pairs.append((given[state], target))
        with torch.no_grad():
            for value, target in pairs:
                if value.shape != target.shape:
                    value = value.mean(1, keepdim=True).expand(target.shape)
                target.copy_(value)
        for group, of_saved in zip(self.param_groups, groups, strict=True):
            group.update({key: of_saved[key] for key in group if key in of_saved and not key.startswith("param")})

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [pair for group in self.param_groups for pair in zip(group["param_names"], group["params"], strict=True)]


def is_of_other_columns(shape: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Whether a state of rows may be loaded into one of shape `own`: of the same rows and any shards of columns."""
    return len(shape) == 2 and shape[:1] == own[:1]


def layout_of_rows(layout: Layout, name: str) -> Layout:
    """Of a state with a number for each row and shard of columns of a table.

    Raises:
        PlanError: columns in boxes, or sharded on several mesh axes.
    """
    by_columns = [a for a, p in enumerate(layout.placements) if isinstance(p, Shard) and p.dim == 1]
    if len(by_columns) > 1 or any(isinstance(p, Boxes) for p in layout.placements):
        raise PlanError(
            f"Table {name} is {layout.placements}: its states of rows have no layout. Fix: an optimizer with a state "
            f"for each element, or columns sharded on one mesh axis."
        )
    placements: list[Placement] = list(layout.placements)
    shards = 1
    for axis in by_columns:
        sizes = [int(size > 0) for size in layout.dims[1].sizes]
        shards, placements[axis] = sum(sizes), Shard(1, sizes)
    return Layout(layout.mesh, placements, (layout.shape[0], shards))
