"""Experts along an axis that also shards the batch: layers that have them, and their costs.

The data axis becomes two, "edp" and "ep". Along "ep" each rank holds some of the experts, and receives their tokens
(`ExpertParallel`); along "edp" these experts are fully sharded. All other parameters are fully sharded along both. A
trace has no values to choose by, so every expert is assumed to get tokens x top_k / experts.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise._layout import Mesh, Placement, Shard, chunk
from shardwise._torch_bridge import module_sharding
from shardwise.errors import PlanError
from shardwise.parallel import ExpertParallel, parallelize_module
from shardwise.parallel.experts import stacked_experts
from shardwise.parallel.styles import ModuleContext
from shardwise.plan.module_choices import Choice
from shardwise.plan.module_costs import ModuleCosts
from shardwise.plan.module_text import Entry
from shardwise.plan.module_trace import BOUNDARY, OP, PARAMETER, Node, Value
from shardwise.simulation.api import without_values
from shardwise.simulation.clock import RankClock

EXPERT_AXES = ("edp", "ep")
WHY = "tokens are sent to their experts and back"


def expert_layers(module: nn.Module) -> dict[str, list[str]]:
    """The paths of layers of experts, with the names of their stacks in the module.

    A trace has the inputs of modules with children, except the outermost one.
    """
    found: dict[str, list[str]] = {}
    for path, layer in module.named_modules():
        if path and hasattr(layer, "num_experts") and list(layer.children()):
            try:
                names = stacked_experts(layer)
            except PlanError:
                continue
            if not any("." in name for name in names):  # else a module inside it is the layer
                found[path] = [f"{path}.{name}" for name in names]
    return found


def expert_sizes(module: nn.Module, data_ranks: int) -> list[int]:
    """The possible sizes of an axis of experts on which each rank has some."""
    counts = [module.get_parameter(names[0]).shape[0] for names in expert_layers(module).values()]
    return [n for n in range(min([data_ranks, *counts]), 1, -1) if data_ranks % n == 0] if counts else []


def expert_keys(styles: Mapping[str, Entry], mesh: Mesh) -> list[str]:
    """The entries whose experts are sharded along the last axis of the mesh, which also shards the batch."""
    along = ModuleContext("", Mesh((1,), names=mesh.names and mesh.names[-1:]), 0)
    return [key for key, style in styles.items() if isinstance(style, ExpertParallel) and style.shards_batch(along)]


def expert_units(styles: Mapping[str, Entry], units: Sequence[str], mesh: Mesh) -> list[str]:
    """The units that these entries match."""
    matched = module_sharding.resolve(expert_keys(styles, mesh), units, "module")[0]
    return [unit for unit in units if any(unit in found for found in matched.values())]


def check_experts(styles: Mapping[str, Entry], units: Sequence[str], mesh: Mesh, module: nn.Module) -> None:
    """Raise a PlanError unless each layer of experts is a unit: `fully_shard` of a larger one knows no expert axis."""
    matched = module_sharding.resolve(
        expert_keys(styles, mesh), [path for path, _ in module.named_modules()], "module"
    )[0]
    for layer in [layer for found in matched.values() for layer in found]:
        if mesh.ndim == 1 or layer not in units:
            raise PlanError(
                f"{layer or 'The module'} has ExpertParallel, so ranks along the last axis have different batches, and "
                f"gradients are reduced over both axes of a mesh. Fix: a mesh of 2 axes, such as "
                f"{(1, mesh.size()) if mesh.ndim == 1 else mesh.shape}, and the layer among `units`, before its parent."
            )


class LayerCost(NamedTuple):
    """The cost of a step of a layer of experts without its parameters at rest: seconds, and bytes kept for backward."""

    seconds: float
    bytes: float


class ExpertCosts(ModuleCosts):
    """The costs of a data axis with a part along which experts are sharded.

    Args:
        costs: of the data axis, without a tensor axis.
        ranks: number of ranks of the axis of experts.
    """

    def __init__(self, costs: ModuleCosts, module: nn.Module, ranks: int) -> None:
        vars(self).update(vars(costs))
        self.expert_mesh = Mesh((self.shape[0] // ranks, ranks), names=EXPERT_AXES)
        self._stacks = {name for names in expert_layers(module).values() for name in names}
        self._layer_of: dict[int, str] = {}
        nodes = self.graph.nodes
        for path in expert_layers(module):
            self._layer_of |= {i: path for i, node in enumerate(nodes) if f"{node.module}.".startswith(f"{path}.")}
        self._group = tuple(sorted(self.expert_mesh.axis_ranks(0, 0)))
        self._unit_bytes = defaultdict(float)
        for i, node in enumerate(nodes):
            if node.kind == PARAMETER:
                self._unit_bytes[self.unit(i)] += self._size(Value(i))
        last = {path: i for i, path in self._layer_of.items() if nodes[i].kind == OP}
        first = {i: path for path, i in last.items() if self.graph.first[i] == i}
        self._layers = {i: self._layer_cost(module.get_submodule(path), path) for i, path in first.items()}

    def _layer_cost(self, layer: nn.Module, path: str) -> LayerCost:
        """Run the layer on one simulated rank, forward and backward."""
        entering = [node for node in self.graph.nodes if node.kind == BOUNDARY and node.module == path]
        given = {node.name: node for node in entering if not node.is_output}
        calls = sum(node.is_output for node in entering) or 1
        clock = RankClock(self.expert_mesh, self.topology)
        with clock.running():
            own = without_values(layer)
            parallelize_module(own, self.expert_mesh["ep"], ExpertParallel(), src_data_rank=None)
            inputs = {name: _input_of(node) for name, node in given.items()}
            before = _held(clock)
            clock.restart()
            out = own(*[x for name, x in inputs.items() if name.isdecimal()],
                      **{name: x for name, x in inputs.items() if not name.isdecimal()})  # fmt: skip
            kept = _held(clock) - before
            needing = [x for x in (*inputs.values(), *own.parameters()) if x.requires_grad]
            if out.requires_grad:
                torch.autograd.grad(out, needing, torch.zeros_like(out), allow_unused=True)
            return LayerCost(calls * clock.seconds(), calls * kept)

    # ---- what differs from a data axis --------------------------------------------------------------------------

    def op(self, number: int, choice: Choice) -> float:
        if number not in self._layer_of:
            return super().op(number, choice)
        return self._layers[number].seconds if number in self._layers else 0.0

    def sum_of_gradients(self, value: Value, placement: Placement, consumers: int) -> float:
        return 0.0 if value.node in self._layer_of else super().sum_of_gradients(value, placement, consumers)

    def activation_memory(self, number: int, choice: Choice) -> float:
        if number not in self._layer_of:
            return super().activation_memory(number, choice)
        return self._layers[number].bytes if number in self._layers else 0.0

    def local_shape(self, value: Value, placement: Placement) -> tuple[int, ...]:
        shape = super().local_shape(value, placement)
        if self.graph.nodes[value.node].name not in self._stacks:
            return shape
        return chunk(shape[0], self.expert_mesh.shape[1])[0], *shape[1:]

    def unit(self, number: int) -> str:
        path = self._layer_of.get(number)
        return super().unit(number) if path is None else path

    def data_group(self, number: int) -> tuple[int, ...]:
        return self._group if number in self._layer_of else super().data_group(number)

    def stored(self, number: int, placement: Placement) -> tuple[Placement, float, str]:
        found = super().stored(number, placement)
        return (Shard(0), found[1], WHY) if self.graph.nodes[number].name in self._stacks else found


def _input_of(node: Node) -> Tensor:
    """A tensor as the input of a layer."""
    (result,) = node.results
    return torch.zeros(result.shape).to(result.dtype).requires_grad_(node.trains and result.dtype.is_floating_point)


def _held(clock: RankClock) -> int:
    """Bytes of all tensors of the rank."""
    return sum(block.size for block in clock.memory.blocks.values())
