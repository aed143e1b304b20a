"""Recordings inside autograd: made while the step runs, later run by their graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from shardwise import collectives
from shardwise.errors import CaptureError
from shardwise.graph_capture.compiled import Backend
from shardwise.graph_capture.graphs import Graphs, split
from shardwise.graph_capture.tracer import Tape, applied
from shardwise.layout import Layout
from shardwise.tensor.dtensor import DTensor, plain, tag

SAVED = object()  # where autograd keeps a tensor


@dataclass(frozen=True)
class Output:
    """One leaf of what the function returned: a value, or a tensor, which may be an argument as it came."""

    value: Any = None
    layout: Layout | None = None
    is_tensor: bool = False
    argument: int | None = None

    def rebuilt(self, found: Any, arguments: Sequence[Any]) -> Any:
        if self.argument is not None:
            return arguments[self.argument]
        if not self.is_tensor:
            return self.value
        return found if self.layout is None else tag(found, self.layout)


class Recording:
    """A step as it ran once. `graphs` is None until its backward has run as well, where it has one.

    Attributes:
        arguments: how many tensors come as arguments; what else came from outside is kept by reference.
    """

    def __init__(self, backend: Backend | None, reached: Sequence[Tensor] = ()) -> None:
        self.tape = Tape(reached)
        self.graphs: Graphs | None = None
        self.backend = backend
        self.arguments = 0
        self.outputs: list[Output] = []
        self.differentiable: list[int] = []  # of the tensors returned

    # ---- the first time ----------------------------------------------------------------------------------

    def made(self, function: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> Any:
        """Run `function`, recording it; what it returns is attached to the autograd graph as ever."""
        tape, given = self.tape, [x for x in leaves if isinstance(x, Tensor)]
        inner = [_cut_off(x) if isinstance(x, Tensor) else x for x in leaves]
        entered = [x for x in inner if isinstance(x, Tensor)]
        self.arguments = len(given)
        seed = torch.initial_seed()
        torch.clear_autocast_cache()  # of casts that were made outside
        with tape.running():
            for x in entered:
                tape.enter(x)
            args, kwargs = (inner, {}) if spec is None else pytree.tree_unflatten(inner, spec)
            result = function(*args, **kwargs)
            if torch.initial_seed() != seed and not collectives.is_simulated():  # simulated ranks share a generator
                tape.refuse("torch.manual_seed()")
        torch.clear_autocast_cache()
        tape.check_outside()
        flat, self.spec = pytree.tree_flatten(result)
        self.outputs = [self._described(x, entered) for x in flat]
        with DisableTorchFunctionSubclass():
            found = [x for x, out in zip(flat, self.outputs, strict=True) if out.is_tensor]
            self.nodes = tape.aliased([tape.known(x) for x in found])
            self.last = next(reversed([n for n in tape.graph.nodes if n.op == "call_function"]), None)
            self.differentiable = [i for i, x in enumerate(found) if x.requires_grad]
            if self.differentiable:
                leaves_of_graph = [x for x in tape.outside.values() if x.requires_grad]
                outer = [_outer(x, entered, given) for x in leaves_of_graph]
                ends = [plain(found[i]) for i in self.differentiable]
                shown = applied(_Made, self, found, ends, leaves_of_graph, *outer)
            else:
                shown = [x.detach() for x in found]
                self.graphs = split(tape, self.nodes, self.last, (), (), self.arguments, self.backend)
                del self.tape
        return self.returned(shown, given)

    def _described(self, x: Any, entered: Sequence[Tensor]) -> Output:
        if not isinstance(x, Tensor):
            return Output(x)
        for i, argument in enumerate(entered):
            if x is argument:
                return Output(argument=i)
        if self.tape.known(x) is None:
            with self.tape.running():
                self.tape.node_of(x)
        return Output(layout=x._layout if type(x) is DTensor else None, is_tensor=True)

    def recorded_backward(
        self, ends: Sequence[Tensor], leaves: Sequence[Tensor], edges: Sequence[Any], cotangents: Sequence[Tensor]
    ) -> Any:
        """Gradients of `leaves`, from cotangents of `ends`; afterwards the graphs are complete."""
        tape = self.tape
        tape.in_backward = True
        with tape.running():
            entered = [tape.enter(c) for c in cotangents]
            found = torch.autograd.grad(ends, edges, cotangents, allow_unused=True, retain_graph=True)
            by_leaf = {id(x): None if g is None else tape.node_of(g) for x, g in zip(leaves, found, strict=True)}
        before = [x for n, x in tape.outside.items() if n not in entered]
        gradients = [by_leaf.get(id(x)) for x in before]
        self.graphs = split(tape, self.nodes, self.last, entered, gradients, self.arguments, self.backend)
        del self.tape
        return found

    # ---- later --------------------------------------------------------------------------------------------------

    def replayed(self, leaves: Sequence[Any]) -> Any:
        """What `function` would return, by the graphs."""
        assert self.graphs is not None
        given = [x for x in leaves if isinstance(x, Tensor)]
        outside = (*given, *self.graphs.outside)
        if self.differentiable:
            found = applied(_Replayed, self.graphs, self.differentiable, *outside)
        else:
            with DisableTorchFunctionSubclass(), torch.no_grad():
                found = self.graphs.run_forward(*outside)
        return self.returned(found, given)

    def returned(self, found: Sequence[Any], given: Sequence[Tensor]) -> Any:
        tensors = iter(found)
        flat = [out.rebuilt(next(tensors) if out.is_tensor else None, given) for out in self.outputs]
        return flat[0] if self.spec.is_leaf() else pytree.tree_unflatten(flat, self.spec)


def _cut_off(x: Tensor) -> Tensor:
    """The same values, at the beginning of an autograd graph of its own."""
    with DisableTorchFunctionSubclass():
        inner = x.detach()
        inner.requires_grad_(x.requires_grad)
        if type(x) is DTensor:
            inner = tag(inner, x._layout)
            inner._name, inner._spec, inner._tiling = x._name, x._spec, x._tiling
    return inner


def _outer(x: Tensor, entered: Sequence[Tensor], given: Sequence[Tensor]) -> Tensor:
    """The argument that `x` was cut off from, or the parameter itself."""
    for inner, outer in zip(entered, given, strict=True):
        if x is inner:
            return outer
    if x._backward_hooks:
        raise CaptureError(
            f"capture: a parameter of shape {tuple(x.shape)} has gradient hooks, which would run twice. Fix: remove "
            f"them, or use register_post_accumulate_grad_hook."
        )
    return x


def _once() -> None:
    if torch.is_grad_enabled():
        raise CaptureError(
            "capture: a recorded backward has no derivative of its own. Fix: leave out create_graph=True, or call what "
            "was captured by itself."
        )


class _Made(torch.autograd.Function):
    """Hands out what a recorded forward gave, and records the backward when it comes."""

    @staticmethod
    def forward(
        ctx: Any, made: Recording, found: Sequence[Tensor], ends: Sequence[Tensor], leaves: Sequence[Tensor], *_: Tensor
    ) -> Any:
        ctx.made, ctx.ends, ctx.leaves = made, ends, leaves
        shown = tuple([x.detach() for x in found])
        ctx.mark_non_differentiable(*[x for i, x in enumerate(shown) if i not in made.differentiable])
        return shown

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        _once()
        with DisableTorchFunctionSubclass():
            given = [cotangents[i].detach().contiguous() for i in ctx.made.differentiable]
            edges = [get_gradient_edge(x) for x in ctx.leaves]
        with torch.enable_grad():
            if ctx.made.graphs is None:
                found = ctx.made.recorded_backward(ctx.ends, ctx.leaves, edges, given)
            else:  # a second time over the same graph
                found = torch.autograd.grad(ctx.ends, edges, given, allow_unused=True, retain_graph=True)
        return None, None, None, None, *found


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: Graphs, differentiable: Sequence[int], *outside: Tensor) -> tuple[Any, ...]:
        with DisableTorchFunctionSubclass():
            found = graphs.run_forward(*outside)
            outs, left = found[: graphs.outputs], iter(found[graphs.outputs :])
            kept = [next(left) if at is None else outside[at] for at in graphs.kept]
            ctx.others = [SAVED if isinstance(x, Tensor) else x for x in kept]
            ctx.save_for_backward(*[x for x in kept if isinstance(x, Tensor)])
        ctx.graphs, ctx.differentiable = graphs, differentiable
        if len(differentiable) < len(outs):
            ctx.mark_non_differentiable(*[x for i, x in enumerate(outs) if i not in differentiable])
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        _once()
        saved = iter(ctx.saved_tensors)
        kept = [next(saved) if x is SAVED else x for x in ctx.others]
        with DisableTorchFunctionSubclass():
            given = [cotangents[i].contiguous() for i in ctx.differentiable]
            return None, None, *ctx.graphs.run_backward(*kept, *given)
