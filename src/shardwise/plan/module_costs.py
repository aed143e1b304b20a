"""The costs of choices on a mesh: seconds of a step, and bytes of memory on the rank that has most.

Time is the sum of compute, redistributions in forward and backward, exchanges inside ops, the reduction of gradients
and the optimizer: nothing overlaps. A simulated rank runs each redistribution and each exchange once.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import inf, prod

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree

from shardwise._layout import REPLICATE, Layout, Mesh, Placement, Shard, chunk
from shardwise._redistribute.run_plan import redistribute_local
from shardwise._tensor.dispatch.resolve import SlottedCall
from shardwise._tensor.dtensor import DTensor, tag
from shardwise.errors import LayoutError, ShardwiseError
from shardwise.plan.module_choices import Choice, Units, all_choices, is_view, replicated
from shardwise.plan.module_trace import OP, PARAMETER, ModuleGraph, Node, Value
from shardwise.simulation.clock import RankClock
from shardwise.simulation.topology import Topology

BUCKET = 25 << 20  # bytes of gradients that are added along the tensor axis together


def unit_of(name: str) -> str:
    """The unit of `fully_shard` with a parameter: the outermost block, else the module itself."""
    parts = name.split(".")
    return next((".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()), "")


def _group(mesh: Mesh, axis: int) -> tuple[int, ...]:
    """The ranks along an axis through rank 0."""
    return tuple(sorted(mesh.axis_ranks(0, axis)))


class ModuleCosts:
    """The costs of choices on a tensor axis; known inside `with costs.clock.running()`.

    Args:
        graph: of a forward of the rank's part of the batch.
        shape: number of ranks of the data axis and of the tensor axis.
    """

    def __init__(self, graph: ModuleGraph, shape: tuple[int, int], topology: Topology) -> None:
        self.graph, self.shape = graph, shape
        self.choices = all_choices(graph) if shape[1] > 1 else [[replicated(node)] for node in graph.nodes]
        self.units = Units(graph, self.choices)
        self.topology = topology
        self.mesh = Mesh(shape[1:])
        self.clock = RankClock(self.mesh, topology)
        self._groups = [_group(Mesh(shape), axis) for axis in (0, 1)]
        self._unit_bytes: dict[str, float] = defaultdict(float)  # bytes sent together along the data axis
        for i, node in enumerate(graph.nodes):
            if node.kind == PARAMETER:
                self._unit_bytes[self.unit(i)] += self._size(Value(i))
        self._redistributions: dict[object, float] = {}
        self._ops: dict[object, float] = {}

    # ---- layouts ----------------------------------------------------------------------------------------------

    def layout(self, value: Value, placement: Placement) -> Layout:
        """The layout of a value with this placement on the tensor axis."""
        if isinstance(placement, Shard):
            placement = self.units.shard(value, placement.dim, self.shape[1])
        return Layout(self.mesh, [placement], self.graph.result(value).shape)

    def local_shape(self, value: Value, placement: Placement) -> tuple[int, ...]:
        """The shape of a value on rank 0, which has the largest."""
        return self.layout(value, placement).local_shape(self.mesh.ranks[0])

    def local_bytes(self, value: Value, placement: Placement) -> float:
        """Bytes of a value on rank 0."""
        return prod(self.local_shape(value, placement)) * self.graph.result(value).dtype.itemsize

    def _trains(self, value: Value) -> bool:
        """Whether a gradient passes a value; not for the indices of a topk."""
        return self.graph.nodes[value.node].trains and self.graph.result(value).dtype.is_floating_point

    # ---- time -------------------------------------------------------------------------------------------------

    def redistribution(self, value: Value, src: Placement, dst: Placement, is_result: bool = False) -> float:
        """Seconds from one placement to another on the tensor axis, and back for the gradient.

        A result of the module leaves it as a plain tensor, with the gradient on every rank.
        """
        if src == dst:
            return 0.0
        trains = self._trains(value) and not is_result
        dtype = self.graph.result(value).dtype
        try:
            a, b = self.layout(value, src), self.layout(value, dst)
        except LayoutError:
            return inf
        key = a, b, dtype, trains
        if key not in self._redistributions:
            seconds = self._seconds(a, b, dtype)
            self._redistributions[key] = seconds + (self._seconds(b.dual(), a.dual(), dtype) if trains else 0.0)
        return self._redistributions[key]

    def _seconds(self, src: Layout, dst: Layout, dtype: torch.dtype) -> float:
        with torch.no_grad():
            local = torch.zeros(src.local_shape(self.mesh.ranks[0]), dtype=dtype)
            self.clock.restart()
            redistribute_local(local, src, dst)
        return self.clock.seconds()

    def op(self, number: int, choice: Choice) -> float:
        """Seconds of an op, forward and backward, with its collectives; `inf` if it has no such choice."""
        node = self.graph.nodes[number]
        if node.kind != OP:
            return 0.0
        dtypes = tuple([self.graph.result(x).dtype for x in node.operands])
        try:
            layouts = [self.layout(x, p) for x, p in zip(node.operands, choice.inputs, strict=True)]
            trains = tuple(map(self._trains, node.operands))
            key = node.func, repr((node.args, node.kwargs)), tuple(layouts), dtypes, trains
            if key not in self._ops:
                results = [self.layout(Value(number, i), p) for i, p in enumerate(choice.outputs)]
                self._ops[key] = self._run(node, layouts, dtypes, results)
            return self._ops[key]
        except (RuntimeError, NotImplementedError, ShardwiseError):
            return inf

    def _run(
        self, node: Node, layouts: Sequence[Layout], dtypes: Sequence[torch.dtype], results: Sequence[Layout]
    ) -> float:
        """Seconds; `inf` if results have other shards, as those of a split of a sharded dim may."""
        operands = []
        for value, layout, dtype in zip(node.operands, layouts, dtypes, strict=True):
            x = torch.zeros(layout.local_shape(self.mesh.ranks[0]), dtype=dtype)
            if self.graph.nodes[value.node].of_parameters:
                x = torch.zeros(x.shape).to(dtype)  # without values, such as the indices of a topk
            operands.append(tag(x.requires_grad_(self._trains(value)), layout))
        call = SlottedCall(node.func, node.args, node.kwargs, list(zip(layouts, dtypes, strict=True)))
        self.clock.restart()
        out = call.of(node.func, operands)
        forward = self.clock.seconds()
        found = [x for x in pytree.tree_leaves(out) if isinstance(x, DTensor)]
        if [x._layout.row_major for x in found] != list(results):
            return inf
        trained = [x for x in found if x.requires_grad]
        with DisableTorchFunctionSubclass():  # gradients of local tensors, which nobody reads
            gradients: list[Tensor] = [torch.zeros_like(x) for x in trained]
            self.clock.restart()
            if trained:
                torch.autograd.grad(trained, [x for x in operands if x.requires_grad], gradients, allow_unused=True)
        return forward + self.clock.seconds()

    def sum_of_gradients(self, value: Value, placement: Placement, consumers: int) -> float:
        """Seconds of adding the gradients of all ops that read a value."""
        return 3 * max(consumers - 1, 0) * self.local_bytes(value, placement) / self.topology.memory_bandwidth

    # ---- parameters -------------------------------------------------------------------------------------------

    def parameter(self, number: int, placement: Placement, reshard: bool) -> float:
        """Seconds of all-gathering a parameter along the data axis, of reducing its gradient, and of AdamW."""
        node, value = self.graph.nodes[number], Value(number)
        size, at_rest = self.local_bytes(value, placement), self.at_rest(number, placement)
        if not (node.trains and size):
            return 0.0
        group = self.data_group(number)
        touched = 4 * at_rest  # with the gradient and two states
        seconds = 0.0
        if len(group) > 1:
            share, gathers = self._size(value) / self._unit_bytes[self.unit(number)], 1 + reshard
            seconds += gathers * self._collective("all_gather", group, size - at_rest, share)
            seconds += self._collective("reduce_scatter", group, (len(group) - 1) * at_rest, share)
            touched += 2 * (gathers + 1) * size + 4 * at_rest  # messages are packed, unpacked and divided
        if placement == REPLICATE and self.shape[1] > 1:
            received = 2 * at_rest * (self.shape[1] - 1) / self.shape[1]
            seconds += self._collective("all_reduce", self._groups[1], received, at_rest / BUCKET)
        return seconds + touched / self.topology.memory_bandwidth

    def unit(self, number: int) -> str:
        """The unit of `fully_shard` with a parameter."""
        return unit_of(self.graph.nodes[number].name)

    def data_group(self, number: int) -> tuple[int, ...]:
        """The ranks over which `fully_shard` shards a parameter."""
        return self._groups[0]

    def at_rest(self, number: int, placement: Placement) -> float:
        """Bytes of a parameter on rank 0 between steps: `fully_shard` divides its first dim, of which rank 0 has most.

        For few rows on many ranks that exceeds an equal part, and messages are as long.
        """
        value = Value(number)
        shape = self.local_shape(value, placement)
        rows = chunk(shape[0], len(self.data_group(number)))[0] if shape else 1
        return rows * prod(shape[1:]) * self.graph.result(value).dtype.itemsize

    def stored(self, number: int, placement: Placement) -> tuple[Placement, float, str]:
        """The placement of a parameter, its bytes on a rank, and the reason; "" if its ops give it."""
        return placement, self.at_rest(number, placement), ""

    def _collective(self, kind: str, group: tuple[int, ...], received: float, share: float) -> float:
        """Seconds of a collective in which a rank receives so many bytes, as a part of a message."""
        ranks = range(self.shape[0] * self.shape[1])
        return self.topology.costs.seconds(kind, group, ranks, received / share) * share if share else 0.0

    def _size(self, value: Value) -> float:
        """Bytes of a value on all ranks."""
        result = self.graph.result(value)
        return prod(result.shape) * result.dtype.itemsize

    # ---- memory -----------------------------------------------------------------------------------------------

    def state_memory(self, number: int, placement: Placement, reshard: bool) -> float:
        """Bytes of a parameter, its gradient and two states of AdamW, sharded along the data axis.

        Parameters that are not resharded after forward also take their full size.
        """
        gathered = len(self.data_group(number)) > 1 and not reshard
        size = self.local_bytes(Value(number), placement) if gathered else 0.0
        return (4 if self.graph.nodes[number].trains else 1) * self.at_rest(number, placement) + size

    def activation_memory(self, number: int, choice: Choice) -> float:
        """Bytes of an op's results that are kept for backward."""
        node = self.graph.nodes[number]
        if node.kind != OP or not node.trains or is_view(node):
            return 0.0
        return sum(self.local_bytes(Value(number, i), p) for i, p in enumerate(choice.outputs))
