"""The choices of each node of a graph along the tensor axis: the rows of its rule, or the placements of a parameter.

The data axis has no choices. Inputs are `Shard(0)` on it, parameters `Replicate`, and each op runs by the row that fits
what its operands are.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from math import gcd

from shardwise._layout import PARTIAL, REPLICATE, Layout, Mesh, Placement, Shard, chunk
from shardwise._tensor.dispatch.dispatcher import entry_of
from shardwise._tensor.dispatch.resolve import SlottedCall
from shardwise.errors import ShardwiseError
from shardwise.plan.module_trace import BOUNDARY, BUFFER, INPUT, OP, PARAMETER, ModuleGraph, Node, Value

ONE_RANK = Mesh((1,))


@dataclass(frozen=True)
class Choice:
    """One way to run a node along an axis.

    Attributes:
        inputs: the placements that its operands get.
        outputs: those of its results.
        why: the reason of the row.
        alignment: shard offsets of operands are multiples of it.
        maps: whether a sharded dim of a result has another size than that of its operand, in proportion.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    why: str = ""
    alignment: int = 1
    maps: bool = False


def replicated(node: Node) -> Choice:
    return Choice((REPLICATE,) * len(node.operands), (REPLICATE,) * len(node.results), "every rank has everything")


def choices_of(graph: ModuleGraph, node: Node) -> list[Choice]:
    """The choices of a node along the tensor axis, that of replicated operands first."""
    found = [replicated(node)]
    if not node.of_parameters:  # made of plain tensors, which every rank has
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
    """The rows of the rule of an op, with placements that shards of parameters can lead to."""
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


# ---- the data axis --------------------------------------------------------------------------------------------------


def data_choices(graph: ModuleGraph, rows: Collection[int]) -> list[Choice]:
    """For each node how it runs along the data axis, if inputs with so many rows are sharded."""
    found: list[Choice] = []
    for node in graph.nodes:
        if node.kind in (PARAMETER, BUFFER, INPUT):
            shape = node.results[0].shape
            sharded = node.kind == INPUT and shape and shape[0] in rows
            found.append(Choice((), (Shard(0) if sharded else REPLICATE,)))
            continue
        have = [found[x.node].outputs[x.result] for x in node.operands]
        if node.kind == BOUNDARY:
            found.append(Choice(tuple(have), tuple(have)))
            continue
        ways = [replicated(node), *rows_of(graph, node)]
        found.append(max(ways, key=lambda way: [p == q for p, q in zip(way.inputs, have, strict=True)].count(True)))
    return found


# ---- units ----------------------------------------------------------------------------------------------------------


class Units:
    """Into how many equal units each dim may be divided, such as the heads of a projection.

    Dims that some row shards together have one number of units: the greatest common divisor of what each allows. A
    view of 4,096 features as 32 heads allows 32, and so do the weights that make the features.
    """

    def __init__(self, graph: ModuleGraph, choices: list[list[Choice]]) -> None:
        self._above: dict[tuple[Value, int], tuple[Value, int]] = {}
        self._count: dict[tuple[Value, int], int] = defaultdict(int)
        self._graph = graph
        allowed: list[tuple[tuple[Value, int], int]] = []
        for number, (node, own) in enumerate(zip(graph.nodes, choices, strict=True)):
            results = [Value(number, i) for i in range(len(node.results))]
            for choice in own:
                dims = [(x, p.dim % len(graph.result(x).shape)) for x, p in
                        zip((*node.operands, *results), (*choice.inputs, *choice.outputs), strict=True)
                        if isinstance(p, Shard) and graph.result(x).shape]  # fmt: skip
                sizes = [graph.result(x).shape[d] for x, d in dims]
                for dim, size in zip(dims[1:], sizes[1:], strict=True):
                    if size == sizes[0] or choice.maps or dim[0] in node.operands:
                        self._join(dims[0], dim)
                for (x, d) in dims:
                    size = graph.result(x).shape[d]
                    unit = choice.alignment if x in node.operands and size % choice.alignment == 0 else 1
                    allowed.append(((x, d), size // unit))
        for dim, count in allowed:
            top = self._top(dim)
            self._count[top] = gcd(self._count[top], count)

    def _top(self, dim: tuple[Value, int]) -> tuple[Value, int]:
        while dim in self._above:
            dim = self._above[dim]
        return dim

    def _join(self, a: tuple[Value, int], b: tuple[Value, int]) -> None:
        a, b = self._top(a), self._top(b)
        if a != b:
            self._above[a] = b

    def size(self, value: Value, dim: int) -> int:
        """The elements of one unit along a dim."""
        length = self._graph.result(value).shape[dim]
        count = self._count.get(self._top((value, dim)), 0)
        return length // count if count and length % count == 0 else 1

    def shard(self, value: Value, dim: int, ranks: int) -> Shard:
        """The placement that keeps units together."""
        dim %= len(self._graph.result(value).shape)
        unit, length = self.size(value, dim), self._graph.result(value).shape[dim]
        return Shard(dim, tuple([n * unit for n in chunk(length // unit, ranks)])) if unit > 1 else Shard(dim)
