"""Traces a step on this rank into one FX graph of aten ops on local tensors and opaque calls (`allow_in_graph`).

A function may read values, as `if mask.all()` does, or make a tensor whose shape depends on values, as `x[mask]` does.
Its graph is valid for the read values, so it has a call that compares each of them. These calls, and the ops on which
they depend, come first in the graph and change nothing. If a value differs, another graph is tried.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor, fx
from torch._C import DisableTorchFunction
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor.dtensor import DTensor, plain
from shardwise._tensor.torch_objects import TORCH_DTENSOR, is_torch_dtensor_class
from shardwise._trace import capture_hooks
from shardwise._trace.capture_hooks import tracing_paused
from shardwise._trace.user_stack import StackFrame, call_site, format_call_sites, frames_of
from shardwise.errors import CaptureError

P = ParamSpec("P")
T = TypeVar("T")
AutocastState = tuple[tuple[str, torch.dtype], ...]

aten = torch.ops.aten

strides: Callable[[Tensor], tuple[int, ...]] = torch._C.TensorBase.stride  # a DTensor's local stride

ALIASES = (aten.detach.default, aten.alias.default)  # autograd's bookkeeping, of which a replay has none
ITEM = aten._local_scalar_dense.default
INDEXING = (aten.index.Tensor, aten._unsafe_index.Tensor)  # data-dependent only if an index is a mask
# Functions that read values of a tensor without an op that a dispatch mode sees, and their names in errors.
VALUE_READS = {
    "tolist": "tolist()",
    "numpy": "numpy()",
    "__array__": "numpy.asarray()",
    "data_ptr": "data_ptr()",
    "__dlpack__": "DLPack",
    "__deepcopy__": "copy.deepcopy()",
    "__reduce_ex__": "pickling",
}
# Kernels that read the values of their second operand in C++, and compute with them as constants.
KERNEL_READS = ("tensor_split", "_pad_packed_sequence")
# Attributes of a tensor that do not depend on its first size, which may vary from replay to replay.
SAME_FOR_ALL_SIZES = frozenset({
    "dtype", "device", "requires_grad", "requires_grad_", "layout", "ndim", "dim", "is_leaf", "grad_fn", "is_meta",
    "is_nested", "is_inference", "_version", "detach",
})  # fmt: skip
AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mtia", "hpu")


def refusal(what: str, fix: str) -> CaptureError:
    """The error for code that cannot be captured, with the user's line and an alternative."""
    where = format_call_sites([*frames_of(sys._getframe(1))])
    return CaptureError(f"capture: {what}.{where}\n  Fix: {fix}.")


class OtherValueError(Exception):
    """A replay found another value than the traced call."""

    def __init__(self, read: "ValueRead") -> None:
        super().__init__(str(read))


@dataclass(frozen=True)
class ValueRead:
    """The values that Python read: a value as text, in which NaN equals NaN, or only the shapes of results.

    Attributes:
        what: the op or method that read them, for messages.
        frame: the line of the user's code.
    """

    found: object
    shapes_only: bool
    what: str = field(compare=False)
    frame: StackFrame | None = field(compare=False, default_factory=call_site)

    def __str__(self) -> str:
        return self.what if self.frame is None else f"{self.what} at {self.frame}"

    def check(self) -> Callable[[object], None]:
        """A call for the graph that checks the value at a replay."""

        def check_value(value: object) -> None:
            if learned(value, self.shapes_only) != self.found:
                raise OtherValueError(self)

        check_value.__module__ = "shardwise"  # its name in the code of the graph
        return check_value


def learned(value: object, shapes_only: bool) -> object:
    """The values that Python reads from the result of an op, or only shapes."""
    if shapes_only:
        return [tuple(x.shape) for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    return repr(value.tolist() if isinstance(value, Tensor) else value)


def autocast_state() -> AutocastState:
    """The devices with autocast on, and its dtypes."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple((d, torch.get_autocast_dtype(d)) for d in AUTOCAST_DEVICES if torch.is_autocast_enabled(d))


def with_autocast(state: AutocastState, function: Callable[P, T]) -> Callable[P, T]:
    """`function` under the autocast of `state`, whatever its caller has: a graph has the casts as ops."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        present = autocast_state()
        if present == state:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for device, _ in present:
                stack.enter_context(torch.autocast(device, enabled=False))
            for device, dtype in state:
                stack.enter_context(torch.autocast(device, dtype))
            return function(*args, **kwargs)

    return run


def getitem(values: Any, i: int) -> Any:
    """One result of a call with several."""
    return values[i]


class GraphInt(int):
    """An int from an opaque call, different at every replay."""

    node: fx.Node


class Tracer:
    """Traces the ops inside `tracing()`: the forward and later the backward of one call.

    Attributes:
        graph: aten ops and opaque calls in execution order. Placeholders are the graph inputs.
        inputs: placeholder -> the tensor it represents: arguments, parameters, buffers, constants.
        reads: the values that Python read, in order. Ops without side effects compute them from the inputs.
    """

    def __init__(self, reached: Collection[int]) -> None:
        self.graph = fx.Graph()
        # Tensors are never taken for an alias of an argument, even in the same memory; generators are not new ones.
        self._reached = reached
        self.inputs: dict[fx.Node, Tensor] = {}
        self.reads: list[ValueRead] = []
        self.in_backward = False
        self._nodes: Any = WeakTensorKeyDictionary()
        self._node_by_memory: dict[Any, fx.Node] = {}  # some aliases are made without an op that a mode sees
        self._storages: dict[int, StorageWeakRef] = {}  # keeps addresses from being reused while tracing
        self._seeds: dict[int, GraphInt] = {}
        self._constants: set[fx.Node] = set()  # same value at every replay
        self._mutated: set[int] = set()  # storages that may have been overwritten with non-constant values
        self._written: set[int] = set()  # storages that were overwritten
        self._unrepeatable: set[fx.Node] = set()  # nodes that cannot be computed before the rest of a replay
        self._compared: set[fx.Node] = set()  # replays compare their values
        self._varying: set[fx.Node] = set()  # inputs whose first size differs from replay to replay
        self.paused = False

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace the ops of this thread inside."""
        if capture_hooks.current.tracer is not None:
            raise refusal("a captured function calls another one", "capture the outer one only")
        with capture_hooks.traced_by(self), _OpMode(self), _ValueReadMode(self):
            yield

    # ---- tensors and their nodes -------------------------------------------------------------------------

    def add_input(self, x: Tensor, varies: bool = False) -> fx.Node:
        """Make `x` a graph input, after the existing ones. What depends on a first size that `varies` is guarded."""
        last = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
        first_call = next(iter(self.graph.nodes), None)
        with self.graph.inserting_after(last) if last is not None else self.graph.inserting_before(first_call):
            node = self.graph.placeholder(f"input_{len(self.inputs)}")
        self.inputs[node] = x
        if varies:
            self._varying.add(node)
        self._nodes[x] = node
        self._remember_memory(x, node)
        return node

    def node_of(self, x: Tensor) -> fx.Node:
        """The node that computed `x`; a new graph input if none did."""
        node = self.find(x)
        if node is not None:
            return node
        with DisableTorchFunction():
            base = x._base
            if base is not None and _memory(base) == _memory(x):
                return self.node_of(base)
            has_history = x.requires_grad and not x.is_leaf
        if has_history:
            raise refusal(
                f"the function uses a tensor of shape {tuple(x.shape)} that was computed outside of it and requires "
                f"grad",
                "pass it as an argument",
            )
        return self.add_input(x)

    def find(self, x: Tensor) -> fx.Node | None:
        """The node of `x`, by identity or by memory."""
        node: fx.Node | None = self._nodes.get(x)
        if node is None and id(x) not in self._reached:
            node = self._node_by_memory.get(_memory(x))
        return node

    def _remember_memory(self, x: Tensor, node: fx.Node) -> None:
        memory = _memory(x)
        if memory is not None:
            self._node_by_memory[memory] = node
            with DisableTorchFunction():
                self._storages.setdefault(memory[0], StorageWeakRef(x.untyped_storage()))

    def _add_result(self, node: fx.Node, x: Tensor, constant: bool) -> None:
        if self._nodes.get(x) is None:  # an in-place op returns its operand
            self._nodes[x] = node
        self._remember_memory(x, self._nodes[x])
        if x.layout == torch.strided:
            node.meta["shape"] = tuple(x.shape)
        if constant:
            self._constants.add(node)

    def _is_constant(self, x: Tensor) -> bool:
        return self.find(x) in self._constants and _storage(x) not in self._mutated

    def output_nodes(self, results: Sequence[Tensor]) -> list[fx.Node | None]:
        """The nodes of results, aliased where one is a graph input or is returned twice."""
        found: list[fx.Node | None] = []
        for x in results:
            node = self.find(x)
            if node is not None and (node.op == "placeholder" or node in found):
                node = self.graph.call_function(aten.detach.default, (node,))
            found.append(node)
        return found

    def check_inputs(self) -> None:
        """Raise if a graph input has become part of the autograd graph of this call."""
        if any(x.grad_fn is not None for x in self.inputs.values()):
            self.refuse("writing what requires grad into a tensor from outside")

    # ---- aten ops --------------------------------------------------------------------------------------------

    def run_op(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run an aten op, and add it to the graph."""
        if self.paused:
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:  # the code of a graph cannot name one
            return self.call_opaque(_named(func), func, args, kwargs)
        tensors = _tensors(args, kwargs)
        nodes = [self.node_of(x) for x in tensors]
        reads = _reads_values(func, args) and not all(map(self._is_constant, tensors))
        self._check(func, args, kwargs)
        if func in ALIASES:
            out = func(*args, **kwargs)
            self._nodes[out] = nodes[0]
            return out
        self._guard_sizes(tensors, _named(func))
        is_literal = func is aten.lift_fresh.default
        if is_literal:  # a replay needs a fresh one: the step may change it in place
            func = aten.clone.default
        draws = _draws(func, args, kwargs)
        constant = is_literal or (not draws and all(map(self._is_constant, tensors)))
        repeatable = not draws and not func._schema.is_mutable and all(map(self._is_repeatable, tensors))
        if reads and (self.in_backward or not repeatable):
            self.refuse(
                _named(func) if func is ITEM else f"{_named(func)}, whose result or its shape depends on values"
            )
        node_args, node_kwargs = pytree.tree_map(self._node_argument, (args, kwargs))
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._written.update(map(_storage, tensors))
            if not constant:
                self._mutated.update(map(_storage, tensors))
        node = self.graph.call_function(func, tuple(node_args), node_kwargs)
        if not repeatable:
            self._unrepeatable.add(node)
        if reads:
            shapes_only = torch.Tag.data_dependent_output not in func.tags
            self._guard_value(node, out, shapes_only, _named(func))
        self._add_results(node, out, constant)
        return out

    def _guard_value(self, node: fx.Node, value: object, shapes_only: bool, what: str) -> None:
        """Compare the result of `node` with `value` at replays."""
        read = ValueRead(learned(value, shapes_only), shapes_only, what)
        self.reads.append(read)
        self.graph.call_function(read.check(), (node,)).meta |= {"opaque": True, "check": True}

    def _guard_sizes(self, operands: Sequence[object], what: str) -> None:
        """Compare the varying first sizes of operands at replays: a result depends on them."""
        if not self._varying:
            return
        for node in [self.find(x) for x in operands if isinstance(x, Tensor)]:
            if node is None or node not in self._varying:
                continue
            if self.in_backward:
                self.refuse(f"{what} in backward, whose result depends on the number of ids")
            self._varying.remove(node)
            with tracing_paused(), DisableTorchFunction():
                self._guard_value(node, self.inputs[node], True, f"the number of ids, by {what}")

    def _is_repeatable(self, x: Tensor) -> bool:
        """Whether it can be computed before all else of a replay."""
        return self.find(x) not in self._unrepeatable and _storage(x) not in self._written

    def _node_argument(self, x: object) -> object:
        if isinstance(x, GraphInt):
            raise refusal(
                "a seed that differs at every replay is used as a number in an op",
                "keep it outside of what is captured",
            )
        return self.node_of(x) if isinstance(x, Tensor) else x

    def _add_results(self, node: fx.Node, out: object, constant: bool) -> None:
        if isinstance(out, Tensor):
            self._add_result(node, out, constant)
        elif isinstance(out, tuple | list):
            for i, x in enumerate(out):
                if isinstance(x, Tensor) and self._nodes.get(x) is None:
                    self.element_node(node, i, x, constant)

    def element_node(self, node: fx.Node, i: int, x: object, constant: bool = False) -> fx.Node:
        """Element `i` of the result of `node`, whose value is `x`."""
        element = self.graph.call_function(getitem, (node, i))
        if node in self._unrepeatable:
            self._unrepeatable.add(element)
        if isinstance(x, Tensor):
            self._add_result(element, x, constant)
        return element

    def _check(self, func: OpOverload, args: Args, kwargs: Kwargs) -> None:
        """Raise for an op that a replay could not repeat."""
        name = func.name()
        if not self.in_backward and torch._C._current_graph_task_id() != -1:
            raise refusal(
                "backward() runs inside the function",
                "return the loss, and call backward() on what the captured function returns",
            )
        if func.namespace not in ("aten", "prims", "prim"):
            self.refuse(f"{name}, which is not an op of torch")
        if func is aten.mkldnn_rnn_layer.default and torch.is_grad_enabled():  # saves nothing for backward without grad
            self.refuse(f"{name}; torch.backends.mkldnn.flags(enabled=False) around the call avoids it")
        if self.in_backward and _draws(func, args, kwargs):
            self.refuse(f"{name} in backward, whose numbers a replay would not repeat")

    def _check_generators(self, args: Args, kwargs: Kwargs) -> None:
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, torch.Generator) and identity(x) not in self._reached:
                raise refusal("the function makes the generator of an op", "make it outside of the captured function")

    def check_size_read(self, name: str, x: object) -> None:
        """Guard a varying first size of a tensor if Python may be about to read it."""
        if not self.paused and name not in SAME_FOR_ALL_SIZES:
            self._guard_sizes([x], name)

    def check_method(self, name: str, x: Tensor) -> None:
        """Guard values that a C++ method is about to read. Modes miss some: hooks of backward, ops inside of ops."""
        if name in VALUE_READS:
            with DisableTorchFunction():
                self.check_value_read(name, x)

    def check_value_read(self, name: str, x: object) -> None:
        """Guard the values that Python is about to read; raise if no guard can."""
        if self.paused or not isinstance(x, Tensor):
            return
        node = self.node_of(x)
        if self._is_constant(x):
            return
        what = VALUE_READS.get(name, f"{name}()")
        if (
            (name in VALUE_READS and name != "tolist")
            or type(x) is DTensor
            or self.in_backward
            or not self._is_repeatable(x)
        ):
            self.refuse(f"{what}, which shows values to Python")
        if node not in self._compared:
            self._compared.add(node)
            with tracing_paused(), DisableTorchFunction():
                self._guard_value(node, x, False, what)

    def not_capturable(self, what: str) -> None:
        if not self.paused:
            self.refuse(what)

    def refuse(self, what: str) -> NoReturn:
        raise refusal(f"a replay cannot repeat {what}", "do it outside of the captured function, or do not capture it")

    # ---- opaque calls ----------------------------------------------------------------------------------------

    def call_opaque(self, name: str, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        if self.paused:
            return function(*args, **kwargs)
        self._check_generators(args, kwargs)
        call, operands = _bind_constants(function, args, kwargs)
        self._guard_sizes(operands, name)
        operands = [(x.node, int(x)) if isinstance(x, GraphInt) else x for x in operands]
        node, out = self.opaque_node(name, call, operands)
        if not isinstance(out, int) or isinstance(out, bool):
            self._add_results(node, out, False)
            return out
        if out in self._seeds:  # drawn again: backward recomputes a checkpointed forward
            self.graph.erase_node(node)
            return self._seeds[out]
        seed = self._seeds[out] = GraphInt(out)
        seed.node = node
        return seed

    def call_opaque_with_backward(
        self, function: Callable[..., Tensor], args: Args, kwargs: Kwargs, any_sizes: bool
    ) -> Tensor:
        if self.paused:
            return function(*args, **kwargs)
        call, operands = _bind_constants(function, args, kwargs)
        if not any_sizes:
            self._guard_sizes(operands, function.__name__)
        out: Tensor = apply_to_locals(_OpaqueCall, self, call, function.__name__, *operands)
        return out

    def opaque_node(
        self, name: str, call: Callable[..., Any], operands: Sequence[Any], writes: bool = True
    ) -> tuple[fx.Node, Any]:
        """Run `call` untraced and add it as one node. An operand is a tensor, or a pair (node, value).

        Args:
            writes: whether it may write to operands unseen; otherwise their version counters show which were written.
        """
        nodes = [x[0] if isinstance(x, tuple) else self.node_of(x) for x in operands]
        values = [x[1] if isinstance(x, tuple) else x for x in operands]
        call = with_autocast(autocast_state(), call)
        given = _tensors(tuple(values), {})
        versions = list(map(_version, given))
        before, self.paused = self.paused, True
        try:
            out = call(*values)
        finally:
            self.paused = before
        call.__name__, call.__module__ = name, "shardwise"  # its name in the code of the graph
        node = self.graph.call_function(call, tuple(nodes))
        node.meta["opaque"] = True
        self._unrepeatable.add(node)
        written = {_storage(x) for x, v in zip(given, versions, strict=True) if writes or v is None or v != _version(x)}
        self._mutated |= written
        self._written |= written
        return node, out


def _bind_constants(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> tuple[Callable[..., Any], list[Any]]:
    """`function` of its tensors and `GraphInt`s only, and these; other arguments are bound. Keeps no tensor alive."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    at = [i for i, x in enumerate(flat) if isinstance(x, Tensor | GraphInt)]
    operands = [flat[i] for i in at]
    bound = [None if isinstance(x, Tensor | GraphInt) else x for x in flat]

    def call(*operands: Any) -> Any:
        values = list(bound)
        for i, x in zip(at, operands, strict=True):
            values[i] = plain(x) if type(x) is DTensor else x  # an input of a replay, of which Python reads the shape
        args, kwargs = pytree.tree_unflatten(values, spec)
        return function(*args, **kwargs)

    return call, operands


class _OpaqueCall(torch.autograd.Function):
    """A data-dependent function as two opaque calls: its forward and its backward."""

    @staticmethod
    def forward(ctx: Any, tracer: Tracer, run: Callable[..., Tensor], name: str, *tensors: Tensor) -> Tensor:
        requires_grad = [x.requires_grad for x in tensors]

        def forward(*tensors: Tensor) -> tuple[Any, Tensor]:
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_(r) for x, r in zip(tensors, requires_grad, strict=True)]
                out = run(*inputs)
            return (out, [x for x in inputs if x.requires_grad]), out.detach()

        node, (ctx.state, out) = tracer.opaque_node(name, forward, tensors, writes=False)
        ctx.tracer, ctx.differentiable, ctx.name = tracer, requires_grad, name
        ctx.node = tracer.element_node(node, 0, ctx.state)
        tracer.element_node(node, 1, out)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        def backward(state: tuple[Tensor, list[Tensor]], cotangent: Tensor) -> tuple[Tensor | None, ...]:
            out, inputs = state
            with torch.enable_grad():
                return torch.autograd.grad(out, inputs, cotangent, retain_graph=True, allow_unused=True)

        tracer: Tracer = ctx.tracer
        node, found = tracer.opaque_node(
            f"{ctx.name}_backward", backward, [(ctx.node, ctx.state), cotangents[0]], writes=False
        )
        for i, x in enumerate(found):
            tracer.element_node(node, i, x)
        grads = iter(found)
        return None, None, None, *[next(grads) if r else None for r in ctx.differentiable]


def apply_to_locals(function: type[torch.autograd.Function], *args: object) -> Any:
    """`Function.apply` on the local tensors of DTensors, by C++, which no patch replaces."""
    return super(torch.autograd.function._SingleLevelFunction, function).apply(*args)  # type: ignore[misc]


def _tensors(args: Args, kwargs: Kwargs) -> list[Tensor]:
    return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


def _reads_values(func: OpOverload, args: Args) -> bool:
    """Whether the result, or its shape, shows Python values of the operands."""
    if func in INDEXING:
        return any(x.dtype in (torch.bool, torch.uint8) for x in args[1] if x is not None)
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


def _named(func: OpOverload) -> str:
    return "item(), or an `if`" if func is ITEM else str(func.name())


def _draws(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    """Whether an op uses torch's generators; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return not any(a.name == "dropout_p" and given.get(a.name, 0.0) == 0.0 for a in func._schema.arguments)


def _memory(x: Tensor) -> tuple[Any, ...] | None:
    """Storage and view of it; equal for aliases."""
    with DisableTorchFunction():
        if x.layout != torch.strided:
            return None
        view = x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), strides(x), x.dtype
        return (*view, x.is_conj(), x.is_neg())


def identity(x: torch.Generator) -> int:
    """The identity of its C++ object: an op gets another Python object for it."""
    return int(x._cdata)  # type: ignore[attr-defined]  # not in torch's stubs


def _storage(x: Tensor) -> int:
    with DisableTorchFunction():
        return x.untyped_storage()._cdata if x.layout == torch.strided else id(x)


def _attribute(getter: Any) -> str:
    """The name of the attribute that `Tensor.shape.__get__` reads."""
    return str(getattr(getattr(getter, "__self__", None), "__name__", ""))


def _version(x: Tensor) -> int | None:
    """The number of writes to `x`; None if torch does not count them."""
    return None if x.is_inference() else x._version


class _OpMode(TorchDispatchMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer

    def __torch_dispatch__(self, func: Op, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if any(map(is_torch_dtensor_class, types)):
            raise refusal("a DTensor of torch, whose ops are not traced", TORCH_DTENSOR)
        if any(t.__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a wrapper that decomposes the op first
        with DisableTorchFunction():
            return self.tracer.run_op(func, args, kwargs or {})


class _ValueReadMode(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Op, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if args:
            if name in VALUE_READS:
                self.tracer.check_value_read(name, args[0])
            if name.partition(".")[0] in KERNEL_READS:
                for operand in (*args[1:], *(kwargs or {}).values()):
                    self.tracer.check_value_read(name, operand)
            attribute = _attribute(func) if name == "__get__" else name
            if attribute == "grad" and not self.tracer.in_backward:  # hooks run at each replay
                self.tracer.not_capturable("reading .grad, which is another tensor after each backward")
            self.tracer.check_size_read(attribute, args[0])
        if DTensor in types and torch._C._is_torch_function_enabled():  # its rules may read values as well
            with self:
                return DTensor.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
