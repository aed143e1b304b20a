"""What choices cost on a mesh: seconds of a step, and bytes of memory on the rank that has most.

Time is compute, redistributions in forward and backward, exchanges inside ops, the reduction of gradients and the
optimizer, one after the other: nothing overlaps. Redistributions are those that `planned` finds.
"""

from dataclasses import dataclass
from math import inf, prod

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise._collectives import using
from shardwise._layout import REPLICATE, Layout, Mesh, Placement, Shard
from shardwise._redistribute.plan import planned
from shardwise._tensor.dispatch.resolve import Operand, SlottedCall
from shardwise._tensor.dtensor import DTensor, tag
from shardwise._trace.comm_trace import listening_with
from shardwise.errors import LayoutError
from shardwise.plan.module_choices import Choice, Units, data_choices, is_view
from shardwise.plan.module_trace import OP, ModuleGraph, Node, Value, flops_of
from shardwise.plan.topology import Topology
from shardwise.simulation.memory import Memory
from shardwise.simulation.one_rank import OneRank
from shardwise.simulation.result import Recorded

BUCKET = 25 << 20  # bytes of gradients, or of parameters, that are sent together
BACKWARD = 2.0  # the time of the backward of an op, by that of its forward


@dataclass(frozen=True)
class Training:
    """How parameters are trained.

    Args:
        state_bytes: of the states of the optimizer, for each element; AdamW in float32 has 8.
        fully_shard: whether parameters, gradients and states are sharded along the data axis.
    """

    state_bytes: int = 8
    fully_shard: bool = False


class ModuleCosts:
    """The costs of choices on a mesh of the data axis and the tensor axis."""

    def __init__(
        self, graph: ModuleGraph, units: Units, data: list[Choice], mesh: Mesh, topology: Topology, training: Training
    ) -> None:
        self.graph, self.units, self.data = graph, units, data
        self.mesh, self.topology, self.training = mesh, topology, training
        self.costs = topology.costs
        self._redistributions: dict[object, float] = {}
        self._exchanges: dict[object, float] = {}

    # ---- layouts ----------------------------------------------------------------------------------------------

    def layout(self, value: Value, placement: Placement) -> Layout:
        """The layout of a value with this placement on the tensor axis."""
        along_data = self.data[value.node].outputs[value.result]
        shape = self.graph.result(value).shape
        if isinstance(placement, Shard) and along_data != placement:
            placement = self.units.shard(value, placement.dim, self.mesh.shape[1])
        return Layout(self.mesh, [along_data, placement], shape)

    def share(self, value: Value, placement: Placement, axis: int) -> float:
        """The part of a value, along an axis, on the rank that has most."""
        if not isinstance(placement, Shard):
            return 1.0
        length = self.graph.result(value).shape[placement.dim]
        count = length // (self.units.size(value, placement.dim) if axis else 1)
        return -(-count // self.mesh.shape[axis]) / max(count, 1)

    def local_bytes(self, value: Value, placement: Placement) -> float:
        """Bytes of a value on the rank that has most."""
        shape, dtype = self.graph.result(value)
        along_data = self.data[value.node].outputs[value.result]
        return prod(shape) * dtype.itemsize * self.share(value, placement, 1) * self.share(value, along_data, 0)

    # ---- time -------------------------------------------------------------------------------------------------

    def redistribution(self, value: Value, src: Placement, dst: Placement) -> float:
        """Seconds from one placement to another on the tensor axis, and of the gradient's way back."""
        if src == dst:
            return 0.0
        trains = self.graph.nodes[value.node].trains
        shape, dtype = self.graph.result(value)
        key = shape, dtype, self.data[value.node].outputs[value.result], trains, src, dst, self._units_of(value, src, dst)
        if key not in self._redistributions:
            try:
                a, b = self.layout(value, src), self.layout(value, dst)
                seconds = self._seconds(a, b, dtype.itemsize)
                seconds += self._seconds(b.dual(), a.dual(), dtype.itemsize) if trains else 0.0
            except LayoutError:
                seconds = inf
            self._redistributions[key] = seconds
        return self._redistributions[key]

    def _units_of(self, value: Value, *placements: Placement) -> tuple[int, ...]:
        return tuple([self.units.size(value, p.dim) for p in placements if isinstance(p, Shard)])

    def _seconds(self, src: Layout, dst: Layout, itemsize: int) -> float:
        found = 0.0
        for step in planned(src, dst, self.costs).comm_steps:
            if not step.is_local:
                group = step.group(self.mesh.ranks[0])
                size = itemsize * step.received.busiest
                found += self.costs.seconds(step.collective, group, self.mesh.sorted_ranks, size)
        return found

    def compute(self, number: int, choice: Choice) -> float:
        """Seconds of an op, forward and backward, without its exchanges."""
        node = self.graph.nodes[number]
        if node.kind != OP or is_view(node):
            return 0.0
        values = [*node.operands, *(Value(number, i) for i in range(len(node.results)))]
        data = self.data[number]
        part = min((self.share(x, p, 1) for x, p in zip(values, (*choice.inputs, *choice.outputs), strict=True)),
                   default=1.0)  # fmt: skip
        part *= min((self.share(x, p, 0) for x, p in zip(values, (*data.inputs, *data.outputs), strict=True)),
                    default=1.0)  # fmt: skip
        touched = sum(self.local_bytes(x, p) for x, p in zip(values, (*choice.inputs, *choice.outputs), strict=True))
        rounds = 1 + BACKWARD * node.trains
        return rounds * max(flops_of(self.graph, node) * part / self.topology.flops,
                            touched / self.topology.memory_bandwidth)  # fmt: skip

    def exchange(self, number: int, choice: Choice) -> float:
        """Seconds of the collectives inside an op, forward and backward, which a simulated rank makes."""
        node = self.graph.nodes[number]
        if not choice.sends:
            return 0.0
        layouts = [self.layout(x, p) for x, p in zip(node.operands, choice.inputs, strict=True)]
        dtypes = [self.graph.result(x).dtype for x in node.operands]
        key = node.func, repr((node.args, node.kwargs)), tuple(layouts), tuple(dtypes)
        if key not in self._exchanges:
            self._exchanges[key] = self._run(node, layouts, dtypes)
        return self._exchanges[key]

    def _run(self, node: Node, layouts: list[Layout], dtypes: list[torch.dtype]) -> float:
        recorded, rank = Recorded(), self.mesh.ranks[0]
        here = OneRank(rank, self.mesh.size(), recorded)
        here.owner.costs[self.mesh.device_type] = self.costs
        with using(here), Memory(allocate=False), torch.autograd.set_multithreading_enabled(False):
            operands = []
            for layout, dtype in zip(layouts, dtypes, strict=True):
                x = torch.zeros(layout.local_shape(rank), dtype=dtype)
                operands.append(tag(x.requires_grad_(node.trains and dtype.is_floating_point), layout))
            call = SlottedCall(node.func, node.args, node.kwargs, [Operand(*x) for x in zip(layouts, dtypes, strict=True)])
            with listening_with(recorded):
                out = call.of(node.func, operands)
                trained = [x for x in pytree.tree_leaves(out) if isinstance(x, DTensor) and x.requires_grad]
                if trained:
                    gradients: list[Tensor] = [torch.ones_like(x) for x in trained]
                    torch.autograd.grad(trained, [x for x in operands if x.requires_grad], gradients, allow_unused=True)
        return sum(
            self.costs.seconds(one.kind, one.ranks, self.mesh.sorted_ranks, one.received_bytes)
            for one in recorded.collectives
        )

    # ---- parameters -------------------------------------------------------------------------------------------

    def parameter(self, number: int, placement: Placement) -> float:
        """Seconds of reducing the gradient of a parameter, of all-gathering it if it is fully sharded, and of AdamW."""
        node, value = self.graph.nodes[number], Value(number)
        if not node.trains:
            return 0.0
        size, at_rest = self.local_bytes(value, placement), self.local_bytes(value, placement) * self._at_rest
        elements = at_rest / node.results[0].dtype.itemsize
        touched = 3 * at_rest + 2 * elements * self.training.state_bytes
        found = touched / self.topology.memory_bandwidth
        axes = [0] * (self.mesh.shape[0] > 1) + [1] * (placement == REPLICATE and self.mesh.shape[1] > 1)
        if self.training.fully_shard and 0 in axes:
            found += 2 * self._collective("all_gather", [0], size) + self._collective("reduce_scatter", [0], size)
            size, axes = at_rest, axes[1:]
        return found + self._collective("all_reduce", axes, size)

    @property
    def _at_rest(self) -> float:
        return 1 / self.mesh.shape[0] if self.training.fully_shard else 1.0

    def _collective(self, kind: str, axes: list[int], size: float) -> float:
        """Seconds of a collective along axes of `size` bytes, as a part of a bucket."""
        if not axes or not size:
            return 0.0
        group = self.mesh.sorted_ranks if len(axes) == self.mesh.ndim else tuple(sorted(self.mesh.axis_ranks(0, axes[0])))
        received = BUCKET * (len(group) - 1) / len(group) * (2 if kind == "all_reduce" else 1)
        return self.costs.seconds(kind, group, self.mesh.sorted_ranks, received) * size / BUCKET

    # ---- memory -----------------------------------------------------------------------------------------------

    def state_memory(self, number: int, placement: Placement) -> float:
        """Bytes of a parameter, its gradient and its optimizer states."""
        node, size = self.graph.nodes[number], self.local_bytes(Value(number), placement) * self._at_rest
        return size * (2 + self.training.state_bytes / node.results[0].dtype.itemsize) if node.trains else size

    def activation_memory(self, number: int, choice: Choice) -> float:
        """Bytes of the results of an op that are kept for backward."""
        node = self.graph.nodes[number]
        if node.kind != OP or not node.trains or is_view(node):
            return 0.0
        return sum(self.local_bytes(Value(number, i), p) for i, p in enumerate(choice.outputs))


__all__ = ["ModuleCosts", "Training", "data_choices"]
