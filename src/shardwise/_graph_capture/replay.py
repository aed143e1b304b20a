"""Captured calls inside autograd: traced the first time, replayed by their graphs from then on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise._graph_capture.graphs import Backend, Graphs, partition
from shardwise._graph_capture.guards import Guards
from shardwise._graph_capture.structure import RETURNED, flatten, jagged_leaves
from shardwise._graph_capture.tracer import Tracer, ValueRead, apply_to_locals, refusal
from shardwise._layout import Layout
from shardwise._tensor.dtensor import DTensor, plain, tag
from shardwise._trace.user_stack import traced_inside

SAVED = object()  # in place of a tensor that autograd saves


@dataclass(frozen=True)
class Output:
    """One leaf of the result: a constant, a computed tensor, or an argument returned as it is."""

    value: Any = None
    layout: Layout | None = None
    is_tensor: bool = False
    argument: int | None = None

    def rebuild(self, tensor: Any, arguments: Sequence[Tensor]) -> Any:
        if self.argument is not None:
            return arguments[self.argument]
        if not self.is_tensor:
            return self.value
        return tensor if self.layout is None else tag(tensor, self.layout)


class CapturedCall:
    """One kind of call. `graphs` is None until its backward, if it has one, is traced as well."""

    def __init__(self, backend: Backend | None, guards: Guards) -> None:
        self.tracer = Tracer(guards.reached)
        self.guards = guards
        self.graphs: Graphs | None = None
        self.backend = backend
        self.reads: list[ValueRead] = self.tracer.reads
        self.num_arguments = 0  # tensors among them; other graph inputs are kept by reference
        self.outputs: list[Output] = []
        self.output_nodes: list[fx.Node | None] = []
        self.last_forward: fx.Node | None = None
        self.differentiable: list[int] = []  # positions among the tensors returned

    # ---- tracing -----------------------------------------------------------------------------------------

    def trace(self, function: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> Any:
        """Run and trace `function`. Its result is attached to the autograd graph as usual."""
        tracer, arguments = self.tracer, [x for x in leaves if isinstance(x, Tensor)]
        inner = [_detached(x) if isinstance(x, Tensor) else x for x in leaves]
        inputs = [x for x in inner if isinstance(x, Tensor)]
        self.num_arguments = len(arguments)
        torch.clear_autocast_cache()  # it may hold casts that were made before
        jagged = () if spec is None else jagged_leaves(spec)
        with tracer.tracing():
            for i, x in enumerate(inner):
                if isinstance(x, Tensor):
                    tracer.add_input(x, varies=i in jagged and type(x) is not DTensor)
            args, kwargs = (inner, {}) if spec is None else spec.unflatten(inner)
            with self.guards.recording():
                result = function(*args, **kwargs)
        torch.clear_autocast_cache()
        tracer.check_inputs()
        flat, self.spec = flatten(result)
        self.outputs = [self._output(x, inputs) for x in flat]
        with DisableTorchFunctionSubclass():
            results = [x for x, out in zip(flat, self.outputs, strict=True) if out.is_tensor]
            self.output_nodes = tracer.output_nodes(results)
            self.last_forward = next((n for n in reversed(tracer.graph.nodes) if n.op == "call_function"), None)
            self.differentiable = [i for i, x in enumerate(results) if x.requires_grad]
            if self.differentiable:
                traced = [x for x in tracer.inputs.values() if x.requires_grad]
                originals = [_original(x, inputs, arguments) for x in traced]
                ends = [plain(results[i]) for i in self.differentiable]
                returned = apply_to_locals(_TracedCall, self, results, ends, traced, *originals)
            else:
                returned = [x.detach() for x in results]
                self._partition((), ())
        return self._unflatten(returned, arguments)

    def _output(self, x: object, inputs: Sequence[Tensor]) -> Output:
        if not isinstance(x, Tensor):
            if not isinstance(x, RETURNED):
                raise refusal(
                    f"the function returns a {type(x).__name__}, which a replay cannot make anew",
                    "return tensors and numbers, in lists, tuples, dicts or dataclasses",
                )
            return Output(x)
        for i, argument in enumerate(inputs):
            if x is argument:
                return Output(argument=i)
        if self.tracer.find(x) is None:
            with self.tracer.tracing():
                self.tracer.node_of(x)
        return Output(layout=x._layout if type(x) is DTensor else None, is_tensor=True)

    @traced_inside
    def trace_backward(
        self, ends: Sequence[Tensor], leaves: Sequence[Tensor], edges: Sequence[GradientEdge], grads: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Gradients of `leaves` from the cotangents `grads` of `ends`; completes the graphs."""
        tracer = self.tracer
        tracer.in_backward = True
        with tracer.tracing():
            cotangents = [tracer.add_input(g) for g in grads]
            with self.guards.recording():
                found = torch.autograd.grad(ends, edges, grads, allow_unused=True, retain_graph=True)
            by_leaf = {id(x): None if g is None else tracer.node_of(g) for x, g in zip(leaves, found, strict=True)}
        gradients = [by_leaf.get(id(x)) for n, x in tracer.inputs.items() if n not in cotangents]
        self._partition(cotangents, gradients)
        return found

    def _partition(self, cotangents: Sequence[fx.Node], gradients: Sequence[fx.Node | None]) -> None:
        self.graphs = partition(
            self.tracer, self.output_nodes, self.last_forward, cotangents, gradients, self.num_arguments, self.backend
        )
        del self.tracer, self.guards, self.output_nodes, self.last_forward

    # ---- replaying ----------------------------------------------------------------------------------------------

    def replay(self, leaves: Sequence[Any]) -> Any:
        """The result of `function`, by the graphs.

        Raises:
            OtherValueError: the function would read other values than in the traced call.
        """
        assert self.graphs is not None
        arguments = [x for x in leaves if isinstance(x, Tensor)]
        inputs = (*arguments, *self.graphs.lifted)
        if self.differentiable:
            found = apply_to_locals(_ReplayedCall, self.graphs, self.differentiable, *inputs)
        else:
            with DisableTorchFunctionSubclass(), torch.no_grad():
                found = self.graphs.run_forward(*inputs)
        return self._unflatten(found, arguments)

    def _unflatten(self, found: Sequence[Any], arguments: Sequence[Tensor]) -> object:
        tensors = iter(found)
        flat = [out.rebuild(next(tensors) if out.is_tensor else None, arguments) for out in self.outputs]
        return self.spec.unflatten(flat)


def _detached(x: Tensor) -> Tensor:
    """A tensor in the memory of `x` that is a leaf of a new autograd graph."""
    with DisableTorchFunctionSubclass():
        inner = x.detach()
        inner.requires_grad_(x.requires_grad)
        if type(x) is DTensor:
            inner = tag(inner, x._layout)
            inner._name, inner._spec, inner._tiling = x._name, x._spec, x._tiling
    return inner


def _original(x: Tensor, inputs: Sequence[Tensor], arguments: Sequence[Tensor]) -> Tensor:
    """The argument from which graph input `x` was detached, or the parameter itself."""
    for inner, argument in zip(inputs, arguments, strict=True):
        if x is inner:
            return argument
    if x._backward_hooks:
        raise refusal(
            f"a parameter of shape {tuple(x.shape)} has gradient hooks, which would run twice",
            "remove them, or use register_post_accumulate_grad_hook",
        )
    return x


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise refusal(
            "a captured backward has no derivative of its own",
            "leave out create_graph=True, or call the function without capture",
        )


class _TracedCall(torch.autograd.Function):
    """Returns the results of a traced forward, and traces the backward when it runs."""

    @staticmethod
    def forward(
        ctx: Any,
        call: CapturedCall,
        results: Sequence[Tensor],
        ends: Sequence[Tensor],
        leaves: Sequence[Tensor],
        *originals: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.ends, ctx.leaves = call, ends, leaves
        returned = tuple([x.detach() for x in results])
        ctx.mark_non_differentiable(*[x for i, x in enumerate(returned) if i not in call.differentiable])
        return returned

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        _refuse_double_backward()
        _ = ctx.saved_tensors  # an error after a backward that did not retain the graph
        with DisableTorchFunctionSubclass():
            grads = [cotangents[i].detach().contiguous() for i in ctx.call.differentiable]
            edges = [get_gradient_edge(x) for x in ctx.leaves]
        with torch.enable_grad():
            if ctx.call.graphs is None:
                found = ctx.call.trace_backward(ctx.ends, ctx.leaves, edges, grads)
            else:  # backward again over the same autograd graph
                found = torch.autograd.grad(ctx.ends, edges, grads, allow_unused=True, retain_graph=True)
        return None, None, None, None, *found


class _ReplayedCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: Graphs, differentiable: Sequence[int], *inputs: Tensor) -> tuple[Any, ...]:
        with DisableTorchFunctionSubclass():
            found = graphs.run_forward(*inputs)
            outputs, intermediates = found[: graphs.num_outputs], iter(found[graphs.num_outputs :])
            saved = [next(intermediates) if at is None else inputs[at] for at in graphs.saved]
            ctx.others = [SAVED if isinstance(x, Tensor) else x for x in saved]
            ctx.save_for_backward(*[x for x in saved if isinstance(x, Tensor)])
        ctx.graphs, ctx.differentiable = graphs, differentiable
        if len(differentiable) < len(outputs):
            ctx.mark_non_differentiable(*[x for i, x in enumerate(outputs) if i not in differentiable])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        _refuse_double_backward()
        tensors = iter(ctx.saved_tensors)
        saved = [next(tensors) if x is SAVED else x for x in ctx.others]
        with DisableTorchFunctionSubclass():
            grads = [cotangents[i].contiguous() for i in ctx.differentiable]
            return None, None, *ctx.graphs.run_backward(*saved, *grads)
