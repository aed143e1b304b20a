"""A graph whose runs of aten ops between opaque calls are compiled by `torch.compile`."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DisableTorchFunctionSubclass

from shardwise.graph_capture.code import extract, generate, getitem

Backend = str | Callable[..., Any]


def compiled(graph: fx.Graph, backend: Backend) -> Callable[..., tuple[Any, ...]]:
    """The function of `graph`: opaque calls as they are, the ops between them compiled when they first run."""
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
        inputs, outputs = _inputs_and_outputs(nodes)
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


def _inputs_and_outputs(nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Values that a subgraph uses from outside of it, and its values that are used outside."""
    own = set(nodes)
    inputs = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in own)
    return list(inputs), [node for node in nodes if not own.issuperset(node.users)]


def _as_function(module: Callable[..., Any]) -> Callable[..., Any]:
    """A graph calls functions, not modules."""

    def subgraph(*operands: Tensor) -> Any:
        return module(*operands)

    return subgraph


def _plain(x: Tensor) -> Tensor:
    """For a compiler, which knows no DTensors and need not know of gradients."""
    return torch._C.TensorBase.as_subclass(x.detach(), Tensor)
