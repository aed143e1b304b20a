"""A graph whose stretches of aten ops, between one leaf and the next, are handed to a compiler."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DisableTorchFunctionSubclass

from shardwise.graph_capture.code import element, function_of, module_of

Backend = str | Callable[..., Any]


def compiled(graph: fx.Graph, backend: Backend) -> Callable[..., tuple[Any, ...]]:
    """What runs `graph`: its leaves as they are, all else by `torch.compile(backend=…)`, compiled when first run."""
    whole, copies = fx.Graph(), {}
    (output,) = graph.find_nodes(op="output")
    for node in graph.find_nodes(op="placeholder"):
        copies[node] = whole.placeholder(node.name)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for is_leaf, some in groupby(calls, lambda node: "leaf" in node.meta):
        if is_leaf:
            for node in some:
                copies[node] = whole.node_copy(node, copies.__getitem__)
            continue
        stretch = list(some)
        takes, gives = _borders(stretch)
        run = torch.compile(module_of(takes, stretch, gives), backend=backend, dynamic=False, fullgraph=True)
        found = whole.call_function(_named(run), tuple(copies[n] for n in takes))
        for i, node in enumerate(gives):
            copies[node] = whole.call_function(element, (found, i))
    whole.output(fx.map_arg(output.args[0], copies.__getitem__))
    run_whole = function_of(whole)

    def run_all(*operands: Any) -> tuple[Any, ...]:
        with torch.no_grad(), DisableTorchFunctionSubclass():
            return run_whole(*[_plain(x) if isinstance(x, Tensor) else x for x in operands])

    return run_all


def _borders(stretch: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """What a stretch takes from before, and what of it is used after."""
    own = set(stretch)
    takes = dict.fromkeys(n for node in stretch for n in node.all_input_nodes if n not in own)
    return list(takes), [node for node in stretch if not own.issuperset(node.users)]


def _named(module: Callable[..., Any]) -> Callable[..., Any]:
    """What a graph can call as a function."""

    def stretch(*operands: Tensor) -> Any:
        return module(*operands)

    return stretch


def _plain(x: Tensor) -> Tensor:
    """For a compiler, which knows no DTensors and need not know of gradients."""
    return torch._C.TensorBase.as_subclass(x.detach(), Tensor)
