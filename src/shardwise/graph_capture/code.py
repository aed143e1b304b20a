"""Generates the Python function that runs an FX graph, with as little overhead per op as Python allows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

Nodes = Sequence[fx.Node | None]

aten = torch.ops.aten
_methods, _functions = torch._C.TensorBase, torch._C._VariableFunctions

# Python bindings with the same arguments as the op; they cost half of a call by schema.
BINDINGS: dict[Any, Callable[..., Any]] = {
    aten.t.default: _methods.t,
    aten.view.default: _methods.view,
    aten._unsafe_view.default: _methods.view,
    aten.transpose.int: _methods.transpose,
    aten.unsqueeze.default: _methods.unsqueeze,
    aten.expand.default: _methods.expand,
    aten.permute.default: _methods.permute,
    aten.add_.Tensor: _methods.add_,
    aten.copy_.default: _methods.copy_,
    aten.clone.default: _functions.clone,
    aten.mm.default: _functions.mm,
    aten.bmm.default: _functions.bmm,
    aten.addmm.default: _functions.addmm,
    aten.add.Tensor: _functions.add,
    aten.mul.Tensor: _functions.mul,
    aten.sub.Tensor: _functions.sub,
    aten.sum.dim_IntList: _functions.sum,
    aten.cat.default: _functions.cat,
    aten.native_layer_norm.default: _functions.native_layer_norm,
    aten.embedding.default: _functions.embedding,
    aten.where.self: _functions.where,
    aten.exp.default: _functions.exp,
}


def getitem(values: Any, i: int) -> Any:
    """One result of a call that has several."""
    return values[i]


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
    """The function of a graph whose placeholders come first. It frees every value after its last use."""
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
