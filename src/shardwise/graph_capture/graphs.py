"""From a tape to two FX graph modules: what forward gives and leaves for backward, and what backward makes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.graph_capture.code import Nodes, function_of, module_of
from shardwise.graph_capture.compiled import Backend, compiled
from shardwise.graph_capture.tracer import Tape

aten = torch.ops.aten


@dataclass(frozen=True)
class Graphs:
    """Both take local tensors, and run no Python of this library but leaves.

    Attributes:
        forward: of all that came from outside, to the outputs and then what backward needs.
        backward: of what backward needs, then a cotangent for each differentiable output, to a gradient, or None,
            for each of what came from outside; None where forward ran without grad.
        run_forward, run_backward: the same as functions, compiled if that was asked for.
        outside: what came from outside, in the order in which `forward` takes it after the arguments.
        outputs: how many there are.
        kept: of what backward needs: the position among what `forward` takes, or None where forward leaves it.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    run_forward: Callable[..., tuple[Any, ...]]
    run_backward: Callable[..., tuple[Any, ...]] | None
    outside: tuple[Tensor, ...]
    outputs: int
    kept: tuple[int | None, ...]


VIEWS = (aten.t.default, aten.view.default, aten._unsafe_view.default, aten.transpose.int, aten.expand.default)
RESHAPES = (aten.view.default, aten._unsafe_view.default)


def shortened(graph: fx.Graph, kept: Nodes) -> dict[fx.Node, fx.Node]:
    """Let users of a view there and back, of one made again, or of the same shape, use what it is the same as.

    Args:
        kept: views that users of a replay see as tensors of their own.

    Returns:
        Each such view with what it is the same as.
    """
    same: dict[fx.Node, fx.Node] = {}
    first: dict[Any, fx.Node] = {}
    for call in graph.nodes:
        if call.target not in VIEWS or call in kept:
            continue
        of = call.args[0]
        if call.target is aten.t.default and of.target is aten.t.default:
            other = of.args[0]
        elif call.target in RESHAPES and of.meta.get("shape", ()) == call.meta["shape"] != ():
            other = of
        else:
            other = first.setdefault((call.target, of, str(call.args[1:])), call)
        if other is not call:
            same[call] = other
            call.replace_all_uses_with(other)
    return same


def split(
    tape: Tape,
    outputs: Nodes,
    last: fx.Node | None,
    cotangents: Sequence[fx.Node],
    gradients: Nodes,
    arguments: int,
    backend: Backend | None,
) -> Graphs:
    """The two graphs of `tape`, of which forward ends with `last`.

    The first `arguments` placeholders are given anew at every replay.
    """
    same = shortened(tape.graph, outputs)
    gradients = [None if n is None else same.get(n, n) for n in gradients]
    calls = [n for n in tape.graph.nodes if n.op == "call_function"]
    at = 0 if last is None else calls.index(last) + 1
    entered = [n for n in tape.outside if n not in cotangents]
    first = _needed(calls[:at], [*outputs, *_read_by(calls[at:], gradients)])
    second = _needed(calls[at:], gradients)
    made = set(calls[:at])
    kept = [n for n in dict.fromkeys(_read_by(second, gradients)) if n in made or n in entered]
    left = [n for n in kept if n in made]
    forward = module_of(entered, first, [*outputs, *left], "Forward")
    backward = module_of([*kept, *cotangents], second, gradients, "Backward") if gradients else None
    places = {n: i for i, n in enumerate(entered)}
    return Graphs(
        forward,
        backward,
        _runner(forward, backend),
        None if backward is None else _runner(backward, backend),
        tuple(tape.outside[n] for n in entered[arguments:]),
        len(outputs),
        tuple(map(places.get, kept)),
    )


def _runner(module: fx.GraphModule, backend: Backend | None) -> Callable[..., tuple[Any, ...]]:
    return function_of(module.graph) if backend is None else compiled(module.graph, backend)


def _read_by(calls: Sequence[fx.Node], results: Nodes) -> list[fx.Node]:
    own = set(calls)
    read = [n for call in calls for n in call.all_input_nodes] + [n for n in results if n is not None]
    return [n for n in read if n not in own]


def _needed(calls: Sequence[fx.Node], results: Nodes) -> list[fx.Node]:
    """Calls without those whose results nobody uses and that change nothing."""
    used, kept = {n for n in results if n is not None}, []
    for call in reversed(calls):
        if call in used or _has_effects(call):
            kept.append(call)
            used.update(call.all_input_nodes)
    return kept[::-1]


def _has_effects(call: fx.Node) -> bool:
    if "leaf" in call.meta:
        return True
    schema = getattr(call.target, "_schema", None)
    return schema is not None and (schema.is_mutable or torch.Tag.nondeterministic_seeded in call.target.tags)  # type: ignore[union-attr]
