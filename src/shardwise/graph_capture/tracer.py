"""Records what a step does on this rank: aten ops on local tensors, and leaves, as one FX graph."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch._C import DisableTorchFunctionSubclass
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.errors import CaptureError
from shardwise.graph_capture.code import element
from shardwise.tensor.dtensor import DTensor
from shardwise.trace import capture_hooks

aten = torch.ops.aten

strides: Any = torch._C.TensorBase.stride  # of the local tensor that a DTensor is

# An alias of its operand, made for autograd's bookkeeping, which a replay has none of.
SAME = (aten.detach.default, aten.alias.default)
INDEXED = (aten.index.Tensor, aten._unsafe_index.Tensor)  # by values only where an index is a mask
# Ask C++ for the values of a tensor without an op that a dispatch mode would see.
LOOKS = {
    "tolist": "tolist()",
    "numpy": "numpy()",
    "__array__": "numpy.asarray()",
    "data_ptr": "data_ptr()",
    "__dlpack__": "DLPack",
    "__deepcopy__": "copy.deepcopy()",
    "__reduce_ex__": "pickling",
}
FIX = "Fix: keep it outside of what is captured"


class Number(int):
    """A whole number that a leaf gave, so another one at every replay."""

    node: fx.Node


class Tape:
    """One recording: `forward` and, later, `backward` run what is to be recorded inside `running()`.

    Attributes:
        graph: calls of aten ops and leaves, in their order. Placeholders stand for what came from outside.
        outside: placeholder -> the tensor that was there before: arguments, parameters, buffers, constants.
    """

    def __init__(self, reached: Sequence[Tensor] = ()) -> None:
        self.graph = fx.Graph()
        self._reached = {id(x) for x in reached}  # never an alias of an argument, even in the same memory
        self.outside: dict[fx.Node, Tensor] = {}
        self.in_backward = False
        self._nodes: Any = WeakTensorKeyDictionary()
        self._places: dict[Any, fx.Node] = {}  # by memory: some aliases are made without an op that is seen
        self._storages: dict[int, StorageWeakRef] = {}  # whose addresses are not given to others meanwhile
        self._seeds: dict[int, Number] = {}
        self._fixed: set[fx.Node] = set()  # values that are the same at every replay
        self._written: set[int] = set()  # memory of which that is not true any more
        self.paused = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record what this thread does inside."""
        if capture_hooks.here.recorder is not None:
            raise CaptureError("A captured function calls another one. Fix: capture the outer one only.")
        capture_hooks.here.recorder = self
        try:
            with _Ops(self), _Looks(self):
                yield
        finally:
            capture_hooks.here.recorder = None

    # ---- tensors and their nodes -------------------------------------------------------------------------

    def enter(self, x: Tensor) -> fx.Node:
        """Take `x` for something that was there before."""
        before = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
        with self.graph.inserting_after(before) if before is not None else self.graph.inserting_before(self._first()):
            node = self.graph.placeholder(f"outside_{len(self.outside)}")
        self.outside[node] = x
        self._nodes[x] = node
        self._stands(x, node)
        return node

    def _first(self) -> fx.Node | None:
        return next(iter(self.graph.nodes), None)

    def node_of(self, x: Tensor) -> fx.Node:
        """The node that gave `x`; a placeholder where nothing here did."""
        node = self.known(x)
        if node is not None:
            return node
        with DisableTorchFunctionSubclass():
            base = x._base
            if base is not None and _place(base) == _place(x):
                return self.node_of(base)
            inside = x.requires_grad and not x.is_leaf
        if inside:
            raise CaptureError(
                f"A captured function uses a tensor of shape {tuple(x.shape)} that was computed outside of it and "
                f"requires grad. Fix: pass it as an argument."
            )
        return self.enter(x)

    def known(self, x: Tensor) -> fx.Node | None:
        node: fx.Node | None = self._nodes.get(x)
        if node is None and id(x) not in self._reached:
            node = self._places.get(_place(x))
        return node

    def _stands(self, x: Tensor, node: fx.Node) -> None:
        place = _place(x)
        if place is not None:
            self._places[place] = node
            with DisableTorchFunctionSubclass():
                self._storages.setdefault(place[0], StorageWeakRef(x.untyped_storage()))

    def _gave(self, node: fx.Node, x: Tensor, fixed: bool) -> None:
        if self._nodes.get(x) is None:  # an op in place gives its operand back
            self._nodes[x] = node
        self._stands(x, self._nodes[x])
        if x.layout == torch.strided:
            node.meta["shape"] = tuple(x.shape)
        if fixed:
            self._fixed.add(node)

    def _is_fixed(self, x: Tensor) -> bool:
        return self.known(x) in self._fixed and _storage(x) not in self._written

    def _unfix(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Something that differs from replay to replay may have been written into these, and into views of them."""
        self._written.update(_storage(x) for x in _tensors(tuple(args), kwargs))

    def aliased(self, nodes: list[fx.Node | None]) -> list[fx.Node | None]:
        """The nodes of results, each a tensor of its own: no parameter or buffer, and none of the others."""
        own: list[fx.Node | None] = []
        for node in nodes:
            if node is not None and (node.op == "placeholder" or node in own):
                node = self.graph.call_function(aten.detach.default, (node,))
            own.append(node)
        return own

    def check_outside(self) -> None:
        """Raise where something from outside has become part of the autograd graph of this call."""
        for x in self.outside.values():
            if x.grad_fn is not None:
                self.refuse("writing what requires grad into a tensor from outside")

    # ---- what is recorded ------------------------------------------------------------------------------------

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an aten op, and record it."""
        if self.paused:
            return func(*args, **kwargs)
        self._check(func, args, kwargs)
        operands = [self.node_of(x) for x in _tensors(args, kwargs)]
        if func in SAME:
            out = func(*args, **kwargs)
            self._nodes[out] = operands[0]
            return out
        constant = func is aten.lift_fresh.default
        if constant:  # changed in place, it must be a new one at every replay
            func = aten.clone.default
        changes = func._schema.is_mutable
        fixed = constant or (not _draws(func, args, kwargs) and all(map(self._is_fixed, _tensors(args, kwargs))))
        mapped, named = pytree.tree_map(self._as_argument, (args, kwargs))
        out = func(*args, **kwargs)
        if changes and not fixed:
            self._unfix(args, kwargs)
        self._results(self.graph.call_function(func, tuple(mapped), named), out, fixed)
        return out

    def _as_argument(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.node_of(x)
        if isinstance(x, Number):
            raise CaptureError(f"A seed that is new at every replay became a number of an op. {FIX}.")
        return x

    def _results(self, node: fx.Node, out: Any, fixed: bool) -> None:
        if isinstance(out, Tensor):
            self._gave(node, out, fixed)
        elif isinstance(out, tuple | list):
            for i, x in enumerate(out):
                if isinstance(x, Tensor) and self._nodes.get(x) is None:
                    self._gave(self.graph.call_function(element, (node, i)), x, fixed)

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func.name()
        if not self.in_backward and torch._C._current_graph_task_id() != -1:
            raise CaptureError(
                "backward() runs inside a captured function. Fix: return the loss, and call backward() on what the "
                "captured function returns."
            )
        dynamic = torch.Tag.dynamic_output_shape in func.tags
        if func in INDEXED:
            dynamic = any(x.dtype in (torch.bool, torch.uint8) for x in args[1] if x is not None)
        by_values = dynamic or torch.Tag.data_dependent_output in func.tags
        if by_values and not all(map(self._is_fixed, _tensors(args, kwargs))):
            looks = func is aten._local_scalar_dense.default
            self.refuse("item(), or an `if`" if looks else f"{name}, whose result or its shape depends on values")
        if func.namespace not in ("aten", "prims", "prim"):
            self.refuse(f"{name}, which is not an op of torch")
        if func is aten.mkldnn_rnn_layer.default and torch.is_grad_enabled():  # keeps nothing for backward without grad
            self.refuse(f"{name}; torch.backends.mkldnn.flags(enabled=False) around the call avoids it")
        if self.in_backward and _draws(func, args, kwargs):
            self.refuse(f"{name} in backward, whose numbers a replay would not repeat")

    def look(self, name: str, x: Any) -> None:
        """Python is about to see the values of a tensor."""
        if not self.paused and isinstance(x, Tensor) and self.known(x) is not None and not self._is_fixed(x):
            self.refuse(f"{LOOKS[name]}, which shows values to Python")

    def met(self, what: str) -> None:
        if not self.paused:
            self.refuse(what)

    def refuse(self, what: str) -> NoReturn:
        raise CaptureError(
            f"capture: a replay cannot repeat {what}. Fix: do it outside of the captured function, or do not "
            f"capture it."
        )

    def whole(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.paused:
            return function(*args, **kwargs)
        call, operands = _of_operands(function, args, kwargs)
        return applied(_Whole, self, call, function.__name__, *operands)

    def unseen(self, name: str, call: Callable[..., Any], operands: Sequence[Any]) -> tuple[fx.Node, Any]:
        """Run and record `call` of tensors, or of values whose nodes come beside them, as one."""
        nodes = [x[0] if isinstance(x, tuple) else self.node_of(x) for x in operands]
        values = [x[1] if isinstance(x, tuple) else x for x in operands]
        before, self.paused = self.paused, True
        try:
            out = call(*values)
        finally:
            self.paused = before
        node = self.graph.call_function(_named(call, name), tuple(nodes))
        node.meta["leaf"] = name
        self._unfix(values, {})
        return node, out

    def part(self, node: fx.Node, i: int, x: Any) -> fx.Node:
        """Element `i` of what `node` gave, which is `x`."""
        part = self.graph.call_function(element, (node, i))
        if isinstance(x, Tensor):
            self._gave(part, x, False)
        return part

    def leaf(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.paused:
            return function(*args, **kwargs)
        call, operands = _of_operands(function, args, kwargs)
        node, out = self.unseen(function.__name__, call, list(map(_operand, operands)))
        if not isinstance(out, int) or isinstance(out, bool):
            self._results(node, out, False)
            return out
        if out in self._seeds:  # drawn again: backward repeats what an activation checkpoint threw away
            self.graph.erase_node(node)
            return self._seeds[out]
        number = self._seeds[out] = Number(out)
        number.node = node
        return number


def _of_operands(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """`function` of what differs between replays, which is let go of here, and that; the rest is what it was."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, x in enumerate(flat) if isinstance(x, Tensor | Number)]
    operands = [flat[i] for i in places]
    rest = [None if isinstance(x, Tensor | Number) else x for x in flat]

    def call(*operands: Any) -> Any:
        values = list(rest)
        for i, x in zip(places, operands, strict=True):
            values[i] = x
        args, kwargs = pytree.tree_unflatten(values, spec)
        return function(*args, **kwargs)

    return call, operands


def _operand(x: Any) -> Any:
    return (x.node, int(x)) if isinstance(x, Number) else x


def _named(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """What the code of a graph calls it."""
    call.__name__, call.__module__ = name, "shardwise"
    return call


class _Whole(torch.autograd.Function):
    """A function that decides by values, and its backward: a leaf each."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, run: Callable[..., Tensor], name: str, *tensors: Tensor) -> Tensor:
        wanted = [x.requires_grad for x in tensors]

        def begin(*given: Tensor) -> tuple[Any, Tensor]:
            with torch.enable_grad():
                inner = [x.detach().requires_grad_(w) for x, w in zip(given, wanted, strict=True)]
                end = run(*inner)
            return (end, [x for x in inner if x.requires_grad]), end.detach()

        node, (ctx.state, out) = tape.unseen(name, begin, tensors)
        ctx.tape, ctx.wanted, ctx.name = tape, wanted, name
        ctx.node = tape.part(node, 0, ctx.state)
        tape.part(node, 1, out)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        def finish(state: tuple[Tensor, list[Tensor]], cotangent: Tensor) -> tuple[Tensor | None, ...]:
            end, inner = state
            with torch.enable_grad():
                return torch.autograd.grad(end, inner, cotangent, retain_graph=True, allow_unused=True)

        tape: Tape = ctx.tape
        node, found = tape.unseen(f"{ctx.name}_backward", finish, [(ctx.node, ctx.state), cotangents[0]])
        for i, x in enumerate(found):
            tape.part(node, i, x)
        every = iter(found)
        return None, None, None, *[next(every) if w else None for w in ctx.wanted]


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply it to the local tensors that DTensors are; `Function.apply` would take them for whole ones."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op takes random numbers from torch's generators; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return not any(a.name == "dropout_p" and given.get(a.name, 0.0) == 0.0 for a in func._schema.arguments)


def _place(x: Tensor) -> Any:
    """What memory a tensor shows, and how."""
    with DisableTorchFunctionSubclass():
        if x.layout != torch.strided:
            return None
        where = x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), strides(x), x.dtype
        return (*where, x.is_conj(), x.is_neg())


def _storage(x: Tensor) -> int:
    with DisableTorchFunctionSubclass():
        return x.untyped_storage()._cdata if x.layout == torch.strided else id(x)


class _Ops(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(t.__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a wrapper that takes the op apart first
        with DisableTorchFunctionSubclass():
            return self.tape.op(func, args, kwargs)


class _Looks(TorchFunctionMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in LOOKS and args:
            self.tape.look(name, args[0])
        if DTensor in types and torch._C._is_torch_function_enabled():  # its rules may look as well
            with self:
                return DTensor.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
