"""The FX graphs of forward and backward that a trace is partitioned into, and the functions that run them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DisableTorchFunctionSubclass

from shardwise._graph_capture.tracer import Tracer, getitem, with_autocast

Backend = str | Callable[..., Any]
Nodes = Sequence[fx.Node | None]

aten = torch.ops.aten
_methods, _functions = torch._C.TensorBase, torch._C._VariableFunctions

RESHAPES = (aten.view.default, aten._unsafe_view.default)
VIEWS = (*RESHAPES, aten.t.default, aten.transpose.int, aten.expand.default)

# Python bindings with the same arguments as the op; they cost half of a call by schema.
BINDINGS: dict[Any, Callable[..., Any]] = {
    op: getattr(owner, op.overloadpacket.__name__.removeprefix("_unsafe_"))
    for owner, ops in (
        (_methods, (*VIEWS, aten.unsqueeze.default, aten.permute.default, aten.add_.Tensor, aten.copy_.default)),
        (_functions, (
            aten.clone.default, aten.mm.default, aten.bmm.default, aten.addmm.default, aten.add.Tensor, aten.mul.Tensor,
            aten.sub.Tensor, aten.sum.dim_IntList, aten.cat.default, aten.native_layer_norm.default,
            aten.embedding.default, aten.where.self, aten.exp.default,
        )),
    )
    for op in ops
}  # fmt: skip


@dataclass(frozen=True)
class Graphs:
    """A captured step. Both graphs take local tensors, and run no Python of this library except opaque calls.

    Attributes:
        forward: from all graph inputs to the outputs, followed by intermediate values saved for backward.
        backward: from the saved values and a cotangent for each differentiable output to a gradient, or None, for each
            graph input; None if forward ran without grad.
        run_forward, run_backward: their functions, compiled if there is a backend.
        lifted: graph inputs that are not arguments (parameters, buffers, constants); they follow the arguments.
        num_outputs: number of the results of `forward` that are outputs.
        saved: for each value saved for backward its position among the graph inputs, or None if `forward` returns it.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    run_forward: Callable[..., tuple[Any, ...]]
    run_backward: Callable[..., tuple[Any, ...]] | None
    lifted: tuple[Tensor, ...]
    num_outputs: int
    saved: tuple[int | None, ...]


def remove_redundant_views(graph: fx.Graph, outputs: Nodes) -> dict[fx.Node, fx.Node]:
    """Replace the uses of `x.t().t()`, of repeated views, and of views to the same shape.

    Args:
        outputs: views that users of a replay get as tensors; kept.

    Returns:
        Each redundant view with its replacement.
    """
    replaced: dict[fx.Node, fx.Node] = {}
    first: dict[Any, fx.Node] = {}
    for call in graph.nodes:
        if call.target not in VIEWS or call in outputs:
            continue
        base = call.args[0]
        if call.target is aten.t.default and base.target is aten.t.default:
            other = base.args[0]
        elif call.target in RESHAPES and base.meta.get("shape", ()) == call.meta["shape"] != ():
            other = base
        else:
            other = first.setdefault((call.target, base, str(call.args[1:])), call)
        if other is not call:
            replaced[call] = other
            call.replace_all_uses_with(other)
    return replaced


def partition(
    tracer: Tracer,
    outputs: Nodes,
    last_forward: fx.Node | None,
    cotangents: Sequence[fx.Node],
    gradients: Nodes,
    num_arguments: int,
    backend: Backend | None,
) -> Graphs:
    """The two graphs of `tracer.graph`, whose forward ends with `last_forward`."""
    replaced = remove_redundant_views(tracer.graph, outputs)
    gradients = [None if n is None else replaced.get(n, n) for n in gradients]
    calls = [n for n in tracer.graph.nodes if n.op == "call_function"]
    at = 0 if last_forward is None else calls.index(last_forward) + 1
    inputs = [n for n in tracer.inputs if n not in cotangents]
    forward_calls = _live(_checks_first(calls[:at]), [*outputs, *_free(calls[at:], gradients)])
    backward_calls = _live(calls[at:], gradients)
    in_forward = set(calls[:at])
    saved = [n for n in dict.fromkeys(_free(backward_calls, gradients)) if n in in_forward or n in inputs]
    forward = extract(inputs, forward_calls, [*outputs, *(n for n in saved if n in in_forward)], "Forward")
    backward = extract([*saved, *cotangents], backward_calls, gradients, "Backward") if gradients else None
    positions = {n: i for i, n in enumerate(inputs)}
    return Graphs(
        forward,
        backward,
        _runner(forward, backend),
        None if backward is None else _runner(backward, backend),
        tuple(tracer.inputs[n] for n in inputs[num_arguments:]),
        len(outputs),
        tuple(map(positions.get, saved)),
    )


def _runner(module: fx.GraphModule, backend: Backend | None) -> Callable[..., tuple[Any, ...]]:
    return with_autocast((), generate(module.graph) if backend is None else compiled(module.graph, backend))


def _free(calls: Sequence[fx.Node], results: Nodes) -> list[fx.Node]:
    """Nodes that `calls` or `results` use and `calls` do not compute."""
    own = set(calls)
    used = [n for call in calls for n in call.all_input_nodes] + [n for n in results if n is not None]
    return [n for n in used if n not in own]


def _checks_first(calls: Sequence[fx.Node]) -> list[fx.Node]:
    """`calls` with comparisons of values first, after the ops on which they depend."""
    first = {call for call in calls if "check" in call.meta}
    for call in reversed(calls):
        if call in first:
            first.update(call.all_input_nodes)
    return [call for call in calls if call in first] + [call for call in calls if call not in first]


def _live(calls: Sequence[fx.Node], results: Nodes) -> list[fx.Node]:
    """`calls` without dead code."""
    used, live = {n for n in results if n is not None}, []
    for call in reversed(calls):
        if call in used or _has_side_effects(call):
            live.append(call)
            used.update(call.all_input_nodes)
    return live[::-1]


def _has_side_effects(call: fx.Node) -> bool:
    if "opaque" in call.meta:
        return True
    op = call.target
    return isinstance(op, torch._ops.OpOverload) and (
        op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags
    )


# ---- functions of graphs ----------------------------------------------------------------------------------


def extract(inputs: Sequence[fx.Node], calls: Sequence[fx.Node], outputs: Nodes, name: str) -> fx.GraphModule:
    """A graph module of some calls of a graph."""
    graph, copies = fx.Graph(), {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
    for node in calls:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(None if n is None else copies[n] for n in outputs))
    return fx.GraphModule(torch.nn.Module(), graph, name)


def generate(graph: fx.Graph) -> Callable[..., tuple[Any, ...]]:
    """The function of a graph whose placeholders come first, with as little overhead per op as Python allows.

    It frees every value after its last use.
    """
    names = {node: f"v{i}" for i, node in enumerate(graph.nodes)}
    globals_: dict[str, Any] = {}
    last_uses: dict[fx.Node, list[str]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for operand in node.all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                last_uses.setdefault(node, []).append(names[operand])
    parameters = [names[node] for node in graph.nodes if node.op == "placeholder"]
    lines = [f"def run({', '.join(parameters)}):"]
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f" return {_expression(node.args[0], names, globals_)}")
        elif node.op == "call_function":
            lines.append(f" {names[node]} = {_call(node, names, globals_)}")
            unused = last_uses.get(node, []) + ([] if node.users else [names[node]])
            if unused:
                lines.append(f" {' = '.join(unused)} = None")
    exec("\n".join(lines), globals_)  # noqa: S102 - of names and calls written above, as torch.fx does
    run: Callable[..., tuple[Any, ...]] = globals_["run"]
    return run


def _call(node: fx.Node, names: dict[fx.Node, str], globals_: dict[str, Any]) -> str:
    args = [_expression(a, names, globals_) for a in node.args]
    if node.target is getitem:
        return f"{args[0]}[{args[1]}]"
    op = BINDINGS.get(node.target, getattr(node.target, "_op", node.target))
    args += [f"{name}={_expression(a, names, globals_)}" for name, a in node.kwargs.items()]
    return f"{_global(op, globals_)}({', '.join(args)})"


def _expression(x: object, names: dict[fx.Node, str], globals_: dict[str, Any]) -> str:
    if isinstance(x, fx.Node):
        return names[x]
    if isinstance(x, tuple | list):
        elements = "".join(f"{_expression(y, names, globals_)}, " for y in x)
        return f"({elements})" if isinstance(x, tuple) else f"[{elements}]"
    if x is None or isinstance(x, bool | int | str):
        return repr(x)
    return _global(x, globals_)  # dtypes, devices, and floats with all their bits


def _global(x: object, globals_: dict[str, Any]) -> str:
    name = f"k{id(x)}"
    globals_[name] = x
    return name


# ---- compiled functions -----------------------------------------------------------------------------------


def compiled(graph: fx.Graph, backend: Backend) -> Callable[..., tuple[Any, ...]]:
    """The function of `graph`: opaque calls stay, the ops between them are compiled when they first run."""
    outer, copies = fx.Graph(), {}
    (output,) = graph.find_nodes(op="output")
    for node in graph.find_nodes(op="placeholder"):
        copies[node] = outer.placeholder(node.name)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for is_opaque, group in groupby(calls, lambda node: "opaque" in node.meta):
        nodes = list(group)
        if is_opaque:
            for node in nodes:
                copies[node] = outer.node_copy(node, copies.__getitem__)
            continue
        inputs = list(dict.fromkeys(_free(nodes, ())))
        outputs = [node for node in nodes if not set(nodes).issuperset(node.users)]
        module = extract(inputs, nodes, outputs, "Subgraph")
        run = torch.compile(module, backend=backend, dynamic=False, fullgraph=True)
        results = outer.call_function(_as_function(run), tuple(copies[n] for n in inputs))
        for i, node in enumerate(outputs):
            copies[node] = outer.call_function(getitem, (results, i))
    outer.output(fx.map_arg(output.args[0], copies.__getitem__))
    run_outer = generate(outer)

    def run_all(*operands: object) -> tuple[Any, ...]:
        with torch.no_grad(), DisableTorchFunctionSubclass():
            return run_outer(*[_plain(x) if isinstance(x, Tensor) else x for x in operands])

    return run_all


def _as_function(module: Callable[..., Any]) -> Callable[..., Any]:
    """A graph as a function: a graph calls functions, not modules."""

    def subgraph(*operands: Tensor) -> Any:
        return module(*operands)

    return subgraph


def _plain(x: Tensor) -> Tensor:
    """The tensor for a compiler, which knows neither DTensors nor gradients."""
    return torch._C.TensorBase.as_subclass(x.detach(), Tensor)
