"""The graph of a forward: its ops, and the modules that contain them.

A copy of the module without values runs once on one simulated rank, on replicated DTensors. A hook of the dispatcher
sees each op that runs by a rule, so the graph has the ops for which dispatch finds rows at run time.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree

from shardwise._collectives import using
from shardwise._layout import Mesh
from shardwise._rules.registry import no_rows
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor.dispatch.hooks import Proceed, hook_calls
from shardwise._tensor.dispatch.resolve import Slot
from shardwise._tensor.dtensor import DTensor, name_of, tag
from shardwise.parallel.shard_module import shard_module
from shardwise.simulation.api import without_values
from shardwise.simulation.memory import Memory, tensors_in
from shardwise.simulation.one_rank import OneRank
from shardwise.simulation.result import Recorded

INPUT, PARAMETER, BUFFER, OP, BOUNDARY = "input", "parameter", "buffer", "op", "boundary"
Step = Callable[[nn.Module], object]  # a forward, and the loss if there is one


class Result(NamedTuple):
    """A tensor that a node makes."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Value(NamedTuple):
    """A result of a node, by the indices of both."""

    node: int
    result: int = 0


@dataclass
class Node:
    """An op with its results, or a tensor that no op made.

    Attributes:
        kind: INPUT, PARAMETER, BUFFER, OP, or BOUNDARY: a tensor that enters or leaves a module.
        name: of a parameter; of an op's function; or the position or name of a boundary's argument.
        module: the path of the module that makes it.
        results: the tensors that it makes.
        operands: the values that it reads.
        args, kwargs: of the op, with a `Slot` for each operand.
        is_output: whether a boundary leaves its module.
        trains: whether a gradient passes it.
        of_parameters: whether it depends on a parameter.
    """

    kind: str
    name: str
    module: str
    results: tuple[Result, ...]
    operands: tuple[Value, ...] = ()
    func: Op = no_rows
    args: Args = ()
    kwargs: Kwargs = field(default_factory=dict)
    is_output: bool = False
    trains: bool = False
    of_parameters: bool = False


@dataclass
class ModuleGraph:
    """The nodes of a step in the order of its ops.

    Attributes:
        outputs: the values that the step returns.
        returns_tensor: whether the step returns the tensor that the module returns.
        names: all names of each parameter; its node has the first.
        leaves: paths of the modules without children.
        first: for each node the first node that shares its choice.
    """

    nodes: list[Node]
    outputs: list[Value]
    returns_tensor: bool
    names: dict[str, list[str]]
    leaves: set[str]
    first: list[int]

    def result(self, value: Value) -> Result:
        return self.nodes[value.node].results[value.result]


def trace_module(module: nn.Module, step: Step) -> ModuleGraph:
    """The graph of `step` on a copy of the module; nothing is allocated."""
    state = torch.get_rng_state()
    try:
        with using(OneRank(0, 1, Recorded())), Memory(allocate=False):
            model = shard_module(without_values(module), {}, mesh=Mesh((1,)), src_rank=None)
            tracer = _Tracer(model)
            tracer.follow_modules(model)
            with hook_calls(tracer.call):
                out = step(model)
            outputs = [tracer.value(x) for x in pytree.tree_leaves(out) if isinstance(x, DTensor)]
    finally:
        torch.set_rng_state(state)
    leaves = {path for path, part in model.named_modules() if not list(part.children())}
    returns_tensor = outputs == [tracer.returned]
    return ModuleGraph(tracer.nodes, outputs, returns_tensor, tracer.names, leaves, _shared(tracer.nodes))


class _Tracer:
    """Records nodes while the step runs."""

    def __init__(self, model: nn.Module) -> None:
        self.nodes: list[Node] = []
        self.names: dict[str, list[str]] = {}
        self.returned: Value | None = None  # the module's result
        self._known: dict[int, Value] = {}  # values by the id of their tensor
        self._kept: list[object] = []  # tensors that stay alive, so no id is used twice
        self._paths = {id(part): path for path, part in model.named_modules()}
        self._stack = [""]
        first: dict[int, str] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(first.setdefault(id(p), name), []).append(name)
        by_name = dict(model.named_parameters())
        for name in self.names:
            p = by_name[name]
            self._add(Node(PARAMETER, name, name.rpartition(".")[0], (), trains=p.requires_grad, of_parameters=True), p)
        for name, b in model.named_buffers():
            self._add(Node(BUFFER, name, name.rpartition(".")[0], ()), b)

    def _add(self, node: Node, *results: Tensor) -> None:
        with DisableTorchFunctionSubclass():  # on one rank local shapes are global ones
            node.results = tuple([Result(tuple(x.shape), x.dtype) for x in results])
        for i, x in enumerate(results):
            self._known[id(x)] = Value(len(self.nodes), i)
        self._kept += results
        self.nodes.append(node)

    def value(self, x: Tensor) -> Value:
        """The value of a tensor; one that no op made is an input."""
        if id(x) not in self._known:
            self._add(Node(INPUT, "", self._stack[-1], ()), x)
        return self._known[id(x)]

    # ---- ops --------------------------------------------------------------------------------------------------

    def call(self, proceed: Proceed, func: Op, args: Args, kwargs: Kwargs) -> object:
        """Record a call, unless ops inside it were recorded, or it returns a known value."""
        before = len(self.nodes)
        out = proceed()
        results = [x for x in tensors_in([out]) if isinstance(x, DTensor)]
        in_place = bool(results) and bool(args) and results[0] is args[0]
        made_inside = any(node.kind == OP for node in self.nodes[before:])
        if results and not made_inside and (not any(id(x) in self._known for x in results) or _writes(func, in_place)):
            self._note(func, args, kwargs, results)
        return out

    def _note(self, func: Op, args: Args, kwargs: Kwargs, results: list[Any]) -> None:
        operands: list[Value] = []

        def slot(x: object) -> object:
            if isinstance(x, Tensor):
                operands.append(self.value(x))
                return Slot(len(operands) - 1)
            return type(x)([slot(y) for y in x]) if isinstance(x, list | tuple) else x

        slotted, named = tuple(map(slot, args)), {k: slot(x) for k, x in kwargs.items()}
        sources = [self.nodes[x.node] for x in operands]
        trains = any(x.trains for x in sources) and results[0].dtype.is_floating_point
        of_parameters = any(x.of_parameters for x in sources)
        node = Node(
            OP, name_of(func), self._stack[-1], (), tuple(operands), func, slotted, named, False, trains, of_parameters
        )
        self._add(node, *results)

    # ---- modules ----------------------------------------------------------------------------------------------

    def follow_modules(self, model: nn.Module) -> None:
        """Record which module runs, and give tensors that enter and leave modules their own nodes."""
        for module in model.modules():
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        self._stack.append(self._paths[id(module)])
        if not self._stack[-1] or not list(module.children()):
            return None
        entered = tuple([self._boundary(x, str(i), False) for i, x in enumerate(args)])
        return entered, {name: self._boundary(x, name, False) for name, x in kwargs.items()}

    def _leave(self, module: nn.Module, args: Args, out: object) -> object:
        result = self._boundary(out, "", True) if self._stack[-1] else out
        self._stack.pop()
        self.returned = self.value(result) if isinstance(result, DTensor) else None
        return result

    def _boundary(self, x: object, name: str, is_output: bool) -> object:
        """A new object for the tensor, whose node is a boundary."""
        if not isinstance(x, DTensor):
            return x
        source = self.value(x)
        node = self.nodes[source.node]
        if not node.of_parameters or (is_output and node.kind == BOUNDARY):
            return x
        with DisableTorchFunctionSubclass():
            alias = x.view_as(x)
        self._add(
            Node(BOUNDARY, name, self._stack[-1], (), (source,), is_output=is_output, trains=node.trains,
                 of_parameters=True), tag(alias, x._layout)
        )  # fmt: skip
        return alias


def _writes(func: Op, in_place: bool) -> bool:
    return in_place and getattr(func, "__name__", "").endswith("_") and func is not Tensor.requires_grad_


# ---- repeated blocks ------------------------------------------------------------------------------------------------


def _shared(nodes: list[Node]) -> list[int]:
    """For each node the first node that shares its choice.

    Blocks are children of a list of modules. Blocks that run the same ops on the same shapes share the choices of all
    their nodes.
    """
    blocks: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, node in enumerate(nodes):
        parts = node.module.split(".")
        for depth, part in enumerate(parts):
            if part.isdigit():
                blocks[".".join(parts[:depth]), part].append(number)
    first = list(range(len(nodes)))
    known: dict[object, list[int]] = {}
    for (parent, _), numbers in blocks.items():
        same = known.setdefault((parent, _signature(nodes, numbers)), numbers)
        for number, model in zip(numbers, same, strict=True):
            first[number] = min(first[number], first[model])
    return first


def _signature(nodes: list[Node], numbers: list[int]) -> object:
    inside = {number: position for position, number in enumerate(numbers)}
    return tuple(
        (node.kind, node.func, tuple(node.results), repr(node.args), repr(node.kwargs), node.is_output,
         tuple([(inside.get(x.node, -1), x.result, nodes[x.node].results[x.result]) for x in node.operands]))
        for node in (nodes[number] for number in numbers)
    )  # fmt: skip
