"""The choices of each node of a graph on the tensor axis: the rows of its rule, or the placements of a parameter."""

from collections import defaultdict
from dataclasses import dataclass
from math import gcd

from shardwise._layout import PARTIAL, REPLICATE, Layout, Mesh, Placement, Shard, chunk
from shardwise._tensor.dispatch.dispatcher import entry_of
from shardwise._tensor.dispatch.resolve import SlottedCall
from shardwise.errors import ShardwiseError
from shardwise.plan.module_trace import BOUNDARY, OP, PARAMETER, ModuleGraph, Node, Value

ONE_RANK = Mesh((1,))


@dataclass(frozen=True)
class Choice:
    """One way to run a node along an axis.

    Attributes:
        inputs: the placements of its operands.
        outputs: the placements of its results.
        why: the reason of the row.
        alignment: shard offsets of operands are multiples of this.
        maps: whether a sharded dim of a result differs in size from the operand's, in proportion.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    why: str = ""
    alignment: int = 1
    maps: bool = False


def replicated(node: Node) -> Choice:
    return Choice((REPLICATE,) * len(node.operands), (REPLICATE,) * len(node.results), "every rank has everything")


def all_choices(graph: ModuleGraph) -> list[list[Choice]]:
    """The choices of each node along the tensor axis; the choice of replicated operands comes first."""
    found: list[list[Choice]] = []
    for number, node in enumerate(graph.nodes):
        first = graph.first[number]
        found.append(found[first] if first < number else _choices_of(graph, node))
    return found


def _choices_of(graph: ModuleGraph, node: Node) -> list[Choice]:
    found = [replicated(node)]
    if not node.of_parameters:  # made of plain tensors, which are equal on every rank
        return found
    shape = node.results[0].shape
    shards = [Shard(dim) for dim, n in enumerate(shape) if n > 1]
    if node.kind == PARAMETER:
        return found + [Choice((), (p,)) for p in shards]
    if node.kind == BOUNDARY:
        return found + [Choice((p,), (p,)) for p in (*shards, PARTIAL)]
    rows = rows_of(graph, node)
    if node.name == "embedding":  # styles of tables replicate ids
        rows = [row for row in rows if row.inputs[0] == REPLICATE]
    return list(dict.fromkeys([*found, *rows]))


def rows_of(graph: ModuleGraph, node: Node) -> list[Choice]:
    """The rows of the rule of an op, with placements that sharded parameters can lead to."""
    rule, layouts = entry_of(node.func), []
    for value in node.operands:
        result = graph.result(value)
        layouts.append((Layout(ONE_RANK, [REPLICATE], result.shape), result.dtype))
    call = SlottedCall(node.func, node.args, node.kwargs, layouts)
    try:
        rows = call.of(rule.rows, call.metas)
    except (NotImplementedError, RuntimeError, ShardwiseError):
        return []
    found = []
    for row in rows:
        outputs = row.output if isinstance(row.output, tuple) else (row.output,) * len(node.results)
        if len(outputs) == len(node.results) and all(_is_usual(p) for p in (*row.inputs, *outputs)):
            found.append(Choice(row.inputs, outputs, row.why, row.alignment, row.map_index is not None))
    return found


def _is_usual(placement: Placement) -> bool:
    return placement in (REPLICATE, PARTIAL) or (isinstance(placement, Shard) and placement.sizes is None)


def is_view(node: Node) -> bool:
    return node.kind == BOUNDARY or (node.kind == OP and entry_of(node.func).view)


# ---- units ----------------------------------------------------------------------------------------------------------


Dim = tuple[Value, int]


def _have_units(a: int, b: int, of_operands: bool) -> bool:
    """Whether dims of two lengths have common units: heads and keys do, tokens and five experts do not."""
    return a == b or (of_operands and not max(a, b) % max(min(a, b), 1))


class Units:
    """The number of equal units into which each dim may be divided, such as the heads of a projection.

    Dims that a row shards together have one number of units: the greatest common divisor of their own. A view of 4,096
    features as 32 heads allows 32, and so do the weights that make the features.
    """

    def __init__(self, graph: ModuleGraph, choices: list[list[Choice]]) -> None:
        self._above: dict[Dim, Dim] = {}
        self._count: dict[Dim, int] = defaultdict(int)
        self._graph = graph
        allowed: list[tuple[Dim, int]] = []
        for number, node in enumerate(graph.nodes):
            if graph.first[number] == number:
                for choice in choices[number]:
                    allowed += self._join_dims_of(number, node, choice)
        for dim, count in allowed:
            top = self._top(dim)
            self._count[top] = gcd(self._count[top], count)

    def _join_dims_of(self, number: int, node: Node, choice: Choice) -> list[tuple[Dim, int]]:
        """Join the dims that a row shards; the number of units that each of them allows."""
        found: list[tuple[Dim, int]] = []
        results = [Value(number, i) for i in range(len(node.results))]
        placements = zip((*node.operands, *results), (*choice.inputs, *choice.outputs), strict=True)
        for position, (value, placement) in enumerate(placements):
            shape = self._graph.result(value).shape
            if isinstance(placement, Shard) and shape:
                size, is_operand = shape[placement.dim], position < len(node.operands)
                unit = choice.alignment if is_operand and size % choice.alignment == 0 else 1
                dim = self._shared(value), placement.dim % len(shape)
                if found and (choice.maps or _have_units(size, self._length(found[0][0]), is_operand)):
                    self._join(found[0][0], dim)
                found.append((dim, size // unit))
        return found

    def _shared(self, value: Value) -> Value:
        return Value(self._graph.first[value.node], value.result)

    def _length(self, dim: Dim) -> int:
        return self._graph.result(dim[0]).shape[dim[1]]

    def _top(self, dim: Dim) -> Dim:
        while dim in self._above:
            dim = self._above[dim]
        return dim

    def _join(self, a: Dim, b: Dim) -> None:
        a, b = self._top(a), self._top(b)
        if a != b:
            self._above[a] = b

    def size(self, value: Value, dim: int) -> int:
        """The elements of one unit along a dim."""
        length = self._graph.result(value).shape[dim]
        count = self._count.get(self._top((self._shared(value), dim)), 0)
        return length // count if count and length % count == 0 else 1

    def shard(self, value: Value, dim: int, ranks: int) -> Shard:
        """The placement that keeps units together."""
        dim %= len(self._graph.result(value).shape)
        unit, length = self.size(value, dim), self._graph.result(value).shape[dim]
        return Shard(dim, tuple([n * unit for n in chunk(length // unit, ranks)])) if unit > 1 else Shard(dim)
