"""Partitions a traced graph into the graphs of forward and backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.graph_capture.autocast import with_autocast
from shardwise.graph_capture.code import Nodes, extract, generate
from shardwise.graph_capture.compiled import Backend, compiled
from shardwise.graph_capture.tracer import Tracer

aten = torch.ops.aten


@dataclass(frozen=True)
class Graphs:
    """A captured step. Both graphs take local tensors, and run no Python of this library but opaque calls.

    Attributes:
        forward: from all graph inputs to the outputs, followed by intermediate values saved for backward.
        backward: from what is saved for backward and a cotangent for each differentiable output to a gradient, or
            None, for each graph input; None if forward ran without grad.
        run_forward, run_backward: their functions, compiled if there is a backend.
        lifted: graph inputs that are no arguments (parameters, buffers, constants); they follow the arguments.
        num_outputs: how many of the results of `forward` are outputs.
        saved: for each value saved for backward its position among the graph inputs, or None if `forward` returns it.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    run_forward: Callable[..., tuple[Any, ...]]
    run_backward: Callable[..., tuple[Any, ...]] | None
    lifted: tuple[Tensor, ...]
    num_outputs: int
    saved: tuple[int | None, ...]


RESHAPES = (aten.view.default, aten._unsafe_view.default)
VIEWS = (*RESHAPES, aten.t.default, aten.transpose.int, aten.expand.default)


def remove_redundant_views(graph: fx.Graph, outputs: Nodes) -> dict[fx.Node, fx.Node]:
    """Replace the uses of `x.t().t()`, of repeated views, and of views to the same shape.

    Args:
        outputs: views that users of a replay get as tensors of their own; kept.

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
    """`calls` with those that compare values before all others, after the ops on which they depend."""
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
