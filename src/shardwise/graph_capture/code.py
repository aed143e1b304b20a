"""A graph as a Python function that calls its ops with as little around them as Python allows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

Nodes = Sequence[fx.Node | None]

aten = torch.ops.aten
_methods, _functions = torch._C.TensorBase, torch._C._VariableFunctions

# What Python's own bindings call by the same arguments, at half the cost of a call by schema.
BOUND: dict[Any, Callable[..., Any]] = {
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


def element(values: Any, i: int) -> Any:
    """One result of a call that has several."""
    return values[i]


def module_of(
    takes: Sequence[fx.Node], calls: Sequence[fx.Node], gives: Nodes, name: str = "Stretch"
) -> fx.GraphModule:
    """Some calls of a graph as a graph of their own, of what they take to what is asked of them."""
    graph, copies = fx.Graph(), {}
    for node in takes:
        copies[node] = graph.placeholder(node.name)
    for node in calls:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(None if n is None else copies[n] for n in gives))
    return fx.GraphModule(torch.nn.Module(), graph, name)


def function_of(graph: fx.Graph) -> Callable[..., tuple[Any, ...]]:
    """The function of a graph whose placeholders are all in front; what is not needed any more is let go at once."""
    names = {node: f"v{i}" for i, node in enumerate(graph.nodes)}
    known: dict[str, Any] = {}
    last: dict[fx.Node, list[str]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for operand in node.all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                last.setdefault(node, []).append(names[operand])
    takes = [names[node] for node in graph.nodes if node.op == "placeholder"]
    lines = [f"def run({', '.join(takes)}):"]
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f" return {_written(node.args[0], names, known)}")
        elif node.op == "call_function":
            lines.append(f" {names[node]} = {_call(node, names, known)}")
            left = last.get(node, []) + ([] if node.users else [names[node]])
            if left:
                lines.append(f" {' = '.join(left)} = None")
    exec("\n".join(lines), known)  # noqa: S102 - of names and calls written above, as torch.fx does
    return known["run"]  # type: ignore[no-any-return]


def _call(node: fx.Node, names: dict[fx.Node, str], known: dict[str, Any]) -> str:
    args = [_written(a, names, known) for a in node.args]
    if node.target is element:
        return f"{args[0]}[{args[1]}]"
    op = BOUND.get(node.target, getattr(node.target, "_op", node.target))
    args += [f"{name}={_written(a, names, known)}" for name, a in node.kwargs.items()]
    return f"{_bound(op, known)}({', '.join(args)})"


def _written(x: Any, names: dict[fx.Node, str], known: dict[str, Any]) -> str:
    if isinstance(x, fx.Node):
        return names[x]
    if isinstance(x, tuple | list):
        inside = "".join(f"{_written(y, names, known)}, " for y in x)
        return f"({inside})" if isinstance(x, tuple) else f"[{inside}]"
    if x is None or isinstance(x, bool | int | str):
        return repr(x)
    return _bound(x, known)  # dtypes, devices, and floats with all their bits


def _bound(x: Any, known: dict[str, Any]) -> str:
    name = f"k{id(x)}"
    known[name] = x
    return name
